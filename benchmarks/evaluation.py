"""What evaluations cost the steps beside them: asynchronous ones with a CPU of their own, and inline ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import case
from case import Bench, BenchmarkError, Result, Run, Runs
from cpu import run_finray
from rows import make_rows, write_rows

NONE, ASYNC, INLINE = "no evaluation", "`async`", "`inline`"
# Short packs, so that there are many steps; as many rows as keep the evaluator busy for most of these steps.
LENGTH, EVERY, STEPS, ROWS = 512, 4, 18, 24


def _run(mode: str | None) -> Run:
    """A run through Ray with one CPU for its worker."""

    def one(bench: Bench, pair: int) -> Result:
        steps, rows = (6, 4) if bench.quick else (STEPS, ROWS)
        # Not in the run's folder, which is emptied.
        held_out = write_rows(bench.folder / "held_out.jsonl", make_rows(rows, seed=bench.seed + 1))
        # A checkpoint at the same steps with evaluation or without it: `async` needs one.
        change: dict[str, dict[str, Any]] = {"checkpoint": {"every_steps": EVERY}}
        if mode is not None:
            change |= {"data": {"eval_source": str(held_out)}, "evaluation": {"mode": mode, "every_steps": EVERY}}
        train, short = make_rows(400, seed=bench.seed), replace(bench, max_length=LENGTH)
        result = run_finray(short, pair, rows=train, threads=1, steps=steps, change=change, through_ray=True)
        lines = (bench.folder / "run" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = [one["eval_seconds"] for one in map(json.loads, lines) if one["kind"] == "eval"]
        return result | {"evaluations": len(seconds), "evaluating": sum(seconds)}

    return one


def same_training(block: str, runs: Runs) -> None:
    """Raise an error unless all learned the same, to the last bit."""
    first, *others = (results[-1]["losses"] for results in runs.values())
    if any(other != first for other in others):
        raise BenchmarkError("losses of the training differ with another evaluation")


CASES = [
    case.Case(
        group="evaluation",
        name="cost",
        title="What evaluation costs a step",
        what=f"`finray train` with one CPU for its worker, packs of {LENGTH} tokens, a checkpoint every {EVERY} steps. "
        f"At each, {ROWS} rows are evaluated by a Ray task on another CPU, in the worker, or not at all. Timed steps "
        "are those after the warm-up, with all that is between them. The losses are the same to the last bit.",
        blocks=case.alone({ASYNC: _run("async"), NONE: _run(None), INLINE: _run("inline")}),
        measures=(
            case.Measure("timed steps together, s", "seconds", 2, 3),
            case.Measure("median step, s", "median_step", 3, 3),
            case.Measure("evaluations", "evaluations", 0, None),
            case.Measure("together, s", "evaluating", 1, None),
        ),
        ratios=lambda runs: [(ASYNC, NONE), (INLINE, NONE)],
        aims=[
            case.Aim(
                "Steps beside asynchronous evaluations ÷ without evaluation",
                case.quotient(ASYNC, NONE, "seconds"),
                most=1.05,
                form="{:.3f}×",
            )
        ],
        setup=lambda bench: f"`{bench.model.name}`, LoRA of rank 8; threads: 1 for the worker, 1 for the evaluator",
        check=same_training,
        most_pairs=3,
    )
]
