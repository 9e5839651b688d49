"""Formulas for the bytes that workers exchange per step, and for the time that this takes.

They follow the code. `parallel/ddp.py` all-reduces fp32 gradients once per step. `parallel/fsdp.py` all-gathers weights
in the compute dtype for every forward pass, the weights of the layers again for the backward pass if they were
resharded, and reduce-scatters fp32 gradients in every micro-batch. DeepSpeed's ZeRO 1 and 2 reduce gradients in the
compute dtype (ZeRO 2 in every micro-batch), each worker keeps its shard, and the new weights are all-gathered; ZeRO 3
all-gathers all weights for the forward pass and again for the backward pass, if they are too large to be kept.
`tests/integration/test_volumes.py` compares the formulas with bytes counted on Gloo.
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
        kind: the collective.
        size: bytes of the whole tensors, over all calls of the step.
        group: workers that take part in one collective.
        hidden: whether it overlaps with the computation of the next layer.
        across: whether a group has one worker on each machine, and the other workers there are in groups of the same
            kind.
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
        micro_batches: forward passes of each worker per step.
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
        # The backward pass ends before a frozen embedding.
        again = blueprint.parameters - (blueprint.embedding if blueprint.adapter else 0)
    else:
        # The decoder layers with their adapters are gathered and resharded one by one.
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
        gpus: GPUs per machine.
        network: bytes per second into each machine, and out of it.
        inside: bytes per second between the GPUs of a machine, per GPU.
    """

    gpus: int
    network: float
    inside: float


def seconds(exchange: Exchange, machines: Machines) -> float:
    """Seconds of an exchange in rings: a machine receives data over the network once and forwards it inside."""
    passes = 2 if exchange.kind == "all_reduce" else 1
    if exchange.across:
        return passes * (exchange.group - 1) / exchange.group * exchange.size * machines.gpus / machines.network
    inside, outside = min(exchange.group, machines.gpus), -(-exchange.group // machines.gpus)
    per_byte = (inside - 1) / inside / machines.inside
    # A group that fits into a machine needs no network.
    per_byte += (outside - 1) / outside / machines.network if outside > 1 else 0.0
    return passes * exchange.size * per_byte
