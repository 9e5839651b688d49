"""`finray evaluate` beyond a run's held-out rows: models, files, baselines, scores, and what is refused before work."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.config import trust
from finray.config.requests import EvaluationRequest
from finray.errors import ConfigError, DataError, FinrayError, ModelError
from finray.evaluation import artifacts
from finray.evaluation.artifacts import artifact_of
from finray.evaluation.compare import JUDGES
from finray.evaluation.engines import Answer
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.statistics import adjusted
from finray.evaluation.subjects import Case
from finray.hardware import cpu_has_bf16
from tests.support import runs, tiny
from tests.support.evaluated import conversation, evaluate, loss_of, write

pytestmark = pytest.mark.long


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded or answered."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("finray.evaluation.answers.make_engine", refuse)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Rows of another file: two that were trained on, and two new ones."""
    rows = [{"messages": conversation(number)} for number in (2, 20, 4, 21)]
    return write(tmp_path / "other.jsonl", rows)


def test_rows_of_a_file_are_scored_and_those_that_were_trained_on_are_named(
    run_dir: Path, other: Path, tmp_path: Path
) -> None:
    found = evaluate(run_dir, file=other)
    assert found.folder == run_dir / "evaluation" / "other"
    assert [one.reference for one in found.predictions] == [conversation(one)[3]["content"] for one in (2, 20, 4, 21)]
    assert found.overlap is not None
    assert found.overlap.rows >= {0, 2}
    named = {(row.rpartition(":")[2], train.rpartition(":")[2]) for row, train, _ in found.overlap.named}
    assert named >= {("1", "3"), ("3", "5")}
    left = [number for number in range(4) if number not in found.overlap.rows]
    if left:
        # What is left is what those rows alone come to.
        alone = write(tmp_path / "alone.jsonl", [{"messages": conversation((2, 20, 4, 21)[number])} for number in left])
        without = {one.name: one for one in found.held_out}
        assert without["tuned"].loss == pytest.approx(evaluate(run_dir, file=alone).tuned.loss, rel=1e-5)
    written = json.loads((found.folder / "metrics.json").read_text())
    assert {one["row"] for one in written["in_training_data"]["rows"]} >= {"other.jsonl:1", "other.jsonl:3"}
    assert written["made_by"]["data"]["source"].endswith("other.jsonl")
    # Where every row was trained on, there is nothing left to score.
    trained_on = write(tmp_path / "trained_on.jsonl", [{"messages": conversation(number)} for number in (2, 4)])
    every = evaluate(run_dir, file=trained_on, output=tmp_path / "out", max_new_tokens=1)
    assert every.overlap is not None
    assert (every.overlap.rows, every.held_out) == ({0, 1}, ())


def test_the_training_rows_may_be_scored_and_it_is_said_what_they_are(run_dir: Path) -> None:
    found = evaluate(run_dir, split="train", max_rows=4)
    assert found.rows == 4
    assert any("trained on" in note for note in found.notes)
    assert found.overlap is None


@pytest.mark.parametrize("kind", ["checkpoint", "model", "adapter"])
def test_checkpoints_adapters_and_model_directories_are_scored_as_plain_transformers_would(
    run_dir: Path, tiny_model_dir: Path, other: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "checkpoint":
        model = run_dir / "checkpoint-000001"
    elif kind == "model":
        model = Path(shutil.copytree(tiny_model_dir, tmp_path / "a-model"))
        (model / "finray.json").write_text('{"rows": "completion"}')
    else:
        model = Path(shutil.copytree(run_dir / "final", tmp_path / "an-adapter"))
    found = evaluate(model, file=other, max_new_tokens=2, output=tmp_path / "out")
    assert [one.name for one in found.models] == {
        "checkpoint": ["base", "tuned"],
        "model": ["a-model"],
        "adapter": ["base", "an-adapter"],
    }[kind]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    first = found.models[0]
    expected = loss_of(plain, tokenizer, [conversation(number) for number in (2, 20, 4, 21)])
    # Without a run that says otherwise, a CPU that multiplies bf16 computes in it.
    in_fp32 = found.made_by["dtype"] == "float32"
    assert in_fp32 or (kind != "checkpoint" and cpu_has_bf16())
    assert first.loss == pytest.approx(expected, rel=1e-4 if in_fp32 else 2e-3)
    if kind == "model":
        assert found.compared == ()
        assert any("training data is unknown" in note for note in found.notes)
        # These rows are asked as chats.
        assert any("`data.format=prompt_completion` asks them as in the training" in note for note in found.notes)
    else:
        assert found.models[1].loss != pytest.approx(first.loss, rel=1e-3)


def test_rows_are_asked_of_an_exported_model_as_in_its_training_unless_told_otherwise(
    tiny_model_dir: Path, other: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    template = model / "chat_template.jinja"
    template.write_text("{{ word }}" + template.read_text())
    notes = {"rows": "chat", "system": "be brief", "chat_template_arguments": {"word": "a bird"}}
    (model / "finray.json").write_text(json.dumps(notes))
    for overrides, system in (((), "<|im_start|>system\nbe brief<|im_end|>\n"), (["data.system=null"], "")):
        found = evaluate(model, overrides, file=other, max_rows=1, max_new_tokens=1)
        assert found.predictions[0].prompt.startswith(f"a bird{system}<|im_start|>user\n")


def test_a_model_of_the_hub_is_evaluated_by_its_name(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.in_hub_cache(tmp_path / "hub", tokenizer, monkeypatch)
    rows = write(tmp_path / "rows.jsonl", [{"messages": conversation(number)} for number in range(4)])
    named = evaluate("org/tiny", file=rows, max_new_tokens=2, output=tmp_path / "named")
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    there = evaluate(folder, file=rows, max_new_tokens=2, output=tmp_path / "there")
    ((one,), (other,)) = (named.models, there.models)
    assert one.name == "tiny"
    assert one.loss == other.loss
    lines = [(tmp_path / name / "predictions.jsonl").read_text().splitlines() for name in ("named", "there")]
    one_says, other_says = ([list(json.loads(line)["answers"].values()) for line in part] for part in lines)
    assert one_says == other_says


@pytest.mark.parametrize(("overrides", "dtype"), [((), torch.bfloat16), (("train.precision=fp32",), torch.float32)])
def test_a_model_of_no_run_has_the_dtype_that_is_asked_for(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], dtype: Any
) -> None:
    monkeypatch.setattr(artifacts, "cpu_has_bf16", lambda: True)
    write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    request = EvaluationRequest(file=tmp_path / "rows.jsonl", output=tmp_path / "out")
    # The user's own, where the model lies too.
    (tmp_path / "config.yaml").write_text("run: {name: mine}\n")
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    case = Case.of(model, overrides, request, tasks=JUDGES, progress=lambda *_, **__: None)
    assert (case.run, case.tuned.name, case.dtype) == (None, "model", dtype)


@pytest.mark.parametrize(("signum", "code", "word"), [(2, 130, "interrupted"), (15, 143, "ended by SIGTERM")])
@pytest.mark.parametrize("where", ["before", "during"])
def test_a_signal_says_what_is_kept_and_the_same_command_continues(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, signum: int, code: int, word: str
) -> None:
    """Before a model is loaded nothing is kept, and nothing is said to be."""
    command = ("evaluate", run_dir, "--engine", "transformers", "--output", tmp_path / "scores")
    real, answered = TransformersEngine.generate, list[int]()

    def answering(self: Any, *given: Any, **named: Any) -> Iterator[Answer]:
        for answer in real(self, *given, **named):
            answered.append(answer.row)
            yield answer
            if signum and where == "during":
                os.kill(os.getpid(), signum)

    def finding(*given: Any, **named: Any) -> Any:
        if where == "before":
            os.kill(os.getpid(), signum)
        return artifact_of(*given, **named)

    monkeypatch.setattr(TransformersEngine, "generate", answering)
    monkeypatch.setattr("finray.evaluation.subjects.artifact_of", finding)
    ended, _, err = runs.finray(*command)
    said = "; finished rows are kept; the same command continues" if answered else "; the same command starts over"
    assert (ended, err) == (code, f"{word}{said}: finray {' '.join(map(str, command))}\n")
    assert bool(answered) == (where == "during")
    signum, where = 0, ""
    ended, out, err = runs.finray(*command)
    assert ended == 0, out + err
    # Each row was answered once by the base and once by the tuned model.
    assert len(answered) == 2 * 3


def test_several_baselines_each_have_a_sentence_and_count_for_each_other(
    run_dir: Path, other: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    baselines = ["base", str(run_dir / "checkpoint-000001"), str(tiny_model_dir)]
    found = evaluate(run_dir, file=other, baselines=baselines, output=tmp_path)
    # Each alone, with what was computed before.
    alone = [evaluate(run_dir, file=other, baselines=[one], output=tmp_path) for one in baselines]
    for score in ("loss", "exact_match"):
        p, each = (
            [one.test.p for part in parts for one in part.compared if one.score == score] for parts in ([found], alone)
        )
        assert p == pytest.approx(adjusted(each))
    assert p != each or min(each) == 1
    names = [one.name for one in found.models]
    assert names == ["base", "checkpoint-000001", tiny_model_dir.name, "tuned"]
    assert found.models[0].loss == pytest.approx(found.models[2].loss, rel=1e-5)
    assert len(found.sentences) == 3
    assert {one.baseline for one in found.compared} == set(names[:3])


@pytest.mark.parametrize("is_file", [True, False])
def test_a_baseline_with_another_tokenizer_reads_the_same_rows_by_its_own(
    run_dir: Path, other: Path, tmp_path: Path, tiny_model_dir: Path, is_file: bool
) -> None:
    """Of a file, or of the run's held-out rows, which are in a file of their own.

    A chat template of its own: its prompts are its own, its losses are of other tokens and not compared.
    """
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "spoken"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>please {{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>please assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(str(model))
    asked: list[str] = []
    answer = TransformersEngine.generate

    def generate(engine: Any, prompts: Any, *arguments: Any, **options: Any) -> Iterator[Answer]:
        asked.extend(engine.tokenizer.decode(prompt) for prompt in prompts)
        yield from answer(engine, prompts, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", generate)
        file = other if is_file else None
        evaluate(run_dir, file=file, baselines=[str(model)], max_rows=2, output=tmp_path / "out")
    theirs = [prompt for prompt in asked if "please user" in prompt]
    ours = [prompt for prompt in asked if "please user" not in prompt]
    assert len(theirs) == len(ours) == 2
    assert sorted(prompt.replace("please ", "") for prompt in theirs) == sorted(ours)


def test_the_columns_of_held_out_rows_are_those_of_their_own_file(run_dir: Path) -> None:
    """The run's training rows have the same numbers in theirs."""
    case = Case.of(str(run_dir), (), EvaluationRequest(), tasks=JUDGES, progress=lambda *_, **__: None)
    assert case.rows is not None
    found = dict(case.rows.columns(case.config))
    assert [found[index]["messages"] for index in range(3)] == [conversation(number) for number in (6, 7, 8)]


@pytest.mark.parametrize("has_template", [True, False])
def test_choices_are_compared_by_their_likelihood(tiny_model_dir: Path, tmp_path: Path, has_template: bool) -> None:
    """They begin where answers do in training: after plain words with a space."""
    choices = ["red", "a small dog", "blue one", "three"]
    space = "" if has_template else " "
    rows = [
        {"prompt": f"what {word}", "completion": space + choices[place], "choices": choices}
        for place, word in enumerate(["one", "two", "three", "four"])
    ]
    file = write(tmp_path / "choices.jsonl", rows)
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "m"))
    if not has_template:
        (model / "chat_template.jinja").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", None)
        found = evaluate(model, file=file, metrics=["multiple_choice", "multiple_choice_by_length"])
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    right = by_length = 0
    for place, row in enumerate(rows):
        text = (
            f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n" if has_template else row["prompt"]
        )
        values = []
        for choice in choices:
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = [*prompt, *tokenizer(space + choice, add_special_tokens=False)["input_ids"]]
            with torch.no_grad():
                logits = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
            values.append(sum(float(logits[at - 1, ids[at]]) for at in range(len(prompt), len(ids))))
        right += max(range(4), key=values.__getitem__) == place
        by_length += max(range(4), key=lambda one: values[one] / len(choices[one])) == place
    assert found.tuned.metrics == {"multiple_choice": right / 4, "multiple_choice_by_length": by_length / 4}
    fixed = evaluate(
        model, ["evaluation.scoring.choices=" + json.dumps(choices)], file=file, metrics=["multiple_choice"]
    )
    assert fixed.tuned.metrics["multiple_choice"] == right / 4
    # Other choices are another question: nothing of the first is taken for it.
    fewer = ["evaluation.scoring.choices=" + json.dumps([*choices[::-1]])]
    again = evaluate(model, fewer, file=file, metrics=["multiple_choice"])
    assert (again.tuned.metrics["multiple_choice"], again.rates != ()) == (right / 4, True)


def test_a_choice_that_the_answer_is_not_among_is_an_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "x"}, {"prompt": "b", "completion": "y"}])
    wrong = ["evaluation.scoring.choices=[x, z]"]
    with pytest.raises(DataError, match="`y` is not one of the choices x, z") as caught:
        evaluate(tiny_model_dir, wrong, file=file, metrics=["multiple_choice"], output=tmp_path)
    assert str(caught.value.where).endswith("rows.jsonl:2")
    for odd in ({}, {"choices": "xy"}, {"choices": ["x"]}, {"choices": [1, 2]}):
        file = write(tmp_path / "odd.jsonl", [{"prompt": "a", "completion": "x", **odd}])
        with pytest.raises(DataError, match=r"no column `choices` with a list of texts \(columns: prompt, ") as caught:
            evaluate(tiny_model_dir, file=file, metrics=["multiple_choice"], output=tmp_path)
        assert str(caught.value.where).endswith("odd.jsonl:1")


def test_code_is_checked_with_the_columns_of_its_row(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_code_check.py").write_text("def check(answer, row):\n    return eval(answer) == row['wanted']\n")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"add {number}", "completion": "0", "wanted": 3 + number} for number in range(3)]
    file = write(tmp_path / "code.jsonl", rows)

    def generate(engine: Any, prompts: Any, sampling: Any, *, rows: Any, **options: Any) -> Iterator[Answer]:
        # The second attempt of the first two rows is right.
        yield from (Answer(row, (1,), f"3 + {row // 2}" if row in (1, 3) else "9", "stop") for row in rows)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    settings = [
        f"evaluation.scoring.{one}" for one in ("checker=my_code_check:check", "run_code=true", "attempts=2", "k=1")
    ]
    asked: dict[str, Any] = {"file": file, "metrics": ["pass_at_k"], "temperature": 0.8, "output": tmp_path / "out"}
    # A single answer to each before: it belongs to other numbers.
    evaluate(tiny_model_dir, [*settings, "evaluation.scoring.attempts=1"], **asked)
    found = evaluate(tiny_model_dir, settings, **asked)
    assert found.tuned.metrics["pass_at_k"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert found.predictions[0].answers[tiny_model_dir.name] == ["9", "3 + 0"]
    assert found.tuned.scores["pass_at_k"].json()["checks"]["right"] == 2
    # A checker that fails at some answers is no wrong answer, and at all it is an error.
    (tmp_path / "my_code_check.py").write_text("def check(answer, row):\n    return answer != '9' or anwser\n")
    found = evaluate(tiny_model_dir, settings, **asked)
    (note,) = [one for one in found.notes if "checks" in one]
    assert note.startswith(f"{tiny_model_dir.name} pass at k: of 6 checks 4 failed: counted as not passed; ")
    checks = found.json()["models"][found.tuned.name]["pass_at_k"]["checks"]
    assert (checks["right"], checks["wrong"], checks["failed"]) == (2, 0, 4)
    assert "NameError: name 'anwser' is not defined" in checks["first_failure"]
    (tmp_path / "my_code_check.py").write_text("def check(answer, row):\n    return anwser\n")
    with pytest.raises(ConfigError, match=r"the checker failed at every answer \(6\): NameError"):
        evaluate(tiny_model_dir, settings, **asked)
    with pytest.raises(ConfigError, match="2 attempts with greedy decoding"):
        evaluate(tiny_model_dir, settings, file=file, metrics=["pass_at_k"], output=tmp_path / "out")


def test_models_that_share_weights_share_an_engine_which_is_closed_before_the_next(
    run_dir: Path, other: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    begin, close = TransformersEngine.__init__, TransformersEngine.close

    def beginning(self: Any, loading: Any) -> None:
        events.append(f"open {loading.artifact.folder.name}")
        begin(self, loading)

    def closing(self: Any) -> None:
        events.append("close")
        close(self)

    monkeypatch.setattr(TransformersEngine, "__init__", beginning)
    monkeypatch.setattr(TransformersEngine, "close", closing)
    options: dict[str, Any] = {"baselines": ["base", str(tiny_model_dir)], "max_new_tokens": 1}
    found = evaluate(run_dir, file=other, output=tmp_path, **options)
    assert [note for note in found.notes if "cut off" in note] == [
        f"{one.name}: 4 of 4 answers were cut off, after --max-new-tokens=1 or at the model's length"
        for one in (found.models[0], found.models[2], found.models[1])
    ]
    assert events == ["open final", "close", f"open {tiny_model_dir.name}", "close"]


def test_rows_of_a_file_are_scored_where_those_of_the_training_are_gone(
    run_dir: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> Any:
        raise FinrayError("the file does not exist", where="own.jsonl")

    monkeypatch.setattr("finray.evaluation.subjects.splits_of", gone)
    found = evaluate(run_dir, file=other, output=tmp_path, max_new_tokens=1)
    assert (found.rows, found.overlap) == (4, None)
    assert "overlap with the training data was not checked: the file does not exist" in found.notes


# --- what is refused, before a model is loaded ---------------------------------------------


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": ["bertscore"]}, "needs an encoder model"),
        ({"metrics": ["no_such"]}, "unknown name"),
        ({"split": "test"}, "no split `test`"),
        ({"split": "train", "file": __file__}, "--file and --split exclude each other"),
        ({"file": "nowhere.jsonl"}, "does not exist"),
        ({"baselines": ["no/such/model"]}, "no/such/model"),
        ({"temperature": -1.0}, "cannot be used"),
        *(({name: 0}, f"evaluation.{name}") for name in ("max_rows", "max_new_tokens", "batch_size")),
        ({"overrides": ["evaluation.metrix=[]"]}, "metrix"),
        ({"overrides": ["evaluation.metric=accuracy"]}, "causal_lm has no metric `accuracy`"),
        ({"engine": "fast"}, "known names are transformers, vllm"),
        ({"overrides": ["data.max_length=9"]}, "none of the 6 rows"),
        ({"base": "/no/such/base"}, "/no/such/base"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(
    run_dir: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    overrides = arguments.get("overrides", ())
    arguments = {name: value for name, value in arguments.items() if name != "overrides"}
    before = {path: path.read_bytes() for path in (run_dir / "final").rglob("*") if path.is_file()}
    with pytest.raises(FinrayError, match=message) as caught:
        evaluate(run_dir, overrides, output=tmp_path / "out", **arguments)
    assert caught.value.exit_code == 2
    assert before == {path: path.read_bytes() for path in (run_dir / "final").rglob("*") if path.is_file()}


@pytest.mark.usefixtures("unloaded")
def test_a_file_is_read_by_the_config_of_a_run_that_evaluated_as_it_went(
    run_dir: Path, other: Path, tmp_path: Path
) -> None:
    """What asks for held-out rows in training has them there; a metric that the task has not is still refused."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    config = (copy / "config.yaml").read_text()
    changed = config.replace("every_steps: null", "every_steps: 1").replace("metric: null", "metric: perplexity")
    assert changed.count("every_steps: 1\n") == 2
    (copy / "config.yaml").write_text(changed)
    trust.accept(copy / "config.yaml")
    with pytest.raises(AssertionError, match="a model was loaded"):
        evaluate(copy, file=other, output=tmp_path / "out")
    with pytest.raises(ConfigError, match="no metric `accuracy`"):
        evaluate(copy, ["evaluation.metric=accuracy"], file=other, output=tmp_path / "out")


@pytest.mark.usefixtures("unloaded")
def test_a_model_without_rows_is_told_of_files(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no rows to evaluate") as caught:
        evaluate(tiny_model_dir, output=tmp_path)
    assert "--file" in str(caught.value.repair)
    monkeypatch.chdir(tmp_path)
    Path("a-model").mkdir()
    with pytest.raises(DataError, match="did you mean `a-model`"):
        evaluate("a-modle")
    assert [one.name for one in tmp_path.iterdir()] == ["a-model"]
    with pytest.raises(ModelError):
        evaluate("no-such/model", file=write(tmp_path / "r.jsonl", [{"text": "x y"}]), output=tmp_path / "o")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("package", "arguments", "line"),
    [
        ("lm_eval", {"harness": ["arc_easy"]}, "pip install lm-eval"),
        ("sacrebleu", {"metrics": ["bleu"]}, "pip install sacrebleu"),
        ("rouge_score", {"metrics": ["rougeL"]}, "pip install rouge-score"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_pip_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, package: str, arguments: dict[str, Any], line: str
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else there(name, *more)
    )
    with pytest.raises(ConfigError) as caught:
        evaluate(run_dir, **arguments)
    assert line in str(caught.value.repair)


@pytest.mark.usefixtures("unloaded")
def test_an_engine_that_is_not_installed_is_named_before_rows_are_prepared(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.evaluation.subjects.of_run", None)
    monkeypatch.setattr("finray.evaluation.engines.vllm.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="vLLM is not installed") as caught:
        evaluate(run_dir, engine="vllm")
    assert "pip install vllm" in str(caught.value.repair)


# --- the harness ----------------------------------------------------------------------------------------------------

TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def test_the_harness_scores_base_and_adapter_as_its_own_model_does(
    run_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from peft import PeftModel

    words = ["red", "a small dog", "blue", "three trees"]
    rows = [{"question": f"what is {one}", "choices": words, "answer": one % 4} for one in range(12)]
    file = write(tmp_path / "colours.jsonl", rows)
    task = tmp_path / "colours.yaml"
    task.write_text(TASK.format(rows=file))
    found = evaluate(run_dir, harness=[str(task)], metrics=["exact_match"], output=tmp_path / "out")
    base = json.loads((run_dir / "final" / "adapter_config.json").read_text())["base_model_name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for name in ("base", "tuned"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if name == "tuned":
            model = PeftModel.from_pretrained(model, str(run_dir / "final"))
        theirs = simple_evaluate(
            HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=2),
            tasks=["colours"],
            task_manager=tasks,
            bootstrap_iters=0,
        )
        expected = theirs["results"]["colours"]["acc,none"]
        assert getattr(found, name).metrics["colours acc"] == pytest.approx(expected)
    (compared,) = [one for one in found.compared if one.score == "colours acc"]
    assert compared.rows == 12
    assert found.json()["made_by"]["versions"]["lm-eval"] == version("lm-eval")
    assert "exact_match" in found.tuned.metrics
    # Without any rows of one's own.
    alone = evaluate(tiny_model_dir, harness=[str(task)], output=tmp_path / "alone")
    assert (alone.rows, len(alone.predictions), alone.overlap) == (0, 0, None)
    assert alone.tuned.metrics == {"colours acc": found.base.metrics["colours acc"]}
