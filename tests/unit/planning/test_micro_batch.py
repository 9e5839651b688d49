"""`train.micro_batch_size: auto`: as many packs as keep a GPU busy, and what keeps it from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from finray.checkpoint.rundir import open_run
from finray.config.load import build_config
from finray.config.resolved import Execution, Steps
from finray.data.dataset.prepare import prepare_here
from finray.models.packing_cache import packing_of
from finray.planning.blueprint import model_shape
from finray.planning.memory import RowSample, worst_peak
from finray.planning.micro_batch import choose_micro_batch
from finray.planning.placement import GPUS, Device
from finray.planning.plan import make_plan
from finray.pretrained.bundled_configs import bundled_config
from finray.records import Note
from finray.runtime.driver import decide_from_data
from tests.support import runs

PACKED = Execution("bf16", None, "finray_packed", True, "ddp", True)
KIND = GPUS["h200-141gb"]
H200 = Device("cuda", KIND.name, KIND.memory, tflops=KIND.tflops)
STEPS = Steps(24)


@pytest.mark.parametrize("small", [True, False])
def test_a_small_model_gets_as_many_packs_as_there_are_and_a_large_one_a_single_one(small: bool) -> None:
    plain = {"preset": "smollm2-lora" if small else "llama3-8b-lora", "train": {"micro_batch_size": "auto"}}
    config = build_config({**plain, "data": {"source": "d", "max_length": 4096}}, source="test")
    bundled = bundled_config(config.model)
    assert bundled is not None
    shape = model_shape(bundled, config.adapter, packs=True)

    def chosen(steps: Steps = STEPS, device: Device = H200, how: Execution = PACKED, workers: int = 1) -> int:
        return choose_micro_batch(config, how, steps, device, shape, workers=workers)[0]

    # An 8B model computes 4,096 tokens in twice the time of launching; of 135M even 16,384 would not be enough.
    assert chosen() == (4 if small else 1)
    assert chosen(Steps(24, pack_length=1024)) == (8 if small else 4)
    if not small:
        return
    assert [chosen(workers=count) for count in (2, 3, 5, 12, 24)] == [4, 4, 1, 2, 1]
    cpu = Device("cpu", "the machine", 2**40)
    for other in (cpu, replace(H200, tflops=None), replace(H200, memory=None)):
        assert chosen(device=other) == 1
    for how in (replace(PACKED, packs=False), replace(PACKED, strategy="deepspeed")):
        assert chosen(how=how) == 1
    # They may take 70 % of the memory.
    needed = worst_peak(config, PACKED, shape, H200, workers=1, rows=RowSample(steps=STEPS), size=4)
    assert [chosen(device=replace(H200, memory=int(needed / share))) for share in (0.699, 0.701)] == [4, 2]


def test_a_run_decides_as_its_plan_says_and_keeps_it(tiny_run: Callable[..., runs.Plain]) -> None:
    config = runs.config_of(tiny_run({"train.precision": "auto"}))
    plan, said = make_plan(config, gpu=KIND.name, environ={}), list[Any]()
    assert plan.resolved is not None
    with open_run(config, fresh=False, notify=lambda text: None) as run:
        known = runs.resolved_of(config), prepare_here(config), config, run, said.append, packing_of(config.model)
        decide_from_data(*known, H200, 1)
        kept = run.resolved()
    assert kept is not None
    assert kept.micro_batch_size == plan.resolved.micro_batch_size == 4
    assert any("train.micro_batch_size=4" in one.message for one in said if isinstance(one, Note))
    console = Console(file=StringIO(), width=300)
    plan.print(console)
    assert "4 packs: a step of 4 has no more" in console.file.getvalue()  # type: ignore[attr-defined]
