"""Reward models, from a file of pairs to scored answers: beside a loop in plain torch and Transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finray.config.requests import EvaluationRequest
from finray.errors import ConfigError, DataError
from finray.evaluation.artifacts import export_model, find_artifact
from finray.evaluation.compare import evaluate
from finray.publishing.card import ModelFacts, card
from finray.serving.models import ServeSettings
from finray.serving.server import ApiServer
from tests.support import runs, tiny
from tests.support.runs import Plain, changed

THINGS = ("a cat", "the old red fox", "tea", "seven small stones in a row", "bread and butter", "rain")
SYSTEM = "<|im_start|>system\nbe brief<|im_end|>\n"
CENTERING, EPSILON, RATE = 0.07, 1e-2, 0.005
NAMES = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward")


def pair(number: int) -> dict[str, Any]:
    answers = {"chosen": f"it is {THINGS[number % 6]}", "rejected": THINGS[number % 5]}
    return {"prompt": f"what is {number}", **answers, "score_chosen": 1 + number % 3, "score_rejected": 0.75}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """All weights and the head of a model on 20 pairs, evaluated on others, with values that are not the defaults."""
    folder = tmp_path_factory.mktemp("pairs")
    model = tiny.build_classifier("llama", classes=1, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(str(folder / "model"))
    tokenizer.save_pretrained(str(folder / "model"))
    for name, numbers in {"train": range(20), "eval": range(20, 27)}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair(number)) + "\n" for number in numbers))
    own: dict[str, Any] = {"data.source": str(folder / "train.jsonl"), "data.eval_source": str(folder / "eval.jsonl")}
    own |= {"train.objective": "reward", "preference": {"margins": True, "centering": CENTERING}}
    own |= {"train": {"schedule": "constant", "warmup_steps": 0, "learning_rate": RATE, "adam_epsilon": EPSILON}}
    own |= {"train.max_grad_norm": None, "data.max_length": 48, "evaluation.every_steps": 4}
    own |= {"adapter": {"method": "none"}, "evaluation.metric": "accuracy"}
    return tiny_run(own, model=folder / "model")


@pytest.fixture(scope="module")
def done(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    runs.run_alone(plain, run_dir)
    return run_dir


def reward(model: Any, tokenizer: Any, question: str, answer: str, system: str = "") -> torch.Tensor:
    """Of an answer to a question, alone in its pass."""
    text = f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    return model(input_ids=tokens).logits[0, 0].double()


def of_pairs(
    model: Any, tokenizer: Any, numbers: list[int], sides: tuple[str, str] = ("chosen", "rejected")
) -> dict[str, Any]:
    """Means over pairs of what a record has."""
    total: dict[str, Any] = dict.fromkeys(NAMES, 0.0)
    for number in numbers:
        row = pair(number)
        better, worse = (reward(model, tokenizer, row["prompt"], row[side]) for side in sides)
        least = row["score_chosen"] - row["score_rejected"]
        loss = -F.logsigmoid(better - worse - least) + CENTERING * (better + worse) ** 2
        found = (loss, better - worse, float(better > worse), better, worse)
        total = {name: total[name] + value / len(numbers) for name, value in zip(NAMES, found, strict=True)}
    return total


def test_a_run_is_the_plain_loop(plain: Plain, done: Path) -> None:
    name = plain["model"]["name"]
    model = AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
    steps = []
    for rows in runs.values(done, "samples"):
        assert rows[1::2] == [row + 1 for row in rows[::2]]
        means = of_pairs(model, tokenizer, [row // 2 for row in rows[::2]])
        means["loss"].backward()
        steps.append({name: float(torch.as_tensor(value).detach()) for name, value in means.items()})
        gradients = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        steps[-1]["grad_norm"] = float(torch.stack(gradients).sum().sqrt())
        optimizer.step()
        optimizer.zero_grad()
    for name in (*NAMES, "grad_norm"):
        assert runs.values(done, name) == pytest.approx([step[name] for step in steps], rel=1e-4, abs=1e-5)
    with torch.no_grad():
        last, evaluated = runs.records(done, "eval")[-1], of_pairs(model, tokenizer, list(range(20, 27)))
        swapped = of_pairs(model, tokenizer, list(range(20, 27)), ("rejected", "chosen"))
    assert [last[name.replace("loss", "eval_loss")] for name in NAMES] == pytest.approx(
        [float(evaluated[name]) for name in NAMES], rel=1e-4, abs=1e-5
    )
    # It learns something. The control: the answers change places.
    assert steps[-1]["margin"] > 0 > steps[0]["margin"]
    assert last["eval_loss"] != pytest.approx(float(swapped["loss"]), rel=1e-2)


@pytest.mark.parametrize("other", [{}, {"train.micro_batch_size": 3}, {"data.packing": False}])
def test_a_killed_run_goes_on_with_the_same_losses(
    plain: Plain, done: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    run_dir = runs.cut(done, tmp_path / "run") if not other else tmp_path / "run"
    runs.run_alone(changed(plain, other), run_dir)
    assert runs.values(run_dir, "samples") == runs.values(done, "samples")
    assert other or runs.trace(run_dir) == runs.trace(done)
    for name in (*NAMES, "grad_norm"):
        assert runs.values(run_dir, name) == pytest.approx(runs.values(done, name), rel=1e-4, abs=1e-5)


def test_the_exported_and_the_served_model_score_answers_as_plain_transformers(plain: Plain, tmp_path: Path) -> None:
    own = changed(
        plain,
        {
            "adapter": {"method": "lora", "target_modules": "all-linear"},
            "data": {"system": "be brief", "max_length": 64},
        },
    )
    runs.run_alone(changed(own, {"train.max_steps": 4, "train.learning_rate": 0.05}), tmp_path / "run")
    export_model(tmp_path / "run" / "checkpoint-000004", tmp_path / "out", dtype="fp32")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    base = AutoModelForSequenceClassification.from_pretrained(plain["model"]["name"], dtype=torch.float32)
    question, answers = "what is 3", ["it is tea", "rain", "the old red fox"]
    model.requires_grad_(False)
    with torch.no_grad():
        expected = [float(reward(model, tokenizer, question, answer, SYSTEM)) for answer in answers]
        before = [float(reward(base, tokenizer, question, answer, SYSTEM)) for answer in answers]
    assert expected != pytest.approx(before, abs=1e-2)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answers[0]}]
    for place in ("run/checkpoint-000004", "out"):
        server = ApiServer(ServeSettings(str(tmp_path / place), dtype="fp32", name="rm"), lambda line: None)
        with TestClient(server.app(), base_url="http://127.0.0.1:8000") as http:
            for path, names in {"/v1/score": ("queries", "documents"), "/score": ("text_1", "text_2")}.items():
                asked = {"model": "rm", names[0]: question, names[1]: answers}
                scored = http.post(path, json=asked).json()["data"]
                assert [(each["index"], each["object"]) for each in scored] == [(at, "score") for at in range(3)]
                assert [each["score"] for each in scored] == pytest.approx(expected, abs=1e-5)
            for path, body in {
                "/v1/classify": {"messages": turns},
                "/classify": {"input": [[question, answers[0]]]},
            }.items():
                (found,) = http.post(path, json={"model": "rm", **body}).json()["data"]
                assert found["probs"] == pytest.approx(expected[:1], abs=1e-5)
            odd = {"model": "rm", "queries": [question] * 2, "documents": answers}
            assert http.post("/v1/score", json=odd).json()["error"]["message"].startswith("there are 2 prompts for 3")
            odd = {"model": "rm", "messages": turns[:1]}
            assert "does not end with an answer" in http.post("/classify", json=odd).json()["error"]["message"]
    # The lines of the model's card, as somebody else would run them: without the template's last line break.
    facts = ModelFacts(
        str(tmp_path / "out"), find_artifact(tmp_path / "out"), True, None, "1", config=runs.config_of(own)
    )
    text, ran = card(facts), dict[str, Any]()
    exec(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0], ran)  # noqa: S102
    turns = [*ran["messages"]]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant"]
    with torch.no_grad():
        alike = reward(model, tokenizer, turns[1]["content"], turns[2]["content"], SYSTEM)
    assert ran["reward"] == pytest.approx(float(alike), abs=1e-5)
    assert f"| objective | reward, margins True, centering {CENTERING} |" in text
    # A file of answers, and one of pairs: the scores of each row, and their means.
    alone = tmp_path / "answers.jsonl"
    alone.write_text("".join(json.dumps({"prompt": question, "answer": answer}) + "\n" for answer in answers))
    result = evaluate(tmp_path / "out", ["train.precision=fp32"], EvaluationRequest(file=alone))
    assert [row.scores["out"]["reward"] for row in result.predictions] == pytest.approx(expected, abs=1e-5)
    result = evaluate(tmp_path / "out", ["train.precision=fp32"], EvaluationRequest(file=plain["data"]["eval_source"]))
    rewards = [
        [float(reward(model, tokenizer, row["prompt"], row[side], SYSTEM)) for side in ("chosen", "rejected")]
        for row in map(pair, range(20, 27))
    ]
    for at, name in enumerate(("chosen_reward", "rejected_reward")):
        found = [row.scores["out"][name] for row in result.predictions]
        assert found == pytest.approx([row[at] for row in rewards], abs=1e-5)
    scores = result.models[-1].scores
    assert scores["reward_margin"].value == pytest.approx(sum(row[0] - row[1] for row in rewards) / 7, abs=1e-5)
    assert scores["reward_accuracy"].value == sum(row[0] > row[1] for row in rewards) / 7
    assert (scores["reward_accuracy"].interval.low or 0) < scores["reward_accuracy"].value
    with pytest.raises(ConfigError, match="a reward model scores answers; it does not write answers"):
        evaluate(tmp_path / "out", (), EvaluationRequest(file=alone, temperature=0.5))


def test_a_model_from_elsewhere_scores_what_its_template_renders(plain: Plain, tmp_path: Path) -> None:
    place = Path(shutil.copytree(plain["model"]["name"], tmp_path / "rm"))
    model = AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float32).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(place)
    question, answers = "what is 3", ["it is tea", "rain"]
    rows = [{"prompt": question, "answer": answer} for answer in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request, fp32, roles = (
        EvaluationRequest(file=tmp_path / "rows.jsonl"),
        ["train.precision=fp32"],
        ("user", "assistant"),
    )
    turns = [[{"role": role, "content": text} for role, text in zip(roles, row.values(), strict=True)] for row in rows]
    read = [tokenizer.apply_chat_template(each, return_tensors="pt", return_dict=True) for each in turns]
    expected, paired = (
        [float(model(**text).logits[0, 0]) for text in texts]
        for texts in (read, [tokenizer(*row.values(), return_tensors="pt") for row in rows])
    )
    # The control: the template ends with a line break, which finray's own models do not read.
    assert expected != pytest.approx([float(reward(model, tokenizer, *row.values())) for row in rows], abs=1e-3)

    def served() -> list[float]:
        server = ApiServer(ServeSettings(str(place), dtype="fp32", name="rm"), lambda line: None)
        with TestClient(server.app(), base_url="http://127.0.0.1:8000") as http:
            asked = {"model": "rm", "queries": question, "documents": answers}
            return [each["score"] for each in http.post("/v1/score", json=asked).json()["data"]]

    assert served() == pytest.approx(expected, abs=1e-5)
    result = evaluate(place, fp32, request)
    assert [row.scores["rm"]["reward"] for row in result.predictions] == pytest.approx(expected, abs=1e-5)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "problem_type": "regression"}))
    assert not find_artifact(place).is_reward
    (place / "config.json").write_text(json.dumps(config))
    (place / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template, so nothing says how it reads a prompt and its answer"):
        evaluate(place, fp32, request)
    assert served() == pytest.approx(paired, abs=1e-5)
    three = tiny.build_classifier("llama", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    three.save_pretrained(str(place))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "rain", "label": "LABEL_1"}) + "\n")
    found = three(**tokenizer("rain", return_tensors="pt")).logits.argmax().item()
    assert evaluate(place, fp32, request).models[-1].scores["accuracy"].value == (found == 1)
