"""`finray evaluate` on pairs of answers, beside log-probabilities by plain Transformers and PEFT."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.outcome import Comparison
from finray.reporting.scored import read_evaluation
from tests.support import runs
from tests.support.evaluated import Train, evaluate, write

pytestmark = pytest.mark.long

WORDS = ("a cat", "the old red fox", "tea", "seven small stones in a row", "rain")
# Values that are not the defaults.
BETA, SMOOTHING, WEIGHT = 0.3, 0.1, 0.2


def pair(number: int) -> dict[str, str]:
    return {
        "prompt": f"what is {number}",
        "chosen": f"it is {WORDS[number % 5]}",
        "rejected": WORDS[(number * 2 + 1) % 5],
    }


PAIRS = [pair(number) for number in range(24)]


@pytest.fixture(scope="module")
def dpo(train: Train, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that goes on from the adapter of another."""
    folder = tmp_path_factory.mktemp("pairs")
    preference = {"beta": BETA, "label_smoothing": SMOOTHING, "chosen_weight": WEIGHT, "length_normalized": True}
    changes: dict[str, Any] = {"train.objective": "dpo", "preference": preference, "train.learning_rate": 0.01}
    changes |= {"data.source": str(write(folder / "train.jsonl", PAIRS[:16])), "adapter.rank": 4}
    changes |= {"data.eval_source": str(write(folder / "eval.jsonl", PAIRS[16:])), "train.max_steps": 4}
    return train(**changes, **{"adapter.start_from": str(run_dir / "final")})


@pytest.fixture(scope="module")
def found(dpo: Path) -> Comparison:
    return evaluate(dpo)


@torch.no_grad()
def plain(model: Any, tokenizer: Any, row: dict[str, str], side: str) -> tuple[float, int]:
    """Log-probability of an answer and its end (nats), alone in its pass, and its number of tokens."""
    parts = (f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n", f"{row[side]}<|im_end|>")
    asked, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in parts)
    tokens = torch.tensor([*asked, *said])
    logits = model(input_ids=tokens[None]).logits[0, len(asked) - 1 : -1]
    return -float(F.cross_entropy(logits.double(), tokens[len(asked) :], reduction="sum")), len(said)


def test_scores_are_those_of_plain_models_and_the_last_record_of_the_run(
    found: Comparison, dpo: Path, run_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer, rows = AutoTokenizer.from_pretrained(tiny_model_dir), PAIRS[16:]
    of_sides: dict[str, torch.Tensor] = {}
    for name, folder in {"base": None, "start": run_dir / "final", "tuned": dpo / "final"}.items():
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        model = (model if folder is None else PeftModel.from_pretrained(model, str(folder))).eval()
        each = [[plain(model, tokenizer, row, side) for side in ("chosen", "rejected")] for row in rows]
        of_sides[name] = torch.tensor(each, dtype=torch.float64)
    assert [model.name for model in found.models] == list(of_sides)
    for model in found.models:
        (chosen, rejected), tokens = of_sides[model.name][..., 0].T, of_sides[model.name][..., 1]
        means = of_sides[model.name][..., 0] / tokens
        expected = {
            "preference_accuracy": (chosen > rejected).double().mean(),
            "preference_accuracy_per_token": (means[:, 0] > means[:, 1]).double().mean(),
            "preference_margin": (chosen - rejected).mean(),
            "chosen_logprob": chosen.mean(),
            "rejected_logprob": rejected.mean(),
            "loss": -chosen.sum() / tokens[:, 0].sum(),
        }
        assert {name: score.value for name, score in model.scores.items() if name in expected} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=1e-4
        )
    # Length-normalised, relative to the adapter that the run began from, and not to the base model.
    scores = {name: score.value for name, score in found.tuned.scores.items()}
    margins = {}
    for reference in ("start", "base"):
        changes = (of_sides["tuned"] - of_sides[reference])[..., 0] / of_sides["tuned"][..., 1]
        margins[reference] = BETA * (changes[:, 0] - changes[:, 1])
    assert scores["reward_margin"] == pytest.approx(float(margins["start"].mean()), rel=1e-3)
    assert abs(scores["reward_margin"] - float(margins["base"].mean())) > 1e-3
    assert scores["reward_accuracy"] == float((margins["start"] > 0).double().mean())
    assert not any(name.startswith("reward") for model in found.models[:-1] for name in model.scores)
    named = evaluate(
        dpo, [f"preference.reference={tiny_model_dir}"], baselines=["reference"], output=tmp_path / "named"
    )
    assert named.tuned.scores["reward_margin"].value == pytest.approx(float(margins["base"].mean()), rel=1e-3)
    # And those of the evaluation in training, which another forward pass computed.
    last = runs.records(dpo, "eval")[-1]
    for record, score in {
        "eval_loss": "preference_loss",
        "accuracy": "reward_accuracy",
        "margin": "reward_margin",
        "chosen_logprob": "chosen_logprob",
        "rejected_logprob": "rejected_logprob",
    }.items():
        assert scores[score] == pytest.approx(last[record], rel=1e-3, abs=1e-6)


def test_intervals_paired_tests_and_both_answers_are_printed_written_and_read(found: Comparison, dpo: Path) -> None:
    written = json.loads((dpo / "evaluation" / "metrics.json").read_text())
    tests = {(test["score"], test["baseline"]): test["test"] for test in written["comparisons"]}
    assert tests["preference_accuracy", "start"] == "exact McNemar"
    assert tests["preference_margin", "start"] == "permutation"
    assert written["models"]["tuned"]["preference_accuracy"]["interval"] == "Wilson"
    assert written["models"]["tuned"]["preference_margin"]["low"] is not None
    assert written["says"][1].startswith("tuned and start cannot be told apart on preference accuracy")
    row = json.loads((dpo / "evaluation" / "predictions.jsonl").read_text().splitlines()[1])
    assert (row["reference"], row["rejected"]) == (PAIRS[17]["chosen"], PAIRS[17]["rejected"])
    # No answers are generated unless scores of them are asked for.
    assert row["answers"] == {}
    scores = row["scores"]["start"]
    assert scores["preference_margin"] == pytest.approx(scores["chosen_logprob"] - scores["rejected_logprob"])
    found.print(Console(file=(shown := StringIO()), width=160))
    assert "preference accuracy per token" in shown.getvalue()
    assert "rejected" in shown.getvalue()
    answered = read_evaluation(dpo / "evaluation" / "metrics.json", dpo / "evaluation").answered[1]
    assert answered.reference == f"{PAIRS[17]['chosen']}\n\nrejected: {PAIRS[17]['rejected']}"


def test_a_file_is_read_as_pairs_or_as_prompts_and_answers_whatever_the_run_learned_from(
    dpo: Path, found: Comparison, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = list[int]()
    score = TransformersEngine._score

    def noted(engine: Any, rows: Any, batch: Any) -> Any:
        passes.extend(len(numbers) for _, numbers in batch)
        return score(engine, rows, batch)

    monkeypatch.setattr(TransformersEngine, "_score", noted)
    file = write(tmp_path / "pairs.jsonl", PAIRS[16:])
    again = evaluate(dpo, file=file, baselines=["start"])
    # Each prompt is computed once for its two answers.
    assert passes == [2] * 16
    for name in ("preference_margin", "reward_margin"):
        assert again.tuned.scores[name].value == pytest.approx(found.tuned.scores[name].value, rel=1e-5)
    assert [model.name for model in again.models] == ["start", "tuned"]
    # Rewards are of the run's own objective.
    sft = evaluate(run_dir, file=file, baselines=[])
    start = again.models[0].scores["preference_margin"].value
    assert sft.tuned.scores["preference_margin"].value == pytest.approx(start, rel=1e-5)
    assert "reward_margin" not in sft.tuned.scores
    told = {"prompt": "what", "completion": "a cat"}
    answers = evaluate(dpo, file=write(tmp_path / "told.jsonl", [told] * 3), baselines=["base"], max_new_tokens=2)
    assert set(answers.tuned.scores) == {"exact_match", "loss"}
    # Answers to the prompts of pairs, where scores of them are asked for; without the start there are no rewards.
    asked = evaluate(dpo, baselines=["none"], metrics=["chrf"], max_new_tokens=2, output=tmp_path / "asked")
    assert {"chrf", "preference_margin"} <= set(asked.tuned.scores)
    assert "reward_margin" not in asked.tuned.scores
    assert "rewards are relative to `start`: add --baseline start for them" in asked.notes
    assert set(asked.predictions[0].answers) == {"tuned"}
