"""The ``tracking`` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from finray.config.extensions import named
from finray.config.section import PositiveInt, Section


class TrackingConfig(Section):
    """Where metrics are written. `metrics.jsonl` is always written."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files to `<run>/tensorboard/`.")
    trackers: list[Annotated[str, AfterValidator(named("finray.trackers"))]] = Field(
        default_factory=list,
        description="Further trackers, by name or as `package.module:Class`.",
    )
    log_every: PositiveInt = Field(
        1, description="Optimizer steps between records. Metrics are averaged over these steps."
    )
    record_samples: bool = Field(
        False, description="Record the ids of the rows of every step. A digest of them is always recorded."
    )
