"""The ``checkpoint`` section."""

from __future__ import annotations

from pydantic import Field

from finray.config.section import PositiveInt, Section


class CheckpointConfig(Section):
    """When checkpoints are saved and how long they are kept."""

    every_steps: PositiveInt = Field(
        100, description="Optimizer steps between checkpoints. The last step is always saved."
    )
    keep_last: PositiveInt = Field(2, description="How many of the newest checkpoints are kept.")
    asynchronous: bool = Field(
        True,
        description="Write checkpoints in the background, from a copy in CPU memory, while training continues. An "
        "error is raised at the next save.",
    )
    keep_best: bool = Field(
        True,
        description="Also save a checkpoint at every evaluation with a new lowest loss, and keep the best one.",
    )
