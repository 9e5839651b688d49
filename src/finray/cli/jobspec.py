"""``finray jobspec``: a run as a job for a scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
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
def jobspec(
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
    nodes: Annotated[int | None, typer.Option(min=1, max=100_000, help="Number of machines with workers.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, max=1024, help="GPUs of each machine.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, max=100_000, help="CPUs of each machine.")] = None,
    memory: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Memory of each machine, in GB.")] = None,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Fewest machines to run on, where workers may come and go.")
    ] = None,
    max_nodes: Annotated[int | None, typer.Option(min=1, max=100_000, help="Most machines.")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="Kind of GPU, as the scheduler calls it.")] = None,
    image: Annotated[str, typer.Option(help="Container image.")] = Machines.image,
    shared: Annotated[str, typer.Option(help="Directory that all machines share.")] = Machines.shared,
    claim: Annotated[
        str | None, typer.Option(help="rayjob: PersistentVolumeClaim to mount there; `none` for none.")
    ] = Machines.claim,
    storage: Annotated[
        str | None, typer.Option(help="URL for runs and prepared data, such as s3://bucket/runs.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue's local queue, or Slurm's partition.")] = None,
    hours: Annotated[float | None, typer.Option(min=0.01, max=87_600, help="Time limit.")] = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="Name of an environment variable that holds a secret; may be repeated.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="ray-cluster: address of a machine, the head first; may be repeated.")
    ] = None,
    user: Annotated[str, typer.Option(help="ray-cluster: user name to log in with.")] = Machines.user,
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
    machines = Machines(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        memory_gb=memory,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        gpu_type=gpu_type,
        image=image,
        shared=shared,
        claim=None if claim in (None, "none") else claim,
        storage=storage,
        queue=queue,
        hours=hours,
        secrets=tuple(secret) if secret is not None else Machines.secrets,
        hosts=tuple(host or ()),
        user=user,
    )
    spec = make_spec(settings, machines, takes_files=to in ("rayjob", "compose"))
    text = TARGETS[to](spec)
    limit = hours or (SLURM_HOURS if to == "slurm" else None)
    seconds = step_seconds or (_reckoned(settings, gpu) if gpu is not None and limit is not None else None)
    notes = [*spec.notes, *limit_notes(settings.checkpoint, limit, seconds, is_given=hours is not None)]
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
    found = load_config(preset or config or DEFAULT_FILE, [*changes, *words])
    require_trusted(found)
    found = with_contents(found)
    require_no_secret(found, option="--secret")
    return found


def _reckoned(config: Config, gpu: str) -> float | None:
    """Seconds of a step on a GPU of this kind."""
    # The libraries read it when they are imported, which happens next.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from finray.planning.plan import step_seconds_on

    return step_seconds_on(config, gpu, config.cluster.max_workers)
