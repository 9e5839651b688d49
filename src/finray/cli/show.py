"""What commands have in common: their options, where the config comes from, and where results go."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from finray.config.load import DEFAULT_FILE, load_config, preset_names
from finray.config.redact import redact, redact_text
from finray.config.requests import TRUST_RUN
from finray.config.schema import Config
from finray.errors import ConfigError, explained
from finray.limits import shown
from finray.results import PlainConsole, Result
from finray.tracking.console import RunView


def _complete(incomplete: str) -> list[str]:
    """Config files and presets that begin with these characters, for the shell's completion."""
    folder = Path(incomplete).parent
    files = [path for path in folder.glob("*") if path.is_dir() or path.suffix in (".yaml", ".yml")]
    names = [f"{path}/" if path.is_dir() else str(path) for path in files]
    return sorted(name for name in (*names, *preset_names()) if name.startswith(incomplete))


# Arguments of several commands.
ConfigName = Annotated[
    str | None,
    typer.Argument(
        help=f"YAML config file, or the name of a preset (default: {DEFAULT_FILE}).",
        show_default=False,
        autocompletion=_complete,
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides: section.field=value.", show_default=False)]
TrustRun = Annotated[bool, typer.Option("--trust-run", help=TRUST_RUN.help)]


@dataclass(slots=True)
class Mode:
    """The options that every command has."""

    json: bool = False  # standard output is one JSON document; everything else goes to standard error
    quiet: bool = False  # no progress and no notes, only results, warnings and errors
    verbose: bool = False  # what Ray and its workers print is shown
    written: bool = False  # the document is there; an error that follows it is a message only


# What options may be: seeds are the largest.
_MOST: dict[type, float] = {bool: 1, int: 2**63 - 1, float: 1e9}
_MODE: ContextVar[Mode | None] = ContextVar("mode", default=None)


def mode() -> Mode:
    """The options of the current command."""
    return _MODE.get() or Mode()


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of :class:`Mode`; with ``--json`` an error is a document too."""

    @functools.wraps(function)
    def run(*, as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
        before = _MODE.set(Mode(as_json, quiet, verbose))
        if verbose:
            os.environ["FINRAY_VERBOSE"] = "1"
        try:
            _require_sizes(arguments)
            _require_text(arguments)
            function(**arguments)
        except Exception as error:
            if as_json and not mode().written and (explanation := explained(error)) is not None:
                document({"error": explanation.to_dict()})
            raise
        finally:
            _MODE.reset(before)

    parameters = inspect.signature(function, eval_str=True).parameters.values()
    common = inspect.signature(_common, eval_str=True).parameters.values()
    run.__signature__ = inspect.Signature([*parameters, *common])  # type: ignore[attr-defined]
    return run


def _require_sizes(arguments: Mapping[str, Any]) -> None:
    """Check that numbers are finite and of a size that can be used.

    Raises:
        ConfigError: a number is not.
    """
    for name, value in arguments.items():
        if isinstance(value, int | float) and not -_MOST[type(value)] <= value <= _MOST[type(value)]:
            raise ConfigError(
                f"is {shown(value)}, which cannot be used",
                where=f"--{name.replace('_', '-')}",
                repair="give an ordinary number",
            )


def _require_text(arguments: dict[str, Any]) -> None:
    """Check that no argument holds a NUL character, which no path and no file can hold.

    Raises:
        ConfigError: an argument does.
    """
    for name, value in arguments.items():
        for text in value if isinstance(value, list | tuple) else (value,):
            if "\0" in str(text):
                raise ConfigError("holds U+0000, which is not a valid character", where=name)


def _common(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; everything else goes to standard error.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the output of Ray and its workers.")] = False,
) -> None:
    """Options of every command."""


def trust(place: str | Path, wanted: bool) -> None:
    """Accept the code and files that a run or model names, if the user wants that, and list them."""
    if wanted:
        from finray.checkpoint.rundir import trust_run

        for line in trust_run(place):
            note(redact_text(line))


def load(config: str | None, overrides: list[str] | None, *, trusted: bool = False) -> Config:
    """The config of a command: the file or preset that its first word names, else ``finray.yaml`` in this directory."""
    words = overrides or []
    if config is not None and "=" in config and not Path(config).exists():
        config, words = DEFAULT_FILE, [config, *words]
    if config is not None:
        trust(config, trusted)
    settings = load_config(config or DEFAULT_FILE, words)
    for note in settings.notes if not mode().quiet else ():
        console().print(note, highlight=False, soft_wrap=True)
    return settings


def require_replaceable(output: Path | None, *, force: bool) -> None:
    """Check that a command replaces a file only with ``--force``.

    Raises:
        ConfigError: the file exists.
    """
    if output is not None and output.exists() and not force:
        raise ConfigError(
            "the file already exists", where=str(output), repair="choose another file name, or use --force"
        )


def console() -> Console:
    """Where people read; wide where that is not a terminal, so that lines stay whole in a log."""
    stream = sys.stderr if mode().json else sys.stdout
    return PlainConsole(file=stream, width=None if stream.isatty() else 160)


def run_view() -> RunView:
    """Shows the records of a run."""
    return RunView(console(), quiet=mode().quiet)


def say(text: str) -> None:
    """Prints a line without markup and wrapping."""
    console().print(text, highlight=False, soft_wrap=True)


def document(plain: Any, *, as_is: Sequence[str] = ()) -> None:
    """Prints the JSON document of a command. Secrets are masked, except in the fields ``as_is``."""
    mode().written = True
    masked = redact(plain)
    typer.echo(json.dumps({**masked, **{name: plain[name] for name in as_is}} if as_is else masked, indent=2))


def result(outcome: Result, **options: Any) -> None:
    """Prints the result of a command."""
    if mode().json:
        document(outcome.plain(), as_is=outcome.AS_IS)
    else:
        outcome.print(console(), **options)


def lines(plain: Any, *texts: str) -> None:
    """Prints a command's result as text."""
    if mode().json:
        document(plain)
    else:
        say("\n".join(texts))


def written(text: str, output: Path | None, plain: dict[str, Any], *texts: str) -> None:
    """Writes a text that a command made to its file, and prints lines about it; without a file, to standard output."""
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if mode().json:
        document({**plain, "output": None if output is None else str(output)})
    elif output is None:
        write(text)
    else:
        say("\n".join(texts))


def write(text: str) -> None:
    """Writes a piece of an answer to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Writes a line to standard error, so that standard output has only the answers."""
    sys.stderr.write(f"{redact_text(text)}\n")
    sys.stderr.flush()


def remark(text: str) -> None:
    """A note that ``--quiet`` leaves out."""
    if not mode().quiet:
        note(text)
