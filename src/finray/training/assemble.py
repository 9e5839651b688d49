"""Builds one rank's loop from a config, a prepared dataset and a run directory; needs no Ray."""

from __future__ import annotations

import gc
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.config.objectives import spec_of
from finray.config.paths import local_dir_of, run_url
from finray.config.resolved import Execution, PreparedRun, Resolved
from finray.config.schema import Config
from finray.config.tasks import task_class
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.dataset.run_data import groups_apart, run_data
from finray.data.sampling.order import Order, derive_key
from finray.data.sampling.packing import equal_length_batches, plan_packs
from finray.errors import DataError, ModelError
from finray.models import dropout, frozen, liger
from finray.models.blocks import blocks_of, compile_blocks, wrap_blocks
from finray.models.roles import roles_of
from finray.models.sharded import cut_model, left_out, materialize
from finray.models.towers import loaded_with
from finray.parallel.base import NamedOptimizer, Strategy, on_all_ranks
from finray.parallel.ddp import DDPStrategy
from finray.parallel.fsdp import FSDPStrategy
from finray.pretrained.tokenizers import load_tokenizer
from finray.pretrained.weights import stored_weights
from finray.records import EvalRecord, Note, RunHeader
from finray.tracking.base import Trackers
from finray.tracking.jsonl import FILE as METRICS
from finray.tracking.jsonl import read_records
from finray.training import extending
from finray.training.checkpointing import CheckpointWriter, find_latest, open_store, restore
from finray.training.cpu_checks import refusals_on_cpu
from finray.training.evaluator import AnswerMetrics, CheckpointScores, Evaluator
from finray.training.loader import Collate, EvalLoader, StepLoader
from finray.training.loop import Loop
from finray.training.memory import Memory, MemoryWriter, fetch_newest, remove_left
from finray.training.optim.optimizer import Optimizer, warnings_of
from finray.training.outputs import Notify, Warn, make_header, place_of, save_extras, start_trackers
from finray.training.passes import add_columns, files_of_reference
from finray.training.profile import Profiler
from finray.training.state import TrainState
from finray.training.step import evaluate
from finray.training.task import Task


@dataclass(frozen=True, slots=True)
class Assembled:
    """A loop ready to run, and its run header."""

    loop: Loop
    header: RunHeader


def assemble(
    config: Config,
    execution: Execution,
    *,
    prepared: PreparedRun | Callable[[], PreparedRun],
    run_dir: Path,
    strategy: Strategy,
    notify: Notify = lambda record: None,
    reported: Callable[[Path, dict[str, float]], None] = lambda path, metrics: None,
    answering: AnswerMetrics | None = None,
    evaluator: Callable[[PreparedRun], Evaluator] | None = None,
    memory: Memory | None = None,
    has_request: Callable[[], bool] = lambda: False,
    take_request: Callable[[], str] = lambda: "stop",
    clock: Callable[[], float] = time.perf_counter,
) -> Assembled:
    """Build model, data, optimizer and trackers, and restore the newest valid checkpoint if there is one.

    Whatever may fail runs through :func:`on_all_ranks`, so that no rank waits for one that has failed.

    Args:
        execution: what the config leaves open and the model needs; of a classifier all that was decided.
        prepared: the prepared data, or a function that waits for them while the model is loaded.
        notify: called with records (header, warnings, metrics), on rank 0.
        reported: called on every rank after each checkpoint.
        answering: lets the model answer prompts at evaluations, if ``evaluation.generate_rows`` is set.
        evaluator: creates the evaluator of checkpoints on other resources, for ``evaluation.mode: async``.
        memory: keeps checkpoints between those on storage, for ``checkpoint.in_memory_every``.
        has_request: whether this rank has received a request.
        take_request: the request to rank 0; see :class:`finray.training.loop.Loop`.
        clock: seconds, monotonic.

    Raises:
        FinrayError: something cannot be loaded, or every checkpoint is damaged.
    """
    started, first = clock(), strategy.rank == 0

    def say(message: str, level: Literal["note", "warning"] = "note") -> None:
        if first:
            notify(Note(message, level=level))

    say(f"loading {config.model.name}")
    warn = partial(say, level="warning")
    store = open_store(run_dir, run_url(config), strategy)
    loaded = _load(config, execution, prepared, strategy, warn, say, clock)
    resolved, task = loaded.prepared.resolved, loaded.task
    state, notes = _resume(config, loaded, store, strategy, warn, memory)
    header, trackers, extras = _announce(config, loaded, run_dir, strategy, state, notes, notify, warn)
    in_memory = None
    if memory is not None and (every := config.checkpoint.in_memory_every) is not None:
        attempt = strategy.broadcast_object(uuid.uuid4().hex)
        in_memory = MemoryWriter(memory, strategy, run_dir, every, warn, attempt, records=run_url(config) is not None)
    background, evaluated = on_all_ranks(
        strategy, lambda: _take_up(config, loaded, state, store, evaluator) if first else (None, [])
    )
    best = spec_of(config).chosen(config.evaluation)
    loop = Loop(
        config=config,
        task=task,
        strategy=strategy,
        optimizer=loaded.optimizer,
        source=loaded.loader,
        evaluation=loaded.evaluation,
        total_steps=state.total_steps,
        state=state,
        writer=CheckpointWriter(
            # A run that continues from a checkpoint must have the records of all steps before it.
            store,
            strategy,
            config.checkpoint,
            best=best,
            in_use=state.evaluating,
            before=trackers.keep,
        ),
        trackers=trackers,
        save_extras=extras,
        reported=reported,
        answered=_answers(config, task, loaded.held_out, strategy, answering),
        evaluator=background,
        evaluated=strategy.broadcast_object(evaluated),
        resolved=resolved,
        best_metric=best,
        clock=clock,
        has_request=has_request,
        take_request=take_request,
        memory=in_memory,
        profiler=Profiler(config.train.profile, run_dir, strategy, notify=lambda text: notify(Note(text))),
    )
    loop.writer.sync_records()  # Behind a URL, trackers find the run's id after a kill before its first checkpoint.
    loop.phases["load"] = clock() - started - loaded.waited
    return Assembled(loop, header)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a rank trains with, before the state of a checkpoint is loaded into it.

    Attributes:
        prepared: the data, with all that was decided.
        held_out: all held-out rows.
        evaluation: this rank's share of those that are evaluated.
        tokenizer: on rank 0.
        steps: of the run, if it starts now.
        waited: seconds waited for the data.
    """

    prepared: PreparedRun
    task: Task
    optimizer: NamedOptimizer
    dataset: PreparedDataset
    loader: StepLoader
    held_out: PreparedSplit | None
    evaluation: EvalLoader | None
    tokenizer: Any
    steps: int
    waited: float


def _load(
    config: Config,
    execution: Execution,
    prepared: PreparedRun | Callable[[], PreparedRun],
    strategy: Strategy,
    warn: Warn,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> _Loaded:
    """Load the model while the data are prepared, then the data. A collective."""

    def opened() -> tuple[PreparedDataset, PreparedRun, float]:
        run = prepared() if callable(prepared) else prepared
        at = clock()
        dataset = PreparedDataset(run.location, local_dir=local_dir_of(config))
        dataset.verify(rank=strategy.rank, world_size=strategy.world_size)
        return dataset, run, at

    with ThreadPoolExecutor(1, thread_name_prefix="finray-verify") as pool:
        # While the model loads, each rank checks the digests of a share of the prepared files.
        opening = pool.submit(opened)
        load = partial(_frozen, execution=execution, strategy=strategy, warn=warn)
        if config.preference.names_model and not config.preference.reference_in_step:
            # Before the model is loaded: never are both in memory.
            dataset, run, _ = on_all_ranks(strategy, opening.result)
            on_all_ranks(strategy, lambda: dataset.require_kind(spec_of(config)))
            rows = on_all_ranks(strategy, lambda: dataset.splits(config.data, seed=config.run.seed))
            splits = [rows.train, *([] if rows.eval is None else [rows.eval])]
            add_columns(config, run.resolved, None, dataset, splits, strategy, say, load)
            gc.collect()
        task, optimizer = _model(config, execution, strategy, warn)
        model_at = clock()
        dataset, run, data_at = on_all_ranks(strategy, opening.result)
    on_all_ranks(strategy, lambda: dataset.require_kind(spec_of(config)))
    dataset.trust()
    loader, held_out, steps = on_all_ranks(strategy, lambda: _data(config, run.resolved, task, dataset, strategy))
    splits = [loader.split, *([] if held_out is None else [held_out])]
    # Of the model as the run begins, before a checkpoint is restored.
    add_columns(config, run.resolved, task, dataset, splits, strategy, say, load)
    # Not of data behind a URL, all of which would be fetched before the first step.
    local = [] if dataset.folder.is_remote else [loader.split, held_out]
    tokenizer = on_all_ranks(strategy, lambda: _tokenizer(config, task, local) if strategy.rank == 0 else None)
    evaluation = None if held_out is None else _held_out(config, run.resolved, task, held_out, strategy)
    waited = max(0.0, data_at - model_at)
    return _Loaded(run, task, optimizer, dataset, loader, held_out, evaluation, tokenizer, steps, waited)


def _model(config: Config, execution: Execution, strategy: Strategy, warn: Warn) -> tuple[Task, NamedOptimizer]:
    """The task with its model sharded by the strategy, and the optimizer. A collective."""
    train, task = config.train, _sharded(config, execution, strategy, warn)
    ratio, roles = config.adapter.lora_plus_ratio, roles_of(task.model)
    rounding = derive_key(config.run.seed, "rounding")
    made = Optimizer(task.trainable(), train, lora_plus_ratio=ratio, roles=roles, seed=rounding)
    task.module, optimizer = strategy.prepare(task.module, made)
    return task, optimizer


def _frozen(config: Config, *, execution: Execution, strategy: Strategy, warn: Warn) -> Task:
    """The task of a reference, whose model is not trained: FSDP shards it, whatever shards the run's. A collective."""
    around: Strategy = DDPStrategy(strategy.device)
    if strategy.shards_weights:
        around = FSDPStrategy(strategy.device, config.parallel, precision=execution.precision)
    task = _sharded(config, execution, around, warn)
    task.model.requires_grad_(False).eval()
    return task


def _sharded(config: Config, execution: Execution, strategy: Strategy, warn: Warn) -> Task:
    """The task with its model sharded by the strategy. A collective."""
    device, seed = strategy.device, derive_key(config.run.seed, "adapter")
    task = on_all_ranks(
        strategy, lambda: _task(config, execution, device=device, seed=seed, on_meta=strategy.shards_weights, warn=warn)
    )
    # ZeRO allocates memory for tensors on the meta device when it shards them, without values.
    on_meta = task.is_on_meta
    strategy.shard(task.module, blocks_of(task.model))
    places = {"device": device, "parameter_device": strategy.parameter_device}
    if on_meta and on_all_ranks(
        strategy, lambda: materialize(task.model, config.model, config.adapter, seed=seed, **places)
    ):
        warn(
            "the weights have different names in the model's files and in the model, so every worker had to read all "
            "of them"
        )
    return task


def _task(config: Config, execution: Execution, *, device: torch.device, seed: int, on_meta: bool, warn: Warn) -> Task:
    """The task with its unsharded model."""
    if device.type == "cpu":
        for refusal in refusals_on_cpu(config):
            raise refusal
    train = config.train
    made: Task = task_class(config.model.task).build(config, execution, device=device, seed=seed, on_meta=on_meta)
    stored = stored_weights(folder) if (folder := Path(config.model.name)).is_dir() else None
    if stored is not None and (tensors := left_out(made.model, stored)):
        warn(cut_model(tensors))
    if execution.liger:
        liger.apply(made.model, checkpointing=train.gradient_checkpointing)
    if device.type == "cpu":
        dropout.apply(made.model)
        frozen.fuse_biases(made.model)
    if train.compile:
        compile_blocks(made.model)
    wrap_blocks(made.model, checkpointing=train.gradient_checkpointing, offload=train.activation_offload)
    return made


@torch.no_grad()
def evaluate_checkpoint(
    config: Config,
    prepared: PreparedRun,
    step: int,
    checkpoint: Path | None,
    *,
    device: torch.device,
    answering: AnswerMetrics | None = None,
    on_progress: Callable[[str, float], None] = lambda part, share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CheckpointScores:
    """Evaluate a checkpoint as training does, in a separate process.

    The arithmetic is that of one rank with the whole model: the same forward passes, with their sums in the order of
    the packs. It needs no optimizer, and reads only the checkpoint from the running training.

    Args:
        config: of the run.
        prepared: its data, with all that was decided.
        step: of the checkpoint.
        checkpoint: its directory; None means the model that training starts from.
        device: to compute on.
        answering: lets the model answer prompts, if ``evaluation.generate_rows`` is set.
        on_progress: called with the part of the evaluation, and the share of it that is done.
        clock: seconds, monotonic.

    Raises:
        FinrayError: something cannot be loaded, or the checkpoint is damaged.
    """
    started, resolved, seed = clock(), prepared.resolved, derive_key(config.run.seed, "adapter")
    strategy = DDPStrategy(device)
    task = _task(config, resolved, device=device, seed=seed, on_meta=False, warn=lambda message: None)
    if task.is_on_meta:
        materialize(task.model, config.model, config.adapter, device=device, seed=seed)
    dataset = PreparedDataset(prepared.location, local_dir=local_dir_of(config))
    held_out = dataset.splits(config.data, seed=config.run.seed).eval
    assert held_out is not None
    load = partial(_frozen, execution=resolved, strategy=strategy, warn=lambda message: None)
    add_columns(config, resolved, task, dataset, [held_out], strategy, lambda message: None, load)
    if checkpoint is not None:
        task.layout.load(checkpoint, [entry["path"] for entry in manifest.verify(checkpoint)["files"]])
    loader = _held_out(config, resolved, task, held_out, strategy)
    task.model.eval()
    metrics, confusion = evaluate(task, strategy, loader, partial(on_progress, "evaluating"))
    if (answered := _answers(config, task, held_out, strategy, answering)) is not None:
        metrics |= answered(partial(on_progress, "answering prompts"))
    return CheckpointScores(step, metrics, loader.weight, round(clock() - started, 6), confusion=confusion)


def _take_up(
    config: Config,
    loaded: _Loaded,
    state: TrainState,
    store: CheckpointStore,
    evaluator: Callable[[PreparedRun], Evaluator] | None,
) -> tuple[Evaluator | None, list[CheckpointScores]]:
    """The evaluator of ``evaluation.mode: async``, which repeats evaluations that were pending at the checkpoint from
    which a run continues; and the known results of such evaluations.

    A later result, from before the run ended, is in ``metrics.jsonl``.
    """
    background = None
    if loaded.evaluation is not None and config.evaluation.mode == "async" and evaluator is not None:
        background = evaluator(loaded.prepared)
    if loaded.evaluation is None or not state.evaluating:
        return background, []
    records = {one["step"]: one for one in read_records(store.run_dir / METRICS) if one["kind"] == "eval"}
    evaluated = []
    for step in state.evaluating:
        checkpoint = store.path_of(step) if step else None
        if step in records:
            evaluated.append(CheckpointScores(step, EvalRecord.metrics_of(records[step])))
        elif checkpoint is not None and step not in store.steps():
            evaluated.append(CheckpointScores(step, failure="it did not finish, and the checkpoint is gone"))
        elif background is None:
            evaluated.append(CheckpointScores(step, failure="it did not finish before evaluation.mode became inline"))
        else:
            background.submit(step, checkpoint)
    return background, evaluated


def _resume(
    config: Config, loaded: _Loaded, store: CheckpointStore, strategy: Strategy, warn: Warn, memory: Memory | None
) -> tuple[TrainState, list[str]]:
    """The restored state from the newest valid checkpoint, or a new one; and notes. A collective."""
    task, loader, dataset, resolved = loaded.task, loaded.loader, loaded.dataset, loaded.prepared.resolved
    first, steps, notes = strategy.rank == 0, loaded.steps, list[str]()
    remove_left()
    candidates = on_all_ranks(
        strategy, lambda: extending.resume_candidates(store, loader, dataset.content) if first else []
    )
    newest = strategy.broadcast_object(max(candidates, default=0))
    kept = None if memory is None else fetch_newest(memory, strategy, store.run_dir, after=newest, warn=warn)
    found = kept or find_latest(store, strategy, warn, steps=candidates)
    if memory is not None and found is not None and kept is None and found.step < newest:
        # The checkpoints on storage are damaged.
        kept = fetch_newest(memory, strategy, store.run_dir, after=found.step, warn=warn)
        found = kept or found
    where, reference = strategy.broadcast_object(
        on_all_ranks(strategy, lambda: files_of_reference(config, dataset) if first else ("", ""))
    )
    if found is None:
        state = TrainState(random_key=derive_key(config.run.seed, "dropout"), data=dataset.content, reference=reference)
    else:
        state = on_all_ranks(strategy, lambda: restore(found, task.layout, loaded.optimizer))
        if kept is not None:
            shutil.rmtree(kept.path, ignore_errors=True)
            notes.append(f"loaded the checkpoint of step {state.step} from the cluster's memory")
        on_all_ranks(strategy, lambda: require_same_data(state.data, dataset, config))
        if state.reference and reference not in ("", state.reference):
            raise ModelError(
                "the files of the reference have changed since the run began",
                where=where,
                repair="restore them to continue the run, or start over with --fresh",
            )
        state.reference = state.reference or reference
        newest = strategy.broadcast_object(max([state.step, *store.steps()]) if first else 0)
        steps, more = on_all_ranks(
            strategy,
            lambda: extending.extend_run(config, resolved, state, loader, steps, newest=newest, run_dir=store.run_dir),
        )
        notes += more
        on_all_ranks(strategy, lambda: store.drop_after(state.step) if first else None)
    state.total_steps = steps
    if dataset.folder.is_remote:
        loader.split.prefetch(loader.rows_from(state.position))
    strategy.broadcast_parameters(task.initialized_parameters())
    return state, notes


def _announce(
    config: Config,
    loaded: _Loaded,
    run_dir: Path,
    strategy: Strategy,
    state: TrainState,
    notes: Sequence[str],
    notify: Notify,
    warn: Warn,
) -> tuple[RunHeader, Trackers, Callable[[Path], None]]:
    """Show the run header and the notes, and start the trackers, on rank 0; the last result is
    :func:`finray.training.outputs.save_extras`. A collective."""
    resolved, first = loaded.prepared.resolved, strategy.rank == 0
    header = make_header(config, resolved, loaded.task, strategy, loaded.loader, loaded.evaluation, state)
    header = replace(header, workers=strategy.all_gather_object(place_of(strategy)))
    if first:
        notify(header)
        for message in (*config.train.replaced, *notes):
            notify(Note(message, state.step))
        for message in warnings_of(config.train, strategy.device):
            notify(Note(message, state.step, "warning"))

    def started() -> tuple[Trackers, Callable[[Path], None]]:
        if not first:
            return Trackers({}, {}, warn=warn), lambda folder: None
        trackers = start_trackers(config, resolved, run_dir, header, notify, warn)
        auto_class = loaded_with(loaded.task.model, loaded.task.spec.auto_class)
        return trackers, save_extras(config, loaded.dataset, resolved, loaded.tokenizer, auto_class)

    return header, *on_all_ranks(strategy, started)


def require_same_data(trained_on: str, dataset: PreparedDataset, config: Config) -> None:
    """Refuse rows other than those a run started with; its cursor and held-out rows are only valid for these.

    The config cannot tell, because it only names files; and the fingerprint would be too strict: it covers versions of
    libraries, which may change and give the same tokens. Raises DataError: the rows differ.
    """
    if trained_on != dataset.content:
        raise DataError(
            "the data, the tokenizer or its chat template has changed since the run began",
            where=f"data.source={config.data.source}",
            repair="restore it to continue the run, or start over with --fresh"
            + (
                "; a run from before data.format: auto turned prompts and completions into chat turns continues with "
                "data.format=prompt_completion"
                if config.data.format == "auto" and dataset.kind() == "chat"
                else ""
            ),
        )


def _data(
    config: Config, resolved: Resolved, task: Task, dataset: PreparedDataset, strategy: Strategy
) -> tuple[StepLoader, PreparedSplit | None, int]:
    """This rank's training data, all held-out rows, and the number of steps of the run."""
    data = run_data(config, dataset, decided=resolved)
    rows, plan = data.splits.train, data.plan
    if not (resolved.packs or rows.groups.is_single):
        raise groups_apart(config)
    loader = StepLoader(
        rows,
        plan,
        Order(len(plan), seed=config.run.seed, total=data.total_items),
        collate=partial(task.collate, rows),
        weight=task.objective.weight(rows),
        global_batch_size=resolved.global_batch_size,
        micro_batch_size=data.steps.micro_batch_size,
        rows_apart=not resolved.packs,
        joined=data.joined,
        before=_before(task, rows),
        pin=strategy.device.type == "cuda",
        rank=strategy.rank,
        world_size=strategy.world_size,
        lockstep=strategy.lockstep,
    )
    return loader, data.splits.eval, data.total_steps


def _before(task: Task, rows: PreparedSplit) -> tuple[Callable[[int], int], Collate] | None:
    """Of the pass that the objective asks for before a step: the tokens that are read instead of a row, and batches."""
    if not task.objective.spec.before:
        return None
    return lambda row: len(task.objective.row_before(rows, row)[0]), partial(task.collate, rows, before=True)


def _tokenizer(config: Config, task: Task, splits: Sequence[PreparedSplit | None]) -> Any:
    """The tokenizer, after a check that the model has an embedding for every token of the rows.
    Raises ModelError: a row has a token without one; on a GPU, that would end the process."""
    tokenizer, own = load_tokenizer(config.model), getattr(task.model, "config", None)
    size = getattr(getattr(own, "get_text_config", lambda: own)(), "vocab_size", None)
    # Nearly every tokenizer fits its model.
    if size is None or max(len(tokenizer) - 1, *tokenizer.added_tokens_decoder, 0) < size:
        return tokenizer
    for split in splits:
        if split is not None and (number := split.beyond(size)) is not None:
            largest = int(split.row(number)[0].max())
            raise ModelError(
                f"the row contains `{tokenizer.convert_ids_to_tokens(largest)}`, which has no embedding: its id is "
                f"{largest}, and the model has {size:,} rows",
                where=split.where(number),
                repair="use the model's own tokenizer, or a model whose embedding was resized for it",
            )
    return tokenizer


def _answers(
    config: Config, task: Task, held_out: PreparedSplit | None, strategy: Strategy, answering: AnswerMetrics | None
) -> Callable[..., dict[str, float]] | None:
    """Metrics of answers to held-out prompts, computed when called; None if none are asked for.
    Raises DataError: the held-out rows of a mix have no prompt."""
    count = config.evaluation.generate_rows
    if held_out is None or answering is None or count is None:
        return None
    prompted, are = held_out.prompted, "are plain text, which has no prompts to answer"
    if "unpaired" in (task.objective.spec.rows or ()):
        # As in `finray evaluate`: what is not wanted is nothing to compare an answer with.
        prompted, are = np.flatnonzero(held_out.values("label") > 0), "have no desirable answers to compare with"
    asked = held_out.take(prompted)
    if not len(asked):
        raise DataError(
            f"the held-out rows {are}",
            where="evaluation.generate_rows",
            repair="leave it out, or hold out rows with prompts and answers",
        )
    return partial(answering, task, asked.sample(count, seed=config.run.seed), strategy)


def _held_out(
    config: Config, resolved: Resolved, task: Task, held_out: PreparedSplit, strategy: Strategy
) -> EvalLoader:
    """This rank's share of the evaluation rows."""
    sampled = held_out.sample(config.evaluation.max_rows, seed=config.run.seed)
    lengths = sampled.groups.sums(sampled.lengths)
    capacity = max(config.data.max_length, int(lengths.max(initial=0)))
    # Packed even if training is not: the loss of a row does not depend on its neighbours.
    pack, before = plan_packs if resolved.packs else equal_length_batches, _before(task, sampled)
    return EvalLoader(
        plan=pack(lengths, capacity).in_rows(sampled.groups),
        before=before and (pack([before[0](row) for row in range(len(sampled))], capacity), before[1]),
        collate=partial(task.collate, sampled),
        rows=len(sampled),
        held_out=len(held_out),
        weight=int(sampled.supervised.sum()),
        rank=strategy.rank,
        world_size=strategy.world_size,
        lockstep=strategy.lockstep,
    )
