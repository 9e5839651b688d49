"""What a checkpoint holds, taken from the running model: each rank's share of weights and moments, as files to write.

A whole tensor belongs to one rank, so that ranks write in parallel even where all hold the same weights; of a sharded
moment every rank writes its own rows. Sharded weights are gathered one by one, because what is saved must be an
ordinary model or adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from finray.checkpoint.pieces import Piece, PieceReader, file_name, write_pieces
from finray.errors import CheckpointError
from finray.parallel.base import NamedOptimizer, Strategy
from finray.sharding import (
    FlatShard,
    bytes_of,
    full_tensor,
    is_first_replica,
    is_sharded,
    load_local,
    local_rows,
    shape_of,
)
from finray.training.state import COUNTERS, FOLDER, TrainState

MOMENTS = "optimizer"
# Only the library that wrote these files reads them.
LIBRARY = "deepspeed"
_INDEX = ".safetensors.index.json"


class SavedTask(Protocol):
    """What a snapshot asks of a task."""

    @property
    def weights_stem(self) -> str:
        """Name of the weights' file, without its suffix."""

    def weights(self) -> dict[str, torch.Tensor]:
        """What is saved of the model."""

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written of whole tensors of :meth:`weights`."""

    def place_of(self, name: str) -> tuple[str, Callable[[Any], Any] | None]:
        """Name in the file of a tensor of :meth:`weights`, and which part of what is there, if not all."""

    def save_settings(self, folder: Path) -> None:
        """Write what belongs beside the weights."""


@dataclass
class Snapshot:
    """One rank's part of a checkpoint.

    Attributes:
        weights: file name to tensors, of this rank.
        moments: rows of the optimizer's state, of this rank.
        moments_file: their file name.
        texts: path to content, on rank 0.
        others: writes the rest, on rank 0.
        library: a directory with what the strategy's library wrote of its own, moved into the checkpoint.
    """

    weights: dict[str, dict[str, torch.Tensor]]
    moments: list[Piece]
    moments_file: str
    texts: dict[str, str] = field(default_factory=dict)
    others: Callable[[Path], None] = lambda folder: None
    library: Path | None = None

    def write(self, folder: Path) -> None:
        """Write this rank's files into a checkpoint in the making."""
        (folder / FOLDER).mkdir(exist_ok=True)
        for name, tensors in self.weights.items():
            save_file(tensors, folder / name, metadata={"format": "pt"})
        # Where no update was good yet there may be none; one file says so.
        if self.moments or self.texts:
            write_pieces(folder / FOLDER / self.moments_file, self.moments)
        for path, content in self.texts.items():
            (folder / path).write_text(content, encoding="utf-8")
        self.others(folder)
        if self.library is not None:
            self.library.rename(folder / LIBRARY)


def take(
    task: SavedTask,
    optimizer: NamedOptimizer,
    state: TrainState,
    strategy: Strategy,
    *,
    others: Callable[[Path], None],
    buffers: dict[str, torch.Tensor] | None = None,
) -> Snapshot:
    """Collect a checkpoint; a collective.

    Args:
        task: whose weights are saved.
        optimizer: whose moments are saved.
        state: where the run stands.
        strategy: of the group.
        others: writes what else belongs in a checkpoint; kept on rank 0.
        buffers: where copies are kept, so that training may go on while they are written; None makes none.
    """
    rank, world_size = strategy.rank, strategy.world_size

    def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if buffers is None:
            return tensor.detach().cpu().contiguous()
        if name not in buffers:
            buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffers[name].copy_(tensor.detach())

    weights = task.weights()
    owners = _owners(weights, world_size if task.weights_stem == "model" else 1)
    writers = max(owners.values(), default=0) + 1
    own: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        # Collective where sharded, so every rank asks for every tensor; only the owner keeps it.
        full = full_tensor(tensor)
        if owners[name] == rank:
            own[name] = held(name, full)
    files = {} if rank >= writers else {_weights_file(task.weights_stem, rank, writers): task.in_file(own)}
    moments = [replace(piece, tensor=held(piece.name, piece.tensor)) for piece in _pieces(optimizer, strategy)]
    moments_file = file_name(MOMENTS, rank=rank, world_size=world_size)
    if rank:
        return Snapshot(files, moments, moments_file)
    texts = {COUNTERS: state.text()}
    if writers > 1:
        texts[f"{task.weights_stem}{_INDEX}"] = _index(weights, owners, task.weights_stem, writers)

    def rest(folder: Path) -> None:
        task.save_settings(folder)
        others(folder)

    return Snapshot(files, moments, moments_file, texts, rest)


def _pieces(optimizer: NamedOptimizer, strategy: Strategy) -> Iterator[Piece]:
    """What this rank writes of the optimizer's state."""
    state = optimizer.sharded_state()
    parts = {key: part for key, part in state.items() if isinstance(part, FlatShard)}
    for key, part in parts.items():
        if part.local.numel():
            yield Piece(key, part.local, part.start, part.shape, flat=True)
    tensors = {key: tensor for key, tensor in state.items() if not isinstance(tensor, FlatShard)}
    owners = _owners({key: tensor for key, tensor in tensors.items() if not is_sharded(tensor)}, strategy.world_size)
    for key, tensor in tensors.items():
        local, start = local_rows(tensor)
        own = owners.get(key, strategy.rank) == strategy.rank and is_first_replica(tensor)
        if own and (local.numel() or not start):
            yield Piece(key, local, start, tuple(tensor.shape))


def _owners(tensors: Mapping[str, torch.Tensor], ranks: int) -> dict[str, int]:
    """Which rank writes a tensor: the one with the least to write so far, the same on every rank."""
    load = [0] * ranks
    owners = {}
    for name, tensor in tensors.items():
        owners[name] = load.index(min(load))
        load[owners[name]] += bytes_of(tensor)
    return owners


def _weights_file(stem: str, rank: int, writers: int) -> str:
    return f"{stem}.safetensors" if writers == 1 else file_name(stem, rank=rank, world_size=writers)


def _index(weights: Mapping[str, torch.Tensor], owners: Mapping[str, int], stem: str, writers: int) -> str:
    """The index that Transformers reads beside several files of weights."""
    size = sum(bytes_of(tensor) for tensor in weights.values())
    where = {name: _weights_file(stem, owner, writers) for name, owner in sorted(owners.items())}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n"


def restore(folder: Path, task: SavedTask, optimizer: NamedOptimizer) -> TrainState:
    """Put a checkpoint back into a model and optimizer of any strategy and any number of ranks.

    Raises:
        CheckpointError: it belongs to another model, or lacks something.
    """
    state = TrainState.load(folder)
    restore_weights(folder, task)
    optimizer.load_sharded_state(PieceReader(folder / FOLDER, MOMENTS))
    return state


def restore_weights(folder: Path, task: SavedTask) -> None:
    """Put trained weights back into a model, of any strategy and any number of ranks.

    Raises:
        CheckpointError: they belong to another model.
    """
    where = _stored(folder, task.weights_stem)
    tensors = task.weights()
    places = {name: task.place_of(name) for name in tensors}
    if where.keys() != {place for place, _ in places.values()}:
        raise CheckpointError(
            f"the checkpoint has {len(where)} tensors, the model wants {len(tensors)}",
            where=str(folder),
            repair="adapter.method and adapter.target_modules must be as they were when it was written",
        )
    for name, tensor in tensors.items():
        place, view = places[name]
        with safe_open(where[place], framework="pt") as file:
            part = file.get_slice(place) if view is None else view(file.get_slice(place))
            if tuple(part.get_shape()) != shape_of(tensor):
                raise CheckpointError(f"{name} has another shape than in the model", where=str(folder))
            load_local(tensor, lambda start, stop, part=part: part[start:stop])  # type: ignore[misc]


def _stored(folder: Path, stem: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
