"""What `parallel.strategy: auto` comes to, in a plan and at the start of a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.checkpoint.rundir import RunDir, open_run
from finray.config.resolved import Resolved, Steps
from finray.planning import placement
from finray.planning import plan as planning
from finray.planning.placement import Placement
from finray.planning.plan import make_plan
from finray.planning.strategy import GIB, Needs, choose_strategy
from finray.records import Note, Record
from finray.runtime import driver
from tests.support import runs, tiny

pytestmark = pytest.mark.long

MIB = 2**20
NEEDS = Needs(replicated=40 * GIB, sharded=20 * GIB, checkpointed=10 * GIB)


@pytest.mark.parametrize(
    ("workers", "available", "before", "strategy", "said"),
    [
        (1, 1, None, "ddp", "one worker"),
        (4, 40, None, "ddp", "need about 40.0 GiB"),
        (4, 39, None, "fsdp", "shares need 20.0 GiB"),
        (4, 15, None, "fsdp", "10.0 GiB with train.gradient_checkpointing"),
        (4, 5, None, "fsdp", "too much as well"),
        (4, None, None, "fsdp", "not known"),
        # A run that goes on keeps its strategy while that fits.
        (4, 40, "fsdp", "fsdp", "the run began with it"),
        (4, 40, "ddp", "ddp", "need about 40.0 GiB"),
        (4, 39, "ddp", "fsdp", "would need"),
        (4, None, "ddp", "ddp", "the run began with it"),
        # One that DeepSpeed shared before is chosen anew.
        (4, 40, "deepspeed", "ddp", "need about"),
    ],
)
def test_choices(workers: int, available: int | None, before: str | None, strategy: str, said: str) -> None:
    has = None if available is None else available * GIB
    found = choose_strategy(NEEDS, workers=workers, available=has, before=before)
    assert found.strategy == strategy
    assert said in found.reason


@pytest.fixture
def plain(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run of two workers whose state is most of what they need, on a machine without GPUs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(planning, "local_gpus", lambda: [])
    monkeypatch.setattr(placement, "machine_cpus", lambda: 4)
    wide = tmp_path / "wide"
    tiny.save_model("llama", wide, tiny.train_tokenizer(), hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    changes = {"adapter.method": "none", "parallel.strategy": "auto", "cluster.num_workers": 2}
    return runs.tiny_run(wide, tiny.write_chat_rows(tmp_path, 8), tmp_path / "out", changes)


def give(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """So much memory for each of two workers."""
    monkeypatch.setattr(placement, "machine_memory", lambda: 2**30 + 2 * mib * MIB)


def test_a_plan_takes_whole_copies_where_they_fit(plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 4096)
    plan = make_plan(runs.config_of(plain), environ={})
    assert plan.starts, plan.problems
    assert plan.strategy is not None
    assert plan.strategy.strategy == "ddp"
    assert plan.memory is not None
    whole = plan.memory.total
    # Just too little for them: shares are taken, and the memory is that of shares.
    give(monkeypatch, int(0.99 * whole / MIB))
    plan = make_plan(runs.config_of(plain), environ={})
    assert plan.starts, plan.problems
    assert plan.strategy is not None
    assert plan.strategy.strategy == "fsdp"
    assert plan.memory is not None
    assert plan.memory.total < 0.9 * whole
    named = make_plan(runs.config_of({**plain, "parallel": {"strategy": "ddp"}}), environ={})
    assert named.strategy is None


def start(plain: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The driver's part up to the workers' start, without a Ray; returns the strategy they would get."""
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 2.0**40}}]
    ray = SimpleNamespace(nodes=lambda: nodes)
    monkeypatch.setattr("finray.runtime.cluster.connected", lambda cluster: nullcontext(ray))

    def hear(record: Record) -> None:
        assert isinstance(record, Note)
        said.append(record.message)

    config = runs.config_of(plain)
    with open_run(config, fresh=False, notify=said.append) as run, driver.connect(config, run, hear) as connected:
        assert connected.placement == Placement(num_workers=2, cpus_per_worker=1, use_gpu=False)
        run.keep_resolved(Resolved.of(connected.execution, Steps()))
        return connected.execution.strategy


def test_a_run_keeps_what_was_chosen(plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    give(monkeypatch, 720)
    assert start(plain, said, monkeypatch) == "fsdp"
    assert "parallel.strategy: auto is fsdp" in said[-1]
    kept = json.loads((RunDir.of(runs.config_of(plain)).path / "resolved.json").read_text())
    assert kept["strategy"] == "fsdp"
    # On a larger machine the run continues as it began; another run does not.
    give(monkeypatch, 4096)
    assert start(plain, said, monkeypatch) == "fsdp"
    assert "the run began with it" in said[-1]
    other = {**plain, "run": {**plain["run"], "name": "other"}}
    assert start(other, said, monkeypatch) == "ddp"
