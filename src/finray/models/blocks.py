"""The repeated blocks of a model: gradient checkpointing, activation offload, compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from finray import compat
from finray.models import attention, fused_lora, norms, states

# Smaller tensors are not offloaded: copying them would cost more than it saves.
SMALLEST_OFFLOAD = 2**20
# Selective checkpointing stores the outputs of matrix products and of attention. Everything else (norms, rotary
# embeddings, activations) is recomputed, which is cheap.
_KEPT = (
    *("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten._grouped_mm.default"),
    "mkldnn._linear_pointwise.default",
)

# Whether the module that runs changes products in place: then none may be kept.
_CHANGES: ContextVar[bool] = ContextVar("finray_changes", default=False)


def blocks_of(model: Any) -> list[torch.nn.Module]:
    """The repeated blocks of a model: the members of the outermost lists of modules of one kind, or of kinds with a
    common one below torch's, as layers with attention and layers with a state have in a hybrid."""
    blocks: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and id(module) not in inside:
            kinds = [set(type(member).__mro__) for member in module]
            weights = [id(weight) for member in module for weight in member.parameters()]
            alike = kinds and set.intersection(*kinds) - set(torch.nn.Module.__mro__)
            # Blocks that share a weight (Zamba) cannot be sharded one by one.
            if alike and weights and len(weights) == len(set(weights)):
                blocks += list(module)
                inside |= {id(part) for part in module.modules()}
    return blocks


def wrap_blocks(model: Any, *, checkpointing: str = "none", offload: bool = False, smallest: int | None = None) -> None:
    """Make every block store less on the device for the backward pass; results stay the same.

    Args:
        model: the model.
        checkpointing: ``none``, ``selective`` or ``full``.
        offload: whether stored tensors are moved to CPU memory until the backward pass.
        smallest: minimum size in bytes of tensors that are moved.
    """
    for block in blocks_of(model):
        forward = block.forward
        if checkpointing != "none":
            if checkpointing == "selective":
                fused_lora.disable_inplace(block)
                for part in block.modules():
                    if compat.adds_bias_in_place(part):
                        part.forward = _recomputed(part.forward)
            forward = _checkpointed(forward, selective=checkpointing == "selective")
        if offload:
            forward = _offloaded(block, forward, SMALLEST_OFFLOAD if smallest is None else smallest)
        block.forward = forward


def compile_blocks(model: Any, *, backend: str = "inductor") -> None:
    """Compile every block, for any number of tokens; blocks of one kind share the compiled code.

    Call before :func:`wrap_blocks`, so that recomputation uses the compiled code.

    Attention over packed rows is excluded, and layers that take rows apart: they would be recompiled for each
    combination of row lengths.
    """
    attention.register(torch.compiler.disable(attention.packed_attention))  # type: ignore[no-untyped-call]
    states.not_compiled(model)
    norms.unfuse(model)
    for block in blocks_of(model):
        # Checkpointing and hooks that gather weights stay outside: a compiler that finds excluded code inside a
        # checkpoint would leave the whole layer uncompiled.
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)


def _checkpointed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
        kept = is_kept(str(operation)) and not _CHANGES.get()
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    options: dict[str, Any] = {"context_fn": contexts} if selective else {}

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(states.kept_rows(forward), *args, use_reentrant=False, **options, **kwargs)

    return run


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _CHANGES.set(True)
        try:
            return forward(*args, **kwargs)
        finally:
            _CHANGES.reset(token)

    return run


def is_kept(operation: str) -> bool:
    """Whether selective checkpointing stores the output of an operation, named as torch prints it."""
    name = operation.partition(".")[2] or operation
    is_attention = ("attention" in name or "attn" in name) and "backward" not in name
    return operation in _KEPT or is_attention


def _offloaded(block: torch.nn.Module, forward: Callable[..., Any], smallest: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        weights = list(block.parameters())
        storages = {weight.untyped_storage().data_ptr() for weight in weights}
        shapes = {shape for weight in weights for shape in (tuple(weight.shape), tuple(weight.shape)[::-1])}

        def moves(tensor: torch.Tensor) -> bool:
            # Weights are on the device anyway. Copies in another dtype belong to autocast, which caches them.
            is_weight = tensor.untyped_storage().data_ptr() in storages or tuple(tensor.shape) in shapes
            return tensor.nbytes >= smallest and not is_weight

        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_pack, moves), _unpack):
            return forward(*args, **kwargs)

    return run


def _pack(moves: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> Any:
    if not moves(tensor):
        return tensor
    # In the compute stream, so that the copy is ordered correctly; pinned memory makes it asynchronous.
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    held.copy_(tensor, non_blocking=True)
    return tensor.device, held


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    device, held = kept
    back: torch.Tensor = held.to(device, non_blocking=True)
    return back
