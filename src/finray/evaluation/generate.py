"""Generates a model's answers to prompts, with an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, overload

from rich.console import Console

from finray.config.schema import ModelConfig
from finray.data.formats.convert import one_column
from finray.errors import ConfigError, FinrayError, ModelError
from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import make_engine
from finray.evaluation.engines.base import mute
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.labels import TextLabels, classifies, label_texts
from finray.evaluation.prompts import Prompt, prompt_ids
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import load_tokenizer
from finray.results import AsIs, RowsResult, print_labelled


@dataclass(frozen=True, slots=True)
class Answers(RowsResult, Sequence[str]):
    """A model's answers to prompts: a sequence of texts."""

    AS_IS: ClassVar[tuple[str, ...]] = ("answers",)

    prompts: tuple[Prompt, ...]  # the prompts
    texts: tuple[str, ...]  # the answers, in the same order, without special tokens
    base: tuple[str, ...] = ()  # the answers of the adapter's base model; empty if they were not asked for

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self.texts[index]

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self) -> list[dict[str, Any]]:
        """One row per prompt: the prompt, as text or messages, the answer, and the base model's if there is one."""
        rows: list[dict[str, Any]] = [
            {**({"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}), "answer": text}
            for prompt, text in zip(self.prompts, self.texts, strict=True)
        ]
        for row, text in zip(rows, self.base, strict=False):
            row["base"] = text
        return rows

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"answers": self.rows()}

    def print(self, console: Console) -> None:
        """Only the answers, or those of both models side by side."""
        if not self.base:
            for text in self.texts:
                console.print(AsIs(text), highlight=False, soft_wrap=True)
        for base, tuned in zip(self.base, self.texts, strict=False):
            print_labelled(console, [("base", base), ("tuned", tuned)])


@dataclass(frozen=True, slots=True)
class Asking:
    """How a model is prompted: as it was trained."""

    tokenizer: Any  # of the model
    raw: bool  # whether text is passed without the chat template
    system: str | None  # system message for conversations that have none
    arguments: Mapping[str, Any] | None  # variables for the chat template
    tool_format: str  # format of tools if the template does not support them
    # Of the prompts of training rows, for text that is passed without the chat template; None as it is.
    form: str | None = None

    @classmethod
    def of(cls, artifact: Artifact, tokenizer: Any, *, raw: bool | None = None) -> Asking:
        """As recorded by finray next to the weights; ``raw`` overrides that.
        Raises ModelError: the model is a classifier, which gives no answers."""
        notes = artifact.notes
        if classifies(artifact):
            raise ModelError(
                "the model is a classifier; it does not write answers",
                where=str(artifact.folder),
                repair='`finray generate RUN "text"` labels a text, and `finray evaluate` scores it',
            )
        # Who asks for raw text gets it raw.
        form = notes.get("input_template") if raw is None else None
        if raw is None:
            raw = notes.get("rows") in ("completion", "text") or not tokenizer.chat_template
        kept = notes.get("chat_template_arguments"), notes.get("tool_format", "plain")
        return cls(tokenizer, raw, notes.get("system"), *kept, form if raw else None)

    @property
    def why_no_chat(self) -> str | None:
        """Of a model that takes no conversations, what is wrong with its chat template; else None."""
        if not self.raw:
            return None
        return "was trained without it" if self.tokenizer.chat_template else "has none"

    @property
    def remark(self) -> str | None:
        """Of a model that was trained on prompts of a certain form, what becomes of a text."""
        if self.form is None:
            return None
        shown = json.dumps(self.form, ensure_ascii=False)
        if one_column(self.form) is None:
            return (
                f"the model was trained on prompts of several columns, {shown}: a text is passed as it is, so write it "
                "in that form"
            )
        return f"texts are put into the form of the rows that the model was trained on, {shown}"

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, up to the start of the answer.
        Raises FinrayError: a conversation needs a chat template and there is none, or the template refuses it."""
        kept: dict[str, Any] = {"system": self.system, "arguments": self.arguments, "tool_format": self.tool_format}
        kept["form"] = self.form
        return prompt_ids(self.tokenizer, prompt, raw=self.raw, **kept)


class TextStream:
    """Writes the text of an answer while it is generated, as soon as it can no longer change.

    Args:
        tokenizer: of the model.
        stop: strings before which an answer ends; the beginning of one is held back.
        write: called with each piece of text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], write: Callable[[str], None]) -> None:
        self._tokenizer, self._stop, self._write = tokenizer, stop, write
        self._tokens = list[int]()
        self._written = 0

    def token(self, row: int, token: int) -> None:  # noqa: ARG002
        """The next token of the answer."""
        self._tokens.append(token)
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        # Incomplete UTF-8 characters decode to this one.
        safe = len(text.rstrip("\ufffd"))
        for word in self._stop:
            begun = next((size for size in range(len(word), 0, -1) if text[:safe].endswith(word[:size])), 0)
            at = text.find(word)
            safe = min(safe - begun, at if at >= 0 else safe)
        self._advance(text[:safe])

    def end(self, text: str) -> None:
        """The complete answer."""
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
    compare: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    write: Callable[[str], None] | None = None,
) -> Answers | TextLabels:
    """Generate answers to prompts; a classifier gives labels.

    Args:
        path: a run, checkpoint or model directory, or a Hub id.
        prompts: what to answer.
        sampling: sampling settings.
        batch_size: number of prompts answered at the same time.
        raw: pass text to the model without its chat template; None does so if it was trained on plain prompts.
        base: overrides the base model of an adapter.
        engine: name of the engine; see :func:`finray.evaluation.engines.make_engine`.
        merge: merge an adapter into the weights, for speed.
        compare: also generate the answers of the adapter's base model.
        notify: called with messages for the user, one line each.
        write: called with the text of a single answer as it is generated.

    Raises:
        FinrayError: the model cannot be loaded, or there is a conversation and it takes none.
    """
    if compare and merge:
        raise ConfigError(
            "the base model of a merged adapter cannot answer", where="--merge", repair="leave it out, or --compare"
        )
    artifact = artifact_of(path, base=base)
    if classifies(artifact):
        options = {"engine": engine == "vllm", "merge": merge, "compare": compare, "raw": bool(raw)}
        labels = label_texts(artifact, prompts, sampling, **options)
        if write is not None:
            write("\n".join(labels.lines()))
        return labels
    if compare and not artifact.is_adapter:
        raise ModelError(
            "there is no adapter to switch off, so there is no base model to compare with",
            where=str(artifact.folder),
            repair="leave out --compare; `finray evaluate --baseline MODEL` compares with another model",
        )
    asking = Asking.of(artifact, load_tokenizer(ModelConfig(name=str(artifact.folder))), raw=raw)
    if asking.raw:
        prompts = [
            replace(prompt, text=prompt.plain, messages=(), plain="") if prompt.plain and not prompt.tools else prompt
            for prompt in prompts
        ]
    if asking.raw and any(prompt.messages or prompt.tools for prompt in prompts):
        raise _no_conversation(asking, is_asked_for=bool(raw))
    if asking.remark is not None:
        notify(f"{asking.remark} (--raw passes it as it is)")
    ids = [asking.ids(prompt) for prompt in prompts]
    stream = None if write is None or len(prompts) != 1 else TextStream(asking.tokenizer, sampling.stop, write)
    texts, plain = [""] * len(prompts), [""] * len(prompts) * compare
    with closing(make_engine(engine, artifact, batch_size=batch_size, merge=merge, notify=notify)) as running:
        if compare:
            for answer in running.generate(ids, sampling, adapter=False):
                plain[answer.row] = answer.text
        for answer in running.generate(ids, sampling, on_token=mute if stream is None else stream.token):
            texts[answer.row] = answer.text
            if stream is not None:
                stream.end(answer.text)
    return Answers(tuple(prompts), tuple(texts), tuple(plain))


def _no_conversation(asking: Asking, *, is_asked_for: bool) -> FinrayError:
    """The error for a prompt with messages or tools, where text is passed without a chat template."""
    repair = "give prompts as text, without a system message, `messages` and tools"
    if is_asked_for:
        return ConfigError(
            "plain text has neither messages nor tools", where="--raw", repair=f"leave out --raw, or {repair}"
        )
    return ModelError(
        f"a prompt with messages or tools needs a chat template, but the model {asking.why_no_chat}",
        repair=f"{repair}; or use --no-raw" if asking.tokenizer.chat_template else repair,
    )
