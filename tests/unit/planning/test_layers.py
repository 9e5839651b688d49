"""What layers keep, counted on fake tensors, against what autograd keeps of real ones."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from finray.config.schema import AdapterConfig
from finray.data.sampling.collate import collate
from finray.hardware import missing_for_kernels
from finray.models import adapters, attention, cpu_kernels, dropout, fused_lora
from finray.planning.layers import Arithmetic, LayerMemory, LayerProbe
from finray.tasks.causal_lm import CausalLM
from tests.support import tiny

pytestmark = pytest.mark.long

LENGTHS = (60, 300, 27)
# A wide model of two layers, so that what is counted is more than what is not (rotations, row statistics).
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma2": {**WIDE, "sliding_window": 4096},
    "gemma3": {**WIDE, "sliding_window": 4096},
    "gpt2": {"n_embd": 256, "n_head": 8},
    "gpt_neox": {name: size for name, size in WIDE.items() if name not in ("num_key_value_heads", "head_dim")},
}
ELEMENT = {"fp32": 4, "bf16": 2}
KINDS = ("cpu", "cuda")
LORA = AdapterConfig(rank=8)
FULL = AdapterConfig(method="none")


def wrapped(family: str, adapter: AdapterConfig, precision: str, device: torch.device) -> tuple[Any, Any]:
    """A model as training has it, and the Transformers model in it."""
    attention.register()
    overrides: dict[str, Any] = OVERRIDES.get(family, WIDE)
    model = tiny.build_model(family, **{**overrides, **({"sliding_window": 4096} if "gemma" in family else {})}).to(
        device
    )
    if precision == "bf16" and adapter.method != "none":
        model = model.to(torch.bfloat16)
    model.set_attn_implementation(attention.NAME)
    model.config.use_cache = False
    inner = model
    if adapter.method != "none":
        model.requires_grad_(False)
        with device:
            model = adapters.add_lora(model, adapter, seed=1)
    return model, inner


class Held:
    """A tensor that a node of the graph holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def really_kept(family: str, adapter: AdapterConfig, precision: str) -> int:
    """Bytes of all tensors that autograd keeps for the backward pass, weights and their casts left out."""
    model, inner = wrapped(family, adapter, precision, torch.device("cpu"))
    fused_lora.fuse(model)
    dropout.apply(model)
    # The first layer is like the others: under an adapter it would keep less, for it has nobody to give a gradient to.
    inner.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    task = CausalLM(model.train(), precision=precision, attention_name=attention.NAME, device=torch.device("cpu"))
    generator = np.random.default_rng(0)
    rows = [(generator.integers(3, 380, n).astype(np.int32), np.ones(n, np.uint8)) for n in LENGTHS]
    batch = collate(rows, range(len(rows)))
    task.outputs(batch)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    shapes |= {tuple(parameter.shape[::-1]) for parameter in model.parameters()}
    # What goes with its graph in the forward pass itself, as that of DoRA's norms does, is not kept.
    kept: weakref.WeakSet[Held] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        kept.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
        loss = task.outputs(batch)
    sizes: dict[int, int] = {}
    for tensor in (held.tensor for held in kept):
        storage = tensor.untyped_storage()
        # Copies of weights in another dtype have their shape; DoRA keeps tensors of that shape that are none.
        copied = tuple(tensor.shape) in shapes and adapter.method != "dora"
        if storage.data_ptr() not in weights and not copied:
            sizes[storage.data_ptr()] = storage.nbytes()
    # The loss works its gradient out at once, and keeps it beside what autograd knows of.
    gradient: torch.Tensor = loss.grad_fn.gradients[0]  # type: ignore[union-attr]
    return sum(sizes.values()) + gradient.nbytes


def counted(family: str, adapter: AdapterConfig, precision: str) -> float:
    """The same by layers that run without memory; the gradient of hidden states at labels is added."""
    model, _ = wrapped(family, adapter, precision, torch.device("meta"))
    probe = LayerProbe(model)
    found = probe.measure(Arithmetic(precision, "cpu"))
    assert not probe.failure
    width = model.config.get_text_config().hidden_size
    targets = sum(LENGTHS) - len(LENGTHS)
    return found.kept(LENGTHS) + found.outside(LENGTHS) + ELEMENT[precision] * width * targets


# Every family with each adapter and each precision.
@pytest.mark.parametrize(
    ("precision", "adapter", "family"),
    [
        pytest.param(
            precision,
            adapter,
            family,
            id=f"{precision}-{name}-{family}",
            marks=[] if family in ("llama", "gemma3") or precision == "fp32" else pytest.mark.nightly,
        )
        for family in ("llama", "qwen3", "gemma3", "gpt2", "gemma2", "phi3", "gpt_neox")
        for precision, name, adapter in (
            ("bf16", "lora", LORA),
            ("fp32", "full", FULL),
            *((("bf16", "full", FULL), ("fp32", "lora", LORA)) if family == "llama" else ()),
        )
    ],
)
def test_what_is_counted_is_what_autograd_keeps(family: str, adapter: AdapterConfig, precision: str) -> None:
    assert counted(family, adapter, precision) == pytest.approx(really_kept(family, adapter, precision), rel=0.02)


@pytest.mark.parametrize(("adapter", "precision"), [(LORA, "bf16"), (FULL, "fp32")], ids=["lora", "full"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore:.*_pattern keys:RuntimeWarning")
def test_experts_are_counted(family: str, adapter: AdapterConfig, precision: str) -> None:
    assert counted(family, adapter, precision) == pytest.approx(really_kept(family, adapter, precision), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fields", [{"dropout": 0.5}, {"method": "dora"}, {"method": "pissa"}], ids=str)
def test_other_adapters_are_counted(fields: dict[str, Any], precision: str) -> None:
    adapter = AdapterConfig(rank=8, **fields)
    found = counted("llama", adapter, precision)
    assert found == pytest.approx(really_kept("llama", adapter, precision), rel=0.02)
    # Graphs that are dropped in the forward pass, as that of DoRA's norms, once made the count one of chance.
    assert found == counted("llama", adapter, precision)


def measured(family: str = "llama", adapter: AdapterConfig = LORA, *, packs: bool = True, **how: Any) -> LayerMemory:
    probe = LayerProbe(wrapped(family, adapter, "bf16", torch.device("meta"))[0], packs=packs)
    found = probe.measure(Arithmetic(**{"precision": "bf16", "device": "cpu", **how}))
    assert not probe.failure
    return found


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on this CPU is torch's."""
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)


@pytest.mark.usefixtures("products")
def test_a_dropouts_mask_is_a_byte_on_a_cpu_as_on_a_gpu() -> None:
    adapter = AdapterConfig(rank=8, dropout=0.5)
    rows = (1000,)
    more = [measured(adapter=adapter, device=kind).kept(rows) - measured(device=kind).kept(rows) for kind in KINDS]
    # A mask has a byte per element on both. What enters the sixth layer of each of two is kept by attention too, and on
    # a GPU that was the same tensor before.
    assert more[1] - more[0] == pytest.approx(1000 * 2 * 2 * 256, rel=0.01)


@pytest.mark.usefixtures("products")
def test_long_rows_on_a_cpu_in_bf16_keep_no_scores() -> None:
    kept = measured().kept
    # Two layers of eight heads: 2 * 8 * 2 * 512**2 scores of two bytes are gone, and nothing takes their place.
    assert kept((512, 512)) - kept((1024,)) == pytest.approx(2 * 8 * 2 * 512**2 * 2, rel=0.01)


@pytest.mark.usefixtures("products")
def test_attention_keeps_no_squares_on_a_gpu() -> None:
    on_gpu, on_cpu = (measured(device=kind).kept for kind in ("cuda", "cpu"))
    assert on_gpu((512,) * 8) == pytest.approx(on_gpu((4096,)), rel=1e-6)
    assert on_cpu((128,) * 4) < on_cpu((512,))


@pytest.mark.skipif(missing_for_kernels() is not None, reason="this machine cannot compile the kernels")
def test_the_kernel_of_a_cpu_keeps_what_that_of_a_gpu_does() -> None:
    on_gpu, on_cpu = (measured(device=kind).kept for kind in ("cuda", "cpu"))
    assert on_cpu((128,) * 4) == pytest.approx(on_cpu((512,)), rel=1e-6)
    # All but norms, which on a CPU keep values in bf16, and on a GPU in fp32 too.
    assert on_cpu((512,)) < on_gpu((512,))


def test_selective_checkpointing_keeps_products_and_attention() -> None:
    # By hand: queries, keys, values, attention, outputs, gate, up, down, and LoRA's seven narrow ones; the statistics.
    widths = 256 + 2 * 128 + 2 * 256 + 2 * 512 + 256 + 7 * 8
    assert measured(device="cuda").products((1000,)) == pytest.approx(2 * 1000 * (2 * widths + 4 * 8), rel=0.001)
    assert measured().inputs((1000,)) == 2 * 1000 * 2 * 256


def test_one_layer_of_each_kind_is_run_and_counts_for_all() -> None:
    def kept(layers: int) -> float:
        model = tiny.build_model(
            "gemma3", **WIDE, num_hidden_layers=layers, layer_types=kinds[:layers], sliding_window=64
        )
        return LayerProbe(model.to("meta")).measure(Arithmetic("fp32", "cpu")).kept((300,))

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    sliding = kept(2) - kept(1)
    full = kept(3) - kept(2)
    assert sliding > full
    assert kept(9) == pytest.approx(6 * sliding + 3 * full)


def test_fsdp_has_weights_in_bf16_and_hidden_states_too() -> None:
    replicated, sharded = (measured(adapter=FULL, copies=copies) for copies in (False, True))
    assert (replicated.hidden, sharded.hidden) == (4 * 256, 2 * 256)
    assert sharded.kept((512,)) < 0.9 * replicated.kept((512,))


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_models_that_cannot_be_packed_take_one_row_at_a_time(family: str) -> None:
    meta = tiny.build_model(family).to("meta")
    probe = LayerProbe(meta, packs=False)
    found = probe.measure(Arithmetic("fp32", "cpu"))
    assert not probe.failure
    assert found.kept((400,)) > found.kept((200,)) > 2 * 4 * 64 * 200


def test_layers_that_do_not_run_without_values_are_guessed() -> None:
    model = tiny.build_model("llama").to("meta")
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: forward(x) * float(x.sum())
    probe = LayerProbe(model)
    guessed = probe.measure(Arithmetic("fp32", "cpu"))
    assert probe.failure
    assert guessed.kept((200,)) == pytest.approx(measured_llama((200,)), rel=0.5)


def measured_llama(rows: tuple[int, ...]) -> float:
    return LayerProbe(tiny.build_model("llama").to("meta")).measure(Arithmetic("fp32", "cpu")).kept(rows)
