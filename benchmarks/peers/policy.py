"""What both sides of a comparison of losses share: the weights that are compared, and the gradients of one step."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT and wrappers add."""
    return re.sub(r"(^|\.)(base_model\.model|module|default|modules_to_save|_orig_mod)(?=\.|$)", "", name).strip(".")


@torch.no_grad()
def set_policy(model: Any, spread: float) -> None:
    """Move the trainable weights away from those of the reference: by the same numbers for the same name."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            noise = torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(zlib.crc32(plain_name(name).encode()))
            )
            # An adapter's second matrix begins with zeros.
            weight.copy_(3 * spread * noise if "lora_" in name else weight + spread * noise)


class Gradients:
    """The gradients at a step of an optimizer, by plain name."""

    def __init__(self, model: Any) -> None:
        self._names = {id(weight): plain_name(name) for name, weight in model.named_parameters()}
        self.found: dict[str, torch.Tensor] = {}
        self._hook = register_optimizer_step_pre_hook(self._keep)

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.found[self._names[id(weight)]] = weight.grad.detach().float().clone()

    def save(self, file: Path) -> None:
        """Write them, and look no further."""
        self._hook.remove()
        save_file({name: gradient.contiguous() for name, gradient in self.found.items()}, file)
