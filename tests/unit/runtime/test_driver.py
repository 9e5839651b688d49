"""What the driver does around a training, without Ray: it forgets old failures, and makes the best checkpoint final."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir
from finray.records import RunSummary
from finray.runtime import driver, failures
from tests.support import runs, tiny


class Begun(Exception):
    """The preparation would begin now."""


def config(tmp_path: Path, **changes: Any) -> Any:
    rows = tiny.write_chat_rows(tmp_path, 4)
    return runs.config_of(runs.tiny_run(tmp_path / "model", rows, tmp_path / "out", changes))


def test_a_person_who_starts_a_run_again_has_its_failures_forgotten(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have mended since may not end the run before it tries."""
    (tmp_path / "model").symlink_to(tiny_model_dir)

    def begin(*arguments: Any, **options: Any) -> None:
        raise Begun

    monkeypatch.setattr(driver, "start_preparation", begin)
    asked = config(tmp_path)
    with pytest.raises(Begun):
        driver.train(asked)
    run_dir = tmp_path / "out" / "run"
    for attempt in ("a", "b"):
        failures.record(run_dir, failures.Failure(attempt, 4, "ValueError: no"))
    with pytest.raises(Begun):
        driver.train(asked)
    assert not (run_dir / "failures.jsonl").exists()


@pytest.mark.parametrize(("keep_best", "step"), [(True, 4), (False, 6)])
def test_the_best_checkpoint_becomes_final_where_it_is_kept(tmp_path: Path, keep_best: bool, step: int) -> None:
    run = RunDir(tmp_path / "out" / "run")
    store = CheckpointStore(run.path)
    for at, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
        scratch = store.begin(at)
        entries = store.fill(scratch, at, lambda folder, at=at: (folder / "weights").write_text(f"of step {at}"))  # type: ignore[misc]
        store.commit(scratch, at, entries, metrics={"eval_loss": loss})
    phases = {"load": 1.0, "train": 2.0, "evaluate": 3.0, "checkpoint": 4.0, "data_wait": 0.5}
    summary = RunSummary(6, 6, 10, 5, 2.0, 5.0, 3.0, 2.0, "eval_loss", 1.0, phases, (1,))
    connected = driver.Connected(None, True, None, None, {}, {}, 0.0, 7.0)  # type: ignore[arg-type]
    shown: list[Any] = []
    result = driver.finish(
        connected,
        driver.Prepared("there", 8.0),
        driver.Fitted(summary, 20.0),
        config(tmp_path, **{"checkpoint.keep_best": keep_best}),
        run,
        shown.append,
    )
    assert (result.chosen_step, shown) == (step, [])
    assert (result.final / "weights").read_text() == f"of step {step}"
    wanted = {"start_ray": 7.0, "prepare": 8.0, "start_workers": 10.0, **phases}
    assert {name: seconds for name, seconds in result.summary.phases.items() if name != "total"} == wanted
