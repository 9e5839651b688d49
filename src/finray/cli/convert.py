"""``finray convert``: convert a config of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.config.convert import convert as read_foreign
from finray.errors import ConfigError, did_you_mean_path


@show.command
def convert(
    file: Annotated[Path, typer.Argument(help="Training config of LLaMA-Factory or Axolotl.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: standard output).")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes (GPUs) of the original run, which sets the batch of a step."),
    ] = None,
    dataset_info: Annotated[
        Path | None, typer.Option(help="LLaMA-Factory's dataset_info.json, if it is not in the config's directory.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
) -> None:
    """Convert a LLaMA-Factory or Axolotl config, and list every line that is not carried over."""
    show.require_replaceable(output, force=force)
    if dataset_info is not None and not dataset_info.is_file():
        raise ConfigError(
            f"the file does not exist{did_you_mean_path(dataset_info)}",
            where=f"--dataset-info {dataset_info}",
            repair="give the path of dataset_info.json",
        )
    converted = read_foreign(file, workers=workers, dataset_info=dataset_info)
    plain = {
        "system": converted.system,
        "config": converted.plain,
        "lost": [{"line": line.line, "key": line.key, "why": line.why} for line in converted.lost],
        "unknown": converted.unknown,
        "notes": converted.notes,
    }
    about = [f"{file} is a config of {converted.system}", *(f"check this: {note}" for note in converted.notes)]
    about += ["not carried over:", *(f"  {line}" for line in converted.lost)] if converted.lost else []
    about += [f"unknown keys: {', '.join(converted.unknown)}"] if converted.unknown else []
    show.written(
        converted.text(file.name), output, plain, *about, f"wrote {output}; check it, then run: finray plan {output}"
    )
