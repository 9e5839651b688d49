"""The estimate of a worker's peak: what each choice does to each part, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finray.planning.activations import product_bytes
from finray.planning.blueprint import Block, Blueprint, LinearShape, Norms
from finray.planning.estimate import (
    bucket_bytes,
    estimate,
    gathered_bytes,
    gradient_bytes,
    logit_bytes,
    weight_bytes,
)
from finray.planning.setup import Setup, Workload

H, WIDE, VOCABULARY, LAYERS = 1024, 4096, 32_000, 8
ATTENTION = Block(
    "attention",
    tuple(LinearShape(name, H, H) for name in ("q_proj", "k_proj", "v_proj")),
    LinearShape("o_proj", H, H),
    LAYERS,
)
MLP = Block(
    "mlp",
    (LinearShape("gate_proj", H, WIDE), LinearShape("up_proj", H, WIDE)),
    LinearShape("down_proj", WIDE, H),
    LAYERS,
)
LAYER = 4 * H * H + 3 * H * WIDE + 2 * H
BASE = LAYERS * LAYER + VOCABULARY * H + H
FULL = Blueprint(
    parameters=BASE,
    trainable=BASE,
    adapter=0,
    embedding=VOCABULARY * H,
    vocabulary=VOCABULARY,
    hidden=H,
    layers=LAYERS,
    layer=LAYER,
    heads=16,
    context=4096,
    learned_positions=False,
    tied=True,
    plain_head=True,
    head_is_adapted=False,
    blocks=(ATTENTION, MLP),
    norms=(Norms(H, 2 * LAYERS, True),),
    final_norm_is_composed=True,
    activation="silu",
    softcap=False,
    window=None,
    rank=0,
)
LORA = FULL.with_lora(16)
WORK = Workload((1024,), 800)
GPU = Setup(device="cuda", precision="bf16", workers=4)


def part(blueprint: Blueprint, setup: Setup, name: str, work: Workload = WORK) -> int:
    return estimate(blueprint, setup, work).parts.get(name, 0)


def test_the_total_is_the_sum_of_the_parts_of_the_largest_phase() -> None:
    found = estimate(LORA, Setup(), WORK)
    assert found.total == sum(found.parts.values()) == found.phases[found.phase] == max(found.phases.values())
    assert found.allocated == found.total - found.parts["process"] - found.parts["heap holes"]


def test_state_of_full_weights_and_of_an_adapter() -> None:
    assert part(FULL, GPU, "weights") == 4 * BASE
    assert part(FULL, GPU, "optimizer") == 8 * BASE
    adapter = 16 * LAYERS * (4 * 2 * H + 3 * (H + WIDE))
    assert LORA.adapter == adapter
    assert part(LORA, GPU, "weights") == 2 * BASE
    assert part(LORA, GPU, "adapter") == 4 * adapter
    assert part(LORA, GPU, "optimizer") == 8 * adapter


def test_a_checkpoint_is_copied_by_the_workers_together_in_the_memory_of_the_cpu() -> None:
    assert part(FULL, Setup(), "checkpoint copy") == 0
    assert part(FULL, Setup(copies=True), "checkpoint copy") == 12 * BASE
    assert part(FULL, Setup(copies=True, workers=4, strategy="fsdp"), "checkpoint copy") == 3 * BASE
    assert part(LORA, Setup(copies=True, workers=2), "checkpoint copy") == (4 + 8 / 2) * LORA.adapter
    assert part(FULL, replace(GPU, copies=True), "checkpoint copy") == 0


@pytest.mark.parametrize(
    ("optimizer", "low", "high"), [("adamw_8bit", 2.0, 2.1), ("muon", 4.0, 5.5), ("adafactor", 0.0, 0.1)]
)
def test_optimizers_keep_as_much_as_they_do(optimizer: str, low: float, high: float) -> None:
    each = part(FULL, replace(GPU, optimizer=optimizer), "optimizer") / BASE
    assert low <= each <= high


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer"),
    [
        ("ddp", 4 * BASE, 4 * BASE, 8 * BASE),
        ("fsdp", BASE, BASE, 2 * BASE),
        # DeepSpeed computes with bf16 weights and gradients, and keeps fp32 weights beside the two moments.
        ("zero1", 2 * BASE, 2 * BASE, 3 * BASE),
        ("zero2", 2 * BASE, BASE // 2, 3 * BASE),
        ("zero3", BASE // 2, BASE // 2, 3 * BASE),
    ],
)
def test_what_four_workers_share(strategy: str, weights: int, gradients: int, optimizer: int) -> None:
    setup = replace(GPU, strategy=strategy)
    assert weight_bytes(FULL, setup) == weights
    assert gradient_bytes(FULL, setup) == gradients
    assert part(FULL, setup, "optimizer") == optimizer


def test_hybrid_sharding_shares_a_copy_between_a_part_of_the_workers() -> None:
    hybrid, two = (replace(GPU, strategy="fsdp", **how) for how in ({"shards": 2}, {"workers": 2}))
    assert weight_bytes(FULL, hybrid) == weight_bytes(FULL, two) == 2 * BASE
    assert part(FULL, hybrid, "optimizer") == 4 * BASE


def test_alone_nothing_is_shared_summed_or_gathered() -> None:
    for strategy in ("ddp", "zero3"):
        alone = replace(GPU, strategy=strategy, workers=1)
        assert weight_bytes(FULL, replace(alone, precision="fp32")) == 4 * BASE
        # DeepSpeed updates from a copy of the gradients all the same.
        assert bucket_bytes(FULL, alone) == (4 * BASE if strategy == "zero3" else 0)
        assert gathered_bytes(FULL, alone) == 0
    # FSDP copies even what it has.
    alone = replace(GPU, strategy="fsdp", workers=1)
    assert gathered_bytes(FULL, alone) == gathered_bytes(FULL, replace(GPU, strategy="fsdp")) > 0


def test_buckets_and_gathered_weights() -> None:
    # Gradients are summed where they are, in data parallelism.
    assert bucket_bytes(FULL, GPU) == 0
    assert gathered_bytes(FULL, GPU) == 0
    fsdp = replace(GPU, strategy="fsdp")
    assert gathered_bytes(FULL, fsdp) < gathered_bytes(FULL, replace(fsdp, reshard=False)) == 2 * BASE


def test_quantised_storage_leaves_embeddings_and_norms_as_they_are() -> None:
    linear = LAYERS * (4 * H * H + 3 * H * WIDE)
    assert weight_bytes(LORA, replace(GPU, storage_bits=4)) == linear * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 2 * (
        BASE - linear
    )
    assert weight_bytes(LORA, replace(GPU, storage_bits=8)) > weight_bytes(LORA, replace(GPU, storage_bits=4))
    # Weights that are trained are not quantised.
    assert weight_bytes(FULL, replace(GPU, storage_bits=4)) == weight_bytes(FULL, GPU)


def test_checkpointing_keeps_a_tensor_per_layer() -> None:
    plain, checkpointing = Setup(precision="bf16"), Setup(precision="bf16", checkpointing=True)
    kept = part(LORA, checkpointing, "activations")
    assert kept < part(LORA, plain, "activations") / 4
    assert kept > LAYERS * H * 2 * 1024


def test_selective_checkpointing_lies_between_the_others() -> None:
    def kept(**fields: bool) -> int:
        return estimate(LORA, replace(Setup(precision="bf16"), **fields), WORK).parts["activations"]

    full, selective, plain = kept(checkpointing=True), kept(checkpointing=True, selective=True), kept()
    assert full < selective < plain
    # Seven products and attention, and LoRA's seven narrow ones, of each layer.
    assert product_bytes(LORA, Setup(precision="bf16"), WORK) == 2 * 1024 * LAYERS * (6 * H + 2 * WIDE + 7 * 16)


def test_logits_are_made_in_chunks_whatever_the_number_of_targets() -> None:
    few, many, all_ = (logit_bytes(LORA, GPU, Workload((8192,), targets)) for targets in (100, 2000, 8000))
    assert few < many == all_
    # Without a head that finray understands, there are as many logits as targets.
    own = replace(LORA, plain_head=False)
    assert logit_bytes(own, GPU, Workload((8192,), 8000)) == 80 * logit_bytes(own, GPU, Workload((8192,), 100))


def test_attention_keeps_no_squares_on_a_gpu() -> None:
    short, long = (part(LORA, GPU, "activations", Workload(rows, 1)) for rows in ((512,) * 8, (4096,)))
    assert short == long
    cpu = Setup(precision="bf16")
    short, long = (part(LORA, cpu, "activations", Workload(rows, 1)) for rows in ((128,) * 4, (512,)))
    assert short < long


def test_kernels_are_compiled_for_bf16_on_a_cpu_only_and_not_without_end() -> None:
    many = replace(WORK, token_counts=10_000, row_lengths=1000)
    cpu = Setup(precision="bf16")
    assert 0 < part(LORA, cpu, "compiled kernels") < part(LORA, cpu, "compiled kernels", many) < 2**30
    assert part(LORA, Setup(), "compiled kernels", many) == part(LORA, GPU, "compiled kernels", many) == 0


def test_files_of_another_dtype_count_while_they_are_read() -> None:
    large = Setup(precision="bf16", stored_bytes=100 * BASE, stored_as_computed=False)
    assert estimate(LORA, large, WORK).phase == "load"
    assert estimate(LORA, replace(large, stored_as_computed=True), WORK).phase != "load"


def test_a_heap_without_the_thread_cache_has_fewer_holes() -> None:
    with_cache, without = Setup(), Setup(thread_cache=False)
    assert 0 < part(LORA, without, "heap holes") < part(LORA, with_cache, "heap holes")
    assert estimate(LORA, with_cache, WORK).allocated == estimate(LORA, without, WORK).allocated
