"""How soon the page of `finray report` answers in headless Chromium: 20 runs of 10,000 steps, 5,000 predictions."""

from __future__ import annotations

import json
import sys

import case
from case import Bench, Result
from processes import PEERS, environment, run

# What a person does on the page, as in `peers/report_page.py`: the first search while its plots are still drawn.
ACTIONS = ("first search", "search", "filter", "next rows", "zoom", "hover")


def _run(bench: Bench, pair: int) -> Result:
    job = {"folder": str(bench.empty_folder())}
    ran = run([sys.executable, PEERS / "report_page.py", json.dumps(job)], env=environment(threads=bench.threads))
    found = ran.result
    return {**found, "slowest": max(found[name] for name in ("page", *ACTIONS))}


CASES = [
    case.Case(
        group="pages",
        name="pages",
        title="The report of 20 long runs",
        what="20 runs of 10,000 steps, two of them with answers to 5,000 rows, on one page of 14 plots, in headless "
        "Chromium without a GPU: seconds until the page is there, and from what a person does to the next picture.",
        setup=lambda bench: f"cores: {bench.threads}; window of 1440 x 900 pixels",
        blocks=case.alone({"finray report": _run}),
        measures=[
            case.Measure("page, s", "page", 2),
            *(case.Measure(f"{name}, s", name, 2) for name in ACTIONS),
            case.Measure("all drawn, s", "drawn", 2),
            case.Measure("size, MB", "megabytes", 1),
        ],
        aims=[
            case.Aim(
                "The report of 20 long runs: its slowest answer",
                case.middle("finray report", "slowest"),
                most=1.0,
                form="{:.2f} s",
            ),
            case.Aim(
                "The report of 20 long runs: size",
                case.middle("finray report", "megabytes"),
                most=15.0,
                form="{:.1f} MB",
            ),
        ],
        most_pairs=5,
    )
]
