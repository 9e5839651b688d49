"""Benchmark cases: definition, running the contenders in turn, and showing the results."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from report import say, spread, table
from rows import Row, count_tokens, grouped_sample, make_rows, read_rows

POOL = 1000
MAX_POOL = 5000
Result = dict[str, Any]
# The files that `--data` may hold.
FILES = ("gsm8k_train.jsonl", "alpaca_en.json")


class BenchmarkError(Exception):
    """A run failed, or did not do the same work as the others. No result is written."""


@dataclass(frozen=True)
class Bench:
    """The settings of all runs."""

    model: Path  # directory
    folder: Path  # for files that are not kept
    peer_python: str  # interpreter that has TRL and Accelerate
    threads: int = 2  # cores, processes and threads that every contender has
    pairs: int = 5  # runs per contender
    steps: int = 10  # timed batches of four rows in a run
    warmup: int = 2  # first steps of a run, not timed
    seed: int = 17  # for rows, samples, orders and runs
    max_length: int = 1024  # maximum tokens in a row and in a pack
    data: Path | None = None  # directory with `FILES`; without it, rows are generated with Alpaca's lengths
    most_rows: int | None = None  # for the preparation; by default sixteen times the available rows
    first_rows: int = 100_000  # for the run up to the first step
    against: Path | None = None  # another checkout
    quick: bool = False  # only try the scripts, on little data

    @cached_property
    def pool(self) -> list[Row]:
        """All available rows, as messages, in a random order."""
        made = 512 if self.quick else 8 * POOL
        rows = make_rows(made, seed=self.seed) if self.data is None else []
        rows += [row for name in FILES if self.data is not None for row in read_rows(self.data / name)]
        return random.Random(self.seed).sample(rows, len(rows))

    @cached_property
    def batches(self) -> list[list[Row]]:
        """A sample for training: batches of four rows of similar length; together they cover all lengths."""
        pool = self.pool[: MAX_POOL if self.data else POOL]
        lengths = count_tokens(pool, self.model, max_length=self.max_length)
        return grouped_sample(pool, lengths, batches=self.steps, batch_size=4)

    @property
    def rows(self) -> list[Row]:
        """The sample's rows."""
        return [row for batch in self.batches for row in batch]

    def empty_folder(self) -> Path:
        """An empty directory for a run's files, for a cold start; the previous run's directory is deleted."""
        folder = self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


Run = Callable[[Bench, int], Result]
# The runs of each contender in a block.
Runs = dict[str, list[Result]]
Blocks = dict[str, Runs]
Value = Callable[[Blocks], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A column: a key of a run's result (the value may be missing, or a word), and the digits of value and ratios."""

    name: str
    key: str
    digits: int = 1
    ratio_digits: int | None = 2
    scale: float = 1.0

    def read(self, run: Result) -> Any:
        """A number, a word, or None."""
        value = run.get(self.key)
        return value * self.scale if isinstance(value, int | float) else value


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of the first table, with its lower or upper limit if there is an aim."""

    name: str
    read: Value
    least: float | None = None
    most: float | None = None
    form: str = "{:.2f}×"

    def figure(self, blocks: Blocks) -> list[str] | None:
        """The line in the first table: name, aim, result, and verdict."""
        value = self.read(blocks)
        bound = self.most if self.least is None else self.least
        if value is None or bound is None:
            return None if value is None else [self.name, "", self.form.format(value), ""]
        met, sign = (value <= bound, "≤") if self.least is None else (value >= bound, "≥")
        aim = f"{sign} {self.form.format(bound)}"
        return [self.name, aim, self.form.format(value), "met" if met else "missed"]


@dataclass(frozen=True)
class Case:
    """Contenders that are run in turn, each in its own processes, and the measures that are read from their runs."""

    group: str  # on the command line; `run.GROUPS` has its section of RESULTS.md
    name: str  # for `--case`
    title: str
    what: str  # what is measured, and on what
    blocks: Callable[[Bench], Mapping[str, Mapping[str, Run]]]  # contenders, by block of the table
    measures: Sequence[Measure]  # columns
    ratios: Callable[[Runs], Sequence[tuple[str, str]]] = lambda runs: ()  # contenders to divide, within a block
    aims: Sequence[Aim] = ()
    # Called after every pair; raises an error unless the runs of a block did equal work.
    check: Callable[[str, Runs], None] = lambda block, runs: None
    most_pairs: int = 1000  # maximum runs per contender
    setup: Callable[[Bench], str] | None = None  # model, threads and rows in words, if not the usual ones

    def pairs(self, bench: Bench) -> int:
        """Runs of each contender."""
        return min(bench.pairs, self.most_pairs)

    def measure(self, bench: Bench) -> Blocks:
        """Run the contenders in turn, so that changes on the machine affect all of them."""
        found: Blocks = {}
        for block, contenders in self.blocks(bench).items():
            runs: Runs = {name: [] for name in contenders}
            for pair in range(self.pairs(bench)):
                for name, run in contenders.items():
                    runs[name].append(run(bench, pair))
                    shown = ", ".join(self._brief(runs[name][-1], measure) for measure in self.measures)
                    say(f"{self.name} {pair + 1}/{self.pairs(bench)} {block} {name}: {shown}")
                self.check(block, runs)
            found[block] = runs
        return found

    @staticmethod
    def _brief(result: Result, measure: Measure) -> str:
        value = measure.read(result)
        return f"{measure.name} {f'{value:,.{measure.digits}f}' if isinstance(value, int | float) else value or '–'}"

    def figures(self, blocks: Blocks) -> list[list[str]]:
        """Lines of the first table."""
        found = [aim.figure(blocks) for aim in self.aims]
        return [figure for figure in found if figure is not None]

    def show(self, blocks: Blocks) -> str:
        """A table per block, the aims, and remarks."""
        parts = [self.what]
        for block, runs in blocks.items():
            lines = [[name, *(self._cell(results, one) for one in self.measures)] for name, results in runs.items()]
            lines += [
                [f"{above} ÷ {below}", *(self._ratio(runs[above], runs[below], one) for one in self.measures)]
                for above, below in self.ratios(runs)
            ]
            parts += [*([f"**{block}**"] if block else []), table(["", *(one.name for one in self.measures)], lines)]
        figures = self.figures(blocks)
        said = [f"{name}: {result}" + (f" (aim {aim}: {met})" if aim else "") for name, aim, result, met in figures]
        parts += [f"{'; '.join(said)}."] if said else []
        return "\n\n".join(parts)

    @staticmethod
    def _cell(results: Sequence[Result], measure: Measure) -> str:
        found = [value for result in results if (value := measure.read(result)) is not None]
        if not found:
            return next((str(result["error"]) for result in results if "error" in result), "–")
        return found[0] if isinstance(found[0], str) else spread(found, measure.digits)

    @staticmethod
    def _ratio(above: Sequence[Result], below: Sequence[Result], measure: Measure) -> str:
        pairs = [(measure.read(over), measure.read(under)) for over, under in zip(above, below, strict=True)]
        known = [(over, under) for over, under in pairs if over is not None and under]
        if measure.ratio_digits is None or not known:
            return "–"
        return spread([over / under for over, under in known], measure.ratio_digits, "×")


def alone(contenders: Mapping[str, Run]) -> Callable[[Bench], dict[str, Mapping[str, Run]]]:
    """The name of the only block of a case."""
    return lambda bench: {"": contenders}


def over_others(runs: Runs) -> list[tuple[str, str]]:
    """The first contender divided by each of the others."""
    first, *others = runs
    return [(first, other) for other in others]


def middle(contender: str, key: str) -> Value:
    """The median over a contender's runs in the last block."""
    return lambda blocks: median(run[key] for run in list(blocks.values())[-1][contender])


def quotient(above: str, below: str, key: str, factor: float = 1.0) -> Value:
    """The median ratio of two contenders in the last block, over pairs of consecutive runs."""

    def value(blocks: Blocks) -> float | None:
        runs = list(blocks.values())[-1]
        pairs = list(zip(runs.get(above, []), runs.get(below, []), strict=False))
        known = [(over[key], under[key]) for over, under in pairs if over.get(key) and under.get(key)]
        return factor * median(over / under for over, under in known) if known else None

    return value


def least_quotient(key: str) -> Value:
    """The smallest ratio of the first contender to another one."""

    def value(blocks: Blocks) -> float | None:
        pairs = over_others(list(blocks.values())[-1])
        return min(filter(None, (quotient(*pair, key)(blocks) for pair in pairs)), default=None)

    return value
