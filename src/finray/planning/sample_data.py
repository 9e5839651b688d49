"""A sample of a config's data, read on this machine in seconds and without Ray, for `finray plan` and `inspect`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from finray.config.objectives import spec_of
from finray.config.paths import local_dir_of
from finray.config.schema import Config
from finray.data.dataset.labels import FoundLabels, find_labels
from finray.data.dataset.manifest import MANIFEST, manifest_of
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import plan, remarks_on_files
from finray.data.dataset.prepare import plan_preparation
from finray.data.dataset.prepared import PreparedDataset
from finray.data.dataset.report import report_lines, shared_rows, unserved_ends
from finray.data.dataset.run_data import longest_of, run_data
from finray.data.formats.labels import LabelSet
from finray.data.storage import Folder
from finray.errors import FinrayError
from finray.planning.steps import require_prompts
from finray.pretrained.tokenizers import generation_stops, load_tokenizer

# Seconds after which no further rows of a large source are read.
_BUDGET_S = 10.0
_LENGTHS = 10_000


@dataclass(frozen=True, slots=True)
class DataReport:
    """The result of an examination of the data."""

    problems: list[FinrayError] = field(default_factory=list)  # what keeps the data from being prepared
    notes: list[str] = field(default_factory=list)  # how it was read, a line per split
    warnings: list[str] = field(default_factory=list)  # rows that lost something, with counts
    rows: int = 0  # to train on
    tokens: int = 0
    supervised: int = 0  # targets in those rows
    packs: int = 0  # that they fill, or rows where packing is off
    pack_length: int | None = None  # tokens that a pack holds; None for data.max_length
    longest: int = 0  # tokens of the longest row
    longest_held_out: int = 0  # tokens of the longest row that the run evaluates
    lengths: list[int] = field(default_factory=list)  # of rows or pairs, sorted; a sample where there are many
    joined: int | None = None  # of pairs: tokens of the largest pass; None for rows
    complete: bool = True  # False where only the first rows of a large source were read
    seconds: float = 0.0  # that it took
    labels: LabelSet | None = None  # what a classifier is to predict, in what was read


def examine(
    config: Config, *, budget_s: float = _BUDGET_S, clock: Callable[[], float] = time.perf_counter
) -> DataReport:
    """Read, convert and tokenize the data of a config, or as much of it as the budget allows.

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
            parts = plan(planned.settings, planned.streams)
            encoder = planned.settings.encoder(load_tokenizer(config.model))
            writer = PartWriter(planned.settings, encoder, Folder(folder))
            complete = True

            def is_over() -> bool:
                nonlocal complete
                # Asked only where something is left to read.
                complete = complete and clock() - started < budget_s
                return not complete

            # The first rows of each stream, then others while there is time.
            by_number = sorted(parts, key=lambda part: part.number)
            results = [writer.write(part, enough=is_over) for part in by_number if part.number == 0 or not is_over()]
            Folder(folder).write(MANIFEST, manifest_of(planned.shape, planned.streams, results).to_bytes())
            return _report(config, PreparedDataset(folder), complete, clock() - started)
    except FinrayError as error:
        return DataReport(problems=[error], seconds=clock() - started)


def _report(config: Config, dataset: PreparedDataset, complete: bool, seconds: float) -> DataReport:
    data = run_data(config, dataset, is_whole=complete)
    splits = data.splits
    lengths = np.sort(splits.train.groups.sums(splits.train.lengths))
    ends = unserved_ends(dataset.manifest, generation_stops(config.model))
    remarks = shared_rows(splits, dataset.kind(), config)
    lines = [*report_lines(dataset.manifest), *ends, *remarks_on_files(config), *remarks]
    problems: list[FinrayError] = []
    try:
        dataset.require_kind(spec_of(config))
        require_prompts(config, dataset.kind())
    except FinrayError as error:
        problems.append(error)
    labels = find_labels(dataset, splits, config) if complete else FoundLabels(dataset.label_set)
    problems += labels.problems
    return DataReport(
        problems=problems,
        labels=labels.labels,
        notes=[line for line in lines if not line.startswith("warning: ")],
        warnings=[
            *(line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")),
            *(f"{text} ({where})" for text, where in labels.warnings),
        ],
        rows=len(splits.train),
        joined=data.joined or (None if splits.train.groups.is_single else int(lengths[-1])),
        tokens=int(lengths.sum()),
        supervised=int(splits.train.supervised.sum()),
        packs=len(data.plan),
        pack_length=data.steps.pack_length,
        longest=longest_of(splits.train),
        longest_held_out=longest_of(splits.eval),
        lengths=lengths[:: max(1, len(lengths) // _LENGTHS)].tolist(),
        complete=complete,
        seconds=seconds,
    )
