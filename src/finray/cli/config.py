"""``finray init`` and ``finray config``: starter file, whole configuration, presets, schema, reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from finray.cli import show
from finray.config.load import DEFAULT_FILE, preset_names, preset_text, read_preset
from finray.config.redact import redact_saved
from finray.config.reference import SCHEMA_FILE, full_yaml, json_schema, reference_markdown, starter_yaml
from finray.errors import ConfigError

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)


@app.command("show")
@show.command
def show_config(config: show.ConfigName = None, overrides: show.Overrides = None) -> None:
    """Print the whole configuration, defaults included, secrets masked."""
    plain = redact_saved(show.load(config, overrides).plain())
    if show.mode().json:
        show.document(plain)
    else:
        # A config to be read again: a run called `postgres-sql` keeps its name where a password is `postgres`.
        show.write(yaml.safe_dump(plain, sort_keys=False))


@app.command()
@show.command
def schema() -> None:
    """Print the JSON schema, for editors."""
    show.document(json_schema())


@app.command()
@show.command
def docs() -> None:
    """Print the reference page as Markdown."""
    show.lines({"markdown": reference_markdown()}, reference_markdown().rstrip())


@app.command()
@show.command
def presets(
    name: Annotated[str | None, typer.Argument(help="Preset to print.", show_default=False)] = None,
) -> None:
    """List the presets, or print one."""
    if name is not None:
        show.lines(read_preset(name), preset_text(name).rstrip())
        return
    about = {preset: preset_text(preset).splitlines()[0].lstrip("# ") for preset in preset_names()}
    show.lines(about, *(f"{preset}: {text}" for preset, text in about.items()))


@show.command
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path(DEFAULT_FILE),
    preset: Annotated[str | None, typer.Option(help="Start from a preset; see `finray config presets`.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to train.", show_default=False)] = None,
    data: Annotated[str | None, typer.Option(help="Training data.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="List every field, with its default and description.")] = False,
) -> None:
    """Write a starter file, and the schema that editors use to complete and check it."""
    if preset is not None and (model or data or full):
        raise ConfigError(
            "--preset cannot be combined with --model, --data or --full",
            where="--preset",
            repair="edit the file it writes",
        )
    model, data = model or "HuggingFaceTB/SmolLM2-135M-Instruct", data or "data/train.jsonl"
    text = preset_text(preset) if preset else (full_yaml if full else starter_yaml)(model=model, source=data)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
        path.with_name(SCHEMA_FILE).write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
    except FileExistsError:
        raise ConfigError("the file already exists", where=str(path), repair="choose another file name") from None
    except OSError as error:
        raise ConfigError(f"the file cannot be written: {error.strerror}", where=str(path)) from None
    command = "finray train" if str(path) == DEFAULT_FILE else f"finray train {path}"
    show.lines({"path": str(path)}, f"wrote {path}; edit it, then: {command}")
