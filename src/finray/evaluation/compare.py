"""After training: generate from a run, compare it with its base model, export it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.paths import PREPARED, local_dir_of
from finray.config.schema import Config, ModelConfig
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.sampling.collate import collate
from finray.errors import DataError, FinrayError, ModelError
from finray.evaluation.generate import Sampling, generate
from finray.evaluation.metrics import exact_match, is_exact
from finray.models import attention
from finray.models.artifacts import Artifact, load_artifact, read_artifact
from finray.models.export import Exported, export
from finray.models.loading import DTYPES, load_causal_lm, resolve_precision
from finray.pretrained.tokenizers import load_tokenizer
from finray.tasks.causal_lm import CausalLM


class Progress(Protocol):
    """Told how far a part of an evaluation has come."""

    def __call__(self, what: str, done: int, *, total: int) -> None:
        """``done`` of ``total`` rows of the part ``what``."""


def _silent(what: str, done: int, *, total: int) -> None:
    """No progress."""


def find_artifact(path: Path, *, base: str | None = None) -> Artifact:
    """The weights that a run, checkpoint or model directory stands for, verified where there is a manifest.

    Raises:
        FinrayError: nothing is there, or it is damaged.
    """
    if not path.is_dir():
        raise ModelError(
            "the directory does not exist", where=str(path), repair="name a run, checkpoint or model directory"
        )
    run = RunDir(path.resolve())
    folder = run.path
    if run.config_file.is_file():
        folder = run.final
        if not folder.is_dir():
            latest = CheckpointStore(run.path).latest(lambda message: None)
            if latest is None:
                raise ModelError("the run has no checkpoint yet", where=str(path), repair="`finray train` it first")
            folder = latest.path
    if (folder / manifest.NAME).is_file():
        manifest.verify(folder)
    return read_artifact(folder, base=base)


def export_model(path: Path, output: Path, *, merge: bool, dtype: str, base: str | None = None) -> Exported:
    """Export what a directory stands for; see :func:`finray.models.export.export`."""
    return export(find_artifact(path, base=base), output, merge=merge, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to answer: a conversation, or raw text."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


def generate_text(
    path: Path,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    batch_size: int,
    raw: bool | None = None,
    base: str | None = None,
) -> list[str]:
    """Answers to prompts.

    Args:
        path: a run, checkpoint or model directory.
        prompts: what to answer.
        sampling: how tokens are chosen.
        batch_size: prompts at a time.
        raw: give text to the model as it is; None does so where it was trained on plain prompts.
        base: overrides the base model of an adapter.

    Raises:
        FinrayError: the model cannot be loaded, or a conversation meets no chat template.
    """
    artifact = find_artifact(path, base=base)
    tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
    if raw is None:
        raw = artifact.notes.get("rows") in ("completion", "text") or not tokenizer.chat_template
    ids = [_prompt_ids(tokenizer, prompt, raw=raw) for prompt in prompts]
    device = _device()
    model = load_artifact(artifact, dtype=_dtype(device)).to(device)
    answers = generate(
        model,
        ids,
        pad_id=_pad_id(tokenizer),
        stop_ids=_stop_ids(tokenizer, model),
        sampling=sampling,
        batch_size=batch_size,
    )
    return [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]


def _prompt_ids(tokenizer: Any, prompt: Prompt, *, raw: bool) -> list[int]:
    if raw and not prompt.messages:
        return list(tokenizer(prompt.text)["input_ids"])
    if not tokenizer.chat_template:
        raise ModelError("the model has no chat template", repair="give prompts as text with --raw")
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Scores:
    """How a model did: share of exact answers, and loss and perplexity of the references."""

    exact_match: float
    loss: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Base against tuned model on held-out rows.

    Attributes:
        rows: number of rows.
        base: scores of the model that training started from.
        tuned: scores of the trained model.
        predictions: one dictionary per row, as in ``predictions.jsonl``.
        folder: where scores and predictions were written.
    """

    rows: int
    base: Scores
    tuned: Scores
    predictions: list[dict[str, Any]]
    folder: Path


def evaluate(run_path: Path, *, max_rows: int | None = None, progress: Progress = _silent) -> Comparison:
    """Generate on a run's held-out rows with the base and the tuned model, and score both.

    The rows are read from the prepared dataset, so prompts are the very tokens of training up to the last answer.

    Raises:
        FinrayError: the run holds no rows out, or something cannot be loaded.
    """
    run = RunDir(run_path.resolve())
    if not run.config_file.is_file():
        raise ModelError(
            "not a finray run", where=str(run_path), repair="name the directory of a run (it has a config.yaml)"
        )
    config = saved_config(run)
    artifact = find_artifact(run.path)
    rows = _held_out(run, config, config.evaluation.max_rows if max_rows is None else max_rows)
    tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
    sampling = Sampling(max_new_tokens=config.evaluation.max_new_tokens)
    results = {}
    for name, model, context in _both(artifact, config):
        with context:
            loss = _loss(model, rows.tokens, progress=partial(progress, f"{name} loss", total=len(rows.tokens)))
            answers = generate(
                model,
                rows.prompts,
                pad_id=_pad_id(tokenizer),
                stop_ids=_stop_ids(tokenizer, model),
                sampling=sampling,
                batch_size=config.evaluation.batch_size,
                progress=partial(progress, f"{name} answers", total=len(rows.prompts)),
            )
        results[name] = (loss, [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers])
    return _compare(run, tokenizer, rows, results)


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """Rows to answer: whole rows, and each cut into prompt and reference."""

    tokens: list[tuple[Any, Any]]
    prompts: list[list[int]]
    references: list[list[int]]


def _held_out(run: RunDir, config: Config, max_rows: int | None) -> _HeldOut:
    dataset = PreparedDataset(
        prepare_here(config, root=None if config.prepare.dir else run.path.parent / PREPARED),
        local_dir=local_dir_of(config),
    )
    if config.data.train_on == "all" or dataset.kind() == "text":
        raise DataError(
            "rows that are learned as a whole have no prompt to answer",
            where="data",
            repair="`finray evaluate` compares answers; for plain text see the evaluation loss in metrics.jsonl",
        )
    splits = dataset.splits(config.data, seed=config.run.seed)
    split = splits.test or splits.eval
    if split is None:
        raise DataError(
            "the run holds no rows out to evaluate on",
            where="data",
            repair="train with data.eval_ratio, data.eval_split or data.eval_source",
        )
    return _cut(split, min(len(split), max_rows or len(split)))


def _cut(split: PreparedSplit, count: int) -> _HeldOut:
    held_out = _HeldOut([], [], [])
    for number in range(count):
        ids, mask = split.row(number)
        learned = mask.astype(bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], learned, [False]]).astype(np.int8)))
        start, stop = int(edges[-2]), int(edges[-1])
        held_out.tokens.append((ids, mask))
        held_out.prompts.append(ids[:start].tolist())
        held_out.references.append(ids[start:stop].tolist())
    return held_out


def _both(artifact: Artifact, config: Config) -> list[tuple[str, Any, Any]]:
    """Base and tuned model with the context each is used in; an adapter needs only one set of weights."""
    device = _device()
    precision = resolve_precision(config.train.precision, device)
    # A CPU works in fp16 so slowly that nobody can want it.
    dtype = DTYPES["fp32" if precision == "fp16" and device.type == "cpu" else precision]
    tuned = load_artifact(artifact, dtype=dtype).to(device)
    if artifact.is_adapter:
        return [("base", tuned, tuned.disable_adapter()), ("tuned", tuned, nullcontext())]
    base = load_causal_lm(config.model, dtype=dtype).eval().to(device)
    return [("base", base, nullcontext()), ("tuned", tuned, nullcontext())]


@torch.no_grad()
def _loss(model: Any, rows: list[tuple[Any, Any]], *, progress: Callable[[int], None]) -> float:
    """Mean loss per target, by the code that trains."""
    device = _device()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    usual = inner.config._attn_implementation
    inner.set_attn_implementation(attention.NAME)
    precision = "bf16" if inner.dtype == torch.bfloat16 else "fp32"
    task = CausalLM(model, precision=precision, attention_name=attention.NAME, device=device)
    sums = torch.zeros(task.metric_count, dtype=torch.float64, device=device)
    for number, row in enumerate(rows):
        task.score(collate([row], [number]).to(device), sums)
        progress(number + 1)
    inner.set_attn_implementation(usual)
    return task.metrics(sums.tolist())["eval_loss"]


def _compare(run: RunDir, tokenizer: Any, rows: _HeldOut, results: dict[str, tuple[float, list[str]]]) -> Comparison:
    references = [str(tokenizer.decode(reference, skip_special_tokens=True)) for reference in rows.references]
    predictions = []
    for number, prompt in enumerate(rows.prompts):
        base, tuned = results["base"][1][number], results["tuned"][1][number]
        predictions.append(
            {
                "prompt": str(tokenizer.decode(prompt, skip_special_tokens=True)),
                "reference": references[number],
                "base": base,
                "tuned": tuned,
                "base_exact": is_exact(base, references[number]),
                "tuned_exact": is_exact(tuned, references[number]),
            }
        )
    scores = {
        name: Scores(exact_match(answers, references), loss, float(np.exp(min(loss, 700.0))))
        for name, (loss, answers) in results.items()
    }
    folder = run.path / "evaluation"
    try:
        folder.mkdir(exist_ok=True)
        lines = "".join(json.dumps(prediction, ensure_ascii=False) + "\n" for prediction in predictions)
        (folder / "predictions.jsonl").write_text(lines, encoding="utf-8")
        table = {"rows": len(predictions), **{name: asdict(score) for name, score in scores.items()}}
        (folder / "scores.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FinrayError(f"the scores cannot be written: {error.strerror}", where=str(folder)) from None
    return Comparison(len(predictions), scores["base"], scores["tuned"], predictions, folder)


def _pad_id(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


def _stop_ids(tokenizer: Any, model: Any) -> list[int]:
    """Every token that ends an answer: the tokenizer's EOS, and those of the generation config (end of turn)."""
    stop = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    configured = model.generation_config.eos_token_id
    if configured is not None:
        stop |= set(configured) if isinstance(configured, list | tuple) else {configured}
    return sorted(stop)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not os.environ.get("FINRAY_CPU") else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    return DTYPES[resolve_precision("auto", device)]
