"""``finray prepare``: tokenise the data of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.config.load import load_config


def prepare(
    config: Annotated[Path, typer.Argument(help="YAML config file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: section.field=value.", show_default=False)
    ] = None,
    export_jsonl: Annotated[
        Path | None,
        typer.Option(
            help="Also write training.jsonl, validation.jsonl and test.jsonl with input and output to this directory."
        ),
    ] = None,
) -> None:
    """Tokenise the data of a config on the CPUs of the cluster, without training."""
    from finray.config.paths import local_dir_of
    from finray.data.dataset.report import preparation_report
    from finray.runtime.prepare import prepare as run_preparation

    settings = load_config(config, overrides or [])
    console = show.console()
    with show.RunView(console) as view:
        location = run_preparation(settings, handle=view.handle, hide_torch=True)
    console.print(f"prepared: {location}", highlight=False, soft_wrap=True)
    for line in preparation_report(location, local_dir=local_dir_of(settings)):
        console.print(line, highlight=False, soft_wrap=True)
    if export_jsonl is not None:
        from finray.data.dataset.export import export_rows

        for path, rows in export_rows(settings, location, export_jsonl).items():
            console.print(f"wrote {rows:,} rows to {path}", highlight=False, soft_wrap=True)
