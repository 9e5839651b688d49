"""What is in a config's data, found out on this machine in seconds and without Ray: for `finray plan` and `inspect`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finray.config.schema import Config
from finray.data.convert import converter_of
from finray.data.formats import Example
from finray.data.manifest import manifest_of
from finray.data.packing import one_row_each, plan_packs
from finray.data.parts import PartWriter
from finray.data.pieces import read_piece
from finray.data.preparation import Part, plan
from finray.data.prepared import MANIFEST, PreparedDataset
from finray.data.readers import BadRow
from finray.data.storage import Folder
from finray.errors import DataError, FinrayError
from finray.models.tokenizers import load_tokenizer
from finray.runtime.prepare import Planned, plan_preparation
from finray.runtime.prepare_report import report_lines

# Seconds after which no further part of a large source is read.
_BUDGET_S = 10.0
_LENGTHS = 10_000


@dataclass(frozen=True, slots=True)
class DataReport:
    """What was found.

    Attributes:
        problems: what keeps the data from being prepared.
        notes: how it was read, a line per split.
        warnings: rows that lost something, with counts.
        rows: rows to train on.
        tokens: in those rows.
        supervised: targets in those rows.
        packs: that they fill, or rows where packing is off.
        longest: tokens of the longest.
        lengths: row lengths, sorted; a regular sample where there are many.
        eval_rows: rows held out for evaluation.
        complete: False where only the first parts of a large source were read.
        seconds: that it took.
    """

    problems: list[FinrayError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    packs: int = 0
    longest: int = 0
    lengths: list[int] = field(default_factory=list)
    eval_rows: int = 0
    complete: bool = True
    seconds: float = 0.0


def examine(
    config: Config, *, budget_s: float = _BUDGET_S, clock: Callable[[], float] = time.perf_counter
) -> DataReport:
    """Read, convert and tokenise the data of a config, or as much of it as the budget allows.

    Nothing is kept. Where the data is prepared already, that is looked at instead.
    """
    started = clock()
    try:
        planned = plan_preparation(config)
        if planned.is_done:
            return _report(
                config, PreparedDataset(planned.target.root, local_dir=local_dir_of(config)), True, clock() - started
            )
        with tempfile.TemporaryDirectory(prefix="finray-") as folder:
            complete = _write_some(config, planned, Folder(folder), lambda: clock() - started < budget_s)
            return _report(config, PreparedDataset(folder), complete, clock() - started)
    except FinrayError as error:
        return DataReport(problems=[error], seconds=clock() - started)


def _write_some(config: Config, planned: Planned, folder: Folder, has_time: Callable[[], bool]) -> bool:
    """Prepare the first parts of every stream; returns whether these were all."""
    parts = plan(planned.settings, planned.streams)
    writer = PartWriter(planned.settings, planned.settings.encoder(load_tokenizer(config.model)), folder)
    # The first part of each stream comes before the second of any.
    by_number = sorted(parts, key=lambda part: part.number)
    results = [writer.write(part) for part in by_number if part.number == 0 or has_time()]
    manifest = manifest_of(planned.shape, planned.streams, results)
    folder.write(MANIFEST, json.dumps(manifest).encode())
    return len(results) == len(parts)


def _labelled(dataset: PreparedDataset) -> list[FinrayError]:
    if dataset.kind() != "labelled":
        return []
    return [
        DataError(
            "the rows are text with a label, which a language model does not learn",
            where="data.format",
            repair="set data.format to text, to learn the text alone",
        )
    ]


def _report(config: Config, dataset: PreparedDataset, complete: bool, seconds: float) -> DataReport:
    splits = dataset.splits(config.data, seed=config.run.seed)
    lengths = np.sort(splits.train.lengths)
    make_plan = plan_packs if config.data.packing else one_row_each
    lines = report_lines(dataset.manifest)
    return DataReport(
        problems=_labelled(dataset),
        notes=[line for line in lines if not line.startswith("warning: ")],
        warnings=[line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")],
        rows=len(lengths),
        tokens=int(lengths.sum()),
        supervised=int(splits.train.supervised.sum()),
        packs=len(make_plan(lengths, config.data.max_length)),
        longest=int(lengths[-1]) if len(lengths) else 0,
        lengths=lengths[:: max(1, len(lengths) // _LENGTHS)].tolist(),
        eval_rows=0 if splits.eval is None else len(splits.eval),
        complete=complete,
        seconds=seconds,
    )


# --- back from prepared rows to their source ------------------------------------------------------------------------


class SourceRows:
    """The source rows behind prepared ones, read again from where they lie.

    Args:
        config: whose data it is.
        has_chat_template: whether the tokenizer has one.
    """

    def __init__(self, config: Config, *, has_chat_template: bool) -> None:
        self._planned = plan_preparation(config)
        self._parts = plan(self._planned.settings, self._planned.streams)
        self._has_chat_template = has_chat_template

    def parts(self, split: str) -> list[Part]:
        """The parts that the rows of a split were prepared from, in the order of their rows."""
        return [part for part in self._parts if part.stream.split == split]

    def examples(self, part: Part) -> list[list[Example]]:
        """What each row of a part was converted to, in order; nothing for a bad row."""
        convert = converter_of(part.row_format, has_chat_template=self._has_chat_template)
        found: list[list[Example]] = []
        for piece in part.pieces:
            for item in read_piece(piece, part.stream.source, self._planned.settings.reading):
                found.append([] if isinstance(item.value, BadRow) else _converted(convert, item.value))
        return found


def _converted(convert: Callable[[Any], list[Example]], row: dict[str, Any]) -> list[Example]:
    try:
        return convert(row)
    except DataError:
        return []


def local_dir_of(config: Config) -> Path | None:
    """Where files of a remote prepared dataset are kept, if the config says so."""
    return None if config.prepare.local_dir is None else Path(config.prepare.local_dir).expanduser()
