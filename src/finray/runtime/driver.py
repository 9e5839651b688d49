"""A run from the outside: connect, check, prepare, train under Ray Train, finish."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finray.checkpoint.rundir import RunDir, open_run
from finray.config.paths import local_dir_of, with_absolute_paths
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.data.dataset.prepare import start_preparation
from finray.data.dataset.report import preparation_report
from finray.errors import FinrayError, TrainingError, from_dict
from finray.planning.checks import require_startable
from finray.planning.placement import Placement, device_of, place, worker_environment
from finray.planning.resolve import packing_of, resolve
from finray.records import Note, Record, RunSummary
from finray.runtime import cluster as clusters
from finray.runtime import failures
from finray.runtime.prepare import prepare_on_ray
from finray.runtime.progress import Listener, start_mailbox

Handle = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run.

    Attributes:
        run_dir: the run directory.
        final: the finished model.
        chosen_step: the checkpoint that became final.
        summary: losses, seconds by phase, tokens/s, peak memory.
    """

    run_dir: Path
    final: Path
    chosen_step: int
    summary: RunSummary


def train(config: Config, *, fresh: bool = False, handle: Handle = lambda record: None) -> TrainResult:
    """Run or continue a fine-tuning.

    Args:
        config: the run's configuration.
        fresh: move an earlier run of this name aside first.
        handle: shown records (notes, header, metrics, warnings) as they come.

    Raises:
        FinrayError: with what happened, where, and the repair.
    """
    clock = _Clock()
    config = with_absolute_paths(config)
    require_startable(config)

    def say(message: str) -> None:
        is_warning = message.startswith("warning: ")
        handle(Note(message.removeprefix("warning: "), level="warning" if is_warning else "note"))

    with open_run(config, fresh=fresh, say=say) as run:
        if run.summary_file.is_file():
            say("the run is finished already; --fresh begins anew")
            done = json.loads(run.summary_file.read_text(encoding="utf-8"))
            return TrainResult(run.path, run.final, done["chosen_step"], RunSummary.from_json(done["summary"]))
        failures.forget(run.path)
        with start_preparation(config) as preparation, clusters.connected(config.cluster) as ray:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            placement = place(config.cluster, nodes)
            resolved = _resolved(config, run, placement, nodes, say)
            env = worker_environment(config.cluster, threads=placement.cpus_per_worker)
            clock.lap("start_ray")
            prepared = prepare_on_ray(ray, preparation, env=env, handle=handle)
            for line in preparation_report(prepared, local_dir=local_dir_of(config)):
                say(line)
            clock.lap("prepare")
            outcome = _fit(ray, config, resolved, run, prepared, placement, env, handle)
            clock.lap("workers")
        chosen = run.make_final(
            best=task_spec(config.model.task).best if config.checkpoint.keep_best else None,
            warn=lambda message: handle(Note(message, level="warning")),
        )
        summary = replace(outcome, phases=_phases(clock, outcome.phases))
        run.finish({"chosen_step": chosen, "summary": summary.json()})
    return TrainResult(run.path, run.final, chosen, summary)


def _resolved(
    config: Config,
    run: RunDir,
    placement: Placement,
    nodes: list[dict[str, float]],
    say: Callable[[str], None],
) -> Resolved:
    """What every ``auto`` comes to; the run directory keeps it."""
    ours = not (config.cluster.address or os.environ.get("RAY_ADDRESS"))
    packing = packing_of(config.model)
    if not packing.safe:
        say(f"warning: {packing.warning}")
    resolved = resolve(
        config,
        placement,
        device_of(placement, None if ours else nodes),
        packing=packing,
        before=run.resolved(),
        chose=lambda choice: say(choice.note),
    )
    run.keep_resolved(resolved)
    return resolved


def _phases(clock: _Clock, inside: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, those of the driver around those of rank 0."""
    working = sum(inside[name] for name in ("load", "train", "evaluate", "checkpoint"))
    return {
        "start_ray": clock.laps["start_ray"],
        "prepare": clock.laps["prepare"],
        "start_workers": max(0.0, clock.laps["workers"] - working),
        **inside,
        "total": clock.total,
    }


def _fit(
    ray: Any,
    config: Config,
    resolved: Resolved,
    run: RunDir,
    prepared: str,
    placement: Placement,
    env: dict[str, str],
    handle: Handle,
) -> RunSummary:
    """Train under Ray Train; returns rank 0's summary."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    from finray.runtime.worker import Outcome, WorkerSpec, train_worker

    mailbox = start_mailbox(ray)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "spec": WorkerSpec(
                config=config.plain(),
                resolved=resolved,
                prepared=str(prepared),
                run_dir=str(run.path),
                threads=placement.cpus_per_worker,
                mailbox=mailbox,
            )
        },
        scaling_config=ScalingConfig(
            num_workers=placement.num_workers, use_gpu=placement.use_gpu, resources_per_worker=placement.resources
        ),
        run_config=RunConfig(
            name=run.path.name,
            storage_path=str(run.path.parent),
            failure_config=FailureConfig(max_failures=config.cluster.max_failures),
            worker_runtime_env={"env_vars": env},
            logging_config=LoggingConfig(log_level="INFO" if os.environ.get("FINRAY_VERBOSE") else "ERROR"),
        ),
        torch_config=TorchConfig(backend="nccl" if placement.use_gpu else "gloo"),
    )
    with Listener(ray, mailbox, handle):
        try:
            outcome: Outcome = trainer.fit().return_value
        except TrainingFailedError as error:
            raise _explain(error, run) from None
    if outcome.failure is not None:
        raise from_dict(outcome.failure)
    assert outcome.summary is not None
    return outcome.summary


def _explain(error: Exception, run: RunDir) -> FinrayError:
    """The cause of a failed run: finray's own error where there is one, else the first worker's."""
    failures = list(getattr(error, "worker_failures", {}).values()) or [error]
    for failure in failures:
        for cause in (failure, getattr(failure, "_original_exception", None), failure.__cause__):
            if isinstance(cause, FinrayError):
                return cause
    lines = [line for line in str(failures[0]).strip().splitlines() if line.strip()]
    return TrainingError(
        f"the workers failed: {lines[-1].strip() if lines else type(failures[0]).__name__}",
        where=str(run.path),
        repair="FINRAY_VERBOSE=1 shows the workers' output; the same command goes on from the last checkpoint",
    )


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return time.perf_counter() - self._started
