"""LoRA adapters: PEFT injects them, finray saves and restores their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finray.config.schema import AdapterConfig
from finray.errors import ModelError

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
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
    return wrapped


def linear_names(model: Any) -> list[str]:
    """Endings of the names of the linear layers of a model."""
    kinds = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(kinds)


def save_adapter(model: Any, folder: Path) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` as PEFT reads them."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(str(folder))


def restore_adapter(model: Any, folder: Path) -> None:
    """Put saved adapter weights into a model that has the same adapters.

    Raises:
        ModelError: the file's tensors are not those of the model.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tensors = load_file(folder / WEIGHTS)
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    if expected.keys() != tensors.keys():
        raise ModelError(
            f"the adapter has {len(tensors)} tensors, the model wants {len(expected)}",
            where=str(folder),
            repair="adapter.target_modules must be as it was when the adapter was trained",
        )
    set_peft_model_state_dict(model, tensors)


def load_adapter(model: Any, folder: Path) -> Any:
    """Wrap a base model with a saved adapter, for inference."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelError(
            f"the adapter does not fit the model: {str(error).splitlines()[0]}", where=str(folder)
        ) from None
