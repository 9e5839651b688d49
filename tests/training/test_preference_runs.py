"""Runs that learn from pairs, from a file of them to a model: beside a loop in plain torch and Transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.data.sampling.splits import sample
from finray.errors import ModelError
from finray.evaluation.artifacts import export_model
from finray.evaluation.during import TrainingAnswers
from finray.planning.checks import check_evaluation
from finray.planning.steps import require_prompts
from tests.support import runs
from tests.support.runs import Plain, changed

THINGS = ("a cat", "the old red fox", "tea", "seven small stones in a row", "bread and butter", "rain")
BETA, SMOOTHING, WEIGHT, EPSILON, RATE = 0.3, 0.1, 0.2, 1e-2, 0.005
PREFERENCE = {"beta": BETA, "label_smoothing": SMOOTHING, "chosen_weight": WEIGHT}
OTHERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "sigmoid per token": ({"length_normalized": True}, lambda ahead, each: -F.logsigmoid(BETA * each)),
    "ipo": ({"loss": "ipo"}, lambda ahead, each: (each - 1 / (2 * BETA)) ** 2),
    "hinge": ({"loss": "hinge"}, lambda ahead, each: F.relu(1 - BETA * ahead)),
    "robust": (
        {"loss": "robust", "label_smoothing": SMOOTHING},
        lambda ahead, each: (
            (SMOOTHING * F.logsigmoid(-BETA * ahead) - (1 - SMOOTHING) * F.logsigmoid(BETA * ahead))
            / (1 - 2 * SMOOTHING)
        ),
    ),
}
NAMES = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob")


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"what is {number}", "chosen": f"it is {THINGS[number % 6]}", "rejected": THINGS[number % 5]}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """DPO of all weights on 20 pairs, evaluated on others, with values that are not the defaults."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, numbers in {"train": range(20), "eval": range(20, 27)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair(number)) + "\n" for number in numbers))
    own: dict[str, Any] = {f"data.{key}": str(folder / f"{name}.jsonl") for key, name in SOURCES.items()}
    own |= {"train.objective": "dpo", "preference": PREFERENCE, "adapter": {"method": "none"}}
    own |= {"train": {"schedule": "constant", "warmup_steps": 0, "learning_rate": RATE, "adam_epsilon": EPSILON}}
    own |= {"train.max_grad_norm": None, "data.max_length": 48, "evaluation.every_steps": 4}
    return tiny_run(own)


NAMED = ("chosen", "rejected")
SOURCES = {"source": "train", "eval_source": "eval"}


@pytest.fixture(scope="module")
def done(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    runs.run_alone(plain, run_dir)
    return run_dir


def logprob(model: Any, tokenizer: Any, question: str, answer: str) -> torch.Tensor:
    """Log-probability of each token of an answer and its end (fp64), alone in its pass."""
    parts = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>")
    asked, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in parts)
    tokens = torch.tensor([*asked, *said])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(asked) - 1 : -1]
    return -F.cross_entropy(logits.double(), tokens[len(asked) :], reduction="none")


def of_pairs(model: Any, reference: Any, tokenizer: Any, numbers: list[int]) -> dict[str, torch.Tensor]:
    """Means over pairs of what a record has."""
    total: dict[str, Any] = dict.fromkeys(NAMES, 0.0)
    for number in numbers:
        row, rewards, sums = pair(number), {}, {}
        for side in ("chosen", "rejected"):
            now = logprob(model, tokenizer, row["prompt"], row[side])
            with torch.no_grad():
                before = logprob(reference, tokenizer, row["prompt"], row[side]).sum()
            rewards[side], sums[side] = BETA * (now.sum() - before), now
        ahead = rewards["chosen"] - rewards["rejected"]
        loss = -(1 - SMOOTHING) * F.logsigmoid(ahead) - SMOOTHING * F.logsigmoid(-ahead)
        found = {"loss": loss - WEIGHT * sums["chosen"].mean(), "margin": ahead, "accuracy": float(ahead > 0)}
        found |= {f"{side}_reward": reward for side, reward in rewards.items()}
        found |= {f"{side}_logprob": values.sum() for side, values in sums.items()}
        total = {name: total[name] + found[name] / len(numbers) for name in NAMES}
    return total


def naive(plain: Plain, steps: list[list[int]]) -> tuple[list[dict[str, float]], dict[str, float]]:
    """What each step records, of row numbers by step, and the evaluation after the last."""
    name = plain["model"]["name"]
    model, reference = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
    seen = []
    for rows in steps:
        assert rows[1::2] == [row + 1 for row in rows[::2]]
        means = of_pairs(model, reference, tokenizer, [row // 2 for row in rows[::2]])
        means["loss"].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: float(torch.as_tensor(value).detach()) for name, value in means.items()})
    with torch.no_grad():
        last = of_pairs(model, reference, tokenizer, list(range(20, 27)))
    return seen, {name: float(value) for name, value in last.items()}


def test_a_run_is_the_plain_loop(plain: Plain, done: Path) -> None:
    expected, evaluated = naive(plain, runs.values(done, "samples"))
    for name in NAMES:
        assert runs.values(done, name) == pytest.approx([step[name] for step in expected], rel=1e-4, abs=1e-5)
    last = runs.records(done, "eval")[-1]
    assert [last[name.replace("loss", "eval_loss")] for name in NAMES] == pytest.approx(
        [evaluated[name] for name in NAMES], rel=1e-4, abs=1e-5
    )
    # It learns something, so that the reference is not the model. The loop can see the difference.
    assert expected[-1]["margin"] > 0.05 > 1e-5 > abs(expected[0]["margin"])


def test_a_killed_run_goes_on_to_the_bit_without_another_pass_of_the_reference(
    plain: Plain, done: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    run_dir = runs.cut(done, tmp_path / "run")
    runs.run_alone(plain, run_dir, notify=lambda record: said.append(getattr(record, "message", "")))
    assert runs.trace(run_dir) == runs.trace(done)
    assert not any("computing" in message for message in said)
    # Control: with other prepared data the pass is made again.
    again = changed(plain, {"prepare.dir": str(tmp_path / "data"), "train.max_steps": 1})
    runs.run_alone(again, tmp_path / "again", notify=lambda record: said.append(getattr(record, "message", "")))
    assert sum("computing `reference`" in message for message in said) == 2
    of = [message.split(": the reference finds")[0] for message in said if "finds the chosen answer" in message]
    assert of == ["eval", "train"], "said once, of each split"


@pytest.mark.parametrize("loss", OTHERS)
def test_each_loss_is_that_of_the_plain_loop(plain: Plain, tmp_path: Path, loss: str) -> None:
    settings, formula = OTHERS[loss]
    own = changed({name: value for name, value in plain.items() if name != "preference"}, {"train.max_steps": 4})
    runs.run_alone(changed(own, {"preference": {"beta": BETA, **settings}}), tmp_path / "run")
    name, steps = plain["model"]["name"], runs.values(tmp_path / "run", "samples")
    tokenizer = AutoTokenizer.from_pretrained(name)

    def losses(*, keeps_reference: bool = True, sides: tuple[str, str] = NAMED) -> list[float]:
        """The mean over the pairs of each step, of which the weights take one."""
        model, reference = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
        seen = []
        for rows in steps:
            found = []
            for number in (row // 2 for row in rows[::2]):
                asked, changes = pair(number)["prompt"], []
                for side in sides:
                    change = logprob(model, tokenizer, asked, pair(number)[side])
                    if keeps_reference:
                        change = change - logprob(reference, tokenizer, asked, pair(number)[side]).detach()
                    changes.append(change)
                better, worse = changes
                found.append(formula(better.sum() - worse.sum(), better.mean() - worse.mean()))
            optimizer.zero_grad()
            torch.stack(found).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(float(torch.stack(found).mean().detach()))
        return seen

    recorded = runs.values(tmp_path / "run", "loss")
    assert recorded == pytest.approx(losses(), rel=1e-5)
    # Controls: without the reference, and with the answers in each other's place.
    assert recorded != pytest.approx(losses(keeps_reference=False), rel=1e-3)
    assert recorded != pytest.approx(losses(sides=("rejected", "chosen")), rel=1e-3)


@pytest.mark.parametrize("other", [{"train.micro_batch_size": 3}, {"data.packing": False}])
def test_sharing_passes_changes_nothing(plain: Plain, done: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    runs.run_alone(changed(plain, other), tmp_path / "run")
    assert runs.values(tmp_path / "run", "samples") == runs.values(done, "samples")
    for name in ("loss", "margin", "grad_norm"):
        assert runs.values(tmp_path / "run", name) == pytest.approx(runs.values(done, name), rel=1e-4, abs=1e-5)


SEEN: list[tuple[list[str], list[str]]] = []


def seen(answers: list[str], references: list[str]) -> float:
    SEEN.append((answers, references))
    return 0.25


seen.higher_is_better = True  # type: ignore[attr-defined]


def test_prompts_of_held_out_pairs_are_answered_in_training_with_the_chosen_answers_beside(
    plain: Plain, tmp_path: Path
) -> None:
    evaluation = {"generate_rows": 3, "metrics": [f"{__name__}:seen"], "metric": "seen", "max_new_tokens": 5}
    own = changed(plain, {"evaluation": evaluation, "train.max_steps": 4})
    config = runs.config_of(own)
    check_evaluation(config)
    require_prompts(config, "preference")
    runs.run_alone(own, tmp_path / "run", answering=TrainingAnswers(config, "fp32"))
    assert [record["seen"] for record in runs.records(tmp_path / "run", "eval")] == [0.25]
    tokenizer = AutoTokenizer.from_pretrained(plain["model"]["name"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-000004", dtype=torch.float32)
    numbers = [20 + number for number in sample(7, 3, seed=config.run.seed).tolist()]
    answers = []
    for number in numbers:
        text = f"<|im_start|>user\n{pair(number)['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)[
            0, ids.shape[1] :
        ]
        answers.append(tokenizer.decode(made, skip_special_tokens=True))
    assert [(answers, [pair(number)["chosen"] for number in numbers])] == SEEN[-1:]


@pytest.mark.parametrize(("objective", "settings"), [("orpo", {"beta": 0.4}), ("simpo", {"beta": 1.5, "gamma": 0.7})])
def test_without_a_reference_the_first_step_is_that_of_the_plain_model(
    plain: Plain, tmp_path: Path, objective: str, settings: dict[str, float]
) -> None:
    said: list[Any] = []
    own = runs.changed({name: value for name, value in plain.items() if name != "preference"}, {"preference": settings})
    own = changed(own, {"train.objective": objective, "train.max_steps": 1, "adapter": {"method": "lora"}})
    runs.run_alone(own, tmp_path / "run", notify=said.append)
    name = plain["model"]["name"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        AutoTokenizer.from_pretrained(name),
    )
    losses = []
    for row in runs.values(tmp_path / "run", "samples")[0][::2]:
        texts = pair(row // 2)
        with torch.no_grad():
            better, worse = (logprob(model, tokenizer, texts["prompt"], texts[side]).mean() for side in NAMED)
        if objective == "simpo":
            losses.append(-F.logsigmoid(1.5 * (better - worse) - 0.7))
        else:
            odds = [mean - torch.log(1 - mean.exp()) for mean in (better, worse)]
            losses.append(-better - 0.4 * F.logsigmoid(odds[0] - odds[1]))
    assert runs.values(tmp_path / "run", "loss") == pytest.approx([float(torch.stack(losses).mean())], rel=1e-5)
    assert not any("computing" in getattr(record, "message", "") for record in said)


@pytest.fixture(scope="module")
def adapter(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that a run may continue from."""
    run_dir = tmp_path_factory.mktemp("adapter") / "run"
    runs.run_alone(
        changed(plain, {"adapter.method": "lora", "train.max_steps": 3, "train.learning_rate": 0.05}), run_dir
    )
    return run_dir / "checkpoint-000003"


# What is trained, and the reference: `adapter` and `model` are the one above, and what a run has trained.
REFERENCES = [("none", "start"), ("lora", "start"), ("adapter", "start"), ("adapter", "base"), ("lora", "adapter")]
REFERENCES += [("adapter", "model"), ("none", "model")]


@pytest.mark.parametrize(("trained", "reference"), REFERENCES)
def test_a_reference_gives_the_same_losses_before_training_and_in_the_step(
    plain: Plain, done: Path, adapter: Path, tmp_path: Path, trained: str, reference: str
) -> None:
    places = {"adapter": str(adapter), "model": str(done / "checkpoint-000008")}
    own = {"start_from": str(adapter)} if trained == "adapter" else {"method": trained, "dropout": 0.2}
    changes = {"preference.reference": places.get(reference, reference), "train.max_steps": 3, "run.seed": 8}
    whole = changed({name: part for name, part in plain.items() if name != "adapter"}, {"adapter": own}, changes)
    said: dict[bool, str] = {}
    for in_step in (False, True):
        heard: list[Any] = []
        run = changed(whole, {"preference.reference_in_step": in_step, "prepare.dir": str(tmp_path / "data")})
        runs.run_alone(run, tmp_path / str(in_step), notify=heard.append)
        said[in_step] = " ".join(getattr(record, "message", "") for record in heard)
    assert "computing `reference`" in said[False]
    assert "computing" not in said[True]
    losses, again = (runs.values(tmp_path / str(in_step), "loss") for in_step in (False, True))
    assert again == pytest.approx(losses, rel=1e-6, abs=1e-6)
    evaluated = [runs.records(tmp_path / str(in_step), "eval")[-1]["eval_loss"] for in_step in (False, True)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6, abs=1e-6)

    # The first step is that of plain Transformers and PEFT.
    def loaded(name: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(places["model"] if name == "model" else plain["model"]["name"])
        return PeftModel.from_pretrained(model, str(adapter)).eval() if name == "adapter" else model

    tokenizer = AutoTokenizer.from_pretrained(plain["model"]["name"])
    numbers = [row // 2 for row in runs.values(tmp_path / "True", "samples")[0][::2]]
    begun, before = loaded(trained), loaded(trained if reference == "start" else reference)
    with torch.no_grad():
        first = of_pairs(begun, before, tokenizer, numbers)
    for name in NAMES:
        assert runs.values(tmp_path / "True", name)[0] == pytest.approx(float(first[name]), rel=1e-4, abs=1e-4)
    # The control: another reference, or one that follows the model, would be seen.
    assert (abs(float(first["margin"])) > 1e-2) == (reference != "start")
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    if (trained, reference) != ("adapter", "start"):
        return
    # Merged into the base, what was learned on top of an adapter answers as the adapter does in plain PEFT.
    export_model(tmp_path / "True" / "checkpoint-000003", tmp_path / "out", dtype="fp32")
    base, whole = (AutoModelForCausalLM.from_pretrained(name) for name in (plain["model"]["name"], tmp_path / "out"))
    tuned, tokens = PeftModel.from_pretrained(base, str(tmp_path / "True" / "checkpoint-000003")), torch.arange(9, 40)
    with torch.no_grad():
        merged, adapted, start = (model(tokens[None]).logits for model in (whole, tuned, begun))
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - start).abs().max() > 0.1


@pytest.mark.parametrize("in_step", [False, True])
def test_a_run_does_not_continue_with_another_reference(
    plain: Plain, adapter: Path, tmp_path: Path, in_step: bool
) -> None:
    start = Path(shutil.copytree(adapter, tmp_path / "start"))
    settings = {"start_from": str(start), "dropout": 0.2}
    own = changed({name: part for name, part in plain.items() if name != "adapter"}, {"adapter": settings})
    own = changed(own, {"preference.reference_in_step": in_step, "train.max_steps": 2, "checkpoint.every_steps": 1})
    runs.run_alone(own, tmp_path / "run")
    longer = changed(own, {"train.max_steps": 3})
    weights = start / "adapter_model.safetensors"
    before = weights.read_bytes()
    save_file({name: value * 1.5 for name, value in load_file(weights).items()}, weights)
    with pytest.raises(ModelError, match="the files of the reference have changed since the run began") as caught:
        runs.run_alone(longer, tmp_path / "run")
    assert caught.value.where == f"adapter.start_from={start}"
    weights.write_bytes(before)
    runs.run_alone(longer, tmp_path / "run")
    assert len(runs.values(tmp_path / "run", "loss")) == 3
