"""What each parameter's learning rate and decay are."""

from __future__ import annotations

import pytest
import torch

from finray.config.schema import TrainConfig
from finray.training.optim.optimizer import Optimizer, param_group_options

TRAIN = TrainConfig(learning_rate=0.01, weight_decay=0.1, adam_epsilon=1e-12)


@pytest.mark.parametrize(
    ("name", "dimensions", "role", "expected"),
    [
        ("layers.0.q_proj.lora_A.default.weight", 2, "", (1.0, 0.1)),
        ("layers.0.q_proj.lora_B.default.weight", 2, "", (16.0, 0.1)),
        ("layers.0.q_proj.lora_magnitude_vector.default.weight", 1, "", (1.0, 0.0)),
        ("layers.0.norm.weight", 1, "norm", (1.0, 0.0)),
        # A norm of each head has a row for each.
        ("layers.0.k_norm.weight", 2, "norm", (1.0, 0.0)),
        ("embed_tokens.weight", 2, "embedding", (1.0, 0.1)),
        ("lm_head.weight", 2, "head", (1.0, 0.1)),
    ],
)
def test_treatment(name: str, dimensions: int, role: str, expected: tuple[float, float]) -> None:
    assert param_group_options(name, dimensions, TRAIN, lora_plus_ratio=16.0, role=role) == expected


def test_b_matrices_move_by_the_ratio() -> None:
    """The first update of Adam is the learning rate itself, whatever the gradient."""
    parameters = {
        name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("x.lora_A.default.weight", "x.lora_B.default.weight")
    }
    optimizer = Optimizer(parameters, TRAIN.model_copy(update={"weight_decay": 0.0}), lora_plus_ratio=4.0)
    for parameter in parameters.values():
        parameter.grad = torch.full((2, 2), 3.0)
    optimizer.step(0.005)
    moved = [1.0 - float(parameter.detach()[0, 0]) for parameter in parameters.values()]
    assert moved == pytest.approx([0.005, 0.02], rel=1e-4)
