"""``finray report``, ``finray runs`` and ``finray watch``: reports on runs, finished or in progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from finray.cli import show
from finray.config import RUNS

Run = Annotated[
    str,
    typer.Argument(help="Run: its name in `finray runs`, its directory or its URL.", show_default=False),
]


class _ListsByDefault(TyperGroup):
    """``finray runs`` and ``finray runs DIR`` are ``finray runs list``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """The words of the command, with the name of the command that is meant."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["list", *args])


app = typer.Typer(cls=_ListsByDefault, help="List and compare runs: finray runs [DIR].")


def report(
    runs: Annotated[
        list[str], typer.Argument(help="Runs: their names in `finray runs`, directories or URLs.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="HTML file to write (default: report.html in the run, or here for several runs)."
        ),
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several side by side."""
    from finray.reporting.report import report as write

    show.result(write(runs, output))


@app.command("list")
@show.command
def list_runs(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="Directory of runs, or its URL.")] = RUNS,
) -> None:
    """List runs: state, step, best metric, size, and when they last changed."""
    from finray.reporting.listing import Listed
    from finray.reporting.listing import list_runs as find

    if folder == RUNS and not Path(folder).exists():
        show.result(Listed(folder, (), time.time()))
        return
    show.result(find(folder, now=time.time()))


@app.command("compare")
@show.command
def compare(
    first: Run,
    second: Annotated[str, typer.Argument(help="Run to compare with.", show_default=False)],
) -> None:
    """Show the differences between two runs: their configs and results."""
    from finray.reporting.listing import compare_runs

    show.result(compare_runs(first, second))


def watch(run: Run) -> None:
    """Follow a run that is going on, from any shell, until it ends. Ctrl-C ends the watching, not the run."""
    from finray.reporting.listing import watch as follow

    try:
        with show.run_view() as view:
            watched = follow(run, view)
    except KeyboardInterrupt:
        show.say("stopped watching; the run continues")
        raise typer.Exit(130) from None
    show.result(watched)
