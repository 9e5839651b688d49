"""Run benchmark cases, and write the results to RESULTS.md.

    python benchmarks/run.py cpu                      one or more groups of cases; `all` excludes the last four
    python benchmarks/run.py cpu --case speed         one case
    python benchmarks/run.py --list                   list the cases, with the planned minutes of each
    python benchmarks/run.py gpu --out gpu.json       on a machine with a GPU, without RESULTS.md
    python benchmarks/run.py --show gpu.json          write those results to RESULTS.md
    python benchmarks/run.py against --against PATH   compare this checkout with another, as ratios; print only
    python benchmarks/run.py all --quick              try every script on little data; print only

Every run of a contender has its own process (or group of processes). Contenders run in turn, so that changes on the
machine affect all of them, and ratios are between consecutive runs. The machine should be idle. If the contenders of a
case did not do equal work, the case ends with an error, and its results are not written.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

from case import Bench, Blocks, Case
from report import machine, say, write
from rows import count_tokens

HERE = Path(__file__).resolve().parent
PACKAGES = ("finray", "ray", "torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers")
# For each group, the heading of its section in RESULTS.md and the modules with its cases.
GROUPS = {
    "cpu": ("LoRA on a CPU: finray and its peers", ("cpu",)),
    "scaling": ("LoRA on a CPU: finray and its peers", ("cpu",)),
    "start": ("Start-up", ("start", "prepare")),
    "prepare": ("Preparing data", ("prepare",)),
    "memory": ("Peak memory: the estimate of finray plan", ("memory",)),
    "checkpoints": ("Checkpoints behind the training", ("start",)),
    "driver": ("What a run costs its driver", ("driver",)),
    "answers": ("Answers on a CPU", ("answers",)),
    "evaluation": ("Evaluation during training", ("evaluation",)),
    "classification": ("Classification", ("classification",)),
    "preferences": ("Preferences", ("preferences",)),
    "serving": ("Serving on a CPU", ("serving",)),
    "families": ("Packed rows, by family", ("families",)),
    "pages": ("Pages", ("pages",)),
    "gpu": ("One GPU: finray's training step, and Trainer", ("gpu",)),
    "against": ("Another checkout", ("start",)),
}
ALL = [group for group in GROUPS if group not in ("gpu", "against", "serving", "pages")]


def cases(group: str) -> list[Case]:
    """The cases of a group. Its modules are imported on demand: a GPU machine has fewer packages."""
    modules = [importlib.import_module(name) for name in GROUPS[group][1]]
    return [case for module in modules for case in module.CASES if case.group == group]


def versions(bench: Bench, results: Blocks) -> str:
    """Versions of packages here, and in the peers' interpreter if they differ."""
    ours = {}
    for name in PACKAGES:
        try:
            ours[name] = version(name)
        except PackageNotFoundError:
            continue
    every = [run.get("versions", {}) for runs in results.values() for one in runs.values() for run in one]
    theirs = {name: found for run in every for name, found in run.items() if ours.get(name, found) != found}
    note = f"; peers ran with {', '.join(f'{name} {found}' for name, found in theirs.items())}" if theirs else ""
    return ", ".join(f"{name} {found}" for name, found in sorted(ours.items())) + note


def described(case: Case, bench: Bench, results: Blocks, given: list[str], took: str) -> dict[str, Any]:
    """A case's set-up, the command to repeat it, and the results, as written to a file."""
    lines = [
        f"- {datetime.date.today().isoformat()}; {machine()}; {took}",
        f"- {versions(bench, results)}",
    ]
    if case.group == "gpu":
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        lines.insert(1, f"- {device}; CUDA {torch.version.cuda}")
    elif case.setup is not None:
        lines.append(
            f"- {case.setup(bench)}; runs of each in turn: {case.pairs(bench)}; medians, with the smallest "
            "and the largest in parentheses"
        )
    else:
        lengths = count_tokens(bench.rows, bench.model, max_length=bench.max_length)
        source = "rows made with Alpaca's lengths" if bench.data is None else "GSM8K's and Alpaca's rows"
        lines.append(
            f"- `{bench.model.name}`; threads: {bench.threads}; {len(lengths)} {source} to train on, {min(lengths)} to "
            f"{max(lengths)} tokens, {mean(lengths):.0f} on average; {len(bench.pool):,} of them to prepare; runs of "
            f"each in turn: {case.pairs(bench)}; {bench.warmup} warm-up steps in each; medians, with the smallest and "
            "the largest in parentheses"
        )
    command = shlex.join(["python", "benchmarks/run.py", case.group, "--case", case.name, *given])
    return {"date": lines[0][2:12], "setup": "\n".join([*lines, "", f"```\n{command}\n```"]), "results": results}


def put(options: argparse.Namespace, case: Case, found: dict[str, Any]) -> None:
    """Print a case's section, and write it unless this is a trial."""
    body = f"{found['setup']}\n\n{case.show(found['results'])}"
    print(f"### {case.title}\n\n{body}\n", flush=True)
    if not options.quick and case.group != "against" and options.out is None:
        write(options.results, GROUPS[case.group][0], case.title, body, case.figures(found["results"]), found["date"])
        say(f"wrote {case.title} into {options.results}")


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare finray with its peers; writes RESULTS.md.")
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, "all", []], help="groups of cases")
    parser.add_argument("--case", action="append", help="only this case of these groups")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--pairs", type=int, help="runs per contender (default 5)")
    parser.add_argument("--steps", type=int, help="timed batches of four rows per run, an even number (default 10)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--model", type=Path, default=HERE.parent / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, help="directory with rows; default: generated rows")
    parser.add_argument(
        "--rows", type=int, help="maximum rows for the preparation (default: sixteen times the available rows)"
    )
    parser.add_argument("--first-rows", type=int, help="rows for the run up to the first step (default 100,000)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has TRL and Accelerate")
    parser.add_argument("--against", type=Path, help="another checkout of finray")
    parser.add_argument("--work", type=Path, help="directory for large temporary files")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--out", type=Path, help="write results to this JSON file, instead of RESULTS.md")
    parser.add_argument("--show", type=Path, help="write the results in such a file to RESULTS.md; measure nothing")
    parser.add_argument("--quick", action="store_true", help="one run of each on little data, to try the scripts")
    options = parser.parse_args(argv)
    options.pairs = options.pairs or (1 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 10)
    options.groups = list(
        dict.fromkeys(name for group in options.groups for name in (ALL if group == "all" else [group]))
    )
    if options.steps % 2 or min(options.pairs, options.steps, options.threads) < 1:
        parser.error("--pairs, --steps and --threads must be at least 1, and --steps even")
    if options.threads > (os.cpu_count() or 1):
        parser.error("there are fewer cores than --threads")
    if "against" in options.groups and options.against is None:
        parser.error("against what? --against PATH is another checkout")
    if not options.groups and not options.list and options.show is None:
        parser.error(f"which group? {', '.join(GROUPS)}, or all")
    return options


def bench_of(options: argparse.Namespace, folder: Path) -> Bench:
    """The settings of all runs."""
    return Bench(
        model=options.model.absolute(),
        folder=folder,
        peer_python=options.peer_python,
        threads=options.threads,
        pairs=options.pairs,
        steps=options.steps,
        warmup=1 if options.quick else 2,
        seed=options.seed,
        data=options.data,
        most_rows=options.rows,
        first_rows=options.first_rows or (512 if options.quick else 100_000),
        against=None if options.against is None else options.against.absolute(),
        quick=options.quick,
    )


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    if options.show is not None:
        for name, found in json.loads(options.show.read_text(encoding="utf-8")).items():
            group, _, case = name.partition("/")
            put(options, next(one for one in cases(group) if one.name == case), found)
        return 0
    # Child processes inherit this, so all contenders have the same cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    # Without paths of this machine.
    words = [part for word in argv for part in word.split("=", 1)]
    numbers = ("--pairs", "--steps", "--rows", "--first-rows", "--threads", "--seed")
    given = [part for pair in itertools.pairwise(words) if pair[0] in numbers for part in pair]
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="finray_bench_", dir=options.work) as folder:
        bench = bench_of(options, Path(folder))
        groups = options.groups or [group for group in GROUPS if group != "gpu"]
        chosen = [case for group in groups for case in cases(group) if not options.case or case.name in options.case]
        if options.list or not chosen:
            print("\n".join(f"{case.group} --case {case.name}: {case.title}" for case in chosen))
            return 0 if chosen else 1
        kept: dict[str, Any] = {}
        for case in chosen:
            load, began = os.getloadavg()[0], time.monotonic()
            results = case.measure(bench)
            took = f"load before it {load:.2f}; took {(time.monotonic() - began) / 60:.0f} minutes"
            found = described(case, bench, results, given, took)
            put(options, case, found)
            if options.out is not None:
                kept[f"{case.group}/{case.name}"] = found
                options.out.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
