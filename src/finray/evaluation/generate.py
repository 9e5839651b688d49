"""Answers of a trained model to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finray.config.schema import ModelConfig
from finray.evaluation.artifacts import find_artifact, inference_device, inference_dtype
from finray.evaluation.engines.base import Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.prompts import Prompt, prompt_ids
from finray.models.artifacts import load_artifact
from finray.pretrained.tokenizers import load_tokenizer


def generate_text(
    path: Path,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    batch_size: int,
    raw: bool | None = None,
    base: str | None = None,
) -> list[str]:
    """Answers to prompts, without special tokens.

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
    artifact = find_artifact(path, base=base)
    tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
    if raw is None:
        raw = artifact.notes.get("rows") in ("completion", "text") or not tokenizer.chat_template
    ids = [prompt_ids(tokenizer, prompt, raw=raw) for prompt in prompts]
    device = inference_device()
    model = load_artifact(artifact, dtype=inference_dtype("auto", device)).to(device)
    answers = TransformersEngine(model, tokenizer).generate(ids, sampling=sampling, batch_size=batch_size)
    return [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
