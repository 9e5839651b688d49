"""The memory part of a plan: what a worker needs, what it has, and the smallest change where that is too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.errors import ConfigError
from finray.parallel.deepspeed import config as deepspeed_config
from finray.planning.activations import kept_bytes
from finray.planning.blueprint import Blueprint
from finray.planning.estimate import Estimate, estimate
from finray.planning.findings import Findings
from finray.planning.fitting import Choice, smallest_change
from finray.planning.placement import GPUS, Device, worker_environment
from finray.planning.setup import Setup, Strategy, Workload
from finray.planning.workload import largest_workload
from finray.pretrained.weights import StoredWeights
from finray.training.cpu_checks import refusals_on_cpu

GIB = 2**30
# What is left free: other programs on the device, and what an estimate does not see.
MARGIN = 0.05
_STORED = {"F32": "fp32", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class Rows:
    """What the memory of a run depends on in its data.

    Attributes:
        lengths: tokens of the rows, or of a sample.
        longest: tokens of the longest.
        learned: share of the tokens that are targets.
        steps: optimizer steps of the run.
    """

    lengths: Sequence[int] = ()
    longest: int = 0
    learned: float = 1.0
    steps: int = 1


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a worker needs at its peak.

    Attributes:
        device: the GPU or the machine.
        precision: the arithmetic that it comes to.
        parts: bytes by part.
        total: of all parts.
        phase: when in a step that is.
        tokens: tokens of the largest micro-batch.
        available: bytes that a worker may have, or None where that is not known.
        fits: whether it fits, or None.
        changes: where it does not fit, the smallest set of overrides with which it does.
    """

    device: str
    precision: str
    parts: dict[str, int]
    total: int
    phase: str
    tokens: int
    available: int | None
    fits: bool | None
    changes: tuple[str, ...] = ()


def plan_memory(
    config: Config,
    resolved: Resolved,
    blueprint: Blueprint,
    stored: StoredWeights | None,
    device: Device,
    rows: Rows,
    found: Findings,
    *,
    ray: bool = True,
) -> MemoryPlan:
    """Estimate a worker's peak, and look for a change where it does not fit.

    Args:
        config: the run's.
        resolved: what it leaves open.
        blueprint: of the model with its adapter.
        stored: headers of the weights, where they are known.
        device: what a worker runs on.
        rows: what is known of the data.
        found: takes problems and warnings.
        ray: whether the worker is Ray's.
    """
    now = _choice(config, resolved)
    _check_precision(resolved.precision, device, found)
    if device.kind == "cpu":
        for refusal in refusals_on_cpu(config):
            found.problem(refusal)

    @cache
    def workload(micro_batch_size: int, max_length: int) -> Workload:
        return _workload(config, resolved, blueprint, rows, micro_batch_size, max_length)

    def peak(choice: Choice) -> Estimate:
        shapes = blueprint if choice.adapter == config.adapter.method else blueprint.with_lora(config.adapter.rank)
        setup = _setup(config, resolved, choice, device, stored, ray=ray, steps=rows.steps)
        return estimate(shapes, setup, workload(choice.micro_batch_size, choice.max_length))

    def fits(choice: Choice) -> bool:
        return device.memory is None or peak(choice).total <= (1 - MARGIN) * device.memory

    needed = peak(now)
    changes: tuple[str, ...] = ()
    if not fits(now):
        better = smallest_change(now, fits, longest=rows.longest)
        changes = () if better is None else better.overrides_from(now)
        found.problem(_too_large(needed.total, device, changes))
    return MemoryPlan(
        device=device.name,
        precision=now.precision,
        parts=dict(needed.parts),
        total=needed.total,
        phase=needed.phase,
        tokens=workload(now.micro_batch_size, now.max_length).tokens,
        available=device.memory,
        fits=None if device.memory is None else not changes and needed.total <= (1 - MARGIN) * device.memory,
        changes=changes,
    )


def _choice(config: Config, resolved: Resolved) -> Choice:
    return Choice(
        config.train.micro_batch_size,
        config.train.gradient_checkpointing,
        resolved.precision,
        config.data.max_length,
        config.adapter.method,
    )


def worst_peak(
    config: Config,
    resolved: Resolved,
    blueprint: Blueprint,
    stored: StoredWeights | None,
    device: Device,
    *,
    checkpointing: bool = False,
) -> int:
    """Peak bytes of a worker whose rows are all as long as they may be, and all of whose tokens are learned.

    Args:
        config: the run's.
        resolved: what it leaves open.
        blueprint: of the model with its adapter.
        stored: headers of the weights, where they are known.
        device: what a worker runs on.
        checkpointing: whether activations are computed again, whatever the config says.
    """
    choice = _choice(config, resolved)
    if checkpointing:
        choice = replace(choice, gradient_checkpointing="full")
    work = _workload(config, resolved, blueprint, Rows(), choice.micro_batch_size, choice.max_length)
    return estimate(blueprint, _setup(config, resolved, choice, device, stored, ray=True, steps=None), work).total


def _check_precision(precision: str, device: Device, found: Findings) -> None:
    if precision == "bf16" and not device.bf16:
        found.warn(f"{device.name} has no bf16 arithmetic: it is emulated, slowly", "train.precision")
    if precision == "fp16" and device.kind == "cpu":
        found.warn("a CPU works many times slower in fp16 than in bf16 or fp32", "train.precision")


def _setup(
    config: Config,
    resolved: Resolved,
    choice: Choice,
    device: Device,
    stored: StoredWeights | None,
    *,
    ray: bool,
    steps: int | None,
) -> Setup:
    kept = choice.precision if choice.adapter != "none" else "fp32"
    return Setup(
        strategy=_strategy(config, resolved),
        workers=resolved.world_size,
        shards=config.parallel.shard_size,
        reshard=config.parallel.reshard_after_forward,
        device=device.kind,
        precision="fp32" if choice.precision == "fp32" else "bf16",
        checkpointing=choice.gradient_checkpointing != "none",
        selective=choice.gradient_checkpointing == "selective",
        storage_bits=None if choice.adapter == "none" else resolved.bits,
        dropout=choice.adapter != "none" and config.adapter.dropout > 0,
        ray=ray,
        optimizer=config.train.optimizer,
        thread_cache="tcache_count=0" not in worker_environment(config.cluster, threads=1)["GLIBC_TUNABLES"],
        copies=_saves_behind(config, steps),
        stored_bytes=None if stored is None else stored.size,
        stored_as_computed=stored is None or _STORED.get(stored.dtypes[0] if stored.dtypes else "") == kept,
    )


def _saves_behind(config: Config, steps: int | None) -> bool:
    """Whether a checkpoint is written beside later steps; that of the last step is not. Without steps: if it may be."""
    intervals = [config.checkpoint.every_steps]
    if config.checkpoint.keep_best and config.evaluation.every_steps is not None:
        intervals.append(config.evaluation.every_steps)
    return config.checkpoint.asynchronous and (steps is None or steps > min(intervals))


def _strategy(config: Config, resolved: Resolved) -> Strategy:
    if resolved.strategy != "deepspeed":
        return "ddp" if resolved.strategy == "ddp" else "fsdp"
    stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return stages[deepspeed_config.stage(deepspeed_config.load(config), config)]


def _workload(
    config: Config, resolved: Resolved, blueprint: Blueprint, rows: Rows, micro_batch_size: int, max_length: int
) -> Workload:
    per_step = -(-config.train.global_batch_size // micro_batch_size)
    per_worker = -(-per_step // resolved.world_size)
    packs = resolved.packs
    weighing = Setup(precision="bf16")
    return largest_workload(
        rows.lengths,
        max_length=max_length,
        packing=config.data.packing and packs,
        micro_batch_size=min(micro_batch_size, config.train.global_batch_size) if packs else 1,
        learned=rows.learned,
        micro_batches=rows.steps * per_worker,
        accumulates=per_worker > 1 or not packs,
        weigh=lambda batch: kept_bytes(blueprint, weighing, Workload(batch, sum(batch))),
    )


def _too_large(needed: int, device: Device, changes: tuple[str, ...]) -> ConfigError:
    assert device.memory is not None
    if changes:
        repair = f"the smallest change with which it fits: {' '.join(changes)}"
    else:
        larger = [gpu for gpu in GPUS.values() if (1 - MARGIN) * gpu.memory >= needed]
        smallest = min(larger, key=lambda gpu: gpu.memory, default=None)
        repair = "no change of batch, checkpointing, precision, length or adapter is enough; take a smaller model" + (
            "" if smallest is None or device.kind == "cpu" else f" or a larger GPU, {smallest.name} or more"
        )
    return ConfigError(
        f"a worker needs about {needed / GIB:.1f} GiB, {device.name} has {device.memory / GIB:.1f} GiB"
        + (" for each" if device.kind == "cpu" else ""),
        where="train.micro_batch_size",
        repair=repair,
    )
