"""``finray cluster``: start, join, inspect and stop a Ray cluster."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from finray.cli import show

app = typer.Typer(help="Start, join, inspect and stop a Ray cluster.", no_args_is_help=True)

Host = Annotated[
    str | None,
    typer.Option(
        help="Address of this machine, as the other machines reach it.", show_default="the address of the default route"
    ),
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
    """Start a Ray cluster with this machine as its head. All its processes require the token in ~/.ray/auth_token."""
    from finray.runtime import nodes
    from finray.runtime.token import token_file

    node, made = nodes.up(host=host, dashboard_host=dashboard_host, options=options or ())
    token = token_file()
    reached = node.ip if dashboard_host in ("0.0.0.0", "::") else dashboard_host
    dashboard = f"http://{nodes.joined(reached, nodes.dashboard_port(options or ()))}"
    show.lines(
        {
            "address": node.address,
            "dashboard": dashboard,
            # What is called a token would be masked.
            "auth_file": None if token is None else str(token),
            "auth_file_made": made,
        },
        f"the head of a cluster runs on this machine: {node.address}",
        f"  other machines need the token{'' if token is None else f': copy {token} (mode 600)'}; then, on each: "
        f"finray cluster join {node.address}",
        f"  train on it: finray train my-run.yaml cluster.address={node.address}",
        f"  its dashboard: {dashboard}, which asks for the content of {'RAY_AUTH_TOKEN' if token is None else token}",
        "  look at it: finray cluster status; stop it: finray cluster down",
    )


@app.command()
@show.command
def join(
    address: Annotated[
        str, typer.Argument(help="Address of the head, as `finray cluster up` prints it.", show_default=False)
    ],
    options: Options = None,
    host: Host = None,
    any_version: Annotated[
        bool, typer.Option("--any-version", help="Join even if versions differ from the head's.")
    ] = False,
) -> None:
    """Join a cluster with this machine, after comparing its versions with the head's."""
    from finray.runtime import nodes

    node, other = nodes.join(address, host=host, any_version=any_version, options=options or ())
    show.lines(
        {**asdict(node), "other_versions": other},
        f"this machine ({node.ip}) is a node of the cluster at {node.address}",
        *(f"  warning: other version: {version}" for version in other),
    )


@app.command()
@show.command
def status(
    address: Annotated[
        str | None, typer.Argument(help="Address of the head (default: this machine's cluster).", show_default=False)
    ] = None,
) -> None:
    """Show the nodes of a cluster: CPUs, GPUs, memory, running jobs and problems."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from finray.runtime.status import status as look

    show.result(look(address))


@app.command()
@show.command
def down(
    within: Annotated[
        int,
        typer.Option(
            min=0,
            max=86_400,
            help="For a spot notice: seconds that are left. Runs that use this machine save a checkpoint.",
        ),
    ] = 0,
) -> None:
    """Stop what `up` or `join` started on this machine, and nothing else."""
    from finray.runtime import nodes

    count = nodes.down(within_s=within, notify=show.remark)
    text = f"ended {count} processes" if count else "no cluster started by `finray cluster` runs on this machine"
    show.lines({"ended": count}, text)
