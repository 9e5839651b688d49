"""Who may write to a run directory, and what beginning anew leaves behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finray.checkpoint import CheckpointStore, manifest, rundir
from finray.checkpoint.rundir import FinishedRun, RunDir, earlier_of, open_run, saved_config
from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.errors import CheckpointError, ClusterError, ConfigError, DataError
from finray.records import RunSummary


def config(output: Path, **train: object) -> Config:
    plain = {"run": {"output_dir": str(output)}, "model": {"name": "m"}, "data": {"source": "d.jsonl"}, "train": train}
    return build_config(plain, source="test")


def nobody(message: str) -> None:
    raise AssertionError(message)


def test_a_run_is_continued_with_the_same_configuration(tmp_path: Path) -> None:
    for _ in range(2):
        with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
            assert saved_config(run) == config(tmp_path)


def begin(run: RunDir) -> None:
    """As if a step had been done."""
    (run.path / "metrics.jsonl").write_text('{"kind": "note", "step": 0}\n{"kind": "train", "step": 1}\n')


def test_a_first_start_that_was_refused_leaves_its_log_and_may_be_corrected(tmp_path: Path) -> None:
    def refused(rate: float, error: BaseException) -> None:
        with open_run(config(tmp_path, learning_rate=rate), fresh=False, notify=nobody) as run:
            (run.path / "logs").mkdir(exist_ok=True)
            (run.path / "logs" / "training.log").write_text("what was shown")
            raise error

    for rate, error in ((0.1, DataError("no such column")), (0.2, KeyboardInterrupt())):
        with pytest.raises(type(error)):
            refused(rate, error)
        left = [path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*")]
        assert left == ["logs", "logs/training.log"]
    with open_run(config(tmp_path, learning_rate=1.0), fresh=False, notify=nobody) as run:
        begin(run)
    with pytest.raises(DataError), open_run(config(tmp_path, learning_rate=1.0), fresh=False, notify=nobody):
        raise DataError("no such column")
    assert saved_config(run) == config(tmp_path, learning_rate=1.0)


# What each stage of a start has written when it is refused: labels, the cluster, a worker that loads the model,
# trackers, the first step; a kill leaves the same.
STAGES: dict[str, list[str]] = {
    "killed": ["logs/training.log"],
    "workers": ["resolved.json", "attempt", "failures.jsonl", "workers.json", "logs/rank-00000.log"],
    "trackers": ["resolved.json", "attempt", "run_id", "metrics.jsonl", "starts.jsonl", "tensorboard/events"],
    "step": ["resolved.json", "attempt", "run_id", "sent-wandb.json", "profile/trace", ".tmp-final-1/x"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_never_began_is_in_nobodys_way(tmp_path: Path, stage: str) -> None:
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        pass
    for name in STAGES[stage]:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text('{"kind": "eval", "step": 0, "eval_loss": 3.0}\n')
    # Control: the same configuration continues what is there.
    if stage == "trackers":
        run.keep_resolved(RESOLVED)
        with open_run(config(tmp_path), fresh=False, notify=nobody):
            assert (run.path / "run_id").exists()
    if "resolved.json" in STAGES[stage]:
        run.keep_resolved(RESOLVED)
    said: list[str] = []
    with open_run(config(tmp_path, learning_rate=1.0), fresh=False, notify=said.append) as run:
        assert said == [
            "an earlier start with other settings left neither a record nor a checkpoint: the run starts with these"
        ]
        assert run.resolved() is None
        assert {path.name for path in run.path.iterdir()} <= {"config.yaml", "config.sig", "logs"}
    assert earlier_of(config(tmp_path)) is None


@pytest.mark.parametrize("mark", ["metrics.jsonl", "checkpoint-000004/x", "final/x", "summary.json", "damaged-x/x"])
def test_a_run_that_has_begun_is_not_given_up(tmp_path: Path, mark: str) -> None:
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        (run.path / mark).parent.mkdir(exist_ok=True)
        (run.path / mark).write_text('{"kind": "train", "step": 1}\n')
        before = run.config_file.read_bytes()
    with (
        pytest.raises(ConfigError, match="a different configuration"),
        open_run(config(tmp_path, learning_rate=1.0), fresh=False, notify=nobody),
    ):
        pass
    assert (run.path / mark).exists()
    assert run.config_file.read_bytes() == before


def test_a_directory_of_somebody_elses_logs_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match="is not a finray run"),
        open_run(config(tmp_path), fresh=False, notify=nobody),
    ):
        pass


def test_fresh_moves_the_earlier_run_aside_whole(tmp_path: Path) -> None:
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        (run.path / "checkpoint-000001").mkdir()
    said: list[str] = []
    for _ in range(2):
        with open_run(config(tmp_path, learning_rate=1.0), fresh=True, notify=said.append) as run:
            assert not (run.path / "checkpoint-000001").exists()
    aside = sorted(tmp_path.glob("run.before-*"))
    assert len(aside) == len(said) == 2
    assert sum((path / "checkpoint-000001").is_dir() for path in aside) == 1


def test_runs_that_are_moved_aside_in_one_second_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405" if form == "%Y%m%d-%H%M%S" else form)
    said: list[str] = []
    for _ in range(4):
        with open_run(config(tmp_path), fresh=True, notify=said.append):
            pass
    names = [f"run.before-20260102-030405{number}" for number in ("", "-2", "-3")]
    assert said == [f"the earlier run was moved to {tmp_path / name}" for name in names]


def test_two_drivers_cannot_have_one_run(tmp_path: Path) -> None:
    with (
        open_run(config(tmp_path), fresh=False, notify=nobody),
        pytest.raises(ClusterError, match="another `finray train`"),
        open_run(config(tmp_path), fresh=True, notify=nobody, wait_s=0.1),
    ):
        pass


def test_rests_of_a_killed_write_are_swept(tmp_path: Path) -> None:
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        (run.path / ".tmp-checkpoint-000003-ab").mkdir()
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        assert not list(run.path.glob(".tmp-*"))


RESOLVED = Resolved("bf16", None, "finray_packed", True, "ddp", False)


def test_what_auto_came_to_is_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.resolved() is None
    run.keep_resolved(RESOLVED)
    assert run.resolved() == RESOLVED


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    """Three checkpoints, of which the second has the lowest evaluation loss."""

    def fill(folder: Path) -> None:
        for name in ("model.safetensors", "original/tokenizer.model", "training_state/state.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{name} of {folder}", encoding="utf-8")

    store = CheckpointStore(tmp_path)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        scratch = store.begin(step)
        store.commit(scratch, step, store.fill(scratch, step, fill), metrics={"eval_loss": loss})
    return RunDir(tmp_path)


@pytest.mark.parametrize(("best", "step"), [(True, 2), (False, 3)])
@pytest.mark.parametrize("linked", [True, False])
def test_final_holds_a_checkpoint_without_what_a_resume_needs(
    finished: RunDir, best: bool, step: int, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not linked:

        def refuse(*_: object) -> None:
            raise OSError("no links here")

        monkeypatch.setattr("os.link", refuse)
    for _ in range(2):
        assert finished.make_final(best=("eval_loss", "min") if best else None, warn=nobody) == step
    content = manifest.verify(finished.final)
    assert [entry["path"] for entry in content["files"]] == ["model.safetensors", "original/tokenizer.model"]
    assert content["step"] == step
    assert not (finished.final / "training_state").exists()
    weights = finished.final / "model.safetensors"
    assert weights.samefile(finished.path / f"checkpoint-00000{step}" / "model.safetensors") == linked


def test_a_damaged_best_checkpoint_does_not_become_final(finished: RunDir) -> None:
    (finished.path / "checkpoint-000002" / "model.safetensors").write_text("damaged", encoding="utf-8")
    said: list[str] = []
    assert finished.make_final(best=("eval_loss", "min"), warn=said.append) == 3
    assert "step 3 becomes final, not 2" in said[0]
    for step in (1, 3):
        (finished.path / f"checkpoint-00000{step}" / "model.safetensors").write_text("damaged", encoding="utf-8")
    with pytest.raises(CheckpointError, match="all checkpoints"):
        finished.make_final(best=("eval_loss", "min"), warn=said.append)


SUMMARY = RunSummary(3, 3, 9, 9, 1.0, 9.0, 1.0, 0.5, "eval_loss", 1.0, {"train": 1.0}, (1,))


def finish(run: RunDir, total: int) -> None:
    run.finish({"chosen_step": total, "summary": replace(SUMMARY, total_steps=total).json()})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"epochs": 2}, {"epochs": 3}),
        ({}, {"epochs": 1.5}),
        ({"max_steps": 4}, {"max_steps": 5}),
        ({"epochs": 2}, {"epochs": 2, "max_steps": 21}),
        ({"epochs": 2, "max_steps": 20}, {"epochs": 2}),
    ],
)
def test_a_longer_run_is_the_same_run_and_not_finished(
    tmp_path: Path, before: dict[str, float], after: dict[str, float]
) -> None:
    with open_run(config(tmp_path, **before), fresh=False, notify=nobody) as run:
        finish(run, 20)
    said: list[str] = []
    with open_run(config(tmp_path, **after), fresh=False, notify=said.append) as run:
        assert not run.summary_file.exists()
        assert saved_config(run) == config(tmp_path, **after)
    assert len(said) == 1
    assert "is now" in said[0]
    finish(run, 30)
    with open_run(config(tmp_path, **after), fresh=False, notify=nobody) as run:
        assert run.summary_file.exists()


def test_what_another_field_takes_the_place_of_may_change(tmp_path: Path) -> None:
    with open_run(config(tmp_path, epochs=2, max_steps=3), fresh=False, notify=nobody) as run:
        finish(run, 3)
    with open_run(config(tmp_path, epochs=5, max_steps=3), fresh=False, notify=nobody) as run:
        assert run.summary_file.exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"epochs": 2}, {"epochs": 1}, "train.epochs: was 2.0, is now 1.0"),
        ({"epochs": 2}, {}, "train.epochs: was 2.0, is now 1.0"),
        ({"max_steps": 20}, {"max_steps": 5}, "train.max_steps: was 20, is now 5"),
        ({"epochs": 2}, {"epochs": 2, "max_steps": 5}, "train.max_steps: the run had 20 steps, is now 5"),
    ],
)
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_shorter_run_is_refused_with_every_way_out(
    tmp_path: Path, before: dict[str, float], after: dict[str, float], said: str, adapter: str
) -> None:
    def made(**train: float) -> Config:
        plain = config(tmp_path, **train).plain()
        return build_config({**plain, "adapter": {"method": adapter}}, source="test")

    with open_run(made(**before), fresh=False, notify=nobody) as run:
        finish(run, 20)
        run.final.mkdir()
    with pytest.raises(ConfigError) as caught, open_run(made(**after), fresh=False, notify=nobody):
        pass
    start = f"adapter.start_from={run.path}" if adapter == "lora" else f"model.name={run.final}"
    for part in (said, "can be made longer, not shorter", "--fresh", "another run.name", start):
        assert part in str(caught.value)
    assert run.summary_file.exists()
    assert saved_config(run) == made(**before)


WORDS = st.sampled_from(["postgres", "training-data", "password", "token", "api_key", "hunter22", "a b", "x"])


@given(name=WORDS, label=WORDS, words=st.lists(WORDS, min_size=1, max_size=3))
def test_a_config_is_read_back_whatever_short_passwords_and_names_there_are(
    tmp_path_factory: pytest.TempPathFactory, name: str, label: str, words: list[str]
) -> None:
    """A password may be a word of a path, of a name or of a label; a label may be called a password."""
    folder = tmp_path_factory.mktemp("run")
    plain = config(folder).plain()
    plain["run"]["name"] = f"{name.replace(' ', '-')}-sql"
    plain["data"]["source"] = f"{folder}/{'/'.join(words)}/my rows.jsonl"
    plain["data"]["field_mapping"] = {"text": label}
    plain["model"]["task"] = "sequence_classification"
    plain["classification"]["class_weights"] = {label: 3.0, name: 2.0}
    plain["model"]["chat_template_arguments"] = {"eos_token": "</s>", "title": f"{name} {label}"}
    asked = build_config(plain, source="test")
    with pytest.MonkeyPatch.context() as patch, open_run(asked, fresh=False, notify=nobody) as run:
        for variable, value in {"POSTGRES_PASSWORD": "postgres", "MY_TOKEN": "training-data"}.items():
            patch.setenv(variable, value)
        run.keep_config(asked)
        assert saved_config(run) == asked


@pytest.mark.parametrize(
    "error",
    [ConfigError("the workers refuse it"), ClusterError("too few CPUs"), KeyboardInterrupt(), RuntimeError("a bug")],
    ids=repr,
)
def test_a_longer_run_that_fails_before_a_checkpoint_stays_finished(tmp_path: Path, error: BaseException) -> None:
    with open_run(config(tmp_path, epochs=2), fresh=False, notify=nobody) as run:
        finish(run, 20)
    with pytest.raises(type(error)), open_run(config(tmp_path, epochs=3), fresh=False, notify=lambda text: None):
        raise error
    assert run.finished() == FinishedRun(20, replace(SUMMARY, total_steps=20))
    assert saved_config(run) == config(tmp_path, epochs=2)


def test_a_longer_run_that_fails_after_a_checkpoint_is_not_finished(tmp_path: Path) -> None:
    with open_run(config(tmp_path, epochs=2), fresh=False, notify=nobody) as run:
        finish(run, 20)

    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_text("weights", encoding="utf-8")

    def lost(store: CheckpointStore) -> None:
        scratch = store.begin(21)
        store.commit(scratch, 21, store.fill(scratch, 21, fill), metrics={})
        raise ClusterError("a node is lost")

    with pytest.raises(ClusterError), open_run(config(tmp_path, epochs=3), fresh=False, notify=lambda text: None):
        lost(run.store())
    assert run.finished() is None
    assert saved_config(run) == config(tmp_path, epochs=3)


def test_a_random_value_of_a_secret_variable_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "9f3c" * 8
    monkeypatch.setenv("MY_TOKEN", secret)
    plain = config(tmp_path).plain()
    made = build_config({**plain, "data": {**plain["data"], "source": f"https://host/{secret}"}}, source="test")
    with open_run(made, fresh=False, notify=nobody) as run:
        assert secret not in run.config_file.read_text(encoding="utf-8")


def test_what_the_run_chose_stands_for_what_the_config_leaves_open(tmp_path: Path) -> None:
    chosen = replace(RESOLVED, global_batch_size=1, epochs=3.0)
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        run.keep_resolved(chosen)
        begin(run)
    same: list[dict[str, object]] = [{}, {"global_batch_size": 1}, {"epochs": 3}]
    for train in same:
        with open_run(config(tmp_path, **train), fresh=False, notify=nobody):
            pass
    said: list[str] = []
    with open_run(config(tmp_path, epochs=4), fresh=False, notify=said.append):
        assert "train.epochs was 3, is now 4" in said[0]
    for other, text in (
        ({"global_batch_size": 8}, "train.global_batch_size: was 1, is now 8"),
        ({"epochs": 2}, "train.epochs: was 4.0, is now 2.0"),
    ):
        with pytest.raises(ConfigError, match=text), open_run(config(tmp_path, **other), fresh=False, notify=nobody):
            pass


def test_a_run_from_before_a_step_could_be_chosen_goes_on_with_its_own(tmp_path: Path) -> None:
    with open_run(config(tmp_path, global_batch_size=8), fresh=False, notify=nobody) as run:
        older = {name: value for name, value in asdict(RESOLVED).items() if name not in ("global_batch_size", "epochs")}
        (run.path / "resolved.json").write_text(json.dumps(older), encoding="utf-8")
    with open_run(config(tmp_path), fresh=False, notify=nobody) as run:
        kept = run.resolved()
    assert kept is not None
    assert (kept.global_batch_size, kept.epochs) == (8, 1.0)


# --- a finished run ---------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[RunDir], object]] = {
    "gone": lambda run: shutil.rmtree(run.final),
    "empty": lambda run: [path.unlink() for path in run.final.iterdir() if path.is_file()],
    "weights gone": lambda run: (run.final / "model.safetensors").unlink(),
    "weights cut off": lambda run: replaced(run.final / "model.safetensors", b"m"),
    "manifest changed": lambda run: replaced(run.final / "manifest.json", b"{}"),
    "a file": lambda run: (shutil.rmtree(run.final), run.final.write_text("x")),
}


def replaced(file: Path, content: bytes) -> None:
    """Other bytes; the checkpoint's are another link to the same file."""
    file.unlink()
    file.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_final_model_that_is_gone_is_made_again_from_the_checkpoints(
    finished: RunDir, damage: Callable[[RunDir], object]
) -> None:
    best = ("eval_loss", "min")
    assert finished.make_final(best=best, warn=nobody) == 2
    assert finished.mend_final(best=best, warn=nobody) is None
    damage(finished)
    told: list[str] = []
    assert finished.mend_final(best=best, warn=told.append) == 2
    assert "final/ is made again from the checkpoint of step 2" in told[0]
    manifest.verify(finished.final)
    # What was there is not lost, in case it is of use.
    assert len(list(finished.path.glob("damaged-final-*"))) == (damage is not DAMAGE["gone"])
    assert not list(finished.path.glob(".tmp-*"))


def test_without_checkpoints_there_is_nothing_to_make_it_from(finished: RunDir) -> None:
    finished.make_final(best=None, warn=nobody)
    for folder in finished.path.glob("checkpoint-*"):
        shutil.rmtree(folder)
    (finished.final / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint to make final/ from") as caught:
        finished.mend_final(best=None, warn=nobody)
    assert "--fresh" in str(caught.value.repair)
    assert (finished.final / "original" / "tokenizer.model").exists()


def changed(**fields: object) -> bytes:
    return json.dumps({"chosen_step": 2, "summary": {**SUMMARY.json(), **fields}}).encode()


SUMMARIES = {
    **{"empty": b"", "cut off": changed()[:-20], "a list": b"[]", "nothing": b"{}", "null": b"null", "bytes": b"\xff"},
    **{"text": changed(step="three"), "no summary": b'{"chosen_step": 2}', "a list in it": changed(phases=[])},
    **{"null step": changed(step=None), "peaks": changed(peak_memory_bytes="many"), "truth": changed(tokens=True)},
    "no best": json.dumps({"chosen_step": 1, "summary": {"step": 1}}).encode(),
}


@pytest.mark.parametrize("content", SUMMARIES.values(), ids=SUMMARIES.keys())
def test_a_summary_that_is_none_is_one_message_with_a_repair(tmp_path: Path, content: bytes) -> None:
    run = RunDir(tmp_path)
    run.summary_file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        run.finished()
    assert caught.value.where == str(run.summary_file)
    assert "delete the file" in str(caught.value.repair)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"precision": "fp64"}', None], ids=str)
def test_what_auto_came_to_that_cannot_be_read_is_one_message(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "resolved.json"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RunDir(tmp_path).resolved()
    assert caught.value.where == str(file)
    assert "delete the file" in str(caught.value.repair)


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(rundir, "replace_text", read_only)
    with (
        pytest.raises(ConfigError, match="the run directory cannot be written: Read-only file system") as caught,
        open_run(config(tmp_path), fresh=False, notify=nobody),
    ):
        pass
    assert caught.value.where == str(tmp_path / "run")


def test_the_configuration_of_a_run_holds_no_password(tmp_path: Path) -> None:
    plain = config(tmp_path).plain()
    plain["data"]["source"] = "https://me:hunter22@host/rows.jsonl"
    secret = build_config(plain, source="test")
    for _ in range(2):
        with open_run(secret, fresh=False, notify=nobody) as run:
            written = "".join(path.read_text(encoding="utf-8") for path in run.path.rglob("*") if path.is_file())
    assert "hunter22" not in written
    assert "https://me:***@host/rows.jsonl" in written
