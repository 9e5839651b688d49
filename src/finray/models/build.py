"""From a configuration to a model with its adapter, on its device."""

from __future__ import annotations

from typing import Any

import torch

from finray.config.schema import AdapterConfig, ModelConfig
from finray.models import adapters, fused_lora
from finray.models.loading import DTYPES, choose_attention, load_causal_lm, meta_causal_lm
from finray.models.quantised import quantise_layers
from finray.pretrained.tokenizers import new_ids


def build_model(
    model: ModelConfig,
    adapter: AdapterConfig,
    *,
    precision: str,
    seed: int,
    device: torch.device,
    empty: bool = False,
    packs: bool = True,
    bits: int | None = None,
) -> tuple[Any, str | None]:
    """Load a model and add adapters; returns it with the name of its attention (None: its own).

    Frozen weights are stored in the arithmetic's dtype, or in fewer ``bits``; weights that are trained are fp32.
    An ``empty`` model, and one with packed weights, has no weights yet: :func:`finray.models.sharded.materialise`
    gives it some, when it is sharded. A model that does not pack (:mod:`finray.models.packing_check`) keeps its own
    attention.
    """
    empty = empty or bits is not None
    name = choose_attention(model, device, precision=precision) if packs else None
    dtype = DTYPES[precision] if adapter.method != "none" else torch.float32
    load = meta_causal_lm if empty else load_causal_lm
    loaded = load(model, dtype=dtype, attention_name=name)
    if adapter.method != "none":
        loaded.requires_grad_(False)
        if bits is not None:
            quantise_layers(loaded, bits, dtype=dtype, keep=adapter.modules_to_save)
        loaded = adapters.add_lora(loaded, adapter, seed=seed, new_tokens=new_ids(model))
        fused_lora.fuse(loaded)
    loaded.config.use_cache = False
    placed = loaded if empty else loaded.to(device)
    return placed, name
