"""Each objective of preferences, whatever is trained and however it is shared out: the curve of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_curves import STRATEGIES, TRAINED
from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain, changed
from tests.training.test_preference_runs import SOURCES
from tests.training.test_reward_runs import pair

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "length_normalized": True, "chosen_weight": 0.2},
    "kto": {"beta": 0.3, "desirable_weight": 1.3},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 1.5, "gamma": 0.7},
    "reward": {"margins": True, "centering": 0.07},
}
# ZeRO-3 refuses quantized weights by name.
SHARED = [(kind, way) for kind in ("lora", "4bit", "full") for way in ("ddp", "fsdp", "zero2", "zero3")]
SHARED.remove(("4bit", "zero3"))
# Each objective, each kind of weights and each strategy is in the gate; a night has all, and kills.
GATE = [("dpo", "full", "zero3"), ("kto", "4bit", "fsdp"), ("orpo", "lora", "zero2"), ("simpo", "full", "ddp")]
GATE += [("reward", "lora", "fsdp")]
NIGHT = {one: [(one, *shared) for shared in SHARED] for one in OBJECTIVES}
STEPS, CUT = 5, 3
NAMES = ("eval_loss", "accuracy", "margin")


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Steps of three pairs, one at a time: of two workers one has two and the other one."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, numbers in {"train": range(14), "eval": range(14, 19)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair(number)) + "\n" for number in numbers))
    own: dict[str, Any] = {f"data.{key}": str(folder / f"{name}.jsonl") for key, name in SOURCES.items()}
    short = {"max_steps": STEPS, "global_batch_size": 3, "micro_batch_size": 1, "max_grad_norm": 0.5}
    own |= {"train": {**short, "adam_epsilon": 1e-3}, "data.packing": False}
    return tiny_run(own | {"adapter.dropout": 0.2, "checkpoint.every_steps": CUT, "evaluation.every_steps": STEPS})


@pytest.mark.parametrize(
    ("cells", "killed"),
    [
        pytest.param(GATE, False, id="gate"),
        *(pytest.param(NIGHT[one], True, id=one, marks=pytest.mark.nightly) for one in NIGHT),
    ],
)
def test_the_curve_is_that_of_one_process_and_a_killed_run_goes_on_with_it(
    plain: Plain, tmp_path: Path, cells: list[tuple[str, str, str]], killed: bool
) -> None:
    def made(objective: str, trained: str, strategy: str = "ddp") -> Plain:
        own = {"train.objective": objective, "preference": OBJECTIVES[objective], "parallel": STRATEGIES[strategy]}
        return changed(plain, own, TRAINED[trained])

    def assert_same(found: Path, one: Path) -> None:
        assert (found / f"checkpoint-{STEPS:06d}").is_dir()
        runs.assert_same_curve(found, one, rel=1e-5)
        its, ours = (runs.records(folder, "eval")[-1] for folder in (found, one))
        assert [its[name] for name in NAMES] == pytest.approx([ours[name] for name in NAMES], rel=1e-5, abs=1e-6)

    alone, shared = ({cell: tmp_path / "-".join(cell[:parts]) for cell in cells} for parts in (2, 3))
    for folder, (objective, trained, _) in {folder: cell for cell, folder in alone.items()}.items():
        runs.run_alone(made(objective, trained), folder)
    run_all([(made(*cell), shared[cell]) for cell in cells], world_size=2)
    for cell in cells:
        assert_same(shared[cell], alone[cell])
    if not killed:
        return
    again, wider, alike = (
        {cell: runs.cut(begun[cell], shared[cell].with_suffix(end), step=CUT) for cell in cells}
        for begun, end in ((shared, ".again"), (alone, ".wider"), (shared, ".alone"))
    )
    run_all([(made(*cell), group[cell]) for group in (again, wider) for cell in cells], world_size=2)
    for cell in cells:
        # The control: with the default numbers of the objective the curve is another.
        other = alone[cell].with_suffix(".default")
        if not other.exists():
            runs.run_alone({**made(*cell[:2]), "preference": {}}, other)
        default = runs.values(other, "loss")
        assert default[1:] != pytest.approx(runs.values(alone[cell], "loss")[1:], rel=1e-3)
        runs.run_alone(made(*cell[:2]), alike[cell])
        for found in (again, wider, alike):
            assert_same(found[cell], alone[cell])
        assert runs.trace(again[cell]) == runs.trace(shared[cell])
