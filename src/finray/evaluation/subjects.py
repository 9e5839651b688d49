"""The subjects of an evaluation: the models, the config, their rows, and the folder for results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from finray.checkpoint.rundir import CONFIG_FILE, RunDir, saved_config
from finray.config.load import Overrides, load_config
from finray.config.objectives import DPO, OBJECTIVES, spec_of
from finray.config.paths import with_absolute_paths
from finray.config.requests import EvaluationRequest
from finray.config.resolved import Resolved
from finray.config.schema import Config, ModelConfig
from finray.config.tasks import CAUSAL_LM, TaskSpec, task_spec
from finray.config.trust import is_in_run, of_stranger, require_trusted
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.dataset.source_rows import SourceRows
from finray.data.sampling.splits import sample
from finray.errors import ConfigError, DataError, FinrayError, ModelError, did_you_mean_path
from finray.evaluation.artifacts import artifact_of, inference_device, inference_dtype
from finray.evaluation.engines.base import Engine
from finray.evaluation.outcome import Rate
from finray.evaluation.rows import (
    EvaluationRows,
    of_file,
    of_run,
    prepared_beside,
    prompt_and_answer,
    splits_of,
    stream_of,
)
from finray.files import lies_in, require_writable
from finray.models.artifacts import Artifact
from finray.models.packing_cache import packing_of
from finray.models.ropes import FIXED, rope_types
from finray.pretrained.tokenizers import check_exists, load_tokenizer, loading_options, not_loaded


class Progress(Protocol):
    """Called with the progress of a part of an evaluation."""

    def __call__(self, what: str, done: int, *, total: int, rate: str = "") -> None:
        """``done`` of ``total`` rows of the part ``what``; ``rate`` as text, if known."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to evaluate: an artifact, with or without its adapter."""

    name: str
    artifact: Artifact
    adapter: bool = True

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the weights without reading them."""
        base, began_as = self.artifact.base, self.artifact.began_as
        weights = None if base is not None and not self.adapter else files_of(str(self.artifact.folder))
        # What is not set is left out: answers of earlier versions, which did not have it, are still known.
        if weights is not None and began_as is not None:
            given = {"revision": began_as.revision, "new_tokens": began_as.new_tokens}
            weights |= {name: value for name, value in given.items() if value}
        return {
            "weights": weights,
            "base": None if base is None else {**files_of(base.name), "revision": base.revision},
        }

    @property
    def turns(self) -> bool:
        """Whether the positions of a row depend on its length, as with LongRoPE; True if that is not known."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(**loading_options(self.artifact.model)).get_text_config()
        except Exception:
            # Loading the model says what is wrong.
            return True
        return not set(rope_types(config)) <= set(FIXED)


def files_of(name: str) -> dict[str, Any]:
    """A model directory by name, size and time of its files, or a Hub id by the cached commit."""
    folder = Path(name).expanduser()
    if folder.is_file():
        return {"name": name, "files": [[folder.name, folder.stat().st_size, folder.stat().st_mtime_ns]]}
    if folder.is_dir():
        files = sorted(path for pattern in ("*.safetensors", "*.json", "*.jinja") for path in folder.glob(pattern))
        return {"name": name, "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]}
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return {"name": name, "commit": Path(cached).parent.name if isinstance(cached, str) else None}


@dataclass(frozen=True)
class Case:
    """The input of a judge."""

    request: EvaluationRequest  # the request
    run: RunDir | None  # run of the evaluated model; None if it has none
    config: Config  # of the run, or for the model alone, with the request applied to ``evaluation``
    spec: TaskSpec  # of the task
    subjects: tuple[Subject, ...]  # the models, the evaluated one last
    folder: Path  # for results; known to be writable
    progress: Progress  # called with the progress of each part
    spread: Callable[..., Engine] | None = None  # creates an engine of several replicas, if requested
    notes: list[str] = field(default_factory=list)  # remarks for the reader, added along the way
    rates: list[Rate] = field(default_factory=list)  # how fast each part was computed, added along the way

    @classmethod
    def of(
        cls,
        model: str | Path,
        overrides: Overrides,
        request: EvaluationRequest,
        *,
        tasks: Collection[str],
        progress: Progress,
        spread: Callable[..., Engine] | None = None,
    ) -> Case:
        """The case for a model of one of the ``tasks``; rows are not prepared yet.
        Raises FinrayError: something is missing, does not fit the task, or cannot be written."""
        path = Path(model).expanduser().resolve()
        folders = [path] if path.is_dir() else []
        # A config beside a model may be one that the user has written.
        folders += [path.parent] if folders and is_in_run(path.parent / CONFIG_FILE) else []
        run = next((RunDir(folder) for folder in folders if (folder / CONFIG_FILE).is_file()), None)
        artifact = artifact_of(model, base=request.base)
        if run is None and request.file is None and not request.harness:
            what, repair = "there are no rows to evaluate", "give a file of rows with --file"
            if not path.is_dir():
                what = (
                    f"the directory does not exist{did_you_mean_path(model)}; for a model from the Hub, give the rows "
                )
                what += "with --file"
                repair = "give an existing run, or a file of rows with --file"
            raise DataError(what, where=str(artifact.folder), repair=repair)
        if artifact.model.task not in tasks:
            raise ModelError(f"a model with the task `{artifact.model.task}` does not write answers", where=str(model))
        spec = task_spec(artifact.model.task)
        config = _config_of(model, run, artifact, request, overrides)
        if artifact.is_reward:
            spec = spec_of(config)
        # Reports metrics that the run does not have. A user's own task or objective is not imported for this.
        if config.model.task == spec.name and config.train.objective in (None, *OBJECTIVES):
            spec_of(config).metric(config.evaluation)
        tuned = Subject("tuned" if run is not None else Path(model).name, artifact)
        base: Subject | None = None
        notes: list[str] = []
        # The base of a classifier's adapter has no head, and a random one says nothing.
        if not spec.adds_head and (artifact.is_adapter or run is not None):
            began = artifact
            if not artifact.is_adapter:
                require_trusted(config, "model.name", "model.trust_remote_code")
                start_artifact = artifact_of(config.model.name, revision=config.model.revision)
                section = config.model.model_copy(update={"task": start_artifact.model.task})
                began = start_artifact if start_artifact.is_adapter else replace(start_artifact, began_as=section)
            base = Subject("base", began, adapter=False)
        named = None if request.baselines is None else [str(name) for name in request.baselines]
        others = [] if run is None or spec.adds_head else _began_from(config, named, notes)
        subjects = (*_baselines(named, tuned, base, others), tuned)
        for subject in subjects:
            check_exists(subject.artifact.model.name)
        folder = _folder(model, run, artifact, request)
        return cls(request, run, config, spec, subjects, folder, progress, spread, notes)

    @property
    def tuned(self) -> Subject:
        """The evaluated model."""
        return self.subjects[-1]

    @property
    def reference(self) -> str:
        """Name of the subject that rewards are relative to: what the run began from, or what it names."""
        named = "reference" if self.config.preference.names_model else self.config.preference.reference
        return "base" if named == "start" and self.config.adapter.start_from is None else named

    @cached_property
    def reading(self) -> Config:
        """The config with which rows are read. A file may have pairs, or prompts and answers, whatever the run learns
        from; integers in it are ids of the run's classes."""
        config = self.config
        if self.request.file is None:
            return config
        if self.resolved is not None and self.resolved.labels:
            section = config.classification.model_copy(update={"labels": list(self.resolved.labels)})
            return config.model_copy(update={"classification": section})
        learned = [] if self.spec.reads_labels else [config.train.objective, None, DPO.name]
        trains = [config.train.model_copy(update={"objective": objective}) for objective in learned]
        each = [config.model_copy(update={"train": train}) for train in trains]
        if learned and self.spec.adds_head:
            # A reward model scores single answers, too: the last ones of rows for a language model.
            model = config.model.model_copy(update={"task": CAUSAL_LM.name})
            data = config.data.model_copy(update={"train_on": "last_assistant"})
            each[1:] = [each[1].model_copy(update={"model": model, "data": data})]
        return next(filter(_has_format, each), config)

    @cached_property
    def resolved(self) -> Resolved | None:
        """The resolved ``auto`` values of the run, if known."""
        return None if self.run is None else self.run.resolved()

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and arithmetic: ``train.precision``, of the run or as overridden."""
        precision: str = self.config.train.precision
        if self.run is not None and self.resolved is not None and precision == saved_config(self.run).train.precision:
            precision = self.resolved.precision
        return inference_dtype(precision.removesuffix("-true"), inference_device())

    @cached_property
    def rows(self) -> EvaluationRows | None:
        """The rows, prepared on first use; None if only lm-eval tasks are requested.
        Raises FinrayError: there are none, or they do not fit the task."""
        request, run, config, stream = self.request, self.run, self.config, "train"
        if request.file is not None and request.split is not None:
            raise ConfigError("--file and --split exclude each other", where="--split", repair="give --split or --file")
        if request.file is not None:
            name, (held, dataset, train) = Path(request.file).name, self._rows_of_file()
        elif run is not None:
            try:
                name, held, dataset, train = of_run(run, config, request.split)
            except DataError as error:
                if not request.harness or request.split is not None or request.metrics:
                    raise
                self.notes.append(f"only the tasks of lm-eval: {error.message}")
                return None
            trained = saved_config(run)
            stream = stream_of(name, trained.data)
            ratios = [(run.data.eval_ratio, run.data.test_ratio, run.run.seed) for run in (config, trained)]
            if ratios[0] != ratios[1]:
                self.notes.append("rows are held out as in the training; other ratios or seeds do not change that")
        else:
            return None
        if (dataset.kind() == "labelled") != self.spec.reads_labels:
            what = "rows with prompts and answers are not for" if self.spec.reads_labels else "rows with labels are for"
            repair = (
                "use rows with a text and a label" if self.spec.reads_labels else "use rows with prompts and answers"
            )
            raise DataError(f"{what} a classifier", where="data.format", repair=repair)
        prompted, kind = held.prompted, dataset.kind(stream)
        is_learned = config.data.train_on == "all" and kind not in ("preference", "unpaired")
        asks = not is_learned and kind not in ("text", "labelled") and len(prompted) > 0
        asked = prompted if asks else np.arange(len(held))
        if not held.groups.is_single:
            asked = np.intersect1d(asked, held.groups.starts[:-1])
            if not self.spec.adds_head:
                self.notes.append("the loss is that of the chosen answers")
        every = len(held.groups)
        if kind == "unpaired":
            asked = np.flatnonzero(held.values("label") > 0)
            every = len(asked)
            self.notes.append("the loss is that of the desirable answers")
        numbers = tuple(asked[sample(len(asked), config.evaluation.max_rows, seed=config.run.seed)].tolist())
        if asks:
            sampled = len(numbers)
            numbers = tuple(number for number in numbers if prompt_and_answer(*held.row(number))[0])
            if not numbers:
                raise DataError("no row has a prompt to answer", where="data.source", repair="give rows with prompts")
            if without := every - len(asked) + sampled - len(numbers):
                self.notes.append(
                    f"{without:,} rows without a prompt were skipped: they have neither answers nor losses"
                )
            limit, has_cut = config.data.max_length, dataset.manifest.splits[stream].truncated > 0
            if request.file is None and has_cut and (cut := int(np.sum(held.lengths[list(numbers)] >= limit))):
                self.notes.append(f"up to {cut} references were cut off at data.max_length={limit}")
        return EvaluationRows(name, held, numbers, dataset, asks, train, stream)

    def _rows_of_file(self) -> tuple[PreparedSplit, PreparedDataset, PreparedSplit | None]:
        """The rows of the requested file, prepared, and those that were trained on, if they are there."""
        run, config, train = self.run, self.reading, None
        # Beside the run's own.
        root = None if run is None else prepared_beside(run, config)
        held, dataset = of_file(config, root=root)
        if run is not None:
            try:
                train = splits_of(run, saved_config(run))[0].train
            except FinrayError as error:
                self.notes.append(f"overlap with the training data was not checked: {error.message}")
        was_plain = any(subject.artifact.notes.get("rows") == "completion" for subject in self.subjects[-1:])
        if run is None and was_plain and dataset.kind() == "chat":
            self.notes.append(
                "the model was trained on prompts and completions as plain text, and these rows are chats for it; "
                "`data.format=prompt_completion` asks them as in the training"
            )
        counts = dataset.manifest.splits["train"]
        for lost, why in (
            (counts.dropped_too_long, f"are longer than data.max_length={config.data.max_length}"),
            (counts.bad_rows, "are bad"),
        ):
            if lost:
                self.notes.append(f"{lost} rows {why} and were skipped")
        return held, dataset, train

    def rows_for(self, artifact: Artifact) -> EvaluationRows | None:
        """The rows for a model's own tokenizer and chat template; shared if these are equal."""
        rows, config = self.rows, self.reading
        is_shared = artifact is self.tuned.artifact or artifact.began_as is not None
        is_shared |= self.run is not None and str(artifact.folder) == config.model.name
        if rows is None or is_shared:
            return rows
        ours, theirs = (load_tokenizer(pretrained.tokenizer) for pretrained in (self.tuned.artifact, artifact))
        if ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template:
            return rows
        model = ModelConfig(
            name=str(artifact.folder),
            task=config.model.task,
            chat_template_arguments=config.model.chat_template_arguments,
        )
        model_config = config.model_copy(update={"model": model})
        root = None if self.run is None else prepared_beside(self.run, config)
        held, dataset = of_file(model_config, root=root, stream=rows.stream)
        return EvaluationRows(rows.name, held, (), dataset, rows.asks, None, rows.stream).like(rows.keys())

    def by_artifact(self) -> Iterator[tuple[Artifact, list[Subject]]]:
        """Models grouped by shared weights, so that these are loaded once."""
        left = list(self.subjects)
        while left:
            artifact = left[0].artifact
            yield artifact, [subject for subject in left if subject.artifact is artifact]
            left = [subject for subject in left if subject.artifact is not artifact]


def _config_of(
    model: str | Path, run: RunDir | None, artifact: Artifact, request: EvaluationRequest, overrides: Overrides
) -> Config:
    """The config of the run, or one for these weights; rows of a file are read with the run's settings."""
    if run is not None:
        config = saved_config(run)
    else:
        config = load_config({"model": {"name": str(model)}, "data": {"source": str(request.file or "none")}})
        # Rows of a file are read as in the training, whose settings an exported model has beside it.
        notes = artifact.notes
        data = {name: note for name in ("system", "tool_format") if (note := notes.get(name)) is not None}
        arguments: dict[str, Any] = {"chat_template_arguments": notes.get("chat_template_arguments") or {}}
        if artifact.is_adapter and (template := load_tokenizer(artifact.tokenizer).chat_template):
            arguments["chat_template"] = template
        classification = {"labels": notes["labels"]} if notes.get("labels") else {}
        objective = {"objective": notes["objective"]} if artifact.is_reward else {}
        config = config.model_copy(
            update={
                "model": artifact.model.model_copy(update=arguments),
                "data": config.data.model_copy(update=data),
                "classification": config.classification.model_copy(update=classification),
                "train": config.train.model_copy(update=objective),
            }
        )
    if request.file is not None:
        if not Path(request.file).expanduser().is_file():
            raise DataError(
                f"the file does not exist{did_you_mean_path(request.file)}",
                where=f"--file {request.file}",
                repair="check the path and the working directory",
            )
        changes: dict[str, Any] = {"source": str(request.file), "mix": [], "group_by": None, "train_split": "train"}
        changes |= dict.fromkeys(("eval_source", "eval_split", "test_split", "subset", "revision"))
        # A truncated reference would be a different one. All rows are evaluated; a ratio is required by the settings of
        # evaluation in training.
        changes |= {"eval_ratio": 0.5, "test_ratio": 0.0, "on_too_long": "drop"}
        from transformers import AutoConfig

        try:
            text = AutoConfig.from_pretrained(**loading_options(artifact.model)).get_text_config()
        except FinrayError:
            raise
        except Exception as error:
            # Third-party files can fail in any way.
            raise not_loaded("model's configuration", artifact.model, error) from None
        # As many tokens as the model reads, if it says so.
        reads = min(getattr(text, "max_position_embeddings", None) or 0, 2**24)
        if task_spec(artifact.model.task).adds_head:
            # RoBERTa's positions begin after the padding index: its table holds fewer than it says.
            reads = min(reads, packing_of(artifact.model).positions or reads)
        changes["max_length"] = max(config.data.max_length, reads)
        config = config.model_copy(update={"data": config.data.model_copy(update=changes)})
        if config.foreign[0]:
            config = of_stranger(config, config.foreign[0], said=["data.source"])
    config = load_config(config, overrides)
    if config.adapter.start_from is not None:
        require_trusted(config, "adapter.start_from", "model.task")
    config = with_absolute_paths(config)
    given = {name: getattr(request, name) for name in ("metrics", "max_rows", "max_new_tokens", "batch_size")}
    # A program may give what no option of a command takes.
    return load_config(config, evaluation={name: value for name, value in given.items() if value is not None})


def _has_format(config: Config) -> bool:
    """Whether the columns of the source are those of what the objective learns from."""
    try:
        SourceRows(config, has_chat_template=False)
    except DataError:
        return False
    return True


def _began_from(config: Config, named: Sequence[str] | None, notes: list[str]) -> list[Subject]:
    """The adapter that a run began from, and a reference that is another model: those that are ``named``, or all if the
    run learns from preferences.
    Raises FinrayError: one is named, and is not there."""
    reference = config.preference.reference if config.preference.names_model else None
    objective, subjects = OBJECTIVES.get(config.train.objective or ""), list[Subject]()
    usual = () if objective is None or objective.rows is None else ("start", "reference")
    wanted = usual if named is None else named
    for name, place in (("start", config.adapter.start_from), ("reference", reference)):
        if place is None or name not in wanted:
            continue
        try:
            require_trusted(config, "preference.reference")
            subjects.append(Subject(name, artifact_of(place)))
        except FinrayError as error:
            if named is not None:
                raise
            notes.append(f"not compared with the {name} of the run: {error.message}")
    return subjects


def _baselines(
    named: Sequence[str] | None, tuned: Subject, base: Subject | None, others: Sequence[Subject] = ()
) -> list[Subject]:
    """The models to compare with: those given, else the model's own."""
    own = {subject.name: subject for subject in (base, *others) if subject is not None}
    if named is None:
        named = list(own)
    baselines: list[Subject] = []
    named = [name for name in named if name not in ("none", "")]
    for name in named:
        if name in own:
            baselines.append(own[name])
        else:
            short = Path(name).name if Path(name).name not in ("", "final") else str(name)
            baselines.append(Subject(short if short != tuned.name else name, artifact_of(name)))
    if len({subject.name for subject in baselines}) < len(baselines):
        baselines = [replace(subject, name=str(name)) for subject, name in zip(baselines, named, strict=True)]
    # A Hub id or a directory may have just the name of the evaluated model.
    return [
        replace(baseline, name=f"{baseline.name} (baseline)") if baseline.name == tuned.name else baseline
        for baseline in baselines
    ]


def _folder(model: str | Path, run: RunDir | None, artifact: Artifact, request: EvaluationRequest) -> Path:
    """The folder for results, created and known to be writable."""
    if request.output is not None:
        folder = Path(request.output).expanduser()
    elif run is None:
        model_folder = artifact.folder if Path(model).expanduser().is_dir() else Path(str(model).replace("/", "--"))
        root, folder = model_folder, model_folder / "evaluation"
    else:
        path = Path(model).expanduser().resolve()
        root, folder = run.path, run.path / "evaluation" / ("" if path in (run.path, run.final) else path.name)
    if request.output is None and (request.file is not None or request.split is not None):
        folder /= request.split or Path(str(request.file)).stem
    if request.output is None and not lies_in(folder, root):
        raise FinrayError(
            "is a link to a directory elsewhere, where the scores would be written",
            where=str(folder),
            repair="choose a directory with --output, or remove the link",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FinrayError(
            f"the scores cannot be written: {(error.strerror or str(error)).lower()}",
            where=str(folder),
            repair="choose another directory with --output",
        ) from None
    require_writable(folder)
    return folder
