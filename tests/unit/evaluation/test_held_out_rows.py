"""`finray evaluate`: which rows, which prompts, which model, and what is written; by text and by plain Transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.checkpoint.rundir import RunDir, saved_config
from finray.errors import DataError, FinrayError, ModelError
from finray.evaluation.compare import Comparison, evaluate
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.metrics import Scores
from tests.support import runs

# Conversations of two answers that differ in length; what is scored is the last, of all targets of the row.
QUESTIONS = ["the cat sleeps", "a small dog", "how many trees where"]


def conversation(number: int) -> list[dict[str, str]]:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    return [
        {"role": "user", "content": QUESTIONS[number % 3]},
        {"role": "assistant", "content": f"first {number}"},
        {"role": "user", "content": "please"},
        {"role": "assistant", "content": " ".join(words[: 1 + number * 3 % 8]) + f" {number}"},
    ]


def text_of(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains a few steps; rows 0 to 5 are trained on, 6 to 8 held out for evaluation, 9 to 11 for the test."""

    def build(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("run")
        rows = [{"messages": conversation(number), "part": "x"} for number in range(12)]
        data = {
            "data.source": str(write(folder / "rows.jsonl", rows[:6])),
            "data.eval_source": str(write(folder / "eval.jsonl", rows[6:9])),
            "train.max_steps": 2,
            "train.learning_rate": 0.05,
            "evaluation.max_new_tokens": 6,
            "evaluation.batch_size": 2,
            "checkpoint.every_steps": 1,
        }
        plain = runs.tiny_run(tiny_model_dir, folder / "rows.jsonl", folder / "out", {**data, **changes})
        config = runs.config_of(plain)
        run = RunDir.of(config)
        runs.run_alone(plain, run.path)
        run.keep_config(config)
        run.keep_resolved(runs.resolved_of(config))
        run.make_final(best=None, warn=lambda message: None)
        return run.path

    return build


@pytest.fixture(scope="module")
def run_dir(train: Train) -> Path:
    return train()


@pytest.fixture(scope="module")
def found(run_dir: Path) -> Comparison:
    return evaluate(run_dir)


def models(run_dir: Path, base: Path) -> tuple[Any, Any]:
    """The base and the tuned model by Transformers and PEFT alone."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return plain, PeftModel.from_pretrained(again, str(run_dir / "final")).eval()


@torch.no_grad()
def loss_of(model: Any, tokenizer: Any, rows: list[list[dict[str, str]]]) -> float:
    """Of every token of an answer and the end of its turn, over all rows."""
    losses = []
    for messages in rows:
        ids, learned = [], []
        for one in messages:
            head, body = f"<|im_start|>{one['role']}\n", f"{one['content']}<|im_end|>"
            for text, is_learned in ((head, False), (body, one["role"] == "assistant"), ("\n", False)):
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += tokens
                learned += [is_learned] * len(tokens)
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        losses += [-float(logits[place - 1, ids[place]]) for place in range(1, len(ids)) if learned[place]]
    return sum(losses) / len(losses)


def test_the_prompt_is_all_before_the_last_answer_and_the_reference_that_answer(found: Comparison) -> None:
    assert found.rows == 3
    for number, prediction in enumerate(found.predictions, start=6):
        messages = conversation(number)
        shown = text_of(messages[:3]).replace("<|im_start|>", "").replace("<|im_end|>", "")
        assert prediction.prompt == f"{shown}assistant\n"
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
            assert getattr(prediction, name) == tokenizer.decode(answer, skip_special_tokens=True)
            assert not getattr(prediction, f"{name}_exact")


def test_files_hold_the_scores_and_every_row(found: Comparison, run_dir: Path) -> None:
    assert found.folder == run_dir / "evaluation"
    scores = json.loads((found.folder / "scores.json").read_text())
    assert scores == {"rows": 3, "base": found.base.json(), "tuned": found.tuned.json()}
    lines = [json.loads(line) for line in (found.folder / "predictions.jsonl").read_text().splitlines()]
    assert [line["reference"] for line in lines] == [one.reference for one in found.predictions]
    assert set(lines[0]) == {"prompt", "reference", "base", "tuned", "base_exact", "tuned_exact"}


def test_every_part_tells_how_far_it_is(run_dir: Path) -> None:
    told: list[tuple[str, int, int]] = []
    evaluate(run_dir, progress=lambda what, done, *, total: told.append((what, done, total)))
    losses = {name: [(f"{name} loss", done, 3) for done in (1, 2, 3)] for name in ("base", "tuned")}
    answers = {name: [(f"{name} answers", done, 3) for done in (2, 3)] for name in ("base", "tuned")}
    assert told == [*losses["base"], *answers["base"], *losses["tuned"], *answers["tuned"]]


def first_letters(answers: list[str], references: list[str]) -> float:
    return float(sum(answer == reference for answer, reference in zip(answers, references, strict=True)) + 10)


def test_exact_answers_are_counted_for_the_model_that_gave_them(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuned model is right twice, its base once; metrics are those of the config."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    config = (copy / "config.yaml").read_text()
    changed = config.replace("- exact_match", f"- exact_match\n  - {__name__}:first_letters")
    assert changed != config
    (copy / "config.yaml").write_text(changed)
    right = [conversation(number)[3]["content"] for number in (6, 7, 8)]
    given = iter([[right[0], "no", "no"], ["no", right[1], right[2]]])
    monkeypatch.setattr("finray.evaluation.compare.generate", lambda *arguments, **options: next(given))
    found = evaluate(copy)
    assert found.base.metrics == {"exact_match": pytest.approx(1 / 3), "first_letters": 11.0}
    assert found.tuned.metrics == {"exact_match": pytest.approx(2 / 3), "first_letters": 12.0}
    assert [one.base_exact for one in found.predictions] == [True, False, False]
    assert [one.tuned_exact for one in found.predictions] == [False, True, True]


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
    assert evaluate(copy, max_rows=asked).rows == expected


def test_answers_are_as_long_as_asked_for(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    lengths: list[int] = []

    def answer(
        model: Any, tokenizer: Any, prompts: list[list[int]], *, sampling: Sampling, **options: Any
    ) -> list[str]:
        lengths.append(sampling.max_new_tokens)
        return ["" for _ in prompts]

    monkeypatch.setattr("finray.evaluation.compare.generate", answer)
    evaluate(copy, max_rows=1, max_new_tokens=3)
    evaluate(copy, max_rows=1)
    assert lengths == [3, 3, *[saved_config(RunDir(copy)).evaluation.max_new_tokens] * 2]


def test_a_test_split_is_taken_before_the_evaluation_split(train: Train) -> None:
    path = train(**{"data.eval_source": None, "data.eval_ratio": 0.2, "data.test_ratio": 0.34})
    assert evaluate(path).rows == 2


def test_a_model_that_was_trained_whole_is_compared_with_what_it_began_from(train: Train, tiny_model_dir: Path) -> None:
    path = train(adapter=None)
    found = evaluate(path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    rows = [conversation(number) for number in (6, 7, 8)]
    for folder, scores in ((tiny_model_dir, found.base), (path / "final", found.tuned)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert scores.loss == pytest.approx(loss_of(model, tokenizer, rows), rel=1e-4)
    assert abs(found.base.loss - found.tuned.loss) > 0.05


def test_rows_that_are_learned_as_a_whole_have_losses_and_no_answers(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = train(**{"data.train_on": "all"})
    monkeypatch.setattr("finray.evaluation.compare.generate", None)
    found = evaluate(path)
    assert (found.rows, found.predictions) == (3, [])
    assert found.tuned.loss != found.base.loss
    assert [file.name for file in found.folder.iterdir()] == ["scores.json"]


def test_a_run_that_holds_nothing_out_is_refused(train: Train) -> None:
    with pytest.raises(DataError, match="holds no rows out"):
        evaluate(train(**{"data.eval_source": None}))


def test_what_is_no_run_is_refused(run_dir: Path) -> None:
    with pytest.raises(ModelError, match="not a finray run"):
        evaluate(run_dir / "final")


def test_scores_that_cannot_be_written_are_an_error_that_says_where(run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))
    (copy / "evaluation").write_text("in the way")
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
    asked: list[Any] = []
    monkeypatch.setattr(
        "finray.evaluation.compare.inference_dtype", lambda precision, device: asked.append(precision) or torch.float32
    )
    evaluate(copy, max_rows=1)
    (copy / "resolved.json").unlink()
    evaluate(copy, max_rows=1)
    assert asked == ["fp32", "bf16"]


def test_what_is_shown_has_both_models_in_every_line(found: Comparison) -> None:
    scored = Comparison(
        Scores({"exact_match": 0.125, "of_mine": 0.5}, 2.5, 12.18),
        Scores({"exact_match": 0.375, "of_mine": 0.25}, 1.25, 3.49),
        3,
        found.predictions,
        found.folder,
    )
    console = Console(file=StringIO(), width=100)
    scored.print(console)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    for expected in ("exact match 12.5% 37.5%", "of mine 50.0% 25.0%", "loss 2.5000 1.2500", "perplexity 12.180 3.490"):
        assert any(expected in line for line in lines), (expected, lines)
