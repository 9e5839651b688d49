"""A run from the outside: begin to prepare the data, connect to Ray, fit, finish.

Each part takes the results of those before it, so that code that runs many fits (a search, a restart at another size)
calls the same parts: :func:`connect` joins a running Ray, and :func:`fit` takes a preparation that has ended or is
still running.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from finray.checkpoint import manifest
from finray.checkpoint.remote import TRAINING_LOG
from finray.checkpoint.rundir import RunDir, open_run
from finray.config.environment import secrets_of
from finray.config.objectives import spec_of
from finray.config.paths import local_dir_of, with_absolute_paths
from finray.config.resolved import Execution, Packing, PreparedRun, Resolved
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.config.trust import require_trusted
from finray.data.dataset.labels import find_labels
from finray.data.dataset.plan import remarks_on_files
from finray.data.dataset.prepare import Preparation, start_preparation
from finray.data.dataset.prepared import PreparedDataset
from finray.data.dataset.report import report_lines, shared_rows, unserved_ends
from finray.data.dataset.run_data import decide_steps, longest_of, run_data
from finray.errors import FinrayError, from_dict
from finray.files import digest_of
from finray.models.packing_cache import cached_packing, packing_of
from finray.planning.checks import check_push, require_startable
from finray.planning.micro_batch import choose_micro_batch
from finray.planning.placement import (
    Device,
    Placement,
    crowded,
    device_of,
    place,
    slow_precision,
    worker_environment,
)
from finray.planning.resolve import needs_torch, resolve
from finray.planning.steps import beyond_positions, chosen_notes, require_prompts, step_warnings
from finray.pretrained.tokenizers import generation_stops
from finray.publishing.hub import Target
from finray.records import Note, Record, RunSummary
from finray.reporting.run import TrainResult
from finray.runtime import cluster as clusters
from finray.runtime import failures
from finray.runtime.logs import RecordLog
from finray.runtime.memory_actors import MemoryActors
from finray.runtime.preload import PRELOAD, needed
from finray.runtime.prepare import Helpers
from finray.runtime.progress import Address, Listener
from finray.runtime.pulses import end_hanging
from finray.runtime.signals import Pending, deferred
from finray.runtime.token import token_file
from finray.runtime.watch import RunMonitor, is_refused, refusal, workers_of
from finray.tracking.access import require_access
from finray.tracking.jsonl import mean_loss

if TYPE_CHECKING:
    from finray.runtime.trainer import Trainer
    from finray.runtime.worker import Outcome

# How long Ray's head process may be unreachable. Nobody restarts our own; that of a cluster may come back.
_OWN_HEAD_S, _HEAD_S = 4.0, 40.0

Handle = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Connected:
    """A connected Ray, and what the run uses of it."""

    ray: Any  # the module, connected
    is_local: bool  # Ray was started on this machine for the run, and ends with it
    placement: Placement  # of the workers
    execution: Execution  # what the config leaves open, except for what depends on the data
    env: dict[str, str]  # environment variables of the run's processes
    worker_env: dict[str, str]  # those of the training workers
    started: float  # ``time.perf_counter()`` before it was connected
    seconds: float  # time that connecting took
    packing: Packing  # whether rows of the model may be packed, with its positions and its width
    device: Device | None = None  # of a worker


@dataclass(frozen=True, slots=True)
class Fitted:
    """Rank 0's summary, the seconds that :func:`fit` took, and those until the data were ready."""

    summary: RunSummary
    seconds: float
    prepare_seconds: float


def train(
    config: Config, *, fresh: bool = False, handle: Handle = lambda record: None, hide_torch: bool = False
) -> TrainResult:
    """Run or continue a fine-tuning.

    Args:
        config: the run's configuration.
        fresh: move an earlier run of this name aside first.
        handle: called with each record (notes, header, metrics, warnings).
        hide_torch: load the tokenizer without torch if nothing in this process needs it; see
            :func:`finray.data.dataset.prepare.start_preparation`.

    Raises:
        FinrayError: says what happened, where, and the repair.
    """
    require_trusted(config)
    config = with_absolute_paths(config)
    require_startable(config)
    for message in require_access(config.tracking):
        handle(Note(message, level="warning"))
    target = check_push(config) if fresh or _to_push(config, RunDir.of(config)) is not None else None
    with (
        open_run(config, fresh=fresh, notify=lambda message: handle(Note(message))) as run,
        _note_last_checkpoint(run, config),
        ExitStack() as stack,
    ):
        if (done := run.finished()) is not None:
            longer = "a higher train.epochs or train.max_steps continues it"
            handle(Note(f"the run is already finished; {longer}, and --fresh (in Python fresh=True) starts over"))
            run.pull(final=True)
            chosen = run.mend_final(best=_best(config), warn=lambda message: handle(Note(message, level="warning")))
            if chosen not in (None, done.chosen_step):
                run.finish({"chosen_step": chosen, "summary": done.summary.json()})
            _push(config, run, handle)
            return TrainResult(run.path, run.final, chosen or done.chosen_step, done.summary)
        if target is None:
            # It was finished and pushed, and is made longer.
            target = check_push(config)
        failures.forget(run.path)
        handle = stack.enter_context(_logged(run, handle))
        # A converter may want a model, the check of packing and the choice of a strategy build one, and torch reports
        # GPUs.
        hide_torch &= not Path("/proc/driver/nvidia").exists()
        hide_torch &= config.data.converter is None and cached_packing(config.model) is not None
        hide_torch &= not needs_torch(config)
        with (
            start_preparation(config, hide_torch=hide_torch) as preparation,
            connect(config, run, handle) as connected,
        ):
            fitted = fit(connected, preparation, config, run, handle, target)
        result = finish(connected, fitted, config, run, handle)
        _push(config, run, handle)
        return result


def _to_push(config: Config, run: RunDir) -> dict[str, Any] | None:
    """The contents of ``pushed.json`` for the finished model; None if nothing is to be pushed, or it was already."""
    file = run.final / manifest.NAME
    if (name := config.export.push_to_hub) is None:
        return None
    wanted = {"to": name, "merged": config.export.merged, "model": digest_of(file) if file.is_file() else None}
    return None if run.pushed() == wanted else wanted


def _push(config: Config, run: RunDir, handle: Handle) -> None:
    """Push the finished model if the config asks for it.
    Raises FinrayError: the push failed; the run is finished nevertheless."""
    if (wanted := _to_push(config, run)) is None:
        return
    from finray.publishing.push import push

    try:
        done = push(run.final, notify=lambda text: handle(Note(text)))
    except FinrayError as error:
        error.message += f"; the run is finished, and its model is in {run.final}"
        raise
    run.keep_pushed(wanted)
    handle(Note(f"pushed to {done.url}"))


@contextmanager
def _note_last_checkpoint(run: RunDir, config: Config) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        if config.cluster.requeue_exit_code is not None and getattr(stop, "exit_code", None) == 128 + signal.SIGTERM:
            stop.exit_code = config.cluster.requeue_exit_code  # type: ignore[attr-defined]
        try:
            steps = run.store().steps()
        except FinrayError:
            # A storage failure must not change the exit code.
            raise stop from None
        stop.add_note(f"checkpoint-{steps[-1]:06d} is saved" if steps else "no checkpoint has been saved yet")
        late = getattr(stop, "late", None)
        if late is not None and (lost := late - (steps[-1] if steps else 0)) > 0:
            stop.add_note(
                f"{lost:,} step{'s are' if lost > 1 else ' is'} lost, because the running one took longer than "
                f"checkpoint.grace_seconds={config.checkpoint.grace_seconds:g}"
            )
        raise


@contextmanager
def _logged(run: RunDir, handle: Handle) -> Iterator[Handle]:
    """The handler, which also writes what it shows to the run's ``logs/training.log``, and how the command ended."""
    log = RecordLog(run.path / failures.LOGS / TRAINING_LOG, f"pid {os.getpid()}")

    def logged(record: Record) -> None:
        log.log(record)
        handle(record)

    try:
        yield logged
    except KeyboardInterrupt:
        log.write("stopped")
        raise
    except BaseException as error:
        log.write(str(error) if isinstance(error, FinrayError) else traceback.format_exc())
        raise
    log.write("the run is finished")


@contextmanager
def connect(config: Config, run: RunDir, handle: Handle) -> Iterator[Connected]:
    """Connect to Ray, check that the workers can be placed, and decide what the config leaves open, except for
    steps.
    Raises FinrayError: the cluster cannot be reached, or lacks what is asked for."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    is_local = clusters.starts_one(config.cluster)
    address = clusters.address_of(config.cluster)
    if is_local or address is not None:
        handle(Note("starting Ray on this machine" if is_local else f"joining the Ray cluster at {address}"))
    if is_local and clusters.running_here() is not None:
        handle(Note("a Ray cluster runs on this machine; cluster.address=auto joins it"))
    with clusters.connected(config.cluster) as ray:
        clusters.remove_orphans(ray)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        placement = place(config.cluster, nodes, evaluator=config.evaluation.mode == "async")
        env = worker_environment(config.cluster, threads=placement.cpus_per_worker)
        worker_env = env
        if is_local and not placement.use_gpu:
            # A library that looks for GPUs on import would see all of them, and keep doing so.
            worker_env = {**prestart_environment(config), **env}
            clusters.start_worker_processes(ray, worker_env, placement.num_workers + placement.evaluator)
        packing = packing_of(config.model)
        if config.cluster.dashboard and is_local:
            token = token_file()
            handle(Note(f"Ray's dashboard asks for the content of {'RAY_AUTH_TOKEN' if token is None else token}"))
            handle(Note(f"Ray's dashboard is at http://{clusters.dashboard_url(ray)}"))
        if not packing.safe:
            handle(Note(packing.warning, level="warning"))
        device = device_of(placement, nodes if address else None)
        execution = resolve(
            config,
            placement,
            device,
            packing=packing,
            before=run.resolved(),
            chose=lambda choice: handle(Note(choice.note)),
        )
        slow = [slow_precision(execution.precision, device)]
        if is_local and not placement.use_gpu:
            slow.append(crowded(load, cores=os.cpu_count() or 1, threads=placement.cpus_per_worker))
        for warning in filter(None, slow):
            handle(Note(str(warning), level="warning"))
        seconds = time.perf_counter() - started
        yield Connected(ray, is_local, placement, execution, env, worker_env, started, seconds, packing, device)


def prestart_environment(config: Config) -> dict[str, str]:
    """Variables with which a worker's process is started early; :mod:`finray.runtime.preload` reads the last one.

    The others are those that Ray Train gives to every worker: the text of the environment must be the same.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
    return {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **given, PRELOAD: ",".join(needed(config))}


def fit(
    connected: Connected,
    preparation: Preparation,
    config: Config,
    run: RunDir,
    handle: Handle,
    target: Target | None = None,
) -> Fitted:
    """Train with Ray Train on the prepared data, from the run's newest checkpoint if there is one.

    With ``export.push_every_checkpoint`` each checkpoint is pushed to ``target``.

    On a Ray of the run's own, workers without GPUs start and load the model while the data are prepared. GPUs, and
    anything of a shared cluster, are only taken once the data are known to be right. Raises FinrayError: the data are
    not right, or training failed and a retry would fail in the same way.
    """
    started, lock = time.perf_counter(), threading.RLock()

    def shown(record: Record) -> None:
        # This thread and the listener's both have records to show.
        with lock:
            handle(record)

    is_early = (
        connected.is_local
        and not connected.placement.use_gpu
        # DeepSpeed's engine is made with the size of a step, and a classifier's last layer with the number of classes:
        # both may come from the data.
        and connected.execution.strategy != "deepspeed"
        and not task_spec(config.model.task).reads_labels
    )
    # Unique among all runs, even if several are running in this process.
    group = f"finray {run.path.name} {uuid4().hex[:8]}"
    prepared_at = 0.0

    def from_data() -> PreparedRun:
        nonlocal prepared_at
        location = preparation.result(handle=shown)
        prepared_at = time.perf_counter()
        most, device = connected.placement.bounds[1], connected.device
        return decide_from_data(connected.execution, location, config, run, shown, connected.packing, device, most)

    with (
        Helpers(connected.ray, preparation, env=connected.env, cpus=0 if is_early else 1, handle=shown) as helpers,
        ExitStack() as stack,
    ):
        prepared = None
        if not is_early:
            helpers.wait()
            prepared = from_data()
        monitor, listener = _monitor(connected, config, group, stack.enter_context(deferred()), shown)
        memory = None
        if config.checkpoint.in_memory_every is not None:
            memory = MemoryActors(connected.ray, group, head=monitor.reaches_head)
            stack.callback(memory.close)
            memory.refresh()

        def poll() -> None:
            monitor.poll()
            if memory is not None:
                memory.refresh()
            if is_early and not listener.is_prepared and monitor.reaches_head() and helpers.look(0):
                listener.set_prepared(from_data())

        trainer = _trainer(
            connected, prepared, config, run, group=group, poll=poll, listener=listener.address, target=target
        )
        shown(Note(f"starting {monitor.workers}"))
        with listener:
            outcome = _attempts(trainer, monitor, connected, config, run, group=group, handle=shown)
        if outcome.failure is not None:
            raise from_dict(outcome.failure)
        if outcome.summary is None:
            monitor.end()
    assert outcome.summary is not None
    return Fitted(outcome.summary, time.perf_counter() - started, prepared_at - started)


def _monitor(
    connected: Connected, config: Config, group: str, pending: Pending, handle: Handle
) -> tuple[RunMonitor, Listener]:
    """What watches the run, and what receives its workers' records."""
    from finray.runtime import gcs

    monitor = RunMonitor(
        connected.ray,
        group,
        connected.placement,
        pending,
        handle,
        hang_s=config.cluster.hang_seconds,
        end_hanging=partial(end_hanging, connected.ray),
        workers=partial(workers_of, connected.ray, group),
        draining=lambda: gcs.draining(connected.ray.get_runtime_context().gcs_address),
        grace_s=config.checkpoint.grace_seconds,
        head=lambda: refusal(connected.ray.get_runtime_context().gcs_address) is None,
        head_patience_s=_OWN_HEAD_S if connected.is_local else _HEAD_S,
        raylet=_raylet_probe(connected.ray),
    )
    host = "127.0.0.1" if connected.is_local else connected.ray.util.get_node_ip_address()
    monitor.listener = Listener(
        host, monitor.on_record, monitor.resize, lambda: monitor.began_at, monitor.is_evaluating
    )
    return monitor, monitor.listener


def _raylet_probe(ray: Any) -> Callable[[], bool]:
    """A function that says whether Ray's process on this machine accepts connections."""
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    # A firewall may forbid what Ray itself does by a socket file.
    asks = refusal(address) is None
    return lambda: not (asks and is_refused(address))


def _attempts(
    trainer: Trainer,
    monitor: RunMonitor,
    connected: Connected,
    config: Config,
    run: RunDir,
    *,
    group: str,
    handle: Handle,
) -> Outcome:
    """Run Ray's trainer; again if its controller was lost, up to ``cluster.max_failures`` times.

    Ray Train itself restarts workers; nobody restarts its controller.
    """
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from finray.runtime.trainer import remove_groups

    restarts_left = config.cluster.max_failures
    while True:
        try:
            outcome: Outcome = trainer.fit().return_value
            return outcome
        except (TrainingFailedError, RayError) as error:
            monitor.raise_if_ending()
            # Early workers may fail before the run has decided on its steps.
            steps = decide_steps(config.train, packs=None)
            resolved = run.resolved() or Resolved.of(connected.execution, steps)
            reason = failures.with_relief(failures.explain(error, run.path), config, resolved, connected.placement)
            if isinstance(error, TrainingFailedError) or not restarts_left:
                raise reason from None
            restarts_left -= 1
            handle(Note(f"{reason.message}; restarting", level="warning"))
        finally:
            # Without a head process, this call would end the driver.
            if monitor.reaches_head():
                remove_groups(group)


def _trainer(
    connected: Connected,
    prepared: PreparedRun | None,
    config: Config,
    run: RunDir,
    *,
    group: str,
    poll: Callable[[], None],
    listener: Address,
    target: Target | None,
) -> Trainer:
    """Ray's trainer for a run.

    Args:
        connected: to Ray.
        prepared: None while the data are being prepared; then the workers wait for it.
        config: of the run.
        run: the run directory.
        group: prefix of the name of its placement group.
        poll: called repeatedly while it runs.
        listener: where its workers send records and questions.
        target: where checkpoints are pushed.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

    from finray.runtime.spec import Pushing, WorkerSpec
    from finray.runtime.trainer import Trainer
    from finray.runtime.worker import train_worker

    placement = connected.placement
    spec = WorkerSpec(
        config=config.plain(),
        execution=connected.execution if prepared is None else prepared.resolved,
        prepared=prepared,
        run_dir=str(run.path),
        start=group,
        memory=group if config.checkpoint.in_memory_every is not None else None,
        threads=placement.cpus_per_worker,
        hang_s=config.cluster.hang_seconds,
        shared_gpus=placement.gpus_per_worker < 1,
        listener=listener,
        evaluator=placement.resources if placement.evaluator else None,
        secrets=secrets_of(),
        push=None if target is None or not config.export.push_every_checkpoint else Pushing.here(target),
    )
    return Trainer(
        train_worker,
        alone=connected.is_local,
        group=group,
        watch=poll,
        listener=listener,
        expected=placement.num_workers,
        evaluator=placement.evaluator,
        train_loop_config={"spec": spec},
        scaling_config=ScalingConfig(
            num_workers=placement.num_workers if placement.most is None else placement.bounds,
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources,
            elastic_resize_monitor_interval_s=config.cluster.resize_seconds,
        ),
        run_config=RunConfig(
            name=run.path.name,
            storage_path=str(run.path.parent),
            failure_config=FailureConfig(max_failures=config.cluster.max_failures),
            worker_runtime_env={"env_vars": connected.worker_env},
            logging_config=LoggingConfig(log_level="INFO" if os.environ.get("FINRAY_VERBOSE") else "ERROR"),
        ),
    )


def decide_from_data(
    execution: Execution,
    location: str,
    config: Config,
    run: RunDir,
    handle: Handle,
    packing: Packing,
    device: Device | None = None,
    workers: int = 1,
) -> PreparedRun:
    """Decide what depends on the prepared data: sizes of a step and, on this device of each of so many workers, of a
    micro-batch, epochs, classes. Report these and anything odd.
    Raises DataError: the data are damaged, too few to hold some out, or their labels are not right; ModelError: a
    row has more tokens than the model has position embeddings (``packing``)."""

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            is_warning = line.startswith("warning: ")
            handle(Note(line.removeprefix("warning: "), level="warning" if is_warning else "note"))

    dataset = PreparedDataset(location, local_dir=local_dir_of(config))
    ends = unserved_ends(dataset.manifest, generation_stops(config.model))
    say((*report_lines(dataset.manifest), *ends, *remarks_on_files(config)))
    require_prompts(config, dataset.kind())
    # What was decided for other data binds only a run that has begun to learn from them.
    before = run.resolved() if run.store().steps() else None
    data = run_data(config, dataset, decided=before)
    splits, steps = data.splits, data.steps
    say(shared_rows(splits, dataset.kind(), config))
    longest = max(map(longest_of, (splits.train, splits.eval)))
    if packing.positions is not None and longest > packing.positions:
        raise beyond_positions(packing.positions, longest)
    if task_spec(config.model.task).reads_labels:
        dataset.require_kind(spec_of(config))
    labels = find_labels(dataset, splits, config)
    if labels.problems:
        raise labels.problems[0]
    for message, where in labels.warnings:
        handle(Note(f"{where}: {message}", level="warning"))
    continued, packs = before is not None, len(data.plan)
    for note in () if continued else chosen_notes(config.train, steps, execution.learning_rate):
        handle(Note(note))
    if not continued and device is not None and config.train.micro_batch_size == "auto":
        size, why = choose_micro_batch(config, execution, steps, device, None, workers=workers)
        steps = replace(steps, micro_batch_size=size)
        if size > 1:
            handle(Note(f"finray chose train.micro_batch_size={size}: {why}"))
    for message, where, repair in step_warnings(
        config, steps, total=data.total_steps, packs=packs, continued=continued
    ):
        handle(Note(str(FinrayError(message, where=where, repair=repair)), level="warning"))
    prepared = PreparedRun(location, Resolved.of(execution, steps, labels.labels, labels.weights))
    run.keep_resolved(prepared.resolved)
    return prepared


def finish(connected: Connected, fitted: Fitted, config: Config, run: RunDir, handle: Handle) -> TrainResult:
    """Create ``final/`` from a checkpoint, and write the summary, which marks the run as finished.
    Raises CheckpointError: every checkpoint is damaged."""
    # Rank 0 may have written the records on another machine.
    run.pull()
    chosen = run.make_final(
        best=_best(config),
        warn=lambda message: handle(Note(message, level="warning")),
    )
    inside = fitted.summary.phases
    working = sum(inside[name] for name in ("load", "train", "evaluate", "checkpoint"))
    phases = {
        "start_ray": connected.seconds,
        "prepare": fitted.prepare_seconds,
        # On a Ray of the run's own, part of this overlaps with preparing the data.
        "start_workers": max(0.0, fitted.seconds - fitted.prepare_seconds - working),
        **inside,
        "total": time.perf_counter() - connected.started,
    }
    summary = replace(fitted.summary, phases=phases, mean_loss=mean_loss(run.path))
    run.finish({"chosen_step": chosen, "summary": summary.json()})
    return TrainResult(run.path, run.final, chosen, summary)


def _best(config: Config) -> tuple[str, str] | None:
    """The metric whose best checkpoint becomes final, and whether less or more is better; None for the last one."""
    return spec_of(config).chosen(config.evaluation) if config.checkpoint.keep_best else None
