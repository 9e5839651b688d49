"""Models of known shapes with random weights, which cost the same time as trained ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from finray.config.schema import AdapterConfig, ModelConfig
from finray.models import adapters, attention, fused_lora
from finray.models.blocks import compile_blocks, wrap_blocks
from finray.models.loading import choose_attention
from finray.models.quantised import QuantisedLinear, quantise_layers
from finray.pretrained.tokenizers import silence_transformers
from finray.tasks.causal_lm import CausalLM

RANK = 16
Shape = dict[str, Any]


def _shape(
    kind: str, *, vocabulary: int, width: int, wide: int, layers: int, heads: tuple[int, int, int], tied: bool
) -> Shape:
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
    }


LLAMA = "llama-3.1-8b"
QWEN = "qwen3-1.7b"
SHAPES: dict[str, Shape] = {
    LLAMA: _shape("llama", vocabulary=128256, width=4096, wide=14336, layers=32, heads=(32, 8, 128), tied=False),
    QWEN: _shape("qwen3", vocabulary=151936, width=2048, wide=6144, layers=28, heads=(16, 8, 128), tied=True),
}
# What stands in for them in a trial on a CPU.
TINY: dict[str, Shape] = {
    LLAMA: _shape("llama", vocabulary=512, width=64, wide=128, layers=2, heads=(4, 2, 16), tied=False),
    QWEN: _shape("qwen3", vocabulary=640, width=64, wide=192, layers=2, heads=(4, 2, 16), tied=True),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained; the switches are finray's optimisations.

    Attributes:
        model: key of `SHAPES`.
        method: `lora`, `qlora` (NF4 with double quantisation) or `full`.
        packing: packs, or batches of `ROWS` rows laid end to end.
        fused: LoRA's layers as one operation each.
        chunked: loss in chunks, or whole logits at the positions that have a target.
        checkpointing: activations that are computed again in the backward pass: `none`, `selective` or `full`.
        compiled: every block by `torch.compile`.
    """

    model: str
    method: str = "lora"
    packing: bool = True
    fused: bool = True
    chunked: bool = True
    checkpointing: str = "none"
    compiled: bool = False

    @property
    def name(self) -> str:
        """What differs from finray's LoRA."""
        off = [f"no {name}" for name in ("packing", "fused", "chunked") if not getattr(self, name)]
        on = [] if self.checkpointing == "none" else [f"{self.checkpointing} checkpointing"]
        on += ["compiled"] if self.compiled else []
        return ", ".join([self.method, *off, *on])


def random_model(shape: Shape, dtype: torch.dtype, implementation: str, device: torch.device, *, seed: int) -> Any:
    """A causal language model with weights drawn on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {name: value for name, value in shape.items() if name != "model_type"}
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(shape["model_type"], **options), dtype=dtype, attn_implementation=implementation
        )
    model.config.use_cache = False
    return model.to(device)


def build_task(shape: Shape, setup: Setup, device: torch.device, *, seed: int) -> CausalLM:
    """As `CausalLM.build` makes it, but for the weights."""
    silence_transformers()
    attention.register()
    name = choose_attention(ModelConfig(name="random"), device, precision="bf16")
    dtype = torch.float32 if setup.method == "full" else torch.bfloat16
    model = random_model(shape, dtype, name, device, seed=seed)
    if setup.method != "full":
        model.eval().requires_grad_(False)
        if setup.method == "qlora":
            _pack(model)
        adapter = AdapterConfig(rank=RANK, alpha=2 * RANK, dropout=0.0, target_modules="all-linear")
        model = adapters.add_lora(model, adapter, seed=seed)
        if setup.fused:
            fused_lora.fuse(model)
    task = CausalLM(model.to(device), precision="bf16", attention_name=name, device=device)
    if not setup.chunked:
        # As with a head that finray does not understand.
        task._head_is_ours, task._head_is_proven = False, True
    if setup.compiled:
        # A trial on a CPU goes without the compiler, which takes minutes.
        compile_blocks(task.model, backend="inductor" if device.type == "cuda" else "aot_eager")
    if setup.checkpointing != "none":
        wrap_blocks(task.model, checkpointing=setup.checkpointing)
    task.model.train()
    return task


def _pack(model: Any) -> None:
    """Store the weights of all linear layers but the head in four bits, one after the other."""
    weights = {
        name: module.weight.detach() for name, module in model.named_modules() if type(module) is torch.nn.Linear
    }
    quantise_layers(model, 4, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            packed = module.pack(weights.pop(name))
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
