"""First values of an adapter: functions of the names, the seed and the base weights alone.

So an adapter is the same however and wherever the model is built, on any strategy and any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from finray.models.adapter_methods import AdapterMethod

# The principal part that a PiSSA adapter began with; frozen, and subtracted from what is trained. It is saved with the
# adapter, as one LoRA of twice the rank: otherwise every resume would need a decomposition that is the same to the bit,
# of weights that no rank holds whole. The price is a second low-rank product.
PISSA_RESIDUAL = "pissa_residual"
# Power iterations of the search for principal parts (Halko et al. 2011), with twice the rank and some more directions.
_ITERATIONS = 8
_EXTRA = 8


def generator(name: str, *, seed: int) -> torch.Generator:
    """Random numbers of a tensor."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") % 2**63)


def principal_part(weight_OI: torch.Tensor, rank: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices B (O, r) and A (r, I), fp32, whose product is the best approximation of a weight by rank r.

    Both carry the square roots of the singular values. The directions are found by subspace iteration, because a whole
    decomposition of a large weight takes minutes; what is random in it comes from ``random``, and signs are fixed, so
    that rounding on another machine changes the result by no more than rounding.
    """
    weight = weight_OI.float()
    width = min(2 * rank + _EXTRA, *weight.shape)
    right = torch.randn(weight.shape[1], width, generator=random)
    for _ in range(_ITERATIONS):
        left = torch.linalg.qr(weight @ right).Q
        right = torch.linalg.qr(weight.T @ left).Q
    u, s, vh = torch.linalg.svd(weight @ right, full_matrices=False)
    columns, rows = u[:, :rank], (vh @ right.T)[:rank]
    largest = columns.abs().argmax(dim=0, keepdim=True)
    root = s[:rank].sqrt() * columns.gather(0, largest).sign()[0]
    return columns * root, rows * root[:, None]


class AdapterInit:
    """First values of the tensors of an adapter, by name.

    Args:
        method: the kind of adapter.
        seed: of everything random.
        scaling: of a module's product B A, by the module's name.
        base: a module's base weight (out, in), by the module's name; asked for by DoRA and PiSSA only.
    """

    def __init__(
        self,
        method: AdapterMethod,
        *,
        seed: int,
        scaling: Callable[[str], float],
        base: Callable[[str], torch.Tensor],
    ) -> None:
        self._method = method
        self._seed = seed
        self._scaling = scaling
        self._base = base
        self._last: tuple[str, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, name: str, shape: torch.Size) -> torch.Tensor:
        """The first value (fp32) of the tensor ``<module>.lora_...``."""
        module, _, kind = name.partition(".lora_")
        if kind.startswith("magnitude_vector."):
            norms: torch.Tensor = torch.linalg.norm(self._base(module).float(), dim=1)
            return norms
        if self._method.is_pissa and kind.startswith(("A.", "B.")):
            up, down = self._principal(module, min(shape))
            if kind.startswith("A."):
                return down
            return -up if f".{PISSA_RESIDUAL}." in name else up
        return self._method.first_value(kind.partition(".")[0], shape, generator(name, seed=self._seed))

    def _principal(self, module: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """B and A of a module; kept until another module is asked for, since tensors of one come together."""
        if self._last is None or self._last[0] != module:
            up, down = principal_part(self._base(module), rank, generator(module, seed=self._seed))
            root = self._scaling(module) ** 0.5
            self._last = (module, up / root, down / root)
        return self._last[1:]
