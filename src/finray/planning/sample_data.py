"""What is in a config's data, found out on this machine in seconds and without Ray: for `finray plan` and `inspect`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from finray.config.paths import local_dir_of
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.data.dataset.manifest import manifest_of
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import plan
from finray.data.dataset.prepare import Planned, plan_preparation
from finray.data.dataset.prepared import MANIFEST, PreparedDataset
from finray.data.dataset.report import report_lines
from finray.data.sampling.packing import one_row_each, plan_packs
from finray.data.storage import Folder
from finray.errors import FinrayError
from finray.pretrained.tokenizers import load_tokenizer

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
    folder.write(MANIFEST, manifest.to_bytes())
    return len(results) == len(parts)


def _report(config: Config, dataset: PreparedDataset, complete: bool, seconds: float) -> DataReport:
    splits = dataset.splits(config.data, seed=config.run.seed)
    lengths = np.sort(splits.train.lengths)
    make_plan = plan_packs if config.data.packing else one_row_each
    lines = report_lines(dataset.manifest)
    problems: list[FinrayError] = []
    try:
        dataset.require_kind(task_spec(config.model.task))
    except FinrayError as error:
        problems.append(error)
    return DataReport(
        problems=problems,
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
