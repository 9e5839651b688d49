"""``finray prepare`` and ``finray cache``: tokenise the data of a config; list, verify and remove what was prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from finray.cli import show
from finray.config.load import load_config
from finray.config.paths import local_dir_of, prepared_dir
from finray.errors import DataError

cache = typer.Typer(help="List, verify and remove prepared datasets.", no_args_is_help=True)

Where = Annotated[
    str, typer.Argument(help="Config file, or the directory or URL that holds prepared datasets.", show_default=False)
]


def prepare(
    config: show.ConfigFile,
    overrides: show.Overrides = None,
    export_jsonl: Annotated[
        Path | None,
        typer.Option(
            help="Also write training.jsonl, validation.jsonl and test.jsonl with input and output to this directory."
        ),
    ] = None,
) -> None:
    """Tokenise the data of a config on the CPUs of the cluster, without training."""
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


@cache.command("list")
def list_(where: Where) -> None:
    """List the prepared datasets."""
    from finray.data.dataset.cache import entries

    console = show.console()
    table = Table(title_justify="left")
    for column in ("fingerprint", "rows", "tokens", "size", "last used", "source"):
        table.add_column(column, justify="left" if column in ("fingerprint", "source", "last used") else "right")
    found = entries(_root(where))
    for entry in found:
        table.add_row(
            entry.name,
            f"{entry.rows:,}" if entry.is_whole else "unfinished",
            f"{entry.tokens:,}" if entry.is_whole else "",
            f"{entry.size / 2**20:,.1f} MiB",
            entry.age,
            entry.sources,
        )
    console.print(table)
    console.print(f"{len(found)} in {_root(where)}", highlight=False, soft_wrap=True)


@cache.command()
def verify(where: Where) -> None:
    """Check every file of every prepared dataset against its SHA-256."""
    from finray.data.dataset.cache import damaged, entries

    console = show.console()
    problems: list[str] = []
    for entry in entries(_root(where)):
        if entry.is_whole:
            bad = damaged(_root(where), entry.name)
            console.print(f"{entry.name}: {'damaged' if bad else 'whole'}", highlight=False)
            problems += bad
    if problems:
        raise DataError(
            f"{len(problems)} files are damaged: {', '.join(problems[:4])}",
            where=_root(where),
            repair="`finray cache prune --damaged` removes these datasets; they are prepared again when needed",
        )


@cache.command()
def prune(
    where: Where,
    everything: Annotated[bool, typer.Option("--all", help="Remove all datasets.")] = False,
    damaged_ones: Annotated[bool, typer.Option("--damaged", help="Remove datasets that fail `verify`.")] = False,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Remove datasets that were not used for this long.")
    ] = None,
) -> None:
    """Remove prepared datasets and leftovers of interrupted preparations. A run that needs one prepares it again."""
    from finray.data.dataset.cache import prune as remove

    console = show.console()
    removed = remove(_root(where), everything=everything, damaged_ones=damaged_ones, older_than_days=older_than_days)
    for name, size in removed:
        console.print(f"removed {name} ({size / 2**20:,.1f} MiB)", highlight=False)
    console.print(f"{len(removed)} removed", highlight=False)


def _root(where: str) -> str:
    if Path(where).suffix in (".yaml", ".yml"):
        return prepared_dir(load_config(where))
    return str(Path(where).expanduser()) if "://" not in where else where
