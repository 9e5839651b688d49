"""`finray cluster status`: the nodes of a cluster, what they have and what runs on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from finray.config.schema import ClusterConfig
from finray.results import Result, Table
from finray.runtime import nodes
from finray.runtime.cluster import address_of, connected
from finray.tracking.console import several

# The name of a placement group: of the run, of this `finray train`, and of this start of its workers.
_RUN = re.compile("finray (.+?) [0-9a-f]{8}(?: [0-9a-f]{8})?")


@dataclass(frozen=True, slots=True)
class Node:
    """One node, as known to the head.

    Attributes:
        name: of the machine.
        ip: its address in the cluster.
        is_head: runs the head's processes.
        total, free: resources, as Ray names them; memory in bytes.
        versions: those that must match across nodes; empty if finray did not start the node.
        runs: what is running there: runs with their number of workers, and actors of other programs.
    """

    name: str
    ip: str
    is_head: bool
    total: dict[str, float]
    free: dict[str, float]
    versions: dict[str, str]
    runs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterStatus(Result):
    """A cluster.

    Attributes:
        address: of its head.
        nodes: those that are alive, head first.
        lost: names of dead nodes.
        complaints: problems.
    """

    address: str
    nodes: list[Node]
    lost: list[str]
    complaints: list[str]

    def plain(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """As a table, with the problems below it."""
        table = Table(title_justify="left")
        for column in ("node", "address", "CPUs", "GPUs", "memory", "what runs"):
            table.add_column(column, justify="right" if column in ("CPUs", "GPUs", "memory") else "left")
        for node in self.nodes:
            used = {kind: node.total.get(kind, 0) - node.free.get(kind, 0) for kind in ("CPU", "GPU")}
            table.add_row(
                node.name + (" (head)" if node.is_head else ""),
                node.ip,
                *(f"{used[kind]:g} of {node.total.get(kind, 0):g}" for kind in ("CPU", "GPU")),
                f"{node.total.get('memory', 0) / 2**30:.1f} GiB",
                ", ".join(f"{what} ({count})" if count > 1 else what for what, count in node.runs.items()) or "nothing",
            )
        console.print(table)
        totals = [f"{sum(node.total.get(kind, 0) for node in self.nodes):g} {kind}s" for kind in ("CPU", "GPU")]
        console.print(f"{several(len(self.nodes), 'node')} with {', '.join(totals)} at {self.address}", highlight=False)
        for complaint in self.complaints:
            console.print(f"! {complaint}", style="yellow", highlight=False, soft_wrap=True)


def status(address: str | None = None) -> ClusterStatus:
    """Query a cluster: the given one, that of this machine's `up` or `join`, or that of ``RAY_ADDRESS``.
    Raises ClusterError: there is none, or it cannot be reached."""
    config = cluster_here(address)
    with connected(config) as ray:
        from finray.runtime import gcs

        head = ray.get_runtime_context().gcs_address
        with gcs.answering(where=head):
            free, records = gcs.available_resources(head), gcs.actors(head, state=gcs.ALIVE)
        groups = {identity: group["name"] for identity, group in ray.util.placement_group_table().items()}
        actors = []
        for actor in records:
            group = groups.get(actor.placement_group_id.hex(), "")
            actors.append((actor.address.node_id.hex(), group or actor.name or actor.class_name))
        return status_of(address_of(config) or "", ray.nodes(), free, actors)


def cluster_here(address: str | None) -> ClusterConfig:
    """The cluster that a command without a config refers to.
    Raises ClusterError: none is named and none was started or joined here."""
    node = nodes.running()
    named = address or (None if node is None else node.address)
    config = ClusterConfig(address=None if named is None else nodes.with_port(named))
    if address_of(config) is None:
        raise nodes.no_cluster()
    return config


def status_of(
    address: str,
    known: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    actors: Sequence[tuple[str, str]],
) -> ClusterStatus:
    """Build the cluster's status from Ray's tables.

    Args:
        address: of the head.
        known: `ray.nodes()`.
        free: resources by node id.
        actors: node id, and the name of the placement group or the actor.
    """
    listed, lost, complaints = [], [], []
    for row in sorted(known, key=lambda row: ("node:__internal_head__" not in row["Resources"], row["NodeName"])):
        labels = row.get("Labels", {})
        if not row["Alive"]:
            lost.append(f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})")
            continue
        there = [what for where, what in actors if where == row["NodeID"]]
        runs = Counter(f"run {run[1]}" if (run := _RUN.fullmatch(what)) else what for what in there)
        listed.append(
            Node(
                name=row["NodeManagerHostname"],
                ip=row["NodeManagerAddress"],
                is_head="node:__internal_head__" in row["Resources"],
                total=_amounts(row["Resources"]),
                free=_amounts(free.get(row["NodeID"], {})),
                versions=nodes.versions_in(labels),
                runs=dict(runs),
            )
        )
    head = next((node.versions for node in listed if node.is_head and node.versions), {})
    for node in listed:
        if not node.versions:
            complaints.append(f"{node.name} was not started by finray: its versions are not known")
        elif other := nodes.differences(node.versions, head):
            complaints.append(f"{node.name} has {', '.join(other)}")
    # To Ray, a node that came back is a new one.
    back = {f"{node.name} ({node.ip})" for node in listed}
    lost = [name for name in dict.fromkeys(lost) if name not in back]
    complaints += [f"{name} is lost or has left" for name in lost]
    return ClusterStatus(address, listed, lost, complaints)


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    return {kind: float(resources[kind]) for kind in ("CPU", "GPU", "memory") if kind in resources}
