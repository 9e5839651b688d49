"""Models from a directory, a GGUF file or the Hugging Face hub."""

from __future__ import annotations

import os
from typing import Any

import torch

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.hardware import cpu_has_bf16
from finray.models import attention, vocabulary
from finray.pretrained.tokenizers import check_exists, new_tokens, not_loaded, silence_transformers, source_options

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(precision: str, device: torch.device) -> str:
    """``auto`` as bf16 where the device multiplies it in hardware, else fp32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if cpu_has_bf16() else "fp32"


def _tell_deepspeed() -> None:
    """PEFT imports DeepSpeed wherever it is installed, and that prints a line unless it is told of no GPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def load_causal_lm(model: ModelConfig, *, dtype: torch.dtype, attention_name: str | None = None) -> Any:
    """A causal language model on the CPU, in evaluation mode.

    Args:
        model: the model section.
        dtype: storage dtype of the weights.
        attention_name: Transformers' name of the attention; its own choice when None.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    check_exists(model.name)
    silence_transformers()
    _tell_deepspeed()
    attention.register()
    options = {} if attention_name is None else {"attn_implementation": attention_name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**source_options(model), dtype=dtype, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise not_loaded("model", model, error) from None
    return _with_new_tokens(forget_gguf(loaded), model)


def _with_new_tokens(loaded: Any, model: ModelConfig) -> Any:
    added = new_tokens(model)
    if added is not None:
        vocabulary.widen(loaded, added)
    return loaded


def meta_causal_lm(model: ModelConfig, *, dtype: torch.dtype, attention_name: str | None = None) -> Any:
    """A causal language model on the meta device: every module and shape, no weights read and none made.

    Raises:
        ModelError: the configuration cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_exists(model.name)
    silence_transformers()
    _tell_deepspeed()
    attention.register()
    options = {} if attention_name is None else {"attn_implementation": attention_name}
    try:
        config = AutoConfig.from_pretrained(**source_options(model))
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code, **options
            )
            return _with_new_tokens(made, model)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise not_loaded("model's configuration", model, error) from None


def forget_gguf(model: Any) -> Any:
    """A model read from GGUF is dequantised, yet still calls itself quantised and refuses to be saved; mend that."""
    quantization = getattr(model.config, "quantization_config", None)
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    if quantization is not None and str(getattr(method, "value", method)) == "gguf":
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
    return model


def choose_attention(model: ModelConfig, device: torch.device, *, precision: str) -> str:
    """Transformers' name of the attention for packed rows on this device.

    Raises:
        ModelError: FlashAttention was asked for and is not there.
    """
    from transformers.utils import is_flash_attn_2_available

    available = device.type == "cuda" and precision != "fp32" and is_flash_attn_2_available()
    if model.attention == "flash_attention_2" and not available:
        raise ModelError(
            "FlashAttention 2 needs a GPU, bf16 or fp16 and the package flash-attn",
            where="model.attention",
            repair="`pip install flash-attn`, or set model.attention to auto",
        )
    return "flash_attention_2" if available and model.attention != "packed" else attention.NAME
