"""The memory part of a plan: what a worker needs, what it has, and the smallest change where that is too little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import product

from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.data.sampling.order import permutation
from finray.data.sampling.packing import one_row_each, plan_packs
from finray.errors import ConfigError
from finray.parallel.deepspeed import config as deepspeed_config
from finray.planning.blueprint import ModelShape
from finray.planning.estimate import Estimate, Setup, Strategy, Workload, estimate
from finray.planning.findings import Findings
from finray.planning.placement import GPUS, Device
from finray.training.cpu_checks import refusals_on_cpu

GIB = 2**30
# What is left free: other programs on the device, and what an estimate does not see.
MARGIN = 0.05
# Micro-batches that are looked at for the largest; more add little to it.
_MOST_BATCHES = 4096
_STORED = {"F32": "fp32", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class Rows:
    """What the memory of a run depends on in its data."""

    lengths: Sequence[int] = ()  # tokens of the rows, or of a sample; none stand for rows as long as they may be
    longest: int = 0  # tokens of the longest
    learned: float = 1.0  # share of the tokens that are targets
    steps: int | None = None  # optimizer steps of the run, where that is known


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
    changes: tuple[str, ...] = ()  # where it does not fit, the smallest set of overrides with which it does


def plan_memory(
    config: Config,
    resolved: Resolved,
    shape: ModelShape,
    device: Device,
    rows: Rows,
    found: Findings,
    *,
    ray: bool = True,
) -> MemoryPlan:
    """Estimate a worker's peak, and look for a change where it does not fit; ``found`` takes problems and warnings."""
    if resolved.precision == "bf16" and not device.bf16:
        found.warn(f"{device.name} has no bf16 arithmetic: it is emulated, slowly", "train.precision")
    if resolved.precision == "fp16" and device.kind == "cpu":
        found.warn("a CPU works many times slower in fp16 than in bf16 or fp32", "train.precision")
    if device.kind == "cpu":
        for refusal in refusals_on_cpu(config):
            found.problem(refusal)
    now = Choice.of(config, resolved)
    peak = _peaks(config, resolved, shape, device, rows, ray=ray)
    needed, work = peak(now)
    failure = shape.probe.failure
    if failure:
        found.warn(f"what its layers keep for the backward pass is a rough guess ({failure})", "model.name")

    def fits(choice: Choice) -> bool:
        return device.memory is None or peak(choice)[0].total <= (1 - MARGIN) * device.memory

    changes: tuple[str, ...] = ()
    if device.memory is not None and not fits(now):
        better = smallest_change(now, fits, longest=rows.longest)
        if better is not None:
            changes = better.overrides_from(now)
            repair = f"the smallest change with which it fits: {' '.join(changes)}"
        else:
            repair = "no change of batch, checkpointing, precision, length or adapter is enough; take a smaller model"
            larger = [gpu for gpu in GPUS.values() if (1 - MARGIN) * gpu.memory >= needed.total]
            if larger and device.kind == "cuda":
                repair += f" or a larger GPU, {min(larger, key=lambda gpu: gpu.memory).name} or more"
        has = f"{device.memory / GIB:.1f} GiB{' for each' if device.kind == 'cpu' else ''}"
        found.problem(
            ConfigError(
                f"a worker needs about {needed.total / GIB:.1f} GiB, {device.name} has {has}",
                where="train.micro_batch_size",
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
        changes=changes,
    )


def worst_peak(
    config: Config, resolved: Resolved, shape: ModelShape, device: Device, *, checkpointing: str | None = None
) -> int:
    """Peak bytes of a worker whose rows are all as long as they may be, and all of whose tokens are learned."""
    if checkpointing is not None:
        train = config.train.model_copy(update={"gradient_checkpointing": checkpointing})
        config = config.model_copy(update={"train": train})
    peak = _peaks(config, resolved, shape, device, Rows(), ray=True)
    return peak(Choice.of(config, resolved))[0].total


def _peaks(
    config: Config, resolved: Resolved, shape: ModelShape, device: Device, rows: Rows, *, ray: bool
) -> Callable[[Choice], tuple[Estimate, Workload]]:
    """A function that estimates the peak for a choice of what may be changed."""
    # A strategy from outside is taken to keep everything on every worker.
    strategy: Strategy = "fsdp" if resolved.strategy == "fsdp" else "ddp"
    if resolved.strategy == "deepspeed":
        stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        strategy = stages[deepspeed_config.stage(deepspeed_config.load(config), config)]
    intervals = [config.checkpoint.every_steps]
    if config.checkpoint.keep_best and config.evaluation.every_steps is not None:
        intervals.append(config.evaluation.every_steps)
    # Whether a checkpoint is written beside later steps; that of the last step is not.
    copies = config.checkpoint.asynchronous and (rows.steps is None or rows.steps > min(intervals))
    shapes: dict[str, ModelShape] = {config.adapter.method: shape}

    def setup_of(choice: Choice) -> Setup:
        stored, trained = shape.stored, choice.adapter == "none"
        # Files in the dtype in which weights are kept are mapped, and not copied.
        kept_as = "fp32" if trained else choice.precision
        mapped = stored is None or (stored.dtypes and _STORED.get(stored.dtypes[0]) == kept_as)
        return Setup(
            strategy=strategy,
            workers=resolved.world_size,
            shards=config.parallel.shard_size,
            device=device.kind,
            precision="fp32" if choice.precision == "fp32" else "bf16",
            checkpointing=choice.gradient_checkpointing,
            storage_bits=None if trained else resolved.bits,
            reshard=config.parallel.reshard_after_forward,
            ray=ray,
            optimizer=config.train.optimizer,
            copies=copies,
            read_bytes=0 if mapped or stored is None else stored.size,
        )

    weigh = shape.probe.measure(setup_of(Choice.of(config, resolved)).arithmetic).kept

    @cache
    def workload(micro_batch_size: int, max_length: int) -> Workload:
        per_step = -(-config.train.global_batch_size // micro_batch_size)
        per_worker = -(-per_step // resolved.world_size)
        return largest_workload(
            rows.lengths,
            max_length=max_length,
            packing=config.data.packing and resolved.packs,
            micro_batch_size=min(micro_batch_size, config.train.global_batch_size) if resolved.packs else 1,
            learned=rows.learned,
            micro_batches=(rows.steps or 1) * per_worker,
            accumulates=per_worker > 1 or not resolved.packs,
            weigh=weigh,
        )

    def peak(choice: Choice) -> tuple[Estimate, Workload]:
        if choice.adapter not in shapes:
            shapes[choice.adapter] = shape.with_lora(config.adapter.rank)
        setup, work = setup_of(choice), workload(choice.micro_batch_size, choice.max_length)
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
    found = []
    for start in range(0, min(len(order), _MOST_BATCHES * micro_batch_size), micro_batch_size):
        packs = order[start : start + micro_batch_size]
        found.append(tuple(rows[row] for pack in packs for row in plan.pack(pack)))
    heaviest = max(found, key=weigh)
    tokens = sum(heaviest)
    met = max(1, micro_batches)
    return Workload(
        rows=heaviest,
        # Never more than there are; the first token of a row is no target.
        targets=max(1, min(tokens - len(heaviest), round(learned * tokens))),
        accumulates=accumulates,
        token_counts=min(met, len({sum(batch) for batch in found})),
        row_lengths=min(met * max(len(batch) for batch in found), len(set(rows))),
    )


# --- the smallest change with which a run fits ----------------------------------------------------------------------

# What a change costs, in no unit: less is better. A smaller micro-batch changes nothing that is learned, checkpointing
# costs time, bf16 rounds, shorter rows lose text, and an adapter trains something else.
_COSTS = {"micro_batch_size": 1.0, "gradient_checkpointing": 2.0, "precision": 4.0, "shorter_packs": 3.0}
_LOSES_TEXT = 8.0
_ADAPTER = 64.0
_SHORTEST = 128
_PATHS = {
    "micro_batch_size": "train.micro_batch_size",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "precision": "train.precision",
    "max_length": "data.max_length",
    "adapter": "adapter.method",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The fields that may be changed, as the run has them."""

    micro_batch_size: int
    gradient_checkpointing: str
    precision: str
    max_length: int
    adapter: str

    @classmethod
    def of(cls, config: Config, resolved: Resolved) -> Choice:
        """That of a config."""
        train = config.train
        return cls(
            train.micro_batch_size,
            train.gradient_checkpointing,
            resolved.precision,
            config.data.max_length,
            config.adapter.method,
        )

    def overrides_from(self, before: Choice) -> tuple[str, ...]:
        """What differs from another choice, as overrides of the command line."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(before, field.name)]
        return tuple(f"{_PATHS[name]}={str(getattr(self, name)).lower()}" for name in changed)


def smallest_change(now: Choice, fits: Callable[[Choice], bool], *, longest: int) -> Choice | None:
    """The choice that fits and differs least from the present one; None where none does.

    Every combination is tried, from the one that changes least on, so what is returned holds no change that it could
    do without. Packs may become as short as the longest row without losing text.
    """

    def halved(value: int, least: int) -> list[int]:
        found = [value]
        while found[-1] // 2 >= least:
            found.append(found[-1] // 2)
        return found

    def cost(choice: Choice) -> float:
        total = _ADAPTER * (choice.adapter != now.adapter)
        if choice.micro_batch_size != now.micro_batch_size:
            # The largest that fits: of two smaller ones, the one that is less so.
            total += _COSTS["micro_batch_size"] + 0.01 * (now.micro_batch_size / choice.micro_batch_size)
        for name in ("gradient_checkpointing", "precision"):
            total += _COSTS[name] * (getattr(choice, name) != getattr(now, name))
        if choice.max_length != now.max_length:
            halvings = (now.max_length / choice.max_length - 1) * 0.5
            whole = choice.max_length >= longest
            total += _COSTS["shorter_packs"] + halvings if whole else _LOSES_TEXT * (1 + halvings)
        return total

    choices = (
        Choice(*fields_)
        for fields_ in product(
            halved(now.micro_batch_size, 1),
            {now.gradient_checkpointing, "full"},
            {now.precision, "bf16"},
            halved(now.max_length, _SHORTEST),
            {now.adapter, "lora" if now.adapter == "none" else now.adapter},
        )
    )
    return next((choice for choice in sorted(choices, key=cost) if fits(choice)), None)
