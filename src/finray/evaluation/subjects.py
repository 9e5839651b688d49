"""What is evaluated: the models, the config that they are evaluated by, their rows, and where results go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from finray.checkpoint.rundir import CONFIG_FILE, RunDir, saved_config
from finray.config.load import Overrides, load_config
from finray.config.paths import PREPARED, is_url, prepared_dir, with_absolute_paths
from finray.config.resolved import Resolved
from finray.config.schema import Config, ModelConfig
from finray.config.tasks import TaskSpec, task_spec
from finray.data.sampling.splits import sample
from finray.errors import ConfigError, DataError, FinrayError, ModelError
from finray.evaluation.artifacts import artifact_of, inference_device, inference_dtype
from finray.evaluation.rows import Rows, of_file, of_run, splits_of
from finray.files import require_writable
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import check_exists, load_tokenizer, not_loaded, source_options


class Progress(Protocol):
    """Told how far a part of an evaluation has come."""

    def __call__(self, what: str, done: int, *, total: int, rate: str = "") -> None:
        """``done`` of ``total`` rows of the part ``what``; ``rate`` in words, where it is known."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody asks of an evaluation: arguments of :func:`finray.evaluate`, which says what each means."""

    split: str | None = None
    file: str | Path | None = None
    baselines: Sequence[str] | None = None
    metrics: Sequence[str] | None = None
    max_rows: int | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int | None = None
    engine: str = "auto"
    harness: Sequence[str] = ()
    output: str | Path | None = None
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate: an artifact, with its adapter or without."""

    name: str
    artifact: Artifact
    adapter: bool = True

    @property
    def identity(self) -> dict[str, Any]:
        """What tells its weights from any other, without reading them."""
        base = self.artifact.base
        own = None if base is not None and not self.adapter else files_of(str(self.artifact.folder))
        return {"weights": own, "base": None if base is None else {**files_of(base.name), "revision": base.revision}}


def files_of(name: str) -> dict[str, Any]:
    """A model directory by name, size and time of its files, or a Hub id by the commit that is in the cache."""
    folder = Path(name).expanduser()
    if folder.is_file():
        return {"name": name, "files": [[folder.name, folder.stat().st_size, folder.stat().st_mtime_ns]]}
    if folder.is_dir():
        files = sorted(path for pattern in ("*.safetensors", "*.json", "*.jinja") for path in folder.glob(pattern))
        return {"name": name, "files": [[one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in files]}
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return {"name": name, "commit": Path(cached).parent.name if isinstance(cached, str) else None}


@dataclass(frozen=True)
class Case:
    """What a judge is given.

    Attributes:
        asked: what somebody asks for.
        run: that the evaluated model is of; None where it is of none.
        config: of the run, or for the model alone, with what was asked for in ``evaluation``.
        spec: of the task.
        subjects: the models, the evaluated one last.
        folder: for results; it can be written to.
        progress: told how far each part has come.
        notes: what a reader should know; whoever finds something adds it.
    """

    asked: Asked
    run: RunDir | None
    config: Config
    spec: TaskSpec
    subjects: tuple[Subject, ...]
    folder: Path
    progress: Progress
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: str | Path,
        overrides: Overrides,
        asked: Asked,
        *,
        tasks: Collection[str],
        progress: Progress,
    ) -> Case:
        """The case of a model, of one of the ``tasks``; rows are not prepared yet.

        Raises:
            FinrayError: something is not there, does not fit the task, or cannot be written.
        """
        path = Path(model).expanduser().resolve()
        folders = (path, path.parent) if path.is_dir() else ()
        run = next((RunDir(one) for one in folders if (one / CONFIG_FILE).is_file()), None)
        artifact = artifact_of(model, base=asked.base)
        if artifact.model.task not in tasks:
            raise ModelError(f"a model of the task `{artifact.model.task}` has no answers", where=str(model))
        spec = task_spec(artifact.model.task)
        config = _config_of(model, run, artifact, asked, overrides)
        # Names a metric that the task has not. A task of somebody's own is not imported for that.
        if config.model.task == spec.name:
            spec.chosen(config.evaluation)
        tuned = Subject("tuned" if run is not None else Path(model).name, artifact)
        own: Subject | None = None
        # The base of a classifier's adapter has no head, and a random one says nothing.
        if not spec.reads_labels and (artifact.is_adapter or run is not None):
            began = artifact if artifact.is_adapter else artifact_of(config.model.name)
            own = Subject("base", began, adapter=False)
        subjects = (*_baselines(asked.baselines, tuned, own), tuned)
        for one in subjects:
            check_exists(one.artifact.model.name)
        return cls(asked, run, config, spec, subjects, _folder(model, run, artifact, asked), progress)

    @property
    def tuned(self) -> Subject:
        """The evaluated model."""
        return self.subjects[-1]

    @cached_property
    def resolved(self) -> Resolved | None:
        """What the run came to, where that is known."""
        return None if self.run is None else self.run.resolved()

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of weights and arithmetic."""
        trained_in = self.config.train.precision if self.resolved is None else self.resolved.precision
        return inference_dtype(None if self.run is None else trained_in, inference_device())

    @cached_property
    def rows(self) -> Rows | None:
        """The rows, prepared when they are first asked for; None where tasks of lm-eval are all there is.

        Raises:
            FinrayError: there are none, or they do not fit the task.
        """
        asked, run, config, train = self.asked, self.run, self.config, None
        if asked.file is not None and asked.split is not None:
            raise ConfigError("a file has no splits", where="--split", repair="give --split or --file")
        if asked.file is not None:
            root = (
                None
                if run is None or config.prepare.dir or is_url(config.run.output_dir)
                else run.path.parent / PREPARED
            )
            if self.resolved is not None and self.resolved.labels:
                # Whole numbers in a file are ids of the run's classes, as they were in its own data.
                section = config.classification.model_copy(update={"labels": list(self.resolved.labels)})
                config = config.model_copy(update={"classification": section})
            held, dataset = of_file(config, root=root)
            name = Path(asked.file).name
            if run is not None:
                try:
                    train = splits_of(run, saved_config(run))[0].train
                except FinrayError as error:
                    self.notes.append(f"rows of the training data were not looked for: {error.message}")
            lost = int(held.source_rows.max()) + 1 - len(np.unique(held.source_rows))
            if lost > 0:
                self.notes.append(
                    f"{lost} rows are longer than data.max_length={config.data.max_length} and were left out"
                )
        elif run is not None:
            name, held, dataset, train = of_run(run, config, asked.split)
        elif asked.harness:
            return None
        else:
            model = str(self.tuned.artifact.folder)
            what, repair = "there are no rows to evaluate", "name a file of rows with --file"
            if not Path(model).is_dir():
                what = "the directory does not exist; a model of the Hub is evaluated on rows that you name"
                repair = "name a run that is there, or a file of rows with --file"
            raise DataError(what, where=model, repair=repair)
        if (dataset.kind() == "labelled") != self.spec.reads_labels:
            what = "rows with prompts and answers are not for" if self.spec.reads_labels else "rows with labels are for"
            repair = (
                "name rows with a text and a label" if self.spec.reads_labels else "name rows with prompts and answers"
            )
            raise DataError(f"{what} a classifier", where="data.format", repair=repair)
        asks = config.data.train_on != "all" and dataset.kind() != "text"
        numbers = tuple(sample(len(held), config.evaluation.max_rows, seed=config.run.seed).tolist())
        return Rows(name, held, numbers, dataset, asks, train)

    def rows_for(self, artifact: Artifact) -> Rows | None:
        """The rows as a model's own tokenizer and chat template make them; the same ones where these are the same."""
        rows, config = self.rows, self.config
        known = artifact is self.tuned.artifact or (self.run is not None and str(artifact.folder) == config.model.name)
        if rows is None or known:
            return rows
        ours, theirs = (load_tokenizer(ModelConfig(name=str(one.folder))) for one in (self.tuned.artifact, artifact))
        if ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template:
            return rows
        own = config.model_copy(update={"model": ModelConfig(name=str(artifact.folder))})
        held, dataset = of_file(own, root=None if config.prepare.dir else prepared_dir(config))
        return Rows(rows.name, held, (), dataset, rows.asks, None).like(rows.keys())

    def by_artifact(self) -> Iterator[tuple[Artifact, list[Subject]]]:
        """Models that share their weights together, so that these are loaded once."""
        left = list(self.subjects)
        while left:
            artifact = left[0].artifact
            yield artifact, [one for one in left if one.artifact is artifact]
            left = [one for one in left if one.artifact is not artifact]


def _config_of(model: str | Path, run: RunDir | None, artifact: Artifact, asked: Asked, overrides: Overrides) -> Config:
    """The config of the run, or one for these weights; rows of a file are read as the run reads its own."""
    if run is not None:
        config = saved_config(run)
    else:
        config = load_config({"model": {"name": str(model)}, "data": {"source": str(asked.file or "none")}})
        config = config.model_copy(update={"model": artifact.model})
    if asked.file is not None:
        if not Path(asked.file).expanduser().is_file():
            raise DataError("the file does not exist", where=f"--file {asked.file}")
        own: dict[str, Any] = {"source": str(asked.file), "mix": [], "group_by": None, "train_split": "train"}
        own |= dict.fromkeys(("eval_source", "eval_split", "test_split", "subset", "revision"))
        # A reference that is cut off would be another one. All rows are taken; a ratio is what settings of evaluation
        # in training ask for.
        own |= {"eval_ratio": 0.5, "test_ratio": 0.0, "on_too_long": "drop"}
        own["max_length"] = max(config.data.max_length, _context(artifact.model))
        config = config.model_copy(update={"data": config.data.model_copy(update=own)})
    config = with_absolute_paths(load_config(config, overrides))
    given = {name: getattr(asked, name) for name in ("metrics", "max_rows", "max_new_tokens", "batch_size")}
    changed = config.evaluation.model_copy(update={name: one for name, one in given.items() if one is not None})
    return config.model_copy(update={"evaluation": changed})


def _context(model: ModelConfig) -> int:
    """Tokens that a model reads; 0 where it does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(**source_options(model)).get_text_config()
    except Exception as error:
        # Files that others have written: there is no list of errors.
        raise not_loaded("model's configuration", model, error) from None
    return min(getattr(config, "max_position_embeddings", None) or 0, 2**24)


def _baselines(named: Sequence[str] | None, tuned: Subject, own: Subject | None) -> list[Subject]:
    """The models to compare with: those that are named, else the model's ``own``."""
    if named is None:
        return [] if own is None else [own]
    found: list[Subject] = []
    for name in named:
        if name == "base" and own is not None:
            found.append(own)
        elif name not in ("none", ""):
            short = Path(name).name if Path(name).name not in ("", "final") else str(name)
            found.append(Subject(short if short != tuned.name else name, artifact_of(name)))
    if len({one.name for one in found}) < len(found):
        found = [replace(one, name=str(named[place])) for place, one in enumerate(found)]
    return found


def _folder(model: str | Path, run: RunDir | None, artifact: Artifact, asked: Asked) -> Path:
    """Where results go, made and known to be writable."""
    if asked.output is not None:
        folder = Path(asked.output).expanduser()
    elif run is None:
        known = artifact.folder if Path(model).expanduser().is_dir() else Path(str(model).replace("/", "--"))
        folder = known / "evaluation"
    else:
        path = Path(model).expanduser().resolve()
        folder = run.path / "evaluation" / ("" if path in (run.path, run.final) else path.name)
    if asked.output is None and (asked.file is not None or asked.split is not None):
        folder /= asked.split or Path(str(asked.file)).stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FinrayError(
            f"the scores cannot be written: {(error.strerror or str(error)).lower()}",
            where=str(folder),
            repair="name another directory with --output",
        ) from None
    require_writable(folder)
    return folder
