"""``finray prepare`` and ``finray cache``: tokenize the data of a config; list, verify and remove what was prepared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.config.load import DEFAULT_FILE, is_preset, load_config
from finray.config.paths import PREPARED, prepared_dir
from finray.config.trust import require_trusted
from finray.errors import DataError
from finray.results import Table

cache = typer.Typer(help="List, verify and remove prepared datasets.", no_args_is_help=True)

Where = Annotated[
    str, typer.Argument(help="Config file or preset, or the directory or URL that holds prepared datasets.")
]


def prepare(
    config: show.ConfigName = None,
    overrides: show.Overrides = None,
    export_jsonl: Annotated[
        Path | None,
        typer.Option(
            help="Also write training.jsonl, validation.jsonl and test.jsonl with input and output to this directory."
        ),
    ] = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Tokenize the data of a config on the CPUs of the cluster, without training."""
    from finray.runtime.prepare import prepare_and_report

    settings = show.load(config, overrides, trusted=trust_run)
    with show.run_view() as view:
        prepared = prepare_and_report(settings, export_jsonl=export_jsonl, handle=view.handle, hide_torch=True)
    show.result(prepared)


@cache.command("list")
@show.command
def list_(where: Where = DEFAULT_FILE, trust_run: show.TrustRun = False) -> None:
    """List the prepared datasets."""
    show.trust(where, trust_run)
    from finray.data.dataset.cache import entries

    datasets = [] if _is_unused(where) else entries(_root(where))
    if show.mode().json:
        show.document({"root": _root(where), "datasets": [asdict(entry) for entry in datasets]})
        return
    table = Table(title_justify="left")
    for column in ("fingerprint", "rows", "tokens", "size", "last used", "source"):
        table.add_column(column, justify="left" if column in ("fingerprint", "source", "last used") else "right")
    for entry in datasets:
        table.add_row(
            entry.name,
            f"{entry.rows:,}" if entry.is_whole else "unfinished",
            f"{entry.tokens:,}" if entry.is_whole else "",
            f"{entry.size / 2**20:,.1f} MiB",
            entry.age,
            entry.sources,
        )
    show.console().print(table)
    show.say(f"{len(datasets)} in {_root(where)}")


@cache.command()
@show.command
def verify(where: Where = DEFAULT_FILE, trust_run: show.TrustRun = False) -> None:
    """Check every file of every prepared dataset against its SHA-256."""
    show.trust(where, trust_run)
    from finray.data.dataset.cache import damaged, entries

    datasets = [] if _is_unused(where) else entries(_root(where))
    bad = {entry.name: damaged(_root(where), entry.name) for entry in datasets if entry.is_whole}
    show.lines(
        {"root": _root(where), "damaged": bad},
        *(f"{name}: {'damaged' if files else 'whole'}" for name, files in bad.items()),
    )
    problems = [file for files in bad.values() for file in files]
    if problems:
        raise DataError(
            f"{len(problems)} files are damaged: {', '.join(problems[:4])}",
            where=_root(where),
            repair="`finray cache prune --damaged` removes these datasets; they are prepared again when needed",
        )


@cache.command()
@show.command
def prune(
    where: Where = DEFAULT_FILE,
    everything: Annotated[bool, typer.Option("--all", help="Remove all datasets.")] = False,
    damaged_ones: Annotated[bool, typer.Option("--damaged", help="Remove datasets that fail `verify`.")] = False,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Remove datasets that were not used for this many days.")
    ] = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Remove prepared datasets and leftovers of interrupted preparations. A run that needs one prepares it again."""
    show.trust(where, trust_run)
    from finray.data.dataset.cache import prune as remove

    which = {"everything": everything, "damaged_ones": damaged_ones}
    removed = [] if _is_unused(where) else remove(_root(where), older_than_days=older_than_days, **which)
    show.lines(
        {"root": _root(where), "removed": [{"name": name, "size": size} for name, size in removed]},
        *(f"removed {name} ({size / 2**20:,.1f} MiB)" for name, size in removed),
        f"{len(removed)} removed",
    )


def _is_config(where: str) -> bool:
    return Path(where).suffix in (".yaml", ".yml") or is_preset(where)


def _is_unused(where: str) -> bool:
    """Whether nothing has been prepared for a config yet; a named directory that is missing is a mistake."""
    return _is_config(where) and "://" not in _root(where) and not Path(_root(where)).exists()


def _root(where: str) -> str:
    if _is_config(where):
        require_trusted(config := load_config(where), "prepare.dir", "run.output_dir")
        return prepared_dir(config)
    if "://" in where:
        return where
    # Where runs are, what they prepared lies beside them.
    folder = Path(where).expanduser()
    return str(folder / PREPARED if (folder / PREPARED).is_dir() else folder)
