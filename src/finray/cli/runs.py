"""``finray report``, ``finray runs`` and ``finray watch``: runs looked at, finished or still going."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from finray.cli import show
from finray.errors import DataError
from finray.files import require_writable

Run = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


class _ListsByDefault(TyperGroup):
    """``finray runs`` and ``finray runs DIR`` are ``finray runs list``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """The words of the command, with the name of the command that is meant."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["list", *args])


app = typer.Typer(cls=_ListsByDefault, help="List and compare runs: finray runs [DIR].")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="HTML file to write (default: report.html in the run, or here for several runs)."),
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several side by side."""
    from finray.reporting.page import write
    from finray.reporting.recorded import read_run
    from finray.reporting.report import page

    target = (output or (runs[0] if len(runs) == 1 else Path()) / "report.html").expanduser()
    if target.is_dir():
        raise DataError("is a directory", where=f"--output {target}", repair="name a file in it")
    found = [read_run(path) for path in runs]
    require_writable(target.parent)
    write(page(found), target)
    count = target.stat().st_size
    plain = {"output": str(target), "bytes": count, "runs": [run.plain() for run in found]}
    troubled = [f"{run.name}: {problem}" for run in found for problem in run.problems]
    show.lines(plain, *troubled, f"wrote {target} ({count / 2**20:.1f} MiB)")


@app.command("list")
@show.command
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Directory of runs.")] = Path("runs"),
) -> None:
    """List runs: state, step, best metric, size, and when they last changed."""
    from finray.reporting.listing import list_runs as find

    show.result(find(folder, now=time.time()))


@app.command("compare")
@show.command
def compare(
    first: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Run directory to compare with it.", show_default=False)],
) -> None:
    """Show what two runs differ in: their configs, and what came of them."""
    from finray.reporting.listing import compare_runs

    show.result(compare_runs(first, second))


def watch(run: Run) -> None:
    """Follow a run that is going on, from any shell, until it ends. Ctrl-C ends the watching, not the run."""
    from finray.reporting.listing import watch as follow

    try:
        with show.run_view() as view:
            found = follow(run, view)
    except KeyboardInterrupt:
        show.say("no longer watched; the run goes on")
        raise typer.Exit(130) from None
    show.result(found)
