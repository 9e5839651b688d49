"""Every strategy gives the curve of one process: 16 steps with accumulation, clipping, and a last batch of one row.

Dropout, LoRA+, weight decay and Adam's numbers are no defaults: a strategy that drives the optimizer itself could
forget them. `tests/training/test_against_plain.py` holds the one process to a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain, changed

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    **{f"zero{stage}": {"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
}
TRAINED: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"adapter.method": "none", "train.learning_rate": 0.002},
    "dora": {"adapter.method": "dora"},
    "pissa": {"adapter.method": "pissa"},
    "4bit": {"model.quantization": "4bit"},
}
# All weights under ZeRO: test_deepspeed.py. The others under ddp and fsdp have tests of their own; what ZeRO-3 cannot
# is refused by name.
CASES = [*(("lora", strategy) for strategy in STRATEGIES), ("full", "ddp"), ("full", "fsdp")]
CASES += [("dora", "zero3"), ("pissa", "zero3"), ("4bit", "zero2")]
STEPS = 16
NORM = 0.8
ADAM = {"weight_decay": 0.2, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-3}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_run: Callable[..., Plain]) -> Path:
    """Steps of three rows, one at a time: of two workers one has two and the other one, and then none."""
    folder = tmp_path_factory.mktemp("runs")
    # 46 rows in 16 steps.
    short = {"max_steps": None, "epochs": 2, "global_batch_size": 3, "micro_batch_size": 1, "max_grad_norm": NORM}
    adapter = {"dropout": 0.2, "lora_plus_ratio": 3.0}
    changes = {"train": {**short, **ADAM}, "adapter": adapter, "data.packing": False, "checkpoint.every_steps": 100}
    lora = tiny_run(changes, rows=23)
    plain = {trained: changed(lora, changes) for trained, changes in TRAINED.items()}
    # As it would be without clipping, or with a step of another size: the comparison must see it.
    unlike = {
        "unclipped": {"train.max_grad_norm": None},
        "larger": {"train.global_batch_size": 4},
        "one rate": {"adapter.lora_plus_ratio": 1.0},
        "other masks": {"adapter.dropout": 0.21},
        "undecayed": {"train.weight_decay": 0.0},
    }
    for name, one in (plain | {name: changed(lora, changes) for name, changes in unlike.items()}).items():
        runs.run_alone(one, folder / name)
    jobs = [
        (changed(plain[trained], {"parallel": STRATEGIES[strategy]}), folder / f"{trained}-{strategy}")
        for trained, strategy in CASES
    ]
    run_all(jobs, world_size=2)
    return folder


@pytest.mark.parametrize(("trained", "strategy"), CASES)
def test_the_curve_is_that_of_one_process(done: Path, trained: str, strategy: str) -> None:
    one, two = done / trained, done / f"{trained}-{strategy}"
    runs.assert_same_curve(two, one)
    assert [len(samples) for samples in runs.values(two, "samples")] == [3] * (STEPS - 1) + [1]
    # Some steps were clipped.
    assert max(runs.values(one, "grad_norm")) > NORM
    assert runs.values(one, "loss")[-2] < runs.values(one, "loss")[0]


@pytest.mark.parametrize("unlike", ["unclipped", "larger", "one rate", "other masks", "undecayed"])
def test_the_comparison_sees_another_arithmetic(done: Path, unlike: str) -> None:
    assert runs.values(done / unlike, "loss")[5:12] != pytest.approx(runs.values(done / "lora", "loss")[5:12], rel=1e-4)
