"""Evaluation during training: the numbers of `inline`, on the right steps, whenever they come, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir
from finray.config.resolved import PreparedRun
from finray.training import loop as loop_module
from finray.training.assemble import evaluate_checkpoint
from finray.training.evaluator import CheckpointScores
from finray.training.loop import Loop
from tests.support import runs
from tests.support.runs import Plain, changed

ASYNC = {"evaluation.mode": "async"}


class Beside:
    """Evaluates in this process; a result comes so many questions after it was asked for.

    Args:
        plain: the run's config.
        delays: of each evaluation in turn; the last one of all others.
        change: what becomes of a result.
    """

    def __init__(
        self,
        plain: Plain,
        *delays: int,
        change: Callable[[CheckpointScores], CheckpointScores | None] = lambda found: found,
    ) -> None:
        self.config = runs.config_of(plain)
        self.submitted: list[int] = []
        self.most = 0
        self._delays, self._change, self._known = [*delays], change, PreparedRun("", None)  # type: ignore[arg-type]
        self._out: deque[list[Any]] = deque()

    def __call__(self, known: PreparedRun) -> Beside:
        self._known = known
        return self

    def submit(self, step: int, checkpoint: Path | None) -> None:
        self.submitted.append(step)
        delay = self._delays[0] if len(self._delays) == 1 else self._delays.pop(0)
        self._out.append([delay, step, checkpoint])
        self.most = max(self.most, len(self._out))

    def results(self) -> Sequence[CheckpointScores]:
        come = []
        while self._out and self._out[0][0] <= 0:
            _, step, checkpoint = self._out.popleft()
            found = evaluate_checkpoint(self.config, self._known, step, checkpoint, device=torch.device("cpu"))
            if (changed := self._change(found)) is not None:
                come.append(changed)
        for one in self._out:
            one[0] -= 1
        return come

    def close(self) -> None:
        self._out.clear()


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    evaluation = {"every_steps": 2, "on_start": True, "max_rows": 4}
    changes = {"data.eval_ratio": 0.3, "adapter.dropout": 0.2, "evaluation": evaluation}
    # So that the loss falls, and rises again: the best checkpoint is not the last.
    return tiny_run({**changes, "train": {"max_steps": 10, "learning_rate": 0.05}}, model=dropout_model)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "inline"
    runs.run_alone(plain, run_dir)
    return run_dir


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_PAUSE_S", 0.0)


def beside(plain: Plain, run_dir: Path, *delays: int, **options: Any) -> Beside:
    plain = changed(plain, ASYNC)
    made = Beside(plain, *delays, **options)
    runs.run_alone(plain, run_dir, evaluator=made)
    return made


def evaluations(run_dir: Path) -> dict[int, tuple[float, float, int]]:
    """Of each step its loss, perplexity and number of targets; no step twice."""
    found = runs.records(run_dir, "eval")
    assert len({one["step"] for one in found}) == len(found)
    return {one["step"]: (one["eval_loss"], one["perplexity"], one["eval_targets"]) for one in found}


@pytest.mark.parametrize("delays", [(0,), (9, 1, 0, 5), (60,)])
def test_its_numbers_are_those_of_inline_and_the_training_is_the_same_to_the_bit(
    plain: Plain, inline: Path, tmp_path: Path, delays: tuple[int, ...]
) -> None:
    made = beside(plain, tmp_path / "run", *delays)
    assert made.submitted == [0, 2, 4, 6, 8, 10]
    assert evaluations(tmp_path / "run") == evaluations(inline)
    assert runs.trace(tmp_path / "run") == runs.trace(inline)
    for name in ("checkpoint-000010/adapter_model.safetensors", "checkpoint-000010/training_state/state.json"):
        one, other = (folder / name for folder in (tmp_path / "run", inline))
        if name.endswith("safetensors"):
            assert one.read_bytes() == other.read_bytes()
    stores = [CheckpointStore(folder) for folder in (tmp_path / "run", inline)]
    best = {store.best("eval_loss", "min") for store in stores}
    assert best == {min(evaluations(inline).items(), key=lambda one: (one[0] == 0, one[1]))[0]}
    final = RunDir(tmp_path / "run")
    assert final.make_final(best=("eval_loss", "min"), warn=pytest.fail) in best


def test_a_classifiers_numbers_are_those_of_inline_too(classifier_run: Callable[..., Plain], tmp_path: Path) -> None:
    evaluation = {"every_steps": 2, "on_start": True}
    plain = classifier_run({"train.max_steps": 4, "data.eval_ratio": 0.3, "evaluation": evaluation})
    runs.run_alone(plain, tmp_path / "inline")
    beside(plain, tmp_path / "async", 1)
    one, other = (
        [
            {key: value for key, value in record.items() if key not in ("time", "eval_seconds")}
            for record in runs.records(tmp_path / name, "eval")
        ]
        for name in ("async", "inline")
    )
    # The head that a run begins with is drawn, and is the same in another process.
    assert [record["step"] for record in one] == [0, 2, 4]
    assert {"eval_loss", "accuracy", "f1_macro", "confusion"} <= set(one[0])
    assert one == other
    assert runs.trace(tmp_path / "async") == runs.trace(tmp_path / "inline")


def test_the_numbers_of_another_step_would_be_seen(plain: Plain, inline: Path, tmp_path: Path) -> None:
    """The negative control of the test above."""
    before: list[CheckpointScores] = []

    def late(found: CheckpointScores) -> CheckpointScores:
        before.append(found)
        return replace(before[-2] if len(before) > 1 else found, step=found.step)

    beside(plain, tmp_path / "run", 1, change=late)
    assert evaluations(tmp_path / "run").keys() == evaluations(inline).keys()
    assert evaluations(tmp_path / "run") != evaluations(inline)


def test_without_the_wait_at_the_end_the_last_are_lost(
    plain: Plain, inline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the wait."""
    monkeypatch.setattr(Loop, "_wait_for_evaluations", lambda self, most: None)
    beside(plain, tmp_path / "run", 4)
    assert 10 not in evaluations(tmp_path / "run")
    # The next start has them done again, and then nothing is missing and nothing twice.
    monkeypatch.undo()
    monkeypatch.setattr(loop_module, "_PAUSE_S", 0.0)
    again = beside(plain, tmp_path / "run", 0)
    assert 10 in again.submitted
    assert evaluations(tmp_path / "run") == evaluations(inline)


@pytest.mark.parametrize("has_come", [False, True])
def test_a_run_that_was_killed_has_lost_evaluations_done_again_and_counts_none_twice(
    plain: Plain, inline: Path, tmp_path: Path, has_come: bool
) -> None:
    """At the checkpoint of step 6 its evaluation is out; the result comes before the run is killed, or not."""
    beside(plain, tmp_path / "whole", 0 if has_come else 60)
    cut = runs.cut(tmp_path / "whole", tmp_path / "cut", step=6)
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    if not has_come:
        (cut / "metrics.jsonl").write_text("".join(line for line in lines if '"eval"' not in line))
    again = beside(plain, cut, 0)
    assert again.submitted == ([8, 10] if has_come else [0, 2, 4, 6, 8, 10])
    assert evaluations(cut) == evaluations(inline)
    assert runs.trace(cut) == runs.trace(inline)


def test_results_that_tell_of_no_gain_end_the_run_at_the_next_step(plain: Plain, tmp_path: Path) -> None:
    stopping = changed(plain, {"evaluation.early_stopping": {"patience": 2, "min_gain": 100.0}})
    stopping = changed(stopping, {"checkpoint.asynchronous": False})
    # Of steps 2, 4 and 6; what says so comes while step 7 is at work.
    beside(stopping, tmp_path / "run", 0)
    (note,) = [one["message"] for one in runs.records(tmp_path / "run", "note")]
    assert "stopped early at step 7 of 10: eval_loss has not improved by more than 100 in 2 evaluations" in note
    assert CheckpointStore(tmp_path / "run").steps()[-1] == 7
    assert list(evaluations(tmp_path / "run")) == [0, 2, 4, 6]
    # It stays stopped, and a run whose results come after its end was not stopped by them.
    assert beside(stopping, tmp_path / "run", 0).submitted == []
