"""What one rank builds before its first step: data, model, state and loop, with fakes that write down what they get."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.checkpoint import Checkpoint
from finray.config.load import build_config
from finray.config.resolved import PreparedRun, Resolved
from finray.errors import DataError, ModelError
from finray.training import assemble
from finray.training.state import TrainState

CPU = torch.device("cpu")
LENGTHS = [10, 8, 6, 4, 12, 12, 2]


def config(**sections: Any) -> Any:
    plain: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d", "eval_ratio": 0.5}, "run": {"seed": 9}}
    for name, section in sections.items():
        plain[name] = {**plain.get(name, {}), **section}
    return build_config(plain, source="test")


def resolved(**fields: Any) -> Resolved:
    known = {"global_batch_size": 3, "epochs": 2.0, **fields}
    return Resolved("bf16", None, "finray_packed", known.pop("packs", True), "ddp", False, **known)


def key(*parts: object) -> int:
    """As docs/formats.md says: the first eight bytes of the SHA-256 of the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def strategy(rank: int = 1, **fields: Any) -> Any:
    """One of three ranks; the others have the same values, and rank 0 what this one has."""
    plain = {
        "rank": rank,
        "world_size": 3,
        "device": CPU,
        "parameter_device": CPU,
        "lockstep": False,
        "shards_weights": False,
    }
    plain |= {"all_gather_object": lambda value: [value] * 3, "broadcast_object": lambda value: value}
    plain["broadcast_parameters"] = lambda parameters: None
    return SimpleNamespace(**{**plain, **fields})


class Rows:
    """A split of rows with these lengths, of which every token but the first is a target."""

    def __init__(self, lengths: list[int], name: str = "rows") -> None:
        self.lengths = np.array(lengths)
        self.supervised = self.lengths - 1
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
    collate=lambda split, rows: (split.name, tuple(rows)), weight=lambda split: split.lengths * 0.5
)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("lockstep", [True, False])
def test_the_training_data_of_a_rank_are_packs_of_the_length_that_was_decided(packing: bool, lockstep: bool) -> None:
    asked: list[Any] = []

    def splits(data: Any, *, seed: int) -> Any:
        asked.append((data, seed))
        return SimpleNamespace(train=Rows(LENGTHS), eval="held out")

    settings = config(data={"packing": packing, "max_length": 12}, train={"micro_batch_size": 2})
    ours = strategy(lockstep=lockstep)
    dataset: Any = SimpleNamespace(splits=splits)
    known = resolved(packs=packing, pack_length=18)
    loader, held_out, steps = assemble._data(settings, known, TASK, dataset, ours)
    assert asked == [(settings.data, 9)]
    assert held_out == "held out"
    # 54 tokens in packs of 18, twice; or seven rows twice, in steps of three.
    assert (len(loader.plan), loader.order.total, steps) == ((3, 6, 2) if packing else (7, 14, 5))
    assert sorted(row for item in range(len(loader.plan)) for row in loader.plan.pack(item)) == list(range(7))
    assert loader.order.batch(0, 3) == order_of(len(loader.plan))[:3]
    assert (loader.global_batch_size, loader.micro_batch_size) == (3, 2)
    assert (loader.rank, loader.world_size, loader.lockstep) == (1, 3, lockstep)
    assert (loader.rows_apart, loader.pin) == (not packing, False)
    assert loader.collate([4, 2]) == ("rows", (4, 2))
    assert loader.weight.tolist() == [length * 0.5 for length in LENGTHS]
    # Without such a length it is that of the rows; and steps may be given instead of epochs.
    settings = config(data={"packing": packing, "max_length": 12}, train={"max_steps": 4})
    ours = strategy(device=torch.device("cuda"))
    loader, _, steps = assemble._data(settings, resolved(packs=packing), TASK, dataset, ours)
    assert (len(loader.plan), loader.order.total, steps, loader.pin) == (5 if packing else 7, None, 4, True)


def order_of(count: int) -> list[int]:
    """The first epoch's order, as docs/formats.md says: items by the SplitMix64 of their place in a keyed stream."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(value: int) -> int:
        z = (value + gamma) & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    start = key("epoch", 9, 0)
    return sorted(range(count), key=lambda item: mix((start + item * gamma) & mask))


@pytest.mark.parametrize("packs", [True, False])
def test_held_out_rows_are_a_sample_and_packed_where_that_is_possible(packs: bool) -> None:
    settings = config(data={"packing": False, "max_length": 24}, evaluation={"max_rows": 6})
    held_out: Any = Rows(LENGTHS)
    found = assemble._held_out(settings, resolved(packs=packs), TASK, held_out, strategy(lockstep=True))
    # Of rows of 10, 8, 6, 4, 12 and 12 tokens; alone where lengths may not differ.
    packed = [sorted(found.plan.pack(item)) for item in range(len(found.plan))]
    assert sorted(packed) == ([[0, 1, 2], [3], [4, 5]] if packs else [[0], [1], [2], [3], [4, 5]])
    assert (found.rows, found.held_out, found.weight) == (6, 7, 52 - 6)
    assert (found.rank, found.world_size, found.lockstep) == (1, 3, True)
    assert found.collate([3]) == ("rows 6 9", (3,))


def test_answers_are_asked_for_a_sample_where_somebody_answers() -> None:
    def answering(task: Any, split: Any, ours: Any) -> Any:
        return task, split.name, ours

    settings, ours, held_out = config(evaluation={"generate_rows": 2}), strategy(), Rows(LENGTHS)
    found: Any = assemble._answers(settings, TASK, held_out, ours, answering)  # type: ignore[arg-type]
    assert found() == (TASK, "rows 2 9", ours)
    assert assemble._answers(settings, TASK, None, ours, answering) is None  # type: ignore[arg-type]
    assert assemble._answers(settings, TASK, held_out, ours, None) is None  # type: ignore[arg-type]
    assert assemble._answers(config(), TASK, held_out, ours, answering) is None  # type: ignore[arg-type]
    with pytest.raises(DataError, match="plain text, which has no prompts"):
        assemble._answers(settings, TASK, Rows([0, 0]), ours, answering)  # type: ignore[arg-type]


class Tokenizer:
    def __init__(self, size: int, *added: int) -> None:
        self.size, self.added_tokens_decoder = size, dict.fromkeys(added, "x")

    def __len__(self) -> int:
        return self.size

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"<{number}>"


@pytest.mark.parametrize(
    ("tokenizer", "looked"),
    [(Tokenizer(10), False), (Tokenizer(11), True), (Tokenizer(4, 9), False), (Tokenizer(4, 2, 10), True)],
)
@pytest.mark.parametrize("nested", [True, False])
def test_rows_are_looked_through_only_where_the_tokenizer_knows_more_than_the_model(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, looked: bool, nested: bool
) -> None:
    asked: list[int] = []
    split: Any = SimpleNamespace(beyond=lambda size: asked.append(size))
    monkeypatch.setattr(assemble, "load_tokenizer", lambda model: tokenizer)
    own = SimpleNamespace(vocab_size=10)
    whole = SimpleNamespace(get_text_config=lambda: own, vocab_size=3) if nested else own
    task: Any = SimpleNamespace(model=SimpleNamespace(config=whole))
    assert assemble._tokenizer(config(), task, [None, split]) is tokenizer
    assert asked == [10] * looked
    # A user's own model may say nothing of its size.
    for model in (SimpleNamespace(), SimpleNamespace(config=SimpleNamespace())):
        task = SimpleNamespace(model=model)
        assert assemble._tokenizer(config(), task, [split]) is tokenizer
    assert asked == [10] * looked


def test_a_row_with_a_token_that_has_no_embedding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "load_tokenizer", lambda model: Tokenizer(2000))
    split: Any = SimpleNamespace(
        beyond=lambda size: 0, row=lambda number: (np.array([4, 1300, 7]), None), where=lambda number: f"row {number}"
    )
    task: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=1200)))
    with pytest.raises(ModelError) as caught:
        assemble._tokenizer(config(), task, [split])
    assert "contains `<1300>`, which has no embedding: its id is 1300, and the model has 1,200 rows" in str(
        caught.value
    )
    assert caught.value.where == "row 0"


# --- model ------------------------------------------------------------------------------------------------------------


# --- state ------------------------------------------------------------------------------------------------------------


class Resuming:
    """What a rank finds at its start: checkpoints on storage, and one in the memory of the cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, rank: int, is_remote: bool) -> None:
        self.said: list[Any] = []
        self.stored: list[int] = []
        self.on_storage: int | None = None
        self.in_memory: dict[int, int] = {}
        self.tmp_path = tmp_path
        self.store: Any = SimpleNamespace(
            run_dir=tmp_path, steps=lambda: self.stored, drop_after=lambda step: self.said.append(("dropped", step))
        )
        split = SimpleNamespace(prefetch=lambda rows: self.said.append(("fetched", rows)))
        loader = SimpleNamespace(split=split, rows_from=lambda position: f"rows from {position}")
        task = SimpleNamespace(layout="layout", initialized_parameters=lambda: "new parameters")
        dataset = SimpleNamespace(content="content", folder=SimpleNamespace(is_remote=is_remote))
        self.loaded: Any = SimpleNamespace(
            prepared=PreparedRun("there", resolved()),
            task=task,
            loader=loader,
            dataset=dataset,
            optimizer="opt",
            steps=12,
        )
        self.config = config()
        self.strategy = strategy(rank, broadcast_parameters=lambda given: self.said.append(("equal", given)))
        for name in ("fetch_newest", "find_latest", "restore"):
            monkeypatch.setattr(assemble, name, getattr(self, name))
        monkeypatch.setattr(assemble.extending, "resume_candidates", lambda store, loader, content: [1, 3, 2])
        monkeypatch.setattr(assemble.extending, "extend_run", self.extend_run)
        monkeypatch.setattr(assemble, "require_same_data", lambda *given: self.said.append(("same", *given)))

    def fetch_newest(self, memory: Any, ours: Any, run_dir: Path, *, after: int, warn: Any) -> Checkpoint | None:
        assert (memory, ours, run_dir, warn) == ("memory", self.strategy, self.tmp_path, print)
        self.said.append(("in memory after", after))
        step = self.in_memory.get(after)
        if step is None:
            return None
        folder = self.tmp_path / f"memory-{step}"
        folder.mkdir()
        return Checkpoint(folder, step, ())

    def find_latest(self, store: Any, ours: Any, warn: Any, *, steps: list[int]) -> Checkpoint | None:
        assert (store, ours, warn) == (self.store, self.strategy, print)
        self.said.append(("on storage", steps))
        return None if self.on_storage is None else Checkpoint(self.tmp_path / "storage", self.on_storage, ())

    def restore(self, found: Checkpoint, layout: Any, optimizer: Any) -> TrainState:
        assert (layout, optimizer) == ("layout", "opt")
        self.said.append(("restored", found.path.name))
        return TrainState(step=found.step, position=10 * found.step, data="trained on")

    def extend_run(self, *given: Any, newest: int, run_dir: Path) -> tuple[int, list[str]]:
        settings, known, state, loader, steps = given
        assert (settings, loader, run_dir) == (self.config, self.loaded.loader, self.tmp_path)
        assert known == self.loaded.prepared.resolved
        self.said.append(("goes on", state.step, steps, newest))
        return 15, ["longer"]

    def run(self, memory: Any) -> tuple[TrainState, list[str]]:
        return assemble._resume(self.config, self.loaded, self.store, self.strategy, print, memory)


@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_without_a_checkpoint_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, is_remote: bool
) -> None:
    found = Resuming(monkeypatch, tmp_path, rank=rank, is_remote=is_remote)
    state = TrainState(random_key=key(9, "dropout"), data="content", total_steps=12)
    assert found.run(None) == (state, [])
    fetched = [("fetched", "rows from 0")] if is_remote else []
    assert found.said == [("on storage", [1, 3, 2] if rank == 0 else []), *fetched, ("equal", "new parameters")]


@pytest.mark.parametrize(
    ("rank", "on_storage", "in_memory", "restored", "looked"),
    [
        # The newest on storage is of step 3, as rank 0 knows.
        (0, 3, None, "storage", [("on storage", [1, 3, 2])]),
        (1, 3, None, "storage", [("on storage", [])]),
        (0, 3, {}, "storage", [("in memory after", 3), ("on storage", [1, 3, 2])]),
        (0, 3, {3: 5}, "memory-5", [("in memory after", 3)]),
        # That one is damaged: what is in memory may be newer than what is left.
        (0, 1, {1: 2}, "memory-2", [("in memory after", 3), ("on storage", [1, 3, 2]), ("in memory after", 1)]),
        (0, 1, {}, "storage", [("in memory after", 3), ("on storage", [1, 3, 2]), ("in memory after", 1)]),
        (0, 1, None, "storage", [("on storage", [1, 3, 2])]),
    ],
)
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rank: int,
    on_storage: int,
    in_memory: dict[int, int] | None,
    restored: str,
    looked: list[Any],
) -> None:
    found = Resuming(monkeypatch, tmp_path, rank=rank, is_remote=True)
    found.on_storage, found.in_memory, found.stored = on_storage, in_memory or {}, [1, 4]
    state, notes = found.run(None if in_memory is None else "memory")
    step = int(restored.partition("-")[2] or on_storage)
    from_memory = [f"loaded the checkpoint of step {step} from the cluster's memory"]
    assert notes == [*(from_memory if "memory" in restored else []), "longer"]
    assert (state.step, state.total_steps) == (step, 15)
    assert found.said == [
        *looked,
        ("restored", restored),
        ("same", "trained on", found.loaded.dataset, found.config),
        ("goes on", step, 12, max(step, 4) if rank == 0 else 0),
        *([("dropped", step)] if rank == 0 else []),
        ("fetched", f"rows from {10 * step}"),
        ("equal", "new parameters"),
    ]
    # What came out of memory was a copy.
    assert list(tmp_path.glob("memory-*")) == []


# --- loop -------------------------------------------------------------------------------------------------------------
