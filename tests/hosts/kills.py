"""What dies on hosts while a training is at work, at random steps, and what a run may have lost by it: next to nothing.

One run survives all of it. A head that takes no workers and three hosts for one worker each: two are at work, and the
third takes over. Every start of the workers is looked at: it must continue from the newest checkpoint there was.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from finray.checkpoint import CheckpointStore
from finray.data.sampling.collate import Batch
from finray.records import TrainRecord
from finray.runtime import nodes
from finray.tasks.causal_lm import CausalLM
from finray.tracking.starts import Start, read_starts
from tests.support import forks, gated, hosts, runs, tiny
from tests.support.group import run_group
from tests.support.hosts import Host
from tests.support.runs import Plain

PORT = 6379
PATIENCE_S = 300.0
PARTITION_S = 20.0
# Steps between checkpoints on storage, and between those in memory.
EVERY, IN_MEMORY = 6, 2
NOTES = """
import contextlib, sys, time
from finray.errors import ClusterError
from finray.runtime import nodes
alive, file = set(), open(sys.argv[2], "a")
while True:
    with contextlib.suppress(ClusterError):
        now = {one["ip"] for one in nodes.gcs_nodes(sys.argv[1], where="") if one["alive"]}
        for change, who in (("lost", alive - now), ("listed", now - alive)):
            for ip in who:
                print(ip, change, time.time(), file=file, flush=True)
        alive = now
    time.sleep(0.2)
"""
_NO_MONITOR = '{"memory_monitor_refresh_ms":0}'

# What is done, and the steps that are done again: what is left has the newest checkpoint in its memory, or on storage.
# A node more that Ray gives up takes the other copy with it.
LOST_AT_MOST = {
    "SIGTERM": 0,
    "drain": IN_MEMORY,
    "worker": IN_MEMORY,
    "raylet": IN_MEMORY,
    "node": IN_MEMORY,
    "partition": IN_MEMORY,
    "driver": EVERY,
    "head": EVERY,
}
KINDS = tuple(LOST_AT_MOST)
# Those that end a node, which is turned on again.
ENDS_A_NODE = ("drain", "raylet", "node")
# How a run may be spread over its workers: with all but the first, each holds a share of the weights.
STRATEGIES: dict[str, Plain] = {
    "DDP": {"parallel.strategy": "ddp"},
    "FSDP2": {"parallel.strategy": "fsdp"},
    "ZeRO-3": {"parallel.strategy": "deepspeed", "parallel.zero_stage": 3},
}


class RayHosts:
    """Hosts with a Ray node each, which are turned on again and again; the first is the head and takes no workers.

    The nodes are not `finray cluster`'s, whose checks would take longer than the node. Within :func:`forks.server`
    their workers are forked, or most of the time would go by while workers import torch.

    Args:
        bed: where they stand.
        workers: hosts for workers.
        cpus: of each.
    """

    def __init__(self, bed: hosts.Bed, *, workers: int, cpus: int = 1) -> None:
        self.token = secrets.token_hex(32)
        env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_START_HOOK": "tests.support.light_ray.light",
            "RAY_enable_metrics_collection": "false",
            "COLUMNS": "200",
            # As `finray cluster up` has it.
            **nodes.HEALTH_ENV,
        }
        if forks.SOCKET in os.environ:
            env |= {forks.SOCKET: os.environ[forks.SOCKET], forks.ON_HOSTS: "1"}
        self.head, *self.workers = (bed.host(env) for _ in range(workers + 1))
        self.by_name = {one.name: one for one in (self.head, *self.workers)}
        self._bed, self._cpus, self._env = bed, cpus, env
        self._notes = bed.shared / "nodes"
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        # Nodes that had ended and were turned on again.
        self.mended = 0
        self.start(self.head, *self.workers)

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{self.head.ip}:{PORT}"

    def add(self) -> Host:
        """One host more, for workers."""
        host = self._bed.host(self._env)
        self.workers.append(host)
        self.by_name[host.name] = host
        self.start(host)
        return host

    def _log(self, host: Host) -> Path:
        return self._bed.shared / f"ray-{host.name}.log"

    def start(self, *fresh: Host) -> None:
        """Turn hosts on where they are off, and start their nodes, the head's first."""
        for host in fresh:
            self._start_node(host)
            # One after the other: together they take longer on a busy machine than Ray gives each.
            hosts.wait_until(lambda host=host: self._has_joined(host), f"Ray on {host.name}", timeout=PATIENCE_S)  # type: ignore[misc]

    def _start_node(self, host: Host) -> None:
        if not host.is_on:
            host.boot()
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.ip}", "--block"]
        words += ["--object-store-memory=80000000", f"--num-cpus={0 if host is self.head else self._cpus}"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={_NO_MONITOR}"]
        words += head if host is self.head else [f"--address={self.address}"]
        with self._log(host).open("w") as log:
            self._nodes[host.name] = host.start(*words, stdout=log, stderr=log)

    def _has_joined(self, host: Host) -> bool:
        if self._nodes[host.name].poll() is not None:
            # Ray gives itself half a minute, which a busy machine may need for something else.
            host.kill()
            self._start_node(host)
        return "Ray runtime started" in self._log(host).read_text(encoding="utf-8")

    def watch(self) -> None:
        """Note from now on when Ray lists nodes, and when it gives them up: for :meth:`noted`."""
        self.head.start(sys.executable, "-c", NOTES, self.address, self._notes)
        self.noted(self.head, "listed")

    def noted(self, host: Host, change: str) -> float:
        """Wait until Ray has ``listed`` or ``lost`` a host; when that was last, in seconds since 1970."""

        def times() -> list[float]:
            lines = self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []
            return [float(at) for ip, what, at in map(str.split, lines) if (ip, what) == (host.ip, change)]

        found: list[float] = hosts.wait_until(times, f"Ray has {change} {host.name}", timeout=PATIENCE_S)
        return found[-1]

    def again(self, *lost: Host) -> None:
        """Turn hosts off and on."""
        for host in lost:
            host.kill()
        self.start(*lost)

    def mend(self) -> None:
        """Turn hosts for workers off and on whose node has ended."""
        ended = [host for host in self.workers if self._nodes[host.name].poll() is not None]
        self.again(*ended)
        self.mended += len(ended)


def let_end(host: Host) -> None:
    """Wait for the end of the workers on a host that others have given up, after which they can do no harm; or until
    they have had much time for it."""
    until = time.monotonic() + PARTITION_S
    while host.processes("ray::RayTrainWorker") and time.monotonic() < until:
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Kill:
    """One thing that was done to a run.

    Attributes:
        kind: of :data:`LOST_AT_MOST`.
        at: the last step that was done.
        stored: the newest checkpoint on storage.
        again: the step from which the workers continued.
        seconds: until they were at work again.
    """

    kind: str
    at: int
    stored: int
    again: int
    seconds: float

    @property
    def lost(self) -> int:
        """Steps that were done twice."""
        return max(0, self.at - self.again)


@dataclass
class Victim:
    """A training on hosts, whose steps begin as they are allowed.

    Attributes:
        cluster: where it runs.
        config: its file.
        output: ``run.output_dir``.
        kills: what was done to it.
    """

    cluster: RayHosts
    config: Path
    output: Path
    kills: list[Kill] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    @property
    def run_dir(self) -> Path:
        """Of the run."""
        return self.output / "run"

    @property
    def log(self) -> Path:
        """What the command says, at all its starts."""
        return self.output / "train.log"

    def train(self) -> None:
        """Start the command, on the head."""
        self.output.mkdir(exist_ok=True, parents=True)
        with self.log.open("a") as log:
            words = ("train", self.config, f"cluster.address={self.cluster.address}")
            self._process = self.cluster.head.start_finray(*words, stdout=log, stderr=log)

    def steps(self) -> int:
        """The last step that was recorded."""
        return max([0, *runs.values(self.run_dir, "step")])

    def starts(self) -> list[Start]:
        """Of the workers."""
        return read_starts(self.run_dir)

    def hosts(self) -> list[Host]:
        """Where its workers are, by rank."""
        return [self.cluster.by_name[one["host"]] for one in runs.read_workers(self.run_dir)]

    @property
    def who(self) -> Path:
        """What says which processes its workers are."""
        return self.run_dir / "workers.json"

    def until(self, true: Callable[[], Any], what: str, *, mends: bool = True) -> Any:
        """Wait for something, while nodes that have ended are started again."""

        def looked() -> Any:
            if found := true():
                return found
            assert self.is_at_work, f"{what}: the training has ended\n{self.said()}"
            if mends:
                self.cluster.mend()
            return None

        try:
            return hosts.wait_until(looked, what, timeout=PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        """The end of what the command said."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:])

    def kill(self, kind: str, at: int, chance: random.Random) -> Kill:
        """Kill something once a step is done, and wait until the workers are at work again."""
        if begun := self.starts():
            # Until it is filled again, the memory of the cluster lacks what the kill before this one took.
            at = max(at, begun[-1].header.step + IN_MEMORY)
        # At the step, or while others are under way.
        gated.allow(self.output, at + chance.choice((0, 0, 4)))
        self.until(lambda: self.steps() >= at, f"step {at}")
        self.until(lambda: self.who.stat().st_mtime > self.starts()[-1].time - 1, "the workers say who they are")
        time.sleep(chance.random() * 0.3)
        host, began, mended = chance.choice(self.hosts()), time.time(), self.cluster.mended
        _KILLS[kind](self, host)
        # A drain takes so long that a kill before it may cause another start meanwhile: that one may be on the host.
        gone, since_gone = (host if kind == "drain" else None), time.time()
        done, stored = self.steps(), max(CheckpointStore(self.run_dir).steps(), default=0)
        if not self.is_at_work:
            if kind == "head":
                self.cluster.again(self.cluster.head, *self.cluster.workers)
            self.train()
        if kind == "partition":
            self._heal(host, began)
        else:
            self.until(lambda: self.started(began, gone, since_gone), f"workers after {kind}")
        if (start := self.started(began, gone, since_gone)) is not None:
            found = Kill(kind, done, stored, start.header.step, round(start.time - began, 1))
        else:
            # Nobody gave up within twenty seconds: they wait for each other, and lose nothing.
            found = Kill(kind, done, stored, done, round(time.time() - began, 1))
        if kind == "partition" and start is not None:
            self.cluster.again(host)
        self.kills.append(found)
        assert found.again >= stored, f"{found}: a checkpoint was not used"
        # On a busy machine Ray gives up a node that is at work, too ("mistakenly been marked as dead").
        is_one_more = self.cluster.mended - mended > (kind in ENDS_A_NODE)
        most = EVERY if is_one_more else LOST_AT_MOST[kind]
        assert found.lost <= most, f"{found}: more was lost than {most} steps"
        return found

    def started(self, since: float, gone: Host | None = None, since_gone: float = 0.0) -> Start | None:
        """The first start of the workers since a moment. By their time, because a kill before may have caused more than
        one. Until `gone` had gone it is no start on that host; after that the host may be there again."""
        for start in self.starts():
            where = {one.rpartition(" on ")[2] for one in start.header.workers}
            if start.time > since and (gone is None or gone.name not in where or start.time > since_gone):
                return start
        return None

    def _heal(self, host: Host, since: float) -> None:
        """Plug the cable in again, and wait for a step, or until who was cut off has been able to do harm."""
        while time.time() < since + PARTITION_S:
            assert self.is_at_work, self.said()
            time.sleep(0.1)
        host.heal()
        gated.allow(self.output, aim := gated.limit(self.output) + 1)
        self.until(lambda: self.started(since) or self.steps() >= aim, "workers after a partition", mends=False)
        if self.started(since) is not None:
            let_end(host)

    @property
    def is_at_work(self) -> bool:
        """Whether the command has not ended."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> int:
        """Wait for the command's end; its exit code."""
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def kill_driver(self) -> None:
        """With SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self.end()

    def stop(self) -> None:
        """With SIGKILL, where it has not ended."""
        if self.is_at_work:
            self.kill_driver()

    def terminate(self) -> None:
        """Send SIGTERM, and see that a checkpoint is saved in time, on all hosts, and that nothing is left."""
        assert self._process is not None
        self.cluster.head.signal(self._process, signal.SIGTERM)
        self.allow_until(lambda: not self.is_at_work)
        assert self.end() == 128 + signal.SIGTERM, self.said()
        step = self.steps()
        listed = CheckpointStore(self.run_dir).verify(step)["files"]
        assert len([one for one in listed if "optimizer" in one["path"]]) == len(self.hosts())
        gone = "no worker is left"
        hosts.wait_until(lambda: not any(host.processes("ray::RayTrainWorker") for host in self.cluster.workers), gone)

    def drain(self, host: Host) -> None:
        """Announce that a host will be taken away, see that a checkpoint is saved, and take it away."""
        said = self._count("is about to be removed")
        self.cluster.head.check(sys.executable, "-c", _DRAIN, self.cluster.address, host.ip)
        self.until(lambda: self._count("is about to be removed") > said, "the driver hears of it")
        stored = CheckpointStore(self.run_dir).steps()[-1:]
        self.allow_until(lambda: CheckpointStore(self.run_dir).steps()[-1:] not in (stored, []))
        host.kill()

    def _count(self, text: str) -> int:
        return self.log.read_text(encoding="utf-8", errors="replace").count(text)

    def allow_until(self, true: Callable[[], bool]) -> None:
        """Let steps begin, one at a time, until something has come of what was asked for."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, self.said()
            if (done := self.steps()) >= gated.limit(self.output):
                gated.allow(self.output, done + 1)
            time.sleep(0.2)

    def finish(self) -> None:
        """Let it come to its end."""
        gated.allow(self.output, 10**9)
        assert self.end() == 0, self.said()


def _kill_worker(run: Victim, host: Host) -> None:
    for one in runs.read_workers(run.run_dir):
        if one["host"] == host.name:
            host.run("bash", "-c", f"kill -9 {one['pid']}")


def _kill_raylet(run: Victim, host: Host) -> None:
    for one in host.processes():
        with suppress(psutil.NoSuchProcess):
            if one.name() == "raylet":
                one.kill()


def _kill_head(run: Victim, host: Host) -> None:
    run.cluster.head.kill()
    run.end()


# As a cloud announces it: in half a minute the machine is gone.
_DRAIN = "import sys; from finray.runtime.nodes import announce_end; announce_end(*sys.argv[1:3], 30.0, where='drain')"

_KILLS: dict[str, Callable[[Victim, Host], None]] = {
    "worker": _kill_worker,
    "raylet": _kill_raylet,
    "node": lambda run, host: host.kill(),
    "partition": lambda run, host: host.cut(),
    "driver": lambda run, host: run.kill_driver(),
    "head": _kill_head,
    "SIGTERM": lambda run, host: run.terminate(),
    "drain": lambda run, host: run.drain(host),
}


def plan(kinds: Sequence[str], chance: random.Random) -> list[tuple[str, int]]:
    """What is done at which step, in a random order."""
    at, found = 0, []
    for kind in chance.sample(list(kinds), len(kinds)):
        at += chance.randint(2, 2 * EVERY)
        found.append((kind, at))
    return found


def steps_for(count: int) -> int:
    """Steps of a run that so many things are done to, at most."""
    return 2 * EVERY * count + EVERY


def small_run(shared: Path, tokenizer: Any) -> Plain:
    """A config whose model and data all hosts see, with dropout: what a step comes to depends on its random numbers."""
    tiny.save_model("llama", shared / "model", tokenizer, attention_dropout=0.1)
    rows = tiny.write_chat_rows(shared, 50)
    return runs.tiny_run(shared / "model", rows, shared / "unused", {"adapter.dropout": 0.2})


def victim(cluster: RayHosts, plain: Plain, folder: Path, changes: Plain, *, steps: int) -> Victim:
    """A run of two workers, in a directory that all hosts see."""
    saved = {"every_steps": EVERY, "in_memory_every": IN_MEMORY, "keep_last": 3, "asynchronous": False}
    placed = {"num_workers": 2, "cpus_per_worker": 1, "max_failures": 20}
    # A busy machine takes longer than a user would wait for a checkpoint.
    saved["grace_seconds"] = PATIENCE_S / 2
    output = folder / "out"
    own = {"train.max_steps": steps, "checkpoint": saved, "cluster": placed}
    folder.mkdir()
    config = runs.write_config(gated.gated(plain, output, own, changes), folder / "run.yaml")
    return Victim(cluster, config, output)


def disturb(run: Victim, planned: Sequence[tuple[str, int]], chance: random.Random) -> None:
    """Do to a run what was planned, and let it end."""
    run.train()
    try:
        for number, (kind, at) in enumerate(planned, 1):
            found = run.kill(kind, at, chance)
            print(f"{number} of {len(planned)}: {found}; {found.lost} steps done twice", flush=True)
        run.finish()
    finally:
        # One that failed holds the machines of the next test.
        run.stop()


def undisturbed(plain: Plain, run_dir: Path, *, steps: int, workers: int = 2) -> Path:
    """The same run by processes that nobody disturbs, without Ray."""
    changes = {"train.max_steps": steps, "checkpoint.every_steps": EVERY}
    run_group(runs.changed(plain, changes), run_dir, world_size=workers)
    return run_dir


def require_same(run_dir: Path, other: Path) -> None:
    """See that two runs have the same record and the same adapter, to the bit."""
    assert runs.trace(run_dir) == runs.trace(other)
    name, (*_, last) = "adapter_model.safetensors", CheckpointStore(other).steps()
    assert (run_dir / "final" / name).read_bytes() == (CheckpointStore(other).path_of(last) / name).read_bytes()


# --- a host that comes back and still writes -------------------------------------------------------------------------


_done = 0  # steps that this very process did, under the tracker Did


class Did:
    """A tracker that writes down which steps this very process did, beside the run."""

    def start(self, run: Any) -> None:
        """Begin a file that names the host."""
        self._file = Path(run.run_dir).with_name(f"did-{socket.gethostname()}-{uuid.uuid4().hex[:6]}")

    def log(self, record: Any) -> None:
        """Note a step."""
        global _done
        if isinstance(record, TrainRecord):
            _done += 1
            with self._file.open("a") as stream:
                stream.write(f"{record.step}\n")

    def finish(self) -> None:
        """Nothing is open."""


class LimitedLM(CausalLM):
    """A causal language model of which each process does no more steps than a file of all hosts allows."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Wait until this process may do another step."""
        limit = Path(os.environ["LIMIT_FILE"])
        while _done >= int(limit.read_text()):
            time.sleep(0.02)
        return super().outputs(batch)


def cut_off_and_writing(run: Victim, at: int, chance: random.Random) -> Kill:
    """Cut off the host of a run's only worker, which can continue by itself, and let both continue: the one that was
    cut off, and the one that has taken its place."""
    gated.allow(run.output, at)
    run.until(lambda: run.steps() >= at, f"step {at}")
    run.until(lambda: run.who.stat().st_mtime > run.starts()[-1].time - 1, "the worker says who it is")
    time.sleep(chance.random() * 0.3)
    # A step is recorded before its checkpoint is there.
    has_stored = at // EVERY * EVERY
    run.until(lambda: max(CheckpointStore(run.run_dir).steps(), default=0) >= has_stored, "the last checkpoint")
    (host,), stored = run.hosts(), max(CheckpointStore(run.run_dir).steps(), default=0)
    files = (one for one in run.output.glob(f"did-{host.name}-*") if not one.with_suffix(".seen").exists())
    # A worker may have taken another's place on the same host.
    file = max(files, key=lambda one: one.stat().st_mtime)
    began = time.time()
    host.cut()
    start = run.until(lambda: run.started(began, host), "another worker", mends=False)
    # The next step at which the old one saves a checkpoint: it does the step, and must not come any further.
    due = (at // EVERY + 1) * EVERY

    def came_to(step: int) -> bool:
        return str(step) in file.read_text().split()

    run.allow_until(lambda: came_to(due))
    run.allow_until(lambda: run.steps() > due)
    while time.time() < began + PARTITION_S:
        time.sleep(0.1)
    host.heal()
    let_end(host)
    assert not came_to(due + 1), "who was cut off went on beyond a checkpoint that it could not have saved"
    for one in run.output.glob("did-*"):
        if not one.suffix and one.name.startswith(f"did-{host.name}-"):
            one.with_suffix(".seen").touch()
    run.cluster.again(host)
    found = Kill("still writing", at, stored, start.header.step, round(start.time - began, 1))
    run.kills.append(found)
    assert found.again == stored, f"{found}: that is not the newest checkpoint"
    return found
