"""The kinds of LoRA adapter: what of PEFT's configuration makes them, and how their matrices begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from finray.config.extensions import load_named


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
