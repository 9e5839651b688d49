"""``finray cache``: list, verify and remove prepared datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from finray.cli import show
from finray.config.load import load_config
from finray.errors import DataError

app = typer.Typer(help="List, verify and remove prepared datasets.", no_args_is_help=True)

Where = Annotated[
    str, typer.Argument(help="Config file, or the directory or URL that holds prepared datasets.", show_default=False)
]


@app.command("list")
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


@app.command()
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


@app.command()
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
    from finray.config.paths import prepared_dir

    if Path(where).suffix in (".yaml", ".yml"):
        return prepared_dir(load_config(where))
    return str(Path(where).expanduser()) if "://" not in where else where
