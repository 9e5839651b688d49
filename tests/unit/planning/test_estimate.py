"""The estimate of a worker's peak: what each choice does to each part, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finray.models.head import chunk_rows
from finray.planning.blueprint import Blueprint, LinearShape
from finray.planning.estimate import (
    Setup,
    Workload,
    bucket_bytes,
    cast_bytes,
    estimate,
    gathered_bytes,
    gradient_bytes,
    logit_bytes,
    weight_bytes,
)
from finray.planning.layers import Cost, LayerMemory

H, WIDE, VOCABULARY, LAYERS = 1024, 4096, 32_000, 8
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
    query=H,
    linears=((LinearShape(H, H), 4 * LAYERS), (LinearShape(H, WIDE), 2 * LAYERS), (LinearShape(WIDE, H), LAYERS)),
)
ADAPTER = 16 * LAYERS * (4 * 2 * H + 3 * (H + WIDE))
LORA = replace(FULL, parameters=BASE + ADAPTER, trainable=ADAPTER, adapter=ADAPTER, rank=16)


def linear(width: float) -> Cost:
    return Cost(((0, width, 0.0),))


# Bytes per token, not those of any model: what the layers keep, products among them, their inputs, the rest, working.
KEPT, PRODUCTS, INPUTS, OUTSIDE, WORKING = 500_000, 200_000, 16_000, 6_000, 90_000
MEMORY = LayerMemory(2 * H, *(linear(width) for width in (KEPT, PRODUCTS, INPUTS, OUTSIDE, WORKING)))
WORK = Workload((1024,), 800)
GPU = Setup(device="cuda", precision="bf16", workers=4)


def part(blueprint: Blueprint, setup: Setup, name: str, work: Workload = WORK) -> int:
    return estimate(blueprint, MEMORY, setup, work).parts.get(name, 0)


def test_the_total_is_the_sum_of_the_parts_of_the_largest_phase() -> None:
    found = estimate(LORA, MEMORY, Setup(), WORK)
    assert found.total == sum(found.parts.values()) == found.phases[found.phase] == max(found.phases.values())


def test_state_of_full_weights_and_of_an_adapter() -> None:
    assert part(FULL, GPU, "weights") == 4 * BASE
    assert part(FULL, GPU, "optimizer") == 8 * BASE
    assert part(LORA, GPU, "weights") == 2 * BASE
    assert part(LORA, GPU, "adapter") == 4 * ADAPTER
    assert part(LORA, GPU, "optimizer") == 8 * ADAPTER


def test_weights_without_an_fp32_copy_take_half_of_everything() -> None:
    true = replace(GPU, weights="bf16")
    assert weight_bytes(FULL, true) == gradient_bytes(FULL, true) == 2 * BASE
    assert part(FULL, true, "optimizer") == 4 * BASE
    assert part(FULL, replace(true, strategy="fsdp"), "optimizer") == BASE
    assert part(FULL, GPU, "weights cast") > part(FULL, true, "weights cast") == 0
    assert part(FULL, Setup(copies=True, weights="bf16"), "checkpoint copy") == 6 * BASE
    assert true.arithmetic.copies
    # An adapter stays as it is.
    for name in ("weights", "adapter", "optimizer", "gradients"):
        assert part(LORA, true, name) == part(LORA, GPU, name)


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
    # Quantized weights are gathered as they are stored: of two layers, a quarter of the bytes of their linear layers.
    linear = LORA.linear_weights / LORA.layers
    saved = gathered_bytes(LORA, fsdp) - gathered_bytes(LORA, replace(fsdp, storage_bits=4))
    assert saved == 2 * linear * (2 - 0.5)
    assert gathered_bytes(LORA, replace(fsdp, storage_bits=8)) == gathered_bytes(LORA, fsdp) - 2 * linear
    assert gathered_bytes(FULL, replace(fsdp, storage_bits=4)) == gathered_bytes(FULL, fsdp)


def test_fsdp_sums_an_embedding_and_a_head_that_are_not_tied_one_after_the_other() -> None:
    fsdp, table = replace(GPU, strategy="fsdp"), 128_000 * H
    tied = replace(FULL, parameters=LAYERS * LAYER + table + H, embedding=table, vocabulary=128_000)
    untied = replace(tied, parameters=tied.parameters + table, tied=False)
    assert bucket_bytes(tied, fsdp) == 4 * 2 * (table + H)
    assert bucket_bytes(untied, fsdp) == 4 * (2 * table + H) + 4 * (table + H)


def test_quantized_storage_leaves_embeddings_and_norms_as_they_are() -> None:
    linear = LAYERS * (4 * H * H + 3 * H * WIDE)
    assert weight_bytes(LORA, replace(GPU, storage_bits=4)) == linear * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 2 * (
        BASE - linear
    )
    assert weight_bytes(LORA, replace(GPU, storage_bits=8)) > weight_bytes(LORA, replace(GPU, storage_bits=4))
    # Weights that are trained are not quantized.
    assert weight_bytes(FULL, replace(GPU, storage_bits=4)) == weight_bytes(FULL, GPU)


@pytest.mark.parametrize(
    ("checkpointing", "expected"), [("none", KEPT), ("selective", INPUTS + PRODUCTS), ("full", INPUTS)]
)
def test_what_is_kept_until_the_backward_pass(checkpointing: str, expected: int) -> None:
    found = estimate(LORA, MEMORY, Setup(precision="bf16", checkpointing=checkpointing), WORK)
    # Hidden states at labelled positions, and their gradient.
    picked = 4 * H * 800
    again = WORKING if found.phase == "recompute" else 0
    assert found.parts["activations"] == 1024 * (expected + OUTSIDE + again) + picked
    # Logits are gone when a layer is computed again.
    assert ("logits" in found.parts) == (found.phase == "forward")
    assert ("recompute" in found.phases) == (checkpointing != "none")


def test_the_backward_pass_needs_one_layer_at_a_time() -> None:
    # Gradients of all weights are there at its end only.
    found = estimate(FULL, MEMORY, Setup(), Workload((16,), 8))
    assert found.phase == "backward"
    assert found.parts["activations"] == 16 * WORKING


def test_the_loss_has_a_copy_of_a_trained_heads_weights_in_bf16() -> None:
    setup, many = Setup(precision="bf16"), Workload((4096,), 4000)
    found = estimate(FULL, MEMORY, setup, many)
    assert found.phase == "forward"
    assert found.parts["weights cast"] == cast_bytes(FULL, setup) + 2 * FULL.head
    assert estimate(LORA, MEMORY, setup, many).parts["weights cast"] == cast_bytes(LORA, setup)


def test_costs_are_those_of_the_range_of_each_row() -> None:
    cost = Cost(((10, 1.0, 2.0), (100, 3.0, 0.0)), fixed=5.0)
    assert cost((10, 11, 1000)) == 5 + (10 + 2 * 100) + 33 + 3000


def test_logits_are_made_in_chunks_whatever_the_number_of_targets() -> None:
    few, many, all_ = (logit_bytes(LORA, GPU, Workload((8192,), targets)) for targets in (100, 4000, 8000))
    assert few < many == all_
    # Whole tiles of a GPU's products: 270 rows would take as long as 384. A CPU takes as many as it has memory for.
    words, rows = (49_152, 128_256, 151_936, 248_320, 400_000), (1280, 512, 512, 256, 256)
    for device, expected in (("cuda", rows), ("cpu", (256, 98, 82, 64, 64))):
        assert tuple(chunk_rows(count, device) for count in words) == expected
    wide = replace(LORA, vocabulary=248_320)
    assert logit_bytes(wide, GPU, Workload((8192,), 8000)) == (4 + 4) * 256 * 248_320
    # Without a head that finray understands, there are as many logits as targets.
    own = replace(LORA, chunks_head=False)
    assert logit_bytes(own, GPU, Workload((8192,), 8000)) == 80 * logit_bytes(own, GPU, Workload((8192,), 100))


def test_kernels_are_compiled_for_bf16_on_a_cpu_only_and_not_without_end() -> None:
    many = replace(WORK, token_counts=10_000, row_lengths=1000)
    cpu = Setup(precision="bf16")
    assert 0 < part(LORA, cpu, "compiled kernels") < part(LORA, cpu, "compiled kernels", many) < 2**30
    assert part(LORA, Setup(), "compiled kernels", many) == part(LORA, GPU, "compiled kernels", many) == 0


def test_files_of_another_dtype_count_while_they_are_read() -> None:
    large = Setup(precision="bf16", read_bytes=100 * BASE)
    assert estimate(LORA, MEMORY, large, WORK).phase == "load"
    assert estimate(LORA, MEMORY, replace(large, read_bytes=0), WORK).phase != "load"


# --- offloading -----------------------------------------------------------------------------------------------------


def test_fsdp_with_cpu_offload_keeps_no_share_on_the_gpu() -> None:
    """fp32 weights, their gradients and two moments: sixteen bytes a weight, shared by four workers."""
    setup = replace(GPU, strategy="fsdp", optimizer_offload=True, weight_offload=True)
    found = estimate(FULL, MEMORY, setup, WORK)
    before = estimate(FULL, MEMORY, replace(GPU, strategy="fsdp"), WORK)
    assert found.offloaded == 16 * BASE // 4
    assert before.offloaded == 0
    assert not {"weights", "optimizer"} & found.parts.keys()
    assert found.total < before.total - 12 * BASE // 4


def test_zero_2_with_offload_keeps_the_weights_that_it_computes_with() -> None:
    """bf16 weights stay whole; fp32 masters, two moments and bf16 gradients go."""
    found = estimate(FULL, MEMORY, replace(GPU, strategy="zero2", optimizer_offload=True), WORK)
    assert found.offloaded == (12 + 2) * BASE // 4
    assert found.parts["weights"] == 2 * BASE


def test_offloaded_activations_are_those_of_the_layers() -> None:
    found = estimate(LORA, MEMORY, replace(GPU, activation_offload=True), WORK)
    before = estimate(LORA, MEMORY, GPU, WORK)
    assert found.offloaded == KEPT * 1024
    assert before.total - found.total > 0.9 * (KEPT - WORKING) * 1024
