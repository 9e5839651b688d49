"""Source rows as examples: a conversation, a prompt with its completion, or plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finray.data.sources import Row
from finray.errors import DataError

Format = Literal["messages", "prompt_completion", "text"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; ``train`` is False where the author of the data forbids learning it."""

    role: str
    content: str
    train: bool = True


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what should follow it, joined as they are, with no template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text for language modelling."""

    text: str


Example = Chat | Completion | Text


def detect(columns: list[str], mapping: Mapping[str, str]) -> Format:
    """The format that a row's columns speak for.

    Raises:
        DataError: none does; the message lists the columns.
    """
    present = set(columns)
    if mapping.get("messages", "messages") in present:
        return "messages"
    if {mapping.get("prompt", "prompt"), mapping.get("completion", "completion")} <= present:
        return "prompt_completion"
    if mapping.get("text", "text") in present:
        return "text"
    raise DataError(
        f"the format cannot be told from the columns ({', '.join(columns)})",
        where="data.format",
        repair="rows need `messages`, or `prompt` and `completion`, or `text`; data.field_mapping names other columns",
    )


def to_example(row: Row, kind: Format, mapping: Mapping[str, str]) -> Example:
    """Convert a row.

    Raises:
        DataError: a column is missing or holds something else; file, row and columns are named.
    """
    if kind == "messages":
        return Chat(_messages(row, mapping.get("messages", "messages")))
    if kind == "text":
        return Text(_string(row, mapping.get("text", "text")))
    prompt, completion = mapping.get("prompt", "prompt"), mapping.get("completion", "completion")
    if isinstance(row.value.get(prompt), list):
        return Chat((*_messages(row, prompt), *_messages(row, completion)))
    return Completion(_string(row, prompt), _string(row, completion))


def _column(row: Row, column: str) -> Any:
    if column not in row.value:
        raise DataError(
            f"the column `{column}` is missing (columns: {', '.join(row.value)})",
            where=row.where,
            repair="name the right column in data.field_mapping, or set data.format",
        )
    return row.value[column]


def _string(row: Row, column: str) -> str:
    value = _column(row, column)
    if not isinstance(value, str):
        raise DataError(f"the column `{column}` holds {type(value).__name__}, not text", where=row.where)
    return value


def _messages(row: Row, column: str) -> tuple[Message, ...]:
    value = _column(row, column)
    if not isinstance(value, list) or not value:
        raise DataError(f"the column `{column}` must be a list of messages with at least one", where=row.where)
    return tuple(_message(row, column, position, item) for position, item in enumerate(value))


def _message(row: Row, column: str, position: int, item: Any) -> Message:
    place = f"{column}[{position}]"
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise DataError(f"{place} must be an object with `role` and `content`", where=row.where)
    if not isinstance(item.get("content"), str):
        raise DataError(f"{place} has no text in `content` (role `{item['role']}`)", where=row.where)
    train = True if item.get("train") is None else item["train"]
    if not isinstance(train, bool):
        raise DataError(f"{place}.train must be true or false", where=row.where)
    return Message(item["role"], item["content"], train)
