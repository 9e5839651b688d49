"""The rows that are evaluated: of a split of a run, or of any file that training reads, as the tokens of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir
from finray.config.paths import PREPARED, is_url, local_dir_of
from finray.config.schema import Config
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit, Splits
from finray.data.sources.pieces import read
from finray.data.sources.resolve import Row, Source
from finray.errors import CheckpointError, DataError
from finray.training.assemble import require_same_data
from finray.training.state import TrainState

T = TypeVar("T")


class Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for, so that memory does not grow with it."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(one) for one in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._make(index % self._count)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to score.

    Attributes:
        name: of the split or the file.
        split: that they are of.
        numbers: which of its rows, in order.
        dataset: that the split is of.
        asks: whether rows have prompts to answer; of others it is the loss alone.
        fingerprint: digest of all rows of the dataset.
        train: the rows that the model was trained on, where they are known.
    """

    name: str
    split: PreparedSplit
    numbers: tuple[int, ...]
    dataset: PreparedDataset
    asks: bool
    train: PreparedSplit | None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def fingerprint(self) -> str:
        """A digest of the rows of the dataset, and the name of the split."""
        return f"{self.dataset.content}/{self.name}"

    def prompt(self, index: int) -> list[int]:
        """Token ids up to where the last answer begins."""
        return prompt_and_answer(*self.split.row(self.numbers[index]))[0]

    def reference(self, index: int) -> list[int]:
        """Token ids of the last answer."""
        return prompt_and_answer(*self.split.row(self.numbers[index]))[1]

    def keys(self) -> list[tuple[int, int]]:
        """What names each row whatever the tokenizer: its row in the source, and which of that row's rows it is."""
        every = _keys(self.split)
        return [every[number] for number in self.numbers]

    def like(self, keys: Sequence[tuple[int, int]]) -> Rows:
        """The rows with these names, in the same order.

        Raises:
            DataError: one of them is not there.
        """
        place = {key: number for number, key in enumerate(_keys(self.split))}
        if missing := sum(key not in place for key in keys):
            raise DataError(
                f"{missing} of the {len(keys)} rows do not fit the baseline's tokenizer and data.max_length",
                where="data.max_length",
                repair="raise data.max_length, or leave that baseline out",
            )
        return replace(self, numbers=tuple(place[key] for key in keys))

    def columns(self, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Index and columns of the source row of each row; the source is read once.

        Args:
            source: the file.
        """
        wanted: dict[str, list[int]] = {}
        for index, number in enumerate(self.numbers):
            wanted.setdefault(self.split.where(number).rpartition(":")[2], []).append(index)
        path = Path(source).expanduser()
        rows: Iterator[Row] = read(Source(str(path), (str(path),)))
        for row in rows:
            for index in wanted.get(str(row.number), ()):
                yield index, row.value


def prompt_and_answer(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """A row's tokens up to its last answer, and those of that answer."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask.astype(bool), [False]]).astype(np.int8)))
    start, stop = int(edges[-2]), int(edges[-1])
    return ids[:start].tolist(), ids[start:stop].tolist()


def _keys(split: PreparedSplit) -> list[tuple[int, int]]:
    found, times = [], dict[int, int]()
    for source_row in split.source_rows.tolist():
        times[source_row] = times.get(source_row, -1) + 1
        found.append((source_row, times[source_row]))
    return found


def of_run(run: RunDir, config: Config, split: str | None) -> tuple[str, PreparedSplit, PreparedDataset, PreparedSplit]:
    """A split of a run, by name: its name, rows, dataset, and the rows that were trained on.

    Args:
        run: the directory.
        config: its config.
        split: ``train``, ``eval`` or ``test``; None for the test split, or the evaluation split where there is none.

    Raises:
        DataError: there is no such split, or the data has changed.
    """
    splits, dataset = splits_of(run, config)
    name = split or ("test" if splits.test is not None else "eval")
    found: PreparedSplit | None = getattr(splits, name)
    if found is None:
        there = [one for one in ("train", "eval", "test") if getattr(splits, one) is not None]
        raise DataError(
            "the run holds no rows out to evaluate on" if split is None else f"the run has no split `{name}`",
            where="data",
            repair="name a file with --file, or one of the splits that it has with --split: " + ", ".join(there),
        )
    return name, found, dataset, splits.train


def splits_of(run: RunDir, config: Config) -> tuple[Splits, PreparedDataset]:
    """The rows that a run was trained on, and those that it holds out.

    Raises:
        DataError: the data has changed.
    """
    root = None if config.prepare.dir or is_url(config.run.output_dir) else run.path.parent / PREPARED
    dataset = PreparedDataset(prepare_here(config, root=root), local_dir=local_dir_of(config))
    _require_same_data(run, config, dataset)
    return dataset.splits(config.data, seed=config.run.seed), dataset


def of_file(config: Config, *, root: str | Path | None) -> tuple[PreparedSplit, PreparedDataset]:
    """All rows of the source of a config."""
    dataset = PreparedDataset(prepare_here(config, root=root), local_dir=local_dir_of(config))
    rows = dataset.all_rows("train")
    if rows is None or not len(rows):
        raise DataError("no row is left to evaluate", where=f"--file {config.data.source}")
    return rows, dataset


def _require_same_data(run: RunDir, config: Config, dataset: PreparedDataset) -> None:
    """Refuse a dataset other than the one that the run was trained on, which its checkpoints name by a digest.

    A ratio splits other data in another way, so rows that were learned would be scored as if they had been held out.
    """
    store = CheckpointStore(run.path)
    for step in reversed(store.steps()):
        try:
            trained_on = TrainState.load(store.path_of(step)).data
        except CheckpointError:
            continue
        require_same_data(trained_on, dataset, config)
        return
    raise DataError(
        "the run has no checkpoint left that says which data it was trained on",
        where=str(run.path),
        repair="keep a checkpoint beside `final`: without one, held-out rows cannot be told from learned ones",
    )
