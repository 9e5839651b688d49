"""Models and tokenizers from a directory, a GGUF file or the Hugging Face hub."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.models import attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def quiet() -> None:
    """Keep Transformers' bars and advice out of finray's output; errors still come."""
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # PEFT reads a name that Transformers has renamed.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)


def check_exists(name: str) -> None:
    """Find a wrong model path early, without importing Transformers or asking a hub.

    Raises:
        ModelError: the name is a path, and no model is there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                "the directory holds no `config.json`", where=f"model.name={name}", repair="name a model directory"
            )
    elif _is_path(name, path) and not path.is_file():
        raise ModelError(
            "the model does not exist", where=f"model.name={name}", repair="check the path and the working directory"
        )


def _is_path(name: str, path: Path) -> bool:
    """Whether a name can only be a path: Hub ids have one slash at most, and no dots in front."""
    return path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16, AMX, Arm's BF16); elsewhere fp32 is faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine() == "arm64"
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def resolve_precision(precision: str, device: torch.device) -> str:
    """``auto`` as bf16 where the device has it, else fp32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if cpu_has_bf16() else "fp32"


def source_options(model: ModelConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that say where the files are."""
    path = Path(model.name).expanduser()
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    name = str(path) if path.exists() else model.name
    return {
        "pretrained_model_name_or_path": name,
        "revision": model.revision or "main",
        "trust_remote_code": model.trust_remote_code,
    }


def not_loaded(what: str, model: ModelConfig, error: Exception) -> ModelError:
    """The error of a model or tokenizer that Transformers could not load."""
    text = str(error).strip().splitlines()
    return ModelError(
        f"the {what} cannot be loaded: {text[0] if text else type(error).__name__}",
        where=f"model.name={model.name}",
        repair="name a model directory, a .gguf file, or a Hugging Face id you can reach (HF_TOKEN for gated models)",
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a model, with the chat template of the config where one is named.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    quiet()
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source_options(model))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise not_loaded("tokenizer", model, error) from None
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(
                f"the chat template cannot be read: {error.strerror}",
                where=f"model.chat_template={model.chat_template}",
            ) from None
    return tokenizer


_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "config.json",
)


def tokenizer_files(model: ModelConfig) -> list[Path] | None:
    """The files that decide what tokens a model's tokenizer makes; None for one on the Hub.

    With these, and the versions of the libraries that read them, a tokenizer is known without loading it.
    """
    path = Path(model.name).expanduser()
    template = [Path(model.chat_template)] if model.chat_template is not None else []
    if path.suffix == ".gguf" and path.is_file():
        return [path, *template]
    if not path.is_dir():
        return None
    found = {file for pattern in _TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()}
    return [*sorted(found), *template]


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
    quiet()
    attention.register()
    options = {} if attention_name is None else {"attn_implementation": attention_name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**source_options(model), dtype=dtype, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise not_loaded("model", model, error) from None
    return forget_gguf(loaded)


def meta_causal_lm(model: ModelConfig, *, dtype: torch.dtype, attention_name: str | None = None) -> Any:
    """A causal language model on the meta device: every module and shape, no weights read and none made.

    Raises:
        ModelError: the configuration cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_exists(model.name)
    quiet()
    attention.register()
    options = {} if attention_name is None else {"attn_implementation": attention_name}
    try:
        config = AutoConfig.from_pretrained(**source_options(model))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code, **options
            )
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

    available = device.type == "cuda" and precision == "bf16" and is_flash_attn_2_available()
    if model.attention == "flash_attention_2" and not available:
        raise ModelError(
            "FlashAttention 2 needs a GPU, bf16 and the package flash-attn",
            where="model.attention",
            repair="`pip install flash-attn`, or set model.attention to auto",
        )
    return "flash_attention_2" if available and model.attention != "packed" else attention.NAME
