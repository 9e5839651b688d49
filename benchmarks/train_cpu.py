"""LoRA fine-tuning on a CPU: finray beside TRL, Transformers' Trainer and Accelerate's FSDP2 on the same rows.

Every measurement is of processes of their own, one run at a time, in turn, so that what changes on the machine changes
for all. All train the same model, adapter and optimizer on the same rows: `--steps` batches of four, a sample that has
the lengths of the whole. Tokens are real ones, never padding. The parts, which `--only` chooses from:

* speed, `--pairs` times each: finray (bf16, packed, without Ray); TRL as it comes (batch 4, its own defaults, the
  system's allocator); TRL at its best (bf16 weights, no checkpointing, batches of one length, finray's allocator
  settings); Transformers' Trainer with PEFT, set up likewise. For those at their best the batches hold rows of one
  length, as sorting a large data set would give (better than their own grouping does on few rows). finray packs the
  rows and is timed over as many packs as hold them all; two warm-up steps in front wrap its epoch, so a few rows may be
  counted twice and as many not at all, tokens counted accordingly. Then, with one thread to a process: finray with one
  worker and with two, by ddp and by fsdp, two packs in every step; and Accelerate's FSDP2 in two processes, each with a
  batch of four of one length. Out of these come the speed, the scaling efficiency, the peak memory of everybody (summed
  over processes, each at its own peak), and the share of the limit: counted FLOPs over the rate of the model's matrix
  products, timed in the same process after its last step (`harness/flops.py`).
* equal: in fp32, unpacked, in the file's order and from the adapter that TRL drew: the loss of every step of finray and
  of TRL. It is what makes the speed one of equal work.
* vocabulary: the memory of a step of a narrow model with 128,256 words, beside Transformers' own full logits.
* uniform: rows that are all of one length, as in classification, where packing has nothing to gain.
* start: the start of `finray train` by phase, up to the end of the first optimizer step, on data not yet prepared.
* ray: finray's steps in this process and in one Ray Train worker, in turn. A step's seconds run from its record to the
  next one's. Records travel to the driver meanwhile, as they do in every run.

Not measured: accelerators, saving, evaluation, generation, or how good a model comes out. The machine should be idle;
every part says how loaded it was when it began. On two cores of the machine in RESULTS.md everything takes some 70
minutes; what is planned is printed at the start.

Each part is printed and replaces its own in RESULTS.md as soon as it is done; with `--quick` (a trial of the script,
whose numbers mean nothing) it is printed only.

    python benchmarks/train_cpu.py [--only speed,uniform] [--rows alpaca.json] [--peer-python OTHER_VENV/bin/python]
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from cpu.equal_loss import measure_equal_loss, show_equal_loss
from cpu.limit import show_limit
from cpu.memory import show_memory
from cpu.overhead import measure_ray, show_ray
from cpu.plan import BATCH, Plan
from cpu.speed import measure_speed, show_speed
from cpu.start import measure_start, show_start
from cpu.uniform import measure_uniform, show_uniform
from cpu.vocabulary import measure_vocabulary, show_vocabulary
from cpu.workers import measure_workers, show_workers
from harness.processes import run_command
from harness.report import machine, replace_parts, say
from harness.rows import count_tokens, grouped_sample, make_rows, read_rows

HERE = Path(__file__).resolve().parent
TITLE = "LoRA on a CPU: finray and its peers"
POOL = 1000
MAX_POOL = 5000
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate")
PEERS_NOTE = (
    "finray: bf16, packed, without Ray. TRL, defaults: bf16 autocast over fp32 weights, gradient checkpointing, "
    "padded batches of 4 in random order, the system's allocator. TRL, best, and Trainer (Transformers' own, with "
    "PEFT): bf16 weights, no checkpointing, batches of 4 of one length, finray's allocator settings."
)
Parts = Iterator[tuple[str, str]]


def speed(plan: Plan) -> Parts:
    """Everything that the runs at speed tell."""
    alone = measure_speed(plan)
    yield "Speed", f"{show_speed(alone)}\n\n{PEERS_NOTE}"
    groups = measure_workers(plan)
    yield "One worker and two", show_workers(groups)
    yield (
        "Peak memory of every contender",
        f"{show_memory(alone, groups)}\n\nResident memory; of several processes the sum of their peaks, in which pages "
        "that they share count for each.",
    )
    yield "Share of the limit", show_limit({**alone, **groups})


def equal(plan: Plan) -> Parts:
    """Whether finray and TRL do the same."""
    yield "Equal loss", show_equal_loss(measure_equal_loss(plan))


def vocabulary(plan: Plan) -> Parts:
    """The memory of a large vocabulary."""
    yield "A vocabulary of 128 k", show_vocabulary(measure_vocabulary(plan))


def uniform(plan: Plan) -> Parts:
    """Rows of one length."""
    yield "Rows of one length", show_uniform(measure_uniform(plan))


def start(plan: Plan) -> Parts:
    """The way to the first step."""
    shown = show_start(measure_start(plan))
    yield "From the command to the first step", f"`finray train`, files in the page cache.\n\n{shown}"


def ray(plan: Plan) -> Parts:
    """What Ray adds."""
    shown = show_ray(*measure_ray(plan))
    yield "What Ray adds to a step", f"The same run in the script's process and in one Ray Train worker.\n\n{shown}"


PARTS: dict[str, Callable[[Plan], Parts]] = {
    "speed": speed,
    "equal": equal,
    "vocabulary": vocabulary,
    "uniform": uniform,
    "start": start,
    "ray": ray,
}
# Seconds on the machine in RESULTS.md: once, for every pair, and for every pair and step.
PLANNED = {
    "speed": (0, 150, 37),
    "equal": (90, 0, 0),
    "vocabulary": (75, 0, 0),
    "uniform": (0, 45, 13),
    "start": (100, 0, 0),
    "ray": (0, 35, 5),
}


def planned_minutes(options: argparse.Namespace) -> float:
    """How long it will take."""
    seconds = (PLANNED[name] for name in options.only)
    return sum(once + options.pairs * (pair + options.steps * step) for once, pair, step in seconds) / 60


def versions(peer_python: str) -> str:
    """Of finray's side and, where they differ, of the peers'."""
    ours = {name: version(name) for name in ("finray", "ray", "torch", "transformers", "peft")}
    code = f"import importlib.metadata as m; print(*(m.version(name) for name in {PACKAGES!r}))"
    found = run_command([peer_python, "-c", code], env=dict(os.environ)).split()
    theirs = dict(zip(PACKAGES, found, strict=True))
    differing = {name: value for name, value in theirs.items() if ours.get(name, value) != value}
    note = f"; the peers ran with {', '.join(f'{n} {v}' for n, v in differing.items())}" if differing else ""
    return ", ".join(f"{name} {value}" for name, value in sorted({**theirs, **ours}.items())) + note


def setup(plan: Plan, options: argparse.Namespace, load: float) -> str:
    """What a part was measured on, and how to measure it again."""
    source = f"`{options.rows.name}`" if options.rows else "made by the script with Alpaca's lengths"
    lengths = count_tokens(plan.rows, plan.model)
    return "\n".join(
        [
            f"- {datetime.date.today().isoformat()}; {machine()}; load before it {load:.2f}",
            f"- `{options.model.name}`, LoRA rank 8 on all linear layers, AdamW, clipping at 1.0, at most 1024 tokens",
            f"- threads: {plan.threads}; {len(plan.rows)} rows ({source}; {min(lengths)} to {max(lengths)} tokens, "
            f"{mean(lengths):.0f} on average, without the template); runs of each in turn: {plan.pairs}; warm-up steps "
            f"in each: {plan.warmup}; medians, with the smallest and the largest in parentheses; ratios are of runs "
            "taken one after the other",
            f"- {options.versions}",
            "",
            f"```\n{shlex.join(['python', 'benchmarks/train_cpu.py', *options.given])}\n```",
        ]
    )


def make_plan(options: argparse.Namespace, folder: Path) -> Plan:
    """Choose the rows, and how much is run."""
    rows = make_rows(POOL, seed=options.seed) if options.rows is None else read_rows(options.rows)
    if len(rows) > MAX_POOL:
        rows = random.Random(options.seed).sample(rows, MAX_POOL)
    model = options.model.absolute()
    batches = grouped_sample(rows, count_tokens(rows, model), batches=options.steps, batch_size=BATCH)
    return Plan(
        model=model,
        peer_python=options.peer_python,
        threads=options.threads,
        pairs=options.pairs,
        warmup=1 if options.quick else 2,
        equal_steps=min(options.steps, 2 if options.quick else 8),
        starts=min(options.pairs, 3),
        seed=options.seed,
        batches=batches,
        folder=folder,
        quick=options.quick,
    )


def _parts(value: str) -> list[str]:
    names = value.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no part; there are {', '.join(PARTS)}")
    return names


def _shown(argv: list[str]) -> list[str]:
    """The options as they are printed: where an interpreter or a file lies says nothing to a reader."""
    names = {"--peer-python": "OTHER_VENV/bin/python", "--results": "FILE", "--rows": "FILE", "--model": "DIR"}
    return [names.get(before, value) for before, value in zip(["", *argv], argv, strict=False)]


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="finray and its peers side by side on a CPU; writes RESULTS.md.")
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--model", type=Path, default=HERE.parent / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=Path, help="JSON or JSON lines; default: rows with Alpaca's lengths, made here")
    parser.add_argument("--pairs", type=int, help="runs of each system (default 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, help="timed batches of four rows in a run, an even number (default 10)")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has TRL and Accelerate")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="one pair of two steps, to try the script; only printed")
    options = parser.parse_args(argv)
    options.given = _shown(argv)
    options.pairs = options.pairs or (1 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 10)
    if not 1 <= options.threads <= (os.cpu_count() or 1):
        parser.error("--threads must be between 1 and the number of cores")
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    if options.steps < 2 or options.steps % 2:
        parser.error("--steps must be even, and at least 2")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    options.versions = versions(options.peer_python)
    with tempfile.TemporaryDirectory(prefix="finray_bench_") as name:
        plan = make_plan(options, Path(name))
        say(f"{len(plan.rows)} rows; planned: {planned_minutes(options):.0f} minutes on an idle machine")
        for part in options.only:
            described = setup(plan, options, os.getloadavg()[0])
            for title, body in PARTS[part](plan):
                section = f"{described}\n\n{body}"
                print(f"### {title}\n\n{section}\n", flush=True)
                if not options.quick:
                    replace_parts(options.results, TITLE, {title: section})
                    say(f"wrote {title} into {options.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
