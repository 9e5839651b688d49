"""A pass over the data before training: columns that the objective reads, computed by the model that a run begins from.

What costs a forward pass and does not change during training is data: it is computed once, by all workers, and kept
beside the prepared rows for every run and every resume that begins from the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.columns import ColumnFiles, Floats
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.sampling.collate import collate
from finray.data.sampling.packing import equal_length_batches, plan_packs
from finray.data.storage import Digests
from finray.parallel.base import Strategy, on_all_ranks
from finray.pretrained.weights import folder_of
from finray.training.task import Task

# Files that are the model, and no others beside it.
_WEIGHTS = (".safetensors", ".bin", ".gguf", "config.json")


def add_columns(
    config: Config,
    execution: Execution,
    task: Task,
    dataset: PreparedDataset,
    splits: list[PreparedSplit],
    strategy: Strategy,
    say: Callable[[str], None],
) -> None:
    """Give the splits of a run the columns of its objective, and compute what of them is missing. A collective.

    Args:
        task: with the weights that the run begins from.
        splits: of the run; those taken from them later have the columns too.
        say: called with a message, where something is computed.

    Raises:
        DataError: a column cannot be written, or was changed.
    """
    spec = task.objective.spec
    if not spec.columns:
        return
    cache = None if dataset.folder.is_remote else Path(dataset.folder.root).parent / ".digests.jsonl"
    began = strategy.rank == 0
    made_by = strategy.broadcast_object(
        on_all_ranks(strategy, lambda: begins_from(config, execution, Digests(cache)) if began else {})
    )
    for name in sorted({split.name for split in splits}):
        rows = dataset.all_rows(name)
        assert rows is not None
        shapes = {column: {**made_by, "column": column, "objective": spec.name} for column in spec.columns}
        files = {column: ColumnFiles(dataset.folder, dataset.manifest, name, shape) for column, shape in shapes.items()}
        for column, of_column in files.items():
            missing = strategy.broadcast_object(on_all_ranks(strategy, of_column.missing if began else list))
            if missing:
                say(f"computing `{column}` of {len(rows):,} rows with the model that the run begins from, once")
            compute = _Pass(column, of_column, task, rows, strategy, config.data.max_length, packs=execution.packs)
            compute.run(missing)
            read = on_all_ranks(strategy, of_column.read)
            for split in splits:
                if split.name == name:
                    split.columns[column] = read


class _Pass:
    """Computes parts of a column: of as many as there are ranks, each rank one."""

    def __init__(
        self,
        column: str,
        files: ColumnFiles,
        task: Task,
        rows: PreparedSplit,
        strategy: Strategy,
        capacity: int,
        *,
        packs: bool,
    ) -> None:
        self._column, self._files, self._task, self._rows, self._strategy = column, files, task, rows, strategy
        self._capacity, self._pack = capacity, plan_packs if packs else equal_length_batches

    @torch.no_grad()
    def run(self, parts: list[int]) -> None:
        """Compute and write them. A collective."""
        strategy, was_training = self._strategy, self._task.model.training
        self._task.model.eval()
        for first in range(0, len(parts), strategy.world_size):
            together = parts[first : first + strategy.world_size]
            plans = [self._plan(part) for part in together]
            own = plans[strategy.rank] if strategy.rank < len(plans) else []
            values: dict[int, Floats] = {}
            others: list[list[int]] = max(plans, key=len) if strategy.lockstep else []
            for pack, dummy in zip_longest(own, others):
                numbers = dummy if pack is None else pack
                batch = collate([self._rows.row(row) for row in numbers], numbers).to(strategy.device)
                # The other ranks communicate in every forward pass, so this one takes part.
                outputs = self._task.objective.column(self._column, self._task.outputs(batch), batch)
                if pack is not None:
                    each = np.split(outputs.float().cpu().numpy(), np.cumsum(batch.targets_per_row)[:-1])
                    values |= dict(zip(pack, each, strict=True))
            on_all_ranks(strategy, partial(self._write, together, values))
        self._task.model.train(was_training)

    def _write(self, together: list[int], values: Mapping[int, Floats]) -> None:
        if values:
            part = together[self._strategy.rank]
            self._files.write(part, [values[row] for row in self._files.rows(part)])

    def _plan(self, part: int) -> list[list[int]]:
        rows = self._files.rows(part)
        plan = self._pack(self._rows.lengths[rows.start : rows.stop], self._capacity)
        return [[rows.start + at for at in plan.pack(pack)] for pack in range(len(plan))]


def begins_from(config: Config, execution: Execution, digests: Digests) -> dict[str, Any]:
    """What the outputs of the model depend on that a run begins from, as JSON types: its files by their digests, and
    how it computes."""
    model, adapter = config.model, config.adapter
    began = None if adapter.start_from is None else _files_of(adapter.start_from, Path(adapter.start_from), digests)
    # The first values of other methods are not zero, and come from the seed.
    is_base = began is None and adapter.method in ("none", "lora", "rslora")
    settings = adapter.model_dump(mode="json", exclude={"start_from", "dropout"})
    return {
        "model": _files_of(model.name, folder_of(model), digests),
        "settings": model.model_dump(mode="json", exclude={"name", "chat_template", "chat_template_arguments"}),
        "adapter": None if is_base else began or [settings, config.run.seed],
        "precision": [execution.precision, execution.bits, execution.weights],
        "seed": config.run.seed if model.new_tokens else None,
    }


def _files_of(name: str, folder: Path | None, digests: Digests) -> list[list[str]] | str:
    """Name and digest of each file of a model; the name where they cannot be told."""
    if folder is None:
        return digests.of(name) if Path(name).is_file() else name
    files = sorted(file for file in folder.iterdir() if file.name.endswith(_WEIGHTS))
    return [[file.name, digests.of(file.resolve())] for file in files]
