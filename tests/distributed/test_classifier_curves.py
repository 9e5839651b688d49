"""A classifier learns the same under every strategy: weights of classes, smoothing, a new head, a short last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from tests.support.group import run_all, run_group
from tests.support.runs import Plain, changed

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
}
TRAINED: dict[str, dict[str, Any]] = {"lora": {}, "full": {"adapter.method": "none", "train.learning_rate": 0.002}}
CASES = [(trained, strategy) for trained in TRAINED for strategy in ("ddp", "fsdp", "zero3")]
# Adapters at some layers: the others are frozen, and add their bias in their product.
ROUNDED: dict[str, Any] = {"train.precision": "bf16", "adapter.target_modules": ["query", "value"]}
STEPS = 15


@pytest.fixture(scope="module")
def plain(classifier_run: Callable[..., Plain]) -> Plain:
    short = {"max_steps": None, "epochs": 1, "global_batch_size": 3, "micro_batch_size": 1, "max_grad_norm": 0.8}
    changes = {"train": short, "adapter": {"dropout": 0.2}, "checkpoint.every_steps": 5, "data.eval_ratio": 0.2}
    return classifier_run(changes | {"evaluation.every_steps": 5}, rows=54)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in TRAINED.items():
        runs.run_alone(changed(plain, changes), folder / name)
    runs.run_alone(changed(plain, {"classification.class_weights": None}), folder / "unweighted")
    jobs = [
        (changed(plain, TRAINED[trained], {"parallel": STRATEGIES[strategy]}), folder / f"{trained}-{strategy}")
        for trained, strategy in CASES
    ]
    runs.run_alone(changed(plain, ROUNDED), folder / "rounded")
    for strategy in ("fsdp", "zero3"):
        jobs.append((changed(plain, ROUNDED, {"parallel": STRATEGIES[strategy]}), folder / f"rounded-{strategy}"))
    run_all(jobs, world_size=2)
    return folder


@pytest.mark.parametrize(("trained", "strategy"), CASES)
def test_the_curve_is_that_of_one_process(done: Path, trained: str, strategy: str) -> None:
    one, two = done / trained, done / f"{trained}-{strategy}"
    runs.assert_same_curve(two, one, rel=2e-4)
    assert [len(samples) for samples in runs.values(two, "samples")] == [3] * (STEPS - 1) + [1]
    for its, ours in zip(runs.records(one, "eval"), runs.records(two, "eval"), strict=True):
        assert its["confusion"] == ours["confusion"]
        its = {name: one for name, one in its.items() if name not in ("kind", "eval_seconds", "confusion")}
        assert its == pytest.approx({name: ours[name] for name in its}, rel=1e-3)
        assert its["eval_targets"] == 11
    # A sum over the ranks of places by row: AUROC is there, and it is the same.
    assert "roc_auc" in runs.records(two, "eval")[-1]


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_in_bf16_the_curve_is_that_of_one_process_too(done: Path, strategy: str) -> None:
    runs.assert_same_curve(done / f"rounded-{strategy}", done / "rounded", rel=0.02)


def test_the_comparison_sees_another_weight_of_a_class(done: Path) -> None:
    assert runs.values(done / "unweighted", "loss")[5:] != pytest.approx(
        runs.values(done / "lora", "loss")[5:], rel=1e-3
    )


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("ddp", "zero3"))]
)
def test_a_killed_group_goes_on_to_the_bit(done: Path, plain: Plain, strategy: str, tmp_path: Path) -> None:
    settings = changed(plain, {"parallel": STRATEGIES[strategy]})
    run_group(settings, tmp_path / "run", world_size=2, stop_after=7)
    run_group(settings, tmp_path / "run", world_size=2)
    assert runs.trace(tmp_path / "run") == runs.trace(done / f"lora-{strategy}")
