"""Rows for Transformers' own models: rendered by the chat template, the last answer learned, padded to the longest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

IGNORED = -100
Tokens = dict[str, list[int]]


def read_tokens(path: Path, tokenizer: Any, max_length: int) -> list[Tokens]:
    """The rows of a file of JSON lines as token ids and labels.

    A row has "messages", or "prompt" and "completion" as strings; the last message or the completion is learned.

    Raises:
        ValueError: the template does not render the prompt as the beginning of the whole.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_tokens(json.loads(line), tokenizer, max_length) for line in lines if line.strip()]


def _tokens(row: dict[str, Any], tokenizer: Any, max_length: int) -> Tokens:
    if "messages" in row:
        prompt = _template(row["messages"][:-1], tokenizer, add_generation_prompt=True)
        ids = _template(row["messages"], tokenizer)
    else:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
    if ids[: len(prompt)] != prompt:
        raise ValueError("the prompt is not how the whole row begins")
    labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def _template(messages: Sequence[dict[str, str]], tokenizer: Any, **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
    return ids


def pad(rows: Sequence[Tokens], padding: int) -> dict[str, torch.Tensor]:
    """A batch, padded on the right to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": filled("input_ids", padding), "labels": filled("labels", IGNORED), "attention_mask": mask}
