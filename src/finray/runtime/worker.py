"""Runs in every Ray Train worker: join the process group, build the loop, run it."""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.config.environment import accept
from finray.config.load import build_config
from finray.config.paths import run_path, run_url
from finray.config.redact import redact_error
from finray.config.resolved import PreparedRun
from finray.config.schema import Config
from finray.errors import DataUnavailable, FinrayError, StorageError
from finray.files import replace_text
from finray.records import Note, Record, RunSummary
from finray.runtime import failures
from finray.runtime.heartbeat import Heart, beat
from finray.runtime.logs import LogCopy
from finray.runtime.preload import import_all, needed
from finray.runtime.progress import RESIZE, Sender, wait_for_data
from finray.runtime.spec import Pushing, WorkerSpec
from finray.training.pulse import Pulse

if TYPE_CHECKING:
    import torch

    from finray.parallel.base import Strategy
    from finray.publishing.background import CheckpointPusher
    from finray.training.evaluator import AnswerMetrics, Evaluator
    from finray.training.loop import Loop
    from finray.training.memory import Memory

# How long to wait for the push of a run's last checkpoint after training.
_LAST_PUSH_S = 120.0


# How long a worker that exits waits for Ray to accept its checkpoint reports.
_REPORTS_S = 5.0
# Linux's request for the address of an interface.
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker ended: with the run's summary, stopped on request after a step, or with a failure that a retry would
    hit again."""

    summary: RunSummary | None = None
    stopped: int | None = None
    failure: dict[str, Any] | None = None


def train_worker(payload: dict[str, WorkerSpec]) -> Outcome:
    """Train; rank 0's return value is the run's.

    Ray restarts the workers if one raises. So an error that a retry would hit again (a model that does not load, a loss
    that is not finite, a full disk) is returned, and the driver raises it.

    Args:
        payload: ``spec``.
    """
    import ray.train

    spec = payload["spec"]
    accept(spec.secrets)
    context, starting = ray.train.get_context(), Pulse()
    starting.begins(failures.LOADING)
    # Each start of the workers has a placement group of its own.
    who = ray.get_runtime_context().get_placement_group_id() or "", context.get_world_rank(), starting
    # The imports may hang, too.
    with closing(Sender(spec.listener)) as sender:
        return _train(spec, sender, beat(sender, *who, hang_s=spec.hang_s, world_size=context.get_world_size()))


def _train(spec: WorkerSpec, sender: Sender, heart: Heart) -> Outcome:
    config = build_config(spec.config, source="driver")
    # Most were imported when the process started, if this machine's Ray is ours.
    import_all(needed(config))
    import torch

    from finray.parallel import make_strategy
    from finray.parallel.base import OtherRankFailed
    from finray.runtime.elastic import Resize
    from finray.training.allocator import keep_freed_memory

    torch.set_num_threads(spec.threads)
    keep_freed_memory(but_large=spec.execution.strategy != "ddp" or spec.execution.weights == "bf16")
    strategy = make_strategy(config, spec.execution, _join_group(heart.pulse, shared_gpus=spec.shared_gpus))
    run_dir = Path(spec.run_dir)
    if run_url(config) is not None:
        # The path on this machine; another user's cache may be elsewhere.
        run_dir = run_path(config)
        run_dir.mkdir(parents=True, exist_ok=True)
    attempt = strategy.broadcast_object(uuid.uuid4().hex)

    reports = Reports(_report)
    pusher = _pusher(config, spec.push, sender.put) if spec.push is not None and strategy.rank == 0 else None
    log = LogCopy.of_this_process(run_dir / failures.LOGS / failures.log_name(strategy.rank))
    step, loop = failures.LOADING, None

    def failed(error: BaseException) -> failures.Failure:
        return failures.Failure(
            attempt=attempt,
            from_step=step,
            error=failures.describe(error),
            rank=strategy.rank,
            host=socket.gethostname(),
            traceback=failures.end_of(error),
            start=spec.start,
            time=time.time(),
            printed="\n".join(log.last()),
        )

    try:
        before = [each for part in strategy.all_gather_object(failures.known(run_dir, spec.start)) for each in part]
        failures.check(before, failures.LOADING, run_dir)
        loop = _loop(spec, config, run_dir, strategy, sender, partial(_reported, reports, pusher))
        heart.pulse, step = loop.pulse, loop.state.step
        failures.check(before, step, run_dir)
        _record_processes(run_dir, strategy)
        outcome = _run(loop, pusher)
        reports.close()
        torch.distributed.destroy_process_group()
        if loop.stopped and loop.ended_by == RESIZE:
            raise Resize(f"the number of workers changes at step {loop.state.step}")
        return outcome
    except Resize:
        raise
    except FinrayError as error:
        if not failures.is_final(error, step):
            # Storage that does not answer says nothing about the next attempt.
            if not isinstance(error, StorageError | DataUnavailable):
                failures.record(run_dir, failed(error))
            if strategy.rank == 0:
                again = "the workers are restarted, if cluster.max_failures allows it"
                sender.put(Note(f"{failures.describe(error)}; {again}", level="warning"))
            raise
        # Raised on every rank alike; see training.assemble, training.step and training.loop.
        return Outcome(failure=error.to_dict())
    except OtherRankFailed:
        # Its own rank records what it was.
        raise
    except Exception as error:
        failure = failed(error)
        failures.record(run_dir, failure)
        if loop is not None and loop.state.step == step:
            repeats = failures.of_first_step(error, failure, run_dir)
            if repeats is not None:
                raise repeats from None
        who = f"rank {strategy.rank} on {socket.gethostname()}"
        if (memory := failures.out_of_memory(error, who, step if loop is None else loop.state.step)) is not None:
            raise memory from error
        if redact_error(error) != "".join(traceback.format_exception(error)):
            # Ray writes the exception into its logs.
            raise RuntimeError(failures.describe(error)) from None
        raise
    finally:
        log.close()


def _run(loop: Loop, pusher: CheckpointPusher | None) -> Outcome:
    """Run the loop to its end; trackers, copies of the run and pushes are always closed."""
    is_over = False
    try:
        loop.run()
        is_over = not loop.stopped
    finally:
        loop.trackers.finish(complete=is_over)
        loop.writer.sync_records()
        if pusher is not None:
            # If the run continues, later checkpoints will be pushed.
            pusher.close(wait_s=_LAST_PUSH_S if is_over else 0)
    return Outcome(summary=loop.summary()) if is_over else Outcome(stopped=loop.state.step)


def _loop(
    spec: WorkerSpec,
    config: Config,
    run_dir: Path,
    strategy: Strategy,
    sender: Sender,
    reported: Callable[[Path, dict[str, float]], None],
) -> Loop:
    """The training of this rank, with what it uses of Ray. A collective."""
    import ray

    from finray.training.assemble import assemble

    def evaluator(prepared: PreparedRun) -> Evaluator:
        from finray.runtime.evaluator import RayEvaluator

        assert spec.evaluator is not None
        return RayEvaluator.of(spec, spec.evaluator, prepared, sender.put)

    answering: AnswerMetrics | None = None
    memory: Memory | None = None
    if config.evaluation.generate_rows is not None and config.evaluation.mode != "async":
        from finray.evaluation.during import TrainingAnswers

        answering = TrainingAnswers(config, spec.execution.precision)
    if spec.memory is not None:
        from finray.runtime.memory_actors import RayMemory

        nodes = strategy.all_gather_object(ray.get_runtime_context().get_node_id())
        memory = RayMemory(spec.memory, nodes, strategy.rank)
    return assemble(
        config,
        spec.execution,
        prepared=spec.prepared or partial(wait_for_data, spec.listener),
        run_dir=run_dir,
        strategy=strategy,
        notify=sender.put,
        reported=reported,
        answering=answering,
        evaluator=evaluator,
        memory=memory,
        # Only rank 0 polls for requests; another rank might see one at a different step.
        has_request=sender.has_request if strategy.rank == 0 else lambda: False,
        take_request=sender.take_request,
    ).loop


def _join_group(pulse: Pulse, *, shared_gpus: bool) -> torch.device:
    """Join the process group of the workers, as Ray's torch back end does; returns the device of this one.

    ``pulse`` tells when it waits for the others, and when it has joined them.
    """
    import ray.train
    import ray.train.torch
    import torch
    from ray.train.collective import broadcast_from_rank_zero

    from finray.parallel.base import backend_of

    context = ray.train.get_context()
    device: torch.device = ray.train.torch.get_device()
    rank = context.get_world_rank()
    on_one_machine = context.get_local_world_size() == context.get_world_size()
    listening = listen("127.0.0.1" if on_one_machine else ray.util.get_node_ip_address()) if rank == 0 else None
    pulse.phase = "waiting"
    address = broadcast_from_rank_zero(list(listening.getsockname()[:2]) if listening is not None else None)
    # Otherwise gloo uses the interface of the host name, which Debian maps to 127.0.1.1.
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
    backend = backend_of(device, shared_gpu=shared_gpus)
    world_size, timeout = context.get_world_size(), timedelta(minutes=30)
    store = meet((address[0], address[1]), listening, world_size=world_size, timeout=timeout)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    pulse.phase = "other"
    return device


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address; None if there is none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            # An interface without an address answers with an error.
            with suppress(OSError):
                reply = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def listen(host: str, port: int = 0) -> socket.socket:
    """The socket on which rank 0 listens: at this address only. By default torch's store listens on every interface,
    without authentication."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def meet(address: tuple[str, int], listening: socket.socket | None, *, world_size: int, timeout: timedelta) -> Any:
    """The TCPStore of the workers; rank 0 passes the socket on which it listens, which the store takes over."""
    import torch

    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address[0],
        address[1],
        world_size,
        is_master=listening is not None,
        timeout=timeout,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _pusher(config: Config, push: Pushing, notify: Callable[[Record], None]) -> CheckpointPusher:
    from finray.publishing.background import CheckpointPusher
    from finray.publishing.hub import Hub, public_name

    base = None if config.adapter.method == "none" else config.model.name
    return CheckpointPusher(
        lambda wait: Hub(push.token, endpoint=push.endpoint, wait=wait),
        push.target,
        base=public_name(base, config.export.base_model, merged=True),
        warn=lambda message, step: notify(Note(message, step, "warning")),
    )


def _reported(reports: Reports, pusher: CheckpointPusher | None, path: Path, metrics: dict[str, float]) -> None:
    """Push a checkpoint before retention may delete it, and report it to Ray Train, on every rank."""
    if pusher is not None:
        pusher.offer(path)
    reports.put(path, metrics)


class Reports:
    """Reports checkpoints to Ray Train in a thread: a report waits for all workers and for Ray's controller, forever if
    the head process is gone. Neither a step nor the next checkpoint waits for it.

    finray itself finds checkpoints on disk. The report only serves people who look at the run through Ray.
    """

    def __init__(self, report: Callable[[Path, dict[str, float]], None]) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[tuple[Path, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="finray-reports", daemon=True)
        self._thread.start()

    def put(self, path: Path, metrics: dict[str, float]) -> None:
        """Report a checkpoint that is already in place; returns at once."""
        self._queue.put((path, metrics))

    def close(self, timeout_s: float = _REPORTS_S) -> None:
        """Wait for pending reports, up to the timeout."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                self._report(*report)
            except Exception:
                # Ray Train is shutting down; the checkpoint is on disk.
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


def _record_processes(run_dir: Path, strategy: Any) -> None:
    """Write host and process id of every rank, for inspecting or killing a worker."""
    ranks = {
        "rank": strategy.rank,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node_rank": int(os.environ["NODE_RANK"]),
    }
    processes = strategy.all_gather_object({**ranks, "host": socket.gethostname(), "pid": os.getpid()})
    if strategy.rank == 0:
        # Nothing reads it but people: a full disk must not end the run here.
        with suppress(OSError):
            replace_text(run_dir / "workers.json", json.dumps(processes, indent=2) + "\n")
