"""Converts rows to examples, by format; conversations in OpenAI's (`role`, `content`) or ShareGPT's format (`from`,
`value`).

A bad row raises a :class:`DataError` without a location; the caller, who knows file and row, adds it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

from finray.config.extensions import imported
from finray.config.schema import DataConfig, SourceConfig
from finray.data.formats.examples import (
    Arguments,
    Chat,
    Completion,
    Example,
    Labelled,
    Message,
    RowFormat,
    Text,
    detect,
)
from finray.data.formats.labels import LabelRules, label_of
from finray.data.sources.readers import RepeatedKey, parse_json, without_nulls
from finray.errors import ConfigError, DataError, did_you_mean
from finray.limits import CONVERTER_S, cut, shown, within

Columns = Mapping[str, Any]
# The prompt of Alpaca, for base models.
ALPACA_FORM = "### Instruction:\n{instruction}\n\n### Response:\n"
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w[\w .-]*)\}")
# What Python's own templates have after a name.
_FORMATTED = re.compile(r"(?<!\{)(?:\{\{)*\{(\w[\w .-]*)[:!\[][^{}]*\}")
_IN_BRACES = re.compile(r"(?<!\{)(?:\{\{)*(\{([^{}]+)\})")
# Columns that say whether an answer is wanted, in data for KTO.
_WANTED = ("label", "kto_tag")
# Digest of the file that each converter was imported from.
_CONVERTERS: dict[str, str | None] = {}


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The user's settings of a source's format, before any row is read."""

    format: str
    field_mapping: Mapping[str, str]
    input_template: str | None = None
    output_template: str | None = None
    converter: str | None = None
    system: str | None = None
    labels: LabelRules | None = None

    @classmethod
    def of(
        cls, data: DataConfig, source: SourceConfig | None = None, *, labels: LabelRules | None = None
    ) -> FormatChoice:
        """From the data section, or from one of several sources with the section as default.

        Args:
            labels: how labels are read; None for a task without labels, for which `auto` does not look for any.
        """
        own = source or SourceConfig(source="")
        return cls(
            own.format or data.format,
            data.field_mapping if own.field_mapping is None else own.field_mapping,
            own.input_template or data.input_template,
            own.output_template or data.output_template,
            data.converter,
            data.system if own.system is None else own.system,
            labels,
        )

    def shaped_by(self) -> dict[str, Any]:
        """The settings that change tokens, as JSON types; a converter is included by its source code."""
        converter = None
        if self.converter is not None:
            converter = [self.converter, _digest(load_function(self.converter)) or _sha256(self.converter.encode())]
        # The tokens changed when `auto` began to make chat turns of prompts and completions; other formats did not.
        pairs: dict[str, Any] = {} if converter or self.input_template or self.format != "auto" else {"pairs": "chat"}
        if self.labels is not None or self.format == "labelled_text":
            pairs = {"labels": asdict(self.labels or LabelRules())}
        return {
            **pairs,
            **({"system": self.system} if self.system else {}),
            "format": self.format,
            "field_mapping": dict(sorted(self.field_mapping.items())),
            "input_template": self.input_template,
            "output_template": self.output_template,
            "converter": converter,
        }

    def decide(self, columns: Iterable[str]) -> RowFormat:
        """The format of rows with these columns.

        Raises:
            DataError: no format fits.
            ConfigError: the templates use no column, or not those of the mapping.
        """
        if self.converter is not None:
            return RowFormat("converter", converter=self.converter, system=self.system, labels=self.labels)
        if self.input_template is None or self.format not in ("auto", "template"):
            wanted = "labelled_text" if self.labels is not None and self.format == "auto" else self.format
            row_format = detect(columns, self.field_mapping, wanted)
            return replace(row_format, as_chat=self.format == "auto", system=self.system, labels=self.labels)
        assert self.output_template is not None
        found = _PLACEHOLDER.finditer(f"{self.input_template} {self.output_template}")
        names = list(dict.fromkeys(match[1] for match in found if match[1]))
        present = tuple(columns)
        for match in _FORMATTED.finditer(f"{self.input_template} {self.output_template}"):
            if self.field_mapping.get(match[1], match[1]).split(".")[0] in present:
                raise ConfigError(
                    f"`{match[0]}` would stand in every row as it is: a column is a name in braces, and nothing else",
                    where="data.input_template",
                    repair=f"write {{{match[1]}}} (a dot reaches into nested columns), or use data.converter",
                )
        for match in _IN_BRACES.finditer(f"{self.input_template} {self.output_template}"):
            known = match[2] in self.field_mapping or {match[2], match[2].split(".")[0]} & set(present)
            if known and not _PLACEHOLDER.fullmatch(match[1]):
                raise ConfigError(
                    f"`{match[1]}` would stand in every row as it is: a name in braces has only letters, digits, "
                    "spaces, `_`, `.` and `-`",
                    where="data.input_template",
                    repair=f"write another name, such as {{text}}, and map it with data.field_mapping: "
                    f"{{text: '{self.field_mapping.get(match[2], match[2])}'}}",
                )
        if not names:
            raise ConfigError(
                "the templates use no column, so every row would be the same",
                where="data.input_template",
                repair="write column names in braces, such as {question}",
            )
        unused = sorted(set(self.field_mapping) - set(names))
        if unused:
            raise ConfigError(
                f"no template uses {', '.join(unused)} (they use: {', '.join(names)})",
                where="data.field_mapping",
            )
        read = {name: self.field_mapping.get(name, name) for name in names}
        return RowFormat(
            "template", read, {}, self.input_template, self.output_template, present=present, system=self.system
        )


def converter_of(row_format: RowFormat, *, has_chat_template: bool) -> Callable[[Columns], list[Example]]:
    """The function that converts a row to examples (one; a user's converter may return any number).

    Without a chat template, Alpaca rows become plain prompts instead of conversations. The ``notes`` of an example are
    names of counters in the manifest, and ``unread:`` with what of the row is not read: a column, or
    ``messages[].KEY``.
    """
    if row_format.kind == "converter":
        assert row_format.converter is not None
        function = load_function(row_format.converter)
        return lambda row: _converted(function, row, row_format, has_chat_template=has_chat_template)
    # The optional fields that rows with these columns have; most rows of a source have the same columns.
    known: dict[tuple[str, ...], tuple[dict[str, tuple[str, ...]], tuple[str, ...]]] = {}
    optional, taken = row_format.optional, set(row_format.columns.values())
    is_answered = row_format.kind in ("messages", "sharegpt", "prompt_completion", "alpaca")

    def convert(row: Columns) -> list[Example]:
        columns = tuple(row)
        if (found := known.get(columns)) is None:
            some = ((name, tuple(one for one in every if _is_there(row, one))) for name, every in optional.items())
            wanted = tuple(name for name in _WANTED if is_answered and name in row and name not in taken)
            found = known[columns] = {name: every for name, every in some if every}, wanted
        there, wanted = found
        notes = {"unwanted_answers"} if wanted and any(row[name] is False for name in wanted) else set()
        return [_example(row, row_format, there, notes, has_chat_template=has_chat_template)]

    return convert


# --- columns --------------------------------------------------------------------------------------------------------

_MISSING = object()


def column(row: Columns, name: str) -> Any:
    """The value of a column; a dot accesses nested ones.

    Raises:
        DataError: it is missing or null.
    """
    value = _look_up(row, name)
    if value is _MISSING:
        raise DataError(
            f"the column `{name}` is missing (columns: {cut(', '.join(row), 500)})",
            repair="set the right column in data.field_mapping, or set data.format",
        )
    if value is None:
        raise DataError(f"the column `{name}` is null", repair="fill or remove the row, or set data.on_bad_row to drop")
    return value


def _look_up(row: Columns, name: str) -> Any:
    value: Any = row.get(name, _MISSING)
    if value is _MISSING:
        value = row
        for part in name.split("."):
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    # Python writes a missing number as NaN.
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_there(row: Columns, name: str) -> bool:
    return name in row or name.split(".")[0] in row


def _optional(row: Columns, columns: Sequence[str]) -> Any:
    """The first value in the columns of an optional field; None if each is missing, null or empty."""
    for name in columns:
        value = _look_up(row, name)
        if value is not _MISSING and not _is_empty(value):
            return value
    return None


def _optional_text(row: Columns, columns: Sequence[str], notes: set[str]) -> str:
    """An optional field as text; nothing if it is missing or null.

    Raises:
        DataError: it is something else.
    """
    value = _optional(row, columns)
    # True or false may say whether there is one.
    return "" if value is None else _as_text(value, f"the column `{columns[0]}`", notes, flags=False)


def _text(row: Columns, name: str, notes: set[str] | None = None) -> str:
    value = row.get(name)
    return value if type(value) is str else _as_text(column(row, name), f"the column `{name}`", notes)


def _as_text(value: Any, what: str, notes: set[str] | None = None, *, flags: bool = True) -> str:
    """Text; with ``notes``, also a number, true or false as JSON writes it, with a note.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, str):
        return value
    is_flag = isinstance(value, bool)
    if notes is not None and (flags if is_flag else isinstance(value, int | float | Decimal) and math.isfinite(value)):
        notes.add("numbers_as_text")
        return str(value).lower() if is_flag else str(value)
    repair = "write it as text (in quotes), or use data.converter"
    if isinstance(value, list | Mapping):
        nested = "a dot reaches into nested columns (such as `data.text`) in data.field_mapping"
        repair = f"write it as text, such as JSON (json.dumps in Python), or use data.converter; {nested}"
    raise DataError(f"{what} holds {type(value).__name__}, not text", repair=repair)


# --- formats --------------------------------------------------------------------------------------------------------


def _example(
    row: Columns,
    row_format: RowFormat,
    there: Mapping[str, tuple[str, ...]],
    notes: set[str],
    *,
    has_chat_template: bool,
) -> Example:
    columns = row_format.columns
    if row_format.of_table:
        every = (*columns.values(), *(one for some in there.values() for one in some))
        read = {name for column in every for name in (column, column.split(".")[0])}
        row = {name: without_nulls(value) if name in read else value for name, value in row.items()}
    match row_format.kind:
        case "messages" | "sharegpt":
            name = columns["messages" if row_format.kind == "messages" else "conversations"]
            chat = Chat(messages_of(column(row, name), name, notes))
            return _completed(chat, row, row_format, there, notes)
        case "prompt_completion":
            prompt, completion = columns["prompt"], columns["completion"]
            asked = column(row, prompt)
            if not isinstance(asked, list):
                prompt_text, answer_text = _text(row, prompt, notes), _text(row, completion, notes)
                if not (row_format.as_chat and has_chat_template):
                    notes |= {f"unread:{one}" for one in _with_value(row, there)}
                    return Completion(prompt_text, answer_text, frozenset(notes))
                chat = Chat((Message("user", prompt_text), Message("assistant", answer_text)))
                return _completed(chat, row, row_format, there, notes)
            before = messages_of(asked, prompt, notes)
            after = messages_of(column(row, completion), completion, notes)
            if before[-1].role == after[0].role == "assistant":
                raise DataError(
                    "two assistant turns in a row, where the prompt ends and the completion begins",
                    repair="join them, or put the user's turn between them",
                )
            chat = Chat((*before, *after), prompt_messages=len(before))
            return _completed(chat, row, row_format, there, notes)
        case "alpaca":
            return _from_alpaca(row, row_format, there, notes, has_chat_template=has_chat_template)
        case "labelled_text":
            label = label_of(column(row, columns["label"]), row_format.labels or LabelRules())
            pair = _text(row, columns["text_pair"]) if "text_pair" in columns else None
            if pair is None and (late := next(iter(_with_value(row, there)), None)) is not None:
                raise DataError(
                    f"the row has a second text, `{late}`, which the first rows of the source do not have",
                    repair=f"give it to all rows, or map it with data.field_mapping: {{text_pair: {late}}}",
                )
            return Labelled(_text(row, columns["text"]), label, pair)
        case "text":
            return Text(_text(row, columns["text"]))
        case _:
            assert row_format.input_template is not None
            assert row_format.output_template is not None
            return Completion(
                _filled(row_format.input_template, row, columns), _filled(row_format.output_template, row, columns)
            )


def _with_value(row: Columns, there: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The columns of these optional fields in which the row has something."""
    return [one for some in there.values() for one in some if _optional(row, (one,)) is not None]


def _completed(
    chat: Chat, row: Columns, row_format: RowFormat, there: Mapping[str, tuple[str, ...]], notes: set[str]
) -> Chat:
    """The conversation with what its row has beside the messages: system message, tools, variables of the template."""
    system = row_format.system
    if "system" in there:
        own = _optional_text(row, there["system"], notes)
        if own and chat.messages[0].role in ("system", "developer") and chat.messages[0].content != own:
            # The conversation's own one counts.
            notes.add(f"unread:{there['system'][0]}")
        system = own or system
    if "tools" in there:
        chat = replace(chat, tools=tools_of(_optional(row, there["tools"]), there["tools"][0]))
    if "chat_template_kwargs" in there:
        found = template_arguments(_optional(row, there["chat_template_kwargs"]))
        if row_format.of_table:
            # There all rows have the same variables.
            found = {name: value for name, value in found.items() if value is not None}
        chat = replace(chat, arguments=found)
    if system and chat.messages[0].role not in ("system", "developer"):
        prompt = chat.prompt_messages + 1 if chat.prompt_messages else 0
        chat = replace(chat, messages=(Message("system", system), *chat.messages), prompt_messages=prompt)
    return replace(chat, notes=frozenset(notes)) if notes else chat


def template_arguments(value: Any) -> Mapping[str, Any]:
    """A row's own variables for the chat template, from the column of TRL's name.

    Raises:
        DataError: it is no object, or sets what finray sets.
    """
    found = _decoded(value, "chat_template_kwargs", strict=True) if value else {}
    if not isinstance(found, Mapping):
        raise DataError(
            f"the column `chat_template_kwargs` holds {type(found).__name__}, not an object",
            repair='write the variables of the chat template, such as {"enable_thinking": false}',
        )
    if ours := sorted(set(found) & {"messages", "tools", "documents", "add_generation_prompt"}):
        raise DataError(
            f"the column `chat_template_kwargs` sets {', '.join(ours)}, which finray sets",
            repair="leave it out of the column",
        )
    return found


def _from_alpaca(
    row: Columns,
    row_format: RowFormat,
    there: Mapping[str, tuple[str, ...]],
    notes: set[str],
    *,
    has_chat_template: bool,
) -> Example:
    columns = row_format.columns
    turns = []
    history = _optional(row, there.get("history", ())) or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise DataError(
            f"the column `{there['history'][0]}` must be a list of [question, answer] pairs, both texts",
            repair="fix or remove the row, or set data.on_bad_row to drop",
        )
    for user, assistant in history:
        turns += [Message("user", user), Message("assistant", assistant)]
    more = _optional_text(row, there["input"], notes) if "input" in there else ""
    question, answer = _text(row, columns["instruction"], notes), _text(row, columns["output"], notes)
    if has_chat_template:
        question += f"\n{more}" if more else ""
        chat = Chat((*turns, Message("user", question), Message("assistant", answer)))
        return _completed(chat, row, row_format, there, notes)
    system = _optional_text(row, there.get("system", ()), notes) or row_format.system or ""
    others = {name: some for name, some in there.items() if name in ("tools", "chat_template_kwargs")}
    notes |= {f"unread:{one}" for one in _with_value(row, others)}
    # For base models: the sections of the Alpaca prompt.
    titles = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
    before = f"{system}\n\n" if system else ""
    before += "".join(f"{titles[one.role]}{one.content}\n\n" for one in (*turns, Message("user", question)))
    given = f"### Input:\n{more}\n\n" if more else ""
    return Completion(f"{before}{given}### Response:\n", answer, frozenset(notes))


def _filled(template: str, row: Columns, columns: Mapping[str, str]) -> str:
    """Fill a template: `{name}` is a column, double braces are literal; a written-out ``\\n`` or ``\\t`` is
    unescaped."""
    template = template.replace("\\n", "\n").replace("\\t", "\t")

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        found = column(row, columns[match[1]])
        if isinstance(found, list | Mapping | bytes):
            raise DataError(
                f"the column `{columns[match[1]]}` holds {type(found).__name__}, which is not text",
                repair="write it as text, or use data.converter",
            )
        return str(found)

    return _PLACEHOLDER.sub(value, template)


def prompt_form(data: DataConfig, formats: Iterable[str]) -> str | None:
    """The template of the prompts of training rows that are no conversations; None if they have none of one form.

    Args:
        data: of the config.
        formats: of its sources, as the manifest says.
    """
    if all(one.partition(" ")[0] == "alpaca" for one in formats) and not any(one.system for one in data.mix):
        system = (data.system or "").replace("{", "{{").replace("}", "}}")
        return f"{system}\n\n{ALPACA_FORM}" if system else ALPACA_FORM
    return None if any(one.input_template for one in data.mix) else data.input_template


def one_column(template: str) -> str | None:
    """The only column that a template names; None if there are several or none."""
    names = {match[1] for match in _PLACEHOLDER.finditer(template) if match[1]}
    return next(iter(names)) if len(names) == 1 else None


def in_form(template: str, text: str) -> str:
    """A text as a template with one column writes it; as it is if it has that form already, or there are several.

    A text has the form if it ends as the template does, and has the line before the column.
    """
    if (name := one_column(template)) is None:
        return text
    mark = "\ue000"
    filled = _filled(template, {name: mark}, {name: name})
    begins, ends = (part.strip() for part in (filled.partition(mark)[0], filled.rpartition(mark)[2]))
    line = begins.rpartition("\n")[2]
    is_formed = bool(begins or ends) and line in text and text.rstrip().endswith(ends)
    return text if is_formed else filled.replace(mark, text)


# --- conversations ----------------------------------------------------------------------------------------------------

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")
# The flag that says whether a turn, or a part of its content, is learned: finray's name, and those of other systems.
FLAGS = ("train", "training", "trainable", "loss", "loss_mask", "loss_scale", "loss_weight", "weight")
# Axolotl's list of ranges of a turn's content.
_RANGES = "train_detail"
# Keys of a message that templates usually read, and all that are read here; a template may read any other.
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_READ = frozenset(("role", "from", "content", "value", "tool_calls", "function_call", _RANGES, *FLAGS, *_KEPT))


def messages_of(value: Any, column: str, notes: set[str] | None = None) -> tuple[Message, ...]:
    """The messages in a column.

    Args:
        value: of the column.
        column: its name.
        notes: gets notes for the row.

    Raises:
        DataError: the column does not hold a valid conversation; the message names the turn.
    """
    value = _decoded(value, column)
    if isinstance(value, Mapping):
        # `datasets` stores a list of records as a record of lists.
        lengths = {len(items) if isinstance(items, list) else -1 for items in value.values()}
        if len(lengths) != 1 or -1 in lengths:
            raise DataError(f"the column `{column}` holds nested columns that are not a list of messages")
        value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise DataError(f"the column `{column}` holds {type(value).__name__}, not a list of messages")
    if not value:
        raise DataError(f"the column `{column}` is an empty list of messages")
    messages: list[Message] = []
    notes = set() if notes is None else notes
    for position, item in enumerate(value):
        message = _message(item, f"{column}[{position}]", notes)
        if not (messages and messages[-1].role == message.role == "assistant"):
            messages.append(message)
            continue
        before = messages[-1]
        if message.content or "tool_calls" not in message.extra or before.train != message.train:
            is_flagged = not message.content and "tool_calls" in message.extra
            raise DataError(
                f"{column}[{position}]: two assistant turns in a row"
                + (", of which only one is to be learned" if before.train != message.train else ""),
                repair="calls that belong to one turn are learned together: give both the same flag"
                if is_flagged
                else "join them (as parts of one content if they have flags of their own: "
                '{"type": "text", "text": "...", "train": false}), or put the user\'s turn between them',
            )
        # Some datasets write text and calls, or several calls, as separate turns.
        calls = [*before.extra.get("tool_calls", ()), *message.extra["tool_calls"]]
        is_null = before.is_null and message.is_null
        messages[-1] = replace(before, extra={**before.extra, **message.extra, "tool_calls": calls}, is_null=is_null)
    return tuple(messages)


def tools_of(value: Any, column: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, as JSON schemas; text is parsed as JSON, bare functions are wrapped.

    Raises:
        DataError: the value is something else.
    """
    if value is None or value == "":
        return ()
    value = _decoded(value, column, strict=True)
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(
            f"the column `{column}` must be a list of functions, or such a list as JSON text",
            repair="write their `name`, `description` and `parameters`, or give the column another name",
        )
    return tuple(tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in value)


def _decoded(value: Any, column: str, *, strict: bool = False) -> Any:
    """Lists may be stored as JSON text, in CSV for instance."""
    if not isinstance(value, str):
        return value
    if strict or value.lstrip().startswith(("[", "{")):
        try:
            return parse_json(value)
        except RepeatedKey as error:
            raise DataError(f"the column `{column}` is JSON in which {error}", repair="remove one of them") from None
        except json.JSONDecodeError as error:
            raise DataError(
                f"the column `{column}` is not JSON: {error.msg} (character {error.pos})",
                repair="write it as JSON, in Python with json.dumps",
            ) from None
        except (ValueError, RecursionError):
            raise DataError(
                f"the column `{column}` is not JSON that can be parsed: it is nested too deeply, or has too long a "
                f"number"
            ) from None
    return value


def _message(item: Any, place: str, notes: set[str]) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{place} must be an object with `role` and `content`")
    raw_role = item.get("role", item.get("from"))
    if not isinstance(raw_role, str):
        raise DataError(f"{place} must be an object with `role` and `content` (or `from` and `value`)")
    role = _ALIASES.get(raw_role, raw_role)
    if role not in ROLES:
        hint = did_you_mean(raw_role, [*ROLES, *_ALIASES])
        raise DataError(f"{place}: unknown role `{raw_role}`{hint}", repair=f"use one of {', '.join(ROLES)}")
    content = item.get("content", item.get("value"))
    if len(item) == 2 and isinstance(content, str) and raw_role not in _CALLS:
        # Nothing but these two, as in most rows.
        return Message(role, content)
    extra = {key: item[key] for key in _KEPT if item.get(key) is not None}
    others = {key: value for key, value in item.items() if key not in _READ and not _is_empty(value)}
    calls = item.get("tool_calls") or item.get("function_call")
    if raw_role in _CALLS:
        calls, content = _decoded(content, place, strict=True), None
    if calls:
        # `function_call` is OpenAI's name of a single call before there were several.
        extra["tool_calls"] = _calls(calls, place)
    train = _flag(item, place)
    if train and role != "assistant":
        # Only answers are learned; as a key that nothing reads it is counted.
        others |= {name: item[name] for name in FLAGS if item.get(name) is not None}
    hidden: list[tuple[int, int]] = []
    is_null = content is None and "tool_calls" in extra
    if isinstance(content, list) and content and all(isinstance(one, Mapping) for one in content):
        content, hidden = _joined(content, place, notes)
    elif not (isinstance(content, str) or content is None or isinstance(content, list)):
        content = _as_text(content, f"{place} has no text: `content`")
    if not isinstance(content, str) and not is_null:
        what = "is null" if content is None else f"holds {type(content).__name__}"
        raise DataError(
            f"{place} has no text: `content` {what} (role `{raw_role}`)",
            repair='write text, or parts such as {"type": "text", "text": "..."}; or set data.on_bad_row to drop',
        )
    content = content or ""
    if ranges := item.get(_RANGES):
        if hidden:
            raise DataError(f"{place} has flags of its parts and `{_RANGES}`", repair="leave out one of the two")
        hidden = _not_learned(ranges, len(content), f"{place}.{_RANGES}")
    if hidden and not "".join(content[low:high] for low, high in _between(hidden, len(content))).strip():
        if train:
            raise DataError(f"{place} is to be learned, but none of its parts is", repair="fix one of the flags")
        train, hidden = False, []
    return Message(role, content, train is not False, extra, others, is_null, () if train is False else tuple(hidden))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _flag(item: Mapping[str, Any], place: str) -> bool | None:
    """Whether a turn or a part is to be learned; None if it does not say.

    Raises:
        DataError: it is neither yes nor no, or two flags differ.
    """
    said: dict[str, bool] = {}
    for name in FLAGS:
        if (value := item.get(name)) is None:
            continue
        word = value.strip().lower() if isinstance(value, str) else value
        is_number = isinstance(word, bool | int | float) and word in (0, 1)
        if not is_number and word not in ("true", "false", "0", "1", "0.0", "1.0"):
            is_weight = isinstance(word, int | float)
            raise DataError(
                f"{place}.{name} is {shown(value)}; it must be 1 (trained on) or 0 (not trained on)"
                if is_weight
                else f"{place}.{name} must be true or false (or 1 or 0), not {shown(value)}",
                repair="turns have no weights: write 1 or 0, or repeat the row" if is_weight else "write one of them",
            )
        said[name] = bool(word) if is_number else word in ("true", "1", "1.0")
    if item.get("mask") is not None or item.get("masked") is not None:
        name = "mask" if item.get("mask") is not None else "masked"
        raise DataError(
            f"{place}.{name} is {shown(item[name])}: some systems learn what is masked, others leave it out",
            repair="write `train: true` (learned) or `train: false` (not learned) instead",
        )
    if "train" not in said and len(set(said.values())) > 1:
        raise DataError(
            f"{place} has flags that differ: {', '.join(f'{name} {shown(item[name])}' for name in said)}",
            repair="keep one of them",
        )
    # `train` is the first.
    return next(iter(said.values()), None)


def _joined(parts: Sequence[Mapping[str, Any]], place: str, notes: set[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text of parts, and the ranges of it that are not to be learned."""
    content, hidden = "", list[tuple[int, int]]()
    for number, one in enumerate(parts):
        if one.get("type") != "text" or not isinstance(one.get("text"), str):
            raise DataError(
                f"{place} has no text: a part of `content` is {shown(dict(one))}",
                repair='only text is trained on; a part is {"type": "text", "text": "..."}',
            )
        start, content = len(content), content + one["text"]
        if len(one) > 2:
            if _flag(one, f"{place}.content[{number}]") is False:
                # Of one that follows another, the same range.
                joined = bool(hidden) and hidden[-1][1] == start
                hidden = [*hidden[:-1], (hidden[-1][0], len(content))] if joined else [*hidden, (start, len(content))]
            others = (key for key in one if key not in (*FLAGS, "type", "text") and not _is_empty(one[key]))
            notes |= {f"unread:messages[].content[].{key}" for key in others}
    return content, [(low, high) for low, high in hidden if low < high]


def _not_learned(ranges: Any, length: int, place: str) -> list[tuple[int, int]]:
    """The ranges of a content that Axolotl's ``train_detail`` leaves out: what no range covers is not learned.

    Raises:
        DataError: it is no list of ranges inside the content that do not overlap.
    """
    learned: list[tuple[int, int]] = []
    every: list[tuple[int, int]] = []
    for number, one in enumerate(ranges if isinstance(ranges, list) else [None]):
        low, high = (one.get("begin_offset"), one.get("end_offset")) if isinstance(one, Mapping) else (None, None)
        if type(low) is not int or type(high) is not int or not 0 <= low <= high < length:
            raise DataError(
                f"{place} is {shown(one)}; it must be a range of the content's {length} characters",
                repair='write {"begin_offset": FIRST, "end_offset": LAST, "train": true}, counted from 0',
            )
        every.append((low, high + 1))
        if _flag(one, f"{place}[{number}]") is not False:
            learned.append(every[-1])
    every.sort()
    if any(before[1] > after[0] for before, after in pairwise(every)):
        raise DataError(f"{place} has ranges that overlap", repair="give each character one range")
    return _between(sorted(learned), length)


def _between(ranges: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What ranges leave of so many characters."""
    starts, stops = [0, *(high for _, high in ranges)], [*(low for low, _ in ranges), length]
    return [(low, high) for low, high in zip(starts, stops, strict=True) if low < high]


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's format."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: a tool call must have a `name` and `arguments`")
        # OpenAI stores arguments as JSON text; templates serialize them, so text would be quoted twice.
        arguments = function.get("arguments", function.get("parameters", {}))
        # Calls without arguments are logged with empty ones.
        written = arguments if isinstance(arguments, str) and arguments else None
        arguments = {} if arguments in (None, "") else _decoded(arguments, f"{place}.arguments", strict=True)
        if not isinstance(arguments, Mapping):
            raise DataError(
                f"{place}: the `arguments` of a tool call must be an object, not {shown(arguments)}",
                repair='write {"name": "...", "arguments": {"parameter": "value"}}',
            )
        if written is not None:
            arguments = Arguments(arguments, written)
        extra = {"id": call["id"]} if call.get("id") else {}
        calls.append({**extra, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


# --- converters of the user's ---------------------------------------------------------------------------------------


def load_function(path: str) -> Callable[..., Any]:
    """The function ``package.module:function``; the working directory is searched too.

    Raises:
        ConfigError: it does not exist.
    """
    module, colon, name = path.rpartition(":")
    if not colon or "/" in module or module.endswith(".py"):
        folder, stem = str(Path(module).parent), Path(module).stem
        raise ConfigError(
            "write the converter as package.module:function",
            where=f"data.converter={path}",
            repair=f"write `{stem}:{name}`" + (f", and run finray in {folder}" if folder != "." else "")
            if colon
            else None,
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    where = f"data.converter={path}"
    repair = "the module must lie in the working directory or be installed where Ray's workers run"
    function = imported(path, where=where, repair=repair)
    if not callable(function):
        raise ConfigError("the converter is not a function", where=where)
    # A notebook lives on while the file is edited: prepared rows are named after what stands there, so that must run.
    if _CONVERTERS.setdefault(path, _digest(function)) != _digest(function):
        for name in (module, getattr(function, "__module__", module)):
            sys.modules.pop(name, None)
        function = imported(path, where=where, repair=repair)
        _CONVERTERS[path] = _digest(function)
    return function  # type: ignore[no-any-return]


def _digest(function: Callable[..., Any]) -> str | None:
    """Of the file of a function's module; None if there is no such file."""
    file = getattr(inspect.getmodule(function), "__file__", None)
    return _sha256(Path(file).read_bytes()) if file else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _overdue(excess: str) -> DataError:
    return DataError(
        f"the converter used more than {excess} on this row",
        where="data.converter",
        repair="look for an endless loop or wait; load large files when its module is imported, not for each row",
    )


def _converted(function: Callable[..., Any], row: Columns, own: RowFormat, *, has_chat_template: bool) -> list[Example]:
    with within(CONVERTER_S, _overdue):
        try:
            # It may change what it gets, and may be called again for the same row.
            result = function(copy.deepcopy(dict(row)))
            # A generator runs, and fails, only here.
            rows = list(result) if isinstance(result, Iterable) and not isinstance(result, Mapping | str) else [result]
        except (Exception, SystemExit) as error:
            # Any exception of the user's code is about this row. SystemExit would make Ray restart the task again and
            # again, and end a command silently.
            raise DataError(f"the converter failed: {type(error).__name__}: {cut(str(error))}") from None
    if result is None:
        return []
    if not all(isinstance(item, Mapping) and all(isinstance(key, str) for key in item) for item in rows):
        raise DataError(
            "the converter must return a row (a dictionary whose keys are texts), a list of rows, or None to skip the "
            "row"
        )
    examples: list[Example] = []
    for item in rows:
        found = detect(item, {}, "labelled_text" if own.labels is not None else "auto")
        row_format = replace(found, system=own.system, labels=own.labels, of_table=own.of_table)
        examples += converter_of(row_format, has_chat_template=has_chat_template)(item)
    return examples
