"""Runs that learn from single answers with KTO: beside a loop in plain torch and Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.sampling.splits import sample
from finray.evaluation.during import TrainingAnswers
from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain, changed
from tests.training.test_preference_runs import EPSILON, RATE, SEEN, SOURCES, THINGS, logprob

BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.3, 0.8
SIDES = ("desirable", "undesirable")
NAMES = ("loss", "margin", "accuracy", "kl", *(f"{side}_{what}" for side in SIDES for what in ("reward", "logprob")))


def answer(number: int) -> dict[str, Any]:
    return {"prompt": f"what is {number}", "completion": THINGS[number % 6], "label": number % 5 < 3}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """KTO of all weights on 20 answers, evaluated on others, with values that are not the defaults."""
    folder = tmp_path_factory.mktemp("answers")
    for name, numbers in {"train": range(20), "eval": range(20, 27)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(answer(number)) + "\n" for number in numbers))
    own: dict[str, Any] = {f"data.{key}": str(folder / f"{name}.jsonl") for key, name in SOURCES.items()}
    weights = {"desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
    own |= {"train.objective": "kto", "preference": {"beta": BETA, **weights}, "adapter": {"method": "none"}}
    own |= {"train": {"schedule": "constant", "warmup_steps": 0, "learning_rate": RATE, "adam_epsilon": EPSILON}}
    own |= {"train.max_grad_norm": None, "train.global_batch_size": 6, "data.max_length": 64}
    return tiny_run({**own, "evaluation.every_steps": 4})


@pytest.fixture(scope="module")
def done(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    runs.run_alone(plain, run_dir)
    return run_dir


def mismatches(plain: Plain, tokenizer: Any) -> list[str]:
    """For each row, first of those to train on, the answer that is read with its prompt."""
    config = runs.config_of(plain)
    splits, found = PreparedDataset(prepare_here(config)).splits(config.data, seed=0), []
    for rows in (splits.train, splits.eval):
        assert rows is not None
        for ids, mask in (rows.mismatched(row, most=64) for row in range(len(rows))):
            assert f"what is {len(found)}<" in tokenizer.decode(ids)
            found.append(tokenizer.decode(ids[mask == 1]).removesuffix("<|im_end|>"))
    return found


def of_answers(
    model: Any, reference: Any, tokenizer: Any, numbers: list[int], others: list[str], *, point: bool = True
) -> dict[str, Any]:
    """What a record has of these answers; without the ``point`` it is 0."""

    def change(number: int, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        """An answer's log-probability, and how much larger it is than the reference's."""
        now = logprob(model, tokenizer, answer(number)["prompt"], text).sum()
        with torch.no_grad():
            return now, logprob(reference, tokenizer, answer(number)["prompt"], text).sum().neg() + now.detach()

    kl = torch.stack([change(number, other)[1] for number, other in zip(numbers, others, strict=True)]).mean()
    kl, losses, right = kl.clamp(min=0) * point, [], 0
    named: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in numbers:
        row = answer(number)
        now, moved = change(number, row["completion"])
        sign, weight, side = (1, DESIRABLE, SIDES[0]) if row["label"] else (-1, UNDESIRABLE, SIDES[1])
        # With the gradient of ``now``.
        losses.append(weight * (1 - torch.sigmoid(BETA * sign * (moved + now - now.detach() - kl))))
        right += bool(sign * (moved - kl) > 0)
        named[f"{side}_reward"].append(float(BETA * moved))
        named[f"{side}_logprob"].append(float(now.detach()))
    means: dict[str, Any] = {name: sum(values) / len(values) for name, values in named.items() if values}
    if all(f"{side}_reward" in means for side in SIDES):
        means["margin"] = means["desirable_reward"] - means["undesirable_reward"]
    return {**means, "loss": torch.stack(losses).mean(), "accuracy": right / len(numbers), "kl": float(kl)}


def naive(plain: Plain, steps: list[list[int]], *, point: bool = True) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each step records, of row numbers by step, and the evaluation after the last."""
    name = plain["model"]["name"]
    model, reference = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(name)
    others = mismatches(plain, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
    seen = []
    for rows in steps:
        means = of_answers(model, reference, tokenizer, rows, [others[row] for row in rows], point=point)
        means["loss"].backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        seen.append({**means, "loss": float(means["loss"].detach()), "grad_norm": float(norm)})
    with torch.no_grad():
        last = of_answers(model, reference, tokenizer, list(range(20, 27)), others[20:], point=point)
    return seen, {**last, "loss": float(last["loss"])}


def test_a_run_is_the_plain_loop(plain: Plain, done: Path) -> None:
    steps = runs.values(done, "samples")
    assert {len(rows) for rows in steps} == {6}
    expected, evaluated = naive(plain, steps)
    for record, step in zip(runs.records(done), expected, strict=True):
        # A step may lack one side.
        assert {name for name in NAMES if name in record} == step.keys() - {"grad_norm"}
        assert {name: record[name] for name in step} == pytest.approx(step, rel=1e-4, abs=1e-5)
    last = runs.records(done, "eval")[-1]
    assert {name: last[name.replace("loss", "eval_loss")] for name in NAMES} == pytest.approx(evaluated, rel=1e-4)
    # It learns, and the point is not where it began. Control: the same loop with the point at 0.
    assert min(expected[-1]["margin"], expected[-1]["kl"], evaluated["kl"]) > 0.01
    other, _ = naive(plain, steps, point=False)
    assert other[-1]["loss"] != pytest.approx(expected[-1]["loss"], rel=1e-3)
    assert other[-2]["grad_norm"] != pytest.approx(expected[-2]["grad_norm"], rel=1e-3)


def test_a_killed_run_goes_on_to_the_bit(plain: Plain, done: Path, tmp_path: Path) -> None:
    said: list[str] = []
    run_dir = runs.cut(done, tmp_path / "run")
    runs.run_alone(plain, run_dir, notify=lambda record: said.append(getattr(record, "message", "")))
    assert runs.trace(run_dir) == runs.trace(done)
    assert runs.values(run_dir, "kl") == runs.values(done, "kl")
    assert not any("computing" in message for message in said)


def test_sharing_a_step_changes_nothing(plain: Plain, done: Path, tmp_path: Path) -> None:
    """Accumulation, packing, two workers under each strategy, a reference in the step: the point is that of the whole
    global batch."""
    alone = {"larger": {"train.micro_batch_size": 4}, "in step": {"preference.reference_in_step": True}}
    # Passes with one row fewer on one of the ranks.
    uneven = {"train.micro_batch_size": 2, "data.packing": False}
    shared: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}, "deepspeed": {"zero_stage": 3}}
    for name, other in alone.items():
        runs.run_alone(changed(plain, other), tmp_path / name)
    jobs = [
        (changed(plain, uneven, {"parallel": {"strategy": name, **more}}), tmp_path / name)
        for name, more in shared.items()
    ]
    run_all(jobs, world_size=2)
    for name in (*alone, *shared):
        runs.assert_same_curve(tmp_path / name, done)
        assert runs.values(tmp_path / name, "kl") == pytest.approx(runs.values(done, "kl"), rel=1e-3, abs=1e-5)
        its, ours = (runs.records(folder, "eval")[-1] for folder in (tmp_path / name, done))
        assert {key: its[key] for key in NAMES[1:]} == pytest.approx({key: ours[key] for key in NAMES[1:]}, rel=1e-3)


def test_prompts_are_answered_in_training_where_the_answer_beside_them_is_wanted(plain: Plain, tmp_path: Path) -> None:
    asks = {"generate_rows": 3, "metrics": ["tests.training.test_preference_runs:seen"], "max_new_tokens": 2}
    own = changed(plain, {"evaluation": asks, "train.max_steps": 4})
    runs.run_alone(own, tmp_path / "run", answering=TrainingAnswers(runs.config_of(own), "fp32"))
    assert [record["seen"] for record in runs.records(tmp_path / "run", "eval")] == [0.25]
    wanted = [row["completion"] for row in map(answer, range(20, 27)) if row["label"]]
    assert SEEN[-1][1] == [wanted[number] for number in sample(5, 3, seed=own["run"]["seed"]).tolist()]
