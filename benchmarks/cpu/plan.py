"""What all measurements have in common: the rows, the numbers of steps and runs, and finray's half."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.planning.placement import ALLOCATOR
from harness.processes import environment, run_script
from harness.rows import Row, write_rows

PEERS = Path(__file__).resolve().parent.parent / "peers"
FINRAY = PEERS / "finray_sft.py"
TRL = PEERS / "trl_sft.py"
BATCH = 4

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is run, and how often.

    Attributes:
        model: directory of the model.
        peer_python: interpreter that has TRL and Accelerate.
        threads: of every run.
        pairs: times each system is run.
        warmup: first steps of a run, not timed.
        equal_steps: steps whose losses are compared.
        starts: times the start of `finray train` is measured.
        seed: of rows, samples, shuffles and runs.
        batches: the sample, in batches of rows of one length.
        folder: for files that are not kept.
        batch_size: rows of a batch.
        quick: whether the numbers mean nothing.
    """

    model: Path
    peer_python: str
    threads: int
    pairs: int
    warmup: int
    equal_steps: int
    starts: int
    seed: int
    batches: list[list[Row]]
    folder: Path
    batch_size: int = BATCH
    quick: bool = False

    @property
    def rows(self) -> list[Row]:
        """The sample."""
        return [row for batch in self.batches for row in batch]

    @property
    def common(self) -> list[str]:
        """Options that every run has."""
        return ["--model", str(self.model)]


def run_finray(plan: Plan, seed: int, *extra: str) -> Result:
    """finray on the sample, packed."""
    rows = write_rows(plan.folder / "rows.jsonl", plan.rows)
    options = [*plan.common, "--rows", str(rows), "--warmup-steps", str(plan.warmup), "--seed", str(seed), *extra]
    return run_script(sys.executable, FINRAY, options, env=environment(threads=plan.threads, allocator=ALLOCATOR))
