"""The rows to evaluate: of a split of a run, or of any file that training reads, with the tokens of training."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.paths import PREPARED, is_url, local_dir_of
from finray.config.schema import Config, DataConfig
from finray.config.trust import is_word_of_stranger
from finray.data.dataset.plan import Part
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit, Splits
from finray.data.dataset.source_rows import SourceRows
from finray.data.formats.examples import Labelled
from finray.data.sources.readers import Value
from finray.errors import CheckpointError, DataError, FinrayError
from finray.training.assemble import require_same_data
from finray.training.state import TrainState

T = TypeVar("T")


class Lazy(Sequence[T]):
    """A sequence whose items are computed on access, so that memory does not grow with it."""

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
            return [self._make(place) for place in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._make(index % self._count)


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """Rows to score.

    Attributes:
        name: of the split or file.
        split: the prepared split.
        numbers: indices of the rows in it, in order.
        dataset: dataset of the split.
        asks: whether rows have prompts to answer; otherwise only the loss is computed.
        fingerprint: equal if the rows of the split are.
        train: the rows that the model was trained on, if known.
        stream: the split of the dataset that the rows are a part of; a ratio takes them from ``train``.
    """

    name: str
    split: PreparedSplit
    numbers: tuple[int, ...]
    dataset: PreparedDataset
    asks: bool
    train: PreparedSplit | None
    stream: str

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def are_pairs(self) -> bool:
        """Whether each row is the chosen answer of a pair, whose rejected one is the next row of the split."""
        return self.dataset.kind(self.stream) == "preference"

    @property
    def fingerprint(self) -> str:
        """A digest of the rows of the dataset, the name of the split, and how the split was chosen from them, if so."""
        return "/".join(filter(None, (self.dataset.content, self.name, self.split.chosen)))

    def prompt(self, index: int) -> list[int]:
        """Token ids up to the start of the last answer."""
        return prompt_and_answer(*self.split.row(self.numbers[index]))[0]

    def reference(self, index: int, following: int = 0) -> list[int]:
        """Token ids of the last answer; of a row that follows if ``following`` is 1."""
        return prompt_and_answer(*self.split.row(self.numbers[index] + following))[1]

    def keys(self) -> list[tuple[int, int]]:
        """A key per row, independent of the tokenizer: its source row, and its index among that row's rows."""
        every = _keys(self.split)
        return [every[number] for number in self.numbers]

    def like(self, keys: Sequence[tuple[int, int]]) -> EvaluationRows:
        """The rows with these keys, in the same order. Raises DataError: one of them does not exist."""
        place = {key: number for number, key in enumerate(_keys(self.split))}
        if missing := sum(key not in place for key in keys):
            raise DataError(
                f"{missing} of the {len(keys)} rows are left out with the baseline's tokenizer: they are longer than "
                "data.max_length, or its chat template refuses them",
                where="data.max_length",
                repair="raise data.max_length, or drop that baseline",
            )
        return replace(self, numbers=tuple(place[key] for key in keys))

    def columns(self, config: Config) -> Iterator[tuple[int, dict[str, Any]]]:
        """Index and source columns of each row; the source is read once."""
        source = SourceRows(config, has_chat_template=False)
        for index, value in (row for _, rows in self._sources(source) for row in rows):
            # A row that was prepared can be read.
            assert isinstance(value, dict)
            yield index, value

    def texts(self, config: Config) -> dict[int, str]:
        """By index, the text of each labelled row as it stands in the source, which is read once; with its second text
        in a line of its own. Rows that are not found again are missing."""
        texts: dict[int, str] = {}
        with suppress(FinrayError):
            source = SourceRows(config, has_chat_template=False)
            every_within = self.split.within
            for part, rows in self._sources(source):
                convert = source.converter(part)
                for index, value in rows:
                    each, within = convert(value), int(every_within[self.numbers[index]])
                    if within < len(each) and isinstance(example := each[within], Labelled):
                        texts[index] = "\n".join(filter(None, (example.text, example.text_pair)))
        return texts

    def _sources(self, source: SourceRows) -> Iterator[tuple[Part, Iterator[tuple[int, Value]]]]:
        """The parts that rows come from, with index and source row of each; a part is read to the last one of them."""
        wanted: dict[int, list[int]] = {}
        for index, number in enumerate(self.numbers):
            wanted.setdefault(int(self.split.source_rows[number]), []).append(index)
        places, first = sorted(wanted), 0
        for part, entry in zip(source.parts(self.stream), self.dataset.manifest.splits[self.stream].parts, strict=True):
            after = first + entry.source_rows
            last = bisect_left(places, after)
            if bisect_left(places, first) < last:
                read = enumerate(islice(source.values(part), places[last - 1] - first + 1), first)
                yield part, ((index, value) for place, value in read for index in wanted.get(place, ()))
            first = after


def prompt_and_answer(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """A row's tokens before its last answer, and those of that answer."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask.astype(bool), [False]]).astype(np.int8)))
    start, stop = int(edges[-2]), int(edges[-1])
    return ids[:start].tolist(), ids[start:stop].tolist()


def _keys(split: PreparedSplit) -> list[tuple[int, int]]:
    # Not by counting: a mix has a row several times, or one of the rows of a source row without the others.
    return list(zip(split.source_rows.tolist(), split.within.tolist(), strict=True))


def of_run(run: RunDir, config: Config, split: str | None) -> tuple[str, PreparedSplit, PreparedDataset, PreparedSplit]:
    """A split of a run: its name, rows, dataset, and the rows that were trained on.

    Args:
        run: the run directory.
        config: of the run.
        split: ``train``, ``eval`` or ``test``; None means the test split, or the evaluation split if there is none.

    Raises:
        DataError: there is no such split, or the data has changed.
    """
    splits, dataset = splits_of(run, config)
    name = split or ("test" if splits.test is not None else "eval")
    rows: PreparedSplit | None = getattr(splits, name)
    if rows is None:
        there = [name for name in ("train", "eval", "test") if getattr(splits, name) is not None]
        raise DataError(
            "the run has no held-out rows to evaluate on" if split is None else f"the run has no split `{name}`",
            where="data",
            repair="give a file with --file, or one of its splits with --split: " + ", ".join(there),
        )
    return name, rows, dataset, splits.train


def prepared_beside(run: RunDir, config: Config) -> Path | None:
    """Where the rows of a run's evaluation are prepared; None for where its config says, if that is the user's word."""
    has_url = is_url(config.run.output_dir) and not is_word_of_stranger(config, "run.output_dir")
    return None if config.prepare.dir or has_url else run.path.parent / PREPARED


def splits_of(run: RunDir, config: Config) -> tuple[Splits, PreparedDataset]:
    """The training rows of a run, and its held-out rows. Raises DataError: the data has changed."""
    dataset = PreparedDataset(prepare_here(config, root=prepared_beside(run, config)), local_dir=local_dir_of(config))
    # A ratio would split other data differently, so rows that were trained on would be scored as if they were held out.
    store = CheckpointStore(run.path)
    for step in reversed(store.steps()):
        try:
            trained_on = TrainState.load(store.path_of(step)).data
        except CheckpointError:
            continue
        require_same_data(trained_on, dataset, config)
        # As the run was split: by other ratios, or another seed, rows that were trained on would be held out.
        trained = saved_config(run)
        return dataset.splits(trained.data, seed=trained.run.seed), dataset
    raise DataError(
        "the run has no checkpoint left, so its training data is unknown",
        where=str(run.path),
        repair="keep a checkpoint beside `final/`: it records which rows were held out",
    )


def stream_of(split: str, data: DataConfig) -> str:
    """The split of a dataset that has the rows of a run's split: ``train`` has those that a ratio holds out."""
    ratios = {"eval": data.eval_ratio, "test": data.test_ratio}
    return "train" if ratios.get(split) else split


def of_file(config: Config, *, root: str | Path | None, stream: str = "train") -> tuple[PreparedSplit, PreparedDataset]:
    """All rows of a split of the data of a config."""
    dataset = PreparedDataset(prepare_here(config, root=root), local_dir=local_dir_of(config))
    rows = dataset.all_rows(stream)
    if rows is None or not len(rows):
        raise DataError("no row is left to evaluate", where=f"--file {config.data.source}")
    return rows, dataset
