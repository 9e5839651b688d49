"""Training rows: generated with Alpaca's lengths, or read from a file; and a representative sample of them.

The words are random, so losses are only useful for comparing two systems on the same rows. For speed, only the
distribution of row lengths matters.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Tokens of prompts and answers at these percentiles, over 999 rows in Alpaca's format with answers by GPT-4 (the common
# English sample for trying out fine-tuning), counted with SmolLM2's tokenizer.
PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
PROMPT_TOKENS = (4, 6, 7, 8, 11, 15, 23, 34, 44, 87, 170)
ANSWER_TOKENS = (1, 4, 8, 11, 25, 106, 259, 362, 401, 509, 594)

_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy music market sense nation plan college interest death experience effect
use class control field development role effort rate heart drug show leader light voice wife police mind price report
decision son view relationship town road arm difference value building action season society tax director position
player record paper space ground form event official matter center couple site project base activity star table need
court oil situation cost industry figure street image phone data picture practice piece land product doctor wall
patient worker news test movie north love support technology step baby computer type attention film tree source good
new first last long great little own other old big high different small large next early young important few public
bad same able be have do say get make go know take see come think look want give use find tell ask work seem feel try
leave call the of and to in for with on at by from about into over after under between through during
"""
WORDS = _LIST.split()


def _draw_length(random_source: random.Random, tokens: Sequence[int]) -> int:
    """A random length, from a distribution with the given values at `PERCENTILES`, linear in between."""
    at = random_source.uniform(0, 100)
    right = min(bisect_right(PERCENTILES, at), len(PERCENTILES) - 1)
    left = right - 1
    share = (at - PERCENTILES[left]) / (PERCENTILES[right] - PERCENTILES[left])
    return max(1, round(tokens[left] + share * (tokens[right] - tokens[left])))


def text(random_source: random.Random, tokens: int) -> str:
    """Text of about this many tokens: words and punctuation marks that are one token each in common vocabularies."""
    pieces: list[str] = []
    while len(pieces) < tokens:
        left = tokens - len(pieces)
        sentence = random_source.choices(WORDS, k=min(random_source.randint(5, 14), max(1, left - 1)))
        pieces += [f" {word}" for word in sentence] + ["."]
    return "".join(pieces[: max(1, tokens)]).strip()


def make_rows(count: int, *, seed: int) -> list[Row]:
    """Rows of one question and one answer, with Alpaca's lengths."""
    random_source = random.Random(seed)
    return [
        _chat(
            text(random_source, _draw_length(random_source, PROMPT_TOKENS)),
            text(random_source, _draw_length(random_source, ANSWER_TOKENS)),
        )
        for _ in range(count)
    ]


def uniform_rows(model: Path, *, count: int, tokens: int, seed: int) -> list[Row]:
    """Rows with a text and a one-word answer, each exactly this many tokens in the model's chat template.

    Raises:
        ValueError: the template alone is longer.
    """
    random_source = random.Random(seed)
    rows: list[Row] = []
    prompt = tokens // 2
    while len(rows) < count and prompt > 0:
        made = [_chat(text(random_source, prompt), random_source.choice(("good", "bad"))) for _ in range(2 * count)]
        lengths = count_tokens(made, model, max_length=2 * tokens)
        rows += [row for row, length in zip(made, lengths, strict=True) if length == tokens]
        prompt += tokens - lengths[0]
    if len(rows) < count:
        raise ValueError(f"rows of {tokens} tokens are too short for the template of {model.name}")
    return rows[:count]


def _chat(prompt: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def long_rows(count: int, tokens: int, *, seed: int) -> list[Row]:
    """Rows of strings of one length, most of which is trained on."""
    random_source = random.Random(seed)
    prompt = tokens * 15 // 100
    return [
        {"prompt": text(random_source, prompt), "completion": f" {text(random_source, tokens - prompt)}"}
        for _ in range(count)
    ]


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON array or a JSON Lines file, as messages.

    A row may have Alpaca's columns, `prompt` and `completion` as strings, `question` and `answer`, or `messages` with
    one message and its answer; rows without an answer are left out.
    """
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        raw = json.loads(text)
    else:
        raw = [json.loads(line) for line in text.split("\n") if line.strip()]
    rows = [_as_chat(row) for row in raw]
    return [row for row in rows if row["messages"][-1]["content"].strip()]


def _as_chat(row: Row) -> Row:
    if "messages" in row:
        return {"messages": row["messages"]}
    if "instruction" in row:
        parts = [row["instruction"], row.get("input") or ""]
        return _chat("\n\n".join(part for part in parts if part), row["output"])
    if "question" in row:
        return _chat(row["question"], row["answer"])
    return _chat(row["prompt"], row["completion"])


def as_text_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows as a prompt string and a completion string, without a chat template.

    With a template, TRL also trains on the newline after the end-of-turn token, and finray does not. With strings, both
    train on the completion and one end-of-sequence token.
    """
    return [
        {
            "prompt": "".join(f"{message['content'].strip()}\n" for message in row["messages"][:-1]),
            "completion": row["messages"][-1]["content"].strip(),
        }
        for row in rows
    ]


def count_tokens(rows: Sequence[Row], model: Path, *, max_length: int) -> list[int]:
    """Tokens of each row in training: rendered with the model's chat template, and truncated at `max_length`.

    This function counts the tokens of all contenders, from the rows that they report. Rows of strings have no template;
    all contenders end them with one end-of-sequence token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    chats = [row["messages"] for row in rows if "messages" in row]
    rendered = iter(tokenizer.apply_chat_template(chats, tokenize=False) if chats else [])
    texts = [[next(rendered)] if "messages" in row else [row["prompt"], row["completion"]] for row in rows]
    encoded = iter(tokenizer([text for parts in texts for text in parts], add_special_tokens=False)["input_ids"])
    lengths = [sum(len(next(encoded)) for _ in parts) + (len(parts) == 2) for parts in texts]
    return [min(length, max_length) for length in lengths]


def grouped_sample(rows: Sequence[Row], lengths: Sequence[int], *, batches: int, batch_size: int) -> list[list[Row]]:
    """Batches of rows of similar length, spread evenly over the length distribution.

    This imitates sorting a large dataset by length: grouping only a few rows would need more padding. Together, the
    rows have the length distribution of the whole dataset.
    """
    by_length = sorted(range(len(rows)), key=lambda index: (lengths[index], index))
    available = len(rows) // batch_size
    if batches > available:
        raise ValueError(f"{len(rows)} rows do not make {batches} batches of {batch_size}")
    chosen = [(2 * number + 1) * available // (2 * batches) for number in range(batches)]
    return [[rows[index] for index in by_length[at * batch_size : (at + 1) * batch_size]] for at in chosen]


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
