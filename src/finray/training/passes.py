"""The reference: the model that an objective compares with, by default the one that a run begins from.

What costs a forward pass and does not change during training is data: a pass over the rows, before training and by all
workers, computes the columns that the objective reads. They are kept beside the prepared rows for every run and every
resume with the same reference. With ``preference.reference_in_step`` each step computes them instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finray import compat
from finray.config.objectives import keeps_start, model_of_reference, objective_spec, reference_run
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.data.dataset.columns import ColumnFiles, Floats
from finray.data.dataset.plan import fingerprint
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.dataset.report import reference_remark
from finray.data.sampling.groups import Groups
from finray.data.sampling.packing import IntArray, PackPlan, equal_length_batches, plan_packs
from finray.data.storage import Digests
from finray.models.saved_layout import REFERENCE
from finray.objectives.base import of_before
from finray.parallel.base import Strategy, on_all_ranks
from finray.pretrained.weights import folder_of
from finray.training.task import Task

# Files that are the model, and no others beside it.
_WEIGHTS = (".safetensors", ".bin", ".gguf", "config.json")


class Reference:
    """Computes columns, without gradients.

    Args:
        task: the run's, or that of another model.
        adapter: with which the model computes; None for none, and "" for the one that is trained.
    """

    def __init__(self, task: Task, adapter: str | None = "") -> None:
        self.task, self._adapter = task, adapter

    @torch.no_grad()
    def column(self, name: str, batch: Any) -> torch.Tensor:
        """A column's numbers (fp32) for the K targets of a batch. A collective where weights are sharded."""
        model = self.task.model
        is_training = model.training
        model.eval()
        with nullcontext() if self._adapter == "" else compat.with_adapter(model, self._adapter):
            outputs = self.task.outputs(batch)
        model.train(is_training)
        return self.task.objective.column(name, outputs, batch).float()

    def __call__(self, batch: Any) -> Any:
        """The batch with all columns of its objective."""
        columns = {name: self.column(name, batch) for name in self.task.objective.spec.columns}
        return replace(batch, values={**batch.values, **columns})


def add_columns(
    config: Config,
    execution: Execution,
    task: Task | None,
    dataset: PreparedDataset,
    splits: list[PreparedSplit],
    strategy: Strategy,
    say: Callable[[str], None],
    load: Callable[[Config], Task],
) -> None:
    """Give the splits of a run the columns of its objective, and compute what of them is missing; or have ``task``
    compute them in the step. A collective.

    Args:
        task: with the weights that the run begins from; None before it is loaded, for a reference by name.
        splits: of the run; those taken from them later have the columns too.
        say: called with a message, where something is computed.
        load: loads the frozen model of a run as it begins. A collective.

    Raises:
        DataError: a column cannot be written, or was changed.
        ModelError: the reference cannot be loaded.
    """
    spec, settings, other = objective_spec(config), config.preference, reference_run(config)
    if not spec.columns:
        return
    adapter = REFERENCE if keeps_start(config) else None if _drops_adapter(config) else ""
    if settings.reference_in_step:
        assert task is not None
        task.in_step = Reference(task, adapter) if other is None else Reference(load(other))
        return
    reference = None if task is None else Reference(task, adapter)
    first = strategy.rank == 0
    made_by = strategy.broadcast_object(
        on_all_ranks(
            strategy, lambda: begins_from(other or config, execution, Digests(_cache(dataset))) if first else {}
        )
    )
    for name in sorted({split.name for split in splits}):
        rows = dataset.all_rows(name)
        assert rows is not None
        each = [(column, before) for before in (False, True)[: 1 + bool(spec.before)] for column in spec.columns]
        for column, before in each:
            key = of_before(column) if before else column
            made = {**made_by, "column": key, "objective": spec.name}
            files = ColumnFiles(dataset.folder, dataset.manifest, name, made)
            missing = strategy.broadcast_object(on_all_ranks(strategy, files.missing if first else list))
            if missing:
                say(f"computing `{key}` of {len(rows):,} rows with {model_of_reference(config)}, once")
                if reference is None:
                    assert other is not None
                    reference = Reference(load(other))
            pack = plan_packs if execution.packs else equal_length_batches
            for at in range(0, len(missing), strategy.world_size):
                assert reference is not None
                parts = missing[at : at + strategy.world_size]
                _compute(column, files, parts, reference, rows, strategy, pack, config.data.max_length, before)
            read = on_all_ranks(strategy, files.read)
            for split in splits:
                if split.name == name:
                    split.columns[key] = read
            if missing and "preference" in (spec.rows or ()):
                rows.columns[key] = read
                say(f"{name}: {reference_remark(rows, key)[0]}")


def _drops_adapter(config: Config) -> bool:
    """Whether the reference is the model without its adapter. Before the first step a new LoRA changes no bit of it."""
    settings, adapter = config.preference, config.adapter
    if settings.names_model or adapter.method == "none":
        return False
    is_new = adapter.start_from is None
    if settings.reference_in_step:
        return settings.reference == "base" or is_new
    return settings.reference == "base" and not (is_new and adapter.method in ("lora", "rslora"))


def _compute(
    column: str,
    files: ColumnFiles,
    parts: list[int],
    reference: Reference,
    rows: PreparedSplit,
    strategy: Strategy,
    pack: Callable[[IntArray, int], PackPlan],
    capacity: int,
    before: bool,
) -> None:
    """Compute and write parts of a column, each rank one; the packs of fewer parts are dealt out to all ranks, so packs
    and numbers are the same with any number of them. A collective."""
    plans, values = list[list[list[int]]](), dict[int, Floats]()
    task = reference.task
    collate: Callable[..., Any] = partial(task.collate, before=True) if before else task.collate
    for part in parts:
        numbers = files.rows(part)
        groups = Groups(np.cumsum([0, *rows.group_sizes(numbers)]))
        each_row = rows.lengths[numbers.start : numbers.stop]
        if before:
            each_row = np.array([len(task.objective.row_before(rows, number)[0]) for number in numbers])
        lengths = groups.sums(each_row)
        plan = pack(lengths, max(capacity, int(lengths.max()))).in_rows(groups)
        plans.append([[numbers.start + at for at in plan.pack(number)] for number in range(len(plan))])
    is_shared = len(parts) < strategy.world_size
    if is_shared:
        packs = [each for plan in plans for each in plan]
        plans = [packs[rank :: strategy.world_size] for rank in range(strategy.world_size)]
    own = plans[strategy.rank]
    others: list[list[int]] = max(plans, key=len) if strategy.lockstep else []
    for some, dummy in zip_longest(own, others):
        numbers_S = some or dummy
        batch = collate(rows, numbers_S).to(strategy.device)
        # The other ranks communicate in every forward pass, so this one takes part.
        outputs = reference.column(column, batch)
        if some:
            each = np.split(outputs.cpu().numpy(), np.cumsum(batch.targets_per_row)[:-1])
            values |= dict(zip(some, each, strict=True))

    if is_shared:
        gathered = strategy.all_gather_object({row: each.tolist() for row, each in values.items()})
        values = {row: np.array(each, np.float32) for of_rank in gathered for row, each in of_rank.items()}

    def write() -> None:
        if strategy.rank < len(parts):
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
    began = "none" if _drops_adapter(config) else began
    settings = adapter.model_dump(mode="json", exclude={"start_from", "dropout"})
    return {
        "model": _files_of(model.name, folder_of(model), digests),
        "settings": model.model_dump(mode="json", exclude={"name", "chat_template", "chat_template_arguments"}),
        "adapter": None if is_base else began or [settings, config.run.seed],
        "precision": [execution.precision, execution.bits, execution.weights],
        "seed": config.run.seed if model.new_tokens else None,
    }


def files_of_reference(config: Config, dataset: PreparedDataset) -> tuple[str, str]:
    """Where the reference is, by the field that names it, and a digest of its files; both empty without a reference,
    and for one of the Hub."""
    settings, begun = config.preference, reference_run(config) or config
    keeps = settings.names_model or settings.reference == "start"
    place = (begun.adapter.start_from if keeps else None) or begun.model.name
    if not objective_spec(config).columns or not Path(place).is_dir():
        return "", ""
    field = "preference.reference" if settings.names_model else "adapter.start_from"
    where = f"{field if place != config.model.name else 'model.name'}={place}"
    return where, fingerprint({"files": _files_of(place, Path(place), Digests(_cache(dataset)))})


def _cache(dataset: PreparedDataset) -> Path | None:
    """Of digests, beside prepared rows that lie on this machine."""
    return None if dataset.folder.is_remote else Path(dataset.folder.root).parent / ".digests.jsonl"


def _files_of(name: str, folder: Path | None, digests: Digests) -> list[list[str]] | str:
    """Name and digest of each file of a model; the name where they cannot be told."""
    if folder is None:
        return digests.of(name) if Path(name).is_file() else name
    files = sorted(file for file in folder.iterdir() if file.name.endswith(_WEIGHTS))
    return [[file.name, digests.of(file.resolve())] for file in files]
