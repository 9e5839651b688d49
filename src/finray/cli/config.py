"""``finray init`` and ``finray config``: starter file, whole configuration, schema, reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from finray.cli import show
from finray.config.load import load_config, preset_names, preset_text
from finray.config.redact import redact
from finray.config.reference import reference_markdown, starter_yaml
from finray.config.schema import Config
from finray.errors import ConfigError

app = typer.Typer(help="Look at configurations.", no_args_is_help=True)


@app.command("show")
def show_config(
    config: show.ConfigFile,
    overrides: show.Overrides = None,
) -> None:
    """Print the whole configuration, defaults included, secrets masked."""
    plain = redact(load_config(config, overrides or []).plain())
    typer.echo(yaml.safe_dump(plain, sort_keys=False), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema, for editors."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def docs() -> None:
    """Print the reference page as Markdown."""
    typer.echo(reference_markdown(), nl=False)


@app.command()
def presets() -> None:
    """List the presets."""
    for name in preset_names():
        typer.echo(f"{name}: {preset_text(name).splitlines()[0].lstrip('# ')}")


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("finray.yaml"),
    preset: Annotated[str | None, typer.Option(help="Start from a preset; see `finray config presets`.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to train.", show_default=False)] = None,
    data: Annotated[str | None, typer.Option(help="Training data.", show_default=False)] = None,
) -> None:
    """Write a commented starter file."""
    if preset is not None and (model or data):
        raise ConfigError(
            "--preset cannot be combined with --model or --data", where="--preset", repair="edit the file it writes"
        )
    model, data = model or "HuggingFaceTB/SmolLM2-135M-Instruct", data or "data/train.jsonl"
    text = starter_yaml(model=model, source=data) if preset is None else preset_text(preset)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError("the file exists already", where=str(path), repair="name another file") from None
    except OSError as error:
        raise ConfigError(f"the file cannot be written: {error.strerror}", where=str(path)) from None
    show.console().print(f"wrote {path}; edit it, then: finray train {path}", highlight=False, soft_wrap=True)
