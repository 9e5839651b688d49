"""`finray doctor`: checks one machine, or every node of a cluster.

:mod:`finray.runtime.probe` collects facts, :func:`judged` and similar functions judge them, and the rest connects both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from rich.console import Console

from finray.config.paths import is_url
from finray.planning.placement import crowded
from finray.results import Result
from finray.runtime import nodes
from finray.runtime.cluster import connected
from finray.runtime.probe import NodeFacts, Probe, folder_of

# Sharded training needs ten gigabits per second between machines.
WANTED_GBIT, WANTED_DISK = 10.0, 20 * 2**30
_SKEW_S = 1.0
_ASK_S = 180.0

Level = Literal["good", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """The result of one check."""

    level: Level  # severity
    what: str  # what was checked
    node: str  # the machine; empty for all
    text: str  # what was found
    repair: str = ""  # what to do about it


@dataclass(frozen=True, slots=True)
class Diagnosis(Result):
    """All findings.

    Attributes:
        machines: names of the machines that were checked.
        findings: in the order of the checks.
        facts: of each machine that answered.
    """

    machines: list[str]
    findings: list[ClusterFinding]
    facts: list[NodeFacts] = field(default_factory=list)

    @property
    def is_fit(self) -> bool:
        """No finding prevents a training from running."""
        return all(finding.level != "problem" for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {"fit": self.is_fit, **asdict(self)}

    def print(self, console: Console) -> None:
        """One line per finding, with the repair below it."""
        marks = {"good": ("ok", "green"), "warning": ("!", "yellow"), "problem": ("X", "red")}
        for finding in self.findings:
            mark, style = marks[finding.level]
            where = f"{finding.node}: " if finding.node else ""
            text = f"{mark:>2}  {finding.what}: {where}{finding.text}"
            console.print(text, style=None if finding.level == "good" else style, highlight=False, soft_wrap=True)
            if finding.repair:
                console.print(f"      repair: {finding.repair}", highlight=False, soft_wrap=True)
        bad = sum(finding.level == "problem" for finding in self.findings)
        summary = f"{bad} problems" if bad else "no problems"
        console.print(f"checked {', '.join(self.machines)}: {summary}", highlight=False)


# --- decisions -------------------------------------------------------------------------------------------------------


def judged(facts: NodeFacts) -> list[ClusterFinding]:
    """The findings that follow from a machine's facts."""
    findings: list[ClusterFinding] = []

    def add(level: Level, what: str, text: str, repair: str = "") -> None:
        findings.append(ClusterFinding(level, what, facts.name, text, repair))

    add("good", "versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items()))
    if facts.torch_error is not None:
        add("problem", "torch", f"cannot be imported: {facts.torch_error}", "install torch again")
    elif not facts.gpus:
        text = "no GPU" + ("" if facts.cuda is None else f", but torch is built for CUDA {facts.cuda}")
        add("good", "GPUs", f"{text}: training uses CPUs")
    elif facts.cuda is None:
        add(
            "problem",
            "GPUs",
            f"{len(facts.gpus)} GPUs, but torch is built without CUDA",
            "install a CUDA build of torch",
        )
    elif facts.usable_gpus < len(facts.gpus):
        text = f"torch (CUDA {facts.cuda}) can use {facts.usable_gpus} of {len(facts.gpus)}: {facts.gpus[0]}"
        add("problem", "GPUs", text, "install a driver for that CUDA version, or a torch build for that driver")
    else:
        add("good", "GPUs", f"{len(facts.gpus)} x {facts.gpus[0]}, torch for CUDA {facts.cuda}")
    if not facts.usable_gpus:
        busy = crowded(facts.load, cores=facts.cores, threads=facts.cores)
        if busy is None:
            add("good", "load", f"{facts.load:.1f} on {facts.cores} core{'s' * (facts.cores > 1)}")
        else:
            add("warning", "load", busy.message, busy.repair or "")
        if facts.missing_for_kernels == "compiler":
            text = "torch's, because there is no C compiler: training in bf16 takes a tenth more time"
            add("warning", "attention", text, "install gcc, or set CC to a C compiler")
        elif facts.missing_for_kernels is None:
            add("good", "attention", "finray's own on this CPU, in bf16")
    for folder, free in facts.free_disk.items():
        low = free < (WANTED_DISK if folder != "/dev/shm" else 2**30)
        repair = (
            "free some space: checkpoints of a large model need tens of GiB" if low and folder != "/dev/shm" else ""
        )
        repair = "give the container more shared memory (--shm-size)" if low and not repair else repair
        add("warning" if low else "good", "free disk", f"{free / 2**30:.1f} GiB in {folder}", repair)
    for address in facts.open_sockets:
        repair = "start the cluster with `finray cluster up`, which requires a token, or close the port"
        add("problem", "open ports", f"{address} answers without a token", repair)
    if not facts.open_sockets:
        add("good", "open ports", "no Ray port of this user answers without a token")
    return findings


def judged_versions(versions: Mapping[str, Mapping[str, str]]) -> list[ClusterFinding]:
    """Whether all nodes have the same versions as the first one."""
    first = next(iter(versions.values()), {})
    bad = {name: other for name, installed in versions.items() if (other := nodes.differences(installed, first))}
    repair = "install the same versions on all nodes"
    if not bad:
        return [ClusterFinding("good", "versions", "", f"the same on {len(versions)} nodes")]
    return [ClusterFinding("problem", "versions", name, ", ".join(other), repair) for name, other in bad.items()]


def judged_clocks(samples: Mapping[str, Sequence[tuple[float, float, float]]]) -> list[ClusterFinding]:
    """Whether clocks agree: for each node, when it was asked, its answer, and when the answer arrived.

    The sample with the shortest round trip is the most accurate; half the round trip is the uncertainty.
    """
    skews = {}
    for name, readings in samples.items():
        before, remote, after = min(readings, key=lambda reading: reading[2] - reading[0])
        off = remote - (before + after) / 2
        skews[name] = (off, (after - before) / 2)
    bad = {name: off for name, (off, unsure) in skews.items() if abs(off) - unsure > _SKEW_S}
    if not bad:
        worst = max((abs(off) + unsure for off, unsure in skews.values()), default=0.0)
        return [ClusterFinding("good", "clocks", "", f"within {worst:.3f} s of this machine's")]
    repair = "synchronize it with a time service (chrony, systemd-timesyncd): storage and leases compare times"
    return [
        ClusterFinding("problem", "clocks", name, f"{off:+.1f} s from this machine's", repair)
        for name, off in bad.items()
    ]


def judged_bandwidth(links: Mapping[tuple[str, str], float]) -> list[ClusterFinding]:
    """Whether links between nodes (Gbit/s) are fast enough for gradients."""
    findings = []
    for (name, other), speed in links.items():
        slow = speed < WANTED_GBIT
        text = f"{speed:.1f} Gbit/s to {other}" + (f", {WANTED_GBIT:g} are recommended" if slow else "")
        repair = (
            "adapters (LoRA) send little; full fine-tuning and sharding are limited by this network" if slow else ""
        )
        findings.append(ClusterFinding("warning" if slow else "good", "bandwidth", name, text, repair))
    return findings


def judged_reduce(backend: str, ranks: Sequence[Mapping[str, Any]]) -> ClusterFinding:
    """The result of an all-reduce."""
    failed = [str(rank["error"]) for rank in ranks if "error" in rank]
    what = f"all-reduce ({backend})"
    if failed:
        repair = (
            "check that all ports are open between the nodes; NCCL_DEBUG=INFO prints details, and NCCL_SOCKET_IFNAME "
            "selects the network interface"
        )
        return ClusterFinding("problem", what, "", f"{len(failed)} of {len(ranks)} ranks failed: {failed[0]}", repair)
    if not all(rank["good"] for rank in ranks):
        return ClusterFinding("problem", what, "", "the sum is wrong", "check for faulty memory or a wrong driver")
    speed = median(float(rank["gbit_per_s"]) for rank in ranks)
    return ClusterFinding("good", what, "", f"{len(ranks)} ranks, {speed:.1f} Gbit/s")


def judged_storage(
    storage: str, failed: Mapping[str, str | None], unseen: Mapping[str, Sequence[str]]
) -> list[ClusterFinding]:
    """Whether each node can write to the storage and read what the others wrote."""
    findings = []
    for name, why in failed.items():
        if why is not None:
            repair = "mount it there, or give this user write permission; run.output_dir may also be a bucket"
            findings.append(ClusterFinding("problem", "storage", name, f"{storage} cannot be written: {why}", repair))
    written = [name for name, why in failed.items() if why is None]
    for name, missing in unseen.items():
        if others := [writer for writer in missing if writer in written]:
            repair = "the directory must be shared by all nodes (such as NFS), or be a bucket"
            text = f"does not see in {storage} what {', '.join(others)} wrote"
            findings.append(ClusterFinding("problem", "storage", name, text, repair))
    every = f"written and read by {'all ' if len(failed) > 1 else ''}{len(failed)} node{'s' * (len(failed) > 1)}"
    return findings or [ClusterFinding("good", "storage", "", f"{storage}: {every}")]


# --- looking ---------------------------------------------------------------------------------------------------------


def machine(storage: str) -> Diagnosis:
    """Check this machine; ``storage`` is where runs are written, a directory or a URL."""
    probe = Probe()
    facts = probe.facts([] if is_url(storage) else [folder_of(storage)])
    mark = os.urandom(4).hex()
    failed = {facts.name: probe.write(storage, mark)}
    unseen = probe.read(storage, [mark])
    probe.remove(storage, mark)
    findings = [*judged(facts)]
    findings += judged_storage(storage, failed, {facts.name: [facts.name] if unseen else []})
    gpus = facts.usable_gpus
    count, backend = (gpus, "nccl") if gpus > 1 else (2, "gloo")
    ranks = probe.all_reduce([*range(count)], count, "127.0.0.1", probe.free_port("127.0.0.1"), backend, "127.0.0.1")
    findings.append(judged_reduce(backend, ranks))
    return Diagnosis([facts.name], findings, [facts])


def cluster(storage: str, config: Any, *, notify: Callable[[str], None] = lambda text: None) -> Diagnosis:
    """Check all nodes of a cluster at once.

    Args:
        storage: where runs are written: a directory that all nodes see, or a URL.
        config: of the cluster.
        notify: called with the current activity.

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    with connected(config) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        # Ray lists nodes in any order. The head is first: the others' versions are compared with its.
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=_head_first)
        ips = {node["NodeManagerHostname"] + _twice(node, alive): node["NodeManagerAddress"] for node in alive}
        remote = ray.remote(Probe)
        probes = {
            name: remote.options(
                num_cpus=0, max_concurrency=4, scheduling_strategy=On(node_id=node["NodeID"], soft=False)
            ).remote()
            for name, node in zip(ips, alive, strict=True)
        }

        def call(method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
            """Call a method on nodes in parallel; returns the answers that arrive in time."""
            pending = {name: getattr(probes[name], method).remote(*given) for name, given in arguments.items()}
            ray.wait([*pending.values()], num_returns=len(pending), timeout=_ASK_S)
            results = {}
            for name, answer in pending.items():
                try:
                    results[name] = ray.get(answer, timeout=0.1)
                except Exception as error:
                    lost[name] = f"{method}: {type(error).__name__}"
            return results

        lost: dict[str, str] = {}
        try:
            return _diagnose(storage, ips, call, lost, notify)
        finally:
            for probe in probes.values():
                ray.kill(probe)


def _diagnose(
    storage: str,
    ips: Mapping[str, str],
    call: Callable[[str, Mapping[str, tuple[Any, ...]]], dict[str, Any]],
    lost: dict[str, str],
    notify: Callable[[str], None],
) -> Diagnosis:
    """Run the checks one after the other; nodes that are lost on the way are not asked again."""

    def each(*given: Any) -> dict[str, tuple[Any, ...]]:
        return {name: given for name in ips if name not in lost}

    notify(f"asking {len(ips)} nodes for their state")
    facts: dict[str, NodeFacts] = call("facts", each([] if is_url(storage) else [folder_of(storage)]))
    findings = [finding for node in facts.values() for finding in judged(node)]
    findings += judged_versions({name: node.versions for name, node in facts.items()})
    samples: dict[str, list[tuple[float, float, float]]] = {}
    for name in each():
        for _ in range(3):
            before = time.time()
            clocks = call("clock", {name: ()})
            if name in clocks:
                samples.setdefault(name, []).append((before, clocks[name], time.time()))
    findings += judged_clocks(samples)
    notify("writing to the storage and reading from it")
    mark = os.urandom(4).hex()
    failed = call("write", {name: (storage, f"{mark}-{name}") for name in each()})
    unseen = call("read", each(storage, [f"{mark}-{name}" for name in failed]))
    call("remove", {name: (storage, f"{mark}-{name}") for name in each()})
    seen = {name: [file.removeprefix(f"{mark}-") for file in missing] for name, missing in unseen.items()}
    findings += judged_storage(storage, failed, seen)
    if len(each()) > 1:
        notify("measuring the network")
        ring = [*each()]
        ports = call("listen", {name: (ips[name],) for name in ring})
        links: dict[tuple[str, str], float] = {}
        for sender, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            if sender not in lost and other in ports:
                for speed in call("send", {sender: (ips[other], ports[other])}).values():
                    links[sender, other] = speed
        findings += judged_bandwidth(links)
    notify("reducing")
    findings += _reduce([*each()], facts, ips, call)
    for name, why in lost.items():
        repair = "check that the node is alive (finray cluster status) and its ports are open"
        findings.append(ClusterFinding("problem", "node", name, f"did not answer ({why})", repair))
    return Diagnosis([*ips], findings, [*facts.values()])


def _reduce(
    known: Sequence[str],
    facts: Mapping[str, NodeFacts],
    ips: Mapping[str, str],
    call: Callable[[str, Mapping[str, tuple[Any, ...]]], dict[str, Any]],
) -> list[ClusterFinding]:
    """An all-reduce over all GPUs of all nodes, if each has one; and over CPUs, with one rank per node."""
    if not known:
        return [ClusterFinding("problem", "all-reduce", "", "no node answers")]
    host, findings = ips[known[0]], list[ClusterFinding]()
    gpus = [facts[name].usable_gpus if name in facts else 0 for name in known]
    # Workers with GPUs use Gloo too, for what is in CPU memory.
    rounds = {"gloo": [1 if len(known) > 1 else 2] * len(known)}
    if all(gpus) and sum(gpus) > 1:
        rounds = {"nccl": gpus, **(rounds if len(known) > 1 else {})}
    for backend, counts in rounds.items():
        port = call("free_port", {known[0]: (host,)}).get(known[0], 0)
        first = [sum(counts[:number]) for number in range(len(counts))]
        arguments = {
            name: ([*range(start, start + count)], sum(counts), host, port, backend, ips[name])
            for name, start, count in zip(known, first, counts, strict=True)
        }
        answers = call("all_reduce", arguments)
        ranks = [rank for each in answers.values() for rank in each]
        ranks += [{"error": "no answer"}] * (sum(counts) - len(ranks))
        findings.append(judged_reduce(backend, ranks))
    return findings


def _head_first(node: Mapping[str, Any]) -> tuple[bool, str, str]:
    """The order in which nodes are listed: the head, then by name and address."""
    return "node:__internal_head__" not in node["Resources"], node["NodeManagerHostname"], node["NodeManagerAddress"]


def _twice(node: Mapping[str, Any], alive: Sequence[Mapping[str, Any]]) -> str:
    """A suffix that distinguishes a node from another one of the same name."""
    same = [candidate for candidate in alive if candidate["NodeManagerHostname"] == node["NodeManagerHostname"]]
    return f" ({node['NodeManagerAddress']} {node['NodeID'][:4]})" if len(same) > 1 else ""
