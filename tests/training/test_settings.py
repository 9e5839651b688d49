"""Settings of a run that its curve does not show: each changes what it is about, and nothing where it is not set."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch.utils._python_dispatch import TorchDispatchMode

from finray.errors import ModelError
from finray.models import blocks, liger
from finray.models.artifacts import load_artifact, read_artifact
from finray.training import assemble as assembly
from finray.training.assemble import Assembled
from tests.support import runs, tiny
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    """20 rows, a row at a time."""
    return tiny_run({"data.packing": False, "train.max_steps": 2, "checkpoint.every_steps": 100}, rows=20)


def test_epochs_say_how_many_rows_are_seen(plain: Plain, tmp_path: Path) -> None:
    """1.3 times 20 rows are 26: six steps of four, and one of two."""
    runs.run_alone(changed(plain, {"train": {"max_steps": None, "epochs": 1.3}}), tmp_path)
    steps = runs.values(tmp_path, "samples")
    assert [len(own) for own in steps] == [4] * 6 + [2]
    seen = Counter(row for own in steps for row in own)
    assert sorted(seen) == list(range(20))
    assert Counter(seen.values()) == {1: 14, 2: 6}
    assert runs.values(tmp_path, "epoch")[-1] == 1.3


class Operations(TorchDispatchMode):
    """Counts operations, and notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        self.counts[name] += 1
        if name in ("aten.mm.default", "aten.addmm.default"):
            self.dtypes.add(result.dtype)
        return result


def steps_of(assembled: Assembled) -> Operations:
    with Operations() as seen:
        assembled.loop.run()
    assembled.loop.trackers.finish()
    return seen


@pytest.mark.parametrize(("rows", "passes"), [("auto", 4), (3, 2), (4, 1)])
def test_a_forward_pass_takes_so_many_rows(plain: Plain, tmp_path: Path, rows: Any, passes: int) -> None:
    found = runs.assemble_alone(changed(plain, {"train.micro_batch_size": rows}), tmp_path)
    sizes: list[int] = []
    real = found.loop.task.outputs

    def loss_sum(batch: Any) -> torch.Tensor:
        sizes.append(len(batch.lengths))
        return real(batch)

    found.loop.task.outputs = loss_sum  # type: ignore[method-assign]
    found.loop.run()
    found.loop.trackers.finish()
    assert len(sizes) == 2 * passes
    # A CPU gains nothing by more than one.
    rows = 1 if rows == "auto" else rows
    assert max(sizes) == rows
    assert sum(sizes) == 8
    assert found.header.micro_batch_size == rows
    assert found.header.accumulation == passes


def test_checkpointing_works_again_what_it_says(plain: Plain, tmp_path: Path) -> None:
    """SiLU is neither kept by `selective` nor by `full`; matrix products are kept by the former."""
    counts = {}
    for kind in ("none", "selective", "full"):
        settings = changed(plain, {"train.gradient_checkpointing": kind, "adapter.method": "none"})
        counts[kind] = steps_of(runs.assemble_alone(settings, tmp_path / kind)).counts
    silu = {kind: found["aten.silu.default"] for kind, found in counts.items()}
    # Of two layers, in the passes of eight rows.
    assert silu["selective"] == silu["full"] == silu["none"] + 2 * 8
    products = {kind: found["aten.mm.default"] + found["aten.addmm.default"] for kind, found in counts.items()}
    assert products["selective"] == products["none"] < products["full"]
    # Of an adapter, the product with the frozen weight, to which the others are added.
    added = {}
    for kind in ("none", "selective"):
        settings = changed(plain, {"train.gradient_checkpointing": kind})
        found = steps_of(runs.assemble_alone(settings, tmp_path / f"lora-{kind}")).counts
        added[kind] = found["aten.addmm.default"] + found["aten.addmm_.default"]
    assert added["selective"] == added["none"] > 0


@pytest.mark.parametrize(
    "adapter", [{}, {"modules_to_save": ["lm_head"]}, {"method": "none"}], ids=["lora", "modules to save", "full"]
)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_are_worked_out_and_frozen_weights_kept_in_the_precision(
    plain: Plain, tmp_path: Path, precision: str, dtype: torch.dtype, adapter: dict[str, Any]
) -> None:
    settings = changed(plain, {"train.precision": precision, "adapter": adapter})
    found = runs.assemble_alone(settings, tmp_path)
    stored = {one.requires_grad: set[torch.dtype]() for one in found.loop.task.model.parameters()}
    for one in found.loop.task.model.parameters():
        stored[one.requires_grad].add(one.dtype)
    assert stored == ({} if "method" in adapter else {False: {dtype}}) | {True: {torch.float32}}
    assert dtype in (seen := steps_of(found)).dtypes
    # fp32 only where the logits become a loss, if anywhere.
    assert seen.dtypes <= {dtype, torch.float32}
    assert (found.header.precision, found.loop.state.loss_scale is not None) == (precision, precision == "fp16")


def test_activations_are_moved_where_that_is_asked_for(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a GPU refuses it, so the refusal is taken away."""
    moved: list[torch.Tensor] = []
    real = blocks._pack

    def pack(moves: Any, tensor: torch.Tensor) -> Any:
        moved.append(tensor)
        return real(moves, tensor)

    monkeypatch.setattr(assembly, "refusals_on_cpu", lambda config: [])
    monkeypatch.setattr(blocks, "_pack", pack)
    steps_of(runs.assemble_alone(plain, tmp_path / "kept"))
    assert not moved
    steps_of(runs.assemble_alone(changed(plain, {"train.activation_offload": True}), tmp_path / "moved"))
    assert moved


@pytest.mark.parametrize("compiled", [True, False])
def test_each_layer_is_compiled_where_that_is_asked_for(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    given: list[dict[str, Any]] = []

    def compile_(function: Any, **options: Any) -> Any:
        given.append(options)
        return function

    monkeypatch.setattr(assembly, "refusals_on_cpu", lambda config: [])
    monkeypatch.setattr(torch, "compile", compile_)
    runs.assemble_alone(changed(plain, {"train.compile": compiled}), tmp_path).loop.trackers.finish()
    assert given == ([{"dynamic": True, "backend": "inductor"}] * 2 if compiled else [])


@pytest.mark.parametrize("wanted", [True, False, "auto"])
def test_ligers_layers_are_taken_where_they_are_asked_for(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Any
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(liger, "apply", lambda model, **options: given.append(model))
    found = runs.assemble_alone(changed(plain, {"train.liger": wanted}), tmp_path)
    found.loop.trackers.finish()
    assert given == ([found.loop.task.model] if wanted is True else [])


def test_another_seed_begins_with_another_adapter(plain: Plain, tmp_path: Path) -> None:
    def begun(seed: int, name: str) -> dict[str, torch.Tensor]:
        found = runs.assemble_alone(changed(plain, {"run.seed": seed}), tmp_path / name)
        found.loop.trackers.finish()
        return {name: one for name, one in found.loop.task.layout.tensors().items() if ".lora_A." in name}

    one, again, other = begun(5, "one"), begun(5, "again"), begun(6, "other")
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_revision_of_the_hub_goes_from_the_config_to_whoever_loads_the_adapter(
    plain: Plain, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the weights of another branch an adapter is noise, and nobody would say so."""
    branches = tiny.in_hub_cache(tmp_path / "hub", tokenizer, monkeypatch)
    found = runs.run_alone(changed(plain, {"model": {"name": "org/tiny", "revision": "v1"}}), tmp_path / "run")
    folder, tokens = tmp_path / "run" / "checkpoint-000002", torch.arange(3, 30)[None]
    adapted = PeftModel.from_pretrained(branches["v1"], str(folder)).eval()
    with torch.no_grad():
        expected = adapted(input_ids=tokens).logits
        by_peft = AutoPeftModelForCausalLM.from_pretrained(str(folder)).eval()
        torch.testing.assert_close(by_peft(input_ids=tokens).logits, expected)
        # With finray's notes beside it, and as PEFT alone writes it.
        for notes in (True, False):
            if not notes:
                (folder / "finray.json").unlink()
            again = load_artifact(read_artifact(folder), dtype=torch.float32)
            torch.testing.assert_close(again(input_ids=tokens).logits, expected)
    assert found.header.model == "org/tiny"


def test_a_token_without_an_embedding_is_refused_before_the_first_step(
    tiny_run: Callable[..., Plain], tokenizer: Any, tmp_path: Path
) -> None:
    """Only where a row has it: a token that no row uses does no harm."""
    known, larger = len(tokenizer), copy.deepcopy(tokenizer)
    larger.add_tokens(["<extra>"])
    tiny.save_model("llama", tmp_path / "model", larger, vocab_size=known)
    plain = tiny_run({"train.max_steps": 1}, model=tmp_path / "model")
    runs.run_alone(plain, tmp_path / "without")
    assert len(runs.values(tmp_path / "without", "loss")) == 1
    rows = Path(plain["data"]["source"])
    lines = rows.read_text().splitlines()
    lines[4] = lines[4].replace('"content": "', '"content": "<extra> ', 1)
    rows.write_text("\n".join(lines))
    said = rf"rows.jsonl:5: the row contains `<extra>`, which has no embedding: its id is {known}, .* {known} rows"
    with pytest.raises(ModelError, match=said):
        runs.run_alone(plain, tmp_path / "with")
    assert not (tmp_path / "with" / "metrics.jsonl").exists()
