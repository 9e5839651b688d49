"""Prompts: from arguments, a text file (one per line) or JSONL; converted to token ids."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finray import compat
from finray.config.schema import NO_TEXT
from finray.data.formats.convert import messages_of, tools_of
from finray.data.sources.pieces import read_file
from finray.data.sources.resolve import Row
from finray.data.tokenize.chat import ChatRenderer, guarded
from finray.errors import DataError, ModelError, did_you_mean_path
from finray.files import FileKind

_FILES = FileKind(DataError, repair="write UTF-8 text with one prompt per line, or JSONL")
_TOOLS = FileKind(DataError, repair="write a JSON list of functions: their `name`, `description` and `parameters`")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to answer: a conversation, or plain text; ``tools`` are JSON schemas of functions that may be called."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, text: str, system: str | None) -> Prompt:
        """Text alone, or as the user's turn after a system message."""
        if system is None:
            return cls(text=text)
        return cls(messages=({"role": "system", "content": system}, {"role": "user", "content": text}))


def read_tools(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Tools from a JSON file: a list as in the column ``tools`` of training data.

    Raises:
        DataError: it is not such a file.
    """
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
) -> list[Prompt]:
    """All prompts: the arguments, then those of the file; without both, the non-empty ``lines``.

    ``tools`` are for prompts without tools of their own, ``system`` for those without a system message.

    Raises:
        DataError: the file cannot be read, there is no prompt, or one holds what is not a valid character.
    """
    prompts = [Prompt.of(text, system) for text in arguments]
    if file is not None:
        _require_file(file)
    if file is not None and file.suffix.lower() in (".jsonl", ".json"):
        prompts += [_prompt(row, system) for row in read_file(file)]
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

    Raises:
        DataError: one of them is something else, or holds what is not a valid character.
    """
    several = [given] if isinstance(given, str | Mapping) else list(given)
    if several and all(isinstance(one, Mapping) and "role" in one for one in several):
        several = [several]
    found = list[Prompt]()
    for number, one in enumerate(several, start=1):
        if isinstance(one, str):
            found.append(Prompt.of(one, system))
            continue
        rows = dict(one) if isinstance(one, Mapping) else {"messages": list(one)} if isinstance(one, Iterable) else {}
        found.append(_prompt(Row("prompts", number, rows), system))
    _require_text(found)
    return found


def _require_text(prompts: Iterable[Prompt]) -> None:
    """Refuse what no tokenizer takes.

    Raises:
        DataError: a prompt holds such a character.
    """
    for number, prompt in enumerate(prompts, start=1):
        for text in (prompt.text, *(str(message["content"]) for message in prompt.messages)):
            if (odd := NO_TEXT.search(text)) is not None:
                raise DataError(
                    f"prompt {number} holds U+{ord(odd[0]):04X}, which is not a valid character",
                    repair="remove that character",
                )


def _prompt(row: Row, system: str | None) -> Prompt:
    """A row's text or, as in training data, its messages up to the last question; with the row's tools."""
    messages, text = row.value.get("messages"), row.value.get("prompt")
    if not isinstance(messages, list) and not isinstance(text, str):
        raise DataError(
            f"the row has neither `prompt` nor `messages` (columns: {', '.join(row.value)})",
            where=row.where,
            repair='write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        )
    try:
        tools = tools_of(row.value.get("tools"))
        if not isinstance(messages, list):
            return replace(Prompt.of(str(text), system), tools=tools)
        while messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        found = tuple(message.plain() for message in messages_of(messages, "messages"))
    except DataError as error:
        raise DataError(
            error.message,
            where=row.where,
            repair=error.repair or 'write {"messages": [{"role": "user", "content": "..."}]}',
        ) from None
    if system is not None and found[0]["role"] not in ("system", "developer"):
        found = ({"role": "system", "content": system}, *found)
    return Prompt(messages=found, tools=tools)


def prompt_ids(
    tokenizer: Any,
    prompt: Prompt,
    *,
    raw: bool,
    system: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    tool_format: str = "plain",
) -> list[int]:
    """Token ids of a prompt, up to the start of the answer.

    Args:
        tokenizer: of the model.
        prompt: what to answer.
        raw: pass text without the chat template.
        system: system message for conversations that have none.
        arguments: variables for the chat template.
        tool_format: format of tools and their calls if the template does not support them.

    Raises:
        ModelError: there is no chat template, and the prompt needs one.
        DataError: the template refuses the prompt, or the result is empty.
    """
    if raw and not prompt.messages and not prompt.tools:
        ids = list(tokenizer(prompt.text)["input_ids"])
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
    if prompt.tools or any("tool_calls" in message or message.get("role") == "tool" for message in messages):
        # As in training, where the template may not support tools.
        renderer = ChatRenderer(tokenizer, special_tokens=(), arguments=arguments, tool_format=tool_format)
        text = renderer.render(messages_of(messages, "messages"), prompt.tools, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    with guarded("the prompt", repair="check the order and names of the roles"):
        if isinstance(tokenizer.chat_template, str):
            # Transformers will find this in its cache: compiled in a sandbox with limits.
            compat.compile_chat_template(tokenizer.chat_template)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(arguments or {}))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
