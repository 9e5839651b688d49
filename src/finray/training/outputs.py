"""What rank 0 of a run shows and writes beside checkpoints: its header, its trackers, and an adapter's metadata."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finray.checkpoint.copies import RUN_ID
from finray.config.adapter_files import NOTES
from finray.config.identity import with_decisions
from finray.config.objectives import objective_name, objective_spec, spec_of
from finray.config.redact import redact
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.data.dataset.prepared import PreparedDataset
from finray.data.formats.convert import prompt_form
from finray.errors import TrainingError
from finray.files import FileKind, replace_text
from finray.parallel.base import Strategy
from finray.pretrained.weights import processor_files
from finray.records import Metrics, Record, RunHeader, SystemRecord, TrainRecord
from finray.tracking.base import Trackers, make_tracker
from finray.tracking.follow import Followed, Sending, Service, ServiceFollower
from finray.tracking.jsonl import JsonlTracker
from finray.tracking.protocol import RunInfo, Tracker
from finray.tracking.starts import StartsTracker
from finray.tracking.system import Sampler, System, find_nvml
from finray.training.loader import EvalLoader, StepLoader
from finray.training.state import TrainState
from finray.training.task import Task

Notify = Callable[[Record], None]
Warn = Callable[[str], None]


def start_trackers(
    config: Config, resolved: Resolved, run_dir: Path, header: RunHeader, notify: Notify, warn: Warn
) -> Trackers:
    """Start the trackers of rank 0. A run has the same id at every start, stored in its directory."""
    run_id = run_dir / RUN_ID
    if not run_id.exists() or not run_id.stat().st_size:
        replace_text(run_id, uuid.uuid4().hex)
    name = FileKind(TrainingError, repair="delete the file: trackers then see a new run").text(run_id)
    inline: dict[str, Tracker] = {"console": _Notifier(notify), "starts.jsonl": StartsTracker()}
    names = [*(["tensorboard"] if config.tracking.tensorboard else []), *config.tracking.trackers]
    made = {name: make_tracker(name) for name in dict.fromkeys(names)}
    services = {name: tracker for name, tracker in made.items() if isinstance(tracker, Service)}
    every_s = config.tracking.system_every_seconds
    trackers = Trackers(
        inline,
        {name: tracker for name, tracker in made.items() if not isinstance(tracker, Service)},
        records=JsonlTracker(warn),
        follow=lambda run: [
            ServiceFollower(Sending(name, tracker, Followed(run.run_id, run.run_dir, run.config)))
            for name, tracker in services.items()
        ],
        machine=None if every_s is None else Sampler(System(run_dir, nvml=find_nvml()).sample, every_s),
        warn=warn,
    )
    trackers.start(RunInfo(name, run_dir, header.step, redact(with_decisions(config, resolved)), header))
    return trackers


@dataclass(frozen=True, slots=True)
class _Notifier:
    """Passes records to the progress display."""

    notify: Notify

    def start(self, run: RunInfo) -> None:
        """The header has been shown already."""

    def log(self, record: Metrics) -> None:
        if not isinstance(record, SystemRecord):
            self.notify(record.without_samples() if isinstance(record, TrainRecord) else record)

    def finish(self) -> None:
        """Nothing is kept here."""


def save_extras(
    config: Config, dataset: PreparedDataset, resolved: Resolved, tokenizer: Any, auto_class: str | None = None
) -> Callable[[Path], None]:
    """A function that writes the tokenizer, and what later commands need to know, into a checkpoint."""
    kind = dataset.kind()
    if kind in ("preference", "unpaired"):
        # Answers are asked for as these were learned.
        kind = "chat" if config.data.format == "auto" and tokenizer.chat_template else "completion"
    notes = {
        "base_model": config.model.name,
        "revision": config.model.revision,
        "rows": kind,
        "task": config.model.task,
        "auto_class": auto_class or task_spec(config.model.task).auto_class,
        "new_tokens": config.model.new_tokens,
        "system": config.data.system,
        "tool_format": config.data.tool_format,
        "chat_template_arguments": config.model.chat_template_arguments,
        "quantization": {None: "none", 4: "4bit", 8: "8bit"}[resolved.bits],
    }
    if dataset.kind() == "completion":
        formats = [stream.format for stream in dataset.manifest.splits["train"].streams]
        if (form := prompt_form(config.data, formats)) is not None:
            notes["input_template"] = form
    if resolved.problem is not None:
        notes |= {"problem": resolved.problem, "labels": list(resolved.labels)}
        if objective_spec(config).is_reward:
            notes["objective"] = objective_name(config)
        if tokenizer.pad_token is None:
            # Classifying batches needs a pad token, and the model's configuration names it.
            tokenizer.pad_token = tokenizer.eos_token

    # A whole model reads images with the files of its base.
    processor = processor_files(config.model) if config.adapter.method == "none" else {}

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))
        for name, content in processor.items():
            (folder / name).write_bytes(content)
        (folder / NOTES).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")

    return save


def make_header(
    config: Config,
    resolved: Resolved,
    task: Task,
    strategy: Strategy,
    loader: StepLoader,
    evaluation: EvalLoader | None,
    state: TrainState,
) -> RunHeader:
    """The header of this start of the workers; their places are not known yet."""
    trainable, parameters = task.parameter_counts()
    micro_batches = -(-loader.global_batch_size // loader.micro_batch_size)
    device = strategy.device
    return RunHeader(
        step=state.step,
        total_steps=state.total_steps,
        model=config.model.name,
        parameters=parameters,
        trainable=trainable,
        precision="bf16-true" if resolved.weights == "bf16" else resolved.precision,
        rows=len(loader.split),
        tokens=int(loader.split.lengths.sum()),
        supervised=int(loader.split.supervised.sum()),
        eval_rows=0 if evaluation is None else evaluation.rows,
        held_out=0 if evaluation is None else evaluation.held_out,
        epochs=(loader.order.total or state.total_steps * loader.global_batch_size) / len(loader.plan),
        packing=config.data.packing and loader.joined is None,
        in_groups=not loader.split.groups.is_single,
        packs=len(loader.plan),
        fill=loader.plan.fill,
        world_size=strategy.world_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        threads=torch.get_num_threads(),
        global_batch_size=loader.global_batch_size,
        micro_batch_size=loader.micro_batch_size,
        accumulation=-(-micro_batches // strategy.world_size),
        method=method_of(config, resolved, getattr(task, "adapted", "")),
        labelled=spec_of(config).reads_labels,
        evaluates=evaluation is not None
        and state.step == 0
        and config.evaluation.on_start
        and config.evaluation.mode == "inline",
    )


def place_of(strategy: Strategy) -> str:
    """This worker's ranks, named as torch's launchers do, and its host; of a single worker the host alone."""
    if strategy.world_size == 1:
        return f"on {socket.gethostname()}"
    local, node = os.environ.get("LOCAL_RANK", strategy.rank), os.environ.get("NODE_RANK", 0)
    ranks = f"RANK={strategy.rank} LOCAL_RANK={local} WORLD_SIZE={strategy.world_size} NODE_RANK={node}"
    return f"{ranks} on {socket.gethostname()}"


def method_of(config: Config, resolved: Resolved, adapted: str = "") -> str:
    """A one-line description of the model and training method, with what its adapter is on where that is known."""
    adapter, train = config.adapter, config.train
    weights = "all weights"
    if adapter.method != "none":
        targets = adapter.target_modules
        of = adapted or (targets if isinstance(targets, str) else ", ".join(targets))
        weights = f"{adapter.method} of rank {adapter.rank}, alpha {adapter.alpha:g}, on {of}"
    base = f", base in {resolved.bits} bits" if resolved.bits else ""
    return f"{weights}{base}; {train.optimizer}, {train.schedule} from {resolved.learning_rate:g}; {resolved.strategy}"
