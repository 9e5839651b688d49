"""A small run that was trained a few steps, to be evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finray.checkpoint.rundir import RunDir
from finray.config.load import Overrides
from finray.config.requests import EvaluationRequest
from finray.evaluation import compare
from finray.evaluation.outcome import Comparison
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


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(model: str | Path, overrides: Overrides = (), **options: Any) -> Comparison:
    """As `finray.evaluate`, without showing how far it has come."""
    told = {"progress": options.pop("progress")} if "progress" in options else {}
    return compare.evaluate(model, overrides, EvaluationRequest(**options), **told)


def text_of(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


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


Train = Callable[..., Path]


def train(tiny_model_dir: Path, folder: Path, **changes: Any) -> Path:
    """Trains a few steps; rows 0 to 5 are trained on, 6 to 8 held out for evaluation."""
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
