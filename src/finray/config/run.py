"""Where it runs: the run directory, and Ray."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from finray.config.section import Section

NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class RunConfig(Section):
    """Names the run and says where it is kept."""

    name: str = Field("run", description="Name of the run; its directory is `run.output_dir/run.name`.")
    output_dir: str = Field("runs", description="Directory that holds runs and prepared data sets.")
    seed: int = Field(17, ge=0, lt=2**63, description="Seed of everything random: order, splits, dropout, new weights.")

    @field_validator("name")
    @classmethod
    def _is_a_path_segment(cls, value: str) -> str:
        if not NAME_PATTERN.match(value):
            raise ValueError(
                "becomes a directory: use letters, digits, '.', '_' and '-', and start with one of the first two"
            )
        return value
