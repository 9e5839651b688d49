"""The ``prepare`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finray.config.section import PositiveInt, Section


class PrepareConfig(Section):
    """How and where data is prepared."""

    num_workers: PositiveInt | None = Field(
        None,
        description="Processes that tokenise: the one that was started, and Ray workers beside it. 1 never uses Ray; "
        "null adds a worker for each spare CPU where so much is left to do that it is worth starting them.",
    )
    dir: str | None = Field(
        None,
        description="Directory or URL (`s3://bucket/path`) of prepared datasets. null is `<run.output_dir>/.prepared`.",
    )
    local_dir: str | None = Field(
        None,
        description="Where workers cache files of a remote `prepare.dir`. null is the cache directory of the user.",
    )
    max_row_bytes: PositiveInt = Field(
        8_000_000, description="Largest row of a JSON or CSV file. A larger row is treated as a bad row."
    )
    text_rows: Literal["file", "paragraph", "line"] = Field(
        "file", description="What one row of a text or source file is: the whole file, a paragraph, or a line."
    )
    chunk_overlap: int = Field(
        0,
        ge=0,
        description="Plain text that is cut into pieces: tokens of the previous piece repeated, unsupervised, at the "
        "start of the next.",
    )
