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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finray.config.extensions import imported
from finray.config.schema import DataConfig, SourceConfig
from finray.data.formats.examples import Chat, Completion, Example, Labelled, Message, RowFormat, Text, detect
from finray.data.formats.labels import LabelRules, label_of
from finray.data.sources.readers import RepeatedKey, parse_json, without_nulls
from finray.errors import ConfigError, DataError, did_you_mean
from finray.limits import CONVERTER_S, cut, shown, within

Columns = Mapping[str, Any]
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w[\w .-]*)\}")
# What Python's own templates have after a name.
_FORMATTED = re.compile(r"(?<!\{)(?:\{\{)*\{(\w[\w .-]*)[:!\[][^{}]*\}")
_IN_BRACES = re.compile(r"(?<!\{)(?:\{\{)*(\{([^{}]+)\})")
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
            "template", read, self.input_template, self.output_template, present=present, system=self.system
        )


def converter_of(row_format: RowFormat, *, has_chat_template: bool) -> Callable[[Columns], list[Example]]:
    """The function that converts a row to examples (one; a user's converter may return any number).

    Without a chat template, Alpaca rows become plain prompts instead of conversations.
    """
    if row_format.kind == "converter":
        assert row_format.converter is not None
        function = load_function(row_format.converter)
        return lambda row: _converted(function, row, row_format, has_chat_template=has_chat_template)
    return lambda row: [_example(row, row_format, has_chat_template=has_chat_template)]


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


def _optional(row: Columns, columns: Mapping[str, str], field: str) -> Any:
    """The value of an optional column; None if it is missing or null."""
    value = _look_up(row, columns[field]) if field in columns else None
    return None if value is _MISSING else value


def _optional_text(row: Columns, columns: Mapping[str, str], field: str) -> str:
    """An optional column as text; a number as Python writes it, and nothing if it is missing or null.

    Raises:
        DataError: it is something else.
    """
    value = _optional(row, columns, field)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"the column `{columns[field]}` holds {type(value).__name__}, not text",
            repair=f"map `{field}` to another column with data.field_mapping, or use data.input_template",
        )
    return str(value)


def _text(row: Columns, name: str) -> str:
    value = column(row, name)
    if not isinstance(value, str):
        nested = " (a dot reaches into nested columns, such as `data.text`)" if isinstance(value, Mapping) else ""
        raise DataError(f"the column `{name}` holds {type(value).__name__}, not text{nested}")
    return value


# --- formats --------------------------------------------------------------------------------------------------------


def _example(row: Columns, row_format: RowFormat, *, has_chat_template: bool) -> Example:
    columns = row_format.columns
    if row_format.of_table:
        read = {name for column in columns.values() for name in (column, column.split(".")[0])}
        row = {name: without_nulls(value) if name in read else value for name, value in row.items()}
    match row_format.kind:
        case "messages" | "sharegpt":
            name = columns["messages" if row_format.kind == "messages" else "conversations"]
            messages = messages_of(column(row, name), name)
            system = _optional_text(row, columns, "system") or row_format.system
            return _begun(Chat(messages, tools_of(_optional(row, columns, "tools"))), system)
        case "prompt_completion":
            prompt, completion = columns["prompt"], columns["completion"]
            asked = column(row, prompt)
            if not isinstance(asked, list):
                prompt_text, answer_text = _text(row, prompt), _text(row, completion)
                if not (row_format.as_chat and has_chat_template):
                    return Completion(prompt_text, answer_text)
                return _begun(
                    Chat((Message("user", prompt_text), Message("assistant", answer_text))), row_format.system
                )
            before = messages_of(asked, prompt)
            after = messages_of(column(row, completion), completion)
            if before[-1].role == after[0].role == "assistant":
                raise DataError("two assistant turns in a row, where the prompt ends and the completion begins")
            return _begun(Chat((*before, *after), prompt_messages=len(before)), row_format.system)
        case "alpaca":
            return _from_alpaca(row, row_format, has_chat_template=has_chat_template)
        case "labelled_text":
            label = label_of(column(row, columns["label"]), row_format.labels or LabelRules())
            pair = _text(row, columns["text_pair"]) if "text_pair" in columns else None
            return Labelled(_text(row, columns["text"]), label, pair)
        case "text":
            return Text(_text(row, columns["text"]))
        case _:
            assert row_format.input_template is not None
            assert row_format.output_template is not None
            return Completion(
                _filled(row_format.input_template, row, columns), _filled(row_format.output_template, row, columns)
            )


def _begun(chat: Chat, system: str | None) -> Chat:
    """The conversation with a system message in front, unless it has one or none is given."""
    if not system or chat.messages[0].role in ("system", "developer"):
        return chat
    prompt = chat.prompt_messages + 1 if chat.prompt_messages else 0
    return replace(chat, messages=(Message("system", system), *chat.messages), prompt_messages=prompt)


def _from_alpaca(row: Columns, row_format: RowFormat, *, has_chat_template: bool) -> Example:
    columns = row_format.columns
    system = _optional_text(row, columns, "system") or row_format.system
    turns = [Message("system", system)] if system else []
    history = _optional(row, columns, "history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise DataError("the column `history` must be a list of [question, answer] pairs, both texts")
    for user, assistant in history:
        turns += [Message("user", user), Message("assistant", assistant)]
    more = _optional_text(row, columns, "input")
    question, answer = _text(row, columns["instruction"]), _text(row, columns["output"])
    if has_chat_template:
        question += f"\n{more}" if more else ""
        return Chat((*turns, Message("user", question), Message("assistant", answer)))
    # For base models: the sections of the Alpaca prompt.
    titles = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    before = "".join(f"{titles[one.role]}{one.content}\n\n" for one in (*turns, Message("user", question)))
    given = f"### Input:\n{more}\n\n" if more else ""
    return Completion(f"{before}{given}### Response:\n", answer)


def _filled(template: str, row: Columns, columns: Mapping[str, str]) -> str:
    """Fill a template: `{name}` is a column, double braces are literal; a written-out ``\\n`` or ``\\t`` is
    unescaped."""
    template = template.replace("\\n", "\n").replace("\\t", "\t")

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        found = column(row, columns[match[1]])
        if isinstance(found, list | Mapping | bytes):
            raise DataError(f"the column `{columns[match[1]]}` holds {type(found).__name__}, which is not text")
        return str(found)

    return _PLACEHOLDER.sub(value, template)


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
# Other message fields that chat templates read.
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking", "reasoning")


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """The messages in a column.

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
    for position, item in enumerate(value):
        message = _message(item, f"{column}[{position}]")
        if not (messages and messages[-1].role == message.role == "assistant"):
            messages.append(message)
            continue
        before = messages[-1]
        if message.content or "tool_calls" not in message.extra or before.train != message.train:
            raise DataError(
                f"{column}[{position}]: two assistant turns in a row",
                repair="join them, or put the user's turn between them",
            )
        # Some datasets write text and calls, or several calls, as separate turns.
        calls = [*before.extra.get("tool_calls", ()), *message.extra["tool_calls"]]
        messages[-1] = replace(before, extra={**before.extra, **message.extra, "tool_calls": calls})
    return tuple(messages)


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, as JSON schemas; text is parsed as JSON, bare functions are wrapped.

    Raises:
        DataError: the value is something else.
    """
    if value is None or value == "":
        return ()
    value = _decoded(value, "tools", strict=True)
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError("the column `tools` must be a list of functions, or such a list as JSON text")
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


def _message(item: Any, place: str) -> Message:
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
    if raw_role in _CALLS:
        extra["tool_calls"] = _calls(_decoded(content, place, strict=True), place)
        content = ""
    elif calls := item.get("tool_calls") or item.get("function_call"):
        # `function_call` is OpenAI's name of a single call before there were several.
        extra["tool_calls"] = _calls(calls, place)
    train = item.get("train")
    if train is None and isinstance(item.get("loss"), bool):
        # ms-swift's name.
        train = item["loss"]
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{place}.train must be true or false")
    if train is None and (weight := item.get("weight")) is not None:
        # OpenAI's way to say it.
        if weight not in (0, 1):
            raise DataError(f"{place}.weight is {shown(weight)}; it must be 1 (trained on) or 0 (not trained on)")
        train = bool(weight)
    if content is None and "tool_calls" in extra:
        content = ""
    if isinstance(content, list) and all(isinstance(one, Mapping) for one in content):
        other = next(
            (one for one in content if one.get("type") != "text" or not isinstance(one.get("text"), str)), None
        )
        if other is not None:
            raise DataError(
                f"{place} has no text: a part of `content` is {shown(dict(other))}",
                repair='only text is trained on; a part is {"type": "text", "text": "..."}',
            )
        content = "".join(one["text"] for one in content)
    if not isinstance(content, str):
        what = "is null" if content is None else f"holds {type(content).__name__}"
        raise DataError(f"{place} has no text: `content` {what} (role `{raw_role}`)")
    return Message(role, content, train is not False, extra)


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
        arguments = {} if arguments in (None, "") else _decoded(arguments, f"{place}.arguments", strict=True)
        if not isinstance(arguments, Mapping):
            raise DataError(f"{place}: the `arguments` of a tool call must be an object, not {shown(arguments)}")
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
