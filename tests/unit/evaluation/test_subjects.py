"""The models and the rows of an evaluation: how weights are told apart, and what is said of rows that are left out."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import finray
from finray.checkpoint.rundir import CONFIG_FILE, RunDir
from finray.config.paths import PREPARED
from finray.config.requests import EvaluationRequest
from finray.config.schema import ModelConfig
from finray.config.tasks import task_spec
from finray.config.trust import of_stranger
from finray.errors import ConfigError
from finray.evaluation import subjects
from finray.evaluation.rows import prepared_beside
from finray.evaluation.subjects import Case, Subject, _baselines, _folder, files_of
from finray.models.artifacts import Artifact
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put
from tests.support.runs import config_of
from tests.support.runs import finray as finray_command


def talk(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": answer}]}


SHORT, LONG, BAD = talk("a cat"), talk("the dog sleeps " * 40), {"messages": "none"}


@pytest.mark.parametrize(
    ("rows", "lost"), [([SHORT, LONG, SHORT, BAD, LONG, LONG], 3), ([SHORT, BAD, SHORT], 0), ([SHORT, LONG], 1)]
)
def test_rows_of_a_file_that_are_too_long_are_counted_wherever_they_are_and_no_others(
    preparing: Preparing, put: Write, tmp_path: Path, rows: list[Any], lost: int
) -> None:
    file = put("rows.jsonl", lines(rows))
    config = preparing.config(file, on_bad_row="drop", on_too_long="drop", prepare={"dir": str(tmp_path / "prepared")})
    request = EvaluationRequest(file=str(file))
    case = Case(request, None, config, task_spec("causal_lm"), (), tmp_path, lambda *_, **__: None)
    assert case.rows is not None
    assert len(case.rows) == rows.count(SHORT)
    expected = [f"{lost} rows are longer than data.max_length=64 and were skipped"] if lost else []
    assert case.notes == expected + (["1 rows are bad and were skipped"] if BAD in rows else [])


def test_weights_are_told_apart_by_the_names_sizes_and_times_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in (("b.safetensors", "12"), ("a.json", "1"), ("c.jinja", "123"), ("d.txt", "other")):
        (folder / name).write_text(content)
        os.utime(folder / name, ns=(5, 7))
    listed = {"name": str(folder), "files": [["b.safetensors", 2, 7], ["a.json", 1, 7], ["c.jinja", 3, 7]]}
    listed["files"].sort()  # type: ignore[attr-defined]
    assert files_of(str(folder)) == listed
    assert files_of(str(folder / "a.json")) == {"name": str(folder / "a.json"), "files": [["a.json", 1, 7]]}
    cached = tmp_path / "models--o--m" / "snapshots" / "0123" / "config.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(cached))
    assert files_of("o/m") == {"name": "o/m", "commit": "0123"}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    assert files_of("o/m") == {"name": "o/m", "commit": None}

    own: Any = SimpleNamespace(folder=folder, base=ModelConfig(name="o/m", revision="r"), began_as=None)
    base = {"name": "o/m", "commit": None, "revision": "r"}
    assert Subject("tuned", own).identity == {"weights": listed, "base": base}
    assert Subject("base", own, adapter=False).identity == {"weights": None, "base": base}
    own.base = None
    # A run that trains all weights may have begun from another revision, with tokens of its own.
    own.began_as = ModelConfig(name=str(folder), revision="v1", new_tokens=["<call>"])
    began = {**listed, "revision": "v1", "new_tokens": ["<call>"]}
    assert Subject("base", own, adapter=False).identity == {"weights": began, "base": None}
    own.began_as = ModelConfig(name=str(folder))
    assert Subject("base", own, adapter=False).identity == {"weights": listed, "base": None}


def test_a_models_configuration_says_whether_positions_depend_on_the_row(tmp_path: Path) -> None:
    for rope, turns in (
        ({"rope_type": "default"}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        (None, True),
    ):
        plain = {"model_type": "llama", "rope_parameters": {**(rope or {}), "rope_theta": 1e4}}
        (tmp_path / "config.json").write_text(json.dumps(plain) if rope else "{")
        assert Subject("tuned", Artifact(tmp_path, None, {})).turns is turns


# --- the models -----------------------------------------------------------------------------------------------------

OWN: Any = Subject("base", "what it began from", adapter=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, [("base", "what it began from", False)]),
        ([], []),
        (["none"], []),
        ([""], []),
        (["base"], [("base", "what it began from", False)]),
        (["runs/one", "base"], [("one", "of runs/one", True), ("base", "what it began from", False)]),
        # What has the name of the evaluated model, or ends like every run, is told apart by all of its path.
        (
            ["a/tuned", "runs/one/final"],
            [("a/tuned", "of a/tuned", True), ("runs/one/final", "of runs/one/final", True)],
        ),
        (["/"], [("/", "of /", True)]),
        (["tuned", "a/x"], [("tuned (baseline)", "of tuned", True), ("x", "of a/x", True)]),
        (["a/x", "b/x"], [("a/x", "of a/x", True), ("b/x", "of b/x", True)]),
        (["none", "a/x", "", "b/x"], [("a/x", "of a/x", True), ("b/x", "of b/x", True)]),
    ],
)
def test_baselines_have_names_that_tell_them_apart(
    monkeypatch: pytest.MonkeyPatch, named: list[str] | None, expected: list[Any]
) -> None:
    monkeypatch.setattr(subjects, "artifact_of", lambda name: f"of {name}")
    tuned = replace(OWN, name="tuned")
    assert [(one.name, one.artifact, one.adapter) for one in _baselines(named, tuned, OWN)] == expected
    # The base of a model that is called so has another name; what began from nothing has a baseline if one is named.
    assert [one.name for one in _baselines(None, replace(OWN, name="base"), OWN)] == ["base (baseline)"]
    assert _baselines(None, OWN, None) == []
    assert [one.artifact for one in _baselines(["base"], tuned, None)] == ["of base"]


@pytest.mark.parametrize("revision", ["v1", None])
def test_a_run_that_trains_all_weights_is_compared_with_the_revision_it_began_from(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str | None
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / CONFIG_FILE).touch()
    config = preparing.config(put("own.jsonl", lines([SHORT])))
    model = ModelConfig(name="o/m", revision=revision, new_tokens=["<call>"])
    monkeypatch.setattr(subjects, "saved_config", lambda run: config.model_copy(update={"model": model}))
    asked: list[Any] = []

    def artifact_of(name: Any, **options: Any) -> Artifact:
        asked.append((str(name), options))
        return Artifact(Path(name), None, {})

    monkeypatch.setattr(subjects, "artifact_of", artifact_of)
    monkeypatch.setattr(subjects, "check_exists", lambda name: None)
    case = Case.of(run_dir, (), EvaluationRequest(), tasks=("causal_lm",), progress=lambda *_, **__: None)
    assert asked == [(str(run_dir), {"base": None}), ("o/m", {"revision": revision})]
    base, tuned = case.subjects
    assert (base.artifact.model, base.artifact.tokenizer) == (model, model)
    assert tuned.artifact.model == ModelConfig(name=str(run_dir))


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "request_", "expected"),
    [
        ("run", {}, "run/evaluation"),
        ("run/final", {}, "run/evaluation"),
        ("run/checkpoint-000001", {}, "run/evaluation/checkpoint-000001"),
        ("run", {"split": "train"}, "run/evaluation/train"),
        ("run", {"file": "some/rows.test.jsonl"}, "run/evaluation/rows.test"),
        ("run/checkpoint-000001", {"split": "eval"}, "run/evaluation/checkpoint-000001/eval"),
        ("run", {"split": "train", "file": "rows.jsonl", "output": "out/here"}, "out/here"),
        ("model", {}, "model/evaluation"),
        ("model", {"file": "rows.jsonl"}, "model/evaluation/rows"),
        ("org/name", {"file": "rows.jsonl"}, "org--name/evaluation/rows"),
    ],
)
def test_results_lie_in_a_folder_of_what_was_evaluated_and_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, request_: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run/final", "run/checkpoint-000001", "model"):
        Path(name).mkdir(parents=True)
    run = RunDir(tmp_path / "run") if model.startswith("run") else None
    artifact: Any = SimpleNamespace(folder=tmp_path / "model")
    found = _folder(model, run, artifact, EvaluationRequest(**request_))
    assert found.resolve() == tmp_path / expected
    assert found.is_dir()
    # It may be there already.
    assert _folder(model, run, artifact, EvaluationRequest(**request_)) == found


# --- their rows -----------------------------------------------------------------------------------------------------


def test_rows_of_a_file_are_prepared_beside_the_run_unless_the_user_says_where(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "one")
    for output_dir, prepared, expected in (
        ("runs", None, tmp_path / "runs" / PREPARED),
        ("runs", "elsewhere", None),
        ("s3://bucket/runs", None, None),
    ):
        plain = {"data": {"source": "x"}, "model": {"name": "m"}}
        config = config_of({**plain, "run": {"output_dir": output_dir}, "prepare": {"dir": prepared}})
        assert prepared_beside(run, config) == expected
    # What the config of somebody else's run says is not the place for the user's rows.
    assert prepared_beside(run, of_stranger(config, "config.yaml")) == tmp_path / "runs" / PREPARED


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "positions", "task", "expected"),
    [
        (512, None, "causal_lm", 512),
        (40, None, "causal_lm", 64),
        (None, None, "causal_lm", 64),
        (10**30, None, "causal_lm", 2**24),
        # A causal model's table is as long as it says; RoBERTa's begins after the padding index.
        (514, 512, "causal_lm", 514),
        (514, 512, "sequence_classification", 512),
        (514, None, "sequence_classification", 514),
    ],
)
def test_a_file_is_read_as_the_run_reads_its_own_but_for_what_names_other_rows(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch,
    reads: int | None, positions: int | None, task: str, expected: int,
) -> None:  # fmt: skip
    """Whole, and in one part: splits, ratios, mixes and revisions are of the run's own source."""
    file = put("rows.jsonl", lines([SHORT]))
    own = preparing.config(put("own.jsonl", lines([SHORT])), on_bad_row="drop", system="be brief", tool_format="hermes")
    data = {"mix": [{"source": "other"}], "eval_ratio": 0.0, "test_ratio": 0.25}
    names = ("group_by", "train_split", "eval_source", "eval_split", "test_split", "subset", "revision")
    data |= dict.fromkeys(names, "other")
    saved = own.model_copy(update={"data": own.data.model_copy(update=data)})
    monkeypatch.setattr(subjects, "saved_config", lambda run: saved)
    text = SimpleNamespace() if reads is None else SimpleNamespace(max_position_embeddings=reads)
    config = SimpleNamespace(get_text_config=lambda: text)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda **options: config)
    monkeypatch.setattr(subjects, "packing_of", lambda model: SimpleNamespace(positions=positions))
    artifact: Any = SimpleNamespace(model=ModelConfig(name=str(preparing.model), task=task))
    request = EvaluationRequest(file=file, metrics=["bleu"], max_rows=3, max_new_tokens=5)
    run: Any = "a run"
    found = subjects._config_of("m", run, artifact, request, ["evaluation.batch_size=7", "evaluation.max_rows=9"])
    wanted = own.data.model_copy(
        update={"source": str(file), "eval_ratio": 0.5, "on_too_long": "drop", "max_length": expected}
    )
    assert found.data.model_dump() == wanted.model_dump()
    evaluation = found.evaluation
    assert (evaluation.metrics, evaluation.max_rows, evaluation.max_new_tokens) == (["bleu"], 3, 5)
    assert (evaluation.batch_size, found.run.seed) == (7, own.run.seed)


def test_a_split_that_no_run_has_is_said_before_a_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("m", "s3://bucket/runs/m"):
        with pytest.raises(ConfigError, match="there is no split `validation`") as caught:
            finray.evaluate(model, split="validation", quiet=True)
        assert (caught.value.where, caught.value.repair) == ("--split", "use train, eval or test")
    assert finray_command("evaluate", "m", "--split", "validation")[2].count("there is no split `validation`") == 1
    assert list(tmp_path.iterdir()) == []
