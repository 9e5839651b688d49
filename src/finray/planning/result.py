"""The plan of a run: what planning found, and how a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import HEAVY_HEAD, Box
from rich.console import Console

from finray.config.resolved import Resolved
from finray.errors import FinrayError
from finray.planning.findings import PlanFinding
from finray.planning.flops import UTILIZATION, SpeedPlan, rounded
from finray.planning.memory import MemoryPlan
from finray.planning.model import ModelPlan
from finray.planning.strategy import StrategyChoice
from finray.results import Result, Table
from finray.tracking.console import duration, several

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The training data."""

    rows: int  # to train on
    tokens: int  # in them
    supervised: int  # targets in them; of labelled text its rows
    packs: int  # that they fill, or rows without packing
    longest: int  # tokens of the longest row
    complete: bool  # whether all of it was read; else all numbers are of the part that was
    notes: tuple[str, ...]  # how it was read
    global_batch_size: int  # packs (or rows) per optimizer step
    steps: int
    epochs: float
    seen_tokens: int  # in the whole run
    seconds: float  # that the examination took
    labelled: bool = False  # whether each row has a label, and no token is a target
    is_pairs: bool = False  # whether two rows each are a pair, and steps take pairs
    counts_rows: bool = False  # whether steps take so many rows, which are then packed


@dataclass(frozen=True, slots=True)
class EarlierPlan:
    """The existing state of this run in the run directory."""

    run_dir: str
    step: int  # of the newest checkpoint; 0 where there is none
    is_finished: bool  # nothing is left to be done


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Placement of the workers, and the resources of each."""

    cluster: str  # the address that was asked, or `this machine`
    nodes: int
    cpus: int  # of all nodes
    gpus: int
    workers: int
    cpus_per_worker: int
    use_gpu: bool
    fewest: int  # of a number of workers that follows the cluster; else `workers`
    most: int
    gpus_per_worker: float


@dataclass(frozen=True, slots=True)
class Plan(Result):
    """The plan of a run; a part that could not be determined is None, and the problems say why."""

    problems: tuple[PlanFinding, ...] = ()  # what keeps it from starting
    warnings: tuple[PlanFinding, ...] = ()
    unchecked: tuple[PlanFinding, ...] = ()  # what an offline plan could not look at
    model: ModelPlan | None = None
    data: DataPlan | None = None
    resolved: Resolved | None = None
    workers: int | None = None  # that would be started
    strategy: StrategyChoice | None = None  # the choice of `auto` and its reason; None if a strategy is set
    placement: PlacementPlan | None = None  # None where `--gpu` names GPUs that are not here
    memory: MemoryPlan | None = None
    speed: SpeedPlan | None = None  # on GPUs whose rate is known
    earlier: EarlierPlan | None = None  # None where the run would begin
    micro_batch: str | None = None  # why so many packs are in one, where `auto` decides for a GPU

    @property
    def starts(self) -> bool | None:
        """Whether the run would start; None if there are no problems but some checks were skipped."""
        return False if self.problems else None if self.unchecked else True

    def plain(self) -> dict[str, Any]:
        """The plan as JSON types."""
        return {"starts": self.starts, **asdict(self)}

    def print(self, console: Console, *, quiet: bool = False) -> None:
        """Tables, warnings and problems, and the verdict; ``quiet``: only problems."""
        if quiet:
            _show_findings(console, "problem", "bold red", self.problems)
            return
        # Lines around tables on a terminal, none elsewhere.
        box = HEAVY_HEAD if console.is_terminal else None
        facts = Table(title="plan", show_header=False, title_justify="left", box=box)
        for name, text in _facts(self):
            facts.add_row(name, text)
        console.print(facts)
        if self.memory is not None:
            console.print(memory_table(self.memory, box=box))
        for kind, style, findings in (
            ("warning", "bold yellow", self.warnings),
            ("not checked", "bold yellow", self.unchecked),
            ("problem", "bold red", self.problems),
        ):
            _show_findings(console, kind, style, findings)
        count = len(self.problems)
        verdict, style = "the run would start", "bold green"
        if count:
            verdict, style = f"the run would not start: {count} problem{'s' if count > 1 else ''}", "bold red"
        elif self.unchecked:
            verdict, style = "no problems found, but not everything was checked", "bold yellow"
        console.print(verdict, style=style, highlight=False)


def _show_findings(target: Console, kind: str, style: str, findings: Iterable[PlanFinding]) -> None:
    for finding in findings:
        # An error prints as where, message and repair.
        text = f"{kind}: {FinrayError(finding.message, where=finding.where, repair=finding.repair)}"
        target.print(text, style=style, highlight=False, soft_wrap=True)


def _goes_on(earlier: EarlierPlan, data: DataPlan | None) -> str:
    if earlier.is_finished:
        return f"is finished already, in {earlier.run_dir}; --fresh starts over"
    if not earlier.step:
        return f"was begun in {earlier.run_dir}, and has no checkpoint yet"
    of = f" of {data.steps}" if data is not None and data.complete else ""
    return f"continues at step {earlier.step}{of}, in {earlier.run_dir}"


def memory_table(memory: MemoryPlan, *, box: Box | None) -> Table:
    """Memory by part, largest first."""
    table = Table(title="peak memory of a worker (estimate)", title_justify="left", box=box)
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for name, value in sorted(memory.parts.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{value / _GIB:.3f}")
    table.add_section()
    table.add_row("total", f"{memory.total / _GIB:.3f}")
    if memory.available is not None:
        table.add_row(f"available ({memory.device})", f"{memory.available / _GIB:.3f}")
    return table


def _facts(result: Plan) -> Iterable[tuple[str, str]]:
    """Rows of the table: name and text."""
    model, data, resolved = result.model, result.data, result.resolved
    if model is not None:
        share = model.trainable / model.parameters
        adapter = f"; adapter {model.adapter:,}" if model.adapter else ""
        tokens = "" if model.tokens is None else f", {model.tokens:,} tokens; EOS {model.eos}, padding {model.pad}"
        yield "model", model.name
        yield "parameters", f"{model.parameters:,}, of which {model.trainable:,} are trained ({share:.3%}){adapter}"
        if model.kept:
            names = ", ".join(name.rpartition(".")[2] for name in model.parts)
            yield "text tower", f"it alone is trained; {model.kept:,} parameters stay as they are ({names})"
        if model.adapted:
            yield "adapter", f"on {model.adapted}"
        if model.labels is not None:
            kind = "reward" if model.is_reward else model.labels.problem
            yield "head", f"{several(len(model.labels.names) or 1, 'output')} ({kind})"
        yield "vocabulary", f"{model.embedding_rows:,} embeddings{tokens}"
        yield "context", "unlimited" if model.context is None else f"{model.context:,} tokens"
    if data is not None:
        part = "" if data.complete else " in the part that was read"
        unit = "pair" if data.is_pairs else "row" if data.counts_rows else "pack"
        rows, packs = f"{data.rows:,} rows", several(data.packs, unit)
        learned = "" if data.labelled else f" ({data.supervised / max(1, data.tokens):.0%} learned)"
        yield (
            "data",
            f"{rows if unit == 'pack' else packs}, {data.tokens:,} tokens{learned}"
            f"{part}, {f'{packs}, ' if unit == 'pack' else ''}longest row {data.longest:,}; read in "
            f"{duration(data.seconds)}",
        )
        for note in data.notes:
            yield "", note
        yield (
            "run",
            f"{part and 'for that part: '}{several(data.steps, 'step')} of {several(data.global_batch_size, unit)}, "
            f"{data.epochs:.2f} epochs, {data.seen_tokens:,} tokens",
        )
    if result.earlier is not None:
        yield "", _goes_on(result.earlier, data)
    if result.strategy is not None:
        yield "strategy", f"{result.strategy.strategy}: {result.strategy.reason}"
    if resolved is not None:
        stored = f", frozen layers in {resolved.bits} bits" if resolved.bits else ""
        alone = "rows of one length in a pass, the model's attention"
        rows = f"packed rows ({resolved.attention})" if resolved.packs else alone
        yield "resolved", f"{resolved.precision}{stored}, {rows}"
    if resolved is not None and result.micro_batch is not None:
        yield "micro-batch", f"{several(resolved.micro_batch_size, 'pack')}: {result.micro_batch}"
    if result.placement is not None:
        place = result.placement
        gpu = f"{place.gpus_per_worker:g} GPU and " if place.use_gpu else ""
        each = f"{gpu}{several(place.cpus_per_worker, 'CPU')} each"
        cluster = f"{several(place.nodes, 'node')}, {place.cpus} CPUs, {place.gpus} GPUs"
        now = several(place.workers, "worker")
        if place.fewest < place.most:
            now = f"{place.fewest} to {place.most} workers, {place.workers} now,"
        yield "placement", f"{now} with {each} on {place.cluster} ({cluster})"
    elif result.workers is not None and result.memory is not None:
        workers = several(result.workers, "worker")
        yield "placement", f"{workers} with one {result.memory.device} each, on another machine"
    if result.memory is not None:
        memory = result.memory
        needed = (
            f"about {memory.total / _GIB:.2f} GiB per worker in {memory.precision}, {memory.tokens:,} tokens at once"
        )
        verdict = "fits" if memory.fits else "does not fit"
        room = (
            "" if memory.available is None else f": {verdict} into {memory.available / _GIB:.1f} GiB ({memory.device})"
        )
        yield "memory", needed + room
        if memory.offloaded:
            yield "", f"and {memory.offloaded / _GIB:.1f} GiB of CPU memory for what each worker offloads"
        if memory.faster:
            yield "", f"probably faster, and fits: {' '.join(memory.faster)}"
    if result.speed is not None:
        speed = result.speed
        took = ""
        if speed.seconds is not None and speed.step_seconds is not None:
            whole = duration(speed.seconds) if speed.seconds >= 1 else "less than a second"
            took = f": a step in {speed.step_seconds:.2g} s, all of them in {whole}"
        rate = f"about {rounded(speed.tokens_per_s):,} tokens/s"
        yield "speed", f"{rate}, computed at {UTILIZATION:.0%} of the data sheet's rate{took}"
        if speed.waiting > 1:
            often = f"{speed.waiting:.1f} times as long as it computes"
            yield "", f"launching the kernels of a micro-batch takes {often}: larger ones are faster"
