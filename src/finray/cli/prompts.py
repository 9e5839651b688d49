"""Prompts from the command line, a text file (one a line) or JSONL."""

from __future__ import annotations

import sys
from pathlib import Path

from finray.data.sources.pieces import read_file
from finray.errors import DataError
from finray.evaluation.compare import Prompt


def read_prompts(arguments: list[str], file: Path | None, *, system: str | None) -> list[Prompt]:
    """All prompts, arguments first; standard input when there are neither arguments nor a file.

    Raises:
        DataError: the file cannot be read, or there is no prompt.
    """
    prompts = [_from_text(text, system) for text in arguments]
    if file is not None:
        prompts += _from_file(file, system)
    elif not arguments and not sys.stdin.isatty():
        prompts += [_from_text(line.rstrip("\n"), system) for line in sys.stdin if line.strip()]
    if not prompts:
        raise DataError("there is no prompt", repair='`finray generate RUN "your prompt"`, or --file')
    return prompts


def _from_text(text: str, system: str | None) -> Prompt:
    if system is None:
        return Prompt(text=text)
    return Prompt(messages=({"role": "system", "content": system}, {"role": "user", "content": text}))


def _from_file(file: Path, system: str | None) -> list[Prompt]:
    if not file.is_file():
        raise DataError("the file does not exist", where=str(file))
    if file.suffix.lower() not in (".jsonl", ".json"):
        lines = file.read_text(encoding="utf-8").splitlines()
        return [_from_text(line, system) for line in lines if line.strip()]
    prompts = []
    for row in read_file(file):
        if isinstance(row.value.get("messages"), list):
            # A row of training data is a question as far as its last user message.
            messages = [message for message in row.value["messages"] if isinstance(message, dict)]
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
            prompts.append(Prompt(messages=tuple(messages)))
        elif isinstance(row.value.get("prompt"), str):
            prompts.append(_from_text(row.value["prompt"], system))
        else:
            raise DataError(
                f"the row has neither `prompt` nor `messages` (columns: {', '.join(row.value)})", where=row.where
            )
    return prompts
