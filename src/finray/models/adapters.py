"""LoRA adapters: PEFT injects them, finray saves and restores their tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from finray.config.schema import AdapterConfig
from finray.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
NAME = "default"


def add_lora(model: Any, adapter: AdapterConfig, *, seed: int) -> Any:
    """Wrap a model with LoRA; the new matrices are fp32 and drawn from ``seed`` alone.

    Raises:
        ModelError: the target modules match nothing; the message lists what there is.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        # GPT-2 keeps its projections transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    try:
        # What PEFT draws is drawn again below.
        with torch.random.fork_rng(devices=[]):
            wrapped = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(
            f"the adapter cannot be added: {str(error).splitlines()[0]}",
            where="adapter.target_modules",
            repair=f"modules that can be named: {', '.join(linear_names(model))}",
        ) from None
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    draw(wrapped, seed=seed)
    return wrapped


def initial(name: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """The first value of an adapter's matrix (fp32): A uniform as in PEFT (Kaiming with a = sqrt 5), B zero.

    It follows from the name and the seed alone, so it is the same however and wherever the model is built.
    """
    value = torch.zeros(shape)
    if ".lora_B." not in name:
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") % 2**63)
        torch.nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
    return value


@torch.no_grad()
def draw(model: Any, *, seed: int) -> None:
    """Give every trained LoRA matrix its first value."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" in name and not parameter.is_meta:
            parameter.copy_(initial(name, parameter.shape, seed=seed))


def linear_names(model: Any) -> list[str]:
    """Endings of the names of the linear layers of a model."""
    kinds = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(kinds)


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The weights of an adapter under the names that PEFT gives them in its file; they may be shards."""
    from peft import get_peft_model_state_dict

    found: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(model.named_parameters()), save_embedding_layers=False
    )
    return found


def load_adapter(model: Any, folder: Path) -> Any:
    """Wrap a base model with a saved adapter, for inference."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelError(
            f"the adapter does not fit the model: {str(error).splitlines()[0]}", where=str(folder)
        ) from None
