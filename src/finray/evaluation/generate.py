"""Answers of a model to prompts, by Transformers' own ``generate``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, overload

import torch
from rich.console import Console

from finray.config.schema import ModelConfig
from finray.errors import DataError
from finray.evaluation.artifacts import find_artifact, inference_device, inference_dtype
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.prompts import Prompt, prompt_ids
from finray.models.artifacts import load_artifact
from finray.pretrained.tokenizers import load_tokenizer
from finray.results import Result


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


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The answer to each prompt as text, without special tokens.

    Args:
        model: a Transformers or PEFT causal language model in evaluation mode.
        tokenizer: of the model; it says what pads a batch and what ends an answer.
        prompts: token ids. Batches are of similar length, and padded on the left.
        sampling: how tokens are chosen.
        batch_size: prompts in one batch.
        progress: called with the number of prompts answered so far.
    """
    eos = tokenizer.eos_token_id
    pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos or 0)
    # A chat model ends its turns with a token of its generation config, which need not be the tokenizer's EOS.
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list | tuple) else [configured]
    stop = sorted({int(token) for token in (eos, *ends) if token is not None})
    if sampling.temperature == 0.0:
        # None for what greedy search ignores: a model's generation config may set it, and Transformers then warns.
        choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    else:
        choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
    answers = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    torch.manual_seed(sampling.seed)
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        longest = len(prompts[batch[0]])
        tokens_BT = torch.full((len(batch), longest), pad, dtype=torch.int64)
        mask_BT = torch.zeros_like(tokens_BT)
        for row, index in enumerate(batch):
            tokens_BT[row, longest - len(prompts[index]) :] = torch.tensor(list(prompts[index]))
            mask_BT[row, longest - len(prompts[index]) :] = 1
        output = model.generate(
            input_ids=tokens_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=stop,
            use_cache=True,
            **choice,
        )
        for row, index in enumerate(batch):
            answer = list(takewhile(lambda token: token not in stop, output[row, longest:].tolist()))
            answers[index] = str(tokenizer.decode(answer, skip_special_tokens=True))
        progress(start + len(batch))
    return answers


def generate_text(
    path: str | Path,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    batch_size: int,
    raw: bool | None = None,
    base: str | None = None,
) -> Answers:
    """Answers to prompts.

    Args:
        path: a run, checkpoint or model directory.
        prompts: what to answer.
        sampling: how tokens are chosen.
        batch_size: prompts in one batch.
        raw: give text to the model without its chat template; None does so where it was trained on plain prompts.
        base: overrides the base model of an adapter.

    Raises:
        FinrayError: the model cannot be loaded, or a conversation meets no chat template.
    """
    artifact = find_artifact(Path(path).expanduser(), base=base)
    tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
    if raw is None:
        raw = artifact.notes.get("rows") in ("completion", "text") or not tokenizer.chat_template
    # As the run was trained.
    notes = artifact.notes
    kept: dict[str, Any] = {"system": notes.get("system"), "arguments": notes.get("chat_template_arguments")}
    kept["tool_format"] = notes.get("tool_format", "plain")
    ids = [prompt_ids(tokenizer, prompt, raw=raw, **kept) for prompt in prompts]
    device = inference_device()
    model = load_artifact(artifact, dtype=inference_dtype(None, device)).to(device)
    texts = generate(model, tokenizer, ids, sampling=sampling, batch_size=batch_size)
    return Answers(tuple(prompts), tuple(texts))
