"""Examples: a conversation, a prompt with its completion, plain text, or text with a label.

The kind follows from a row's columns, or from `data.format`. ``convert.py`` converts rows to examples.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from finray.data.formats.labels import Label as Label
from finray.data.formats.labels import LabelRules
from finray.errors import DataError, did_you_mean
from finray.limits import cut

# What preferences are made of: pairs of answers, or answers that are wanted or not.
PreferenceKind = Literal["preference", "unpaired"]
Kind = (
    Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text", "labelled_text", "template", "converter"]
    | PreferenceKind
)


# One for all: an own object for each message costs as much as reading it.
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Arguments(dict[str, Any]):
    """The arguments of a tool call that were given as JSON text, with that text, which some templates want."""

    __slots__ = ("_written",)

    def __init__(self, arguments: Mapping[str, Any], written: str) -> None:
        super().__init__(arguments)
        self._written = written

    @staticmethod
    def text(arguments: Mapping[str, Any]) -> str:
        """Arguments as JSON text: as they were given, if they were text."""
        if isinstance(arguments, Arguments):
            return arguments._written
        return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str  # empty if there are only tool calls
    train: bool = True  # False if the data excludes it from training
    # Other fields for the chat template: ``tool_calls``, ``name``, ``tool_call_id``, ``reasoning_content``.
    extra: Mapping[str, Any] = field(default_factory=dict)
    # Fields that finray does not know; a template may.
    others: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    # Whether the content is null, as beside tool calls: some templates render calls only then.
    is_null: bool = field(default=False, compare=False)
    # Ranges of characters of the content that the data excludes from training, in order.
    hidden: tuple[tuple[int, int], ...] = ()

    def plain(self) -> dict[str, Any]:
        """In the format of chat templates."""
        return {"role": self.role, "content": None if self.is_null else self.content, **self.extra}

    def whole(self) -> dict[str, Any]:
        """As :meth:`plain`, with the fields that finray does not know."""
        return {**self.others, **self.plain()}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template."""

    messages: tuple[Message, ...]  # the turns
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the functions that the assistant may call
    # Number of leading messages that are a prompt, not trained on with `data.train_on: completion`.
    prompt_messages: int = 0
    # The row's own variables for the chat template.
    arguments: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    # What to say of how the row was read; see :func:`finray.data.formats.convert.converter_of`.
    notes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion, concatenated without a template."""

    prompt: str
    completion: str
    notes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text for language modelling."""

    text: str
    notes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two, and the label: a class, several, or a number."""

    text: str
    label: Label
    text_pair: str | None = None
    notes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Preference:
    """A better and a worse answer to one prompt."""

    # Both with the same prompt: as many leading messages, or the same text.
    chosen: Chat | Completion
    rejected: Chat | Completion
    margin: float | None = None  # by how much it is better; None if the source does not say

    @property
    def notes(self) -> frozenset[str]:
        """See :func:`finray.data.formats.convert.converter_of`."""
        is_inverted = self.margin is not None and self.margin < 0
        notes = {"inverted_margins"} if is_inverted else set[str]()
        if replace(self.chosen, notes=frozenset()) == replace(self.rejected, notes=frozenset()):
            notes.add("equal_answers")
        return self.chosen.notes | self.rejected.notes | notes


@dataclass(frozen=True, slots=True)
class Unpaired:
    """An answer to a prompt, and whether it is wanted."""

    answer: Chat | Completion
    is_wanted: bool

    @property
    def notes(self) -> frozenset[str]:
        """Those of the answer."""
        return self.answer.notes


Example = Chat | Completion | Text | Labelled | Preference | Unpaired


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How to read rows of a source."""

    kind: Kind
    columns: Mapping[str, str] = field(default_factory=dict)  # required field to the column that holds it
    # Other fields to the columns that may hold them, the preferred one first; any row may have them.
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    input_template: str | None = None
    output_template: str | None = None
    converter: str | None = None
    present: tuple[str, ...] = ()  # columns that the first rows have
    as_chat: bool = False  # whether a prompt and its completion become chat turns if the model has a chat template
    system: str | None = None  # default system message of conversations
    labels: LabelRules | None = None  # how labels are read; None for a task without labels
    base: RowFormat | None = None  # of rows whose answer is wanted or not: how they are read beside that
    # What the objective learns from, if that are preferences: pairs, or answers that are wanted or not.
    preferences: PreferenceKind | None = None
    # Whether rows come from a table, in which a null field may be one that a record does not have.
    of_table: bool = False

    def name(self, *, has_chat_template: bool) -> str:
        """The format, for people."""
        if self.kind == "converter":
            return f"converter {self.converter}"
        is_pair = self.kind == "prompt_completion" and self.as_chat and has_chat_template
        return f"{self.kind} as chat turns" if is_pair else self.kind

    def used(self, columns: Collection[str]) -> tuple[list[str], list[str]]:
        """Of a row's columns: the fields that are read, and from where; and the columns that are not read."""
        if self.kind == "converter":
            return [], []
        chosen = {name: column for name, column in self.columns.items() if root_of(column, columns) is not None}
        for name, candidates in self.optional.items():
            if (
                there := next((column for column in candidates if root_of(column, columns) is not None), None)
            ) is not None:
                chosen[name] = there
        roots = {root_of(column, columns) for column in chosen.values()}
        read = [name if name == column else f"{name} from {column}" for name, column in chosen.items()]
        return read, [column for column in columns if column not in roots]

    def describe(self, *, has_chat_template: bool = False) -> str:
        """A description of the first rows: the format, the columns that are read, and those that are ignored."""
        return described(self.name(has_chat_template=has_chat_template), *self.used(self.present))


def described(name: str, read: Iterable[str], unread: Iterable[str]) -> str:
    """How rows are read, for people."""
    read, unread = ", ".join(read), ", ".join(unread)
    return (f"{name} ({read})" if read else name) + (f"; not read: {unread}" if unread else "")


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
# Optional fields of every conversation, with other systems' names; any row may have them.
OF_CHATS = {
    "system": ("system", "system_prompt", "system_message"),
    "tools": ("tools", "functions"),
    "chat_template_kwargs": ("chat_template_kwargs",),
}
_OPTIONAL: dict[Kind, dict[str, tuple[str, ...]]] = {
    "messages": OF_CHATS,
    "sharegpt": OF_CHATS,
    "prompt_completion": OF_CHATS,
    "alpaca": {"input": ("input", "context"), "history": ("history",), **OF_CHATS},
}


def detect(columns: Iterable[str], mapping: Mapping[str, str], wanted: str = "auto") -> RowFormat:
    """The format indicated by the columns of the first rows, or the requested one.
    Raises DataError: no format fits, or the mapping matches nothing; the message lists the columns."""
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
        chosen = {}
        for name, names in required.items():
            for candidate in (mapping[name],) if name in mapping else names:
                if name not in chosen and root_of(candidate, present) is not None:
                    chosen[name] = candidate
        if len(chosen) < len(required):
            continue
        taken = {root_of(column, present) for column in (*chosen.values(), *mapping.values())}
        others = {
            name: (mapping[name],) if name in mapping else tuple(column for column in names if column not in taken)
            for name, names in optional.items()
        }
        for name in mapping.keys() & optional.keys():
            close = difflib.get_close_matches(mapping[name], present, n=1, cutoff=0.75)
            if close and root_of(mapping[name], present) is None:
                raise DataError(
                    f"`{name}` is mapped to `{mapping[name]}`, which the first rows do not have (did you mean "
                    f"`{close[0]}`?)",
                    where="data.field_mapping",
                )
        return RowFormat(kind, chosen, others, present=present)
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
    chosen = {_LABELLED[name]: column for name, column in given.items()}
    for name, column in given.items():
        if root_of(column, present) is None:
            raise _no_format(present, {name: column}, "labelled_text")
    if "text" not in chosen:
        pairs = () if "text_pair" in chosen else _PAIRS
        first, second = next((pair for pair in pairs if set(pair) <= set(present)), (None, None))
        first = first or next((name for name in _TEXTS if name in present), None)
        if first is None:
            raise missing("the text", "text", "text")
        chosen |= {"text": first, **({"text_pair": second} if second else {})}
    elif "text_pair" in present and "text_pair" not in chosen:
        chosen["text_pair"] = "text_pair"
    if "label" not in chosen:
        named = next((name for name in _LABELS if name in present), None)
        if named is None:
            raise missing("the labels", "label", "label")
        chosen["label"] = named
    # A second text that only later rows have is no single text without it.
    late = tuple(second for first, second in _PAIRS if first == chosen["text"] and second not in present)
    return RowFormat(
        "labelled_text",
        {name: chosen[name] for name in ("text", "text_pair", "label") if name in chosen},
        {} if "text_pair" in chosen else {"text_pair": late},
        present=present,
    )


def _no_format(present: tuple[str, ...], mapping: Mapping[str, str], wanted: str) -> DataError:
    for name, column in mapping.items():
        if root_of(column, present) is None:
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
        labelled = (
            "; to learn from pairs, set train.objective to dpo, orpo, simpo or reward; to learn the better answers "
            "only, map `completion: chosen` (or `messages: chosen`)"
        )
    return DataError(
        f"the columns do not match {named}{mapped} (columns: {cut(', '.join(present), 500)})",
        where="data.format",
        repair="rows need `messages`, or `conversations`, or `prompt` and `completion`, or `instruction` and "
        "`output`, or `text`; map other column names with data.field_mapping, or build prompts with "
        f"data.input_template{labelled}",
    )


def root_of(column: str, present: Collection[str]) -> str | None:
    """The top-level column that contains a column or nested field."""
    return next((name for name in (column, column.split(".")[0]) if name in present), None)
