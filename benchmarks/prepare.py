"""Preparing data on a CPU: finray beside `datasets` and TRL, and the Rust tokenizer that all of them call.

Three parts, each of processes of their own, one at a time:

* `speed`. From one file of rows (a prompt and a completion, as messages) to tokens on disk, for growing numbers of
  rows, every contender in turn: finray on Ray; `Dataset.map`, batched; the same with TRL's packing; everything that
  TRL's trainer does to such rows; and the tokenizer alone over texts in memory, the ceiling. All use the same tokenizer
  and chat template, `--threads` cores, and cut at `--max-length`; their token counts are printed. Seconds are those
  from the file to the finished data: imports and the parent's loading of the tokenizer are left out for all, and so is
  Ray's start, which a line of its own adds; finray's workers, which start within its seconds, import and load theirs.
  finray's seconds include masks, checksums and the plan of the packs; `Dataset.map` does none of these. Caches
  are new for every run. finray also does it a second time, when it is prepared: the seconds to the first batch.
  Where a run would take longer than `--limit`, a contender is left out.
* `packer`. finray's packer over up to a million documents on one core.
* `start`. `finray train` and TRL from the command to the first optimizer step.

Peak memory is read from `/proc` every 0.2 s (`harness/tree.py`) and summed over the process and all it started, Ray's
own processes included: resident memory as it is, and with shared pages counted once.

Not measured: several machines, remote storage, other formats, accelerators. The machine should be idle; each part says
how loaded it was when the part began.

The result is printed and replaces its part in RESULTS.md; with `--quick` (a trial of the script, whose numbers mean
nothing) it is printed only.

    python benchmarks/prepare.py [--data DIR] [--rows 1000000] [--peer-python OTHER_VENV/bin/python]
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from harness.processes import run_command
from harness.report import machine, replace_parts, say
from harness.rows import Row, count_tokens, make_rows, read_rows
from prepare_data.first_step import measure_first_step, show_first_step
from prepare_data.packer import measure_packer, show_packer
from prepare_data.plan import Plan
from prepare_data.speed import measure_speed, show_speed

HERE = Path(__file__).resolve().parent
TITLE = "Preparing data"
MADE_ROWS = 8000
QUICK_ROWS = 512
GROWTH = 4
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "trl")
FILES = ("gsm8k_train.jsonl", "alpaca_en.json")


def _speed(plan: Plan) -> str:
    text = (
        "Medians, with the smallest and the largest in parentheses; ratios are of medians. More tokens/s and fill are "
        "better, of the rest less is. Memory is summed over all processes of a contender, Ray's own included."
    )
    return f"{text}\n\n{show_speed(measure_speed(plan))}"


def _packer(plan: Plan) -> str:
    return show_packer(measure_packer(plan), plan.max_length)


def _start(plan: Plan) -> str:
    return show_first_step(measure_first_step(plan), plan)


PARTS: dict[str, tuple[str, Callable[[Plan], str]]] = {
    "speed": ("Speed, memory and fill", _speed),
    "packer": ("Planning packs", _packer),
    "start": ("From nothing to the first optimizer step", _start),
}


def read_base(options: argparse.Namespace) -> tuple[list[Row], str]:
    """The rows that are repeated, as prompt and completion, in a random order; and where they come from."""
    if options.data is None:
        rows = make_rows(MADE_ROWS, seed=options.seed)
        source = "rows made by the script with Alpaca's lengths"
    else:
        rows = [row for name in FILES for row in read_rows(options.data / name)]
        source = " and ".join(f"`{name}`" for name in FILES)
    mixed = random.Random(options.seed).sample(rows, len(rows))
    chosen = mixed[:QUICK_ROWS] if options.quick else mixed
    pairs = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chosen]
    lengths = count_tokens(chosen, options.model)
    shape = f"{len(chosen):,} rows of {min(lengths)} to {max(lengths)} tokens, {mean(lengths):.0f} on average"
    return pairs, f"{source}: {shape} without the template; repeated, in one random order, for more"


def growing(first: int, last: int) -> list[int]:
    """Numbers of rows, each four times the one before it, and the last."""
    sizes = [min(first, last)]
    while sizes[-1] * GROWTH <= last:
        sizes.append(sizes[-1] * GROWTH)
    return [*(size for size in sizes if size < last), last]


def _peer_versions(peer_python: str) -> dict[str, str]:
    """Versions that the peers' interpreter has.

    Raises:
        BenchmarkError: it has no TRL.
    """
    code = f"from importlib.metadata import version\nfor name in {PACKAGES!r}: print(name, version(name))"
    lines = run_command([peer_python, "-c", code], env=os.environ).splitlines()
    return dict(line.split() for line in lines)


def _versions(peer_python: str) -> str:
    peer = _peer_versions(peer_python)
    ours = {name: version(name) for name in ("finray", "ray", *PACKAGES[:-1])} | {"trl": peer["trl"]}
    differing = [f"{name} {peer[name]}" for name in PACKAGES if peer[name] != ours[name]]
    note = f"; the peers ran with {', '.join(differing)}" if differing else ""
    return ", ".join(f"{name} {value}" for name, value in sorted(ours.items())) + note


def _setup(options: argparse.Namespace, source: str, load: float, versions: str) -> str:
    return "\n".join(
        [
            f"- {options.date}; {machine()}; load before it {load:.2f}",
            f"- tokenizer and template of `{options.model.name}`; cores, processes and threads: "
            f"{options.threads}; at most {options.max_length} tokens in a row and in a pack",
            f"- {source}",
            f"- {versions}",
            f"\n```\n{shlex.join(['python', 'benchmarks/prepare.py', *options.given])}\n```",
        ]
    )


def make_plan(options: argparse.Namespace, base: Sequence[Row], folder: Path) -> Plan:
    """How much is run."""
    largest = options.rows or len(base) * (GROWTH if options.quick else GROWTH**2)
    return Plan(
        model=options.model.absolute(),
        peer_python=options.peer_python,
        threads=options.threads,
        max_length=options.max_length,
        pairs=options.pairs,
        large_pairs=min(options.pairs, options.large_pairs),
        limit_s=options.limit,
        seed=options.seed,
        base=base,
        sizes=growing(len(base), largest),
        documents=(10_000, 100_000) if options.quick else (10_000, 100_000, 1_000_000),
        start_rows=options.start_rows,
        folder=folder,
    )


def _parts(value: str) -> list[str]:
    names = value.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no part; there are {', '.join(PARTS)}")
    return names


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Preparing data with finray, datasets and TRL; writes RESULTS.md.")
    parser.add_argument("--model", type=Path, default=HERE.parent / ".models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, help=f"directory with {' and '.join(FILES)}; default: rows made here")
    parser.add_argument("--rows", type=int, help="most rows (default: sixteen times those there are)")
    parser.add_argument("--start-rows", type=int, help="rows of the part `start` (default 100,000)")
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--pairs", type=int, help="runs of each contender (default 3)")
    parser.add_argument("--large-pairs", type=int, default=1, help="runs of each above 200,000 rows")
    parser.add_argument("--limit", type=float, default=300.0, help="longest run, in seconds; see above")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has TRL")
    parser.add_argument("--work", type=Path, help="directory for large files that are not kept")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date of the measurement")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="few rows, one run each, to try the script; only printed")
    options = parser.parse_args(argv)
    # Where the data and the large files lie says nothing to a reader.
    options.given = _shown(argv)
    options.pairs = options.pairs or (1 if options.quick else 3)
    options.start_rows = options.start_rows or (QUICK_ROWS if options.quick else 100_000)
    if not 1 <= options.threads <= (os.cpu_count() or 1):
        parser.error("--threads must be between 1 and the number of cores")
    if min(options.pairs, options.large_pairs, options.start_rows, options.rows or 1) < 1:
        parser.error("--pairs, --large-pairs, --rows and --start-rows must be at least 1")
    return options


def _shown(argv: list[str]) -> list[str]:
    """The options as they are printed: directories and interpreters by what they are."""
    names = {"--data": "DIR", "--work": "DIR", "--peer-python": "OTHER_VENV/bin/python", "--results": "FILE"}
    shown: list[str] = []
    for value in argv:
        option, equals, _ = value.partition("=")
        if equals and option in names:
            shown.append(f"{option}={names[option]}")
        else:
            shown.append(names.get(shown[-1], value) if shown else value)
    return shown


def main(argv: list[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    # What is started inherits this, so that all contenders have the same cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    versions = _versions(options.peer_python)
    base, source = read_base(options)
    with tempfile.TemporaryDirectory(prefix="finray_bench_", dir=options.work) as name:
        plan = make_plan(options, base, Path(name))
        for part in options.only:
            title, make = PARTS[part]
            load = os.getloadavg()[0]
            say(f"{title}, load {load:.2f}")
            section = f"{_setup(options, source, load, versions)}\n\n{make(plan)}"
            print(f"### {title}\n\n{section}\n", flush=True)
            if not options.quick:
                replace_parts(options.results, TITLE, {title: section})
                say(f"wrote {options.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
