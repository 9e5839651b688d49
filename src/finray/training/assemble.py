"""Builds one rank's loop from a config, a prepared dataset and a run directory; needs no Ray."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.config.identity import settled
from finray.config.paths import run_url
from finray.config.resolved import Resolved, Settled
from finray.config.schema import Config
from finray.config.tasks import task_class
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.sampling.order import Order, derive_key, total_steps
from finray.data.sampling.packing import one_length_each, one_row_each, plan_packs
from finray.errors import DataError, ModelError
from finray.models import liger
from finray.models.blocks import blocks_of, compile_blocks, wrap_blocks
from finray.models.roles import roles_of
from finray.models.sharded import cut_model, left_out, materialise
from finray.parallel.base import NamedOptimizer, Strategy, on_all_ranks
from finray.parallel.ddp import DDPStrategy
from finray.pretrained.tokenizers import load_tokenizer
from finray.pretrained.weights import stored_weights
from finray.records import EvalRecord, Note, RunHeader
from finray.tracking.base import Trackers
from finray.tracking.jsonl import FILE as METRICS
from finray.tracking.jsonl import read_records
from finray.training import extending
from finray.training.checkpointing import CheckpointWriter, find_latest, open_store, restore
from finray.training.cpu_checks import refusals_on_cpu
from finray.training.evaluator import Answering, Evaluated, Evaluator
from finray.training.loader import EvalLoader, StepLoader
from finray.training.loop import Loop
from finray.training.memory import Memory, MemoryWriter, fetch_newest
from finray.training.optim.optimizer import Optimizer, warnings_of
from finray.training.outputs import Notify, Warn, make_header, place_of, save_extras, start_trackers
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
    resolved: Resolved,
    *,
    prepared: str | Path | Callable[[], Settled],
    run_dir: Path,
    strategy: Strategy,
    notify: Notify = lambda record: None,
    reported: Callable[[Path, dict[str, float]], None] = lambda path, metrics: None,
    answering: Answering | None = None,
    evaluator: Callable[[Settled], Evaluator] | None = None,
    memory: Memory | None = None,
    has_request: Callable[[], bool] = lambda: False,
    take_request: Callable[[], str] = lambda: "stop",
    clock: Callable[[], float] = time.perf_counter,
) -> Assembled:
    """Build model, data, optimizer and trackers, and restore the newest valid checkpoint if there is one.

    Whatever may fail runs through :func:`on_all_ranks`, so that no rank waits for one that has failed.

    Args:
        resolved: the value of every ``auto`` in the config.
        prepared: directory or URL of the prepared dataset, or a function that waits for it while the model is loaded.
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
    started = clock()
    first = strategy.rank == 0

    def warn(message: str, step: int = 0) -> None:
        if first:
            notify(Note(message, step, "warning"))

    if first:
        notify(Note(f"loading {config.model.name}"))
    store = open_store(run_dir, run_url(config), strategy)

    task, optimizer, dataset, settled_data, waited = _load(config, resolved, prepared, strategy, warn, clock)
    resolved = settled_data.resolved
    config = settled(config, resolved)
    on_all_ranks(strategy, lambda: dataset.require_kind(task.spec))
    dataset.trust()
    loader, held_out, steps = on_all_ranks(strategy, lambda: _data(config, resolved, task, dataset, strategy))
    # Not of data behind a URL, all of which would be fetched before the first step.
    local = [] if dataset.folder.is_remote else [loader.split, held_out]
    tokenizer = on_all_ranks(strategy, lambda: _tokenizer(config, task, local) if first else None)
    evaluation = None if held_out is None else _held_out(config, resolved, task, held_out, strategy)
    answered = None
    if held_out is not None and answering is not None and (count := config.evaluation.generate_rows) is not None:
        answered = partial(answering, task, held_out.sample(count, seed=config.run.seed), strategy)
    every = config.checkpoint.in_memory_every
    memory = None if every is None else memory
    state, steps, notes = _resume(config, task, optimizer, loader, dataset, steps, store, strategy, warn, memory)
    state.total_steps = steps
    if dataset.folder.is_remote:
        loader.split.prefetch(loader.rows_from(state.position))
    strategy.broadcast_parameters(task.initialised_parameters())
    workers = strategy.all_gather_object(place_of(strategy))
    header = make_header(config, resolved, task, strategy, loader, evaluation, step=state.step, total_steps=steps)
    header = replace(header, workers=workers)
    if first:
        notify(header)
        for message in (*config.train.replaced, *notes):
            notify(Note(message, state.step))
        for message in warnings_of(config.train, strategy.device):
            warn(message, state.step)
    trackers, extras = on_all_ranks(
        strategy,
        lambda: (
            start_trackers(config, run_dir, header, notify, warn) if first else Trackers({}, {}, warn=warn),
            save_extras(config, dataset, resolved, tokenizer) if first else lambda folder: None,
        ),
    )
    writer = None
    if memory is not None and every is not None:
        attempt = strategy.broadcast_object(uuid.uuid4().hex)
        writer = MemoryWriter(memory, strategy, run_dir, every, warn, attempt, records=run_url(config) is not None)
    best = task.spec.chosen(config.evaluation)
    background, evaluated = None, []
    if first and evaluation is not None:
        if config.evaluation.mode == "async" and evaluator is not None:
            background = evaluator(settled_data)
        evaluated = _taken_up(state, store, background)
    loop = Loop(
        config=config,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        loader=loader,
        evaluation=evaluation,
        total_steps=steps,
        state=state,
        writer=CheckpointWriter(store, strategy, config.checkpoint, best=best, in_use=state.evaluating),
        trackers=trackers,
        save_extras=extras,
        reported=reported,
        answered=answered,
        evaluator=background,
        evaluated=strategy.broadcast_object(evaluated),
        precision=resolved.precision,
        clock=clock,
        has_request=has_request,
        take_request=take_request,
        memory=writer,
        profiler=Profiler(config.train.profile, run_dir, strategy, notify=lambda text: notify(Note(text))),
    )
    loop.phases["load"] = clock() - started - waited
    return Assembled(loop, header)


def _load(
    config: Config,
    resolved: Resolved,
    prepared: str | Path | Callable[[], Settled],
    strategy: Strategy,
    warn: Warn,
    clock: Callable[[], float],
) -> tuple[Task, NamedOptimizer, PreparedDataset, Settled, float]:
    """Task, optimizer and dataset, the decisions that depend on the data, and the seconds waited for them. A
    collective."""

    def opened() -> tuple[PreparedDataset, Settled, float]:
        settled_data = prepared() if callable(prepared) else Settled(str(prepared), resolved)
        at = clock()
        return (
            open_dataset(config, settled_data.prepared, rank=strategy.rank, world_size=strategy.world_size),
            settled_data,
            at,
        )

    with ThreadPoolExecutor(1, thread_name_prefix="finray-verify") as pool:
        # While the model loads, each rank checks the digests of a share of the prepared files.
        opening = pool.submit(opened)
        task, optimizer = _model(config, resolved, strategy, warn)
        model_at = clock()
        dataset, settled_data, data_at = on_all_ranks(strategy, opening.result)
    return task, optimizer, dataset, settled_data, max(0.0, data_at - model_at)


def _model(config: Config, resolved: Resolved, strategy: Strategy, warn: Warn) -> tuple[Task, NamedOptimizer]:
    """The task with its model sharded by the strategy, and the optimizer. A collective."""
    train, device, seed = config.train, strategy.device, derive_key(config.run.seed, "adapter")

    task = on_all_ranks(
        strategy, lambda: _task(config, resolved, device=device, seed=seed, on_meta=strategy.shards_weights, warn=warn)
    )
    # ZeRO allocates memory for tensors on the meta device when it shards them, without values.
    on_meta = task.is_on_meta
    strategy.shard(task.module, blocks_of(task.model))
    if on_meta and on_all_ranks(
        strategy, lambda: materialise(task.model, config.model, config.adapter, device=device, seed=seed)
    ):
        warn(
            "the weights have different names in the model's files and in the model, so every worker had to read all "
            "of them"
        )
    ratio, roles = config.adapter.lora_plus_ratio, roles_of(task.model)
    rounding = derive_key(config.run.seed, "rounding")
    made = Optimizer(task.trainable(), train, lora_plus_ratio=ratio, roles=roles, seed=rounding)
    task.module, optimizer = strategy.prepare(task.module, made)
    return task, optimizer


def _task(config: Config, resolved: Resolved, *, device: torch.device, seed: int, on_meta: bool, warn: Warn) -> Task:
    """The task with its unsharded model."""
    if device.type == "cpu":
        for refusal in refusals_on_cpu(config):
            raise refusal
    train = config.train
    made: Task = task_class(config.model.task).build(config, resolved, device=device, seed=seed, on_meta=on_meta)
    stored = stored_weights(folder) if (folder := Path(config.model.name)).is_dir() else None
    if stored is not None and (tensors := left_out(made.model, stored)):
        warn(cut_model(tensors))
    if resolved.liger:
        liger.apply(made.model)
    if train.compile:
        compile_blocks(made.model)
    wrap_blocks(made.model, checkpointing=train.gradient_checkpointing, offload=train.activation_offload)
    return made


@torch.no_grad()
def evaluate_checkpoint(
    config: Config,
    known: Settled,
    step: int,
    checkpoint: Path | None,
    *,
    device: torch.device,
    answering: Answering | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Evaluated:
    """Evaluate a checkpoint as training does, in a separate process.

    The arithmetic is that of one rank with the whole model: the same forward passes, with their sums in the order of
    the packs. It needs no optimizer, and reads only the checkpoint from the running training.

    Args:
        config: of the run.
        known: the prepared dataset, and the value of every ``auto`` in the config.
        step: of the checkpoint.
        checkpoint: its directory; None means the model that training starts from.
        device: to compute on.
        answering: lets the model answer prompts, if ``evaluation.generate_rows`` is set.
        clock: seconds, monotonic.

    Raises:
        FinrayError: something cannot be loaded, or the checkpoint is damaged.
    """
    started, resolved, seed = clock(), known.resolved, derive_key(config.run.seed, "adapter")
    config, strategy = settled(config, resolved), DDPStrategy(device)
    task = _task(config, resolved, device=device, seed=seed, on_meta=False, warn=lambda message: None)
    if task.is_on_meta:
        materialise(task.model, config.model, config.adapter, device=device, seed=seed)
    if checkpoint is not None:
        task.layout.load(checkpoint, [entry["path"] for entry in manifest.verify(checkpoint)["files"]])
    local_dir = config.prepare.local_dir
    dataset = PreparedDataset(known.prepared, local_dir=None if local_dir is None else Path(local_dir).expanduser())
    held_out = dataset.splits(config.data, seed=config.run.seed).eval
    assert held_out is not None
    loader = _held_out(config, resolved, task, held_out, strategy)
    task.model.eval()
    metrics, confusion = evaluate(task, strategy, loader)
    if answering is not None and (count := config.evaluation.generate_rows) is not None:
        metrics |= answering(task, held_out.sample(count, seed=config.run.seed), strategy)
    return Evaluated(step, metrics, loader.weight, round(clock() - started, 6), confusion=confusion)


def _taken_up(state: TrainState, store: CheckpointStore, evaluator: Evaluator | None) -> list[Evaluated]:
    """Repeat evaluations that were pending at the checkpoint from which a run continues; returns the known results.

    A later result, from before the run ended, is in ``metrics.jsonl``.
    """
    if not state.evaluating:
        return []
    records = {one["step"]: one for one in read_records(store.run_dir / METRICS) if one["kind"] == "eval"}
    evaluated = []
    for step in state.evaluating:
        checkpoint = store.path_of(step) if step else None
        if step in records:
            evaluated.append(Evaluated(step, EvalRecord.metrics_of(records[step])))
        elif checkpoint is not None and step not in store.steps():
            evaluated.append(Evaluated(step, failure="it did not finish, and the checkpoint is gone"))
        elif evaluator is None:
            evaluated.append(Evaluated(step, failure="it did not finish before evaluation.mode became inline"))
        else:
            evaluator.submit(step, checkpoint)
    return evaluated


def _resume(
    config: Config,
    task: Task,
    optimizer: NamedOptimizer,
    loader: StepLoader,
    dataset: PreparedDataset,
    steps: int,
    store: CheckpointStore,
    strategy: Strategy,
    warn: Warn,
    memory: Memory | None,
) -> tuple[TrainState, int, list[str]]:
    """The restored state from the newest valid checkpoint, or a new one; the number of steps; and notes."""
    first = strategy.rank == 0
    candidates = on_all_ranks(
        strategy, lambda: extending.by_preference(store, loader, dataset.content) if first else []
    )
    newest = strategy.broadcast_object(max(candidates, default=0))
    kept = None if memory is None else fetch_newest(memory, strategy, store.run_dir, after=newest, warn=warn)
    found = kept or find_latest(store, strategy, warn, steps=candidates)
    if memory is not None and found is not None and kept is None and found.step < newest:
        # The checkpoints on storage are damaged.
        kept = fetch_newest(memory, strategy, store.run_dir, after=found.step, warn=warn)
        found = kept or found
    if found is None:
        return TrainState(random_key=derive_key(config.run.seed, "dropout"), data=dataset.content), steps, []
    state = on_all_ranks(strategy, lambda: restore(found, task.layout, optimizer))
    if kept is not None:
        shutil.rmtree(kept.path, ignore_errors=True)
    on_all_ranks(strategy, lambda: require_same_data(state.data, dataset, config))
    newest = strategy.broadcast_object(max([state.step, *store.steps()]) if first else 0)
    steps, notes = on_all_ranks(
        strategy, lambda: extending.go_on(config, state, loader, steps, newest=newest, run_dir=store.run_dir)
    )
    on_all_ranks(strategy, lambda: store.drop_after(state.step) if first else None)
    if kept is not None:
        notes = [f"loaded the checkpoint of step {state.step} from the cluster's memory", *notes]
    return state, steps, notes


def open_dataset(config: Config, prepared: str | Path, *, rank: int, world_size: int) -> PreparedDataset:
    """Open the prepared dataset of a run; this rank verifies a share of it.

    Raises:
        DataError: the dataset is damaged.
    """
    local_dir = config.prepare.local_dir
    dataset = PreparedDataset(prepared, local_dir=None if local_dir is None else Path(local_dir).expanduser())
    dataset.verify(rank=rank, world_size=world_size)
    return dataset


def require_same_data(trained_on: str, dataset: PreparedDataset, config: Config) -> None:
    """Refuse rows other than those a run started with; its cursor and held-out rows are only valid for these.

    The config cannot tell, because it only names files; and the fingerprint would be too strict: it covers versions of
    libraries, which may change and give the same tokens.

    Raises:
        DataError: the rows differ.
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
    data, train = config.data, config.train
    splits = dataset.splits(data, seed=config.run.seed)
    rows, held_out = splits.train, splits.eval
    plan = (plan_packs if data.packing else one_row_each)(rows.lengths, resolved.pack_length or data.max_length)
    steps, total = total_steps(
        len(plan), epochs=resolved.epochs, max_steps=train.max_steps, global_batch_size=resolved.global_batch_size
    )
    loader = StepLoader(
        rows,
        plan,
        Order(len(plan), seed=config.run.seed, total=total),
        collate=partial(task.collate, rows),
        weight=task.weight(rows),
        global_batch_size=resolved.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rows_apart=not resolved.packs,
        pin=strategy.device.type == "cuda",
        rank=strategy.rank,
        world_size=strategy.world_size,
        lockstep=strategy.lockstep,
    )
    return loader, held_out, steps


def _tokenizer(config: Config, task: Task, splits: Sequence[PreparedSplit | None]) -> Any:
    """The tokenizer, after a check that the model has an embedding for every token of the rows.

    Raises:
        ModelError: a row has a token without one; on a GPU, that would end the process.
    """
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


def _held_out(
    config: Config, resolved: Resolved, task: Task, held_out: PreparedSplit, strategy: Strategy
) -> EvalLoader:
    """This rank's share of the evaluation rows."""
    sampled = held_out.sample(config.evaluation.max_rows, seed=config.run.seed)
    return EvalLoader(
        # Packed even if training is not: the loss of a row does not depend on its neighbours.
        plan=(plan_packs if resolved.packs else one_length_each)(sampled.lengths, config.data.max_length),
        collate=partial(task.collate, sampled),
        rows=len(sampled),
        held_out=len(held_out),
        weight=int(sampled.supervised.sum()),
        rank=strategy.rank,
        world_size=strategy.world_size,
        lockstep=strategy.lockstep,
    )
