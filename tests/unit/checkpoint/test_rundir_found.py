"""What is found in a run directory: another thing than a run, an earlier run, rests, and a model that is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.rundir import Earlier, RunDir, check_output, earlier_of, open_run, saved_config
from finray.config.load import build_config
from finray.config.schema import Config
from finray.errors import CheckpointError, ClusterError, ConfigError
from tests.support.checkpoints import write
from tests.unit.checkpoint.test_rundir import RESOLVED, config, finish, nobody

# The name of Ray Train's own file.
RAYS = "checkpoint_manager_snapshot.json"


def save(store: CheckpointStore, step: int, *, files: dict[str, bytes] | None = None, **metrics: float) -> Path:
    def fill(folder: Path) -> None:
        for name, content in (files or {"model.safetensors": b"weights of %d" % step}).items():
            (folder / name).write_bytes(content)

    return write(store, step, fill, **metrics)


@pytest.mark.parametrize("names", [["notes.txt"], [RAYS, "notes.txt"]])
def test_a_directory_of_something_else_is_refused_and_moved_aside_when_that_is_asked_for(
    tmp_path: Path, names: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).write_text("mine")
    with (
        pytest.raises(ConfigError, match="not a finray run") as caught,
        open_run(config(tmp_path), fresh=False, notify=nobody),
    ):
        pass
    assert caught.value.where == str(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(names)
    with open_run(config(tmp_path), fresh=True, notify=lambda text: None):
        pass
    (aside,) = tmp_path.glob("run.before-*")
    assert (aside / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("names", [[], [RAYS]])
def test_a_directory_without_files_of_anybody_becomes_a_run(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).write_text("{}")
    assert earlier_of(config(tmp_path)) is None
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        assert {path.name for path in run.path.iterdir()} == {"config.sig", "config.yaml"}
        (run.path / RAYS).write_text("{}")
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        assert not (run.path / RAYS).exists(), "Ray would go on from its own list"


def test_the_config_of_a_run_keeps_the_order_of_its_fields(tmp_path: Path) -> None:
    asked = config(tmp_path)
    with open_run(asked, fresh=False, notify=nobody) as run:
        saved = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    assert list(saved) == list(asked.plain())
    assert list(saved) != sorted(saved), "alphabetical order would be the same"


def test_an_earlier_run_is_described_and_not_touched(tmp_path: Path) -> None:
    own = config(tmp_path, max_steps=20)
    assert earlier_of(own) is None
    assert not (tmp_path / "run").exists()
    with open_run(own, fresh=False, notify=nobody) as run:
        pass
    assert earlier_of(own) == Earlier(0, False, None)
    run.keep_resolved(RESOLVED)
    for step in (10, 20):
        save(run.store(), step)
    assert earlier_of(own) == Earlier(20, False, RESOLVED)
    finish(run, 20)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert earlier_of(own) == Earlier(20, True, RESOLVED)
    assert earlier_of(config(tmp_path, max_steps=30)) == Earlier(20, False, RESOLVED)
    with pytest.raises(ConfigError, match="a different configuration"):
        earlier_of(config(tmp_path, max_steps=20, learning_rate=1.0))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("steps", "is_refused"), [(19, True), (20, False), (21, False)])
def test_steps_in_the_place_of_epochs_are_compared_with_those_that_were_done(
    tmp_path: Path, steps: int, is_refused: bool
) -> None:
    with open_run(config(tmp_path, epochs=2), fresh=False, notify=nobody) as run:
        finish(run, 20)
    after, said = config(tmp_path, epochs=2, max_steps=steps), list[str]()
    if is_refused:
        with pytest.raises(ConfigError, match="the run had 20 steps, is now 19"):
            earlier_of(after)
        return
    with open_run(after, fresh=False, notify=said.append):
        pass
    assert said == [f"train.epochs was 2, train.max_steps is now {steps}: the run continues to that step"]


@pytest.mark.parametrize("folder", ["", "a", "a/b/c"])
def test_an_output_directory_is_tried_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """One that is not there is not made: the nearest one above is tried."""
    own, tried = config(tmp_path / folder), list[Path]()
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: (tried.append(path.parent), write(path, content))[1])
    check_output(own)
    assert tried == [tmp_path]
    assert list(tmp_path.iterdir()) == []

    def read_only(path: Path, content: bytes) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(ConfigError, match="cannot be written: Read-only file system") as caught:
        check_output(own)
    assert caught.value.where == f"run.output_dir={tmp_path / folder}"
    with pytest.raises(ConfigError, match="the output directory"), open_run(own, fresh=False, notify=nobody):
        pass
    assert list(tmp_path.iterdir()) == []


# --- the finished model -----------------------------------------------------------------------------------------------


def test_what_a_killed_attempt_left_of_a_final_model_is_not_part_of_it(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    rest = tmp_path / f".tmp-final-{os.getpid()}"
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(b"half")
    (rest / "stray").write_bytes(b"x")
    run = RunDir(tmp_path)
    run.make_final(best=None, warn=nobody)
    assert sorted(path.name for path in run.final.iterdir()) == [manifest.NAME, "model.safetensors"]
    assert (run.final / "model.safetensors").read_bytes() == b"weights of 1"


def test_a_finished_model_is_looked_at_by_sizes_only(tmp_path: Path) -> None:
    """To read a terabyte at every start would take an hour; `finray export` and others verify it."""
    save(CheckpointStore(tmp_path), 1)
    run = RunDir(tmp_path)
    run.make_final(best=None, warn=nobody)
    (run.final / "model.safetensors").unlink()
    (run.final / "model.safetensors").write_bytes(b"WEIGHTS OF 1")
    assert run.mend_final(best=None, warn=nobody) is None
    assert manifest.verify(run.final, digests=False)["step"] == 1
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        manifest.verify(run.final)
    run.make_final(best=None, warn=nobody)
    assert not list(tmp_path.glob("damaged-*"))


@pytest.mark.parametrize("read", [CheckpointStore.content, CheckpointStore.verify])
def test_a_checkpoint_under_the_name_of_another_step_is_damaged(
    tmp_path: Path, read: Callable[[CheckpointStore, int], object]
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10).rename(tmp_path / "checkpoint-000030")
    with pytest.raises(CheckpointError, match="is of step 10, not 30") as caught:
        read(store, 30)
    assert caught.value.where == str(tmp_path / "checkpoint-000030" / manifest.NAME)


def test_what_was_pushed_is_remembered(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.pushed() is None
    for record in ({"repo": "me/model", "step": 2}, {"repo": "me/model", "step": 4}):
        run.keep_pushed(record)
        assert run.pushed() == json.loads((tmp_path / "pushed.json").read_text()) == record
    (tmp_path / "pushed.json").write_text("[")
    assert run.pushed() is None, "it is pushed again"


@pytest.mark.parametrize("error", [ClusterError("a node is lost"), ConfigError("the workers refuse it")], ids=repr)
def test_settings_that_may_change_are_those_of_the_last_start_unless_it_is_refused(
    tmp_path: Path, error: Exception
) -> None:
    def own(log_every: int) -> Config:
        plain = {**config(tmp_path).plain(), "tracking": {"log_every": log_every}}
        return build_config(plain, source="test")

    with open_run(own(1), fresh=False, notify=nobody):
        pass
    with pytest.raises(type(error)), open_run(own(7), fresh=False, notify=nobody) as run:
        raise error
    assert saved_config(run).tracking.log_every == (7 if isinstance(error, ClusterError) else 1)
