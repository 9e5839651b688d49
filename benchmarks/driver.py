"""The driver's CPU time per step, by number of workers."""

from __future__ import annotations

import json
import sys

import case
from case import Bench, Result, Run
from processes import PEERS, environment, run

COUNTS = (2, 8, 32)
# As in `peers/driver_cost.py`.
REPORT_EVERY = 4


def _run(count: int) -> Run:
    """CPU milliseconds of the driver: per step, and extra per evaluation and per checkpoint reported to Ray."""

    def one(bench: Bench, pair: int) -> Result:
        job = {"workers": [count], "steps": 40 if bench.quick else 200, "step_s": 0.05}
        ran = run([sys.executable, PEERS / "driver_cost.py", json.dumps(job)], env=environment(threads=1))
        (found,) = ran.result["results"]
        step = found["steps"]
        return {
            "step": step["driver_ms"],
            "evaluation": found["evaluations"]["driver_ms"] - step["driver_ms"],
            "checkpoint": REPORT_EVERY * (found["checkpoints"]["driver_ms"] - step["driver_ms"]),
            "messages": step["messages"],
            "controller": step["controller_ms"],
            "all": sum(found[part]["driver_ms"] for part in ("steps", "evaluations", "checkpoints")) / 3,
        }

    return one


COST = case.Case(
    group="driver",
    name="cost",
    title="CPU of the driver",
    what="Workers without torch, in processes of Ray, that say to the driver and to Ray what finray's workers say, "
    "through the same code, and sleep 50 ms in a step: milliseconds of CPU of the driver's process. Ray Train's "
    "controller is a process of its own.",
    blocks=case.alone({f"{count} workers": _run(count) for count in COUNTS}),
    measures=(
        case.Measure("a step, ms", "step", 2),
        case.Measure("an evaluation more, ms", "evaluation", 2, None),
        case.Measure("a checkpoint reported to Ray more, ms", "checkpoint", 2, None),
        case.Measure("messages in a step", "messages", 2),
        case.Measure("Ray's controller in a step, ms", "controller", 2),
    ),
    aims=[
        case.Aim(
            "CPU of the driver in a step, 32 workers ÷ 2",
            case.quotient(f"{COUNTS[-1]} workers", f"{COUNTS[0]} workers", "all"),
            most=1.2,
        )
    ],
    most_pairs=3,
    setup=lambda bench: (
        "200 steps of 50 ms in each of three parts: only steps, with an evaluation in each, and with a "
        "checkpoint reported in every fourth"
    ),
)

CASES = (COST,)
