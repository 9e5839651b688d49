"""In-memory checkpoints between those on storage: every rank's part is stored on its own machine and on another.

The format is that of any checkpoint, so any number of ranks can resume from one. It is complete when the parts of all
ranks for one step are there and intact; training needs no coordination. The storage that outlives the workers is passed
in: see ``runtime/memory_actors.py``.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from finray.checkpoint import Checkpoint
from finray.checkpoint.remote import RECORDS
from finray.errors import CheckpointError
from finray.files import FileKind, first_line, hold, remove_abandoned, replace_bytes, temporary
from finray.parallel.base import Strategy, on_all_ranks
from finray.sharding import bytes_of
from finray.training.checkpointing import Snapshot, ranks_here

_SCRATCH = "finray-memory-"
_FILES = FileKind(CheckpointError)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One rank's part of a checkpoint: its files, by path, with their SHA-256.

    Attributes:
        attempt: attempt of the group of ranks; parts of different attempts do not belong together.
        size: bytes of the files, excluding the run's records.
    """

    attempt: str
    step: int
    rank: int
    world_size: int
    digests: Mapping[str, str]
    size: int


class Memory(Protocol):
    """Stores the parts of the newest two steps while workers come and go."""

    def put(self, part: MemoryPart, files: Mapping[str, bytes]) -> None:
        """Store a part on this machine and on another; raises if either fails."""

    def parts(self) -> Sequence[MemoryPart]:
        """Parts stored on any machine."""

    def get(self, part: MemoryPart) -> Mapping[str, bytes] | None:
        """The files of a part; None if no actor has it any more."""


def _scratch_root(size: int) -> Path:
    """A directory in memory, if the system has one with that much room (a container's has 64 MB), else on disk."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 * size else Path(tempfile.gettempdir())


def _prefix(run_dir: Path) -> str:
    """Name prefix of the temporary directories of a run."""
    return f"{_SCRATCH}{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}-"


def remove_left() -> None:
    """Remove directories that killed workers of any run left on this machine: they use memory."""
    for root in {_scratch_root(0), Path(tempfile.gettempdir())}:
        remove_abandoned(root, _SCRATCH)


def _clean(run_dir: Path) -> None:
    """Remove those of this run, whose workers have all ended."""
    for root in {_scratch_root(0), Path(tempfile.gettempdir())}:
        for rest in root.glob(f"{_prefix(run_dir)}*"):
            shutil.rmtree(rest, ignore_errors=True)


@dataclass
class MemoryWriter:
    """Stores one rank's part of a checkpoint in the background.

    Attributes:
        memory: where parts are stored.
        run_dir: the run directory.
        every: maximum number of steps that may be lost. A part is in transit until the next one begins, so two are
            stored in that interval; with an interval of one step, each is waited for.
        records: store the run's records with the part of rank 0, because the next start may lack them.
        warn: called when storing begins to fail; training continues, and the checkpoints on storage remain.
        buffers: buffers into which tensors are copied.
    """

    memory: Memory
    strategy: Strategy
    run_dir: Path
    every: int
    warn: Callable[[str], None]
    attempt: str
    records: bool = False
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finray-memory")
        self._pending: Future[None] | None = None
        self._has_failed = False

    @property
    def interval(self) -> int:
        """Steps between two parts."""
        return max(1, self.every // 2)

    def ready(self, *, is_whole: bool = True) -> bool:
        """Wait until the previous parts of all ranks are stored. A collective. A newer part replaces old ones.

        Args:
            is_whole: whether nothing of the run up to this step would be lost with this rank.

        Returns whether that is so on all ranks.
        """
        self.wait()
        return all(self.strategy.all_gather_object(is_whole))

    def wait(self) -> None:
        """Wait for the previous part, whose buffers are reused."""
        if self._pending is not None:
            try:
                self._pending.result()
                self._has_failed = False
            except Exception as error:
                # Ray has many errors for a lost process or machine.
                if not self._has_failed:
                    text = f"a checkpoint is not in memory as it should be: {first_line(error)}"
                    self.warn(f"{text}; if a machine is lost now, training continues from an older one")
                self._has_failed = True
            self._pending = None

    def begin(self, snapshot: Snapshot, step: int) -> None:
        """Store a snapshot that was taken into :attr:`buffers`."""
        self._pending = self._pool.submit(self._keep, snapshot, step)
        if self.every == 1:
            self.wait()

    def _keep(self, snapshot: Snapshot, step: int) -> None:
        tensors = [tensor for file in snapshot.weights.values() for tensor in file.values()]
        size = sum(map(bytes_of, [*tensors, *(piece.tensor for piece in snapshot.moments)]))
        prefix, root = _prefix(self.run_dir), _scratch_root(size)
        with temporary(prefix, root) as folder:
            snapshot.write(folder)
            files = {
                path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
            }
        size = sum(map(len, files.values()))
        if self.records and self.strategy.rank == 0:
            files[RECORDS] = (self.run_dir / RECORDS).read_bytes()
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        part = MemoryPart(self.attempt, step, self.strategy.rank, self.strategy.world_size, digests, size)
        self.memory.put(part, files)

    def close(self) -> None:
        """Stop the thread."""
        self.wait()
        self._pool.shutdown()


def whole(parts: Iterable[MemoryPart], *, after: int) -> list[list[MemoryPart]]:
    """The parts, by rank, of each step after a given one for which all ranks of one attempt have one; newest first."""
    by_step: dict[tuple[int, str], dict[int, MemoryPart]] = {}
    for part in parts:
        if part.step > after:
            by_step.setdefault((part.step, part.attempt), {})[part.rank] = part
    newest_first = [by_step[key] for key in sorted(by_step, reverse=True)]
    complete = [held for held in newest_first if len(held) == next(iter(held.values())).world_size]
    return [[held[rank] for rank in sorted(held)] for held in complete]


def fetch_newest(
    memory: Memory, strategy: Strategy, run_dir: Path, *, after: int, warn: Callable[[str], None]
) -> Checkpoint | None:
    """The newest complete checkpoint in memory that is intact, as a directory that the caller removes; None if none is
    newer than step ``after``. A collective; ranks on one machine share the work and the directory.
    """
    first = strategy.rank == 0
    _clean(run_dir)
    strategy.all_gather_object(None)
    candidates = on_all_ranks(strategy, lambda: whole(memory.parts(), after=after) if first else [])
    for wanted in strategy.broadcast_object(candidates):
        try:
            return _fetch(memory, strategy, run_dir, wanted)
        except CheckpointError as error:
            if first:
                warn(f"skipped a checkpoint in memory: {error}")
    return None


def _fetch(memory: Memory, strategy: Strategy, run_dir: Path, wanted: Sequence[MemoryPart]) -> Checkpoint:
    """Write the parts of a checkpoint into a directory. A collective.
    Raises CheckpointError: on every rank; a part is gone, or damaged."""
    first = strategy.rank == 0
    step, name = wanted[0].step, strategy.broadcast_object(f"{_prefix(run_dir)}{uuid.uuid4().hex[:8]}")
    # All ranks on one machine decide alike, because none has written yet.
    folder = _scratch_root(sum(part.size for part in wanted)) / name
    strategy.all_gather_object(None)
    on_all_ranks(strategy, lambda: folder.mkdir(mode=0o700, exist_ok=True))
    # As long as this process lives.
    hold(folder)
    here = ranks_here(strategy, folder)

    def fetch() -> None:
        try:
            write()
        except OSError as error:
            # There may be another one, on storage.
            raise CheckpointError(
                f"cannot be written to {folder}: {error.strerror or error}", where=f"step {step} in memory"
            ) from None

    def write() -> None:
        for part in wanted[here.index(strategy.rank) :: len(here)]:
            files = memory.get(part)
            if files is None:
                raise CheckpointError(f"the part of rank {part.rank} is gone", where=f"step {step} in memory")
            for file, digest in part.digests.items():
                path, content = _FILES.inside(folder, file, where=folder), files.get(file, b"")
                if hashlib.sha256(content).hexdigest() != digest:
                    raise CheckpointError("has changed since it was written", where=f"{file} of step {step} in memory")
                if file != RECORDS:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
            # Records since the last checkpoint on storage may have been lost with a machine.
            if first and RECORDS in part.digests:
                path, content = run_dir / RECORDS, files[RECORDS]
                written = path.read_bytes() if path.is_file() else b""
                if content.startswith(written) and content != written:
                    replace_bytes(path, content)

    try:
        on_all_ranks(strategy, fetch)
    except CheckpointError:
        shutil.rmtree(folder, ignore_errors=True)
        # The next one may need its room, and all ranks are to see the same.
        strategy.all_gather_object(None)
        raise
    return Checkpoint(folder, step, tuple(file for part in wanted for file in part.digests if file != RECORDS))
