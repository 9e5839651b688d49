"""Rows as examples, one function a format. A row that does not fit is a :class:`DataError` without a place; the caller,
who knows file and row, adds it."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.config.schema import DataConfig, SourceConfig
from finray.data.formats.conversations import messages_of, tools_of
from finray.data.formats.examples import Chat, Completion, Example, Labelled, Message, RowFormat, Text, detect
from finray.errors import ConfigError, DataError

Columns = Mapping[str, Any]
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w[\w .-]*)\}")


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What the user says of a source's format, before a row is seen."""

    format: str
    field_mapping: Mapping[str, str]
    input_template: str | None = None
    output_template: str | None = None
    converter: str | None = None

    @classmethod
    def of(cls, data: DataConfig, source: SourceConfig | None = None) -> FormatChoice:
        """From the data section, or from one of several sources with the section behind it."""
        own = source or SourceConfig(source="")
        return cls(
            own.format or data.format,
            data.field_mapping if own.field_mapping is None else own.field_mapping,
            own.input_template or data.input_template,
            own.output_template or data.output_template,
            data.converter,
        )

    def shaped_by(self) -> dict[str, Any]:
        """What of it changes tokens, as JSON types; a converter counts with its source code."""
        converter = None
        if self.converter is not None:
            file = getattr(inspect.getmodule(load_function(self.converter)), "__file__", None)
            content = Path(file).read_bytes() if file else self.converter.encode()
            converter = [self.converter, hashlib.sha256(content).hexdigest()]
        return {
            "format": self.format,
            "field_mapping": dict(sorted(self.field_mapping.items())),
            "input_template": self.input_template,
            "output_template": self.output_template,
            "converter": converter,
        }

    def decide(self, columns: Iterable[str]) -> RowFormat:
        """The format of rows with these columns.

        Raises:
            DataError: they fit none.
            ConfigError: the templates name no column, or not those of the mapping.
        """
        if self.converter is not None:
            return RowFormat("converter", converter=self.converter)
        if self.input_template is None or self.format not in ("auto", "template"):
            return detect(columns, self.field_mapping, self.format)
        assert self.output_template is not None
        found = _PLACEHOLDER.finditer(f"{self.input_template} {self.output_template}")
        names = list(dict.fromkeys(match[1] for match in found if match[1]))
        if not names:
            raise ConfigError(
                "the templates name no column, so every row would be the same",
                where="data.input_template",
                repair="write a column's name in braces, such as {question}",
            )
        unused = sorted(set(self.field_mapping) - set(names))
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} stands in no template (there are: {', '.join(names)})",
                where="data.field_mapping",
            )
        read = {name: self.field_mapping.get(name, name) for name in names}
        return RowFormat("template", read, self.input_template, self.output_template, present=tuple(columns))


def converter_of(row_format: RowFormat, *, has_chat_template: bool) -> Callable[[Columns], list[Example]]:
    """The function that turns a row into examples (one; a converter of the user's may give several, or none).

    Args:
        row_format: how rows are read.
        has_chat_template: without one, Alpaca rows become plain prompts instead of conversations.
    """
    if row_format.kind == "converter":
        assert row_format.converter is not None
        function = load_function(row_format.converter)
        return lambda row: _converted(function, row, has_chat_template=has_chat_template)
    return lambda row: [_example(row, row_format, has_chat_template=has_chat_template)]


# --- columns --------------------------------------------------------------------------------------------------------

_MISSING = object()


def column(row: Columns, name: str) -> Any:
    """The value of a column; a dot reaches into nested ones.

    Raises:
        DataError: it is missing or null.
    """
    value = _look_up(row, name)
    if value is _MISSING:
        raise DataError(
            f"the column `{name}` is missing (columns: {', '.join(row)})",
            repair="name the right column in data.field_mapping, or set data.format",
        )
    if value is None:
        raise DataError(f"the column `{name}` is null", repair="fill or remove the row, or set data.on_bad_row to drop")
    return value


def _look_up(row: Columns, name: str) -> Any:
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _optional(row: Columns, columns: Mapping[str, str], field: str) -> Any:
    """The value of a column that a row may leave out; None where it is missing, null, or in nothing."""
    value = _look_up(row, columns[field]) if field in columns else None
    return None if value is _MISSING else value


def _text(row: Columns, name: str) -> str:
    value = column(row, name)
    if not isinstance(value, str):
        nested = " (a dot reaches into nested columns, such as `data.text`)" if isinstance(value, Mapping) else ""
        raise DataError(f"the column `{name}` holds {type(value).__name__}, not text{nested}")
    return value


# --- formats --------------------------------------------------------------------------------------------------------


def _example(row: Columns, row_format: RowFormat, *, has_chat_template: bool) -> Example:
    columns = row_format.columns
    match row_format.kind:
        case "messages" | "sharegpt":
            name = columns["messages" if row_format.kind == "messages" else "conversations"]
            messages = messages_of(column(row, name), name)
            system = _optional(row, columns, "system")
            if system and messages[0].role != "system":
                messages = (Message("system", str(system)), *messages)
            return Chat(messages, tools_of(_optional(row, columns, "tools")))
        case "prompt_completion":
            prompt, completion = columns["prompt"], columns["completion"]
            if not isinstance(column(row, prompt), list):
                return Completion(_text(row, prompt), _text(row, completion))
            before = messages_of(column(row, prompt), prompt)
            after = messages_of(column(row, completion), completion)
            if before[-1].role == after[0].role == "assistant":
                raise DataError("two assistant turns in a row, at the border of prompt and completion")
            return Chat((*before, *after), prompt_messages=len(before))
        case "alpaca":
            return _from_alpaca(row, columns, has_chat_template=has_chat_template)
        case "labelled_text":
            label = column(row, columns["label"])
            if not isinstance(label, str | int) or isinstance(label, bool):
                raise DataError(f"the label is {label!r}; it must be a whole number or a name")
            return Labelled(_text(row, columns["text"]), str(label))
        case "text":
            return Text(_text(row, columns["text"]))
        case _:
            assert row_format.input_template is not None
            assert row_format.output_template is not None
            return Completion(
                _filled(row_format.input_template, row, columns), _filled(row_format.output_template, row, columns)
            )


def _from_alpaca(row: Columns, columns: Mapping[str, str], *, has_chat_template: bool) -> Example:
    system = _optional(row, columns, "system")
    turns = [Message("system", str(system))] if system else []
    history = _optional(row, columns, "history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError("the column `history` must be a list of pairs: question and answer")
    for asked, said in history:
        turns += [Message("user", str(asked)), Message("assistant", str(said))]
    more = _optional(row, columns, "input")
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
    """`{name}` is a column; two braces are one; a written-out ``\\n`` or ``\\t`` is the character."""
    template = template.replace("\\n", "\n").replace("\\t", "\t")

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        found = column(row, columns[match[1]])
        if isinstance(found, list | Mapping):
            raise DataError(f"the column `{columns[match[1]]}` holds {type(found).__name__}, which is not text")
        return str(found)

    return _PLACEHOLDER.sub(value, template)


# --- converters of the user's ---------------------------------------------------------------------------------------


def load_function(path: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; the working directory is searched too.

    Raises:
        ConfigError: there is none.
    """
    import sys

    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError("a converter is written package.module:function", where=f"data.converter={path}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the converter cannot be imported: {error}",
            where=f"data.converter={path}",
            repair="the module must lie in the working directory or be installed where Ray's workers run",
        ) from None
    if not callable(function):
        raise ConfigError("the converter is not a function", where=f"data.converter={path}")
    return function  # type: ignore[no-any-return]


def _converted(function: Callable[..., Any], row: Columns, *, has_chat_template: bool) -> list[Example]:
    try:
        result = function(dict(row))
        # A generator runs, and fails, only here.
        rows = list(result) if isinstance(result, Iterable) and not isinstance(result, Mapping | str) else [result]
    except Exception as error:
        # Whatever the user's own code raises is about this row.
        raise DataError(f"the converter failed: {type(error).__name__}: {error}") from None
    if result is None:
        return []
    if not all(isinstance(item, Mapping) for item in rows):
        raise DataError("the converter must return a row (a dictionary), a list of rows, or None to leave it out")
    examples: list[Example] = []
    for item in rows:
        wanted = "labelled_text" if "label" in item and "text" in item else "auto"
        row_format = detect(item, {}, wanted)
        examples += converter_of(row_format, has_chat_template=has_chat_template)(item)
    return examples
