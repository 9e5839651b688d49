"""``finray jobspec``: a run as a job for a scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.cli.options import takes
from finray.config.load import DEFAULT_FILE, load_config
from finray.config.paths import with_contents
from finray.config.schema import Config
from finray.config.trust import require_trusted
from finray.errors import ConfigError
from finray.jobspec.hosts import SLURM_HOURS, compose, ray_cluster, slurm
from finray.jobspec.kubernetes import rayjob
from finray.jobspec.replicas import replicas
from finray.jobspec.spec import Machines, limit_notes, make_spec, overrides_for
from finray.runtime.jobs import require_no_secret

TARGETS = {"rayjob": rayjob, "compose": compose, "slurm": slurm, "ray-cluster": ray_cluster, "replicas": replicas}


@show.command
@takes(Machines)
def jobspec(
    request: Machines,
    config: show.ConfigName = None,
    overrides: show.Overrides = None,
    to: Annotated[str, typer.Option(help=f"Format to write: {', '.join(TARGETS)}.")] = "rayjob",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: standard output).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead of a config: a preset, or a short name such as llama3.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset: a short name such as alpaca, or a source.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU to estimate the speed for, such as h100-80gb; see `finray plan`.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(min=0.0001, max=1e6, help="Seconds per step, if known.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    trust_run: show.TrustRun = False,
) -> None:
    """Write a job specification: KubeRay RayJob, Docker Compose, Slurm, Ray's cluster YAML, or `replicas`."""
    if to not in TARGETS:
        raise ConfigError(f"unknown target `{to}`", where="--to", repair=f"use one of {', '.join(TARGETS)}")
    show.require_replaceable(output, force=force)
    if config is not None:
        show.trust(config, trust_run)
    settings = _settings(config, overrides, model, dataset)
    spec = make_spec(settings, request, takes_files=to in ("rayjob", "compose"))
    text = TARGETS[to](spec)
    limit = request.hours or (SLURM_HOURS if to == "slurm" else None)
    seconds = step_seconds or (_reckoned(settings, gpu) if gpu is not None and limit is not None else None)
    notes = [*spec.notes, *limit_notes(settings.checkpoint, limit, seconds, is_given=request.hours is not None)]
    for note in notes if not show.mode().json else ():
        show.note(note)
    show.written(text, output, {"kind": to, "text": text, "notes": notes}, f"wrote {output}")


def _settings(config: str | None, overrides: list[str] | None, model: str | None, dataset: str | None) -> Config:
    """The config that is named, or that of `--model` and `--dataset`, as it is sent away: with the contents of its
    small files, and without a secret."""
    words = list(overrides or [])
    preset, changes = overrides_for(model, dataset)
    if config is not None and "=" in config and not Path(config).exists():
        words = [config, *words]
        config = None
    if preset is not None and config is not None:
        raise ConfigError(
            "a config file and --model exclude each other", where="--model", repair="leave one of them out"
        )
    settings = load_config(preset or config or DEFAULT_FILE, [*changes, *words])
    require_trusted(settings)
    settings = with_contents(settings)
    require_no_secret(settings, option="--secret")
    return settings


def _reckoned(config: Config, gpu: str) -> float | None:
    """Seconds of a step on a GPU of this kind."""
    # The libraries read it when they are imported, which happens next.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from finray.planning.plan import step_seconds_on

    return step_seconds_on(config, gpu, config.cluster.max_workers)
