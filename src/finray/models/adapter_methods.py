"""The kinds of LoRA adapter: their PEFT settings, and the initial values of their matrices.

Initial values depend only on the names, the seed and the base weights. So an adapter is the same however and wherever
the model is built, with any strategy and any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from finray.config.extensions import load_named
from finray.errors import ModelError
from finray.models.saved_layout import PISSA_RESIDUAL

# Subspace iterations for the principal part (Halko et al. 2011), with oversampling: twice the rank plus a constant.
_ITERATIONS = 8
_EXTRA = 8


def kaiming_a_zero_b(kind: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """PEFT's default: A from Kaiming's uniform distribution and B zero, so that the adapter initially changes nothing.

    Args:
        kind: ``A``, ``B``, ``embedding_A`` or ``embedding_B``.
        shape: of the matrix.
        generator: random generator of the matrix, seeded by its name and the run's seed.

    Returns:
        The initial value, fp32.
    """
    value = torch.zeros(shape)
    if kind == "A":
        torch.nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
    elif kind == "embedding_B":
        value.normal_(generator=generator)
    return value


@dataclass(frozen=True, slots=True)
class AdapterMethod:
    """A kind of LoRA adapter, selected by ``adapter.method``.

    Attributes:
        options: fields of ``peft.LoraConfig``, besides rank, alpha, dropout and targets.
        first_value: initial value of a matrix, given its kind, shape and generator; the same on every rank and
            strategy.
        is_pissa: whether the matrices are initialized with the principal parts of the base weights (Meng et al. 2024).
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    first_value: Callable[[str, torch.Size, torch.Generator], torch.Tensor] = kaiming_a_zero_b
    is_pissa: bool = False


LORA = AdapterMethod()
RSLORA = AdapterMethod({"use_rslora": True})
DORA = AdapterMethod({"use_dora": True})
PISSA = AdapterMethod(is_pissa=True)


def adapter_method(name: str) -> AdapterMethod:
    """The method with this name, from ``adapter.method``. Raises ConfigError: there is none."""
    method: AdapterMethod = load_named("finray.adapter_methods", name, where="adapter.method")
    return method


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """The random generator of the initial values of a tensor with this name."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") % 2**63)


def principal_part(weight_OI: torch.Tensor, rank: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices B (O, r) and A (r, I), fp32, whose product is the best rank-r approximation of a weight.

    Both include the square roots of the singular values. Subspace iteration finds the directions, because a full SVD of
    a large weight takes minutes; its random start comes from ``random``, and signs are fixed, so that results on
    different machines differ only by rounding.
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
    """A function that returns the initial value (fp32) of the tensor ``<module>.lora_...`` with a given shape.

    Args:
        method: the kind of adapter.
        seed: of everything random.
        scaling: scaling factor of a module's product B A, by the module's name.
        base: a module's base weight (out, in), by the module's name; only called for DoRA and PiSSA.
    """

    # Tensors of the same module are requested consecutively.
    @lru_cache(maxsize=1)
    def principal(module: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = base(module)
        if rank > min(weight.shape):
            size = " x ".join(map(str, weight.shape))
            raise ModelError(
                f"PiSSA of rank {rank} needs matrices that are as large: `{module}` is {size}",
                where="adapter.rank",
                repair=f"set it to {min(weight.shape)} or less, or leave this layer out of adapter.target_modules",
            )
        up, down = principal_part(weight, rank, seeded_generator(seed, module))
        root = scaling(module) ** 0.5
        return up / root, down / root

    def first_value(name: str, shape: torch.Size) -> torch.Tensor:
        module, _, kind = name.partition(".lora_")
        if kind.startswith("magnitude_vector."):
            norms: torch.Tensor = torch.linalg.norm(base(module).float(), dim=1)
            return norms
        if method.is_pissa and kind.startswith(("A.", "B.")):
            up, down = principal(module, shape[0] if kind.startswith("A.") else shape[1])
            if kind.startswith("A."):
                return down
            return -up if f".{PISSA_RESIDUAL}." in name else up
        return method.first_value(kind.partition(".")[0], shape, seeded_generator(seed, name))

    return first_value
