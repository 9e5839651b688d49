"""Prompts: from arguments, a text file (one per line) or a table of rows in the formats of training; converted to token
ids. The answers that rows have are left out: the model does not see them."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finray import compat
from finray.config.schema import NO_TEXT
from finray.data.formats.convert import converter_of, in_form
from finray.data.formats.examples import OF_CHATS, Chat, Completion, detect
from finray.data.formats.messages import messages_of, template_arguments, tools_of
from finray.data.sources.pieces import read_file
from finray.data.sources.resolve import TABLES, SourceRow
from finray.data.storage import file_suffix
from finray.data.tokenize.chat import ChatRenderer, guarded
from finray.errors import DataError, ModelError, did_you_mean_path
from finray.files import FileKind
from finray.limits import cut

_FILES = FileKind(DataError, repair="write UTF-8 text with one prompt per line, or JSONL", links=True)
# By format, the column of the answer.
_ANSWERS = {"prompt_completion": "completion", "alpaca": "output"}
_AS_MESSAGES = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
_AS_ROWS = f"{_AS_MESSAGES}, name the column of a table `prompt`, or save plain prompts as .txt, one per line"
_TOOLS = FileKind(
    DataError, repair="write a JSON list of functions: their `name`, `description` and `parameters`", links=True
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to answer: a conversation, or plain text; ``tools`` are JSON schemas of functions that may be called, and
    ``arguments`` its own variables for the chat template."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # For a model without a chat template, where training writes the row in another way.
    plain: str = ""

    @classmethod
    def of(cls, text: str, system: str | None) -> Prompt:
        """Text alone, or as the user's turn after a system message."""
        if system is None:
            return cls(text=text)
        return cls(messages=({"role": "system", "content": system}, {"role": "user", "content": text}))


def read_tools(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Tools from a JSON file: a list as in the column ``tools`` of training data.
    Raises DataError: it is not such a file."""
    _require_file(path)
    try:
        return tools_of(_TOOLS.text(path))
    except DataError as error:
        raise _TOOLS.refused(error.message, error.where or path) from None


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(
            "this is no file" if path.exists() else f"the file does not exist{did_you_mean_path(path)}",
            where=str(path),
            repair="check the path and the working directory",
        )


def read_prompts(
    arguments: list[str],
    file: Path | None,
    *,
    system: str | None,
    tools: tuple[Mapping[str, Any], ...] = (),
    lines: Iterable[str] = (),
    notify: Callable[[str], None] = lambda line: None,
) -> list[Prompt]:
    """All prompts: the arguments, then those of the file; without both, the non-empty ``lines``.

    ``tools`` are for prompts without tools of their own, ``system`` for those without a system message. ``notify`` is
    called with what of a file's rows is left out. Raises DataError: the file cannot be read, there is no prompt, or one
    holds what is not a valid character.
    """
    prompts = [Prompt.of(text, system) for text in arguments]
    if file is not None:
        _require_file(file)
    if file is not None and file_suffix(str(file)) in TABLES:
        left_out = Counter[str]()
        prompts += [_prompt(row, system, left_out, repair=_AS_ROWS) for row in read_file(file)]
        if answered := left_out.pop("", 0):
            notify(f"{file.name}: the answers in {answered:,} rows are left out; the model does not see them")
        if left_out:
            notify(f"{file.name}: columns that are not read: {cut(', '.join(left_out))}")
    else:
        if file is not None:
            # As of standard input: `splitlines` would also split at U+2028, form feeds and others.
            lines = io.StringIO(_FILES.text(file), newline=None)
        if file is not None or not arguments:
            prompts += [Prompt.of(line.rstrip("\n"), system) for line in lines if line.strip()]
    if not prompts:
        raise DataError("there is no prompt", repair='`finray generate RUN "your prompt"`, or --file')
    _require_text(prompts)
    return [replace(prompt, tools=prompt.tools or tools) for prompt in prompts]


def given_prompts(given: Any, system: str | None) -> list[Prompt]:
    """Prompts of a program: one or several, each a text, a conversation, or a row with `prompt` or `messages`.
    Raises DataError: one of them is something else, or holds what is not a valid character."""
    several = [given] if isinstance(given, str | Mapping) else list(given)
    if several and all(isinstance(item, Mapping) and {"role", "from"} & set(item) for item in several):
        several = [several]
    prompts = list[Prompt]()
    for number, item in enumerate(several, start=1):
        if isinstance(item, str):
            prompts.append(Prompt.of(item, system))
            continue
        rows = (
            dict(item) if isinstance(item, Mapping) else {"messages": list(item)} if isinstance(item, Iterable) else {}
        )
        prompts.append(_prompt(SourceRow("prompts", number, rows), system, Counter()))
    _require_text(prompts)
    return prompts


def _require_text(prompts: Iterable[Prompt]) -> None:
    """Refuse what no tokenizer takes. Raises DataError: a prompt holds such a character."""
    for number, prompt in enumerate(prompts, start=1):
        for text in (prompt.text, *(str(message["content"]) for message in prompt.messages)):
            if (odd := NO_TEXT.search(text)) is not None:
                raise DataError(
                    f"prompt {number} holds U+{ord(odd[0]):04X}, which is not a valid character",
                    repair="remove that character",
                )


def _prompt(row: SourceRow, system: str | None, left_out: Counter[str], *, repair: str = _AS_MESSAGES) -> Prompt:
    """The prompt of a row in any format of training; with or without an answer, which is left out.

    Args:
        row: of a file or a program.
        system: system message, unless the row has one.
        left_out: counts the names of columns that are not read, and "" for rows with an answer.
        repair: for a row without a prompt.

    Raises:
        DataError: it has none, or another one than training would read.
    """
    # A null is what a row does not have.
    value = {name: field for name, field in row.value.items() if field is not None}
    try:
        tools = tools_of(_first(value, "tools"))
        arguments = template_arguments(_first(value, "chat_template_kwargs"))
        for name in ("messages", "conversations", "conversation", "prompt"):
            if (turns := _turns(value.get(name))) is not None:
                prompt = _conversation(row, name, turns, tools, system, left_out)
                return replace(prompt, arguments=arguments)
        for answer in ({}, *({name: ""} for name in ("completion", "response", "output"))):
            with suppress(DataError):
                row_format = detect({**value, **answer}, {})
                if row_format.kind in _ANSWERS:
                    break
        else:
            columns = cut(", ".join(row.value), 500)
            raise DataError(f"the row has neither `prompt` nor `messages` (columns: {columns})", repair=repair)
        column = row_format.columns[_ANSWERS[row_format.kind]]
        left_out.update([""] if value.get(column) else [])
        left_out.update(filter(None, row_format.describe().partition("; not read: ")[2].split(", ")))
        value[column] = ""
        (chat,) = converter_of(replace(row_format, as_chat=True), has_chat_template=True)(value)
        (alone,) = converter_of(row_format, has_chat_template=False)(value)
    except DataError as error:
        raise DataError(error.message, where=row.where, repair=error.repair or repair) from None
    assert isinstance(chat, Chat)
    messages = tuple(message.whole() for message in chat.messages[:-1])
    text = str(messages[-1]["content"])
    prompt = Prompt.of(text, system) if len(messages) == 1 else Prompt(messages=_begun(messages, system))
    plain = alone.prompt if isinstance(alone, Completion) and system is None else ""
    plain = "" if plain == prompt.text else plain
    return replace(prompt, tools=chat.tools or tools, arguments=arguments, plain=plain)


def _first(value: Mapping[str, Any], field: str) -> Any:
    """The value of an optional field, from the first of its columns that has one."""
    return next((value[name] for name in OF_CHATS[field] if value.get(name)), None)


def _turns(value: Any) -> list[Any] | None:
    """The turns of a conversation; None for what is none."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            turns = json.loads(value)
            value = turns if all(isinstance(turn, Mapping) for turn in turns) else value
    if isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        # `datasets` stores a list of records as a record of lists.
        value = [dict(zip(value, values, strict=True)) for values in zip(*value.values(), strict=False)]
    return list(value) if isinstance(value, list) else None


def _conversation(
    row: SourceRow,
    name: str,
    turns: list[Any],
    tools: tuple[Mapping[str, Any], ...],
    system: str | None,
    left_out: Counter[str],
) -> Prompt:
    """A conversation up to its last question."""
    asked = list(turns)
    while asked and _is_answer(asked[-1]):
        asked.pop()
    if turns and not asked:
        raise DataError(f"`{name}` holds answers only", repair="begin with the user's turn")
    answers = [name for name in _ANSWERS.values() if row.value.get(name)]
    left_out.update([""] if answers or len(asked) < len(turns) else [])
    read = {name for names in OF_CHATS.values() for name in names}
    left_out.update(set(row.value) - {name, *read, *_ANSWERS.values()})
    row_system = _first(row.value, "system")
    messages = tuple(message.whole() for message in messages_of(asked, name))
    messages = _begun(messages, row_system if isinstance(row_system, str) and row_system else system)
    return Prompt(messages=messages, tools=tools)


def _begun(messages: tuple[dict[str, Any], ...], system: str | None) -> tuple[dict[str, Any], ...]:
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _is_answer(turn: Any) -> bool:
    """Whether a turn is the model's, whatever its role is called."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    if role in ("function_call", "tool_call"):
        return True
    with suppress(DataError):
        return messages_of([{"role": role, "content": ""}], "messages")[0].role == "assistant"
    return False


def prompt_ids(
    tokenizer: Any,
    prompt: Prompt,
    *,
    raw: bool,
    system: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    tool_format: str = "plain",
    form: str | None = None,
) -> list[int]:
    """Token ids of a prompt, up to the start of the answer.

    Args:
        tokenizer: of the model.
        prompt: what to answer.
        raw: pass text without the chat template.
        system: system message for conversations that have none.
        arguments: variables for the chat template.
        tool_format: format of tools and their calls if the template does not support them.
        form: of the prompts of training rows, for text that is passed without the chat template.

    Raises:
        ModelError: there is no chat template, and the prompt needs one.
        DataError: the template refuses the prompt, or the result is empty.
    """
    if raw and not prompt.messages and not prompt.tools:
        ids = list(tokenizer(prompt.text if form is None else in_form(form, prompt.text))["input_ids"])
        if not ids:
            raise DataError("the prompt is empty", repair="write at least one word")
        return ids
    if not tokenizer.chat_template:
        raise ModelError("the model has no chat template", repair="give prompts as text with --raw")
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    if system and messages[0].get("role") not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    if messages[0] == {"role": "system", "content": ""}:
        messages.pop(0)
    arguments = {**(arguments or {}), **prompt.arguments}
    if prompt.tools or any("tool_calls" in message or message.get("role") == "tool" for message in messages):
        # As in training, where the template may not support tools.
        renderer = ChatRenderer(tokenizer, special_tokens=(), arguments=arguments, tool_format=tool_format)
        text = renderer.render(messages_of(messages, "messages"), prompt.tools, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    with guarded("the prompt", repair="check the order and names of the roles"):
        if isinstance(tokenizer.chat_template, str):
            # Transformers will find this in its cache: compiled in a sandbox with limits.
            compat.compile_chat_template(tokenizer.chat_template)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
