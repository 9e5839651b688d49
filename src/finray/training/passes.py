"""A pass over the data before training: columns that the objective reads, computed by the model that a run begins from.

What costs a forward pass and does not change during training is data: it is computed once, by all workers, and kept
beside the prepared rows for every run and every resume that begins from the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.columns import ColumnFiles, Floats
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.sampling.groups import Groups
from finray.data.sampling.packing import IntArray, PackPlan, equal_length_batches, plan_packs
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
    first = strategy.rank == 0
    made_by = strategy.broadcast_object(
        on_all_ranks(strategy, lambda: begins_from(config, execution, Digests(cache)) if first else {})
    )
    for name in sorted({split.name for split in splits}):
        rows = dataset.all_rows(name)
        assert rows is not None
        for column in spec.columns:
            made = {**made_by, "column": column, "objective": spec.name}
            files = ColumnFiles(dataset.folder, dataset.manifest, name, made)
            missing = strategy.broadcast_object(on_all_ranks(strategy, files.missing if first else list))
            if missing:
                say(f"computing `{column}` of {len(rows):,} rows with the model that the run begins from, once")
            pack = plan_packs if execution.packs else equal_length_batches
            for at in range(0, len(missing), strategy.world_size):
                parts = missing[at : at + strategy.world_size]
                _compute(column, files, parts, task, rows, strategy, pack, config.data.max_length)
            read = on_all_ranks(strategy, files.read)
            for split in splits:
                if split.name == name:
                    split.columns[column] = read


@torch.no_grad()
def _compute(
    column: str,
    files: ColumnFiles,
    parts: list[int],
    task: Task,
    rows: PreparedSplit,
    strategy: Strategy,
    pack: Callable[[IntArray, int], PackPlan],
    capacity: int,
) -> None:
    """Compute and write parts of a column, each rank one; there may be fewer than ranks. A collective."""
    plans, values = list[list[list[int]]](), dict[int, Floats]()
    for part in parts:
        numbers = files.rows(part)
        groups = Groups(np.cumsum([0, *rows.group_sizes(numbers)]))
        lengths = groups.sums(rows.lengths[numbers.start : numbers.stop])
        plan = pack(lengths, max(capacity, int(lengths.max()))).in_rows(groups)
        plans.append([[numbers.start + at for at in plan.pack(number)] for number in range(len(plan))])
    own = plans[strategy.rank] if strategy.rank < len(plans) else []
    others: list[list[int]] = max(plans, key=len) if strategy.lockstep else []
    task.model.eval()
    for some, dummy in zip_longest(own, others):
        numbers_S = some or dummy
        batch: Any = task.collate(rows, numbers_S).to(strategy.device)
        # The other ranks communicate in every forward pass, so this one takes part.
        outputs = task.objective.column(column, task.outputs(batch), batch)
        if some:
            each = np.split(outputs.float().cpu().numpy(), np.cumsum(batch.targets_per_row)[:-1])
            values |= dict(zip(some, each, strict=True))
    task.model.train()

    def write() -> None:
        if own:
            part = parts[strategy.rank]
            files.write(part, [values[row] for row in files.rows(part)])

    on_all_ranks(strategy, write)


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
