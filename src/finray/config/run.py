"""The ``run`` section."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from finray.config.section import Section

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class RunConfig(Section):
    """The name of the run and where it is kept."""

    name: str = Field("run", description="Name of the run. Its directory is `<run.output_dir>/<run.name>`.")
    output_dir: str = Field("runs", description="Directory of runs and prepared datasets.")
    seed: int = Field(
        17, ge=0, lt=2**63, description="Seed of everything random: data order, splits, dropout, new weights."
    )

    @field_validator("name")
    @classmethod
    def _is_a_path_segment(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError(
                "becomes a directory name: use letters, digits, '.', '_' and '-', and start with a letter or a digit"
            )
        return value
