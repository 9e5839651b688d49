"""``finray cluster``: start a cluster, join it, look at it, end this machine's part in it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from finray.cli import show

app = typer.Typer(help="Start a Ray cluster, join it, look at it, and end it.", no_args_is_help=True)

Host = Annotated[
    str | None, typer.Option(help="Address of this machine that the others reach.", show_default="that of the route")
]
Options = Annotated[
    list[str] | None, typer.Argument(help="Further options of `ray start`, after --.", show_default=False)
]


@app.command()
@show.command
def up(
    options: Options = None,
    host: Host = None,
    dashboard_host: Annotated[str, typer.Option(help="Where Ray's dashboard listens.")] = "127.0.0.1",
) -> None:
    """Start a cluster with this machine as its head. Every process of it asks for the token in ~/.ray/auth_token."""
    from finray.runtime import nodes

    found, made = nodes.up(host=host, dashboard_host=dashboard_host, options=options or ())
    token = nodes.token_file()
    show.lines(
        {"address": found.address, "token_file": None if token is None else str(token), "token_made": made},
        f"the head of a cluster runs on this machine: {found.address}",
        f"  other machines need the token{'' if token is None else f': copy {token} (mode 600)'}; then, on each: "
        f"finray cluster join {found.address}",
        f"  train on it: finray train my-run.yaml cluster.address={found.address}",
        "  look at it: finray cluster status; end it: finray cluster down",
    )


@app.command()
@show.command
def join(
    address: Annotated[str, typer.Argument(help="Of the head, as `up` says it.", show_default=False)],
    options: Options = None,
    host: Host = None,
    any_version: Annotated[
        bool, typer.Option("--any-version", help="Join with other versions than the head's.")
    ] = False,
) -> None:
    """Make this machine a node of a cluster. Its versions are compared with the head's first."""
    from finray.runtime import nodes

    found, other = nodes.join(address, host=host, any_version=any_version, options=options or ())
    show.lines(
        {**asdict(found), "other_versions": other},
        f"this machine ({found.ip}) is a node of the cluster at {found.address}",
        *(f"  warning: other version: {one}" for one in other),
    )


@app.command()
@show.command
def status(
    address: Annotated[
        str | None, typer.Argument(help="Of the head (default: the cluster of this machine).", show_default=False)
    ] = None,
) -> None:
    """Show the nodes of a cluster: CPUs, GPUs, memory, what runs on them, and what is wrong."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from finray.runtime.status import status as look

    show.result(look(address))


@app.command()
@show.command
def down() -> None:
    """End what `up` or `join` started on this machine, and nothing else."""
    from finray.runtime import nodes

    count = nodes.down()
    text = f"ended {count} processes" if count else "nothing that `finray cluster` started runs on this machine"
    show.lines({"ended": count}, text)
