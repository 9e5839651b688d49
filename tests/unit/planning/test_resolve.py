"""What every `auto` comes to, when a run begins and when it continues."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from finray.config.load import build_config
from finray.config.resolved import BY_ROW, Execution, LabelSet, Packing, Resolved, Steps
from finray.config.schema import Config
from finray.errors import ConfigError
from finray.files import FileKind
from finray.planning import resolve as resolving
from finray.planning.placement import GPUS, Device, Placement
from finray.planning.resolve import resolve

SAFE = Packing(True, "llama")
UNSAFE = Packing(False, "mamba", "it carries a state from token to token")
CPU = Device("cpu", "the machine", 2**33, bf16=False)
ONE, TWO = (Placement(workers, 1, use_gpu=False) for workers in (1, 2))


def gpu(name: str) -> Device:
    return Device("cuda", name, GPUS[name].memory, GPUS[name].bf16)


def config(**sections: Any) -> Config:
    plain = {"run": {"name": "x"}, "model": {"name": "m"}, "data": {"source": "d"}, **sections}
    return build_config(plain, source="test")


def on(device: Device, placement: Placement = ONE, *, packing: Packing | None = SAFE, **sections: Any) -> Execution:
    return resolve(config(**sections), placement, device, packing=packing)


def test_everything_is_decided() -> None:
    assert on(CPU) == Execution("fp32", None, "finray_packed", True, "ddp", False, learning_rate=5e-4)
    assert on(CPU, packing=UNSAFE) == Execution("fp32", None, None, False, "ddp", False, learning_rate=5e-4)
    assert on(CPU, parallel={"strategy": "auto"}).strategy == "ddp"
    kind = FileKind(ConfigError, repair="none")
    known = Resolved.of(on(CPU), Steps(4, 2.0, 100), LabelSet("single_label", ("a", "b")), (1.0, 2.0))
    assert kind.parsed(json.dumps(asdict(known)).encode(), Resolved, "resolved.json") == known


@pytest.mark.parametrize(
    ("device", "wanted", "expected"),
    [
        (CPU, "auto", "fp32"),
        (replace(CPU, bf16=True), "auto", "bf16"),
        (gpu("a100-40gb"), "auto", "bf16"),
        # These emulate bf16, many times slower than fp32.
        (gpu("t4-16gb"), "auto", "fp32"),
        (gpu("v100-32gb"), "auto", "fp32"),
        (gpu("t4-16gb"), "bf16", "bf16"),
        (gpu("a100-40gb"), "fp16", "fp16"),
    ],
)
def test_precision_is_what_the_hardware_has(device: Device, wanted: str, expected: str) -> None:
    assert on(device, train={"precision": wanted}).precision == expected


def test_bits_follow_device_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = {"model": {"name": "m", "quantization": "auto"}}
    gpus = Placement(2, 1, use_gpu=True)
    monkeypatch.setattr(resolving, "find_spec", lambda name: name == "bitsandbytes" or None)
    assert on(gpu("t4-16gb"), replace(gpus, num_workers=1), **auto).bits == 8
    assert on(gpu("t4-16gb"), gpus, **auto).bits is None
    assert on(CPU, **auto).bits is None
    assert on(gpu("t4-16gb"), **auto, adapter={"method": "none"}).bits is None
    assert on(CPU, model={"name": "m", "quantization": "4bit"}).bits == 4


def test_bits_that_auto_comes_to_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package bitsandbytes"):
        on(gpu("t4-16gb"), Placement(1, 1, use_gpu=True), model={"name": "m", "quantization": "auto"})


def test_flash_attention_is_taken_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"model": {"name": "m", "attention": "flash_attention_2"}}
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        on(gpu("a100-40gb"), **named)
    monkeypatch.setattr(resolving, "find_spec", lambda name: name)
    assert on(gpu("a100-40gb")).attention == on(gpu("a100-40gb"), **named).attention == "flash_attention_2"
    assert on(gpu("a100-40gb"), model={"name": "m", "attention": "packed"}).attention == "finray_packed"
    assert on(gpu("a100-40gb"), packing=UNSAFE).attention is None
    # The model's own, whatever there is; but not where every worker would gather weights at times of its own.
    own = replace(SAFE, by_row=True)
    assert on(gpu("a100-40gb"), **named, packing=own).attention == BY_ROW
    stage = {"strategy": "deepspeed", "zero_stage": 2}
    assert on(CPU, parallel=stage, packing=own).packs
    assert not on(CPU, parallel=stage | {"zero_stage": 3}, packing=own).packs
    assert on(CPU, parallel=stage | {"zero_stage": 3}, packing=SAFE).packs
    assert on(gpu("a100-40gb"), train={"precision": "fp32"}).attention == "finray_packed"
    assert on(gpu("t4-16gb"), train={"precision": "fp16"}).attention == on(CPU).attention == "finray_packed"


def test_liger_is_taken_on_a_gpu_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not on(gpu("a100-40gb")).liger
    assert on(CPU, train={"liger": True}).liger
    monkeypatch.setattr(resolving, "find_spec", lambda name: name)
    assert on(gpu("a100-40gb")).liger
    assert not on(CPU).liger
    assert not on(gpu("a100-40gb"), train={"liger": False}).liger


def test_a_run_that_goes_on_keeps_what_changes_its_arithmetic() -> None:
    began = Resolved("fp32", 8, "finray_packed", False, "ddp", False)
    auto = config(model={"name": "m", "quantization": "auto"})
    found = resolve(auto, TWO, replace(CPU, bf16=True), packing=SAFE, before=began)
    assert found == Execution("fp32", 8, None, False, "ddp", False)
    # What the config names is as it names it.
    named = config(train={"precision": "bf16"})
    assert resolve(named, TWO, CPU, packing=SAFE, before=began).precision == "bf16"


@pytest.mark.parametrize(
    ("began", "packing", "message"),
    [
        (Resolved("bf16", None, "finray_packed", True, "ddp", False), SAFE, "has no bf16 arithmetic"),
        (Resolved("fp32", None, "flash_attention_2", True, "ddp", True), SAFE, "FlashAttention 2 needs a GPU"),
        (Resolved("fp32", None, "finray_packed", True, "ddp", True), UNSAFE, "cannot be packed safely"),
    ],
)
def test_what_the_hardware_cannot_go_on_with_is_an_error(began: Resolved, packing: Packing, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(config(), ONE, CPU, packing=packing, before=began)
    assert "--fresh" in str(caught.value)
