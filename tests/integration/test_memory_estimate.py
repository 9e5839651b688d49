"""The estimate of a worker's memory, beside the measured peak of real runs in processes of their own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finray.hardware import cpu_has_bf16

# Quick ones of the benchmark's settings: all weights of a small model, two workers, with shares and without, weights in
# bf16 alone, and an adapter on the real one.
CASES = ["two-layers-full-2-workers", "wide-bf16-true", "smollm2-lora-checkpointing", "fsdp-full-2-workers"]
CASES += ["pairs-orpo-full", "pairs-simpo-lora", "pairs-dpo-full-in-step", "pairs-dpo-lora-named"]
CASES += ["pairs-reward-full", "answers-kto-full"]
_CHEAPER: dict[str, dict[str, Any]] = {
    # Products in bf16 take ten times as long on CPUs that have no instructions for them; most weights are the head's.
    **({} if cpu_has_bf16() else {"wide-bf16-true": {"model": "wide-layer", "max_length": 48, "rows": 4}}),
    "smollm2-lora-checkpointing": {"precision": "fp32", "max_length": 128, "rows": 4},
    # Two steps under FSDP, which takes long to gather: in the second all is there that there will be.
    "fsdp-full-2-workers": {"model": "six-layers", "rows": 8},
}
# The median of three counts: two workers under DDP hold a bucket of gradients at their peak or do not. 925 to 1100 MiB
# were seen, and no estimate is within 15 % of both.
_VARIES = ("two-layers-full-2-workers",)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the process and its heap are Linux's"),
]
Check = Callable[[dict[str, Any]], bool]
# What was measured of a setting, by its name.
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def made() -> Runs:
    """Those of all tests of this file."""
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has models and rows, which are made once."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def holds(
    benchmark_module: Callable[[str], Any], smollm2_dir: Path, folder: Path, made: Runs
) -> Callable[[str, Check], bool]:
    """Whether something holds for a setting of the benchmark: of the run with the median of what is measured.

    A check is given estimate, measurement, and the parts of the estimate, in bytes, and holds for one range of
    measurements. So where it holds for two of three runs it holds for the median, and the third is not made.
    """

    def run(case: str) -> dict[str, Any]:
        memory, bench = benchmark_module("memory"), benchmark_module("case").Bench
        setting = next(one for one in memory.SETTINGS if one.name == case)
        setting = replace(setting, **_CHEAPER.get(case, {}))
        # Else it would go on with the one before.
        shutil.rmtree(folder / "runs", ignore_errors=True)
        return dict(memory.measure(bench(model=smollm2_dir, folder=folder, peer_python=""), setting))

    def decide(case: str, check: Check) -> bool:
        own, most = made.setdefault(case, []), 3 if case in _VARIES else 1
        while len(own) < most:
            if sum(map(check, own)) > most // 2:
                return True
            own.append(run(case))
        return check(sorted(own, key=lambda run: float(run["measured"]))[most // 2])

    return decide


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_15_percent(holds: Callable[[str, Check], bool], made: Runs, case: str) -> None:
    assert holds(case, lambda run: abs(run["estimate"] / run["measured"] - 1) <= 0.15), made[case]
    assert all(run["estimate"] == sum(run["parts"].values()) for run in made[case])


def test_state_that_is_forgotten_would_be_seen(holds: Callable[[str, Check], bool]) -> None:
    def seen(run: dict[str, Any]) -> bool:
        without = run["estimate"] - run["parts"]["optimizer"] - run["parts"]["gradients"]
        return bool(without / run["measured"] < 0.85)

    assert holds("fsdp-full-2-workers", seen)


def with_state(run: dict[str, Any]) -> float:
    """The estimate, if weights, gradients and optimizer state were twice as large, beside what is measured."""
    state = sum(run["parts"][part] for part in ("weights", "gradients", "optimizer"))
    return float((run["estimate"] + state) / run["measured"])


def test_shares_that_are_not_shared_would_be_seen(holds: Callable[[str, Check], bool]) -> None:
    """Two workers under FSDP have half of weights, gradients and optimizer state each, and are measured to."""
    assert holds("fsdp-full-2-workers", lambda run: with_state(run) > 1.4)


def test_a_second_model_that_is_forgotten_would_be_seen(holds: Callable[[str, Check], bool]) -> None:
    def seen(run: dict[str, Any]) -> bool:
        return bool((run["estimate"] - run["parts"]["reference"]) / run["measured"] < 0.85)

    assert holds("pairs-dpo-lora-named", seen)


def test_an_fp32_copy_of_the_weights_would_be_seen(holds: Callable[[str, Check], bool]) -> None:
    """Weights, gradients and moments are in bf16, and are measured to take no more."""
    assert holds("wide-bf16-true", lambda run: with_state(run) > 1.1)
