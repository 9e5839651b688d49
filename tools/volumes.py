"""Bytes that the workers of a step exchange, and how long that takes: formulas over shapes.

They follow the code. `parallel/ddp.py` sums fp32 gradients once per step. `parallel/fsdp.py` gathers weights in the
arithmetic's dtype for every forward pass, those of the layers again for the backward pass where they were given back,
and sums fp32 gradients into shares in every micro-batch. DeepSpeed's ZeRO 1 and 2 sum whole gradients in the
arithmetic's dtype (2 in every micro-batch), of which each worker keeps its share, and gather the new weights; ZeRO 3
gathers all weights for the forward pass and again for the backward pass, as long as they are too large to be kept.
`tests/integration/test_volumes.py` compares them with bytes counted on gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finray.planning.blueprint import Blueprint
from finray.planning.estimate import FP32, Setup

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind in an optimizer step.

    Attributes:
        kind: of collective.
        size: bytes of the whole tensors, over all calls of the step.
        group: workers that take part in one of them.
        hidden: whether it goes on while the next layer is computed.
        across: whether a group has one worker in each machine, while the other workers there are in groups like it.
    """

    kind: Kind
    size: float
    group: int
    hidden: bool
    across: bool = False

    @property
    def sent(self) -> float:
        """Bytes that each worker sends, and receives, in a ring."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (self.group - 1) / self.group * self.size


def exchanges(blueprint: Blueprint, setup: Setup, *, micro_batches: int) -> tuple[Exchange, ...]:
    """What the workers exchange in one optimizer step.

    Args:
        blueprint: the model with its adapter.
        setup: strategy, workers and precision.
        micro_batches: forward passes of each worker in the step.
    """
    trained, workers, sharers = blueprint.trainable, setup.workers, setup.sharers
    if workers == 1:
        return ()
    if setup.strategy == "ddp":
        return (Exchange("all_reduce", FP32 * trained, workers, hidden=False),)
    if setup.strategy in ("zero1", "zero2"):
        times = 1 if setup.strategy == "zero1" else micro_batches
        return (
            Exchange("all_reduce", setup.element * trained * times, workers, hidden=setup.strategy == "zero2"),
            Exchange("all_gather", setup.element * trained, workers, hidden=False),
        )
    if setup.strategy == "zero3":
        # Gradients end before a frozen embedding.
        again = blueprint.parameters - (blueprint.embedding if blueprint.adapter else 0)
    else:
        # The decoder layers with their adapters are gathered and given back one by one.
        again = blueprint.layer * blueprint.layers + blueprint.adapter if setup.reshard else 0
    gathered = setup.element * (blueprint.parameters + again) * micro_batches
    summed = (setup.element if setup.strategy == "zero3" else FP32) * trained * micro_batches
    found = []
    if sharers > 1:
        found.append(Exchange("all_gather", gathered, sharers, hidden=True))
        found.append(Exchange("reduce_scatter", summed, sharers, hidden=True))
    if sharers < workers:
        found.append(Exchange("all_reduce", summed / sharers, workers // sharers, hidden=True, across=True))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Machines:
    """Where workers are.

    Attributes:
        gpus: in each machine.
        network: bytes a second into each machine, and out of it.
        inside: bytes a second between the GPUs of a machine, for each.
    """

    gpus: int
    network: float
    inside: float


def seconds(exchange: Exchange, machines: Machines) -> float:
    """How long an exchange takes in rings: what every machine gets over the network once, and hands on inside."""
    passes = 2 if exchange.kind == "all_reduce" else 1
    if exchange.across:
        return passes * (exchange.group - 1) / exchange.group * exchange.size * machines.gpus / machines.network
    inside, outside = min(exchange.group, machines.gpus), -(-exchange.group // machines.gpus)
    per_byte = (inside - 1) / inside / machines.inside
    # A group that fits into a machine needs no network.
    per_byte += (outside - 1) / outside / machines.network if outside > 1 else 0.0
    return passes * exchange.size * per_byte
