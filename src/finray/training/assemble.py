"""Puts one rank's loop together from a config, a prepared dataset and a run directory; needs no Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finray.checkpoint import Checkpoint, CheckpointStore
from finray.checkpoint.fence import Fence
from finray.config.resolved import Packing
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedDataset
from finray.data.sampling.order import Order, derive_key, total_steps
from finray.data.sampling.packing import PackPlan, one_row_each, plan_packs
from finray.errors import DataError
from finray.models import liger
from finray.models.artifacts import NOTES
from finray.models.blocks import blocks_of, compile_blocks, wrap_blocks
from finray.models.loading import resolve_precision
from finray.models.packing_check import check_packing
from finray.models.quantised import resolve_bits
from finray.models.roles import roles_of
from finray.models.sharded import materialise
from finray.parallel.base import NamedOptimizer, Strategy, on_all_ranks
from finray.pretrained.tokenizers import load_tokenizer
from finray.tasks.causal_lm import CausalLM
from finray.tracking.base import Tracker
from finray.tracking.jsonl import FILE as METRICS_FILE
from finray.tracking.jsonl import JsonlTracker
from finray.training.cpu_checks import refusals_on_cpu
from finray.training.loader import Feed, evaluation_batches
from finray.training.loop import Loop, peak_memory
from finray.training.optim.optimizer import Optimizer, torch_optimizer, warnings_of
from finray.training.profile import Profiler
from finray.training.saving import Saver
from finray.training.snapshot import restore
from finray.training.state import TrainState


@dataclass(frozen=True, slots=True)
class Assembled:
    """A loop ready to run, and what the run header says of it."""

    loop: Loop
    header: dict[str, Any]


def assemble(
    config: Config,
    *,
    prepared: str | Path,
    run_dir: Path,
    strategy: Strategy,
    notify: Callable[[dict[str, Any]], None] = lambda record: None,
    reported: Callable[[Path, dict[str, float]], None] = lambda path, metrics: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Assembled:
    """Build model, data, optimizer and trackers, and restore the newest valid checkpoint if there is one.

    Args:
        config: the run's configuration.
        prepared: directory or URL of the prepared dataset.
        run_dir: the run directory.
        strategy: how the ranks share the work.
        notify: shown records (header, warnings, metrics), on rank 0.
        reported: called on every rank after each checkpoint.
        clock: seconds, monotonic.

    Raises:
        FinrayError: something cannot be loaded, or every checkpoint is damaged.
    """
    started = clock()
    first = strategy.rank == 0
    fence = Fence(run_dir)
    store = CheckpointStore(run_dir, fence=fence.check)
    if first:
        fence.take()
    precision = resolve_precision(config.train.precision, strategy.device)
    packing = on_all_ranks(strategy, lambda: check_packing(config.model))
    if first and not packing.safe:
        notify({"kind": "warning", "step": 0, "message": packing.warning})
    task = on_all_ranks(strategy, lambda: _task(config, precision, strategy, packing))
    # ZeRO gives empty tensors some memory when it shards them, and no values.
    empty = task.is_empty
    strategy.shard(task.module, blocks_of(task.model))
    if empty:
        on_all_ranks(strategy, lambda: _fill(config, task, strategy, notify if first else lambda record: None))
    extra: dict[str, Any] = {"lora_plus_ratio": config.adapter.lora_plus_ratio, "roles": roles_of(task.model)}
    task.module, optimizer = strategy.prepare(
        task.module,
        task.trainable(),
        lambda: Optimizer(task.trainable(), config.train, **extra),
        lambda: torch_optimizer(task.trainable(), config.train, **extra),
    )
    found = on_all_ranks(strategy, lambda: _find(store, notify) if first else None)
    source = strategy.broadcast_object(None if found is None else str(found.path))
    dataset = on_all_ranks(strategy, lambda: _dataset(config, prepared))
    state = on_all_ranks(strategy, lambda: _restore(config, dataset, source, task, optimizer))
    strategy.broadcast_parameters(task.initialised_parameters())
    data = on_all_ranks(strategy, lambda: _data(config, dataset, strategy, packing, position=state.position))
    extras = on_all_ranks(
        strategy, lambda: _extras(config, dataset, _bits(config, strategy)) if first else lambda folder: None
    )
    loop = Loop(
        config=config,
        task=task,
        strategy=strategy,
        optimizer=optimizer,
        feed=data.feed,
        evaluation=data.evaluation,
        total_steps=data.total_steps,
        epoch_items=len(data.plan),
        state=state,
        saver=Saver(store, strategy, config.checkpoint, clock=clock),
        trackers=_trackers(config, run_dir, state.step, notify) if first else [],
        save_extras=extras,
        reported=reported,
        clock=clock,
        profiler=_profiler(config, run_dir, strategy, notify),
    )
    loop.phases["load"] = clock() - started
    header = _header(config, task, data, state, strategy, precision)
    if first:
        notify(header)
        for message in warnings_of(config.train, strategy.device):
            notify({"kind": "warning", "step": state.step, "message": message})
    return Assembled(loop, header)


@dataclass(frozen=True, slots=True)
class _Data:
    plan: PackPlan
    feed: Feed
    evaluation: list[Any] | None
    total_steps: int
    rows: int
    tokens: int
    supervised: int
    eval_rows: int


def _dataset(config: Config, prepared: str | Path) -> PreparedDataset:
    local_dir = config.prepare.local_dir
    dataset = PreparedDataset(prepared, local_dir=None if local_dir is None else Path(local_dir).expanduser())
    if dataset.kind() == "labelled":
        raise DataError(
            "the rows are text with a label, which a language model does not learn",
            where="data.format",
            repair="set data.format to text, to learn the text alone",
        )
    return dataset


def _data(config: Config, dataset: PreparedDataset, strategy: Strategy, packing: Packing, *, position: int) -> _Data:
    splits = dataset.splits(config.data, seed=config.run.seed)
    train, held_out = splits.train, splits.eval
    make_plan = plan_packs if config.data.packing else one_row_each
    plan = make_plan(train.lengths, config.data.max_length)
    steps, total = total_steps(
        len(plan),
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
        global_batch_size=config.train.global_batch_size,
    )
    feed = Feed(
        train,
        plan,
        Order(len(plan), seed=config.run.seed, total=total),
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=strategy.rank,
        world_size=strategy.world_size,
        lockstep=strategy.lockstep,
        rows_apart=not packing.safe,
        pin=strategy.device.type == "cuda",
    )
    if dataset.folder.is_remote:
        train.ahead(feed.rows_from(position))
    evaluation = None
    eval_rows = 0
    if held_out is not None:
        lengths = held_out.lengths[: config.evaluation.max_rows]
        eval_rows = len(lengths)
        # Packed even where training is not: the loss of a row does not depend on its neighbours.
        pack = plan_packs if packing.safe else one_row_each
        batches = evaluation_batches(
            held_out,
            pack(lengths, config.data.max_length),
            micro_batch_size=1,
            rank=strategy.rank,
            world_size=strategy.world_size,
            lockstep=strategy.lockstep,
        )
        evaluation = list(batches)
    return _Data(
        plan, feed, evaluation, steps, len(train), int(train.lengths.sum()), int(train.supervised.sum()), eval_rows
    )


def _task(config: Config, precision: str, strategy: Strategy, packing: Packing) -> CausalLM:
    train = config.train
    if strategy.device.type == "cpu":
        for refusal in refusals_on_cpu(config):
            raise refusal
    task = CausalLM.build(
        config.model,
        config.adapter,
        precision=precision,
        seed=_adapter_seed(config),
        device=strategy.device,
        empty=strategy.shards_weights,
        packs=packing.safe,
        bits=_bits(config, strategy),
    )
    if liger.is_wanted(train.liger, strategy.device):
        liger.apply(task.model)
    if train.compile:
        compile_blocks(task.model)
    wrap_blocks(task.model, checkpointing=train.gradient_checkpointing, offload=train.activation_offload)
    return task


def _bits(config: Config, strategy: Strategy) -> int | None:
    """Bits in which frozen weights are stored, where that is not the arithmetic's dtype."""
    if config.adapter.method == "none":
        return None
    return resolve_bits(config.model.quantization, device=strategy.device.type, workers=strategy.world_size)


def _adapter_seed(config: Config) -> int:
    return derive_key(config.run.seed, "adapter")


def _fill(config: Config, task: CausalLM, strategy: Strategy, notify: Callable[[dict[str, Any]], None]) -> None:
    """Give an empty model its weights."""
    whole = materialise(
        task.model,
        config.model,
        config.adapter,
        device=strategy.device,
        seed=_adapter_seed(config),
    )
    if whole:
        notify(
            {
                "kind": "warning",
                "step": 0,
                "message": "the weights have other names in the model's files than in the model, so every worker read "
                "all of them before it kept its share",
            }
        )


def _find(store: CheckpointStore, notify: Callable[[dict[str, Any]], None]) -> Checkpoint | None:
    """The newest valid checkpoint; damaged ones are moved out of the way, with a warning each."""

    def warn(message: str) -> None:
        notify({"kind": "warning", "step": 0, "message": message})

    return store.latest(warn, set_aside=True)


def _restore(
    config: Config, dataset: PreparedDataset, source: str | None, task: CausalLM, optimizer: NamedOptimizer
) -> TrainState:
    """Read the chosen checkpoint; without one, the state of a run that begins."""
    if source is None:
        return TrainState(random_key=derive_key(config.run.seed, "dropout"), data=dataset.content)
    state = restore(Path(source), task, optimizer)
    if state.data != dataset.content:
        raise DataError(
            "the data, the tokenizer or its chat template has changed since the run began",
            where=f"data.source={config.data.source}",
            repair="put it back to continue the run, or start anew with --fresh",
        )
    return state


def _profiler(config: Config, run_dir: Path, strategy: Strategy, notify: Callable[[dict[str, Any]], None]) -> Profiler:
    wanted = config.train.profile
    return Profiler(
        None if wanted is None else wanted.steps,
        folder=run_dir,
        rank=strategy.rank,
        device=strategy.device,
        tell=lambda text: notify({"kind": "note", "step": 0, "message": text}),
    )


def _trackers(config: Config, run_dir: Path, step: int, notify: Callable[[dict[str, Any]], None]) -> list[Tracker]:
    trackers: list[Tracker] = [JsonlTracker(run_dir / METRICS_FILE, resume_step=step), _Notifier(notify)]
    if config.tracking.tensorboard:
        from finray.tracking.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(run_dir / "tensorboard", resume_step=step))
    return trackers


@dataclass(frozen=True, slots=True)
class _Notifier:
    """Passes records on to whoever shows the run."""

    notify: Callable[[dict[str, Any]], None]

    def log(self, record: dict[str, Any]) -> None:
        self.notify({key: value for key, value in record.items() if key != "samples"})

    def close(self) -> None:
        return


def _extras(config: Config, dataset: PreparedDataset, bits: int | None) -> Callable[[Path], None]:
    tokenizer = load_tokenizer(config.model)
    kind = dataset.kind()
    notes = {
        "base_model": config.model.name,
        "revision": config.model.revision,
        "rows": kind,
        "new_tokens": config.model.new_tokens,
        "quantization": {None: "none", 4: "4bit", 8: "8bit"}[bits],
    }

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))
        (folder / NOTES).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")

    return save


def _header(
    config: Config, task: CausalLM, data: _Data, state: TrainState, strategy: Strategy, precision: str
) -> dict[str, Any]:
    trainable, parameters = task.parameter_counts()
    micro = -(-config.train.global_batch_size // config.train.micro_batch_size)
    return {
        "kind": "header",
        "step": state.step,
        "total_steps": data.total_steps,
        "model": config.model.name,
        "parameters": parameters,
        "trainable": trainable,
        "precision": precision,
        "rows": data.rows,
        "tokens": data.tokens,
        "supervised": data.supervised,
        "eval_rows": data.eval_rows,
        "packing": config.data.packing,
        "packs": len(data.plan),
        "fill": data.plan.fill,
        "world_size": strategy.world_size,
        "device": _device_name(strategy.device),
        "threads": torch.get_num_threads(),
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "accumulation": -(-micro // strategy.world_size),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def summary(assembled: Assembled) -> dict[str, Any]:
    """What a finished run says of itself; collective, so called on every rank."""
    loop = assembled.loop
    peaks = loop.strategy.all_gather_object(peak_memory(loop.strategy.device))
    state = loop.state
    return {
        "step": state.step,
        "total_steps": loop.total_steps,
        "tokens": state.tokens,
        "supervised": state.supervised,
        "train_seconds": state.seconds,
        "tokens_per_s": state.tokens / state.seconds if state.seconds else 0.0,
        "first_loss": loop.first_loss,
        "final_loss": loop.final_loss,
        "best_eval_loss": state.best_eval_loss,
        "phases": loop.phases,
        "peak_memory_bytes": peaks,
    }
