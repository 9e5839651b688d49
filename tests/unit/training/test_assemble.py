"""What is put around a loop: trackers, the notes in a checkpoint, the numbers of the header."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.data.sampling.groups import Groups
from finray.data.sampling.order import Order
from finray.data.sampling.packing import one_row_each, plan_packs
from finray.errors import DataError, TrainingError
from finray.records import EvalRecord, TrainRecord
from finray.training import outputs
from finray.training.assemble import _take_up, require_same_data
from finray.training.evaluator import CheckpointScores
from finray.training.loader import EvalLoader, StepLoader
from finray.training.state import TrainState


def config(**sections: Any) -> Any:
    plain: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}, "train": {"learning_rate": 0.1}}
    for name, section in sections.items():
        plain[name] = {**plain.get(name, {}), **section}
    return build_config(plain, source="test")


class Noting:
    """A tracker that keeps what it is told."""

    seen: list[tuple[str, Any]] = []  # noqa: RUF012

    def start(self, run: Any) -> None:
        self.seen.append(("start", run))

    def log(self, record: Any) -> None:
        self.seen.append(("log", record))

    def finish(self) -> None:
        self.seen.append(("finish", None))


RESOLVED = Resolved("fp32", None, None, True, "ddp", False)
RECORD = TrainRecord(3, 0.5, 1.0, 1.0, 0.1, 10, 5, "d", 1.0, 0.0, 1, 1.0, samples=(1, 2))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the trackers that were made."""
    names: list[str] = []

    def make(name: str) -> Noting:
        names.append(name)
        return Noting()

    monkeypatch.setattr(outputs, "make_tracker", make)
    Noting.seen = []
    return names


@pytest.mark.parametrize(
    ("tracking", "names"),
    [
        ({}, ["tensorboard"]),
        ({"tensorboard": False}, []),
        ({"trackers": ["m:A", "tensorboard", "m:B", "m:A"]}, ["tensorboard", "m:A", "m:B"]),
    ],
)
def test_every_tracker_is_made_once_and_told_of_the_run(
    tmp_path: Path, made: list[str], tracking: dict[str, Any], names: list[str]
) -> None:
    settings = config(tracking=tracking, cluster={"env": {"SOME_HOST": "h"}})
    header: Any = SimpleNamespace(step=7)
    shown: list[Any] = []
    trackers = outputs.start_trackers(settings, RESOLVED, tmp_path, header, shown.append, lambda text, step=0: None)
    trackers.log(RECORD)
    trackers.finish()
    assert made == names
    starts = [run for what, run in Noting.seen if what == "start"]
    run_id = (tmp_path / "run_id").read_text()
    assert len(run_id) == 32
    assert len(starts) == len(names)
    for run in starts:
        assert (run.run_id, run.run_dir, run.resume_step, run.header) == (run_id, tmp_path, 7, header)
        assert run.config["model"]["name"] == "m"
    # Trackers and the file have the rows of each step; who shows the run has no use for them.
    assert [record.samples for what, record in Noting.seen if what == "log"] == [(1, 2)] * len(names)
    assert [record.samples for record in shown] == [None]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["samples"] == [1, 2]
    # At the next start the run is known by the same name.
    outputs.start_trackers(settings, RESOLVED, tmp_path, header, shown.append, lambda text, step=0: None).finish()
    assert (tmp_path / "run_id").read_text() == run_id


def test_an_id_that_cannot_be_read_says_what_to_do(tmp_path: Path, made: list[str]) -> None:
    (tmp_path / "run_id").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TrainingError) as caught:
        outputs.start_trackers(config(), RESOLVED, tmp_path, SimpleNamespace(step=0), print, print)  # type: ignore[arg-type]
    assert "delete the file" in str(caught.value.repair)


@pytest.mark.parametrize(("bits", "said"), [(None, "none"), (4, "4bit"), (8, "8bit")])
def test_the_notes_of_a_checkpoint_are_what_a_later_command_needs(tmp_path: Path, bits: int | None, said: str) -> None:
    saved: list[str] = []
    tokenizer = SimpleNamespace(save_pretrained=saved.append)
    model = {"revision": "r", "new_tokens": ["<a>"], "chat_template_arguments": {"enable_thinking": False}}
    settings = config(model=model, data={"system": "Be brief.", "tool_format": "hermes"})
    dataset: Any = SimpleNamespace(kind=lambda: "chat")
    resolved: Any = SimpleNamespace(bits=bits, problem=None)
    outputs.save_extras(settings, dataset, resolved, tokenizer)(tmp_path)
    assert saved == [str(tmp_path)]
    assert json.loads((tmp_path / "finray.json").read_text()) == {
        "base_model": "m",
        "revision": "r",
        "rows": "chat",
        "task": "causal_lm",
        "auto_class": "AutoModelForCausalLM",
        "new_tokens": ["<a>"],
        "system": "Be brief.",
        "tool_format": "hermes",
        "chat_template_arguments": {"enable_thinking": False},
        "quantization": said,
    }


@pytest.mark.parametrize("pad", [None, "<pad>"])
def test_the_notes_of_a_classifier_have_its_labels_and_its_tokenizer_can_pad(tmp_path: Path, pad: str | None) -> None:
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda folder: None, pad_token=pad, eos_token="</s>")
    dataset: Any = SimpleNamespace(kind=lambda: "labelled")
    resolved: Any = SimpleNamespace(bits=None, problem="single_label", labels=("no", "yes"))
    outputs.save_extras(config(), dataset, resolved, tokenizer)(tmp_path)
    notes = json.loads((tmp_path / "finray.json").read_text())
    assert (notes["problem"], notes["labels"]) == ("single_label", ["no", "yes"])
    assert tokenizer.pad_token == (pad or "</s>")


def test_a_worker_is_named_as_torchs_launchers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = SimpleNamespace(rank=5, world_size=8)
    for name in ("LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    host = socket.gethostname()
    assert outputs.place_of(strategy) == f"RANK=5 LOCAL_RANK=5 WORLD_SIZE=8 NODE_RANK=0 on {host}"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "2")
    assert outputs.place_of(strategy) == f"RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 NODE_RANK=2 on {host}"
    alone: Any = SimpleNamespace(rank=0, world_size=1)
    assert outputs.place_of(alone) == f"on {host}"


@pytest.mark.parametrize(
    ("weights", "world", "total", "epochs", "accumulation"),
    # Six packs a step in micro-batches of two are three, which two workers share.
    [("fp32", 1, None, 20 * 6 / 4, 3), ("bf16", 2, None, 20 * 6 / 4, 2), ("fp32", 4, 8, 2.0, 1)],
)
def test_the_header_counts_what_is_trained_on(
    weights: str, world: int, total: int | None, epochs: float, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.array([5, 4, 3, 2, 6])
    plan = plan_packs(lengths, 6)
    split: Any = type(
        "Split",
        (),
        {"lengths": lengths, "supervised": lengths - 1, "groups": Groups.single(5), "__len__": lambda self: 5},
    )()
    loader = StepLoader(
        split, plan, Order(len(plan), seed=1, total=total), collate=list, weight=lengths * 0.3,  # type: ignore[arg-type]
        global_batch_size=6, micro_batch_size=2, rank=0, world_size=world,
    )  # fmt: skip
    assert len(plan) == 4
    evaluation = EvalLoader(one_row_each([1] * 3, 4), list, 0, world, False, rows=3, weight=2, held_out=9)  # type: ignore[arg-type]
    resolved: Any = Resolved("bf16", None, "finray_packed", packs=True, strategy="ddp", use_gpu=False)
    object.__setattr__(resolved, "weights", weights)
    task: Any = SimpleNamespace(parameter_counts=lambda: (11, 22))
    strategy: Any = SimpleNamespace(world_size=world, device=torch.device("cpu"))
    state: Any = SimpleNamespace(step=2, total_steps=20)
    found = outputs.make_header(config(data={"packing": True}), resolved, task, strategy, loader, evaluation, state)
    assert (found.step, found.total_steps, found.model) == (2, 20, "m")
    assert (found.trainable, found.parameters) == (11, 22)
    assert found.precision == ("bf16-true" if weights == "bf16" else "bf16")
    assert (found.rows, found.tokens, found.supervised) == (5, 20, 15)
    assert (found.eval_rows, found.held_out) == (3, 9)
    assert (found.packs, found.packing, found.fill) == (4, True, 20 / 24)
    assert (found.world_size, found.global_batch_size, found.micro_batch_size) == (world, 6, 2)
    assert (found.accumulation, found.epochs) == (accumulation, epochs)
    assert (found.device, found.threads) == ("CPU", torch.get_num_threads())
    assert (found.labelled, found.method) == (False, outputs.method_of(config(), resolved))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device.index}")
    object.__setattr__(resolved, "problem", "regression")
    gpu: Any = SimpleNamespace(world_size=world, device=torch.device("cuda", 3))
    labelled = config(model={"task": "sequence_classification"})
    other = outputs.make_header(labelled, resolved, task, gpu, loader, evaluation, state)
    assert (other.labelled, other.device) == (True, "the GPU 3")
    alone = outputs.make_header(config(), resolved, task, strategy, loader, None, state)
    assert (alone.eval_rows, alone.held_out) == (0, 0)
    # Only what begins evaluates first, where that is not switched off or done elsewhere.
    for step, rows, settings, first in (
        (0, evaluation, {}, True),
        (2, evaluation, {}, False),
        (0, None, {}, False),
        (0, evaluation, {"on_start": False}, False),
        (0, evaluation, {"mode": "async"}, False),
    ):
        own, state = config(evaluation=settings), SimpleNamespace(step=step, total_steps=20)
        begun = outputs.make_header(own, resolved, task, strategy, loader, rows, state)
        assert begun.evaluates is first


LORA = {"method": "rslora", "rank": 4, "alpha": 3, "target_modules": ["q_proj", "o_proj"]}


@pytest.mark.parametrize(
    ("adapter", "bits", "said"),
    [
        (LORA, 4, "rslora of rank 4, alpha 3, on q_proj, o_proj, base in 4 bits; adafactor, linear from 0.003; fsdp"),
        ({"method": "none"}, None, "all weights; adafactor, linear from 0.003; fsdp"),
    ],
)
def test_the_header_names_adapter_optimizer_rate_and_strategy(adapter: Any, bits: int | None, said: str) -> None:
    train = {"optimizer": "adafactor", "schedule": "linear", "learning_rate": 3e-3}
    resolved = Resolved("bf16", bits, "finray_packed", packs=True, strategy="fsdp", use_gpu=False, learning_rate=3e-3)  # type: ignore[arg-type]
    assert outputs.method_of(config(adapter=adapter, train=train), resolved) == said


@pytest.mark.parametrize(
    ("format_", "kind", "hint"), [("auto", "chat", True), ("messages", "chat", False), ("auto", "text", False)]
)
def test_other_rows_than_a_run_began_with_are_refused(format_: str, kind: str, hint: bool) -> None:
    dataset: Any = SimpleNamespace(content="b", kind=lambda: kind)
    settings = config(data={"format": format_})
    require_same_data("b", dataset, settings)
    with pytest.raises(DataError, match="has changed since the run began") as caught:
        require_same_data("a", dataset, settings)
    assert caught.value.where == "data.source=d"
    assert ("data.format=prompt_completion" in str(caught.value.repair)) is hint


# --- what is taken up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_evaluations_that_were_out_come_from_the_records_or_are_made_again_or_are_given_up(
    tmp_path: Path, mode: str
) -> None:
    records = [{"kind": "train", "step": 2, "loss": 1.0}, EvalRecord(4, {"eval_loss": 0.5}, 7, 1.0).json()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    submitted: list[tuple[int, Path | None]] = []
    evaluator: Any = SimpleNamespace(submit=lambda step, path: submitted.append((step, path)))
    settings = config(data={"eval_ratio": 0.1}, evaluation={"mode": mode, "every_steps": 2})
    loaded: Any = SimpleNamespace(evaluation="rows", prepared="prepared")
    store: Any = SimpleNamespace(run_dir=tmp_path, steps=lambda: [2, 6], path_of=lambda step: tmp_path / str(step))
    state = TrainState(evaluating=[0, 2, 4, 8])
    made: list[Any] = []
    found, evaluated = _take_up(settings, loaded, state, store, lambda known: (made.append(known), evaluator)[1])
    known = CheckpointScores(4, {"eval_loss": 0.5})
    gone = CheckpointScores(8, failure="it did not finish, and the checkpoint is gone")
    if mode == "async":
        assert (found, made) == (evaluator, ["prepared"])
        assert evaluated == [known, gone]
        assert submitted == [(0, None), (2, tmp_path / "2")]
    else:
        assert (found, made, submitted) == (None, [], [])
        inline = "it did not finish before evaluation.mode became inline"
        assert evaluated == [CheckpointScores(0, failure=inline), CheckpointScores(2, failure=inline), known, gone]
    none = SimpleNamespace(evaluation=None, prepared="prepared")
    assert _take_up(settings, none, state, store, lambda known: evaluator) == (None, [])  # type: ignore[arg-type]
    assert _take_up(settings, loaded, TrainState(), store, None) == (None, [])
