"""Rotary embeddings whose frequencies depend on the longest row of a pass: LongRoPE (Phi-3) and dynamic NTK.

Transformers takes the largest position of a whole pass. In a pack, or in a batch of rows of several lengths, a long row
would change the positions of all others. Here each row gets what Transformers computes for it alone: the original
forward pass is called for the rows of each set of frequencies. It also begins anew in each pass, where Transformers'
dynamic NTK remembers the longest row so far.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from finray.models.blocks import blocks_of

# Types of frequencies that are the same in every pass.
FIXED = ("default", "linear", "yarn", "llama3", "proportional", "axial")


def rope_types(config: Any) -> list[str]:
    """The types of rotary embeddings in a text model's configuration, which may have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [
        settings.get("rope_type", settings.get("type"))
        for settings in (rope, *rope.values())
        if isinstance(settings, dict)
    ]
    return [str(kind) for kind in kinds if kind is not None]


class RowRopes:
    """The rotary embeddings of a model that depend on the length of a row, made to depend on their own row only.

    Without :meth:`of`, each line of positions (B, L) is a row. Those inside a model's blocks stay as they are: a
    block that is computed again for the backward pass would no longer know the rows.
    """

    def __init__(self, body: Any) -> None:
        inside = {id(part) for block in blocks_of(body) for part in block.modules()}
        self._modules = [one for one in body.modules() if id(one) not in inside and _kinds(one)]
        for module in self._modules:
            if "forward" not in module.__dict__:
                module.forward = types.MethodType(_forward, module)
                module.finray_rows = None

    def __bool__(self) -> bool:
        return bool(self._modules)

    @contextmanager
    def of(self, lengths: Sequence[int], ends: Sequence[int]) -> Iterator[None]:
        """Within it, positions (1, T) are of packed rows.

        Args:
            lengths: tokens of each row in this pass, adding up to T.
            ends: largest position of each row, plus one; more than its length if earlier tokens are cached.
        """
        for module in self._modules:
            module.finray_rows = tuple(zip(lengths, ends, strict=True))
        try:
            yield
        finally:
            for module in self._modules:
                module.finray_rows = None


def _kinds(module: torch.nn.Module) -> set[str]:
    """The types of a rotary embedding (one for each kind of layer, in some models) that depend on the length."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return {kind for kind in kinds if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)}


def _forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
    """As the module's own: cosines and sines (B, L, D), here of each row by its own length."""
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    rope = self.config.rope_parameters if layer_type is None else self.config.rope_parameters[layer_type]

    def compute(positions: torch.Tensor) -> Any:
        if "dynamic" in kind:
            _forget(self, "" if layer_type is None else f"{layer_type}_", x.device)
        return type(self).forward(self, x, positions, **of_layer)

    is_packed = self.finray_rows is not None
    if kind in FIXED or position_ids.ndim != 2 or (not is_packed and len(position_ids) == 1):
        return compute(position_ids)
    if is_packed:
        lengths, ends = zip(*self.finray_rows, strict=True)
    else:
        lengths = (position_ids.shape[1],) * len(position_ids)
        ends = tuple((position_ids.amax(1) + 1).tolist())
    turn = rope["original_max_position_embeddings"] if kind == "longrope" else self.original_max_seq_len
    alike = dict[int, list[int]]()
    for row, end in enumerate(ends):
        # LongRoPE has two sets of frequencies, dynamic NTK one for each length above the model's own.
        alike.setdefault(0 if end <= turn else 1 if kind == "longrope" else end, []).append(row)
    if len(alike) == 1:
        return compute(position_ids)
    parts, made = torch.split(position_ids.reshape(1, -1), list(lengths), dim=1), dict[int, tuple[torch.Tensor, ...]]()
    for rows in alike.values():
        computed = compute(torch.cat([parts[row] for row in rows], dim=1))
        tensors = computed if isinstance(computed, tuple) else (computed,)
        apart = zip(*(torch.split(tensor, [lengths[row] for row in rows], dim=1) for tensor in tensors), strict=True)
        made |= dict(zip(rows, apart, strict=True))
    joined = tuple(torch.cat(column, dim=1) for column in zip(*(made[row] for row in range(len(ends))), strict=True))
    joined = tuple(tensor.reshape(*position_ids.shape, *tensor.shape[2:]) for tensor in joined)
    return joined if isinstance(computed, tuple) else joined[0]


def _forget(module: Any, prefix: str, device: torch.device) -> None:
    """Let dynamic NTK begin as in a new model."""
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(device))
