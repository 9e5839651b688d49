"""Answers of a model to prompts, by an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rich.console import Console

from finray.config.schema import ModelConfig
from finray.config.tasks import CAUSAL_LM, SPECS
from finray.errors import DataError, ModelError
from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import make_engine
from finray.evaluation.engines.base import mute
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.prompts import Prompt, prompt_ids
from finray.files import FileKind
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import load_tokenizer
from finray.results import Result

_CONFIGS = FileKind(ModelError, repair="fetch the model again")


@dataclass(frozen=True, slots=True)
class Answers(Result, Sequence[str]):
    """What a model says to prompts: a sequence of texts.

    Attributes:
        prompts: what was asked.
        texts: the answers, in the same order, without special tokens.
    """

    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self.texts[index]

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each prompt: it, as text or messages, and the answer."""
        return [
            {**({"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}), "answer": text}
            for prompt, text in zip(self.prompts, self.texts, strict=True)
        ]

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"answers": self.rows()}

    def print(self, console: Console) -> None:
        """The answers alone."""
        for text in self.texts:
            console.print(text, highlight=False, soft_wrap=True)

    def write(self, path: Path) -> None:
        """Write the rows as JSON lines.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise DataError(f"the answers cannot be written: {error.strerror}", where=str(path)) from None


@dataclass(frozen=True, slots=True)
class Asking:
    """How a model is asked: as it was trained.

    Attributes:
        tokenizer: of the model.
        raw: whether text is given without the chat template.
        system: system message of conversations that have none.
        arguments: variables for the chat template.
        tool_format: how tools are written where the template knows none.
    """

    tokenizer: Any
    raw: bool
    system: str | None
    arguments: Mapping[str, Any] | None
    tool_format: str

    @classmethod
    def of(cls, artifact: Artifact, tokenizer: Any, *, raw: bool | None = None) -> Asking:
        """As finray wrote it down beside the weights; ``raw`` overrides that.

        Raises:
            ModelError: the model gives no answers, because it is a classifier.
        """
        notes, task = artifact.notes, artifact.model.task
        found = [] if not (artifact.folder / "config.json").is_file() else _architectures(artifact.folder)
        if (task in SPECS and SPECS[task].auto_class != CAUSAL_LM.auto_class) or any("Classif" in one for one in found):
            raise ModelError(
                "the model is a classifier, which answers nothing",
                where=str(artifact.folder),
                repair="`finray evaluate` scores it",
            )
        if raw is None:
            raw = notes.get("rows") in ("completion", "text") or not tokenizer.chat_template
        kept = notes.get("chat_template_arguments"), notes.get("tool_format", "plain")
        return cls(tokenizer, raw, notes.get("system"), *kept)

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, up to where the answer begins.

        Raises:
            FinrayError: a conversation meets no chat template, or the template refuses it.
        """
        kept: dict[str, Any] = {"system": self.system, "arguments": self.arguments, "tool_format": self.tool_format}
        return prompt_ids(self.tokenizer, prompt, raw=self.raw, **kept)


def _architectures(folder: Path) -> list[str]:
    content = _CONFIGS.json(folder / "config.json", dict[str, Any])
    return [str(one) for one in content.get("architectures") or ()]


class TextStream:
    """The text of an answer as its tokens come: what can no longer change is written.

    Args:
        tokenizer: of the model.
        stop: strings before which an answer ends; the beginning of one is held back.
        write: is given each piece of text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], write: Callable[[str], None]) -> None:
        self._tokenizer, self._stop, self._write = tokenizer, stop, write
        self._tokens = list[int]()
        self._written = 0

    def token(self, row: int, token: int) -> None:  # noqa: ARG002
        """The next token of the answer."""
        self._tokens.append(token)
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        # Bytes of a character that is not whole yet are shown as this one.
        safe = len(text.rstrip("\ufffd"))
        for word in self._stop:
            begun = next((size for size in range(len(word), 0, -1) if text[:safe].endswith(word[:size])), 0)
            found = text.find(word)
            safe = min(safe - begun, found if found >= 0 else safe)
        self._advance(text[:safe])

    def end(self, text: str) -> None:
        """The whole answer, now that it is known."""
        self._advance(text)

    def _advance(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def generate_text(
    path: str | Path,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    batch_size: int,
    raw: bool | None = None,
    base: str | None = None,
    engine: str = "auto",
    merge: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    write: Callable[[str], None] | None = None,
) -> Answers:
    """Answers to prompts.

    Args:
        path: a run, checkpoint or model directory, or a Hub id.
        prompts: what to answer.
        sampling: how tokens are chosen.
        batch_size: prompts that are answered at the same time.
        raw: give text to the model without its chat template; None does so where it was trained on plain prompts.
        base: overrides the base model of an adapter.
        engine: what runs the model; see :func:`finray.evaluation.engines.make_engine`.
        merge: fold an adapter into the weights, for speed.
        tell: is told in one line what a user should know.
        write: is given the text of a single answer as it comes.

    Raises:
        FinrayError: the model cannot be loaded, or a conversation meets no chat template.
    """
    artifact = artifact_of(path, base=base)
    asking = Asking.of(artifact, load_tokenizer(ModelConfig(name=str(artifact.folder))), raw=raw)
    ids = [asking.ids(prompt) for prompt in prompts]
    running = make_engine(engine, artifact, batch_size=batch_size, merge=merge, tell=tell)
    stream = None if write is None or len(prompts) != 1 else TextStream(asking.tokenizer, sampling.stop, write)
    texts = [""] * len(prompts)
    for answer in running.generate(ids, sampling, on_token=mute if stream is None else stream.token):
        texts[answer.row] = answer.text
        if stream is not None:
            stream.end(answer.text)
    running.close()
    return Answers(tuple(prompts), tuple(texts))
