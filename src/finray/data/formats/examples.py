"""Examples: a conversation, a prompt with its completion, plain text, or text with a label.

The kind follows from a row's columns, or from `data.format`. ``convert.py`` converts rows to examples.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finray.data.formats.labels import Label as Label
from finray.data.formats.labels import LabelRules
from finray.errors import DataError, did_you_mean
from finray.limits import cut

Kind = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text", "labelled_text", "template", "converter"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        content: empty if there are only tool calls.
        train: False if the data excludes it from training.
        extra: other fields for the chat template: ``tool_calls``, ``name``, ``tool_call_id``, ``reasoning_content``.
    """

    role: str
    content: str
    train: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """In the format of chat templates."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template.

    Attributes:
        messages: the turns.
        tools: JSON schemas of the functions that the assistant may call.
        prompt_messages: number of leading messages that are a prompt, not trained on with `data.train_on: completion`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion, concatenated without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text for language modelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two, and the label: a class, several, or a number."""

    text: str
    label: Label
    text_pair: str | None = None


Example = Chat | Completion | Text | Labelled


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How to read rows of a source.

    Attributes:
        columns: field to the column that holds it.
        present: columns that the first rows have.
        as_chat: whether a prompt and its completion become chat turns if the model has a chat template.
        system: default system message of conversations.
        labels: how labels are read; None for a task without labels.
        of_table: whether rows come from a table, in which a null field may be one that a record does not have.
    """

    kind: Kind
    columns: Mapping[str, str] = field(default_factory=dict)
    input_template: str | None = None
    output_template: str | None = None
    converter: str | None = None
    present: tuple[str, ...] = ()
    as_chat: bool = False
    system: str | None = None
    labels: LabelRules | None = None
    of_table: bool = False

    def describe(self, *, has_chat_template: bool = False) -> str:
        """A description: the format, the columns that are read, and those that are ignored."""
        if self.kind == "converter":
            return f"converter {self.converter}"
        read = {name: column for name, column in self.columns.items() if _root(column, self.present) is not None}
        renamed = [name if name == column else f"{name} from {column}" for name, column in read.items()]
        used = {_root(column, self.present) for column in read.values()}
        unread = [column for column in self.present if column not in used]
        is_pair = self.kind == "prompt_completion" and self.as_chat and has_chat_template
        kind = f"{self.kind} as chat turns" if is_pair else self.kind
        text = f"{kind} ({', '.join(renamed)})" if renamed else kind
        return f"{text}; not read: {', '.join(unread)}" if unread else text


# In this order: the first format whose columns all exist. Each field may have several names.
_REQUIRED: tuple[tuple[Kind, dict[str, tuple[str, ...]]], ...] = (
    ("messages", {"messages": ("messages",)}),
    ("sharegpt", {"conversations": ("conversations", "conversation")}),
    ("prompt_completion", {"prompt": ("prompt",), "completion": ("completion",)}),
    ("alpaca", {"instruction": ("instruction",), "output": ("output", "response")}),
    ("prompt_completion", {"prompt": ("input",), "completion": ("output",)}),
    ("alpaca", {"instruction": ("question", "prompt", "query"), "output": ("answer", "response")}),
    ("text", {"text": ("text", "content")}),
)
# For labelled text, which is only read if requested, by name or by a task that uses labels.
_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("text1", "text2"),
)
_TEXTS = ("text", "sentence", "content")
_LABELS = ("label", "labels", "score")
# Other field names that a mapping may use.
_LABELLED = {
    **dict.fromkeys(("text", "sentence", "content", "sentence1", "premise"), "text"),
    **dict.fromkeys(("text_pair", "sentence2", "hypothesis"), "text_pair"),
    **dict.fromkeys(("label", "labels"), "label"),
}
# Optional fields; the first rows may lack them.
_OPTIONAL: dict[Kind, dict[str, tuple[str, ...]]] = {
    "messages": {"tools": ("tools",)},
    "sharegpt": {"system": ("system",), "tools": ("tools",)},
    "alpaca": {"input": ("input", "context"), "system": ("system",), "history": ("history",)},
}


def detect(columns: Iterable[str], mapping: Mapping[str, str], wanted: str = "auto") -> RowFormat:
    """The format indicated by the columns of the first rows, or the requested one.

    Raises:
        DataError: no format fits, or the mapping matches nothing; the message lists the columns.
    """
    present = tuple(columns)
    given = mapping
    if wanted == "labelled_text":
        return _labelled(present, given)
    for kind, required in _REQUIRED:
        optional = _OPTIONAL.get(kind, {})
        fields = {name: name for name in (*required, *optional)}
        # A mapping may use the names in the table of formats: `question` is the instruction of `alpaca`.
        fields = {other: name for name, names in (required | optional).items() for other in names} | fields
        mapping = {fields[name]: column for name, column in given.items() if name in fields}
        if wanted not in ("auto", kind) or len(mapping) < len(given):
            continue
        found = {}
        for name, names in required.items():
            for candidate in (mapping[name],) if name in mapping else names:
                if name not in found and _root(candidate, present) is not None:
                    found[name] = candidate
        if len(found) < len(required):
            continue
        for name, names in optional.items():
            there = next((one for one in names if one in present), names[0])
            found[name] = mapping.get(name, there)
            close = difflib.get_close_matches(found[name], present, n=1, cutoff=0.75)
            if name in mapping and close and _root(found[name], present) is None:
                raise DataError(
                    f"`{name}` is mapped to `{found[name]}`, which the first rows do not have (did you mean "
                    f"`{close[0]}`?)",
                    where="data.field_mapping",
                )
        return RowFormat(kind, found, present=present)
    raise _no_format(present, given, wanted)


def _labelled(present: tuple[str, ...], given: Mapping[str, str]) -> RowFormat:
    """The columns of labelled text: a text, or two with names that belong together, and a label."""

    def missing(what: str, field: str, near: str) -> DataError:
        return DataError(
            f"there is no column with {what} (columns: {cut(', '.join(present), 500)}){did_you_mean(near, present)}",
            where="data.field_mapping",
            repair=f"map it with data.field_mapping: {{{field}: COLUMN}}",
        )

    if unknown := [name for name in given if name not in _LABELLED]:
        raise DataError(
            f"labelled text has no field `{unknown[0]}`; its fields are text, text_pair and label",
            where="data.field_mapping",
            repair="leave it out, or set data.format",
        )
    found = {_LABELLED[name]: column for name, column in given.items()}
    for name, column in given.items():
        if _root(column, present) is None:
            raise _no_format(present, {name: column}, "labelled_text")
    if "text" not in found:
        pairs = () if "text_pair" in found else _PAIRS
        first, second = next((pair for pair in pairs if set(pair) <= set(present)), (None, None))
        first = first or next((name for name in _TEXTS if name in present), None)
        if first is None:
            raise missing("the text", "text", "text")
        found |= {"text": first, **({"text_pair": second} if second else {})}
    elif "text_pair" in present and "text_pair" not in found:
        found["text_pair"] = "text_pair"
    if "label" not in found:
        named = next((name for name in _LABELS if name in present), None)
        if named is None:
            raise missing("the labels", "label", "label")
        found["label"] = named
    return RowFormat(
        "labelled_text",
        {name: found[name] for name in ("text", "text_pair", "label") if name in found},
        present=present,
    )


def _no_format(present: tuple[str, ...], mapping: Mapping[str, str], wanted: str) -> DataError:
    for name, column in mapping.items():
        if _root(column, present) is None:
            return DataError(
                f"`{name}` is mapped to `{column}`, which is not a column ({cut(', '.join(present), 500)})",
                where="data.field_mapping",
                repair="map it to a column that the rows have",
            )
    named = f"`{wanted}`" if wanted != "auto" else "a format"
    mapped = f" with data.field_mapping of {', '.join(mapping)}" if mapping else ""
    labelled = (
        " (for classification: model.task: sequence_classification)" if {"label", "labels"} & set(present) else ""
    )
    if {"chosen", "rejected"} <= set(present):
        labelled = "; of preference data, `completion: chosen` (or `messages: chosen`) maps the preferred answers"
    return DataError(
        f"the columns do not match {named}{mapped} (columns: {cut(', '.join(present), 500)})",
        where="data.format",
        repair="rows need `messages`, or `conversations`, or `prompt` and `completion`, or `instruction` and "
        "`output`, or `text`; map other column names with data.field_mapping, or build prompts with "
        f"data.input_template{labelled}",
    )


def _root(column: str, present: Iterable[str]) -> str | None:
    """The top-level column that contains a column or nested field."""
    return next((name for name in (column, column.split(".")[0]) if name in present), None)
