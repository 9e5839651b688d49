"""Prompts: from arguments, a text file (one a line) or JSONL, and as the token ids that a model is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.data.sources.pieces import read_file
from finray.errors import DataError, ModelError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to answer: a conversation, or plain text."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    @classmethod
    def of(cls, text: str, system: str | None) -> Prompt:
        """Text as it is, or as the user's turn after a system message."""
        if system is None:
            return cls(text=text)
        return cls(messages=({"role": "system", "content": system}, {"role": "user", "content": text}))


def read_prompts(
    arguments: list[str], file: Path | None, *, system: str | None, lines: Iterable[str] = ()
) -> list[Prompt]:
    """All prompts: the arguments, then those of the file; where there is neither, the non-empty ``lines``.

    Raises:
        DataError: the file cannot be read, or there is no prompt.
    """
    prompts = [Prompt.of(text, system) for text in arguments]
    if file is not None and not file.is_file():
        raise DataError("the file does not exist", where=str(file))
    if file is not None and file.suffix.lower() in (".jsonl", ".json"):
        for row in read_file(file):
            if isinstance(row.value.get("messages"), list):
                # A row of training data is a question up to its last user message.
                messages = [message for message in row.value["messages"] if isinstance(message, dict)]
                while messages and messages[-1].get("role") == "assistant":
                    messages.pop()
                prompts.append(Prompt(messages=tuple(messages)))
            elif isinstance(row.value.get("prompt"), str):
                prompts.append(Prompt.of(row.value["prompt"], system))
            else:
                raise DataError(
                    f"the row has neither `prompt` nor `messages` (columns: {', '.join(row.value)})", where=row.where
                )
    else:
        if file is not None:
            lines = file.read_text(encoding="utf-8").splitlines()
        if file is not None or not arguments:
            prompts += [Prompt.of(line.rstrip("\n"), system) for line in lines if line.strip()]
    if not prompts:
        raise DataError("there is no prompt", repair='`finray generate RUN "your prompt"`, or --file')
    return prompts


def prompt_ids(tokenizer: Any, prompt: Prompt, *, raw: bool) -> list[int]:
    """Token ids of a prompt, up to where the answer begins; ``raw`` gives text without the chat template.

    Raises:
        ModelError: there is no chat template, and the prompt needs one.
    """
    if raw and not prompt.messages:
        return list(tokenizer(prompt.text)["input_ids"])
    if not tokenizer.chat_template:
        raise ModelError("the model has no chat template", repair="give prompts as text with --raw")
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
