"""When state is saved and how long it is kept."""

from __future__ import annotations

from pydantic import Field

from finray.config.section import PositiveInt, Section


class CheckpointConfig(Section):
    """When state is saved and how long it is kept."""

    every_steps: PositiveInt = Field(
        100, description="Optimizer steps between checkpoints; the last step always has one."
    )
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept.")
    asynchronous: bool = Field(
        True,
        description="Write behind the training, from a copy in memory; a failure shows at the next save.",
    )
    keep_best: bool = Field(
        True, description="Save at every evaluation with a new lowest loss too, and keep the checkpoint of the lowest."
    )
