"""From a configuration to a model with its adapter, on its device."""

from __future__ import annotations

from typing import Any

import torch

from finray.config.schema import AdapterConfig, ModelConfig
from finray.models import adapters, fused_lora
from finray.models.loading import DTYPES, load_causal_lm, meta_causal_lm
from finray.models.quantised import quantise_layers
from finray.pretrained.tokenizers import new_ids


def build_model(
    model: ModelConfig,
    adapter: AdapterConfig,
    *,
    precision: str,
    attention_name: str | None,
    bits: int | None,
    seed: int,
    device: torch.device,
    on_meta: bool = False,
) -> Any:
    """Load a model and add adapters: the PEFT model, or the Transformers model itself.

    Frozen weights are stored in the dtype of ``precision``, or in fewer ``bits``; weights that are trained are fp32. On
    the meta device, and always with ``bits``, the model has no weights yet: :func:`finray.models.sharded.materialise`
    reads them, when it is sharded.

    Args:
        model: the model section.
        adapter: the adapter section.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        attention_name: Transformers' name of the attention; None for the model's own choice.
        bits: 4 or 8 for quantised frozen linear layers, else None.
        seed: of the adapter's first values.
        device: where it is put.
        on_meta: whether to build it without memory.

    Raises:
        ModelError: it cannot be loaded, or the adapter cannot be added.
    """
    on_meta = on_meta or bits is not None
    dtype = DTYPES[precision] if adapter.method != "none" else torch.float32
    load = meta_causal_lm if on_meta else load_causal_lm
    loaded = load(model, dtype=dtype, attention_name=attention_name)
    if adapter.method != "none":
        loaded.requires_grad_(False)
        if bits is not None:
            quantise_layers(loaded, bits, dtype=dtype, keep=adapter.modules_to_save)
        loaded = adapters.add_lora(loaded, adapter, seed=seed, new_tokens=new_ids(model))
        fused_lora.fuse(loaded)
    loaded.config.use_cache = False
    return loaded if on_meta else loaded.to(device)
