"""What one rank reads before its first step: packs of the length that was decided, held-out rows, and a tokenizer that
may know more than the model; whole runs are in tests/training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.config.load import build_config
from finray.config.objectives import SFT
from finray.config.resolved import Resolved
from finray.data.sampling.groups import Groups
from finray.errors import DataError
from finray.training import assemble

LENGTHS = [10, 8, 6, 4, 12, 12, 2]


def config(**sections: Any) -> Any:
    plain: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d", "eval_ratio": 0.5}, "run": {"seed": 9}}
    for name, section in sections.items():
        plain[name] = {**plain.get(name, {}), **section}
    return build_config(plain, source="test")


def resolved(**fields: Any) -> Resolved:
    known = {"global_batch_size": 3, "epochs": 2.0, **fields}
    return Resolved("bf16", None, "finray_packed", known.pop("packs", True), "ddp", False, **known)


def strategy(device: str = "cpu") -> Any:
    """One of three ranks."""
    return SimpleNamespace(rank=1, world_size=3, device=torch.device(device), lockstep=True)


class Rows:
    """A split of rows with these lengths, of which every token but the first is a target."""

    def __init__(self, lengths: list[int], name: str = "rows") -> None:
        self.lengths = np.array(lengths)
        self.supervised = self.lengths - 1
        self.groups = Groups.single(len(lengths))
        self.name = name

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def prompted(self) -> Any:
        """Rows of no tokens stand for those of plain text."""
        return np.flatnonzero(self.lengths)

    def take(self, rows: Any) -> Rows:
        return Rows(self.lengths[rows].tolist(), self.name)

    def sample(self, most: int | None, *, seed: int) -> Rows:
        return Rows(self.lengths[:most].tolist(), f"{self.name} {most} {seed}")


TASK: Any = SimpleNamespace(
    collate=lambda split, rows: (split.name, tuple(rows)),
    objective=SimpleNamespace(weight=lambda split: split.lengths, spec=SFT),
)


@pytest.mark.parametrize("packing", [True, False])
def test_packs_have_the_length_that_was_decided_and_else_that_of_the_rows(packing: bool) -> None:
    dataset: Any = SimpleNamespace(splits=lambda data, *, seed: SimpleNamespace(train=Rows(LENGTHS), eval=None))
    data = {"packing": packing, "max_length": 12}
    loader, _, steps = assemble._data(
        config(data=data), resolved(packs=packing, pack_length=18), TASK, dataset, strategy()
    )
    # 54 tokens in packs of 18, twice; or seven rows twice, in steps of three.
    assert (len(loader.plan), loader.order.total, steps) == ((3, 6, 2) if packing else (7, 14, 5))
    assert (loader.rank, loader.world_size, loader.lockstep, loader.pin) == (1, 3, True, False)
    settings = config(data=data, train={"max_steps": 4})
    loader, _, steps = assemble._data(settings, resolved(packs=packing), TASK, dataset, strategy("cuda"))
    assert (len(loader.plan), loader.order.total, steps, loader.pin) == (5 if packing else 7, None, 4, True)


@pytest.mark.parametrize("packs", [True, False])
def test_held_out_rows_are_a_sample_and_packed_where_that_is_possible(packs: bool) -> None:
    settings = config(data={"packing": False, "max_length": 24}, evaluation={"max_rows": 6})
    held_out: Any = Rows(LENGTHS)
    found = assemble._held_out(settings, resolved(packs=packs), TASK, held_out, strategy())
    # Of rows of 10, 8, 6, 4, 12 and 12 tokens; alone where lengths may not differ.
    packed = [sorted(found.plan.pack(item)) for item in range(len(found.plan))]
    assert sorted(packed) == ([[0, 1, 2], [3], [4, 5]] if packs else [[0], [1], [2], [3], [4, 5]])
    assert (found.rows, found.held_out) == (6, 7)


def test_plain_text_has_no_prompts_to_answer() -> None:
    settings, answering = config(evaluation={"generate_rows": 2}), lambda *given: given
    assert assemble._answers(settings, TASK, Rows(LENGTHS), strategy(), answering) is not None  # type: ignore[arg-type]
    with pytest.raises(DataError, match="plain text, which has no prompts"):
        assemble._answers(settings, TASK, Rows([0, 0]), strategy(), answering)  # type: ignore[arg-type]
