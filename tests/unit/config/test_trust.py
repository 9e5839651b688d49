"""Code and files that the config of somebody else's run names take effect only if the user says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from finray.checkpoint.rundir import RunDir, saved_config, trust_run
from finray.config import trust
from finray.config.load import build_config, load_config
from finray.config.paths import with_absolute_paths
from finray.config.schema import Config
from finray.errors import ConfigError

PLAIN = {
    "run": {"name": "run", "output_dir": "somewhere"},
    "model": {"name": "org/model"},
    "data": {"source": "org/rows", "eval_ratio": 0.1},
}
# Every field that brings code, or names a file here.
BROUGHT: dict[str, object] = {
    "model.task": "evil:Task",
    "model.trust_remote_code": True,
    "model.name": "/home/me/model",
    "model.chat_template": "/home/me/template.jinja",
    "adapter.method": "evil:METHOD",
    "adapter.start_from": "/home/me/adapter",
    "parallel.strategy": "evil:Strategy",
    "data.converter": "evil:convert",
    "data.source": "/home/me/diary.jsonl",
    "data.eval_source": "../diary.jsonl",
    "tracking.trackers": ["evil:Tracker"],
    "tracking.mlflow_uri": "https://evil.example",
    "evaluation.metrics": ["evil:metric"],
    "evaluation.scoring.checker": "builtins:exec",
    "evaluation.scoring.run_code": True,
    "evaluation.scoring.encoder": "/home/me/encoder",
    "cluster.env.LD_PRELOAD": "evil.so",
    "cluster.address": "ray://evil.example",
    "prepare.dir": "/home/me",
    "prepare.local_dir": "/home/me",
    "run.local_dir": "/home/me",
    "run.output_dir": "s3://evil/runs",
    "export.push_to_hub": "evil/model",
}


def config_with(field: str) -> Config:
    changes: dict[str, object] = {"data.eval_ratio": 0.0} if field == "data.eval_source" else {}
    return load_config(PLAIN, {field: BROUGHT[field], **changes})


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "me"))
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    return tmp_path / "me" / "finray" / "key"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run" / "checkpoint-000001").mkdir(parents=True)
    return RunDir(tmp_path / "run")


def stranger(run: RunDir, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that somebody else has started, with a key of their own."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(run.path.parent / "stranger"))
        run.keep_config(config_with(field))


@pytest.mark.parametrize("field", BROUGHT)
def test_what_a_strangers_config_brings_is_refused_where_it_takes_effect(
    field: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger(run, field, monkeypatch)
    section = field.rpartition(".")[0]
    configs = [saved_config(run), load_config(run.config_file)]
    configs += [] if field == "adapter.start_from" else [with_absolute_paths(configs[0])]
    for config in configs:
        for asked in ((), (section,), (field,)):
            with pytest.raises(ConfigError, match=r"cannot tell that you wrote.*\n.*--trust-run") as found:
                trust.require_trusted(config, *asked)
            assert [one.partition(": ")[0] for one in found.value.problems] == [field]
        # What does not take effect is no obstacle, and what the user says is their word.
        trust.require_trusted(config, "checkpoint")
        trust.require_trusted(load_config(config, {field: BROUGHT[field]}))
    # Of all that they name, they say one thing.
    said = load_config(saved_config(run), {"train.max_steps": 3})
    with pytest.raises(ConfigError):
        trust.require_trusted(said)


def test_a_model_goes_to_the_hub_as_the_user_says(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    export = {"export.push_to_hub": "evil/model", "export.public": True, "export.base_model": "evil/base"}
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(run.path.parent / "stranger"))
        run.keep_config(load_config(PLAIN, export))
    for asked in ([], ["export"]):
        with pytest.raises(ConfigError) as found:
            trust.require_trusted(load_config(run.config_file, ["export.public=false"]), *asked)
        assert [one.partition(": ")[0] for one in found.value.problems] == ["export.push_to_hub", "export.base_model"]


@pytest.mark.parametrize("field", BROUGHT)
def test_a_run_that_this_user_has_started_needs_nothing(field: str, run: RunDir) -> None:
    run.keep_config(config_with(field))
    for config in (saved_config(run), load_config(run.config_file)):
        trust.require_trusted(config)


def test_a_config_that_names_nothing_needs_no_signature(run: RunDir) -> None:
    # A name that no file can have is that of no file.
    for source in ("org/rows", "x" * 5000):
        run.config_file.write_text(yaml.safe_dump({**PLAIN, "data": {"source": source, "eval_ratio": 0.1}}))
        trust.require_trusted(saved_config(run))


def test_a_signed_config_that_is_changed_is_that_of_a_stranger(run: RunDir) -> None:
    run.keep_config(config_with("evaluation.metrics"))
    run.config_file.write_text(run.config_file.read_text().replace("evil:metric", "evil:other"))
    with pytest.raises(ConfigError, match="evil:other"):
        trust.require_trusted(saved_config(run))


def test_the_key_is_the_users_and_goes_with_a_copy(
    run: RunDir, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.keep_config(config_with("data.converter"))
    assert key.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    with pytest.raises(ConfigError):
        trust.require_trusted(saved_config(run))
    (tmp_path / "other" / "finray").mkdir(parents=True)
    shutil.copy(key, tmp_path / "other" / "finray" / "key")
    trust.require_trusted(saved_config(run))


@pytest.mark.parametrize("odd", ["file", "fifo", "nobody"])
def test_a_key_that_cannot_be_made_or_read_fails_no_run(
    odd: str, run: RunDir, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if odd == "file":
        key.parent.parent.write_text("in the way")
    elif odd == "fifo":
        key.parent.mkdir(parents=True)
        os.mkfifo(key)
    else:

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CONFIG_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    assert not run.keep_config(config_with("data.converter"))
    assert not (run.path / trust.SIGNATURE).exists()
    with pytest.raises(ConfigError):
        trust.require_trusted(saved_config(run))
    if odd != "fifo":
        # What cannot be remembered is accepted all the same.
        trust_run(run.path)
        trust.require_trusted(saved_config(run))


@pytest.mark.parametrize("content", ["", "5" * 31])
def test_a_key_that_was_cut_off_is_made_again(content: str, run: RunDir, key: Path) -> None:
    key.parent.mkdir(parents=True)
    key.write_text(content)
    assert run.keep_config(config_with("data.converter"))
    trust.require_trusted(saved_config(run))
    assert [one.name for one in key.parent.iterdir()] == ["key"]
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_run_that_is_accepted_says_what_it_brings_and_stays_accepted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger(run, "evaluation.scoring.checker", monkeypatch)
    (line,) = trust_run(run.path)
    assert "evaluation.scoring.checker: builtins:exec" in line
    trust.require_trusted(saved_config(run))
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    trust.require_trusted(saved_config(run))
    # It is remembered in nothing of the run: another one of the same text is accepted too, and no file was made here.
    assert {one.name for one in run.path.iterdir()} == {"config.yaml", "config.sig", "checkpoint-000001"}
    shutil.copytree(run.path, other := run.path.with_name("other"))
    (other / "config.sig").unlink()
    trust.require_trusted(saved_config(RunDir(other)))
    # Not for what comes later.
    stranger(run, "data.converter", monkeypatch)
    with pytest.raises(ConfigError):
        trust.require_trusted(saved_config(run))


def test_what_is_accepted_is_bounded_and_a_damaged_list_of_it_is_none(
    run: RunDir, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_MOST", 2)
    files = [run.path / f"{number}.json" for number in range(3)]
    for file in files:
        file.write_text(file.name)
        trust.accept(file)
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    assert [trust.is_accepted(file) for file in files] == [False, True, True]
    key.with_name("trusted").write_bytes(b"\xff")
    assert not trust.is_accepted(files[2])
    trust.accept(files[2])
    assert trust.is_accepted(files[2])


def test_a_run_is_accepted_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    run = RunDir(tmp_path / "runs" / "mine")
    stranger(run, "data.converter", monkeypatch)
    assert "data.converter: evil:convert" in trust_run("mine")[0]
    trust.require_trusted(saved_config(run))


def test_a_config_of_the_users_own_is_their_word(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, "evaluation": {"metrics": ["mine:metric"]}}))
    trust.require_trusted(load_config(file))
    trust.require_trusted(load_config({**PLAIN, "evaluation": {"metrics": ["mine:metric"]}}))
    for name in ("logs", "final", "model"):
        (tmp_path / name).mkdir()
    # Nor does a model beside it make it that of somebody else.
    assert trust_run(tmp_path / "model") == []
    trust.require_trusted(load_config(file, ["train.max_steps=3"]))
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["config.yaml"]


@pytest.mark.parametrize(
    "mark",
    [
        *("run_id", "starts.jsonl", "failures.jsonl", "checkpoint-000001/x", "damaged-final-0a/x", "final/config.json"),
        *("logs/training.log", "tensorboard/events.out.tfevents.1", "evaluation/test/metrics.json", "config.sig"),
    ],
)
def test_any_part_of_a_run_makes_its_config_that_of_a_run(mark: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, "evaluation": {"metrics": ["theirs:metric"]}}))
    (tmp_path / mark).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / mark).write_text("")
    with pytest.raises(ConfigError):
        trust.require_trusted(load_config(file))


@pytest.mark.parametrize("folder", ["/home/me", "~/runs", "../runs", "a/../../runs", "gs://evil/runs"])
def test_a_run_of_somebody_else_is_not_continued_elsewhere(
    folder: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger(run, "run.output_dir", monkeypatch)
    run.config_file.write_text(run.config_file.read_text().replace("s3://evil/runs", folder))
    with pytest.raises(ConfigError):
        trust.require_trusted(load_config(run.config_file))
    # Beside the working directory, as anybody's.
    for own in ("runs", "./runs", str(Path.cwd() / "runs")):
        run.config_file.write_text(run.config_file.read_text().replace(folder, own))
        trust.require_trusted(load_config(run.config_file))
        folder = own


def test_every_field_that_names_code_is_one_of_these() -> None:
    """A new field that takes ``package.module:Name`` is found by its validator or its description."""
    found = set()
    for name, section in build_config(PLAIN, source="").model_json_schema()["$defs"].items():
        for field, about in section.get("properties", {}).items():
            if "package.module:" in about.get("description", ""):
                found.add((name, field))
    known = {
        *(("ModelConfig", "task"), ("AdapterConfig", "method"), ("ParallelConfig", "strategy")),
        *(("DataConfig", "converter"), ("TrackingConfig", "trackers"), ("EvaluationConfig", "metrics")),
        *(("ScoringConfig", "checker"), ("TrainConfig", "objective")),
    }
    assert found - known == set()
