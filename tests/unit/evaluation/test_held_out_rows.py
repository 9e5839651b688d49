"""`finray evaluate`: which rows, which prompts, which model, and what is written; by text and by plain Transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import finray
from finray.checkpoint.rundir import RunDir, saved_config
from finray.config import trust
from finray.data.sampling.splits import sample
from finray.errors import DataError, FinrayError
from finray.evaluation.engines import Answer, Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.outcome import Comparison
from finray.evaluation.subjects import Subject
from tests.support import runs
from tests.support.evaluated import Train, conversation, evaluate, loss_of, text_of, write

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(run_dir: Path) -> Comparison:
    return evaluate(run_dir)


def models(run_dir: Path, base: Path) -> tuple[Any, Any]:
    """The base and the tuned model by Transformers and PEFT alone."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return plain, PeftModel.from_pretrained(again, str(run_dir / "final")).eval()


@pytest.mark.parametrize("override", ["data.eval_ratio=0.2", "run.seed=99"])
def test_rows_that_were_trained_on_are_not_held_out_by_another_ratio_or_seed(
    train: Train, tmp_path: Path, override: str
) -> None:
    run_dir = train(**{"data.eval_source": None, "data.eval_ratio": 0.5})
    own = evaluate(run_dir)
    again = evaluate(run_dir, [override], output=tmp_path / "again")
    assert [one.where for one in again.predictions] == [one.where for one in own.predictions]
    assert again.tuned.loss == own.tuned.loss
    assert own.rows == 3
    assert [sum("held out as in the training" in note for note in one.notes) for one in (own, again)] == [0, 1]


def test_the_prompt_is_all_before_the_last_answer_and_the_reference_that_answer(found: Comparison) -> None:
    assert found.rows == 3
    for number, prediction in enumerate(found.predictions, start=6):
        messages = conversation(number)
        assert prediction.prompt == f"{text_of(messages[:3])}<|im_start|>assistant\n"
        assert prediction.reference == messages[3]["content"]


def test_losses_are_those_of_plain_transformers_and_peft(
    found: Comparison, run_dir: Path, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    rows = [conversation(number) for number in (6, 7, 8)]
    base, tuned = (loss_of(model, tokenizer, rows) for model in models(run_dir, tiny_model_dir))
    assert found.base.loss == pytest.approx(base, rel=1e-4)
    assert found.tuned.loss == pytest.approx(tuned, rel=1e-4)
    assert abs(base - tuned) > 0.05, "or a mix-up would not show"


@torch.no_grad()
def test_answers_are_those_of_plain_transformers_and_peft(
    found: Comparison, run_dir: Path, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for model, name in zip(models(run_dir, tiny_model_dir), ("base", "tuned"), strict=True):
        for number, prediction in enumerate(found.predictions, start=6):
            text = f"{text_of(conversation(number)[:3])}<|im_start|>assistant\n"
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            answer: list[int] = []
            while len(answer) < 6:
                token = int(
                    model(torch.cat([ids, torch.tensor([answer], dtype=torch.int64)], 1)).logits[0, -1].argmax()
                )
                if token == tokenizer.eos_token_id:
                    break
                answer.append(token)
            assert prediction.answers[name] == [tokenizer.decode(answer, skip_special_tokens=True)]
            assert prediction.scores[name]["exact_match"] == 0.0


def test_files_hold_the_scores_and_every_row(found: Comparison, run_dir: Path) -> None:
    assert found.folder == run_dir / "evaluation"
    written = json.loads((found.folder / "metrics.json").read_text())
    assert written == json.loads(json.dumps(found.json()))
    assert written["models"] == {"base": found.base.json(), "tuned": found.tuned.json()}
    assert written["rows"] == 3
    made_by = written["made_by"]
    assert made_by["data"]["split"] == "eval"
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 0, "top_k": 0, "stop": []}
    sampling |= {"repetition_penalty": None}
    assert made_by["sampling"] == sampling
    assert {"finray", "torch", "transformers", "peft", "python"} <= set(made_by["versions"])
    assert made_by["engine"][0]["name"] == "transformers"
    assert {"metrics", "scoring"} <= made_by.keys()
    assert made_by["harness"] == []
    assert any(name == "adapter_model.safetensors" for name, *_ in made_by["model"]["weights"]["files"])
    lines = [json.loads(line) for line in (found.folder / "predictions.jsonl").read_text().splitlines()]
    assert [line["reference"] for line in lines] == [one.reference for one in found.predictions]
    assert set(lines[0]) == {"row", "where", "prompt", "reference", "answers", "scores"}
    assert lines[0]["where"].endswith("eval.jsonl:1")


def test_what_follows_the_last_learned_token_is_read_only_where_positions_depend_on_the_row(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, ask = list[int](), TransformersEngine.log_likelihood

    def noted(engine: Any, rows: Any, **options: Any) -> Any:
        read.append(sum(len(one.context) + len(one.tokens) for one in rows))
        return ask(engine, rows, **options)

    monkeypatch.setattr(TransformersEngine, "log_likelihood", noted)
    losses = []
    for turns in (False, True):
        monkeypatch.setattr(Subject, "turns", turns)
        options: dict[str, Any] = {"max_new_tokens": 1, "baselines": [], "output": tmp_path / str(turns)}
        losses.append(evaluate(run_dir, **options).tuned.loss)
    # A line's end after each of three answers.
    assert read[1] - read[0] == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_rates_are_of_what_this_call_computed(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(found: Comparison) -> dict[str, dict[str, Any]]:
        written = json.loads((found.folder / "metrics.json").read_text())["rates"]
        assert written == found.plain()["rates"]
        return {f"{one['model']} {one['part']}": one for one in written}

    told: list[tuple[str, int, int, str]] = []
    first = evaluate(
        run_dir,
        output=tmp_path / "new",
        progress=lambda what, done, *, total, rate="": told.append((what, done, total, rate)),
    )
    parts = [f"{model} {what}" for model in ("base", "tuned") for what in ("loss", "answers")]
    assert list(rates(first)) == parts
    assert [one[:3] for one in told] == [(part, done, 3) for part in parts for done in (1, 2, 3)]
    assert all("rows/s" in rate and "tokens/s" in rate for *_, rate in told)
    for one in rates(first).values():
        assert one["rows"] == 3
        assert one["tokens"] > 3
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert one["rows_per_second"] == pytest.approx(one["rows"] / one["seconds"])
    console = Console(record=True, width=200)
    first.print(console)
    text = console.export_text()
    assert all(f"{part}: " in text for part in parts)
    (losses, *_) = (tmp_path / "new").glob("losses-*.jsonl")
    losses.write_bytes(b"".join(losses.read_bytes().splitlines(keepends=True)[:-1]))
    assert [one["rows"] for one in rates(evaluate(run_dir, output=tmp_path / "new")).values()] == [1]
    assert rates(evaluate(run_dir, output=tmp_path / "new")) == {}
    # What was computed in another dtype is none of it.
    monkeypatch.setattr("finray.evaluation.subjects.inference_dtype", lambda *_: torch.bfloat16)
    assert list(rates(evaluate(run_dir, output=tmp_path / "new"))) == parts


def first_letters(answers: list[str], references: list[str]) -> float:
    return float(sum(answer == reference for answer, reference in zip(answers, references, strict=True)) + 10)


def answering(monkeypatch: pytest.MonkeyPatch, say: Callable[[int, bool], str]) -> list[tuple[int, bool]]:
    """An engine that says what it is told to, by row and whether the adapter takes part; returns what was asked."""
    asked: list[tuple[int, bool]] = []

    def generate(
        engine: Any, prompts: Any, sampling: Sampling, *, rows: Any, adapter: bool = True, **options: Any
    ) -> Iterator[Answer]:
        for row in rows:
            asked.append((row, adapter))
            yield Answer(row, (1,), say(row, adapter), "stop")

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    return asked


def test_exact_answers_are_counted_for_the_model_that_gave_them(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuned model is right twice, its base once; metrics are those of the config."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = (copy / "config.yaml").read_text()
    changed = config.replace("- exact_match", f"- exact_match\n  - {__name__}:first_letters")
    assert changed != config
    (copy / "config.yaml").write_text(changed)
    trust.accept(copy / "config.yaml")
    right = [conversation(number)[3]["content"] for number in (6, 7, 8)]
    tuned, base = ["no", right[1], right[2]], [right[0], "no", "no"]
    answering(monkeypatch, lambda row, adapter: (tuned if adapter else base)[row])
    shutil.rmtree(copy / "evaluation", ignore_errors=True)
    found = evaluate(copy)
    assert found.base.metrics == {"exact_match": pytest.approx(1 / 3), "first_letters": 11.0}
    assert found.tuned.metrics == {"exact_match": pytest.approx(2 / 3), "first_letters": 12.0}
    assert [one.scores["base"]["exact_match"] for one in found.predictions] == [1, 0, 0]
    # A number outside of 0 to 1 is shown as no percentage.
    assert not found.tuned.scores["first_letters"].is_share
    assert [one.scores["tuned"]["exact_match"] for one in found.predictions] == [0, 1, 1]
    (exact,) = [one for one in found.compared if one.score == "exact_match"]
    assert (exact.test.gained, exact.test.lost) == (2, 1)
    assert found.sentences[0].startswith("tuned and base cannot be told apart on exact match from 3 rows")


def test_what_was_answered_before_a_kill_is_not_asked_again(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))

    def die(row: int, adapter: bool) -> str:
        if adapter and row == 1:
            raise KeyboardInterrupt
        return f"answer {row} {adapter}"

    first = answering(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        evaluate(copy)
    assert first == [(0, False), (1, False), (2, False), (0, True), (1, True)]
    # The line that was being written when the machine went down.
    (kept,) = [path for path in (copy / "evaluation").glob("answers-*") if path.read_bytes().count(b"\n") == 3]
    with kept.open("ab") as stream:
        stream.write(b'{"row": 1, "val')
    second = answering(monkeypatch, lambda row, adapter: f"answer {row} {adapter}")
    found = evaluate(copy)
    assert second == [(1, True), (2, True)]
    assert [one.answers["tuned"] for one in found.predictions] == [[f"answer {row} True"] for row in range(3)]
    third = answering(monkeypatch, die)
    monkeypatch.setattr("finray.evaluation.answers.make_engine", None)
    again = evaluate(copy)
    assert third == []
    assert again.json()["models"] == found.json()["models"]


def test_answers_of_another_sampling_are_other_answers(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 0.7, "seed": 4}, {"max_new_tokens": 3}]
    changes += [{"temperature": 0.7, "top_k": 3}, {"stop": ["cat"]}, {"repetition_penalty": 1.2}]
    for number, change in enumerate(changes):
        asked = answering(monkeypatch, lambda row, adapter, number=number: str(number))
        found = evaluate(run_dir, output=tmp_path, **change)
        assert len(asked) == 6, change
        assert found.predictions[0].answers == {"base": [str(number)], "tuned": [str(number)]}


def test_top_k_and_stop_on_the_command_line_and_in_python_make_the_answers_and_are_recorded(
    run_dir: Path, tmp_path: Path
) -> None:
    """Of one likeliest token a sample is the greedy answer; an answer ends before a text to stop at."""
    greedy = [one.answers["tuned"][0] for one in evaluate(run_dir, output=tmp_path / "greedy").predictions]
    word = next(one for text in greedy for one in text[1:] if one.isprintable())
    cut = [text.partition(word)[0] for text in greedy]
    assert cut != greedy
    warm = ("--temperature", 1, "--top-k", 1, "--seed", 4, "--repetition-penalty", 1)
    stops = ("--stop", word, "--stop", "never in an answer")
    code, _, err = runs.finray("evaluate", run_dir, *warm, *stops, "--output", tmp_path / "cli", "--json")
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "cli" / "predictions.jsonl").read_text().splitlines()]
    assert [line["answers"]["tuned"] for line in lines] == cut
    recorded = json.loads((tmp_path / "cli" / "metrics.json").read_text())["made_by"]["sampling"]
    assert (recorded["top_k"], recorded["stop"]) == (1, [word, "never in an answer"])
    assert recorded["repetition_penalty"] == 1
    options: dict[str, Any] = {"temperature": 1, "top_k": 1, "stop": word, "output": tmp_path / "python"}
    found = finray.evaluate(run_dir, quiet=True, **options)
    assert [one.answers["tuned"] for one in found.predictions] == [[text] for text in cut]
    assert found.made_by["sampling"]["stop"] == (word,)
    # The negative control: a sample of all tokens says something else.
    free = evaluate(run_dir, output=tmp_path / "free", temperature=1.0)
    assert [one.answers["tuned"][0] for one in free.predictions] != greedy


@pytest.mark.parametrize(("asked", "configured", "expected"), [(2, None, 2), (None, 1, 1), (3, 1, 3), (50, None, 3)])
def test_at_most_as_many_rows_as_asked_for(
    run_dir: Path, tmp_path: Path, asked: int | None, configured: int | None, expected: int
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = (copy / "config.yaml").read_text()
    section, _, rest = config.partition("evaluation:\n")
    assert "max_rows: null" in rest
    rest = rest.replace("max_rows: null", f"max_rows: {configured or 'null'}", 1)
    (copy / "config.yaml").write_text(f"{section}evaluation:\n{rest}")
    trust.accept(copy / "config.yaml")
    found = evaluate(copy, max_rows=asked)
    # A seeded sample, and not the first rows.
    seed = saved_config(RunDir(run_dir)).run.seed
    assert [one.row for one in found.predictions] == sample(3, expected, seed=seed).tolist()


def test_a_test_split_is_taken_before_the_evaluation_split(train: Train) -> None:
    path = train(**{"data.eval_source": None, "data.eval_ratio": 0.2, "data.test_ratio": 0.34})
    assert evaluate(path).rows == 2


def test_a_run_that_holds_nothing_out_is_refused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    path = train(**{"data.eval_source": None})
    # Tasks of lm-eval need none, where nothing else asks for rows.
    for asked in ({}, {"harness": ["t"], "split": "test"}, {"harness": ["t"], "metrics": ["bleu"]}):
        with pytest.raises(DataError, match=r"no held-out rows|no split"):
            evaluate(path, **asked)
    monkeypatch.setattr("finray.evaluation.answers.make_engine", None)
    with pytest.raises(TypeError, match="NoneType"):
        evaluate(path, harness=["t"])


def test_rows_of_a_mix_without_a_prompt_are_not_asked_and_counted_as_are_references_that_were_cut_off(
    train: Train, tmp_path: Path
) -> None:
    chats = [{"messages": conversation(number)} for number in range(8)]
    texts = [{"text": f"the dog {number}"} for number in range(8)]
    mix = [{"source": str(write(tmp_path / "chats.jsonl", chats))}, {"source": str(write(tmp_path / "t.jsonl", texts))}]
    limit = {"data.max_length": 57, "data.on_too_long": "truncate"}
    path = train(**{"data.source": None, "data.mix": mix, "data.eval_source": None, "data.eval_ratio": 0.5, **limit})
    found = evaluate(path, max_new_tokens=1)
    (skipped,) = [note for note in found.notes if "without a prompt" in note]
    (cut,) = [note for note in found.notes if "references were cut off at data.max_length=57" in note]
    assert (found.rows, skipped.split()[0]) == (len(found.predictions), str(8 - found.rows))
    tokenizer = AutoTokenizer.from_pretrained(path / "final")
    asked = [conversation(int(one.where.rpartition(":")[2]) - 1) for one in found.predictions]
    lengths = [len(tokenizer(text_of(one), add_special_tokens=False)["input_ids"]) for one in asked]
    assert min(lengths) < 57
    assert cut.split()[2] == str(sum(length >= 57 for length in lengths))


def test_scores_that_cannot_be_written_are_an_error_before_a_model_is_loaded(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    (copy / "evaluation").write_text("in the way")
    monkeypatch.setattr("finray.evaluation.answers.make_engine", None)
    with pytest.raises(FinrayError, match="cannot be written") as caught:
        evaluate(copy, max_rows=1)
    assert str(caught.value.where) == str(copy / "evaluation")


def test_the_data_is_checked_against_any_checkpoint_that_can_be_read(run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    (copy / "checkpoint-000002" / "training_state" / "state.json").write_text("{")
    assert evaluate(copy, max_rows=1).rows == 1
    for folder in copy.glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(DataError, match="no checkpoint left"):
        evaluate(copy)


def test_precision_is_what_the_run_resolved_or_what_an_old_config_names(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = (copy / "config.yaml").read_text()
    assert "precision: fp32" in config
    (copy / "config.yaml").write_text(config.replace("precision: fp32", "precision: bf16"))
    trust.accept(copy / "config.yaml")
    asked: list[Any] = []
    monkeypatch.setattr(
        "finray.evaluation.subjects.inference_dtype", lambda precision, device: asked.append(precision) or torch.float32
    )
    evaluate(copy, max_rows=1)
    # An override is neither; weights in bf16 are no other dtype in their arithmetic.
    evaluate(copy, ("train.precision=fp16",), max_rows=1)
    evaluate(copy, ("train.precision=bf16-true", "adapter.method=none"), max_rows=1)
    (copy / "resolved.json").unlink()
    evaluate(copy, max_rows=1)
    assert asked == ["fp32", "fp16", "bf16", "bf16"]
