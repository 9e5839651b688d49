"""Parameters of several shapes, and gradients for them; imports little, because it is for spawned processes too."""

from __future__ import annotations

from typing import Any

import torch

from finray.config.schema import TrainConfig

SHAPES = {"matrix": (96, 64), "wide": (3, 200), "stack": (2, 8, 16), "vector": (64,), "embed": (50, 16)}
ROLES = {"embed": "embedding"}


def train_config(kind: str, **fields: Any) -> TrainConfig:
    return TrainConfig(optimizer=kind, **{"learning_rate": 0.02, "weight_decay": 0.1, **fields})


def new_parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in SHAPES.items()}
