"""Checkpoints of a group of ranks: snapshots of the running model, written synchronously or in the background;
restoring.

Each full tensor is written by one rank, so that ranks write in parallel even if all hold the same weights; sharded
moments are written by every rank for its own rows. Sharded weights are gathered one at a time, because what is saved
must be an ordinary model or adapter. In the background, a thread of each rank writes the snapshot, which becomes a
checkpoint at the step at which every rank has reported that it is done (a number in the all-reduce of the loss).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from finray.checkpoint import Checkpoint, CheckpointStore
from finray.checkpoint.copies import pull
from finray.checkpoint.manifest import Content, FileEntry
from finray.checkpoint.objects import Objects
from finray.checkpoint.pieces import PieceReader, TensorPiece, file_name, write_pieces
from finray.checkpoint.remote import FOLLOWING, RemoteStore
from finray.checkpoint.store import Fence
from finray.config.schema import CheckpointConfig
from finray.errors import CheckpointError, FinrayError, ModelError
from finray.parallel.base import NamedOptimizer, Strategy, on_all_ranks
from finray.sharding import (
    FlatShard,
    bytes_of,
    full_tensor,
    is_first_replica,
    is_sharded,
    local_rows,
)
from finray.training.state import COUNTERS, FOLDER, TrainState
from finray.training.task import CheckpointLayout

MOMENTS = "optimizer"
# Read only by the library that wrote these files.
LIBRARY = "deepspeed"


@dataclass
class Snapshot:
    """One rank's part of a checkpoint.

    Attributes:
        weights: file name to tensors that this rank writes.
        moments: rows of the optimizer's state that this rank writes.
        moments_file: their file name.
        texts: path to content, on rank 0.
        others: writes all other files, on rank 0.
        library: a directory written by the strategy's library, moved into the checkpoint.
    """

    weights: dict[str, dict[str, torch.Tensor]]
    moments: list[TensorPiece]
    moments_file: str
    texts: dict[str, str] = field(default_factory=dict)
    others: Callable[[Path], None] = lambda folder: None
    library: Path | None = None

    def write(self, folder: Path) -> None:
        """Write this rank's files into an unfinished checkpoint."""
        (folder / FOLDER).mkdir(exist_ok=True)
        for name, tensors in self.weights.items():
            save_file(tensors, folder / name, metadata={"format": "pt"})
        # If every update was skipped so far there may be no moments; one file says so.
        if self.moments or self.texts:
            write_pieces(folder / FOLDER / self.moments_file, self.moments)
        for path, content in self.texts.items():
            (folder / path).write_text(content, encoding="utf-8")
        self.others(folder)
        if self.library is not None:
            self.library.rename(folder / LIBRARY)


def take_snapshot(
    layout: CheckpointLayout,
    optimizer: NamedOptimizer,
    state: TrainState,
    strategy: Strategy,
    *,
    others: Callable[[Path], None],
    buffers: dict[str, torch.Tensor] | None = None,
) -> Snapshot:
    """Collect a checkpoint. A collective.

    Args:
        others: writes the other files of a checkpoint; kept on rank 0.
        buffers: buffers for copies, so that training can continue while they are written; None makes no copies.
    """
    rank, world_size, stem = strategy.rank, strategy.world_size, layout.stem

    def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if buffers is None:
            return tensor.detach().cpu().contiguous()
        if name not in buffers:
            buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffers[name].copy_(tensor.detach())

    weights = layout.tensors()
    owners = _owners(weights, world_size if stem == "model" else 1)
    writers = max(owners.values(), default=0) + 1
    files = [f"{stem}.safetensors"] if writers == 1 else []
    files = files or [file_name(stem, rank=writer, world_size=writers) for writer in range(writers)]
    weights_here: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        # A collective for shards, so every rank gathers every tensor; only the owner keeps it.
        full = full_tensor(tensor)
        if owners[name] == rank:
            weights_here[name] = held(name, full)
    moments = []
    pieces = optimizer.sharded_state()
    plain = {key: part for key, part in pieces.items() if isinstance(part, torch.Tensor) and not is_sharded(part)}
    moment_owners = _owners(plain, world_size)
    for key, part in pieces.items():
        if isinstance(part, FlatShard):
            if part.local.numel():
                moments.append(TensorPiece(key, held(key, part.local), part.start, part.shape, flat=True))
            continue
        local, start = local_rows(part)
        is_own = moment_owners.get(key, rank) == rank and is_first_replica(part)
        if is_own and (local.numel() or not start):
            moments.append(TensorPiece(key, held(key, local), start, tuple(part.shape)))
    snapshot = Snapshot(
        {files[rank]: layout.in_file(weights_here)} if rank < writers else {},
        moments,
        file_name(MOMENTS, rank=rank, world_size=world_size),
    )
    if rank:
        return snapshot
    snapshot.texts[COUNTERS] = state.text()
    if writers > 1:
        # The index that Transformers reads if there are several weight files.
        size = sum(bytes_of(tensor) for tensor in weights.values())
        where = {name: files[owner] for name, owner in sorted(owners.items())}
        index = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n"
        snapshot.texts[f"{stem}.safetensors.index.json"] = index

    def rest(folder: Path) -> None:
        layout.save_settings(folder)
        others(folder)

    snapshot.others = rest
    return snapshot


def _owners(tensors: Mapping[str, torch.Tensor], ranks: int) -> dict[str, int]:
    """The rank that writes each tensor: the one with the least to write so far. The same result on every rank."""
    load = [0] * ranks
    owners = {}
    for name, tensor in tensors.items():
        owners[name] = load.index(min(load))
        load[owners[name]] += bytes_of(tensor)
    return owners


# --- the store of a group -------------------------------------------------------------------------------------------


def open_store(run_dir: Path, url: str | None, strategy: Strategy) -> CheckpointStore:
    """Take over the checkpoints of a run for this group of ranks. A collective.

    Args:
        run_dir: the run directory; for a run behind a URL the local copy, one for each machine without a shared disk.
        url: of the run.

    Raises:
        FinrayError: on every rank alike; the storage cannot be used.
    """
    first = strategy.rank == 0
    if url is None:
        fence = Fence(run_dir)
        on_all_ranks(strategy, fence.take if first else lambda: None)
        return CheckpointStore(run_dir, fence=fence.check)
    attempt = strategy.broadcast_object(uuid.uuid4().hex)
    here = ranks_here(strategy, run_dir)
    objects = on_all_ranks(strategy, lambda: Objects(url, patient=True))
    share = here.index(strategy.rank), len(here)
    store = RemoteStore(run_dir, objects, attempt=attempt, first=first, share=share)

    def take() -> None:
        store.take()
        pull(run_dir, objects, FOLLOWING)
        store.clear_url()

    on_all_ranks(strategy, take if first else lambda: None)
    # Of the ranks here it is the first that writes again.
    on_all_ranks(strategy, store.clear if share[0] == 0 else lambda: None)
    return store


def ranks_here(strategy: Strategy, folder: Path) -> list[int]:
    """The ranks that see the same directory of this name, which is created if needed. A collective.

    Host names say little about disks: ranks that see each other's files share one.
    """
    name = strategy.broadcast_object(f".tmp-rank-{uuid.uuid4().hex[:8]}")
    mark = folder / f"{name}-{strategy.rank}"
    on_all_ranks(strategy, lambda: mark.mkdir(parents=True))
    ranks = range(strategy.world_size)
    here = [rank for rank in ranks if (folder / f"{name}-{rank}").exists()]
    strategy.all_gather_object(None)
    with suppress(OSError):
        mark.rmdir()
    return here


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that has been written, and the metrics in its manifest."""

    path: Path
    step: int
    metrics: dict[str, float]


class CheckpointWriter:
    """Writes checkpoints, one at a time; every method is a collective.

    Args:
        store: where checkpoints are written.
        strategy: of the group.
        config: the checkpoint section.
        best: the metric whose best checkpoint is kept, and ``min`` or ``max``.
        in_use: steps whose checkpoints are kept while they are listed here.
        before: called on rank 0 before a checkpoint is committed; it raises if that must not be.
    """

    def __init__(
        self,
        store: CheckpointStore,
        strategy: Strategy,
        config: CheckpointConfig,
        *,
        best: tuple[str, str],
        in_use: Collection[int] = (),
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._before = before
        self._strategy = strategy
        self._config = config
        self._best = best
        self._in_use = in_use
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finray-checkpoint")
        # The checkpoint that is being written, still under its temporary name.
        self._pending: tuple[Saved, Future[list[FileEntry]]] | None = None

    @property
    def is_done(self) -> bool:
        """Whether this rank has written its part of an unfinished checkpoint."""
        return self._pending is not None and self._pending[1].done()

    def begin(self, snapshot: Snapshot, *, step: int, metrics: dict[str, float]) -> None:
        """Start writing a snapshot; the previous one must be finished. Raises FinrayError: on every rank."""
        assert self._pending is None
        first = self._strategy.rank == 0
        scratch = on_all_ranks(self._strategy, lambda: str(self._store.begin(step)) if first else "")
        folder = Path(self._strategy.broadcast_object(scratch))
        on_all_ranks(self._strategy, lambda: self._store.open_part(folder))
        # A collective that reads what training changes, so it cannot run in the background.
        library = folder / f".library-{self._strategy.rank}"
        snapshot.library = library if self._strategy.save_library_checkpoint(library) else None
        written = self._pool.submit(self._store.fill, folder, step, snapshot.write)
        self._pending = Saved(folder, step, metrics), written

    def finish(self) -> Saved | None:
        """Wait for the pending snapshot, and commit it as a checkpoint; None if there is none.
        Raises FinrayError: on every rank; the previous checkpoint remains valid."""
        if self._pending is None:
            return None
        saved, written = self._pending
        self._pending = None
        first = self._strategy.rank == 0
        try:
            entries = on_all_ranks(self._strategy, written.result)
            everyone = [entry for own in self._strategy.all_gather_object(entries) for entry in own]
            # A failed commit must stop every rank: a rank that continued would wait for this one forever.
            on_all_ranks(self._strategy, lambda: self._commit(saved, everyone) if first else None)
        finally:
            if first:
                self._store.abandon(saved.path)
            self._store.close_part(saved.path)
        return replace(saved, path=self._store.path_of(saved.step))

    def _commit(self, saved: Saved, entries: list[FileEntry]) -> None:
        self._before()
        self._store.commit(saved.path, saved.step, entries, metrics=saved.metrics)
        self._prune()

    def _prune(self) -> None:
        best = self._best if self._config.keep_best else None
        self._store.prune(keep_last=self._config.keep_last, best=best, others=self._in_use)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation into its checkpoint, and apply retention again.
        Raises FinrayError: on every rank."""

        def add() -> None:
            self._store.add_metrics(step, metrics)
            self._prune()

        on_all_ranks(self._strategy, add if self._strategy.rank == 0 else lambda: None)

    def sync_records(self) -> None:
        """Sync records to where the checkpoints are, if possible: the next start reads them there."""
        with suppress(FinrayError):
            self._store.sync_records()

    def close(self) -> None:
        """Stop the thread; an unfinished checkpoint is not committed."""
        self._pool.shutdown(wait=False)


# --- finding and restoring ------------------------------------------------------------------------------------------


def find_latest(
    store: CheckpointStore, strategy: Strategy, warn: Callable[[str], None], *, steps: Sequence[int]
) -> Checkpoint | None:
    """The last of the given checkpoints whose files are all intact. A collective.

    Each rank hashes a share of the files, because hashing a terabyte takes one rank too long. Damaged checkpoints after
    it are renamed, so that retention does not count them and delete good ones. On rank 0 ``warn`` is called for each,
    naming the file. ``steps`` are those of rank 0. Raises CheckpointError: there are checkpoints and all are damaged;
    starting over is the user's decision.
    """

    share, among = store.verify_share or (strategy.rank, strategy.world_size)

    def verify(step: int) -> Content:
        content = on_all_ranks(strategy, lambda: store.content(step))
        on_all_ranks(strategy, lambda: store.require(step, content["files"][share::among]))
        return content

    first = strategy.rank == 0
    steps = strategy.broadcast_object(list(steps))
    store.set_places(strategy.broadcast_object(on_all_ranks(strategy, lambda: store.places() if first else {})))

    def set_aside(step: int) -> None:
        on_all_ranks(strategy, lambda: store.set_aside(step) if first else None)

    return store.latest(warn if first else lambda message: None, steps=steps, verify=verify, set_aside=set_aside)


def restore(checkpoint: Checkpoint, layout: CheckpointLayout, optimizer: NamedOptimizer) -> TrainState:
    """Load a verified checkpoint into a model and optimizer with any strategy and any number of ranks.
    Raises CheckpointError: it belongs to another model, or lacks something."""
    state = TrainState.load(checkpoint.path)
    try:
        layout.load(checkpoint.path, checkpoint.files)
    except ModelError as error:
        raise CheckpointError(error.message, where=error.where, repair=error.repair) from None
    listed = [file.removeprefix(f"{FOLDER}/") for file in checkpoint.files if file.startswith(f"{FOLDER}/")]
    optimizer.load_sharded_state(PieceReader(checkpoint.path / FOLDER, MOMENTS, listed))
    return state
