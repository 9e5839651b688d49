"""What a row says: a conversation, a prompt with its completion, plain text, or text with a label.

Which of these a row is follows from its columns, or from `data.format`. Turning the row into one is in ``convert.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finray.errors import DataError

Kind = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text", "labelled_text", "template", "converter"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: who speaks.
        content: what is said; empty where there are only tool calls.
        train: False where the author of the data forbids learning it.
        extra: what else a chat template may read: ``tool_calls``, ``name``, ``tool_call_id``, ``reasoning_content``.
    """

    role: str
    content: str
    train: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As chat templates want it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template.

    Attributes:
        messages: the turns.
        tools: JSON schemas of the functions that the assistant may call.
        prompt_messages: the first so many are a prompt: `data.train_on: completion` does not learn them.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what should follow it, joined as they are, with no template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text for language modelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Labelled:
    """Text and its class, for classification."""

    text: str
    label: str


Example = Chat | Completion | Text | Labelled


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows of a source are read.

    Attributes:
        kind: the format.
        columns: field to the column that holds it.
        input_template: for ``template``.
        output_template: for ``template``.
        converter: `package.module:function`, for ``converter``.
    """

    kind: Kind
    columns: Mapping[str, str] = field(default_factory=dict)
    input_template: str | None = None
    output_template: str | None = None
    converter: str | None = None

    def describe(self) -> str:
        """For people: the format, and the columns it is read from."""
        if self.kind == "converter":
            return f"converter {self.converter}"
        renamed = [name if name == column else f"{name} from {column}" for name, column in self.columns.items()]
        return f"{self.kind} ({', '.join(renamed)})" if renamed else self.kind


# In this order: the first format whose columns are all there. Each field may be found under several names.
_REQUIRED: tuple[tuple[Kind, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    ("messages", (("messages", ("messages",)),)),
    ("sharegpt", (("conversations", ("conversations", "conversation")),)),
    ("prompt_completion", (("prompt", ("prompt",)), ("completion", ("completion",)))),
    ("alpaca", (("instruction", ("instruction",)), ("output", ("output", "response")))),
    ("prompt_completion", (("prompt", ("input",)), ("completion", ("output",)))),
    ("alpaca", (("instruction", ("question", "prompt", "query")), ("output", ("answer", "response")))),
    ("text", (("text", ("text", "content")),)),
)
_OPTIONAL: dict[Kind, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
}
_LABELLED = (("text", ("text", "sentence", "content")), ("label", ("label", "labels")))


def detect(columns: Iterable[str], mapping: Mapping[str, str], wanted: str = "auto") -> RowFormat:
    """The format that a row's columns speak for.

    Args:
        columns: of the first row.
        mapping: field to column, as the user gave it.
        wanted: a format, or ``auto``.

    Raises:
        DataError: no format fits; the message lists the columns.
    """
    present = list(columns)
    candidates = (*_REQUIRED, ("labelled_text", _LABELLED)) if wanted == "labelled_text" else _REQUIRED
    for kind, fields in candidates:
        if wanted in ("auto", kind):
            found = {name: _column(name, names, present, mapping) for name, names in fields}
            if all(column is not None for column in found.values()):
                return RowFormat(kind, {**_strings(found), **_extras(kind, present, mapping)})
    named = f"`{wanted}`" if wanted != "auto" else "a format"
    raise DataError(
        f"the columns are not those of {named} ({', '.join(present)})",
        where="data.format",
        repair="rows need `messages`, or `conversations`, or `prompt` and `completion`, or `instruction` and `output`, "
        "or `text`; data.field_mapping names other columns, data.input_template makes a prompt of any",
    )


def _column(name: str, names: tuple[str, ...], present: list[str], mapping: Mapping[str, str]) -> str | None:
    if name in mapping:
        column = mapping[name]
        return column if column in present or column.split(".")[0] in present else None
    return next((candidate for candidate in names if candidate in present), None)


def _strings(found: Mapping[str, str | None]) -> dict[str, str]:
    return {name: column for name, column in found.items() if column is not None}


def _extras(kind: Kind, present: list[str], mapping: Mapping[str, str]) -> dict[str, str]:
    return _strings({name: _column(name, (name,), present, mapping) for name in _OPTIONAL.get(kind, ())})
