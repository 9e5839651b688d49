"""A run's model against its base model, on the rows that the run held out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.paths import PREPARED, local_dir_of
from finray.config.schema import Config, ModelConfig
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.errors import CheckpointError, DataError, FinrayError, ModelError
from finray.evaluation.artifacts import find_artifact, inference_device, inference_dtype
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.generate import generate
from finray.evaluation.metrics import Row, Scores, mean_loss
from finray.evaluation.scores.match import is_exact
from finray.files import require_writable
from finray.models.artifacts import load_artifact
from finray.models.loading import load_model
from finray.models.packing_check import check_packing
from finray.pretrained.tokenizers import load_tokenizer
from finray.results import Result
from finray.training.assemble import require_same_data
from finray.training.state import TrainState


class Progress(Protocol):
    """Told how far a part of an evaluation has come."""

    def __call__(self, what: str, done: int, *, total: int) -> None:
        """``done`` of ``total`` rows of the part ``what``."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A row to score: the whole of it, and where it has a prompt, what comes before its last answer and that answer."""

    row: Row
    prompt: list[int] | None = None
    reference: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row as text, and whether each model's answer is the reference; a line of ``predictions.jsonl``."""

    prompt: str
    reference: str
    base: str
    tuned: str
    base_exact: bool
    tuned_exact: bool


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """Scores of the model that training started from and of the trained one; ``folder`` is where they were written.

    Plain text has no prompts to answer, so its rows have losses and no predictions.
    """

    base: Scores
    tuned: Scores
    rows: int
    predictions: list[Prediction]
    folder: Path

    def scores(self) -> dict[str, Any]:
        """What ``scores.json`` holds."""
        return {"rows": self.rows, "base": self.base.json(), "tuned": self.tuned.json()}

    def plain(self) -> dict[str, Any]:
        """Scores and answers as JSON types."""
        predictions = [asdict(one) for one in self.predictions]
        return {**self.scores(), "folder": str(self.folder), "predictions": predictions}

    def print(self, console: Console, *, samples: int = 3) -> None:
        """Scores of base and tuned model, and some answers side by side."""
        table = Table(title=f"{self.rows} held-out rows", title_justify="left")
        for column in ("", "base", "tuned"):
            table.add_column(column, justify="left" if not column else "right")
        for name, base in self.base.metrics.items():
            table.add_row(name.replace("_", " "), f"{base:.1%}", f"{self.tuned.metrics[name]:.1%}")
        table.add_row("loss", f"{self.base.loss:.4f}", f"{self.tuned.loss:.4f}")
        table.add_row("perplexity", f"{self.base.perplexity:.3f}", f"{self.tuned.perplexity:.3f}")
        console.print(table)
        for one in self.predictions[:samples]:
            console.rule(style="dim")
            for label, text in (
                ("prompt", one.prompt),
                ("expected", one.reference),
                ("base", one.base),
                ("tuned", one.tuned),
            ):
                console.print(f"{label:>9} ", style="bold", end="", highlight=False)
                console.print(text.strip(), highlight=False, soft_wrap=True)
        written = f"predictions: {self.folder / 'predictions.jsonl'}"
        if not self.predictions:
            written = f"scores: {self.folder / 'scores.json'} (these rows have no prompts to answer)"
        console.print(f"\n{written}", highlight=False, soft_wrap=True)


def evaluate(
    run_path: str | Path,
    *,
    max_rows: int | None = None,
    max_new_tokens: int | None = None,
    progress: Progress = lambda what, done, *, total: None,
) -> Comparison:
    """Score a run's held-out rows with the base and the tuned model: their losses, and answers to their prompts.

    Rows are read from the prepared dataset, so that a prompt is the very tokens of training up to the last answer.
    Rows that are learned as a whole have no prompt; of them it is the losses alone.

    Args:
        run_path: a run directory.
        max_rows: score at most this many rows; None takes ``evaluation.max_rows``.
        max_new_tokens: of each answer; None takes ``evaluation.max_new_tokens``.
        progress: told how far each part has come.

    Raises:
        FinrayError: the run holds no rows out, its data has changed, or something cannot be loaded.
    """
    run = RunDir(Path(run_path).expanduser().resolve())
    if not run.config_file.is_file():
        raise ModelError(
            "not a finray run", where=str(run_path), repair="name the directory of a run (it has a config.yaml)"
        )
    config = saved_config(run)
    require_writable(run.path)
    artifact = find_artifact(run.path)
    rows = held_out_rows(run, config, config.evaluation.max_rows if max_rows is None else max_rows)
    asked = [one for one in rows if one.prompt is not None]
    tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
    resolved = run.resolved()
    packs = check_packing(config.model).safe if resolved is None else resolved.packs
    device = inference_device()
    # A run of a version that kept no resolved.json may still name its precision.
    dtype = inference_dtype(config.train.precision if resolved is None else resolved.precision, device)

    sampling = Sampling(config.evaluation.max_new_tokens if max_new_tokens is None else max_new_tokens)

    def score(name: str, model: Any) -> tuple[float, list[str]]:
        """Mean loss and answers."""
        told = partial(progress, total=len(rows))
        loss = mean_loss(model, [one.row for one in rows], packs=packs, progress=partial(told, f"{name} loss"))
        if not asked:
            return loss, []
        answers = generate(
            model,
            tokenizer,
            [one.prompt or [] for one in asked],
            sampling=sampling,
            batch_size=config.evaluation.batch_size,
            progress=partial(told, f"{name} answers"),
        )
        return loss, answers

    def text(tokens: list[int] | None) -> str:
        return str(tokenizer.decode(tokens or [], skip_special_tokens=True))

    model = load_artifact(artifact, dtype=dtype).to(device)
    if artifact.is_adapter:
        # One set of weights serves both.
        with model.disable_adapter():
            base_loss, base = score("base", model)
    else:
        base_loss, base = score("base", load_model(config.model, dtype=dtype).eval().to(device))
    tuned_loss, tuned = score("tuned", model)
    references = [text(one.reference) for one in asked]
    predictions = [
        Prediction(text(one.prompt), right, before, after, is_exact(before, right), is_exact(after, right))
        for one, right, before, after in zip(asked, references, base, tuned, strict=True)
    ]
    metrics = config.evaluation.metrics if asked else []
    found = Comparison(
        Scores.of(base, references, loss=base_loss, metrics=metrics),
        Scores.of(tuned, references, loss=tuned_loss, metrics=metrics),
        len(rows),
        predictions,
        run.path / "evaluation",
    )
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in found.predictions)
    try:
        found.folder.mkdir(exist_ok=True)
        if found.predictions:
            (found.folder / "predictions.jsonl").write_text(lines, encoding="utf-8")
        (found.folder / "scores.json").write_text(json.dumps(found.scores(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FinrayError(f"the scores cannot be written: {error.strerror}", where=str(found.folder)) from None
    return found


def held_out_rows(run: RunDir, config: Config, max_rows: int | None) -> list[HeldOut]:
    """The test split of a run, or its evaluation split where it has no test split; a sample of ``max_rows`` of it.

    Raises:
        DataError: the run holds no rows out, or the data has changed.
    """
    dataset = PreparedDataset(
        prepare_here(config, root=None if config.prepare.dir else run.path.parent / PREPARED),
        local_dir=local_dir_of(config),
    )
    _require_same_data(run, config, dataset)
    splits = dataset.splits(config.data, seed=config.run.seed)
    split = splits.test or splits.eval
    if split is None:
        raise DataError(
            "the run holds no rows out to evaluate on",
            where="data",
            repair="train with data.eval_ratio, data.eval_split or data.eval_source",
        )
    split = split.sample(max_rows, seed=config.run.seed)
    rows = []
    for number in range(len(split)):
        ids, mask = split.row(number)
        if config.data.train_on == "all" or dataset.kind() == "text":
            rows.append(HeldOut((ids, mask)))
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask.astype(bool), [False]]).astype(np.int8)))
        start, stop = int(edges[-2]), int(edges[-1])
        rows.append(HeldOut((ids, mask), ids[:start].tolist(), ids[start:stop].tolist()))
    return rows


def _require_same_data(run: RunDir, config: Config, dataset: PreparedDataset) -> None:
    """Refuse a dataset other than the one that the run was trained on, which its checkpoints name by a digest.

    A ratio splits other data in another way, so rows that were learned would be scored as if they had been held out.
    """
    store = CheckpointStore(run.path)
    for step in reversed(store.steps()):
        try:
            trained_on = TrainState.load(store.path_of(step)).data
        except CheckpointError:
            continue
        require_same_data(trained_on, dataset, config)
        return
    raise DataError(
        "the run has no checkpoint left that says which data it was trained on",
        where=str(run.path),
        repair="keep a checkpoint beside `final`: without one, held-out rows cannot be told from learned ones",
    )
