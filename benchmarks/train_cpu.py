"""LoRA fine-tuning on a CPU: finray beside TRL on the same rows, how soon it starts, and what Ray adds to a step.

Four measurements, each of processes of their own, one at a time:

1. Speed. In turn, `--pairs` times: finray (bf16, packed, without Ray), TRL as it comes (batch 4, its own defaults, the
   system's allocator), TRL at its best (bf16 weights, no checkpointing, rows grouped by length, finray's allocator
   settings). All train the same model, adapter and optimizer on the same rows: `--steps` batches of four, a sample
   that has the lengths of the whole. For TRL at its best the batches hold rows of one length, as sorting a large data
   set would give (better than TRL's own grouping does on few rows); for TRL as it comes they are shuffled; both see
   every row once in the timed steps. finray packs the rows and is timed over as many packs as hold them all; two
   warm-up steps in front wrap its epoch, so a few rows may be counted twice and as many not at all, tokens counted
   accordingly. Tokens are real ones, never padding.
2. Equal loss. In fp32, unpacked, in the file's order and from the adapter that TRL drew: the loss of every step on both
   sides. It is what makes the first measurement one of equal work.
3. The start of `finray train` by phase, up to the end of the first optimizer step, on data not yet prepared.
4. What Ray adds: finray's steps of measurement 1 in this process and in one Ray Train worker, in turn. A step's
   seconds run from its record to the next one's. Records travel to the driver meanwhile, as they do in every run.

Not measured: accelerators, several workers, saving, evaluation, generation, or how good a model comes out. The machine
should be idle; the section says how loaded it was when the run began.

The result is printed and replaces its section in RESULTS.md; with `--quick` (a trial of the script, whose numbers mean
nothing) it is printed only.

    python benchmarks/train_cpu.py [--rows alpaca.json] [--peer-python OTHER_VENV/bin/python]
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from cpu.equal_loss import measure_equal_loss, show_equal_loss
from cpu.overhead import measure_ray, show_ray
from cpu.plan import BATCH, Plan, Result
from cpu.speed import measure_speed, show_speed
from cpu.start import measure_start, show_start
from harness.report import machine, replace_section, say
from harness.rows import count_tokens, grouped_sample, make_rows, read_rows

HERE = Path(__file__).resolve().parent
TITLE = "LoRA on a CPU: finray and TRL"
POOL = 1000
MAX_POOL = 5000


def _versions(results: dict[str, list[Result]], ray: Sequence[Result]) -> str:
    versions = {
        **results["TRL, best"][0]["versions"],
        **results["finray"][0]["versions"],
        "ray": ray[0]["settings"]["ray"],
    }
    peer = results["TRL, best"][0]["versions"]
    differing = {name: peer[name] for name in ("torch", "transformers", "peft") if peer[name] != versions[name]}
    note = f"; TRL ran with {', '.join(f'{n} {v}' for n, v in differing.items())}" if differing else ""
    return ", ".join(f"{name} {value}" for name, value in sorted(versions.items())) + note


def _setup(plan: Plan, options: argparse.Namespace, load: float) -> str:
    source = f"`{options.rows.name}`" if options.rows else "made by the script with Alpaca's lengths"
    lengths = count_tokens(plan.rows, plan.model)
    return "\n".join(
        [
            f"- {datetime.date.today().isoformat()}; {machine()}; load before the run {load:.2f}",
            f"- `{options.model.name}`, LoRA rank 8 on all linear layers, AdamW, clipping at 1.0, at most 1024 tokens",
            f"- threads: {plan.threads}; {len(plan.rows)} rows ({source}; {min(lengths)} to {max(lengths)} tokens, "
            f"{mean(lengths):.0f} on average, without the template); runs of each in turn: {plan.pairs}; warm-up steps "
            f"in each: {plan.warmup}",
        ]
    )


def make_section(plan: Plan, options: argparse.Namespace) -> str:
    """Do all measurements and describe them."""
    load = os.getloadavg()[0]
    say(f"{len(plan.rows)} rows, load {load:.2f}")
    equal = measure_equal_loss(plan)
    speed = measure_speed(plan)
    starts = measure_start(plan)
    without, within = measure_ray(plan)
    parts = [
        f"{_setup(plan, options, load)}\n- {_versions(speed, within)}",
        f"```\n{shlex.join(['python', 'benchmarks/train_cpu.py', *options.given])}\n```",
        "Medians, with the smallest and the largest in parentheses; ratios are of runs taken one after the other. More "
        "tokens/s are better, of the rest less is.",
        show_speed(speed),
        "finray: bf16, packed, without Ray. TRL, defaults: bf16 autocast over fp32 weights, gradient checkpointing, "
        "padded batches of 4 in random order, the system's allocator. TRL, best: bf16 weights, no checkpointing, "
        "batches of 4 of one length, finray's allocator settings.",
        f"**Equal loss.** {show_equal_loss(equal)}",
        "**From the command `finray train` to the end of the first step**, data not yet prepared, "
        "files in the page cache:",
        show_start(starts),
        "**What Ray adds to a step** (finray's run above, in this process and in one Ray Train worker):",
        show_ray(without, within),
    ]
    return "\n\n".join(parts)


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
    )


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="finray and TRL side by side on a CPU; writes RESULTS.md.")
    parser.add_argument("--model", type=Path, default=HERE.parent / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=Path, help="JSON or JSON lines; default: rows with Alpaca's lengths, made here")
    parser.add_argument("--pairs", type=int, help="runs of each system (default 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, help="timed batches of four rows in a run (default 10)")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has TRL")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--ray-only", action="store_true", help="only what Ray adds to a step; printed, not recorded")
    parser.add_argument("--quick", action="store_true", help="one pair of two steps, to try the script; only printed")
    options = parser.parse_args(argv)
    options.given = argv
    options.pairs = options.pairs or (1 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 10)
    if not 1 <= options.threads <= (os.cpu_count() or 1):
        parser.error("--threads must be between 1 and the number of cores")
    if min(options.pairs, options.steps) < 1:
        parser.error("--pairs and --steps must be at least 1")
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="finray_bench_") as name:
        plan = make_plan(options, Path(name))
        if options.ray_only:
            print(show_ray(*measure_ray(plan)))
            return 0
        section = make_section(plan, options)
    print(f"## {TITLE}\n\n{section}")
    if not options.quick:
        replace_section(options.results, TITLE, section)
        say(f"wrote {options.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
