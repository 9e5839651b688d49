"""Start-up of `finray train`, the time that a checkpoint stalls training, and this checkout compared with another."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import yaml

import case
from case import Bench, Result, Run
from cpu import finray_config, run_finray
from prepare import run_finray_prepare
from processes import SOURCE, environment, in_turn, run
from rows import write_rows

GIB = 2**30
PHASES = ("Python and config", "start_ray", "prepare", "start_workers", "load", "first step")


def run_start(bench: Bench, source: Path = SOURCE) -> Result:
    """`finray train` from the command to its first step, without prepared data: seconds by phase.

    The phases come from the run's summary and from the times at which its files were written. The summary's
    `start_workers` includes the end of the workers, which comes after the first step; here it is the time from the
    prepared data to the start of loading.
    """
    folder = bench.empty_folder()
    config = finray_config(bench, write_rows(folder / "rows.jsonl", bench.rows), folder, steps=1, seed=bench.seed)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "finray.cli.main", "train", file]
    began = time.time()
    ran = run(command, env=environment(threads=bench.threads, source=source), watch=True)
    run_dir = folder / "run"
    inside = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["summary"]["phases"]
    opened = (run_dir / "config.yaml").stat().st_mtime - began
    loaded = (run_dir / "workers.json").stat().st_mtime - began
    known = opened + inside["start_ray"] + inside["prepare"] + inside["load"]
    found = {
        "Python and config": opened,
        "start_ray": inside["start_ray"],
        "prepare": inside["prepare"],
        "start_workers": max(0.0, loaded - known),
        "load": inside["load"],
        "first step": inside["train"],
    }
    return {**found, "together": sum(found.values()), "whole command": ran.seconds, "resident": ran.resident}


START = case.Case(
    group="start",
    name="phases",
    title="From the command to the first step",
    what="`finray train` on data not yet prepared, files in the page cache: seconds.",
    blocks=case.alone({"finray train": lambda bench, pair: run_start(bench)}),
    measures=[case.Measure(name, name) for name in (*PHASES, "together")],
    aims=[
        case.Aim(
            "From `finray train` to the end of the first step", case.middle("finray train", "together"), form="{:.1f} s"
        )
    ],
    most_pairs=3,
)


AT_ONCE, BEHIND = "at once", "behind"


def _run_saving(behind: bool) -> Run:
    """Full fine-tuning that saves after every second step: seconds of every save, and of the steps after a save.

    A save's stall is the time between two steps that belongs to neither: the snapshot, writing it or starting to, and
    completing the previous checkpoint. The first save of a process is listed separately: it allocates the memory for
    the copy.
    """

    def one(bench: Bench, pair: int) -> Result:
        saves = 2 if bench.quick else 4
        rows = [{"prompt": f"{number} and", "completion": " more" * 200} for number in range(64)]
        change = {
            "adapter": {"method": "none"},
            "data": {"max_length": 512},
            "train": {"learning_rate": 1e-5},
            "checkpoint": {"every_steps": 2, "keep_last": 1, "keep_best": False, "asynchronous": behind},
        }
        result = run_finray(bench, pair, rows=rows, steps=2 * saves + 1, change=change)
        # Step k's record comes before its save: the time up to the next record is that of the save and the next step.
        steps = [later - earlier for earlier, later in pairwise([0.0, *result["step_seconds"]])]
        apart = [later - earlier for earlier, later in pairwise(result["marks"])]
        waits = [between - step for between, step in zip(apart, steps[1:], strict=True)]
        # After the last background save come one step and the final save, which is synchronous.
        stalls = [waits[at] + waits[at + 1] for at in range(1, 2 * saves - 2, 2)]
        checkpoint = bench.folder / "run" / "run" / f"checkpoint-{2 * saves + 1:06d}"
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        later = median(stalls[1:]) if stalls[1:] else None
        return {"first": stalls[0], "later": later, "beside": median(steps[2::2]), "bytes": size}

    return one


CHECKPOINTS = case.Case(
    group="checkpoints",
    name="checkpoints",
    title="Stalls",
    what="Full fine-tuning in one process without Ray, saving after every second step: written at once, and behind the "
    "training. How much slower the steps are beside which something is written is part of the price.",
    blocks=case.alone({BEHIND: _run_saving(True), AT_ONCE: _run_saving(False)}),
    measures=(
        case.Measure("stall of a save, s", "later", 3, 3),
        case.Measure("of the first save of a process, s", "first", 3, 3),
        case.Measure("a step right after a save, s", "beside", 2),
        case.Measure("a checkpoint, GiB", "bytes", 2, None, scale=1 / GIB),
    ),
    ratios=case.over_others,
    aims=[
        case.Aim("Stall of a save written behind the training ÷ at once", case.least_quotient("later"), form="{:.3f}×")
    ],
    most_pairs=3,
)


OURS, OTHER = "this checkout", "the other"


def _against(bench: Bench) -> dict[str, dict[str, Run]]:
    """Both checkouts in turn: a step, data preparation, and `finray train` from the command on."""
    assert bench.against is not None
    sources = {OURS: SOURCE, OTHER: bench.against / "src"}
    count = len(bench.pool)
    runs: dict[str, Callable[..., Result]] = {
        "Preparing": lambda source: run_finray_prepare(bench, count, source=source),
        "finray train": lambda source: run_start(bench, source),
    }
    return {"Steps in turn": _steps_in_turn(bench, sources)} | {
        block: {name: lambda _, pair, run=run, source=source: run(source) for name, source in sources.items()}  # type: ignore[misc]
        for block, run in runs.items()
    }


def _steps_in_turn(bench: Bench, sources: dict[str, Path]) -> dict[str, Run]:
    """Both checkouts train at the same time, with alternating steps: less noise than alternating runs."""
    found: dict[str, Result] = {}

    def run_both(bench: Bench, pair: int) -> Result:
        folder, contenders = bench.empty_folder(), {}
        for name, source in sources.items():
            own = replace(bench, folder=bench.folder / name.replace(" ", "_"))
            own.folder.mkdir(exist_ok=True)
            contenders[name] = lambda turns, own=own, source=source: run_finray(own, pair, source=source, turns=turns)
        found.update(in_turn(folder, contenders))
        return found[OURS]

    return {OURS: run_both, OTHER: lambda bench, pair: found[OTHER]}


def _better(block: str, key: str) -> case.Aim:
    """How many times better this checkout is, for a measure where less is better."""
    return case.Aim(
        f"{block}: {key}, {OTHER} ÷ {OURS}",
        lambda blocks: case.quotient(OTHER, OURS, key)({block: blocks[block]}),
        least=0.98,
        form="{:.3f}×",
    )


AGAINST = case.Case(
    group="against",
    name="against",
    title="This checkout and another one",
    what="The same work by the source of this checkout and of another one, in turn. Of the ratios below the table more "
    "is better for this one.",
    blocks=_against,
    measures=(
        case.Measure("steps in turn, s", "seconds_in_turn", 2, 3),
        case.Measure("seconds", "seconds", 2, 3),
        case.Measure("start to first step, s", "startup_seconds", 2, 3),
        *(case.Measure(name, name, 2, 3) for name in (*PHASES, "together")),
        case.Measure("peak memory, GiB", "peak_rss_bytes", 2, 3, scale=1 / GIB),
        case.Measure("of all processes, GiB", "resident", 2, 3, scale=1 / GIB),
        case.Measure("shared pages once", "proportional", 2, 3, scale=1 / GIB),
    ),
    ratios=case.over_others,
    aims=(
        _better("Steps in turn", "seconds_in_turn"),
        _better("Steps in turn", "peak_rss_bytes"),
        _better("Preparing", "seconds"),
        _better("Preparing", "proportional"),
        _better("finray train", "together"),
        _better("finray train", "resident"),
    ),
)

CASES = [START, CHECKPOINTS, AGAINST]
