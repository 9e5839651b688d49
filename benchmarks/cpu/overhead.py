"""What Ray adds to a step of the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cpu.plan import Plan, Result, run_finray
from harness.report import Spread, say, table

RAY_TARGET = 1.02


def measure_ray(plan: Plan) -> tuple[list[Result], list[Result]]:
    """The same run without and with Ray, in turn; the same packs in the same steps every time."""
    without: list[Result] = []
    within: list[Result] = []
    for pair in range(plan.pairs):
        for results, extra in ((without, ()), (within, ("--through-ray",))):
            results.append(run_finray(plan, plan.seed, *extra))
        apart, inside = (median(results[-1]["step_seconds"]) for results in (without, within))
        ratio = inside / apart
        say(f"Ray {pair + 1}/{plan.pairs}: median step {apart:.3f} s without, {inside:.3f} s with ({ratio:.3f})")
    return without, within


def show_ray(without: Sequence[Result], within: Sequence[Result]) -> str:
    """Median step seconds of each run and of all of them, and their ratios."""
    columns = [[median(result["step_seconds"]) for result in results] for results in (without, within)]
    ratio = Spread.of_ratios(columns[1], columns[0])
    pooled = [median([s for result in results for s in result["step_seconds"]]) for results in (without, within)]
    inside = [median([r["seconds_inside_steps"] for r in results]) for results in (without, within)]
    steps = sum(len(result["step_seconds"]) for result in without)
    rows = [
        ["without Ray", Spread.of(columns[0]).show(3), f"{pooled[0]:.3f}", f"{inside[0]:.2f}"],
        ["in a Ray Train worker", Spread.of(columns[1]).show(3), f"{pooled[1]:.3f}", f"{inside[1]:.2f}"],
        ["ratio", ratio.show(3), f"{pooled[1] / pooled[0]:.3f}", f"{inside[1] / inside[0]:.3f}"],
    ]
    head = [
        "",
        "median step of a run, s",
        f"median of all {steps} steps, s",
        "timed steps of a run together, without logging, s",
    ]
    verdict = "met" if ratio.median <= RAY_TARGET else "missed"
    return f"{table(head, rows)}\n\nAim: at most {RAY_TARGET - 1:.0%} more for the median step; {verdict}."
