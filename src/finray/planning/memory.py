"""The memory part of a plan: what a worker needs and has, and the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, Literal

from finray.config.objectives import keeps_start, reference_run
from finray.config.resolved import Execution, Resolved, Steps
from finray.config.schema import Config
from finray.data.dataset.run_data import decide_steps
from finray.data.sampling.order import permutation
from finray.data.sampling.packing import one_row_each, plan_packs
from finray.errors import ConfigError
from finray.hardware import missing_for_kernels
from finray.parallel.deepspeed import config as deepspeed_config
from finray.planning.blueprint import Blueprint, ModelShape, build_blueprint
from finray.planning.estimate import MemoryEstimate, Setup, Strategy, Workload, estimate, reference_bytes
from finray.planning.findings import Findings
from finray.planning.placement import GPUS, Device, slow_precision
from finray.training.cpu_checks import refusals_on_cpu

GIB = 2**30
# What is left free: other programs on the device, and what an estimate does not see.
MARGIN = 0.05
# Micro-batches that are looked at for the largest; more add little to it.
_MOST_BATCHES = 4096
_STORED = {"F32": "fp32", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class RowSample:
    """The properties of the data on which memory depends."""

    lengths: Sequence[int] = ()  # tokens of the rows, or of a sample; none stand for rows as long as they may be
    longest: int = 0  # tokens of the longest
    learned: float = 1.0  # share of the tokens that are targets
    total_steps: int | None = None  # optimizer steps of the run, where that is known
    steps: Steps | None = None  # how they form steps, where that is known
    joined: int | None = None  # of pairs, whose lengths these are: tokens of their largest pass


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a worker needs at its peak, in bytes."""

    device: str
    precision: str
    parts: dict[str, int]
    total: int
    phase: str  # when in a step that is
    tokens: int  # of the largest micro-batch
    available: int | None  # what a worker may have, where that is known
    fits: bool | None
    offloaded: int = 0  # bytes that it needs in CPU memory beside that, where it has a GPU
    changes: tuple[str, ...] = ()  # where it does not fit, the smallest set of overrides with which it does
    faster: tuple[str, ...] = ()  # where it fits, overrides with which it still does, and computes less or more at once


def plan_memory(
    config: Config,
    execution: Execution,
    shape: ModelShape,
    device: Device,
    rows: RowSample,
    findings: Findings,
    *,
    workers: int,
    ray: bool = True,
    waiting: float | None = None,
) -> MemoryPlan:
    """Estimate a worker's peak, and look for a change if it does not fit; problems and warnings go to ``findings``.

    ``waiting`` is that of :class:`finray.planning.flops.SpeedPlan`, where the speed is known.
    """
    if (slow := slow_precision(execution.precision, device)) is not None:
        findings.warn(slow.message, slow.where, slow.repair)
    if device.kind == "cpu":
        for refusal in refusals_on_cpu(config):
            findings.problem(refusal)
    steps = rows.steps or decide_steps(config.train, packs=None)
    now = MemoryChoice.of(config, execution, steps, workers)
    peak = _peaks(config, execution, shape, device, rows, now, ray=ray)
    needed, work = peak(now)
    failure = shape.probe.failure
    if failure:
        findings.warn(f"the estimate of activation memory is rough ({failure})", "model.name")

    def fits(choice: MemoryChoice) -> bool:
        return device.memory is None or peak(choice)[0].total <= (1 - MARGIN) * device.memory

    changes: tuple[str, ...] = ()
    faster: tuple[str, ...] = ()
    if device.kind == "cuda" and device.memory is not None and fits(now):
        if waiting is None:
            waiting = max(1.0, BUSY / (now.micro_batch_size * now.max_length))
        share = -(-steps.global_batch_size // workers)
        faster = fastest(now, fits, share=share, waiting=waiting).overrides_from(now)
    if device.memory is not None and not fits(now):
        others = _others(config, execution, device, workers)
        better = smallest_change(now, fits, longest=rows.longest, others=others)
        if better is not None:
            changes = better.overrides_from(now)
            repair = f"the smallest change that makes it fit: {' '.join(changes)}"
            ways = [way for way in single_changes(now, fits, others) if (way,) != changes]
            repair += "".join(f", or {way}" for way in ways)
        else:
            repair = "no change of settings or number of workers is enough; take a smaller model"
            larger = [gpu for gpu in GPUS.values() if (1 - MARGIN) * gpu.memory >= needed.total]
            if larger and device.kind == "cuda":
                repair += f" or a larger GPU, {min(larger, key=lambda gpu: gpu.memory).name} or more"
        has = f"{device.memory / GIB:.1f} GiB{' for each' if device.kind == 'cpu' else ''}"
        findings.problem(
            ConfigError(
                f"a worker needs about {needed.total / GIB:.1f} GiB, but {device.name} has {has}",
                where=changes[0].partition("=")[0] if changes else "model.name",
                repair=repair,
            )
        )
    return MemoryPlan(
        device=device.name,
        precision=now.precision,
        parts=dict(needed.parts),
        total=needed.total,
        phase=needed.phase,
        tokens=sum(work.rows),
        available=device.memory,
        fits=None if device.memory is None else fits(now),
        offloaded=needed.offloaded,
        changes=changes,
        faster=faster,
    )


def worst_peak(
    config: Config,
    execution: Execution,
    shape: ModelShape,
    device: Device,
    *,
    workers: int,
    checkpointing: str | None = None,
    rows: RowSample | None = None,
    size: int | None = None,
) -> int:
    """Peak bytes of a worker whose rows are all as long as they may be, and all of whose tokens are learned; with
    micro-batches of another ``size``, if that is given."""
    if checkpointing is not None:
        train = config.train.model_copy(update={"gradient_checkpointing": checkpointing})
        config = config.model_copy(update={"train": train})
    rows = rows or RowSample()
    now = MemoryChoice.of(config, execution, rows.steps or decide_steps(config.train, packs=None), workers)
    now = now if size is None else replace(now, micro_batch_size=size)
    return _peaks(config, execution, shape, device, rows, now, ray=True)(now)[0].total


def _peaks(
    config: Config,
    execution: Execution,
    shape: ModelShape,
    device: Device,
    rows: RowSample,
    now: MemoryChoice,
    *,
    ray: bool,
) -> Callable[[MemoryChoice], tuple[MemoryEstimate, Workload]]:
    """A function that estimates the peak for another choice than that of ``now``."""
    # A strategy from outside is taken to keep everything on every worker.
    named: Strategy = "fsdp" if execution.strategy == "fsdp" else "ddp"
    given: dict[str, Any] = {}
    if execution.strategy == "deepspeed":
        stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        given = deepspeed_config.load(config)
        named = stages[deepspeed_config.stage(given, config)]
    steps = rows.steps or decide_steps(config.train, packs=None)
    in_file = {name for name, section in given.get("zero_optimization", {}).items() if _is_on_cpu(section)}
    # The number of steps in an epoch is not known here: assume that every step saves.
    saved, judged = config.checkpoint, config.evaluation
    intervals = [saved.every_steps if saved.every_epochs is None else 1]
    if saved.keep_best and (judged.every_steps or judged.every_epochs):
        intervals.append(judged.every_steps if judged.every_steps and judged.every_epochs is None else 1)
    # Whether a checkpoint is written beside later steps; that of the last step is not.
    copies = config.checkpoint.asynchronous and (rows.total_steps is None or rows.total_steps > min(intervals))
    shapes: dict[str, ModelShape] = {config.adapter.method: shape}

    def setup_of(choice: MemoryChoice) -> Setup:
        stored, trained = shape.stored, choice.adapter == "none"
        # Files in the dtype in which weights are kept are mapped, and not copied.
        weights: Literal["fp32", "bf16"] = "bf16" if choice.precision == "bf16-true" else "fp32"
        kept_as = weights if trained else choice.precision
        mapped = stored is None or (stored.dtypes and _STORED.get(stored.dtypes[0]) == kept_as)
        # The choice of `auto` with more workers than one that has too little memory.
        more = config.parallel.strategy == "auto" and choice.num_workers > now.num_workers
        strategy: Strategy = "fsdp" if more else named
        offload, on_gpu = choice.cpu_offload and strategy != "ddp", device.kind == "cuda"
        setup = Setup(
            strategy=strategy,
            workers=choice.num_workers,
            shards=config.parallel.shard_size,
            device=device.kind,
            precision="fp32" if choice.precision == "fp32" else "bf16",
            weights=weights,
            checkpointing=choice.gradient_checkpointing,
            storage_bits=None if trained else execution.bits,
            reshard=config.parallel.reshard_after_forward,
            ray=ray,
            optimizer=choice.optimizer,
            copies=copies,
            read_bytes=0 if mapped or stored is None else stored.size,
            optimizer_offload=on_gpu and (offload or "offload_optimizer" in in_file),
            weight_offload=on_gpu and ((offload and strategy in ("fsdp", "zero3")) or "offload_param" in in_file),
            activation_offload=on_gpu and choice.activation_offload,
            attention_kernel=execution.packs and missing_for_kernels() is None,
        )
        compared = reference() if choice.adapter == config.adapter.method else None
        if compared is None:
            return setup
        return replace(setup, reference=reference_bytes(compared, setup, is_copy=keeps_start(config)))

    @cache
    def reference() -> Blueprint | None:
        """Of the reference that is computed in the step, where it takes memory."""
        other, settings = reference_run(config), config.preference
        if other is None or not settings.reference_in_step:
            return shape.blueprint if keeps_start(config) else None
        return build_blueprint(other.model, other.adapter) if settings.names_model else shape.blueprint

    weigh = shape.probe.measure(setup_of(now).arithmetic).kept

    @cache
    def workload(micro_batch_size: int, max_length: int, workers: int) -> Workload:
        per_step = -(-steps.global_batch_size // micro_batch_size)
        per_worker = -(-per_step // workers)
        return largest_workload(
            rows.lengths,
            max_length=rows.joined or min(max_length, steps.pack_length or max_length),
            packing=config.data.packing and execution.packs,
            micro_batch_size=min(micro_batch_size, steps.global_batch_size) if execution.packs else 1,
            learned=rows.learned,
            micro_batches=(rows.total_steps or 1) * per_worker,
            accumulates=per_worker > 1 or not execution.packs,
            weigh=weigh,
        )

    def peak(choice: MemoryChoice) -> tuple[MemoryEstimate, Workload]:
        if choice.adapter not in shapes:
            shapes[choice.adapter] = shape.with_lora(config.adapter.rank)
        setup, work = setup_of(choice), workload(choice.micro_batch_size, choice.max_length, choice.num_workers)
        model = shapes[choice.adapter]
        return estimate(model.blueprint, model.probe.measure(setup.arithmetic), setup, work), work

    return peak


# --- the largest micro-batch ----------------------------------------------------------------------------------------


def largest_workload(
    lengths: Sequence[int],
    *,
    max_length: int,
    packing: bool,
    micro_batch_size: int,
    learned: float,
    micro_batches: int,
    accumulates: bool,
    weigh: Callable[[tuple[int, ...]], float],
) -> Workload:
    """Form micro-batches as training does, in an order of their own, and take the heaviest.

    Args:
        lengths: tokens of the rows, or of a sample of them; longer ones are cut at ``max_length``.
        max_length: most tokens in a row and in a pack.
        packing: whether rows share packs.
        micro_batch_size: packs (or rows) in a micro-batch.
        learned: share of the tokens that are targets.
        micro_batches: how many of them a worker meets in the run.
        accumulates: whether it meets several in a step.
        weigh: bytes that rows of these lengths keep.

    Returns:
        The workload. Where no lengths are known, full rows are taken.
    """
    rows = [min(length, max_length) for length in lengths] or [max_length]
    plan = (plan_packs if packing else one_row_each)(rows, max_length)
    order = permutation(len(plan), "largest-workload").tolist()
    if not lengths:
        order = order * micro_batch_size
    batches = []
    for start in range(0, min(len(order), _MOST_BATCHES * micro_batch_size), micro_batch_size):
        packs = order[start : start + micro_batch_size]
        batches.append(tuple(rows[row] for pack in packs for row in plan.pack(pack)))
    heaviest = max(batches, key=weigh)
    tokens = sum(heaviest)
    met = max(1, micro_batches)
    return Workload(
        rows=heaviest,
        # Never more than there are; the first token of a row is no target.
        targets=max(1, min(tokens - len(heaviest), round(learned * tokens))),
        accumulates=accumulates,
        token_counts=min(met, len({sum(batch) for batch in batches})),
        row_lengths=min(met * max(len(batch) for batch in batches), len(set(rows))),
    )


# --- the smallest change with which a run fits ----------------------------------------------------------------------

# The relative cost of a change: less is better. A smaller micro-batch changes nothing that is learned; checkpointing
# and offloading cost time, workers money; an 8-bit optimizer and bf16 round, shorter rows lose text, and an adapter
# trains something else.
_COSTS = {
    "micro_batch_size": 1.0,
    "gradient_checkpointing": 2.0,
    "activation_offload": 2.5,
    "shorter_packs": 3.0,
    "precision": 4.0,
    "cpu_offload": 5.0,
    "num_workers": 6.0,
    "optimizer": 9.0,
}
# Weights in bf16 round more than an 8-bit optimizer does.
_BF16_WEIGHTS = 10.0
_LOSES_TEXT = 20.0
_ADAPTER = 64.0
_SHORTEST = 128
_PATHS = {
    "micro_batch_size": "train.micro_batch_size",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "precision": "train.precision",
    "max_length": "data.max_length",
    "adapter": "adapter.method",
    "optimizer": "train.optimizer",
    "activation_offload": "train.activation_offload",
    "cpu_offload": "parallel.cpu_offload",
    "num_workers": "cluster.num_workers",
}
SIZES = tuple(2**power for power in range(8))
# Tokens of a micro-batch that are enough for any GPU, more or less: more are not suggested.
BUSY = 16_384


def relief(config: Config, execution: Resolved, device: Device, *, workers: int, less: int) -> tuple[str, ...]:
    """The cheapest overrides that reduce a worker's memory by so many bytes; empty if none do.

    For a run that ran out of memory, regardless of the estimate.
    """
    from finray.planning.blueprint import model_shape

    shape = model_shape(config.model, config.adapter, packs=execution.is_told)
    now = MemoryChoice.of(config, execution, execution, workers)
    peak = _peaks(config, execution, shape, device, RowSample(), now, ray=True)
    most = peak(now)[0].total - less
    better = smallest_change(
        now,
        lambda choice: peak(choice)[0].total <= most,
        longest=config.data.max_length,
        others=_others(config, execution, device, workers),
    )
    return () if better is None else better.overrides_from(now)


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """The fields that may be changed, as the run has them."""

    micro_batch_size: int
    gradient_checkpointing: str
    precision: str
    max_length: int
    adapter: str
    optimizer: str = "adamw"
    activation_offload: bool = False
    cpu_offload: bool = False
    num_workers: int = 1

    @classmethod
    def of(cls, config: Config, execution: Execution, steps: Steps, workers: int) -> MemoryChoice:
        """That of a config."""
        train = config.train
        return cls(
            steps.micro_batch_size,
            train.gradient_checkpointing,
            "bf16-true" if execution.weights == "bf16" else execution.precision,
            config.data.max_length,
            config.adapter.method,
            train.optimizer,
            train.activation_offload,
            config.parallel.cpu_offload,
            workers,
        )

    def overrides_from(self, before: MemoryChoice) -> tuple[str, ...]:
        """The differences from another choice, as overrides of the command line."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(before, field.name)]
        return tuple(f"{_PATHS[name]}={str(getattr(self, name)).lower()}" for name in changed)


def _others(config: Config, execution: Execution, device: Device, workers: int) -> dict[str, list[Any]]:
    """What the optimizer, offloading and the number of workers may be changed to where that is of use."""
    changes: dict[str, list[Any]] = {}
    if config.train.optimizer == "adamw" and execution.strategy != "deepspeed":
        changes["optimizer"] = ["adamw_8bit"]
        if config.adapter.method == "none" and device.bf16 and execution.weights != "bf16":
            changes["precision"] = ["bf16-true"]
    if device.kind == "cuda":
        changes["activation_offload"] = [True]
        # Not tested with FSDP2 on a GPU.
        if execution.strategy == "deepspeed" and not config.parallel.deepspeed_config:
            changes["cpu_offload"] = [True]
        if execution.strategy != "ddp" or config.parallel.strategy == "auto":
            changes["num_workers"] = [workers * factor for factor in (2, 4, 8)]
    return changes


def _is_on_cpu(offload: Any) -> bool:
    return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")


def _halved(value: int, least: int) -> list[int]:
    values = [value]
    while values[-1] // 2 >= least:
        values.append(values[-1] // 2)
    return values


def smallest_change(
    now: MemoryChoice,
    fits: Callable[[MemoryChoice], bool],
    *,
    longest: int,
    others: Mapping[str, Sequence[Any]] | None = None,
) -> MemoryChoice | None:
    """The cheapest choice that fits; None if none does.

    Every combination is tried, from the one that changes least on, so what is returned holds no change that it could
    do without. Packs may become as short as the longest row without losing text.

    Args:
        now: the present choice.
        fits: whether a choice fits.
        longest: tokens of the longest row.
        others: values of further fields that may be tried.
    """

    def cost(choice: MemoryChoice) -> float:
        total = _ADAPTER * (choice.adapter != now.adapter)
        if choice.micro_batch_size != now.micro_batch_size:
            # The largest that fits: of two smaller ones, the one that is less so.
            total += _COSTS["micro_batch_size"] + 0.01 * (now.micro_batch_size / choice.micro_batch_size)
        if choice.precision != now.precision:
            total += _BF16_WEIGHTS if choice.precision == "bf16-true" else _COSTS["precision"]
        for name in ("gradient_checkpointing", "optimizer", "activation_offload", "cpu_offload"):
            total += _COSTS[name] * (getattr(choice, name) != getattr(now, name))
        if choice.num_workers != now.num_workers:
            total += _COSTS["num_workers"] + 0.1 * (choice.num_workers / now.num_workers)
        if choice.max_length != now.max_length:
            halvings = (now.max_length / choice.max_length - 1) * 0.5
            whole = choice.max_length >= longest
            total += _COSTS["shorter_packs"] + halvings if whole else _LOSES_TEXT * (1 + halvings)
        return total

    values: dict[str, set[Any]] = {
        "micro_batch_size": set(_halved(now.micro_batch_size, 1)),
        "gradient_checkpointing": {"full"},
        "precision": {"bf16"},
        "max_length": set(_halved(now.max_length, _SHORTEST)),
        "adapter": {"lora"} if now.adapter == "none" else set(),
    }
    values |= {name: values.get(name, set()) | set(options) for name, options in (others or {}).items()}
    names = [field.name for field in fields(now)]
    choices = (
        MemoryChoice(*chosen) for chosen in product(*({getattr(now, name)} | values.get(name, set()) for name in names))
    )
    # An adapter is trained in fp32, and only AdamW rounds stochastically.
    choices = (
        choice
        for choice in choices
        if choice.precision != "bf16-true" or (choice.adapter, choice.optimizer) == ("none", "adamw")
    )
    return next((choice for choice in sorted(choices, key=cost) if fits(choice)), None)


def single_changes(
    now: MemoryChoice, fits: Callable[[MemoryChoice], bool], others: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    """Overrides that are each enough alone: the first such value of each field."""
    for name, values in others.items():
        choices = (replace(now, **{name: value}) for value in values)
        enough = next((choice for choice in choices if choice != now and fits(choice)), None)
        if enough is not None:
            yield from enough.overrides_from(now)


def fastest(now: MemoryChoice, fits: Callable[[MemoryChoice], bool], *, share: int, waiting: float) -> MemoryChoice:
    """The fastest choice that fits on a GPU and changes nothing that is learned.

    Args:
        now: the present choice, which fits.
        fits: whether a choice fits.
        share: packs (or rows) of a step that a worker has.
        waiting: times its arithmetic that a micro-batch takes now, because the host launches its kernels no faster.
    """

    def slowness(choice: MemoryChoice) -> float:
        # A recomputed forward pass is a third of a step's work.
        again = {"none": 1.0, "selective": 1.1}.get(choice.gradient_checkpointing, 4 / 3)
        launching = max(1.0, waiting * now.micro_batch_size / choice.micro_batch_size)
        moving = (1.5 if choice.cpu_offload else 1.0) * (1.15 if choice.activation_offload else 1.0)
        return again * launching * moving

    choices = [
        replace(now, micro_batch_size=size, gradient_checkpointing=kept, activation_offload=moved, cpu_offload=offload)
        for size in {
            now.micro_batch_size,
            *(size for size in SIZES if now.micro_batch_size < size <= min(share, BUSY // now.max_length)),
        }
        for kept in {now.gradient_checkpointing, "none", "selective"}
        for moved in {now.activation_offload, False}
        for offload in {now.cpu_offload, False}
    ]
    choices = sorted(choices, key=lambda choice: (slowness(choice), choice.micro_batch_size))
    # Nobody changes a file for a few percent.
    return next((choice for choice in choices if slowness(choice) < 0.95 * slowness(now) and fits(choice)), now)
