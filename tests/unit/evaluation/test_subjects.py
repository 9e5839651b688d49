"""The models and the rows of an evaluation: how weights are told apart, and what is said of rows that are left out."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import finray
from finray.checkpoint.rundir import CONFIG_FILE, RunDir
from finray.config.paths import PREPARED
from finray.config.schema import ModelConfig
from finray.config.tasks import task_spec
from finray.config.trust import of_stranger
from finray.data.sampling.splits import sample
from finray.errors import ConfigError, DataError, FinrayError
from finray.evaluation import subjects
from finray.evaluation.rows import Rows
from finray.evaluation.subjects import Case, EvaluationRequest, Subject, _baselines, _folder, files_of
from finray.models.artifacts import Artifact
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put
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
    assert Subject("whole", own, adapter=False).identity == {"weights": listed, "base": None}
    # A run that trains all weights may have begun from another revision, with tokens of its own.
    own.began_as = ModelConfig(name=str(folder), revision="v1", new_tokens=["<call>"])
    began = {**listed, "revision": "v1", "new_tokens": ["<call>"]}
    assert Subject("base", own, adapter=False).identity == {"weights": began, "base": None}
    own.began_as = ModelConfig(name=str(folder))
    assert Subject("base", own, adapter=False).identity == {"weights": listed, "base": None}


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
        (
            ["a/x", "base", "b/x"],
            [("a/x", "of a/x", True), ("base", "what it began from", False), ("b/x", "of b/x", True)],
        ),
    ],
)
def test_baselines_have_names_that_tell_them_apart(
    monkeypatch: pytest.MonkeyPatch, named: list[str] | None, expected: list[Any]
) -> None:
    monkeypatch.setattr(subjects, "artifact_of", lambda name: f"of {name}")
    tuned = replace(OWN, name="tuned")
    assert [(one.name, one.artifact, one.adapter) for one in _baselines(named, tuned, OWN)] == expected


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


def test_the_base_of_a_model_that_is_called_so_has_another_name() -> None:
    assert [one.name for one in _baselines(None, replace(OWN, name="base"), OWN)] == ["base (baseline)"]


def test_a_model_that_began_from_nothing_has_a_baseline_only_where_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subjects, "artifact_of", lambda name: f"of {name}")
    assert _baselines(None, OWN, None) == []
    assert [one.artifact for one in _baselines(["base"], replace(OWN, name="tuned"), None)] == ["of base"]


def test_models_that_share_weights_are_loaded_together(tmp_path: Path) -> None:
    one, other = (SimpleNamespace(folder=name) for name in ("one", "other"))
    # Equal, and yet another.
    third = SimpleNamespace(folder="one")
    several: Any = [Subject(str(at), weights) for at, weights in enumerate((one, other, one, third))]  # type: ignore[arg-type]
    case: Any = SimpleNamespace(subjects=tuple(several))
    groups = [(artifact, [subject.name for subject in group]) for artifact, group in Case.by_artifact(case)]
    assert [names for _, names in groups] == [["0", "2"], ["1"], ["3"]]
    assert [artifact for artifact, _ in groups] == [one, other, third]


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


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    artifact: Any = None
    with pytest.raises(FinrayError, match="the scores cannot be written: not a directory") as caught:
        _folder("m", None, artifact, EvaluationRequest(output=tmp_path / "file" / "out"))
    assert caught.value.where == str(tmp_path / "file" / "out")
    assert "--output" in str(caught.value.repair)


# --- their rows -----------------------------------------------------------------------------------------------------


class Speaking:
    """A tokenizer as far as rows depend on it."""

    def __init__(self, words: str, chat_template: str) -> None:
        self.words, self.chat_template = words, chat_template

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words.split())}


TOKENIZERS = {
    "tuned": Speaking("a b", "x"),
    "same": Speaking("a b", "x"),
    "vocabulary": Speaking("b a", "x"),
    "template": Speaking("a b", "y"),
    "began": Speaking("c", "z"),
}


@pytest.mark.parametrize(
    ("name", "has_run", "shares"),
    [
        *(("same", True, True), ("vocabulary", True, False), ("template", True, False), ("tuned", True, True)),
        # A run's own base is not asked for its tokenizer; the same folder beside a model without a run is.
        *(("began", True, True), ("began", False, False)),
    ],
)
def test_rows_are_shared_by_models_that_read_alike(
    preparing: Preparing,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    put: Write,
    name: str,
    has_run: bool,
    shares: bool,
) -> None:
    config = preparing.config(put("rows.jsonl", lines([SHORT])))
    config = config.model_copy(update={"model": ModelConfig(name="began", task="causal_lm")})
    artifacts: dict[str, Any] = {one: Artifact(Path(one), None, {}) for one in TOKENIZERS}
    monkeypatch.setattr(subjects, "load_tokenizer", lambda model: TOKENIZERS[model.name])
    split: Any = SimpleNamespace(source_rows=np.array([3, 4, 7]), within=np.array([0, 1, 0]))
    other: Any = SimpleNamespace(source_rows=np.array([7, 4, 3, 4]), within=np.array([0, 0, 0, 1]))
    rows = Rows("eval", split, (2, 1), "dataset", True, "trained on", "test")  # type: ignore[arg-type]
    asked: list[Any] = []

    def of_file(own: Any, *, root: Any, stream: str) -> Any:
        asked.append((own.model.name, own.model.task, own.data == config.data, root, stream))
        return other, "another dataset"

    monkeypatch.setattr(subjects, "of_file", of_file)
    case: Any = SimpleNamespace(
        rows=rows,
        config=config,
        run=RunDir(tmp_path / "runs" / "a") if has_run else None,
        tuned=SimpleNamespace(artifact=artifacts["tuned"]),
    )
    found = Case.rows_for(case, artifacts[name])
    if shares:
        assert found is rows
        assert asked == []
        return
    root = tmp_path / "runs" / PREPARED if has_run else None
    assert asked == [(name, "causal_lm", True, root, "test")]
    # The same rows, in the same order: where the other split has them.
    assert found == Rows("eval", other, (0, 3), "another dataset", True, None, "test")  # type: ignore[arg-type]
    case.config = config.model_copy(update={"prepare": config.prepare.model_copy(update={"dir": "d"})})
    Case.rows_for(case, artifacts[name])
    assert asked[1][3] is None
    case.rows = None
    assert Case.rows_for(case, artifacts[name]) is None


class Held:
    """So many rows, each of a prompt and an answer but those that are ``whole``; the last of them are plain text."""

    def __init__(self, count: int, whole: int = 0, text: int = 0) -> None:
        self.count, self.whole, self.text = count, whole, text
        self.prompted = np.arange(count - text)

    def __len__(self) -> int:
        return self.count

    def row(self, number: int) -> tuple[Any, Any]:
        return np.array([1, 2]), np.array([number < self.whole or number >= self.count - self.text, 1])


HELD = Held(50)


def rows_of(case: Any) -> Any:
    """What the property works out, of a case that is not made from a model on the disk."""
    case._rows_of_file = lambda: Case._rows_of_file(case)
    return Case.rows.func(case)  # type: ignore[attr-defined]


@pytest.fixture
def a_case(preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The case of a run, whose rows are made up; in `asked`, what was read for it."""
    config = preparing.config(put("own.jsonl", lines([SHORT])), train_on="completion")
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": 11, "output_dir": "runs"})})
    config = config.model_copy(update={"prepare": config.prepare.model_copy(update={"dir": None})})
    counts = SimpleNamespace(dropped_too_long=0, bad_rows=0, truncated=0)
    manifest = SimpleNamespace(splits=defaultdict(lambda: counts))
    dataset = SimpleNamespace(kind=lambda split="train": "pairs", manifest=manifest)
    asked: list[Any] = []

    def of_file(own: Any, *, root: Any) -> Any:
        asked.append(("file", own.classification.labels, root))
        return HELD, dataset

    def of_run(run: Any, own: Any, split: Any) -> Any:
        asked.append(("run", run.path, own is case.config, split))
        return "test", HELD, dataset, "trained on"

    monkeypatch.setattr(subjects, "of_file", of_file)
    monkeypatch.setattr(subjects, "of_run", of_run)
    monkeypatch.setattr(subjects, "saved_config", lambda run: config)
    monkeypatch.setattr(subjects, "splits_of", lambda run, own: (SimpleNamespace(train=(run.path, own is config)), 0))
    monkeypatch.setattr(subjects, "stream_of", lambda name, data: f"{name} of {data is config.data}")
    case: Any = SimpleNamespace(
        request=EvaluationRequest(),
        run=SimpleNamespace(path=tmp_path / "runs" / "one"),
        config=config.model_copy(),
        resolved=None,
        spec=task_spec("causal_lm"),
        subjects=(),
        notes=[],
        dataset=dataset,
        asked=asked,
    )
    return case


def test_rows_of_a_run_are_those_that_it_held_out(a_case: Any) -> None:
    a_case.request = EvaluationRequest(split="test")
    rows = rows_of(a_case)
    assert a_case.asked == [("run", a_case.run.path, True, "test")]
    assert rows == Rows("test", HELD, tuple(range(50)), a_case.dataset, True, "trained on", "test of True")  # type: ignore[arg-type]
    assert a_case.notes == []
    # With fewer, the rows are drawn by the run's own seed.
    for seed in (11, 12):
        changes = {"evaluation": {"max_rows": 7}, "run": {"seed": seed}}
        a_case.config = a_case.config.model_copy(
            update={name: getattr(a_case.config, name).model_copy(update=one) for name, one in changes.items()}
        )
        assert rows_of(a_case).numbers == tuple(sample(50, 7, seed=seed).tolist())
    a_case.run = None
    assert rows_of(a_case) is None


@pytest.mark.parametrize(
    ("section", "name", "value"), [("data", "eval_ratio", 0.3), ("data", "test_ratio", 0.3), ("run", "seed", 12)]
)
def test_other_ratios_than_those_of_the_training_are_said_to_change_nothing(
    a_case: Any, section: str, name: str, value: float
) -> None:
    changed = getattr(a_case.config, section).model_copy(update={name: value})
    a_case.config = a_case.config.model_copy(update={section: changed})
    rows_of(a_case)
    assert a_case.notes == ["rows are held out as in the training; other ratios or seeds do not change that"]


@pytest.mark.parametrize("labels", [(), ("yes", "no")])
def test_rows_of_a_file_are_read_beside_a_run_with_its_classes(a_case: Any, tmp_path: Path, labels: Any) -> None:
    a_case.request = EvaluationRequest(file="some/rows.jsonl")
    a_case.resolved = SimpleNamespace(labels=labels)
    rows = rows_of(a_case)
    prepared = tmp_path / "runs" / PREPARED
    assert a_case.asked == [("file", list(labels) or None, prepared)]
    train = (a_case.run.path, True)
    assert rows == Rows("rows.jsonl", HELD, tuple(range(50)), a_case.dataset, True, train, "train")  # type: ignore[arg-type]
    own = a_case.config
    for section, name, place in (("prepare", "dir", "elsewhere"), ("run", "output_dir", "s3://bucket/runs")):
        changed = getattr(own, section).model_copy(update={name: place})
        a_case.config = own.model_copy(update={section: changed})
        rows_of(a_case)
        assert a_case.asked[-1][2] is None
    # What the config of somebody else's run says is not the place for the user's rows.
    a_case.config = of_stranger(a_case.config, "config.yaml")
    rows_of(a_case)
    assert a_case.asked[-1][2] == prepared
    a_case.config, a_case.run = own, None
    assert rows_of(a_case).train is None
    assert a_case.asked[-1][2] is None
    assert a_case.notes == []


def test_rows_of_a_file_are_scored_also_where_those_of_the_training_are_gone(
    a_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> Any:
        raise FinrayError("the file does not exist", where="own.jsonl")

    monkeypatch.setattr(subjects, "splits_of", gone)
    a_case.request = EvaluationRequest(file="rows.jsonl")
    assert rows_of(a_case).train is None
    assert a_case.notes == ["overlap with the training data was not checked: the file does not exist"]
    a_case.request = EvaluationRequest(file="rows.jsonl", split="test")
    with pytest.raises(FinrayError, match="--file and --split exclude each other"):
        rows_of(a_case)


@pytest.mark.parametrize(
    ("kind", "train_on", "asks"),
    [("pairs", "completion", True), ("pairs", "all", False), ("text", "completion", False), ("text", "all", False)],
)
def test_prompts_are_answered_where_rows_have_any(a_case: Any, kind: str, train_on: str, asks: bool) -> None:
    a_case.dataset.kind = lambda split="train": kind
    data = a_case.config.data.model_copy(update={"train_on": train_on})
    a_case.config = a_case.config.model_copy(update={"data": data})
    assert rows_of(a_case).asks == asks


def test_rows_of_a_mix_without_a_prompt_are_not_asked_and_counted(a_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "of_run", lambda *_: ("test", Held(9, whole=2, text=3), a_case.dataset, None))
    rows = rows_of(a_case)
    assert (rows.asks, rows.numbers) == (True, (2, 3, 4, 5))
    assert a_case.notes == ["5 rows without a prompt were skipped: they have neither answers nor losses"]
    # Those that a ratio holds out may all be text.
    monkeypatch.setattr(subjects, "of_run", lambda *_: ("test", Held(3, text=3), a_case.dataset, None))
    rows = rows_of(a_case)
    assert (rows.asks, rows.numbers) == (False, (0, 1, 2))


def test_rows_of_a_run_whose_references_were_cut_off_are_counted(a_case: Any) -> None:
    held = Held(9)
    held.lengths = np.array([64, 3, 64, 9, 9, 9, 9, 9, 64])  # type: ignore[attr-defined]
    a_case.asked = []
    subjects_of_run = ("test", held, a_case.dataset, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subjects, "of_run", lambda *_: subjects_of_run)
        rows_of(a_case)
        assert a_case.notes == [], "none was cut off: they are just that long"
        a_case.dataset.manifest.splits["test of True"].truncated = 4
        rows_of(a_case)
    assert a_case.notes == ["up to 3 references were cut off at data.max_length=64"]


@pytest.mark.parametrize(("kind", "trained"), [("chat", "completion"), ("chat", "chat"), ("completion", "completion")])
def test_rows_that_are_asked_as_chats_of_a_model_trained_without_them_are_noted(
    a_case: Any, tmp_path: Path, kind: str, trained: str
) -> None:
    a_case.request, a_case.run = EvaluationRequest(file=tmp_path / "rows.jsonl"), None
    a_case.dataset.kind = lambda split="train": kind
    a_case.subjects = (OWN, replace(OWN, artifact=Artifact(Path("m"), None, {"rows": trained})))  # type: ignore[typeddict-item]
    rows_of(a_case)
    said = [note for note in a_case.notes if "`data.format=prompt_completion` asks them as in the training" in note]
    assert len(said) == (kind == "chat" and trained == "completion")


def test_tasks_of_lm_eval_need_no_rows_of_the_run(a_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_run(*_: Any) -> Any:
        raise DataError("the run has no held-out rows to evaluate on")

    monkeypatch.setattr(subjects, "of_run", of_run)
    a_case.request = EvaluationRequest(harness=["arc_easy"])
    assert rows_of(a_case) is None
    assert a_case.notes == ["only the tasks of lm-eval: the run has no held-out rows to evaluate on"]
    for asked in ({}, {"harness": ["arc_easy"], "split": "test"}, {"harness": ["arc_easy"], "metrics": ["bleu"]}):
        a_case.request = EvaluationRequest(**asked)
        with pytest.raises(DataError, match="no held-out rows"):
            rows_of(a_case)


@pytest.mark.parametrize(
    ("kind", "task", "said"),
    [
        ("labelled", "causal_lm", "rows with labels are for a classifier"),
        ("pairs", "sequence_classification", "rows with prompts and answers are not for a classifier"),
    ],
)
def test_rows_of_another_kind_than_the_model_reads_are_refused(a_case: Any, kind: str, task: str, said: str) -> None:
    a_case.dataset.kind, a_case.spec = lambda split="train": kind, task_spec(task)
    with pytest.raises(FinrayError, match=said):
        rows_of(a_case)
    a_case.dataset.kind = lambda split="train": "labelled" if task == "sequence_classification" else "pairs"
    assert rows_of(a_case).name == "test"


@pytest.mark.parametrize(
    ("asked", "saved", "resolved", "expected"),
    [
        # What the run resolved holds for the precision of its config, and no other.
        ("auto", "auto", "fp16", torch.float16),
        ("bf16", "auto", "fp16", torch.bfloat16),
        ("fp32", "fp32", None, torch.float32),
        # Weights in bf16 are no other dtype in their arithmetic.
        ("bf16-true", "bf16-true", "bf16-true", torch.bfloat16),
    ],
)
def test_a_gpu_computes_in_the_dtype_of_the_training(
    monkeypatch: pytest.MonkeyPatch, asked: str, saved: str, resolved: str | None, expected: torch.dtype
) -> None:
    """Also one that has no bf16, where a model of which nothing is known is read in fp32."""
    monkeypatch.setattr(subjects, "inference_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: False)
    config, own = (SimpleNamespace(train=SimpleNamespace(precision=one)) for one in (asked, saved))
    monkeypatch.setattr(subjects, "saved_config", lambda run: own)
    known = None if resolved is None else SimpleNamespace(precision=resolved)
    case = SimpleNamespace(config=config, run="a run", resolved=known)
    assert Case.dtype.func(case) == expected  # type: ignore[attr-defined]
    case.run = None
    alone = torch.float32 if asked in ("auto", "fp32") else torch.bfloat16
    assert Case.dtype.func(case) == alone  # type: ignore[attr-defined]


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
    data = {
        **{
            "mix": [{"source": "other"}],
            "group_by": "id",
            "train_split": "part",
            "eval_source": "e",
            "eval_split": "v",
        },
        **{"test_split": "t", "subset": "s", "revision": "r", "eval_ratio": 0.0, "test_ratio": 0.25},
    }
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
    # Without a file the run's rows stay what they are.
    part = own.model_copy(update={"data": own.data.model_copy(update={"test_ratio": 0.25, "group_by": "id"})})
    monkeypatch.setattr(subjects, "saved_config", lambda run: part)
    kept = subjects._config_of("m", run, artifact, EvaluationRequest(), ())
    assert kept.data.model_dump() == part.data.model_dump()
    assert kept.evaluation.model_dump() == own.evaluation.model_dump()


def test_a_file_is_read_for_an_exported_model_as_in_its_training(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SimpleNamespace(get_text_config=SimpleNamespace)
    monkeypatch.setattr(subjects, "packing_of", lambda model: SimpleNamespace(positions=None))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda **options: text)
    request = EvaluationRequest(file=put("rows.jsonl", lines([SHORT])))
    notes: Any = {"rows": "chat", "system": "be brief", "tool_format": "hermes"}
    notes["chat_template_arguments"] = {"enable_thinking": False}
    found = subjects._config_of("m", None, Artifact(preparing.model, None, notes), request, ())
    assert (found.data.format, found.data.system, found.data.tool_format) == ("auto", "be brief", "hermes")
    assert found.model.chat_template_arguments == {"enable_thinking": False}
    found = subjects._config_of("m", None, Artifact(preparing.model, None, {"rows": "completion"}), request, ())
    assert (found.data.format, found.data.system, found.data.tool_format) == ("auto", None, "plain")
    assert (found.model.chat_template_arguments, found.classification.labels) == ({}, None)
    labelled: Any = {"auto_class": task_spec("sequence_classification").auto_class, "labels": ["no", "yes"]}
    found = subjects._config_of("m", None, Artifact(preparing.model, None, labelled), request, ())
    assert (found.model.task, found.classification.labels) == ("sequence_classification", ["no", "yes"])
    # An adapter has its template beside it, too.
    tokenizer = SimpleNamespace(chat_template="{{ messages }}")
    monkeypatch.setattr(subjects, "load_tokenizer", lambda model: tokenizer)
    found = subjects._config_of("m", None, Artifact(Path("a"), ModelConfig(name="base"), {}), request, ())
    assert (found.model.name, found.model.chat_template) == ("base", "{{ messages }}")
    # What is asked for goes before.
    found = subjects._config_of("m", None, Artifact(preparing.model, None, notes), request, ["data.system=null"])
    assert found.data.system is None


@pytest.mark.parametrize(
    "request_", [{"max_rows": 0}, {"max_rows": -5}, {"max_rows": 2.5}, {"max_new_tokens": 0}, {"batch_size": 0}]
)
def test_numbers_of_a_request_are_checked_as_those_of_a_config(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
) -> None:
    own = preparing.config(put("own.jsonl", lines([SHORT])))
    monkeypatch.setattr(subjects, "saved_config", lambda run: own)
    given: Any = "a run", None
    with pytest.raises(ConfigError) as caught:
        subjects._config_of("m", *given, EvaluationRequest(**request_), ["evaluation.max_rows=9"])
    (name,) = request_
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [f"evaluation.{name}"]


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


def test_a_file_that_is_not_there_is_said_before_a_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    artifact: Any = Artifact(Path("m"), None, {})
    with pytest.raises(FinrayError, match="the file does not exist") as caught:
        subjects._config_of("m", None, artifact, EvaluationRequest(file="nowhere.jsonl"), ())
    assert caught.value.where == "--file nowhere.jsonl"
