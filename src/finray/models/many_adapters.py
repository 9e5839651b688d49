"""Several adapters on one base model, each for its own rows of the same forward pass.

Rows are packed, so an adapter's rows are some of the tokens of a linear layer's input. The base's product is computed
once for all of them, and each adapter's product is added to its own tokens. Nothing is merged, and the model has no
PEFT layers: adapters are added and removed without changing it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finray import compat
from finray.config.adapter_files import SETTINGS, WEIGHTS
from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.files import first_line
from finray.models.artifacts import is_finite
from finray.models.loading import load_model
from finray.pretrained.weights import stored_weights

_PREFIX = "base_model.model."
_AGAIN = {"repair": "take an earlier checkpoint: the training may have diverged; or copy its files again"}


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Added to the output of one linear layer: ``up @ down @ x * scaling``; down (R, in), up (out, R)."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class PlainLora:
    """An adapter with only LoRA on linear layers: its parts, by the name of the layer in the base."""

    parts: dict[str, LoraPart]


def read_plain_lora(folder: Path, base: ModelConfig) -> PlainLora:
    """Load an adapter's weights; PEFT maps their names, on a copy of the base model without weights.
    Raises ModelError: it belongs to another base, or has more than LoRA on linear layers (DoRA and other variants,
    whole modules, new tokens), or its weights are no finite numbers."""
    skeleton = load_model(base, dtype=torch.float32, on_meta=True)
    try:
        stored = stored_weights(folder, Path(WEIGHTS).stem)
        with compat.without_bitsandbytes():
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora.layer import Linear, LoraLayer
            from safetensors.torch import load_file

            config = LoraConfig.from_pretrained(str(folder))
            if config.layer_replication:
                raise _refused(
                    folder,
                    "`layer_replication` repeats layers of its base",
                    repair="export it merged (`finray export RUN --output FOLDER`), and serve that by itself",
                )
            config.init_lora_weights, config.lora_dropout = True, 0.0
            inject_adapter_in_model(config, skeleton, "default")
            # Its header was read above.
            tensors = load_file(str(folder / WEIGHTS)) if stored is not None else {}
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        # Third-party files: PEFT may fail on them in any way.
        raise _refused(
            folder, f"it cannot be read, or does not fit the model {base.name}: {first_line(error)}"
        ) from None
    for name, tensor in tensors.items():
        if not is_finite(tensor.float()):
            raise _refused(folder, f"{name} is not finite (NaN or infinite)", **_AGAIN)
    body, parts, lacking = skeleton.base_model_prefix + ".", dict[str, LoraPart](), list[str]()
    for name, module in skeleton.named_modules():
        keys = [f"{_PREFIX}{name}.lora_{matrix}.weight" for matrix in "AB"]
        if type(module) is not Linear or not all(key in tensors for key in keys):
            lacking += [name] if isinstance(module, LoraLayer) else []
            continue
        down, up = (tensors.pop(key) for key in keys)
        wanted = module.lora_A["default"].weight.shape, module.lora_B["default"].weight.shape
        if (down.shape, up.shape) != wanted:
            here = f"{up.shape[0]} x {down.shape[1]}"
            there = f"{wanted[1][0]} x {wanted[0][1]}"
            raise _refused(folder, f"it does not fit the model {base.name}: {name} is {there} there, and {here} here")
        if type(module.base_layer) is torch.nn.Linear and name.startswith(body) and not module.lora_variant:
            if not math.isfinite(scaling := float(module.scaling["default"])):
                raise _refused(folder, f"the scaling of {name} is {scaling} by its {SETTINGS}", **_AGAIN)
            parts[name] = LoraPart(down, up, scaling)
        else:
            tensors[name] = down
    # With tensors of other names, PEFT's own loading decides.
    if lacking and not tensors:
        raise _refused(folder, f"its file lacks the tensors of {lacking[0]}", repair="copy its files again")
    if tensors or not parts:
        odd = min(tensors, default=SETTINGS).removeprefix(_PREFIX)
        raise _refused(
            folder,
            f"it has more than LoRA on linear layers of the model {base.name} ({odd}), so it cannot be served beside "
            f"others",
            repair="export it merged (`finray export RUN --output FOLDER`), and serve that by itself",
        )
    return PlainLora(parts)


def _refused(folder: Path, why: str, *, repair: str = "serve it beside the base model it was trained on") -> ModelError:
    return ModelError(f"the adapter cannot be loaded: {why}", where=str(folder), repair=repair)


class ManyAdapters:
    """Makes the linear layers of a model add the product of each token's adapter.

    Args:
        model: a Transformers model without adapters, in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._modules = dict(model.named_modules())
        self._dtype, self._device = model.dtype, model.device
        # In the current forward pass: adapters with the positions of their tokens; None for all tokens.
        self.spans: list[tuple[PlainLora, torch.Tensor | None]] = []
        self.tokens = 0

    def placed(self, adapter: PlainLora) -> PlainLora:
        """The adapter in the model's dtype on its device, for :meth:`rows`.

        Rounded as for a single adapter (:mod:`finray.models.fused_lora`).
        """
        parts = {
            name: LoraPart(part.down.to(self._device, self._dtype), part.up.to(self._device, self._dtype), part.scaling)
            for name, part in adapter.parts.items()
        }
        for name in parts:
            module = self._modules[name]
            if "forward" not in module.__dict__:
                module.forward = types.MethodType(_Forward(self, name), module)
        return PlainLora(parts)

    @contextmanager
    def rows(self, pieces: Sequence[tuple[PlainLora | None, int]]) -> Iterator[None]:
        """Context of a packed forward pass: for each piece its adapter (None for the base) and number of tokens."""
        places, at = dict[int, tuple[PlainLora, list[torch.Tensor]]](), 0
        for adapter, length in pieces:
            if adapter is not None:
                places.setdefault(id(adapter), (adapter, []))[1].append(torch.arange(at, at + length))
            at += length
        self.spans, self.tokens = [], at
        for adapter, ranges in places.values():
            places_K = torch.cat(ranges)
            self.spans.append((adapter, None if len(places_K) == at else places_K.to(self._device)))
        try:
            yield
        finally:
            self.spans = []


class _Forward:
    """The forward pass of one linear layer with its adapters."""

    def __init__(self, held: ManyAdapters, name: str) -> None:
        self._held, self._name = held, name

    def __call__(self, module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        places = [(part, at) for adapter, at in self._held.spans if (part := adapter.parts.get(self._name)) is not None]
        if not places:
            return torch.nn.functional.linear(x, module.weight, module.bias)
        flat = x.reshape(-1, x.shape[-1])
        output = flat.new_zeros(flat.shape[0], module.weight.shape[0])
        # The adapters' products first, as in training: the base's is added to them.
        for part, places_K in places:
            if places_K is not None and len(flat) != self._held.tokens:
                raise ModelError(f"{self._name} does not get one row per token, so adapters cannot share it")
            if places_K is None:
                torch.mm(flat @ part.down.T * part.scaling, part.up.T, out=output)
            else:
                output[places_K] = (flat[places_K] @ part.down.T * part.scaling) @ part.up.T
        if module.bias is not None:
            output += module.bias
        return output.addmm_(flat, module.weight.T).view(*x.shape[:-1], -1)
