"""Messages in few words, and learned tokens in runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finray.data.formats.examples import Example, Message
from finray.data.tokenize.encode import Tokenizer, Tokens

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "depth",
            "description": "How deep a river is, in metres",
            "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
)


class Templated:
    """As much of a tokenizer as a renderer of conversations asks for."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, *_: object) -> str:
        return self.chat_template


def user(content: str, *, train: bool = True) -> Message:
    return Message("user", content, train)


def assistant(content: str, *, train: bool = True, **extra: Any) -> Message:
    return Message("assistant", content, train, extra)


def system(content: str) -> Message:
    return Message("system", content)


def calling(*rivers: str, content: str = "") -> Message:
    made = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": "depth", "arguments": {"river": river}}}
        for at, river in enumerate(rivers)
    ]
    return assistant(content, tool_calls=made)


def result(content: str, at: int = 0) -> Message:
    return Message("tool", content, extra={"name": "depth", "tool_call_id": f"call0000{at}"})


def rows_of(tokenizer: Tokenizer, example: Example) -> list[Tokens]:
    """What becomes of one example."""
    (encoded,) = tokenizer.encode([example])
    return encoded.rows


def mask_of(row: Tokens) -> list[int]:
    """1 for each token that is learned, else 0."""
    mask = [0] * len(row.ids)
    for start, stop in row.spans:
        mask[start:stop] = [1] * (stop - start)
    return mask


def learned_runs(mask: Sequence[int]) -> list[list[int]]:
    """Positions of learned tokens, in runs."""
    runs: list[list[int]] = []
    for at, learned in enumerate(mask):
        if learned:
            if not at or not mask[at - 1]:
                runs.append([])
            runs[-1].append(at)
    return runs
