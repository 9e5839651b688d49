"""A tiny base model with adapters on it, and what they say to prompts without any of finray's engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support import tiny

TARGETS: dict[str, Any] = {
    "one": {"target_modules": ["q_proj", "v_proj"]},
    "two": {"target_modules": "all-linear"},
    "three": {"target_modules": ["down_proj", "o_proj"], "use_rslora": True},
    "four": {"target_modules": ["k_proj", "gate_proj"], "alpha_pattern": {"k_proj": 5}},
}


def save_adapters(folder: Path, tokenizer: Any, names: tuple[str, ...] = tuple(TARGETS)) -> Path:
    """`folder/base` and an adapter with random values in `folder/NAME` for each name; returns the folder."""
    tiny.save_model("llama", folder / "base", tokenizer)
    for number, name in enumerate(names):
        save_adapter(folder / "base", folder / name, tokenizer, seed=number, **TARGETS[name])
    return folder


def save_adapter(base: Path, folder: Path, tokenizer: Any, *, seed: int = 0, **options: Any) -> Path:
    """An adapter with random values."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **options)
    get_peft_model(model, config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reference(folder: Path, name: str) -> Any:
    """The base model, or one of its adapters as PEFT loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    return model if name == "base" else PeftModel.from_pretrained(model, str(folder / name)).eval()


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int, ends: tuple[int, ...] = ()) -> list[int]:
    """By hand, without a cache: the likeliest token, again and again, up to one that ends the answer."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]
