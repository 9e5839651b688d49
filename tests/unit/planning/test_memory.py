"""The largest micro-batch that training would form from rows, and the smallest change with which a run fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from finray.planning.blueprint import model_shape
from finray.planning.estimate import Workload
from finray.planning.findings import Findings
from finray.planning.memory import (
    MemoryChoice,
    RowSample,
    fastest,
    largest_workload,
    plan_memory,
    relief,
    single_changes,
    smallest_change,
)
from finray.planning.placement import Device
from tests.support import runs, tiny


def largest(lengths: list[int], **more: Any) -> Workload:
    options: dict[str, Any] = {
        "max_length": 100,
        "packing": True,
        "micro_batch_size": 1,
        "learned": 0.5,
        "micro_batches": 1000,
        "accumulates": True,
        "weigh": sum,
    }
    return largest_workload(lengths, **{**options, **more})


def test_the_largest_micro_batch() -> None:
    found = largest([10, 70, 30], packing=False)
    assert (found.rows, found.targets, found.token_counts, found.row_lengths) == ((70,), 35, 3, 3)
    # Packs are full, rows are cut, and the heaviest is what weighs most.
    assert sum(largest([60, 40, 10]).rows) == 100
    assert largest([250], packing=False).rows == (100,)
    rows = [100] + [10] * 10
    assert largest(rows, weigh=lambda lengths: sum(n * n for n in lengths)).rows == (100,)
    assert largest(rows, weigh=len).rows == (10,) * 10
    assert sum(largest([50] * 4, packing=False, micro_batch_size=2).rows) == 100
    assert sum(largest([50] * 4, packing=True, micro_batch_size=2).rows) == 200
    # No more shapes than micro-batches are met; unknown lengths are full rows; first tokens are no targets.
    assert largest(list(range(10, 60)), packing=False).token_counts == 50
    assert largest(list(range(10, 60)), packing=False, micro_batches=3).token_counts == 3
    assert largest([], micro_batch_size=3).rows == (100, 100, 100)
    assert largest([60, 40], learned=1.0).targets == 98


# --- the smallest change --------------------------------------------------------------------------------------------

NOW = MemoryChoice(micro_batch_size=8, gradient_checkpointing="none", precision="fp32", max_length=2048, adapter="none")


def size(choice: MemoryChoice) -> float:
    """A memory of our own making: what matters is that every change lessens it."""
    activations = (
        choice.micro_batch_size * choice.max_length * (0.2 if choice.gradient_checkpointing == "full" else 1.0)
    )
    return activations * (0.5 if choice.precision == "bf16" else 1.0) + (1000 if choice.adapter == "lora" else 20_000)


def change(limit: float, longest: int = 2048) -> tuple[str, ...] | None:
    found = smallest_change(NOW, lambda choice: size(choice) <= limit, longest=longest)
    return None if found is None else found.overrides_from(NOW)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1e9, ()),
        (20_000 + 8192, ("train.micro_batch_size=4",)),
        (20_000 + 4096, ("train.micro_batch_size=2",)),
        # Then time, then rounding, and an adapter last.
        (20_000 + 2000, ("train.micro_batch_size=4", "train.gradient_checkpointing=full")),
        (20_000 + 300, ("train.micro_batch_size=1", "train.gradient_checkpointing=full", "train.precision=bf16")),
        (17_385, ("adapter.method=lora",)),
        (10, None),
    ],
)
def test_the_cheapest_change_that_fits(limit: float, expected: tuple[str, ...] | None) -> None:
    assert change(limit) == expected
    # Packs shrink without cost as far as the longest row.
    for longest in (900, 2048):
        assert "data.max_length=1024" in (change(20_000 + 120, longest=longest) or ())


@given(st.integers(1001, 40_000), st.sampled_from([100, 2048]))
def test_no_change_of_those_proposed_is_needless(limit: int, longest: int) -> None:
    found = smallest_change(NOW, lambda choice: size(choice) <= limit, longest=longest)
    if found is None:
        return
    assert size(found) <= limit
    changed = [field.name for field in fields(NOW) if getattr(found, field.name) != getattr(NOW, field.name)]
    for name in changed:
        values = {field.name: getattr(found, field.name) for field in fields(NOW)} | {name: getattr(NOW, name)}
        assert size(MemoryChoice(**values)) > limit


def test_a_search_that_takes_the_last_choice_would_be_seen() -> None:
    needless = MemoryChoice(1, True, "bf16", 128, "lora")
    assert size(needless) <= 28_192
    assert needless.overrides_from(NOW) != change(28_192)


def test_what_costs_time_comes_before_what_costs_workers_and_those_before_another_experiment() -> None:
    now = MemoryChoice(1, "full", "bf16", 128, "none", num_workers=4)
    others = {"cpu_offload": [True], "num_workers": [8, 16], "optimizer": ["adamw_8bit"]}

    def needs(choice: MemoryChoice) -> float:
        return (2 if choice.optimizer == "adamw" else 1) * (10 if choice.cpu_offload else 64) / choice.num_workers

    found = []
    for limit in (15, 9, 2, 1):
        choice = smallest_change(now, lambda choice, limit=limit: needs(choice) <= limit, longest=128, others=others)
        found.append(None if choice is None else choice.overrides_from(now))
    assert found == [
        ("parallel.cpu_offload=true",),
        ("parallel.cpu_offload=true",),
        ("parallel.cpu_offload=true", "cluster.num_workers=16"),
        ("train.optimizer=adamw_8bit", "parallel.cpu_offload=true", "cluster.num_workers=16"),
    ]


def test_weights_in_bf16_come_where_an_8_bit_optimizer_is_not_enough_and_before_an_adapter() -> None:
    now = MemoryChoice(1, "full", "bf16", 128, "none")
    others = {"optimizer": ["adamw_8bit"], "precision": ["bf16-true"]}

    def needs(choice: MemoryChoice) -> float:
        return 2 if choice.adapter == "lora" else 8 if choice.precision == "bf16-true" else weights[choice.optimizer]

    weights = {"adamw": 16, "adamw_8bit": 10}
    found = {}
    for limit in (12, 9, 5):
        choice = smallest_change(now, lambda choice, limit=limit: needs(choice) <= limit, longest=128, others=others)
        found[limit] = None if choice is None else choice.overrides_from(now)
    assert found == {
        12: ("train.optimizer=adamw_8bit",),
        9: ("train.precision=bf16-true",),
        5: ("adapter.method=lora",),
    }
    assert list(single_changes(now, lambda choice: needs(choice) <= 12, others)) == [
        "train.optimizer=adamw_8bit",
        "train.precision=bf16-true",
    ]


def test_the_fastest_choice_that_fits_changes_nothing_that_is_learned() -> None:
    now = MemoryChoice(1, "full", "bf16", 2048, "lora", activation_offload=True)

    def needs(choice: MemoryChoice) -> float:
        kept = {"full": 1, "selective": 3, "none": 5}[choice.gradient_checkpointing]
        return choice.micro_batch_size * kept * (0.5 if choice.activation_offload else 1.0)

    def chosen(limit: float, share: int = 64, waiting: float = 20.0) -> tuple[str, ...]:
        return fastest(now, lambda one: needs(one) <= limit, share=share, waiting=waiting).overrides_from(now)

    assert chosen(0.5) == ()
    assert chosen(5.0, share=1) == ("train.gradient_checkpointing=none", "train.activation_offload=false")
    # From 8 packs of 2,048 tokens on a GPU is busy.
    assert chosen(1000) == (
        "train.micro_batch_size=8",
        "train.gradient_checkpointing=none",
        "train.activation_offload=false",
    )
    assert chosen(8.0) == ("train.micro_batch_size=8", "train.activation_offload=false")
    # One of whose time launching is less needs fewer, or none.
    for waiting, size in ((1.0, ()), (1.7, ("train.micro_batch_size=2",))):
        assert chosen(1000, waiting=waiting)[: len(size)] == size
        assert chosen(1000, waiting=waiting)[len(size) :] == chosen(5.0, share=1)


def test_memory_that_a_run_lacked_is_made_free_by_the_smallest_change(tiny_run: Callable[..., runs.Plain]) -> None:
    """Whatever was estimated: half of the rows at once for a little, no change for more than all."""
    config = runs.config_of(tiny_run({"train": {"micro_batch_size": 4, "gradient_checkpointing": "none"}}))
    device = Device("cuda", "a GPU", 2**34)
    resolved = runs.resolved_of(config)
    assert relief(config, resolved, device, workers=1, less=1) == ("train.micro_batch_size=2",)
    assert relief(config, resolved, device, workers=1, less=2**40) == ()


def test_a_reference_in_the_step_is_a_second_model_unless_it_is_the_first_under_its_adapter(
    tiny_run: Callable[..., dict[str, Any]], tokenizer: Any, tmp_path: Path
) -> None:
    def part(reference: str, **changes: Any) -> int:
        own = {"train.objective": "dpo", "preference": {"reference_in_step": True, "reference": reference}}
        config = runs.config_of(runs.changed(tiny_run(), own, changes))
        shape, device = model_shape(config.model, config.adapter, packs=True), Device("cpu", "", None)
        execution = runs.resolved_of(config)
        return plan_memory(config, execution, shape, device, RowSample(), Findings(), workers=1).parts.get(
            "reference", 0
        )

    def size(model: Any) -> int:
        return 4 * sum(weight.numel() for name, weight in model.named_parameters())

    tiny.save_model("llama", tmp_path / "other", tokenizer, hidden_size=32)
    model, other = (
        AutoModelForCausalLM.from_pretrained(name) for name in (tiny_run()["model"]["name"], tmp_path / "other")
    )
    whole = size(model)
    assert part("start", adapter={"method": "none"}) == whole
    assert part(str(tmp_path / "other"), adapter={"method": "none"}) == size(other) < whole
    assert part("start") == part("base") == 0
    tuned = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    tuned.save_pretrained(tmp_path / "adapter")
    continued = {"start_from": str(tmp_path / "adapter")}
    assert part("start", adapter=continued) == size(tuned) - whole
    assert part("base", adapter=continued) == 0
