"""Plans a run before it starts, on a CPU and without loading weights: what it is, what it needs, its problems.

All problems are found at once: one part's do not hide another's. A run would start exactly if its plan has no problems
and no skipped checks; only an offline plan skips any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from finray.checkpoint.rundir import Earlier, earlier_of
from finray.config.objectives import model_of_reference, objective_spec, spec_of
from finray.config.paths import run_path, with_absolute_paths
from finray.config.resolved import REWARD, LabelSet, Resolved, Steps
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.config.trust import require_trusted
from finray.data.dataset.run_data import decide_steps, require_room
from finray.data.sampling.order import total_steps
from finray.errors import ClusterError, ConfigError, DataError, FinrayError
from finray.planning.blueprint import Blueprint
from finray.planning.checks import check_push, check_task, quick_problems
from finray.planning.findings import Findings, refuse
from finray.planning.flops import SpeedPlan, plan_speed
from finray.planning.memory import BUSY, RowSample, plan_memory
from finray.planning.micro_batch import choose_micro_batch
from finray.planning.model import PlannedModel, check_context, plan_model
from finray.planning.placement import (
    Device,
    Gpu,
    Node,
    Placement,
    device_of,
    elsewhere,
    gpu_named,
    local_gpus,
    place,
    this_machine,
)
from finray.planning.resolve import resolve
from finray.planning.result import DataPlan, EarlierPlan, PlacementPlan, Plan
from finray.planning.sample_data import DataReport
from finray.planning.sample_data import examine as examine_data
from finray.planning.steps import choose_learning_rate, chosen_notes, step_warnings
from finray.planning.strategy import StrategyChoice
from finray.tracking.access import require_access

_HERE = "this machine"
# Messages of `datasets` without a network.
_UNREACHABLE = ("couldn't reach", "offline", "couldn't connect", "connection error", "couldn't find cache")


Nodes = Sequence[Node]


def no_cluster(config: Config) -> Nodes:
    """Used without Ray: there is no cluster to ask."""
    raise ClusterError("a plan without Ray cannot check a cluster", where=f"cluster.address={config.cluster.address}")


def make_plan(
    config: Config,
    *,
    gpu: str | None = None,
    examine: Callable[[Config], DataReport] = examine_data,
    ask: Callable[[Config], Nodes] = no_cluster,
    environ: Mapping[str, str] = os.environ,
    offline: bool = False,
    fresh: bool = False,
) -> Plan:
    """Check everything that a run needs.

    Args:
        config: of the run.
        gpu: name of the workers' GPUs (see :data:`finray.planning.placement.GPUS`); None uses those of the cluster, or
            of this machine.
        examine: examines the data.
        ask: returns the resources of each living node of the configured cluster.
        environ: environment variables, with tokens and the address of Ray.
        offline: list what is on an unreachable Hub as not checked, instead of as a problem.
        fresh: as for training: an earlier run of this name would be moved aside, and is ignored.

    Raises:
        ConfigError: the GPU name is unknown, or the adapter to start from cannot be continued with this config.
    """
    named = None if gpu is None else gpu_named(gpu)
    require_trusted(config)
    config, findings = with_absolute_paths(config), Findings()
    # Nothing else that could be said of such a run would help.
    check_task(config)
    # GPUs that are named are those of another machine, about which nothing else is known, nor are its packages.
    away = None if _address(config, environ) else named
    missing = refuse if away is None else _note_missing(findings, away)
    # A source that lies on the Hub is asked for its splits; what of it is out of reach is said with the data.
    problems = quick_problems(config, missing=missing)
    findings.problem(*(problem for problem in problems if not (offline and _is_out_of_reach(problem))))
    _check_push(config, findings, offline=offline)
    _check_trackers(config, findings, offline=offline, is_here=away is None)
    earlier = None if fresh else _earlier(config, findings)
    before = None if earlier is None else earlier.resolved
    report = _report(config, examine, findings)
    labels = _labels(config, report, findings, before)
    model = plan_model(config, findings, labels=labels, environ=environ, offline=offline)
    begun = before if earlier is not None and earlier.step else None
    data, steps = (None, None) if report is None else _data(config, report, model, findings, begun, offline=offline)
    if model is not None:
        _check_length(config, report, model, findings)
    placed, placement, device = _place(config, named, findings, environ, ask)
    resolved = memory = speed = micro_batch = None
    choices: list[StrategyChoice] = []
    if model is not None and device is not None and placement is not None:
        try:
            execution = resolve(
                config,
                placement,
                device,
                packing=model.packing,
                before=before,
                shape=model.shape,
                chose=choices.append,
                missing=missing,
            )
        except FinrayError as error:
            findings.problem(error)
        else:
            weights = model.shape.model.named_parameters()
            joined = sum(weight.numel() for name, weight in weights if weight.ndim == 3 and ".lora_" not in name)
            share = joined / model.shape.blueprint.base
            if execution.bits and share > 0.1:
                findings.warn(
                    f"{share:.0%} of the weights are experts that are joined into one tensor a layer, and stay in "
                    f"{execution.precision}: only linear layers are stored in {execution.bits} bits",
                    "model.quantization",
                )
            # What is not known of the data is what a run has whose config says nothing.
            steps = steps or decide_steps(config.train, packs=None, before=begun)
            size, why = steps.micro_batch_size, "the run began with it"
            if begun is None:
                most = placement.bounds[1]
                size, why = choose_micro_batch(config, execution, steps, device, model.shape, workers=most)
            # Of a CPU there is nothing to say.
            micro_batch = why if config.train.micro_batch_size == "auto" and device.kind == "cuda" else None
            resolved = Resolved.of(execution, replace(steps, micro_batch_size=size), labels)
            rows = _rows(config, report, data, resolved)
            # Of a number of workers that follows the cluster, the fewest have the largest shares.
            speed = _speed(config, resolved, placement.num_workers, model.shape.blueprint, device, rows, data)
            waiting, fewest = None if speed is None else speed.waiting, placement.bounds[0]
            memory = plan_memory(
                config, execution, model.shape, device, rows, findings, workers=fewest, waiting=waiting
            )
    return Plan(
        findings.problems,
        findings.warnings,
        findings.unchecked,
        None if model is None else model.plan,
        data,
        resolved,
        None if placement is None else placement.num_workers,
        next(iter(choices), None),
        placed,
        memory,
        speed,
        None if earlier is None else EarlierPlan(str(run_path(config)), earlier.step, earlier.is_finished),
        micro_batch,
    )


def _address(config: Config, environ: Mapping[str, str]) -> str | None:
    return config.cluster.address or environ.get("RAY_ADDRESS") or None


def _note_missing(findings: Findings, gpu: Gpu) -> Callable[[ConfigError], None]:
    def note(error: ConfigError) -> None:
        findings.warn(
            f"{error.message} on this machine: the machine with the {gpu.name} must have it", error.where, error.repair
        )

    return note


def _check_push(config: Config, findings: Findings, *, offline: bool) -> None:
    if offline:
        if config.export.push_to_hub is not None:
            findings.skip("whether the Hub accepts the push", "export.push_to_hub")
        return
    try:
        check_push(config)
    except FinrayError as error:
        findings.problem(error)


def _check_length(config: Config, report: DataReport | None, model: PlannedModel, findings: Findings) -> None:
    longest = max(report.longest, report.longest_held_out) if report is not None and report.complete else None
    check_context(model.shape.blueprint, max_length=config.data.max_length, longest=longest, findings=findings)


def _check_trackers(config: Config, findings: Findings, *, offline: bool, is_here: bool) -> None:
    if not is_here:
        # The environment of another machine has keys of its own.
        return
    if offline:
        if {"wandb", "mlflow"} & {*config.tracking.trackers}:
            findings.skip("whether the trackers accept their keys", "tracking.trackers")
        return
    try:
        for message in require_access(config.tracking):
            findings.warn(message, "tracking.trackers")
    except FinrayError as error:
        findings.problem(error)


def _earlier(config: Config, findings: Findings) -> Earlier | None:
    try:
        return earlier_of(config)
    except FinrayError as error:
        findings.problem(error)
        return None


def _report(config: Config, examine: Callable[[Config], DataReport], findings: Findings) -> DataReport | None:
    try:
        return examine(config)
    except OSError as error:
        # A full disk, say.
        findings.problem(DataError(f"the data cannot be read: {error.strerror or error}", where=error.filename))
        return None


def _labels(config: Config, report: DataReport | None, findings: Findings, before: Resolved | None) -> LabelSet | None:
    """The label set of a classifier's head: from the run that is continued, the data, or the config alone."""
    section = config.classification
    if objective_spec(config).is_reward:
        return REWARD
    if not task_spec(config.model.task).reads_labels:
        return None
    if before is not None and before.label_set is not None:
        return before.label_set
    if report is not None and report.labels is not None:
        if not report.complete and section.labels is None and report.labels.names:
            text = f"the head is sized for the {len(report.labels.names):,} classes in the rows that were read"
            findings.warn(text, "classification.labels", "list all classes if there are more")
        return report.labels
    if section.problem == "regression":
        return LabelSet("regression", ())
    if section.labels is not None:
        return LabelSet(section.problem or "single_label", tuple(section.labels))
    findings.skip("the number of classes in the data: the head is sized for 2", "classification.labels")
    return None


def _speed(
    config: Config,
    resolved: Resolved,
    workers: int,
    blueprint: Blueprint,
    device: Device,
    rows: RowSample,
    data: DataPlan | None,
) -> SpeedPlan | None:
    if device.tflops is None or config.parallel.cpu_offload or config.train.activation_offload:
        # With offloading the way to the CPU decides.
        return None
    tokens = float(resolved.micro_batch_size * (rows.joined or config.data.max_length))
    if data is not None and not resolved.packs:
        # A pass has rows of one length.
        tokens = data.tokens / max(1, data.rows)
    elif data is not None:
        item = data.tokens / max(1, data.packs)
        most = resolved.global_batch_size * item
        tokens = min(most, tokens if rows.joined else resolved.micro_batch_size * item)
    speed = plan_speed(
        blueprint,
        rows.lengths or [config.data.max_length],
        tokens=max(1.0, tokens),
        learned=rows.learned,
        checkpointing=config.train.gradient_checkpointing == "full",
        tflops=device.tflops,
        workers=workers,
    )
    if data is None or not data.complete:
        return speed
    seconds = data.seen_tokens / speed.tokens_per_s
    return replace(speed, seconds=seconds, step_seconds=seconds / max(1, data.steps))


def step_seconds_on(config: Config, gpu: str, workers: int) -> float | None:
    """Estimated seconds of a step on GPUs of this name, with full rows in which all tokens are learned. None if the
    model is not available, or the GPU's rate unknown.
    Raises ConfigError: no GPU has that name."""
    kind, model = gpu_named(gpu), plan_model(config, Findings(), offline=True)
    if model is None or kind.tflops is None:
        return None
    again = config.train.gradient_checkpointing == "full"
    length, micro = config.data.max_length, config.train.micro_batch_size
    batch = config.train.global_batch_size
    whole = (batch if isinstance(batch, int) else 8) * length
    speed = plan_speed(
        model.shape.blueprint,
        [length],
        tokens=micro * length if isinstance(micro, int) else min(BUSY, -(-whole // workers)),
        learned=1.0,
        checkpointing=again,
        tflops=kind.tflops,
        workers=workers,
    )
    return whole / speed.tokens_per_s


def _is_out_of_reach(error: FinrayError) -> bool:
    return isinstance(error, DataError) and any(sign in error.message.lower() for sign in _UNREACHABLE)


def _packs(report: DataReport | None) -> int | None:
    """All packs that there are; None where that is not known."""
    return report.packs if report is not None and report.complete and not report.problems else None


def _data(
    config: Config,
    report: DataReport,
    model: PlannedModel | None,
    findings: Findings,
    before: Resolved | None,
    *,
    offline: bool,
) -> tuple[DataPlan | None, Steps | None]:
    """The data, and the steps of the run; None if something is wrong with them."""
    if report.problems:
        for problem in report.problems:
            # Without its tokenizer they cannot be tokenized; that has been said.
            if problem.where == f"model.name={config.model.name}" and (model is None or model.plan.tokens is None):
                if offline:
                    findings.skip("the data, which cannot be tokenized without it", "data.source")
            elif offline and _is_out_of_reach(problem):
                findings.skip("the data, which lies on the Hub", f"data.source={problem.where}")
            else:
                findings.problem(problem)
        return None, None
    for text in report.warnings:
        findings.warn(text, "data")
    train = config.train
    try:
        if before is not None:
            require_room(before, report.longest)
    except FinrayError as error:
        findings.problem(error)
    steps = decide_steps(train, packs=_packs(report), pack_length=report.pack_length, before=before)
    total, items = total_steps(max(1, report.packs), steps, max_steps=train.max_steps)
    passes = (items or total * steps.global_batch_size) / max(1, report.packs)
    for warning in step_warnings(config, steps, total=total, packs=_packs(report), continued=before is not None):
        findings.warn(*warning)
    width = None if model is None else model.shape.blueprint.hidden
    rate = choose_learning_rate(config, hidden_size=width, before=before)
    notes = () if before else chosen_notes(train, steps, rate)
    objective = objective_spec(config)
    first = [
        f"before the first step, {model_of_reference(config)} computes `{column}` in "
        f"{'two forward passes' if objective.before else 'one forward pass'} over all rows; "
        "it is kept with the prepared data"
        for column in objective.columns
        if not config.preference.reference_in_step
    ]
    same = ("rows", "tokens", "supervised", "packs", "longest", "complete", "seconds")
    plan = DataPlan(
        **{name: getattr(report, name) for name in same},
        notes=(*report.notes, *train.replaced, *notes, *first),
        global_batch_size=steps.global_batch_size,
        steps=total,
        epochs=passes,
        seen_tokens=round(passes * report.tokens),
        labelled=spec_of(config).reads_labels,
        is_pairs=objective.in_groups,
        counts_rows=objective.counts_rows,
    )
    return plan, steps


def _rows(config: Config, report: DataReport | None, data: DataPlan | None, steps: Steps) -> RowSample:
    """What memory depends on in the data; rows as long as they may be where the data are not known."""
    if report is None or data is None:
        objective = objective_spec(config)
        rows = 2 if objective.in_groups else int(objective.counts_rows)
        return RowSample(steps=steps, joined=rows * config.data.max_length or None)
    learned = data.supervised / max(1, data.tokens)
    return RowSample(report.lengths, data.longest, learned, data.steps, steps, report.joined)


def _place(
    config: Config, named: Gpu | None, findings: Findings, environ: Mapping[str, str], ask: Callable[[Config], Nodes]
) -> tuple[PlacementPlan | None, Placement | None, Device | None]:
    """The placement of the workers, and the device of each."""
    address = _address(config, environ)
    device = None if named is None else Device("cuda", named.name, named.memory, named.bf16, named.tflops)
    if named is not None and address is None:
        return None, elsewhere(config.cluster), device
    try:
        nodes = [this_machine(local_gpus())] if address is None else ask(config)
        placement = place(config.cluster, nodes, evaluator=config.evaluation.mode == "async")
    except FinrayError as error:
        findings.problem(error)
        return None, None if named is None else elsewhere(config.cluster), device
    if len(nodes) > 1:
        findings.warn(
            f"the cluster has {len(nodes)} nodes: this directory must be shared by all of them (such as NFS)",
            f"run.output_dir={config.run.output_dir}",
        )
    plan = PlacementPlan(
        cluster=address or _HERE,
        nodes=len(nodes),
        cpus=sum(int(node.get("CPU", 0)) for node in nodes),
        gpus=sum(int(node.get("GPU", 0)) for node in nodes),
        workers=placement.num_workers,
        cpus_per_worker=placement.cpus_per_worker,
        use_gpu=placement.use_gpu,
        fewest=placement.bounds[0],
        most=placement.bounds[1],
        gpus_per_worker=placement.gpus_per_worker,
    )
    if device is None:
        device = device_of(placement, None if address is None else nodes)
        if device.kind == "cuda" and device.memory is None:
            findings.warn("the cluster does not report its GPU type: give it with --gpu to check whether the run fits")
    return plan, placement, device
