"""How long a training step waits for a checkpoint: written at once, and behind the training.

Full fine-tuning of a real model (weights and both moments: about 1.6 GB for 135 M parameters), in one process without
Ray. The two ways take turns, `--pairs` times; each is a process of its own that saves after every second step. A save's
stall is all the time that the loop spends in it: taking the snapshot, starting and ending the write, and making it a
checkpoint. The first save of a process is told apart: it allocates the memory of the copy. How much slower the steps
are beside which something is written is reported too, because it is part of the price.

Not measured: several ranks, remote storage, accelerators. The machine should be idle.

    python benchmarks/checkpoints.py [--pairs 3] [--saves 4]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from harness.report import machine, replace_section, say

HERE = Path(__file__).resolve().parent
TITLE = "Checkpoints behind the training"
WAYS = {"at once": False, "behind": True}


def run_one(model: Path, folder: Path, *, behind: bool, saves: int) -> dict[str, Any]:
    """A training that saves; seconds of every save and every step."""
    import torch

    from finray.config.load import build_config
    from finray.data.dataset.prepare import prepare_here
    from finray.parallel.ddp import DDPStrategy
    from finray.training.allocator import keep_freed_memory
    from finray.training.assemble import assemble

    keep_freed_memory()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} and", "completion": " more" * 200}) + "\n" for n in range(64)))
    config = build_config(
        {
            "run": {"output_dir": str(folder), "name": "run"},
            "model": {"name": str(model)},
            "adapter": {"method": "none"},
            "data": {"source": str(rows), "max_length": 512},
            "train": {"max_steps": 2 * saves + 1, "global_batch_size": 1, "learning_rate": 1e-5},
            "checkpoint": {"every_steps": 2, "keep_last": 1, "keep_best": False, "asynchronous": behind},
            "tracking": {"tensorboard": False},
        },
        source="benchmark",
    )
    run_dir = folder / "run"
    run_dir.mkdir()
    loop = assemble(
        config, prepared=prepare_here(config), run_dir=run_dir, strategy=DDPStrategy(torch.device("cpu"))
    ).loop
    stalls: dict[int, float] = {}
    steps: list[float] = []

    def timed(action: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return action(*arguments, **options)
            finally:
                # Inside a save the end of the one before is counted already.
                if not nested:
                    number = loop.state.step // 2
                    stalls[number] = stalls.get(number, 0.0) + time.perf_counter() - started

        return call

    nested: list[bool] = []
    finish, save, spend = loop._finish_saving, loop._save, loop._spend

    def saving(**options: Any) -> None:
        started = time.perf_counter()
        nested.append(True)
        try:
            save(**options)
        finally:
            nested.pop()
            number = loop.state.step // 2
            stalls[number] = stalls.get(number, 0.0) + time.perf_counter() - started

    def spending(seconds: float) -> None:
        steps.append(seconds)
        spend(seconds)

    loop._finish_saving = timed(finish)  # type: ignore[method-assign]
    loop._save = saving  # type: ignore[method-assign]
    loop._spend = spending  # type: ignore[method-assign]
    loop.run()
    size = sum(path.stat().st_size for path in (run_dir / f"checkpoint-{2 * saves + 1:06d}").rglob("*"))
    # The save after the last step is at once in both ways.
    return {"stalls": [stalls[number] for number in range(1, saves)], "steps": steps[1:], "bytes": size}


def measure(model: Path, *, pairs: int, saves: int) -> dict[str, list[dict[str, Any]]]:
    """Both ways in turn, each run a process of its own."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(pairs):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", way, "--folder", folder, "--model", str(model)]
                done = subprocess.run(
                    [*command, "--saves", str(saves)], stdout=subprocess.PIPE, text=True, check=True, env=_environment()
                )
            found[way].append(json.loads(done.stdout.strip().splitlines()[-1]))
            say(f"{way}: stalls {', '.join(f'{seconds:.2f}' for seconds in found[way][-1]['stalls'])} s")
    return found


def _environment() -> dict[str, str]:
    from finray.planning.placement import ALLOCATOR

    return {**os.environ, "GLIBC_TUNABLES": ALLOCATOR}


def show(found: dict[str, list[dict[str, Any]]]) -> str:
    first = {way: median(run["stalls"][0] for run in runs) for way, runs in found.items()}
    later = {way: median(seconds for run in runs for seconds in run["stalls"][1:]) for way, runs in found.items()}
    # Steps after a save, and steps before the next one.
    beside = {way: median(seconds for run in runs for seconds in run["steps"][1::2]) for way, runs in found.items()}
    lines = [
        "| | at once | behind | behind / at once |",
        "|---|---|---|---|",
        f"| stall of a save, seconds | {later['at once']:.2f} | {later['behind']:.3f} "
        f"| {later['behind'] / later['at once']:.3f} |",
        f"| stall of the first save of a process, seconds | {first['at once']:.2f} | {first['behind']:.3f} "
        f"| {first['behind'] / first['at once']:.3f} |",
        f"| a step right after a save, seconds | {beside['at once']:.2f} | {beside['behind']:.2f} "
        f"| {beside['behind'] / beside['at once']:.2f} |",
    ]
    size = found["behind"][0]["bytes"] / 2**30
    return "\n".join([*lines, "", f"A checkpoint has {size:.2f} GiB. Medians over all saves of all runs."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=HERE.parent / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="one run each, to try the script; only printed")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.model, options.folder, behind=WAYS[options.one], saves=options.saves)))
        return
    load = os.getloadavg()[0]
    pairs = 1 if options.quick else options.pairs
    found = measure(options.model.resolve(), pairs=pairs, saves=options.saves)
    versions = ", ".join(f"{name} {version(name)}" for name in ("finray", "torch", "transformers"))
    setup = (
        f"- {datetime.date.today().isoformat()}; {machine()}; load before the run {load:.2f}\n- {versions}\n"
        f"- full fine-tuning of `{options.model.name}`; runs of each: {pairs}, saves in each: {options.saves}"
    )
    text = f"{setup}\n\n{show(found)}"
    print(text)
    if not options.quick:
        replace_section(options.results, TITLE, text)


if __name__ == "__main__":
    main()
