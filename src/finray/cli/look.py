"""``finray plan`` and ``finray inspect``: check a run and its data before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.errors import ConfigError, FinrayError


def plan(
    config: show.ConfigName = None,
    overrides: show.Overrides = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of each worker, such as h100-80gb.", show_default=False)] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not use the network; list what could not be checked.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Plan what `finray train --fresh` would do.")] = False,
    trust_run: show.TrustRun = False,
) -> None:
    """Show what a run needs and what would keep it from starting, without starting it.

    Exit code 0 if the run would start, else 2. With --offline, 0 means that what was checked has no problems.
    """
    if offline:
        # The libraries read these variables when they are imported, which happens later.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    try:
        settings = show.load(config, overrides, trusted=trust_run)
        from finray.runtime.cluster import plan as make_plan

        result = make_plan(settings, gpu=gpu, offline=offline, fresh=fresh)
    except ConfigError as error:
        if not show.mode().json:
            raise
        messages = error.problems or (error.message,)
        problems = [{"message": message, "where": error.where, "repair": error.repair} for message in messages]
        show.document({"starts": False, "problems": problems, "warnings": []})
        raise typer.Exit(error.exit_code) from None
    show.result(result, quiet=show.mode().quiet)
    if result.problems:
        raise typer.Exit(FinrayError.exit_code)


def inspect(
    config: show.ConfigName = None,
    overrides: show.Overrides = None,
    html: Annotated[Path | None, typer.Option(help="Write everything to this file as one HTML page.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of examples to show, spread over the training rows.")] = 3,
    row: Annotated[
        list[str] | None,
        typer.Option(
            help="Show this row: FILE:NUMBER in the source, or an index into the training rows; may be repeated."
        ),
    ] = None,
    compare: Annotated[
        int, typer.Option(min=0, help="Number of rows to compare with what a server renders; 0 means all.")
    ] = 1000,
    trust_run: show.TrustRun = False,
) -> None:
    """Show rows as tokens, which of them are learned, and problems of the data; no training, no GPU."""
    from finray.inspection.inspect import inspect as run_inspection
    from finray.inspection.page import page
    from finray.reporting.page import write

    settings = show.load(config, overrides, trusted=trust_run)
    inspection = run_inspection(settings, examples=rows, chosen=row or [], compared=compare or None)
    if html is not None:
        write(page(inspection), html)
    show.result(inspection)
    if html is not None and not show.mode().json:
        show.say(f"\nwrote {html}")
    if inspection.refusal is not None:
        raise inspection.refusal
