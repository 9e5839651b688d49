"""What runs in every Ray Train worker: find the place in the group, build the loop, run it."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.checkpoint.store import replace_text
from finray.config.environment import accept
from finray.config.load import build_config
from finray.config.paths import run_path, run_url
from finray.config.redact import redact_text
from finray.config.resolved import Resolved, Settled
from finray.config.schema import Config
from finray.errors import CheckpointError, FinrayError, TrainingError
from finray.publishing.hub import Target
from finray.records import Beat, Note, Record, RunSummary
from finray.runtime import failures
from finray.runtime.logs import LogCopy
from finray.runtime.progress import RESIZE, Address, Sender, ask

if TYPE_CHECKING:
    import torch

    from finray.parallel.base import Strategy
    from finray.publishing.background import CheckpointPusher
    from finray.training.evaluator import Answering, Evaluator
    from finray.training.memory import Memory
    from finray.training.pulse import Pulse

# How long the last checkpoint of a run may be sent after its training.
_LAST_PUSH_S = 120.0


@dataclass(frozen=True, slots=True)
class Pushing:
    """Where rank 0 pushes checkpoints, as whom: what was found where the run was started."""

    target: Target
    endpoint: str
    token: str = field(repr=False)

    @classmethod
    def here(cls, target: Target) -> Pushing:
        """With the token and the Hub of this process."""
        from huggingface_hub import constants, get_token

        return cls(target, constants.ENDPOINT, get_token() or "")


# The shortest pause between two words of a rank about itself where it may be waited for long, and what each rank adds
# to it: the driver hears no more of many ranks than of eight.
_BEAT_S, _BEAT_RANK_S = 10.0, 1.25
# How long the end of a worker waits for Ray to have heard of its checkpoints.
_REPORTS_S = 5.0
# Linux's request for the address of an interface.
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the driver hands to every worker.

    Attributes:
        config: the run's, plain.
        resolved: what every ``auto`` of it comes to.
        prepared: directory or URL of the prepared dataset; None where it is still being made, and the driver is
            asked.
        run_dir: the run directory.
        start: names this `finray train`.
        threads: of this worker.
        shared_gpus: whether several workers may share a GPU.
        listener: where the driver takes records.
        secrets: of the user, for the worker's environment.
        memory: begin of the names of those who keep checkpoints in memory; None where nobody does.
        evaluator: Ray's resources for evaluations beside the training; None where there are none.
        push: where checkpoints are pushed; None where they are not.
    """

    config: dict[str, Any]
    resolved: Resolved
    prepared: str | None
    run_dir: str
    start: str
    threads: int
    listener: Address
    shared_gpus: bool = False
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    evaluator: dict[str, float] | None = None
    memory: str | None = None
    push: Pushing | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker ended: with the run's summary, stopped after a step because that was asked for, or with a failure
    that another attempt would meet again."""

    summary: RunSummary | None = None
    stopped: int | None = None
    failure: dict[str, Any] | None = None


def train_worker(payload: dict[str, WorkerSpec]) -> Outcome:
    """Train; the value of rank 0 is the run's.

    Ray restarts what raises. So an error that another attempt would meet again (a model that does not load, a loss that
    is not finite, a full disk) is returned, and the driver raises it.

    Args:
        payload: ``spec``.
    """
    import ray
    import torch

    from finray.parallel import make_strategy
    from finray.runtime.elastic import Resize
    from finray.training.allocator import keep_freed_memory
    from finray.training.assemble import assemble

    spec = payload["spec"]
    accept(spec.secrets)
    torch.set_num_threads(spec.threads)
    config = build_config(spec.config, source="driver")
    keep_freed_memory(but_large=spec.resolved.strategy != "ddp")
    strategy = make_strategy(config, spec.resolved, _join_group(shared_gpus=spec.shared_gpus))
    # It may be another one at each start.
    resolved = replace(spec.resolved, world_size=strategy.world_size)
    run_dir = Path(spec.run_dir)
    if run_url(config) is not None:
        # This machine's copy; another user's cache may be elsewhere.
        run_dir = run_path(config)
        run_dir.mkdir(parents=True, exist_ok=True)
    attempt = strategy.broadcast_object(uuid.uuid4().hex)

    sender, reports = Sender(spec.listener), Reports(_report)
    pusher = _pusher(config, spec.push, sender.put) if spec.push is not None and strategy.rank == 0 else None
    log = LogCopy.of_this_process(run_dir / failures.LOGS / failures.log_name(strategy.rank))
    step, loop = failures.LOADING, None
    hang_s = config.cluster.hang_seconds
    pulse, node = (lambda: None if loop is None else loop.pulse), ray.get_runtime_context().get_node_id()
    beat(sender, strategy.rank, strategy.world_size, attempt, pulse, node=node, hang_s=hang_s)

    def failed(error: BaseException) -> failures.Failure:
        described, end = failures.describe(error), failures.end_of(error)
        who = attempt, step, described, strategy.rank, socket.gethostname(), end
        return failures.Failure(*who, spec.start, time.time(), "\n".join(log.last()))

    try:
        before = [one for part in strategy.all_gather_object(failures.known(run_dir, spec.start)) for one in part]
        failures.check(before, failures.LOADING, run_dir)
        loop = assemble(
            config,
            resolved,
            prepared=spec.prepared or partial(_late, spec.listener, strategy.world_size),
            run_dir=run_dir,
            strategy=strategy,
            notify=sender.put,
            reported=partial(_reported, reports, pusher),
            answering=_answering(config, spec),
            evaluator=partial(_evaluator, spec, sender.put),
            memory=_memory(spec, strategy),
            # What is asked for is asked of rank 0; another one might hear it at another step.
            asked=sender.is_asked if strategy.rank == 0 else lambda: False,
            wish=sender.take_wish,
        ).loop
        step = loop.state.step
        failures.check(before, step, run_dir)
        _record_processes(run_dir, strategy)
        is_over = False
        try:
            loop.run()
            is_over = not loop.stopped
        finally:
            loop.trackers.finish(complete=is_over)
            loop.writer.follow()
            if pusher is not None:
                # Of a run that goes on there will be other checkpoints.
                pusher.close(wait_s=_LAST_PUSH_S if is_over else 0)
        outcome = Outcome(stopped=loop.state.step) if loop.stopped else Outcome(loop.summary())
        reports.close()
        torch.distributed.destroy_process_group()
        if loop.stopped and loop.ended_by == RESIZE:
            raise Resize(f"another number of workers goes on from step {loop.state.step}")
        return outcome
    except Resize:
        raise
    except FinrayError as error:
        if step != failures.LOADING and not isinstance(error, TrainingError | CheckpointError):
            failures.record(run_dir, failed(error))
            raise
        # Raised on every rank alike; see training.assemble, training.step and training.loop.
        return Outcome(failure=error.to_dict())
    except Exception as error:
        failures.record(run_dir, failed(error))
        who = f"rank {strategy.rank} on {socket.gethostname()}"
        if (memory := failures.out_of_memory(error, who, step if loop is None else loop.state.step)) is not None:
            raise memory from error
        if redact_text(str(error)) != str(error):
            # Ray writes into its logs what is raised.
            raise RuntimeError(failures.describe(error)) from None
        raise
    finally:
        sender.close()
        log.close()


def _answering(config: Config, spec: WorkerSpec) -> Answering | None:
    if config.evaluation.generate_rows is None or config.evaluation.mode == "async":
        return None
    from finray.evaluation.during import Answers

    return Answers(config, spec.resolved.precision)


def _memory(spec: WorkerSpec, strategy: Strategy) -> Memory | None:
    """Who keeps this worker's parts of checkpoints in memory; a collective."""
    if spec.memory is None:
        return None
    import ray

    from finray.runtime.keepers import RayMemory

    nodes = strategy.all_gather_object(ray.get_runtime_context().get_node_id())
    return RayMemory(spec.memory, nodes, strategy.rank)


def _evaluator(spec: WorkerSpec, tell: Callable[[Record], None], known: Settled) -> Evaluator:
    from finray.runtime.evaluator import RayEvaluator

    assert spec.evaluator is not None
    return RayEvaluator.of(spec, spec.evaluator, known, tell)


def _late(listener: Address, world_size: int) -> Settled:
    """What the driver settles once the data are prepared, for this number of workers."""
    settled = ask(listener)
    return replace(settled, resolved=replace(settled.resolved, world_size=world_size))


def _join_group(*, shared_gpus: bool) -> torch.device:
    """Join the process group of the workers, as Ray's torch back end does; returns the device of this one."""
    import ray.train
    import ray.train.torch
    import torch
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    device: torch.device = ray.train.torch.get_device()
    rank = context.get_world_rank()
    on_one_machine = context.get_local_world_size() == context.get_world_size()
    listening = listen("127.0.0.1" if on_one_machine else ray.util.get_node_ip_address()) if rank == 0 else None
    address = broadcast_from_rank_zero(list(listening.getsockname()[:2]) if listening is not None else None)
    # Else gloo would take the interface that the host's name belongs to, which Debian puts at 127.0.1.1.
    interface = "lo" if on_one_machine else interface_of(ray.util.get_node_ip_address())
    if interface is not None and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ |= {
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "ACCELERATE_TORCH_DEVICE": str(device),
    }
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # NCCL refuses two ranks on one GPU.
    backend = "nccl" if device.type == "cuda" and not shared_gpus else "gloo"
    world_size, timeout = context.get_world_size(), timedelta(minutes=30)
    store = meet((address[0], address[1]), listening, world_size=world_size, timeout=timeout)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address; None where none is found."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            # An interface without an address answers with an error.
            with suppress(OSError):
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def listen(host: str, port: int = 0) -> socket.socket:
    """Where rank 0 is met: at this address alone. Left to itself, torch's store would listen on every interface, and it
    asks nobody for a token."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def meet(address: tuple[str, int], listening: socket.socket | None, *, world_size: int, timeout: timedelta) -> Any:
    """The store of the workers; rank 0 gives the socket on which it listens, and loses it to the store."""
    import torch

    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address[0],
        address[1],
        world_size,
        is_master=listening is not None,
        timeout=timeout,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _pusher(config: Config, push: Pushing, tell: Callable[[Record], None]) -> CheckpointPusher:
    from finray.publishing.background import CheckpointPusher
    from finray.publishing.hub import Hub, public_name

    base = None if config.adapter.method == "none" else config.model.name
    return CheckpointPusher(
        lambda wait: Hub(push.token, endpoint=push.endpoint, wait=wait),
        push.target,
        base=public_name(base, config.export.base_model, merged=True),
        warn=lambda message, step: tell(Note(message, step, "warning")),
    )


def _reported(reports: Reports, pusher: CheckpointPusher | None, path: Path, metrics: dict[str, float]) -> None:
    """Have a checkpoint pushed, before retention may delete it; and tell Ray Train, on every rank."""
    if pusher is not None:
        pusher.offer(path)
    reports.put(path, metrics)


class Reports:
    """Tells Ray Train about checkpoints, in a thread: a report waits for all workers and for Ray's controller, and for
    ever where the head process is gone. No step waits for it, nor does the next checkpoint.

    finray itself finds checkpoints on disk. A report is for whoever looks at the run through Ray.
    """

    def __init__(self, report: Callable[[Path, dict[str, float]], None]) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[tuple[Path, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="finray-reports", daemon=True)
        self._thread.start()

    def put(self, path: Path, metrics: dict[str, float]) -> None:
        """Report a checkpoint that is already where it belongs; returns at once."""
        self._queue.put((path, metrics))

    def close(self, timeout_s: float = _REPORTS_S) -> None:
        """Wait, though not for long, until all has been told."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (one := self._queue.get()) is not None:
            try:
                self._report(*one)
            except Exception:
                # Ray Train ends; the checkpoint is there.
                return


def _report(path: Path, metrics: dict[str, float]) -> None:
    import ray.train
    from ray.train import CheckpointUploadMode

    first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint(str(path)) if first else None,
        checkpoint_dir_name=path.name,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def beat(
    sender: Sender,
    rank: int,
    world_size: int,
    attempt: str,
    pulse: Callable[[], Pulse | None],
    *,
    node: str,
    hang_s: float | None,
) -> None:
    """Tell the driver where this rank stands, from now on, in a thread; SIGUSR1 writes the stacks of all threads.

    ``pulse`` gives None while the rank loads.
    """
    import faulthandler

    if hang_s is None:
        return
    pause_s = beat_pause(hang_s, world_size)
    with suppress(ValueError, OSError, RuntimeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def go_on() -> None:
        who = Beat(attempt, rank, socket.gethostname(), os.getpid(), node, step=failures.LOADING)
        while not sender.is_closed:
            if (now := pulse()) is None:
                sender.put(who)
            else:
                of = now.step, now.phase, now.steps, now.work_s, now.longest_s
                sender.put(Beat(who.attempt, who.rank, who.host, who.pid, who.node, *of))
            sender.wait_closed(pause_s)

    threading.Thread(target=go_on, name="finray-beat", daemon=True).start()


def beat_pause(hang_s: float, world_size: int) -> float:
    """Seconds between two words of a rank about itself."""
    return min(hang_s / 5, max(_BEAT_S, _BEAT_RANK_S * world_size))


def _record_processes(run_dir: Path, strategy: Any) -> None:
    """Write who the workers are: host and process id by rank, for whoever has to look into or end one."""
    ranks = {
        "rank": strategy.rank,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node_rank": int(os.environ["NODE_RANK"]),
    }
    processes = strategy.all_gather_object({**ranks, "host": socket.gethostname(), "pid": os.getpid()})
    if strategy.rank == 0:
        replace_text(run_dir / "workers.json", json.dumps(processes, indent=2) + "\n")
