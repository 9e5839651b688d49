"""Resolves ``train.micro_batch_size: auto``. Imports torch only to estimate memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finray.config.objectives import objective_spec
from finray.config.resolved import Execution, Steps
from finray.config.schema import Config
from finray.planning.placement import Device

if TYPE_CHECKING:
    from finray.planning.blueprint import ModelShape

# Share of a GPU's memory that a chosen size may need by the estimate, which has been seen 10 % too low.
_ROOM = 0.7


def choose_micro_batch(
    config: Config, execution: Execution, steps: Steps, device: Device, shape: ModelShape | None, *, workers: int
) -> tuple[int, str]:
    """Packs (or rows) of a micro-batch of a run that begins, and why so many.

    On a GPU the smallest power of two whose arithmetic takes longer than the host needs to launch it. Packs are taken
    to be full and all tokens learned, so that the choice does not depend on how much of the data is known. ``shape`` is
    built where it is None and needed; ``workers`` are the most that there may be. Raises ModelError: the model's
    configuration cannot be loaded.
    """
    if config.train.micro_batch_size != "auto":
        return config.train.micro_batch_size, "the config sets it"
    if device.kind == "cpu":
        return 1, "a CPU is busy with one"
    if not execution.is_told or execution.strategy not in ("ddp", "fsdp"):
        return 1, "more are chosen only for packed rows, with ddp or fsdp"
    if device.memory is None or device.tflops is None:
        return 1, f"the memory or the rate of {device.name} is not known"
    from finray.planning.blueprint import model_shape
    from finray.planning.flops import busy_tokens, flops_per_token
    from finray.planning.memory import BUSY, RowSample, worst_peak

    model = model_shape(config.model, config.adapter, packs=True) if shape is None else shape
    # A product with weights is the least that a token takes: its attention depends on the rows.
    flops = flops_per_token(model.blueprint, row=0, learned=1.0, checkpointing=False)
    busy = busy_tokens(model.blueprint, flops, tflops=device.tflops)
    objective = objective_spec(config)
    joined = config.data.max_length * (2 if objective.in_groups else int(objective.counts_rows)) or None
    pack = joined or steps.pack_length or config.data.max_length
    size, rows = 1, RowSample(steps=steps, joined=joined)
    while size * pack < busy:
        more = 2 * size
        if steps.global_batch_size % (more * workers):
            return size, f"a step of {steps.global_batch_size} has no more for each worker, or not evenly"
        if more * pack > BUSY:
            return size, f"{BUSY:,} tokens are enough"
        if worst_peak(config, execution, model, device, workers=workers, rows=rows, size=more) > _ROOM * device.memory:
            return size, f"{more} need more than {_ROOM:.0%} of the memory"
        size = more
    return size, "their arithmetic takes longer than launching it"
