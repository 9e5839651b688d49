"""What one rank builds before its first step: data, model, state and loop, with fakes that write down what they get."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.checkpoint import Checkpoint
from finray.config.load import build_config
from finray.config.resolved import Resolved, Settled
from finray.errors import ConfigError, DataError, ModelError
from finray.records import Note, RunHeader
from finray.training import assemble
from finray.training.evaluator import Evaluated
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
    return Resolved("bf16", None, "finray_packed", known.pop("packs", True), "ddp", 3, False, **known)


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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize(("model_s", "data_s", "waited"), [(3.0, 8.0, 5.0), (8.0, 3.0, 0.0)])
def test_data_are_opened_beside_the_model_and_only_what_they_take_longer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_remote: bool, model_s: float, data_s: float, waited: float
) -> None:
    said: list[Any] = []

    class Dataset:
        folder = SimpleNamespace(is_remote=is_remote)

        def __init__(self, location: Any, *, local_dir: Path | None) -> None:
            said.append(location)

        def verify(self, **share: int) -> None: ...

        def require_kind(self, spec: Any) -> None:
            said.append(("kind", spec))

        def trust(self) -> None:
            said.append("trusted")

    main = threading.current_thread()

    def clock() -> float:
        return model_s if threading.current_thread() is main else data_s

    def tokenizer(settings: Any, task: Any, splits: list[Any]) -> str:
        said.append(splits)
        return "tokenizer"

    task = SimpleNamespace(spec="spec")
    loader = SimpleNamespace(split="trained")
    known = Settled("there", resolved(global_batch_size=24, epochs=7.0))
    monkeypatch.setattr(assemble, "PreparedDataset", Dataset)
    monkeypatch.setattr(assemble, "_model", lambda *given: (task, "optimizer"))
    monkeypatch.setattr(assemble, "_data", lambda settings, own, *rest: (loader, held_out, own.global_batch_size))
    monkeypatch.setattr(assemble, "_tokenizer", tokenizer)
    monkeypatch.setattr(assemble, "_held_out", lambda settings, own, given, rows, ours: ("share of", rows))
    for held_out in ("rows", None):
        said.clear()
        found = assemble._load(config(), resolved(), lambda: known, strategy(rank), lambda text: None, clock)
        assert said[:3] == ["there", ("kind", "spec"), "trusted"]
        assert said[3:] == ([[] if is_remote else ["trained", held_out]] if rank == 0 else [])
        assert (found.task, found.optimizer, found.loader, found.known) == (task, "optimizer", loader, known)
        assert found.tokenizer == ("tokenizer" if rank == 0 else None)
        assert (found.held_out, found.evaluation) == (held_out, held_out and ("share of", held_out))
        assert (found.steps, found.waited) == (24, waited)
        assert found.config.train.global_batch_size == 24


# --- model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_is_shared_out_filled_and_given_to_its_optimizer(
    monkeypatch: pytest.MonkeyPatch, on_meta: bool, whole: bool
) -> None:
    asked: list[Any] = []

    def make(*given: Any, **options: Any) -> Any:
        asked.append(("task", given[0] is settings, given[1] is known, options))
        return task

    def materialize(*given: Any, **options: Any) -> bool:
        asked.append(("filled", given, options))
        return whole

    def prepare(module: Any, optimizer: Any) -> Any:
        asked.append(("prepared", module, optimizer))
        return "wrapped", "named"

    def trained(*given: Any, **options: Any) -> str:
        asked.append(("optimizer", given, options))
        return "made"

    settings, known = config(adapter={"lora_plus_ratio": 8.0}), resolved()
    task = SimpleNamespace(is_on_meta=on_meta, module="module", model="model", trainable=lambda: {"w": 1})
    monkeypatch.setattr(assemble, "_task", make)
    monkeypatch.setattr(assemble, "blocks_of", lambda model: ["block of", model])
    monkeypatch.setattr(assemble, "roles_of", lambda model: {"role of": model})
    monkeypatch.setattr(assemble, "materialize", materialize)
    monkeypatch.setattr(assemble, "Optimizer", trained)
    warned: list[str] = []
    ours = strategy(shards_weights=on_meta, prepare=prepare, shard=lambda *given: asked.append(("shared out", *given)))
    assert assemble._model(settings, known, ours, warned.append) == (task, "named")
    assert task.module == "wrapped"
    seeds = {"device": CPU, "seed": key(9, "adapter")}
    places = {**seeds, "parameter_device": CPU}
    filled = [("filled", ("model", settings.model, settings.adapter), places)] if on_meta else []
    options = {"lora_plus_ratio": 8.0, "roles": {"role of": "model"}, "seed": key(9, "rounding")}
    assert asked == [
        ("task", True, True, {**seeds, "on_meta": on_meta, "warn": warned.append}),
        ("shared out", "module", ["block of", "model"]),
        *filled,
        ("optimizer", ({"w": 1}, settings.train), options),
        ("prepared", "module", "made"),
    ]
    assert [text.startswith("the weights have different names") for text in warned] == [True] * (on_meta and whole)


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_task_is_built_and_its_model_changed_as_the_config_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked_for: bool
) -> None:
    said: list[Any] = []

    def build(*given: Any, **options: Any) -> Any:
        said.append(("built", given, options))
        return SimpleNamespace(model="model")

    tensors = ["layers.7.weight", "layers.8.weight"] if asked_for else []
    train = {"compile": True, "gradient_checkpointing": "full", "activation_offload": True} if asked_for else {}
    settings = config(train=train, model={"name": str(tmp_path) if asked_for else "org/name"})
    known = resolved(liger=asked_for)
    monkeypatch.setattr(assemble, "task_class", lambda name: SimpleNamespace(build=build))
    monkeypatch.setattr(assemble, "refusals_on_cpu", lambda given: said.append(("refused", given)) or [])
    monkeypatch.setattr(assemble, "stored_weights", lambda folder: f"weights in {folder}")
    monkeypatch.setattr(assemble, "left_out", lambda model, stored: (said.append((model, stored)), tensors)[1])
    monkeypatch.setattr(assemble.liger, "apply", lambda model, **options: said.append(("liger", model, options)))
    monkeypatch.setattr(assemble.dropout, "apply", lambda model: said.append(("dropout", model)))
    monkeypatch.setattr(assemble.frozen, "fuse_biases", lambda model: said.append(("biases", model)))
    monkeypatch.setattr(assemble, "compile_blocks", lambda model: said.append(("compiled", model)))
    monkeypatch.setattr(assemble, "wrap_blocks", lambda model, **options: said.append(("wrapped", model, options)))
    warned: list[str] = []
    options: dict[str, Any] = {"seed": 5, "on_meta": asked_for}
    full = {"checkpointing": "full"}
    for device in (CPU, torch.device("meta")):
        said.clear()
        assemble._task(settings, known, device=device, warn=warned.append, **options)
        assert said == [
            *([("refused", settings)] if device == CPU else []),
            ("built", (settings, known), {"device": device, **options}),
            *([("model", f"weights in {tmp_path}"), ("liger", "model", full)] if asked_for else []),
            *([("dropout", "model"), ("biases", "model")] if device == CPU else []),
            *([("compiled", "model")] if asked_for else []),
            ("wrapped", "model", {"checkpointing": "full" if asked_for else "none", "offload": asked_for}),
        ]
    cut = (
        "2 weights in the model's files are of layers that its `config.json` does not ask for, such as layers.7.weight"
    )
    assert warned == [f"{cut}: a cut model is trained"] * 2 * asked_for
    refusal = ConfigError("not on a CPU")
    monkeypatch.setattr(assemble, "refusals_on_cpu", lambda given: [refusal])
    with pytest.raises(ConfigError, match="not on a CPU"):
        assemble._task(settings, known, device=CPU, warn=warned.append, **options)


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("step", [0, 4])
def test_a_checkpoint_is_evaluated_beside_the_training_with_the_model_that_the_run_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_meta: bool, answers: bool, step: int
) -> None:
    """Step 0 is that model itself: what is drawn for its adapter or head is what the run has drawn."""
    said: list[Any] = []

    class Dataset:
        def __init__(self, location: Any, *, local_dir: Path | None) -> None:
            said.append(("data", location, local_dir))

        def splits(self, data: Any, *, seed: int) -> Any:
            return SimpleNamespace(eval=("held out", data, seed))

    def make(given: Any, own: Any, **options: Any) -> Any:
        assert (given.train.global_batch_size, own) == (24, known.resolved)
        assert options.pop("warn")("what the training has said already") is None
        said.append(("task", options))
        return task

    def load(folder: Path, files: list[str]) -> None:
        said.append(("loaded", folder, files))

    def evaluate(given: Any, ours: Any, loader: Any, told: Any) -> Any:
        assert (given, ours.device, ours.world_size) == (task, CPU, 1)
        said.append(("evaluated", loader.rows))
        told(0.25)
        return {"eval_loss": 1.5}, [[3]]

    def answering(told: Any) -> dict[str, float]:
        said.append("answered")
        told(0.5)
        return {"exact": 0.5}

    def answers_of(given: Any, own: Any, held_out: Any, ours: Any, asked: Any) -> Any:
        assert (own, held_out, ours.device, asked) == (task, ("held out", given.data, 9), CPU, "answering")
        return answering if answers else None

    model = SimpleNamespace(eval=lambda: said.append("without dropout"))
    task = SimpleNamespace(is_on_meta=on_meta, model=model, layout=SimpleNamespace(load=load))
    known = Settled("there", resolved(global_batch_size=24))
    settings = config()
    monkeypatch.setattr(assemble, "PreparedDataset", Dataset)
    monkeypatch.setattr(assemble, "_task", make)
    monkeypatch.setattr(assemble, "evaluate", evaluate)
    monkeypatch.setattr(assemble, "_answers", answers_of)
    monkeypatch.setattr(assemble, "_held_out", lambda given, own, of, rows, ours: SimpleNamespace(rows=rows, weight=77))
    monkeypatch.setattr(assemble, "materialize", lambda *given, **options: said.append(("filled", given, options)))
    monkeypatch.setattr(assemble.manifest, "verify", lambda folder: {"files": [{"path": f"of {folder.name}"}]})
    told: list[Any] = []
    ticks = iter([10.0, 12.3456789])
    passed: Any = {"device": CPU, "answering": "answering", "clock": lambda: next(ticks)}
    passed["told"] = lambda part, share: told.append((part, share))
    checkpoint = tmp_path / "c" if step else None
    found = assemble.evaluate_checkpoint(settings, known, step, checkpoint, **passed)
    metrics = {"eval_loss": 1.5, **({"exact": 0.5} if answers else {})}
    assert found == Evaluated(step, metrics, 77, 2.345679, confusion=[[3]])
    places = {"device": CPU, "seed": key(9, "adapter")}
    assert said == [
        ("task", {**places, "on_meta": False}),
        *([("filled", (model, settings.model, settings.adapter), places)] if on_meta else []),
        *([("loaded", tmp_path / "c", ["of c"])] if step else []),
        ("data", "there", None),
        "without dropout",
        ("evaluated", ("held out", settings.data, 9)),
        *(["answered"] if answers else []),
    ]
    assert told == [("evaluating", 0.25), *([("answering prompts", 0.5)] if answers else [])]


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
            **{"config": config(), "task": task, "loader": loader, "dataset": dataset, "optimizer": "opt", "steps": 12}
        )
        self.strategy = strategy(rank, broadcast_parameters=lambda given: self.said.append(("equal", given)))
        for name in ("fetch_newest", "find_latest", "restore"):
            monkeypatch.setattr(assemble, name, getattr(self, name))
        monkeypatch.setattr(assemble.extending, "by_preference", lambda store, loader, content: [1, 3, 2])
        monkeypatch.setattr(assemble.extending, "go_on", self.go_on)
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

    def go_on(self, *given: Any, newest: int, run_dir: Path) -> tuple[int, list[str]]:
        settings, state, loader, steps = given
        assert (settings, loader, run_dir) == (self.loaded.config, self.loaded.loader, self.tmp_path)
        self.said.append(("goes on", state.step, steps, newest))
        return 15, ["longer"]

    def run(self, memory: Any) -> tuple[TrainState, list[str]]:
        return assemble._resume(self.loaded, self.store, self.strategy, print, memory)


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
        ("same", "trained on", found.loaded.dataset, found.loaded.config),
        ("goes on", step, 12, max(step, 4) if rank == 0 else 0),
        *([("dropped", step)] if rank == 0 else []),
        ("fetched", f"rows from {10 * step}"),
        ("equal", "new parameters"),
    ]
    # What came out of memory was a copy.
    assert list(tmp_path.glob("memory-*")) == []


# --- loop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_shows_the_header_and_what_is_to_be_known_and_starts_the_trackers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int
) -> None:
    settings = config(train={"epochs": 3, "max_steps": 4, "optimizer": "paged_adamw_8bit"})
    names = list(RunHeader.__dataclass_fields__)
    header = RunHeader(**dict.fromkeys(names, 1))
    asked: list[Any] = []

    def make_header(*given: Any) -> RunHeader:
        asked.append(given)
        return header

    def start_trackers(*given: Any) -> str:
        asked.append(given)
        return "trackers"

    def save_extras(*given: Any) -> str:
        asked.append(given)
        return "extras"

    monkeypatch.setattr(assemble, "make_header", make_header)
    monkeypatch.setattr(assemble, "place_of", lambda ours: f"place of {ours.rank}")
    monkeypatch.setattr(assemble, "start_trackers", start_trackers)
    monkeypatch.setattr(assemble, "save_extras", save_extras)
    fields = ("task", "loader", "evaluation", "dataset", "tokenizer")
    known = Settled("there", resolved())
    loaded: Any = SimpleNamespace(config=settings, known=known, **{name: name for name in fields})
    said: list[Any] = []
    ours, state = strategy(rank), TrainState(step=5)
    found = assemble._announce(loaded, tmp_path, ours, state, ["a note"], said.append, print)
    assert found[0].workers == [f"place of {rank}"] * 3
    assert asked[0] == (settings, known.resolved, "task", ours, "loader", "evaluation", state)
    if rank:
        assert (said, len(asked)) == ([], 1)
        assert found[1].start(None) is found[2](tmp_path) is None  # type: ignore[arg-type]
        return
    assert found[1:] == ("trackers", "extras")
    assert asked[1] == (settings, tmp_path, found[0], said.append, print)
    assert asked[2] == (settings, "dataset", known.resolved, "tokenizer")
    paging = "paging has no effect with weights in CPU memory: paged_adamw_8bit is adamw_8bit here"
    assert said == [
        found[0],
        Note("train.max_steps=4 takes the place of train.epochs=3", 5),
        Note("a note", 5),
        Note(paging, 5, "warning"),
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("memory", "every"), [("memory", 6), ("memory", None), (None, 6)])
def test_a_loop_is_given_all_that_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, memory: Any, every: int | None
) -> None:
    built: dict[str, dict[str, Any]] = {}

    def made(name: str) -> Any:
        def make(*given: Any, **options: Any) -> Any:
            built[name] = {**dict(enumerate(given)), **options}
            return SimpleNamespace(follow=lambda: built.setdefault("followed", {}), phases={}, **options)

        return make

    storage = {"in_memory_every": every, "every_steps": 50}
    settings = config(checkpoint=storage, evaluation={"every_steps": 50}, train={"profile": {"steps": [2, 3]}})
    state = TrainState(step=5, total_steps=12, evaluating=[4])
    task = SimpleNamespace(spec=SimpleNamespace(chosen=lambda evaluation: ("best", evaluation)))
    fields = ("optimizer", "loader", "evaluation", "held_out")
    known = Settled("there", resolved())
    loaded = SimpleNamespace(config=settings, known=known, task=task, waited=2.0, **{name: name for name in fields})
    header: Any = SimpleNamespace()
    for name in ("Loop", "CheckpointWriter", "MemoryWriter", "Profiler"):
        monkeypatch.setattr(assemble, name, made(name))
    asked: dict[str, tuple[Any, ...]] = {}

    def answer(name: str, value: Any) -> None:
        def fake(*given: Any) -> Any:
            asked[name] = given
            return value

        monkeypatch.setattr(assemble, name, fake)

    answer("open_store", "store")
    answer("_load", loaded)
    answer("_resume", (state, ["notes"]))
    trackers = SimpleNamespace(keep="keep")
    answer("_announce", (header, trackers, "extras"))
    answer("_take_up", ("background", ["evaluated"]))
    answer("_answers", "answers")
    ticks, said = iter([10.0, 17.0]), list[Any]()
    ours = strategy(rank)
    passed: dict[str, Any] = {
        name: name for name in ("reported", "answering", "evaluator", "has_request", "take_request")
    }
    found = assemble.assemble(
        settings, resolved(), prepared="there", run_dir=tmp_path, strategy=ours, notify=said.append, memory=memory,
        clock=lambda: next(ticks, 99.0), **passed,
    )  # fmt: skip
    assert (found.header, found.loop.phases) == (header, {"load": 7.0 - 2.0})
    assert asked["open_store"] == (tmp_path, None, ours)
    assert asked["_resume"][:3] + asked["_resume"][4:] == (loaded, "store", ours, memory)
    assert asked["_announce"][:6] == (loaded, tmp_path, ours, state, ["notes"], said.append)
    assert asked.get("_take_up") == ((loaded, state, "store", "evaluator") if rank == 0 else None)
    assert asked["_answers"] == (settings, task, "held_out", ours, "answering")
    loop = built["Loop"]
    same = ("optimizer", "loader", "evaluation", "reported", "has_request", "take_request")
    assert {name: loop[name] for name in same} == {name: name for name in same}
    assert (loop["config"], loop["task"], loop["strategy"], loop["state"]) == (settings, task, ours, state)
    assert (loop["total_steps"], loop["precision"], loop["answered"]) == (12, "bf16", "answers")
    assert (loop["trackers"], loop["save_extras"]) == (trackers, "extras")
    assert (loop["evaluator"], loop["evaluated"]) == (("background", ["evaluated"]) if rank == 0 else (None, []))
    assert (loop["clock"](), loop["writer"] is None, "followed" in built) == (99.0, False, True)
    writer = {0: "store", 1: ours, 2: settings.checkpoint, "best": ("best", settings.evaluation), "in_use": [4]}
    assert built["CheckpointWriter"] == {**writer, "before": "keep"}
    profiler = built["Profiler"]
    assert [profiler[at] for at in range(3)] == [settings.train.profile, tmp_path, ours]
    profiler["notify"]("the table")
    assert said == [*([Note("loading m")] if rank == 0 else []), Note("the table")]
    assert ("MemoryWriter" in built) is (loop["memory"] is not None) is (memory is not None and every is not None)
    if "MemoryWriter" in built:
        kept = built["MemoryWriter"]
        assert [kept[at] for at in range(4)] == [memory, ours, tmp_path, every]
        assert (len(kept[5]), kept["records"]) == (32, False)
