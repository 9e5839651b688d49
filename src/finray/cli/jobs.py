"""``finray submit`` and ``finray jobs``: runs on the job server of a Ray cluster."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.config.environment import SECRETS
from finray.config.own_code import lies_in, own_code, python_files
from finray.config.paths import sent_by_name, with_contents
from finray.config.trust import require_trusted
from finray.runtime.jobs import Job, JobServer, require_no_secret, secrets_named

app = typer.Typer(help="Jobs of finray on a Ray cluster.", no_args_is_help=True)

Address = Annotated[
    str | None,
    typer.Option(help="Job server, such as http://head:8265 (default: RAY_API_SERVER_ADDRESS, else this machine)."),
]
JobId = Annotated[str, typer.Argument(help="Id of a job, from `finray jobs list`.", show_default=False)]


@show.command
def submit(
    config: show.ConfigName = None,
    overrides: show.Overrides = None,
    address: Address = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Name of an environment variable to pass to the job; may be repeated."),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            help="Directory whose Python files are sent too, for modules of your own that the config names.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the job.")] = False,
    trust_run: show.TrustRun = False,
) -> None:
    """Train on a Ray cluster through its job server. The same command continues a run that was stopped.

    The config, its chat template and DeepSpeed's JSON, the variables given with --env and the Python files below --code
    are sent; data and models are not.
    """
    settings = show.load(config, overrides, trusted=trust_run)
    require_trusted(settings)
    settings = with_contents(settings)
    names = tuple(env or ())
    require_no_secret(settings)
    secrets_named(names, os.environ)
    files, left_out = python_files(code, settings) if code is not None else ({}, ())
    server = JobServer(address)
    job = server.submit(settings, names, code=files, command=shlex.join(["finray", *sys.argv[1:]]))
    for name in left_out:
        show.remark(f"{name} is not sent: an installed package has this name")
    for field, name in own_code(settings):
        if lies_in(name, Path.cwd()) and (code is None or not lies_in(name, code)):
            show.remark(f"{field} {name} is code of this directory and not sent with the job; --code . sends it")
    for named in sent_by_name(settings):
        show.remark(f"{named} is not sent with the job; it must exist at this path on the cluster")
    for name in SECRETS:
        if os.environ.get(name) and name not in names:
            show.remark(f"{name} is set here but not passed to the job; --env {name} passes it")
    show.remark(f"job {job.id}, run {job.run}; finray jobs stop {job.id}{server.option} ends it with a checkpoint")
    if detach:
        show.lines(asdict(job), job.id)
        return
    try:
        job = server.follow(job.id, show.note if show.mode().json else show.write)
    except KeyboardInterrupt as stop:
        stop.add_note(f"the job continues; follow it with: finray jobs logs {job.id} --follow{server.option}")
        raise
    _ended(job)


def _ended(job: Job, /, **more: str) -> None:
    """Say how a job ended, and end so; ``more`` is for its document."""
    code = {"succeeded": 0, "stopped": 143}.get(job.status, job.exit_code or 1)
    if show.mode().json:
        show.document({**asdict(job), **more})
    elif code:
        show.note(f"the job {job.status}" + (f": {job.message}" if job.message and job.status == "failed" else ""))
    if code:
        raise typer.Exit(code)


@app.command("list")
@show.command
def list_jobs(address: Address = None) -> None:
    """List jobs, newest first."""
    from finray.runtime.jobs import Jobs

    server = JobServer(address)
    show.result(Jobs(server.address, server.list()))


@app.command()
@show.command
def logs(
    job: JobId,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep following until the job ends.")] = False,
) -> None:
    """Print the output of a job."""
    server = JobServer(address)
    if follow:
        pieces: list[str] = []
        ended = server.follow(job, pieces.append if show.mode().json else show.write)
        _ended(ended, job=job, logs="".join(pieces))
        return
    text = server.logs(job)
    if show.mode().json:
        show.document({"job": job, "logs": text})
    else:
        show.write(text)


@app.command()
@show.command
def stop(job: JobId, address: Address = None) -> None:
    """Stop a job. The run saves a checkpoint, and `finray submit` continues it."""
    stopped = JobServer(address).stop(job)
    state = stopped.status if stopped.has_ended else "stops after its current step, with a checkpoint"
    show.lines(asdict(stopped), f"{job} {state}")
