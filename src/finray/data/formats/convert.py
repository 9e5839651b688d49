"""Converts rows to examples, by format, or by a converter of the user's.

A bad row raises a :class:`DataError` without a location; the caller, who knows file and row, adds it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finray.config.extensions import imported
from finray.config.schema import DataConfig, SourceConfig
from finray.data.formats.examples import (
    Chat,
    Completion,
    Example,
    Labelled,
    Message,
    Preference,
    PreferenceKind,
    RowFormat,
    Text,
    Unpaired,
    detect,
)
from finray.data.formats.labels import LabelRules, label_of
from finray.data.formats.messages import MEDIA, as_text, is_empty, messages_of, no_text, template_arguments, tools_of
from finray.data.formats.preferences import (
    answer_rows,
    detect_preferences,
    is_wanted,
    margin_of,
    pair_of,
    unpaired_of,
)
from finray.data.sources.readers import without_nulls
from finray.errors import ConfigError, DataError
from finray.limits import CONVERTER_S, cut, within

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
    preferences: PreferenceKind | None = None

    @classmethod
    def of(
        cls,
        data: DataConfig,
        source: SourceConfig | None = None,
        *,
        labels: LabelRules | None = None,
        preferences: PreferenceKind | None = None,
    ) -> FormatChoice:
        """From the data section, or from one of several sources with the section as default. ``labels`` is None for a
        task without labels, for which `auto` does not look for any; so is ``preferences`` for an objective that learns
        from single answers."""
        section = source or SourceConfig(source="")
        return cls(
            section.format or data.format,
            data.field_mapping if section.field_mapping is None else section.field_mapping,
            section.input_template or data.input_template,
            section.output_template or data.output_template,
            data.converter,
            data.system if section.system is None else section.system,
            labels,
            preferences,
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
        if self.preferences is not None:
            pairs["preferences"] = self.preferences
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
        Raises DataError: no format fits; ConfigError: the templates use no column, or not those of the mapping."""
        if self.converter is not None:
            return RowFormat(
                "converter",
                converter=self.converter,
                system=self.system,
                labels=self.labels,
                preferences=self.preferences,
            )
        if self.preferences is not None:
            if self.input_template is not None:
                raise ConfigError(
                    "templates make a prompt and one answer, and this objective learns from preferences",
                    where="data.input_template",
                    repair="leave it out, or build rows of preferences with data.converter",
                )
            row_format = detect_preferences(columns, self.field_mapping, self.preferences, self.format)
            return replace(row_format, as_chat=self.format == "auto", system=self.system)
        if self.input_template is None or self.format not in ("auto", "template"):
            wanted = "labelled_text" if self.labels is not None and self.format == "auto" else self.format
            row_format = detect(columns, self.field_mapping, wanted)
            return replace(row_format, as_chat=self.format == "auto", system=self.system, labels=self.labels)
        assert self.output_template is not None
        matches = _PLACEHOLDER.finditer(f"{self.input_template} {self.output_template}")
        names = list(dict.fromkeys(match[1] for match in matches if match[1]))
        present = tuple(columns)
        for match in _FORMATTED.finditer(f"{self.input_template} {self.output_template}"):
            if self.field_mapping.get(match[1], match[1]).split(".")[0] in present:
                raise ConfigError(
                    f"`{match[0]}` would stand in every row as it is: a column is a name in braces, and nothing else",
                    where="data.input_template",
                    repair=f"write {{{match[1]}}} (a dot reaches into nested columns), or use data.converter",
                )
        for match in _IN_BRACES.finditer(f"{self.input_template} {self.output_template}"):
            is_column = match[2] in self.field_mapping or {match[2], match[2].split(".")[0]} & set(present)
            if is_column and not _PLACEHOLDER.fullmatch(match[1]):
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
    if row_format.kind in ("preference", "unpaired"):
        return lambda row: _preferences(row, row_format, has_chat_template=has_chat_template)
    # The optional fields that rows with these columns have; most rows of a source have the same columns.
    fields_of: dict[tuple[str, ...], tuple[dict[str, tuple[str, ...]], tuple[str, ...]]] = {}
    optional, taken = row_format.optional, set(row_format.columns.values())
    is_answered = row_format.kind in ("messages", "sharegpt", "prompt_completion", "alpaca")

    def convert(row: Columns) -> list[Example]:
        columns = tuple(row)
        if (fields := fields_of.get(columns)) is None:
            some = (
                (name, tuple(candidate for candidate in every if _is_there(row, candidate)))
                for name, every in optional.items()
            )
            wanted = tuple(name for name in _WANTED if is_answered and name in row and name not in taken)
            fields = fields_of[columns] = {name: every for name, every in some if every}, wanted
        there, wanted = fields
        notes = {"unwanted_answers"} if wanted and any(row[name] is False for name in wanted) else set()
        return [_example(row, row_format, there, notes, has_chat_template=has_chat_template)]

    return convert


def _preferences(row: Columns, row_format: RowFormat, *, has_chat_template: bool) -> list[Example]:
    if row_format.of_table:
        row = {name: without_nulls(value) for name, value in row.items()}
    if row_format.kind == "preference":
        is_chat = row_format.as_chat and has_chat_template
        answers = [
            example
            for given, form in answer_rows(row, row_format, is_chat=is_chat)
            for example in converter_of(form, has_chat_template=has_chat_template)(given)
        ]
        return [pair_of(answers[0], answers[1], margin_of(row, row_format.columns))] if answers else []
    assert row_format.base is not None
    base = replace(row_format.base, as_chat=row_format.as_chat, system=row_format.system, of_table=row_format.of_table)
    label = row_format.columns.get("label")
    others = {name: value for name, value in row.items() if name != label}
    examples = converter_of(base, has_chat_template=has_chat_template)(others)
    if label is not None:
        return [unpaired_of(example, is_wanted(row, label)) for example in examples]
    # Each pair is an answer that is wanted, and one that is not.
    pairs = [example for example in examples if isinstance(example, Preference)]
    sides = ((side, side is pair.chosen) for pair in pairs for side in (pair.chosen, pair.rejected))
    return [Unpaired(side, wanted) for side, wanted in sides]


# --- columns --------------------------------------------------------------------------------------------------------

_MISSING = object()


def column(row: Columns, name: str) -> Any:
    """The value of a column; a dot accesses nested ones. Raises DataError: it is missing or null."""
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
        if value is not _MISSING and not is_empty(value):
            return value
    return None


def _optional_text(row: Columns, columns: Sequence[str], notes: set[str]) -> str:
    """An optional field as text; nothing if it is missing or null. Raises DataError: it is something else."""
    value = _optional(row, columns)
    # True or false may say whether there is one.
    return "" if value is None else as_text(value, f"the column `{columns[0]}`", notes, flags=False)


def _text(row: Columns, name: str, notes: set[str] | None = None) -> str:
    value = row.get(name)
    return value if type(value) is str else as_text(column(row, name), f"the column `{name}`", notes)


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
        every = (*columns.values(), *(field for some in there.values() for field in some))
        read = {name for column in every for name in (column, column.split(".")[0])}
        row = {name: without_nulls(value) if name in read else value for name, value in row.items()}
    match row_format.kind:
        case "messages" | "sharegpt":
            _require_text(row)
            name = columns["messages" if row_format.kind == "messages" else "conversations"]
            chat = Chat(messages_of(column(row, name), name, notes))
            return _completed(chat, row, row_format, there, notes)
        case "prompt_completion":
            prompt, completion = columns["prompt"], columns["completion"]
            asked = column(row, prompt)
            if not isinstance(asked, list):
                prompt_text, answer_text = _text(row, prompt, notes), _text(row, completion, notes)
                if not (row_format.as_chat and has_chat_template):
                    notes |= {f"unread:{field}" for field in _with_value(row, there)}
                    return Completion(prompt_text, answer_text, frozenset(notes))
                chat = Chat((Message("user", prompt_text), Message("assistant", answer_text)))
                return _completed(chat, row, row_format, there, notes)
            _require_text(row)
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


def _require_text(row: Columns) -> None:
    """Refuse a conversation with an image beside it, which its turns are about. Raises DataError: there is one."""
    for name in MEDIA:
        for column_name in (name, f"{name}s"):
            if not is_empty(row.get(column_name)):
                raise no_text(f"the column `{column_name}` holds something")


def _with_value(row: Columns, there: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The columns of these optional fields in which the row has something."""
    return [name for some in there.values() for name in some if _optional(row, (name,)) is not None]


def _completed(
    chat: Chat, row: Columns, row_format: RowFormat, there: Mapping[str, tuple[str, ...]], notes: set[str]
) -> Chat:
    """The conversation with what its row has beside the messages: system message, tools, variables of the template."""
    system = row_format.system
    if "system" in there:
        text = _optional_text(row, there["system"], notes)
        if text and chat.messages[0].role in ("system", "developer") and chat.messages[0].content != text:
            # The conversation's own one counts.
            notes.add(f"unread:{there['system'][0]}")
        system = text or system
    if "tools" in there:
        chat = replace(chat, tools=tools_of(_optional(row, there["tools"]), there["tools"][0]))
    if "chat_template_kwargs" in there:
        arguments = template_arguments(_optional(row, there["chat_template_kwargs"]))
        if row_format.of_table:
            # There all rows have the same variables.
            arguments = {name: value for name, value in arguments.items() if value is not None}
        chat = replace(chat, arguments=arguments)
    if system and chat.messages[0].role not in ("system", "developer"):
        prompt = chat.prompt_messages + 1 if chat.prompt_messages else 0
        chat = replace(chat, messages=(Message("system", system), *chat.messages), prompt_messages=prompt)
    return replace(chat, notes=frozenset(notes)) if notes else chat


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
    notes |= {f"unread:{item}" for item in _with_value(row, others)}
    # For base models: the sections of the Alpaca prompt.
    titles = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
    before = f"{system}\n\n" if system else ""
    before += "".join(f"{titles[item.role]}{item.content}\n\n" for item in (*turns, Message("user", question)))
    given = f"### Input:\n{more}\n\n" if more else ""
    return Completion(f"{before}{given}### Response:\n", answer, frozenset(notes))


def _filled(template: str, row: Columns, columns: Mapping[str, str]) -> str:
    """Fill a template: `{name}` is a column, double braces are literal; a written-out ``\\n`` or ``\\t`` is
    unescaped."""
    template = template.replace("\\n", "\n").replace("\\t", "\t")

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        content = column(row, columns[match[1]])
        if isinstance(content, list | Mapping | bytes):
            raise DataError(
                f"the column `{columns[match[1]]}` holds {type(content).__name__}, which is not text",
                repair="write it as text, or use data.converter",
            )
        return str(content)

    return _PLACEHOLDER.sub(value, template)


def prompt_form(data: DataConfig, formats: Iterable[str]) -> str | None:
    """The template of the prompts of training rows that are no conversations, by the formats in the manifest; None if
    they have none of one form."""
    if all(part.partition(" ")[0] == "alpaca" for part in formats) and not any(part.system for part in data.mix):
        system = (data.system or "").replace("{", "{{").replace("}", "}}")
        return f"{system}\n\n{ALPACA_FORM}" if system else ALPACA_FORM
    return None if any(part.input_template for part in data.mix) else data.input_template


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


# --- converters of the user's ---------------------------------------------------------------------------------------


def load_function(path: str) -> Callable[..., Any]:
    """The function ``package.module:function``; the working directory is searched too.
    Raises ConfigError: it does not exist."""
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


def _converted(
    function: Callable[..., Any], row: Columns, chosen: RowFormat, *, has_chat_template: bool
) -> list[Example]:
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
        detected = (
            detect(item, {}, "labelled_text" if chosen.labels is not None else "auto")
            if chosen.preferences is None
            else replace(detect_preferences(item, {}, chosen.preferences), as_chat=True)
        )
        row_format = replace(detected, system=chosen.system, labels=chosen.labels, of_table=chosen.of_table)
        examples += converter_of(row_format, has_chat_template=has_chat_template)(item)
    return examples
