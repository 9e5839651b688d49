"""Run a selection of tests many times on a machine that is kept busy, and say how often each test failed.

    python -m tools.under_load 'tests/faults/test_signals.py' --times 50 --busy 4

All cores are busy with processes that only count, at normal priority, and the disk with one that writes and waits until
it is written. Every run is a pytest of its own with its own seed, `FINRAY_TEST_SEED` and that of Hypothesis, unless
`--seed` repeats one. Nothing ends it early; at Ctrl-C the table has the runs until then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

# Both end by themselves where whoever started them is gone.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1_000_000))
"""
_WRITE = """
import os, sys
parent, block = os.getppid(), os.urandom(1 << 22)
with open(sys.argv[1], "wb", buffering=0) as stream:
    while os.getppid() == parent:
        stream.seek(0)
        for _ in range(16):
            stream.write(block)
        os.fsync(stream.fileno())
"""
# What pytest ends with where tests have run: all passed, and some failed.
_RAN = (0, 1)


@dataclass
class Results:
    """What became of tests.

    Attributes:
        outcomes: how often a test passed, failed or was skipped, by its name.
        seeds: those at which a test failed, by its name.
        first: test, seed and text of the first failure.
        seconds: of each run.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    first: tuple[str, int, str] | None = None
    seconds: list[float] = field(default_factory=list)

    def add(self, name: str, outcome: str, seed: int, text: str = "") -> None:
        """Count one outcome."""
        self.outcomes.setdefault(name, Counter())[outcome] += 1
        if outcome == "failed":
            self.seeds.setdefault(name, []).append(seed)
            self.first = self.first or (name, seed, text)

    def add_report(self, report: Path, seed: int) -> None:
        """Count what pytest has written of one run."""
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            failures = [*case.findall("failure"), *case.findall("error")]
            outcome = "failed" if failures else "skipped" if case.find("skipped") is not None else "passed"
            self.add(name, outcome, seed, "\n".join(one.text or "" for one in failures))

    def table(self) -> str:
        """One line for each test, and the first failure's text."""
        lines = [f"{'passed':>6} {'failed':>6} {'skipped':>7}  test"]
        for name, counts in self.outcomes.items():
            seeds = f"  (seeds {', '.join(map(str, self.seeds[name]))})" if name in self.seeds else ""
            lines.append(f"{counts['passed']:6} {counts['failed']:6} {counts['skipped']:7}  {name}{seeds}")
        if self.seconds:
            low, mean, high = min(self.seconds), sum(self.seconds) / len(self.seconds), max(self.seconds)
            lines.append(f"{len(self.seconds)} runs of {low:.0f} to {high:.0f} s, {mean:.0f} s on average")
        if self.first:
            name, seed, text = self.first
            lines += ["", f"the first failure: {name}, seed {seed}", text]
        return "\n".join(lines)


@contextmanager
def load(*, busy: int, disk: bool) -> Iterator[None]:
    """Keep so many cores busy within the block, and the disk."""
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(busy)]
    with tempfile.TemporaryDirectory(prefix="under-load-") as folder:
        if disk:
            processes.append(subprocess.Popen([sys.executable, "-c", _WRITE, f"{folder}/written"]))
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


def run_once(words: list[str], seed: int, limit_s: float, results: Results) -> None:
    """One pytest; what it writes where it could not run its tests counts as a failure of all of it."""
    with tempfile.TemporaryDirectory(prefix="under-load-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-n", "0", f"--hypothesis-seed={seed}", f"--junitxml={report}"]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, *words],
            env={**os.environ, "FINRAY_TEST_SEED": str(seed)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        finally:
            process.kill()
        results.seconds.append(time.monotonic() - began)
        if process.returncode in _RAN and report.exists():
            results.add_report(report, seed)
        else:
            results.add("(all of pytest)", "failed", seed, f"pytest ended with {process.returncode}\n{said[-8000:]}")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, and print the table; 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="under_load", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("selection", nargs="+", help="files, tests and options of pytest; options after --")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="processes that count; default: one per core")
    parser.add_argument("--no-disk", dest="disk", action="store_false", help="leave the disk alone")
    parser.add_argument("--seed", type=int, help="the same seed for every run; default: 1, 2, 3 ...")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds that one run may take")
    given = parser.parse_args(arguments)
    results = Results()
    with load(busy=given.busy, disk=given.disk):
        try:
            for number in range(1, given.times + 1):
                run_once(given.selection, number if given.seed is None else given.seed, given.limit, results)
                failures = sum(map(len, results.seeds.values()))
                print(f"{number} of {given.times}: {results.seconds[-1]:.0f} s, {failures} failures so far", flush=True)
        except KeyboardInterrupt:
            print("interrupted")
    print(results.table())
    return 1 if results.seeds or not results.outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
