"""Parameters of several shapes, and gradients for them; imports little, because it is for spawned processes too."""

from __future__ import annotations

from typing import Any

import torch

from finray.config.schema import TrainConfig

SHAPES = {"matrix": (96, 64), "wide": (3, 200), "stack": (2, 8, 16), "vector": (64,), "embed": (50, 16)}
ROLES = {"embed": "embedding"}


def train_config(kind: str, **fields: Any) -> TrainConfig:
    if kind == "bf16-true":
        kind, fields = "adamw", {"precision": kind, **fields}
    return TrainConfig(optimizer=kind, **{"learning_rate": 0.02, "weight_decay": 0.1, **fields})


def new_parameters(kind: str = "adamw") -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator).to(dtype_of(kind)) for name, shape in SHAPES.items()}
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


def gradients(step: int, kind: str = "adamw") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: (torch.randn(shape, generator=generator) * 0.3).to(dtype_of(kind)) for name, shape in SHAPES.items()}


def dtype_of(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "bf16-true" else torch.float32
