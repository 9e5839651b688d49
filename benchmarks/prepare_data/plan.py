"""What all parts have in common: the rows, how often and for how long things run, and the environment they run in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.processes import environment
from harness.rows import Row

PEERS = Path(__file__).resolve().parent.parent / "peers"


@dataclass(frozen=True)
class Plan:
    """What is run, and how often.

    Attributes:
        model: directory of the model.
        peer_python: interpreter that has TRL.
        threads: cores, processes and threads that every contender has.
        max_length: most tokens in a row and in a pack.
        pairs: runs of every contender with up to `LARGE` rows.
        large_pairs: runs of every contender with more.
        limit_s: a contender whose run would take longer is left out.
        seed: of the order of rows, of draws and of runs.
        base: the rows that are repeated.
        sizes: numbers of rows, from small to large.
        documents: numbers of documents for the packer.
        start_rows: rows of the run to the first optimizer step.
        folder: for files that are not kept.
    """

    model: Path
    peer_python: str
    threads: int
    max_length: int
    pairs: int
    large_pairs: int
    limit_s: float
    seed: int
    base: Sequence[Row]
    sizes: Sequence[int]
    documents: Sequence[int]
    start_rows: int
    folder: Path

    @property
    def common(self) -> list[str]:
        """Options that every peer script has."""
        return ["--model", str(self.model), "--max-length", str(self.max_length)]

    def runs_at(self, rows: int) -> int:
        """Runs of every contender with so many rows."""
        return self.pairs if rows <= LARGE else self.large_pairs


LARGE = 200_000


@contextmanager
def rows_file(plan: Plan, count: int) -> Iterator[Path]:
    """A file of so many rows, the base over and over; it is read once, so that it lies in the page cache."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in plan.base]
    path = plan.folder / f"rows_{count}.jsonl"
    whole, rest = divmod(count, len(lines))
    block = "".join(lines)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(whole):
            stream.write(block)
        stream.write("".join(lines[:rest]))
    with path.open("rb") as stream:
        while stream.read(2**24):
            pass
    try:
        yield path
    finally:
        path.unlink()


@contextmanager
def empty_folder(plan: Plan) -> Iterator[Path]:
    """A directory for one run's files: what makes every run a cold one."""
    folder = plan.folder / "run"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_environment(plan: Plan, folder: Path, *, allocator: str | None = None) -> dict[str, str]:
    """The environment of one run: threads, and caches of its own."""
    cache = str(folder / "datasets_cache")
    env = environment(threads=plan.threads, allocator=allocator)
    return {**env, "RAYON_NUM_THREADS": str(plan.threads), "HF_DATASETS_CACHE": cache}
