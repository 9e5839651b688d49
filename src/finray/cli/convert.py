"""``finray convert``: a config of another system as one of finray's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.config.convert import convert as read_foreign
from finray.errors import ConfigError


@show.command
def convert(
    file: Annotated[Path, typer.Argument(help="Training config of LLaMA-Factory or Axolotl.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; standard output without it.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes (GPUs) that it was run with; the step's batch follows.")
    ] = None,
    dataset_info: Annotated[
        Path | None, typer.Option(help="LLaMA-Factory's dataset_info.json, if it is not found beside the file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
) -> None:
    """Convert a config of LLaMA-Factory or Axolotl, and say line by line what is not carried over."""
    if output is not None and output.exists() and not force:
        raise ConfigError("the file exists already", where=str(output), repair="name another file, or use --force")
    if dataset_info is not None and not dataset_info.is_file():
        raise ConfigError("there is no such file", where=f"--dataset-info {dataset_info}", repair="name the table")
    found = read_foreign(file, workers=workers, dataset_info=dataset_info)
    text = found.text(file.name)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    told = {
        "system": found.system,
        "config": found.plain,
        "lost": [{"line": one.line, "key": one.key, "why": one.why} for one in found.lost],
        "unknown": found.unknown,
        "notes": found.notes,
        "output": None if output is None else str(output),
    }
    if show.mode().json:
        show.document(told)
    elif output is None:
        show.say(text.rstrip())
    else:
        about = [f"{file} is a config of {found.system}", *(f"look at this: {note}" for note in found.notes)]
        about += ["not carried over:", *(f"  {one}" for one in found.lost)] if found.lost else []
        about += [f"keys that nobody knows: {', '.join(found.unknown)}"] if found.unknown else []
        show.lines(told, *about, f"wrote {output}; look at it, then: finray plan {output}")
