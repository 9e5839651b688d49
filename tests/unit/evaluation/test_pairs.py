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
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.outcome import Comparison
from finray.reporting.scored import read_evaluation
from tests.support import runs
from tests.support.evaluated import Train, evaluate, write
from tests.training.test_preference_runs import PREFERENCE, logprob, pair

pytestmark = pytest.mark.long
PAIRS, BETA = [pair(number) for number in range(24)], PREFERENCE["beta"]


@pytest.fixture(scope="module")
def dpo(train: Train, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that goes on from the adapter of another, with values that are not the defaults."""
    folder = tmp_path_factory.mktemp("pairs")
    changes: dict[str, Any] = {"train.objective": "dpo", "train.learning_rate": 0.01, "train.max_steps": 4}
    changes |= {"preference": {**PREFERENCE, "length_normalized": True}, "adapter.start_from": str(run_dir / "final")}
    changes |= {"data.source": str(write(folder / "train.jsonl", PAIRS[:16]))}
    return train(**changes, **{"data.eval_source": str(write(folder / "eval.jsonl", PAIRS[16:]))})


@pytest.fixture(scope="module")
def found(dpo: Path) -> Comparison:
    return evaluate(dpo)


@torch.no_grad()
def test_scores_are_those_of_plain_models_and_the_last_record_of_the_run(
    found: Comparison, dpo: Path, run_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer, of_sides = AutoTokenizer.from_pretrained(tiny_model_dir), dict[str, torch.Tensor]()
    for model, folder in zip(found.models, (None, run_dir / "final", dpo / "final"), strict=True):
        plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        plain = (plain if folder is None else PeftModel.from_pretrained(plain, str(folder))).eval()
        each = [[logprob(plain, tokenizer, row["prompt"], row[side]) for side in list(row)[1:]] for row in PAIRS[16:]]
        sums, tokens = (torch.tensor([[float(of(x)) for x in two] for two in each]) for of in (torch.sum, len))
        of_sides[model.name], (chosen, rejected), means = sums, sums.T, sums / tokens
        expected = {
            "preference_accuracy": (chosen > rejected).double().mean(),
            "preference_accuracy_per_token": (means[:, 0] > means[:, 1]).double().mean(),
            "preference_margin": (chosen - rejected).mean(),
            "chosen_logprob": chosen.mean(),
            "rejected_logprob": rejected.mean(),
            "loss": -chosen.sum() / tokens[:, 0].sum(),
        }
        assert {name: model.scores[name].value for name in expected} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=1e-4
        )
    assert list(of_sides) == ["base", "start", "tuned"]
    # Length-normalised, relative to the adapter that the run began from, and not to the base model unless it is named.
    scores = {name: score.value for name, score in found.tuned.scores.items()}
    named = evaluate(dpo, [f"preference.reference={tiny_model_dir}"], baselines=["reference"], output=tmp_path / "x")
    margins = []
    for reference, values in (("start", found), ("base", named)):
        (ahead, behind) = (BETA * (of_sides["tuned"] - of_sides[reference]) / tokens).T
        margins.append(float((ahead - behind).mean()))
        assert values.tuned.scores["reward_margin"].value == pytest.approx(margins[-1], rel=1e-3)
        assert values.tuned.scores["reward_accuracy"].value == float((ahead > behind).double().mean())
    assert abs(margins[0] - margins[1]) > 1e-3
    assert not any(name.startswith("reward") for model in found.models[:-1] for name in model.scores)
    # Without a reference every model has them.
    other = ["train.objective=simpo", "preference.beta=1.5", "preference.length_normalized=false"]
    free = evaluate(dpo, other, baselines=["start"], output=tmp_path / "simpo")
    for model in free.models:
        ahead, behind = (1.5 * of_sides[model.name] / tokens).T
        assert model.scores["reward_margin"].value == pytest.approx(float((ahead - behind).mean()), rel=1e-3)
    # And those of the evaluation in training, which another forward pass computed.
    last, alike = runs.records(dpo, "eval")[-1], ("chosen_logprob", "rejected_logprob")
    pairs = {"eval_loss": "preference_loss", "accuracy": "reward_accuracy", "margin": "reward_margin"}
    for record, score in {**pairs, **dict(zip(alike, alike, strict=True))}.items():
        assert scores[score] == pytest.approx(last[record], rel=1e-3, abs=1e-6)


def test_intervals_paired_tests_and_both_answers_are_printed_written_and_read(found: Comparison, dpo: Path) -> None:
    written = json.loads((dpo / "evaluation" / "metrics.json").read_text())
    tests = {(test["score"], test["baseline"]): test["test"] for test in written["comparisons"]}
    assert tests["preference_accuracy", "start"] == "exact McNemar"
    assert tests["preference_margin", "start"] == "permutation"
    assert written["models"]["tuned"]["preference_margin"]["low"] is not None
    row = json.loads((dpo / "evaluation" / "predictions.jsonl").read_text().splitlines()[1])
    # No answers are generated unless scores of them are asked for.
    assert [row[name] for name in ("reference", "rejected", "answers")] == [*list(PAIRS[17].values())[1:], {}]
    found.print(Console(file=(shown := StringIO()), width=160))
    assert "preference accuracy per token" in shown.getvalue()
    answered = read_evaluation(dpo / "evaluation" / "metrics.json", dpo / "evaluation").answered[1]
    assert answered.reference == f"{PAIRS[17]['chosen']}\n\nrejected: {PAIRS[17]['rejected']}"


def test_a_file_is_read_as_pairs_or_as_prompts_and_answers_whatever_the_run_learned_from(
    dpo: Path, found: Comparison, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, score = list[int](), TransformersEngine._score

    def noted(engine: Any, rows: Any, batch: Any) -> Any:
        passes.extend(len(numbers) for _, numbers in batch)
        return score(engine, rows, batch)

    monkeypatch.setattr(TransformersEngine, "_score", noted)
    file = write(tmp_path / "pairs.jsonl", PAIRS[16:])
    again, sft = evaluate(dpo, file=file, baselines=["start"]), evaluate(run_dir, file=file, baselines=[])
    # Each prompt is computed once for its two answers.
    assert passes == [2] * 24
    for name in ("preference_margin", "reward_margin"):
        assert again.tuned.scores[name].value == pytest.approx(found.tuned.scores[name].value, rel=1e-5)
    start = again.models[0].scores["preference_margin"].value
    assert sft.tuned.scores["preference_margin"].value == pytest.approx(start, rel=1e-5)
    # Rewards are of the run's own objective.
    assert "reward_margin" not in sft.tuned.scores
    told = write(tmp_path / "told.jsonl", [{"prompt": "what", "completion": "a cat"}] * 3)
    answers = evaluate(dpo, file=told, baselines=["base"], max_new_tokens=2)
    assert set(answers.tuned.scores) == {"exact_match", "loss"}
    # Without the start there are no rewards.
    asked = evaluate(dpo, baselines=["none"], metrics=["chrf"], max_new_tokens=2, output=tmp_path / "asked")
    assert set(asked.tuned.scores) >= {"chrf", "preference_margin"}
    assert "rewards are relative to `start`: add --baseline start for them" in asked.notes
