"""Packs of rows, tiny models that take them, and gradients to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from finray.data.sampling.collate import Batch, collate
from finray.models import attention
from tests.support import tiny


def rows(seed: int = 0) -> list[tuple[Any, Any]]:
    """Four rows of random tokens with their masks; the last token of each is trained."""
    generator = np.random.default_rng(seed)
    made = []
    for length in (9, 17, 4, 12):
        mask = (generator.random(length) < 0.6).astype(np.uint8)
        mask[-1] = 1
        made.append((generator.integers(3, 380, length).astype(np.int32), mask))
    return made


def packed_model(family: str) -> Any:
    """A tiny model of a family with finray's attention."""
    attention.register()
    model = tiny.build_model(family)
    model.set_attn_implementation(attention.NAME)
    return model.eval()


def batch_of(items: Sequence[tuple[Any, Any]]) -> Batch:
    """Rows as one pack."""
    return collate(list(items), range(len(items)))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """By name, of the parameters that have one."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def reference_gradients(
    family: str, items: Sequence[tuple[Any, Any]], device: str = "cpu"
) -> tuple[float, dict[str, torch.Tensor]]:
    """Plain Transformers, one row at a time, its own attention and its own full logits: summed loss and gradients."""
    model = tiny.build_model(family).eval().to(device)
    model.set_attn_implementation("eager")
    total = torch.zeros((), device=device)
    for ids, mask in items:
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(device)
        learned = torch.from_numpy(mask.astype(bool))[1:].to(device)
        logits = model(input_ids=tokens).logits[0, :-1].float()
        total = total + F.cross_entropy(logits[learned], tokens[0, 1:][learned], reduction="sum")
    total.backward()
    return total.item(), gradients(model)


def assert_equal_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Names are equal, and gradients up to the tolerance times the largest value of all."""
    assert actual.keys() == expected.keys()
    size = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((actual[name] - tensor).abs().max()) <= tolerance * size, name
