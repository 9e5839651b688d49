"""How and where data is prepared."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finray.config.section import PositiveInt, Section


class PrepareConfig(Section):
    """How and where data is prepared."""

    num_workers: PositiveInt | None = Field(
        None, description="Ray workers that tokenise; null takes as many as there are CPUs or pieces of work."
    )
    dir: str | None = Field(
        None,
        description="Directory or URL (`s3://bucket/path`) of prepared data sets; null is `run.output_dir/.prepared`.",
    )
    local_dir: str | None = Field(
        None, description="Where workers keep what they fetch from a remote `prepare.dir`; null is the user's cache."
    )
    max_row_bytes: PositiveInt = Field(
        8_000_000, description="A row of a JSON or CSV file that is larger is a bad row."
    )
    text_rows: Literal["file", "paragraph", "line"] = Field(
        "file", description="What is a row in a text or source file: all of it, a paragraph, or a line."
    )
    chunk_overlap: int = Field(
        0, ge=0, description="Tokens of plain text repeated, unsupervised, at the start of the next piece."
    )
