"""The kinds of LoRA adapter: what of PEFT's configuration makes them, and how their matrices begin.

First values are functions of the names, the seed and the base weights alone. So an adapter is the same however and
wherever the model is built, on any strategy and any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from finray.config.extensions import load_named
from finray.models.saved_layout import PISSA_RESIDUAL

# Power iterations of the search for principal parts (Halko et al. 2011), with twice the rank and some more directions.
_ITERATIONS = 8
_EXTRA = 8


def kaiming_a_zero_b(kind: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """PEFT's default: A by Kaiming's uniform distribution and B zero, so that the adapter begins as no change.

    Args:
        kind: ``A``, ``B``, ``embedding_A`` or ``embedding_B``.
        shape: of the matrix.
        generator: of the matrix: a function of its name and the run's seed.

    Returns:
        The first value, fp32.
    """
    value = torch.zeros(shape)
    if kind == "A":
        torch.nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
    elif kind == "embedding_B":
        value.normal_(generator=generator)
    return value


@dataclass(frozen=True, slots=True)
class AdapterMethod:
    """A kind of LoRA adapter, as ``adapter.method`` names it.

    Attributes:
        options: fields of ``peft.LoraConfig``, beside rank, alpha, dropout and targets.
        first_value: of a matrix, given its kind, shape and generator; the same on every rank and under every strategy.
        is_pissa: whether the matrices begin as the principal parts of the base weights (Meng et al. 2024).
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    first_value: Callable[[str, torch.Size, torch.Generator], torch.Tensor] = kaiming_a_zero_b
    is_pissa: bool = False


LORA = AdapterMethod()
RSLORA = AdapterMethod({"use_rslora": True})
DORA = AdapterMethod({"use_dora": True})
PISSA = AdapterMethod(is_pissa=True)


def adapter_method(name: str) -> AdapterMethod:
    """The method that ``adapter.method`` names.

    Raises:
        ConfigError: there is none.
    """
    method: AdapterMethod = load_named("finray.adapter_methods", name, where="adapter.method")
    return method


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


def first_values(
    method: AdapterMethod,
    *,
    seed: int,
    scaling: Callable[[str], float],
    base: Callable[[str], torch.Tensor],
) -> Callable[[str, torch.Size], torch.Tensor]:
    """A function that gives the first value (fp32) of the tensor ``<module>.lora_...`` of a shape.

    Args:
        method: the kind of adapter.
        seed: of everything random.
        scaling: of a module's product B A, by the module's name.
        base: a module's base weight (out, in), by the module's name; asked for by DoRA and PiSSA only.
    """

    def generator(name: str) -> torch.Generator:
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") % 2**63)

    # Tensors of one module come together.
    @lru_cache(maxsize=1)
    def principal(module: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        up, down = principal_part(base(module), rank, generator(module))
        root = scaling(module) ** 0.5
        return up / root, down / root

    def first_value(name: str, shape: torch.Size) -> torch.Tensor:
        module, _, kind = name.partition(".lora_")
        if kind.startswith("magnitude_vector."):
            norms: torch.Tensor = torch.linalg.norm(base(module).float(), dim=1)
            return norms
        if method.is_pissa and kind.startswith(("A.", "B.")):
            up, down = principal(module, min(shape))
            if kind.startswith("A."):
                return down
            return -up if f".{PISSA_RESIDUAL}." in name else up
        return method.first_value(kind.partition(".")[0], shape, generator(name))

    return first_value
