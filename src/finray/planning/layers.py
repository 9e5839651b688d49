"""Activation memory of decoder layers, measured by running one layer of each kind on fake tensors.

The model's own code runs with finray's attention and fused LoRA on fake tensors, which have shapes and dtypes but no
values, so a layer of a 70B takes a tenth of a second. Autograd reports the tensors that it saves; weights and their
copies in another dtype are excluded, because the estimate counts them separately. Saved memory has a constant part
(DoRA's), one proportional to a row's length, and one to its square (scores, masks): three runs determine it for every
length. Attention changes at some lengths (see `models/attention.py`), and each range between them has its own runs.

`tests/unit/planning/test_layers.py` compares this with what autograd saves for real tensors, for several architectures.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finray import compat
from finray.models import attention, experts, fused_lora, norms, states
from finray.models.blocks import is_kept
from finray.models.loading import DTYPES
from finray.models.towers import text_model, text_tower

_GPU_ATTENTION = "finray_planned"


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes by row lengths: a row of L tokens costs ``linear * L + square * L**2``."""

    # Longest L, linear and square factor, in the order of L; the last one's L does not matter.
    ranges: tuple[tuple[int, float, float], ...]
    fixed: float = 0.0

    def __call__(self, rows: Sequence[int]) -> float:
        """Bytes of rows of these lengths."""
        total = self.fixed
        for length in rows:
            linear, square = next((f[1:] for f in self.ranges if length <= f[0]), self.ranges[-1][1:])
            total += linear * length + square * length**2
        return total


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes that the parts of a model save in a forward pass, without weights and copies of weights."""

    hidden: int  # per token, of the hidden states after the last layer
    kept: Cost  # by all decoder layers together
    products: Cost  # the outputs of matrix products and attention among them, which selective checkpointing keeps
    inputs: Cost  # of all decoder layers, which checkpointing keeps
    outside: Cost  # by what stands before and after the decoder layers, up to the head
    working: Cost  # the most that exists at a time while one layer goes backward: what it kept, and gradients


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The settings that determine the size of activations.

    ``copies`` means that trained weights are materialized in that precision (FSDP, ZeRO), so that autocast has nothing
    to cast.
    """

    precision: str
    device: Literal["cpu", "cuda"]
    copies: bool = False


class LayerProbe:
    """Runs the decoder layers of a model.

    Args:
        model: on the meta device, with its adapter if it has one. One layer of each kind is copied.
        packs: whether its rows may be packed; otherwise it keeps its own attention, and a pass has rows of one length.
        counts: for a model with only one layer of each kind: the number of layers that each stands for, by index.

    Attributes:
        failure: why its layers cannot run on fake tensors, if they cannot.
    """

    def __init__(self, model: Any, *, packs: bool = True, counts: dict[int, int] | None = None) -> None:
        self._model, self._counts = _skeleton(model) if counts is None else (model, counts)
        self._packs = packs
        self._memory: dict[Arithmetic, LayerMemory] = {}
        self.failure = ""

    def with_adapter(self, add: Callable[[Any], Any]) -> LayerProbe:
        """The same model with an adapter: ``add`` wraps a copy."""
        return LayerProbe(add(copy.deepcopy(self._model)), packs=self._packs, counts=self._counts)

    def measure(self, how: Arithmetic) -> LayerMemory:
        """Saved bytes of the model for some settings; a rough estimate if its layers cannot run on fake tensors."""
        if how not in self._memory:
            try:
                self._memory[how] = self._measured(how)
            except Exception as error:
                # A model's code may fail in any way, and a plan must not end because of it.
                self.failure = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
                element = 4 if how.precision == "fp32" else 2
                width = int(self._model.config.get_text_config().hidden_size)
                linears = [module for module in self._model.modules() if hasattr(module, "in_features")]
                # Inputs and outputs of all linear layers, and a few times the hidden states where norms are not fused.
                sides = sum(linear.in_features + linear.out_features for linear in linears) / len(self._counts)
                each, layers = element * ((how.device != "cpu") * 4 * width + sides), sum(self._counts.values())
                stream = element * width
                per_token = each * layers, each / 2 * layers, stream * layers, 4 * width, 2 * each
                self._memory[how] = LayerMemory(stream, *(Cost(((0, value, 0.0),)) for value in per_token))
        return self._memory[how]

    def _measured(self, how: Arithmetic) -> LayerMemory:
        model = copy.deepcopy(self._model)
        config = model.config.get_text_config()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        # On a GPU, and for models with their own attention, one kernel serves all lengths.
        limits: list[int] = []
        if self._packs:
            attention.register()
            name = attention.NAME
            on_gpu = how.device == "cuda" and how.precision != "fp32"
            if on_gpu and not any(compat.layer_values(config, "attn_logit_softcapping")):
                from transformers import AttentionInterface

                AttentionInterface.register(_GPU_ATTENTION, _fused_attention)
                name = _GPU_ATTENTION
            else:
                limits = [max(window or 0 for window in compat.layer_values(config, "sliding_window"))]
                limits += [attention.EXPLICIT_UP_TO] if how.precision == "bf16" else []
            text_model(inner).set_attn_implementation(name)
            states.separate(inner, on_cpu=how.device == "cpu")
        experts.register()
        if how.device == "cpu":
            norms.fuse(inner)
        edges = [0, *sorted(limit for limit in set(limits) if limit)]
        ranges = []
        with torch.device("cpu"), compat.fake_tensors(), compat.without_grouped_mm():
            for module in model.modules():
                for name, weight in list(module.named_parameters(recurse=False)):
                    dtype = torch.float32 if weight.requires_grad and not how.copies else DTYPES[how.precision]
                    made = torch.nn.Parameter(torch.empty(weight.shape, dtype=dtype), weight.requires_grad)
                    setattr(module, name, made)
                for name, buffer in list(module.named_buffers(recurse=False)):
                    setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
                if (kinds := getattr(module, "rope_type", None)) is not None:
                    # Some choose between tables of one shape by the largest position, a value that fake tensors do not
                    # have.
                    module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            fused_lora.fuse(model)
            fused_lora.disable_inplace(model)
            model.train()
            run = _Run(model, inner, self._counts, how, packs=self._packs)
            fixed = np.zeros(5)
            # A state-space model runs a loop over the tokens, and each token costs the same.
            shortest = [61, 127, 251] if any(compat.layer_values(config, "num_attention_heads")) else [17, 37, 71]
            for low, high in zip(edges, [*edges[1:], None], strict=True):
                lengths = shortest if low == 0 else [int(low * 1.1) | 1, int(low * 2.1) | 1]
                if high is not None and lengths[-1] > high:
                    lengths = [low + (high - low) * part // len(lengths) for part in range(1, len(lengths) + 1)]
                # For all rows of a pass together.
                powers = np.vander(lengths, 3, increasing=True) * np.array([1, run.rows, run.rows])
                costs = np.array([run(length) for length in lengths])
                if low == 0:
                    fixed, linear, square = np.linalg.solve(powers, costs)
                else:
                    linear, square = np.linalg.solve(powers[:, 1:], costs - fixed)
                ranges.append((high or lengths[-1], linear, square))
        costs_by_part = [
            Cost(tuple((end, float(linear[part]), float(square[part])) for end, linear, square in ranges), fixed[part])
            for part in range(5)
        ]
        return LayerMemory(run.hidden, *costs_by_part)


def decoder_layers(model: Any) -> tuple[str, torch.nn.ModuleList | None]:
    """The longest module list of a model, or of its text tower, with its name."""
    inside = {id(module) for module in text_tower(model).modules()}
    named = ((name, module) for name, module in model.named_modules() if id(module) in inside)
    lists = [(name, module) for name, module in named if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda item: len(item[1]), default=("", None))


class _Skipped(torch.nn.Module):
    """Replaces a layer of an already measured kind: returns the hidden states."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        # Attributes that a model may read from a layer, such as the kind of its attention.
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float | bool)}
        self.__dict__.update({name: value for name, value in plain.items() if not name.startswith("_")})
        self.in_tuple = False

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self.in_tuple else hidden_states


def _skeleton(model: Any) -> tuple[Any, dict[int, int]]:
    """A copy of a model with one decoder layer of each kind, and the number of each kind by that layer's index."""
    name, layers = decoder_layers(model)
    if layers is None:
        return copy.deepcopy(model), {}
    first: dict[Any, int] = {}
    counts: Counter[int] = Counter()
    for index, layer in enumerate(layers):
        marks = ("sliding_window", "is_sliding", "attention_type", "layer_type")
        kind = (
            type(layer),
            *((name, tuple(weight.shape), weight.requires_grad) for name, weight in layer.named_parameters()),
            *(getattr(part, mark, None) for part in layer.modules() for mark in marks),
        )
        counts[first.setdefault(kind, index)] += 1
    kept = torch.nn.ModuleList(layer if index in counts else _Skipped(layer) for index, layer in enumerate(layers))
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], kept)
    try:
        return copy.deepcopy(model), dict(counts)
    finally:
        setattr(parent, name.rpartition(".")[2], layers)


def _fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Saves what variable-length attention saves on a GPU: inputs, output, and a number per token and head."""
    del module
    query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None


class _Saved:
    """A tensor that an autograd node saves for its backward pass; freed with the node."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Tracks what autograd currently saves: DoRA's norms have graphs that are freed during the forward pass."""

    def __init__(self) -> None:
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        super().__init__(self._save, lambda saved: saved.tensor)

    def _save(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The currently saved storages by id, each once."""
        held = [saved.tensor.untyped_storage() for saved in self._saved]
        return {id(storage): storage for storage in held}


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Forward passes of a model in which each decoder layer immediately runs its backward pass.

    Args:
        model: with fake weights.
        inner: the Transformers model in it.
        counts: number of layers of each kind, by the index of the copied one.
        how: the settings.
        packs: whether rows share a pass.
    """

    def __init__(self, model: Any, inner: Any, counts: dict[int, int], how: Arithmetic, *, packs: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden = 0  # bytes per token of the hidden states after the last layer
        self._body = text_tower(inner)
        self._how = how
        self._packs = packs
        # Two rows, because attention over several rows copies their outputs.
        self.rows = 2 if packs else 1
        shapes = {tuple(weight.shape) for weight in model.parameters() if weight.ndim > 1}
        # Shapes of weight gradients, which products may return transposed.
        self._shapes = shapes | {shape[::-1] for shape in shapes}
        # Bytes of each live storage, by id; weights and copies of them in another dtype count as zero. Ids are reused
        # once a storage is freed, so a weak reference's callback removes them.
        self._sizes: dict[int, int] = {id(weight.untyped_storage()): 0 for weight in model.parameters()}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._now = self._peak = self._products = 0
        self._phase = "outside"
        # Saved outside of the layers: graphs that end before a layer, and tensors that layers share.
        self._graphs: list[Any] = []
        self._shared: dict[int, torch.UntypedStorage] = {}
        self._totals = np.zeros(5)
        layers = list(decoder_layers(self._body)[1] or [])
        for index, count in counts.items():
            layers[index].forward = self._counted(layers[index], count, layers)

    def __call__(self, length: int) -> Any:
        """Bytes of rows of this length: kept, products, inputs, outside, working."""
        rows = (length,) * self.rows
        options: dict[str, Any] = {}
        if self._packs:
            starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
            options = {
                "position_ids": torch.zeros(1, sum(rows), dtype=torch.int64),
                "segment_lengths": attention.RowLengths(rows),
                "cu_seq_lens_q": starts,
                "cu_seq_lens_k": starts,
                "max_length_q": length,
                "max_length_k": length,
            }
        self._totals[:] = 0
        self._graphs.clear()
        self._shared.clear()
        tokens = torch.zeros(1, sum(rows), dtype=torch.int64)
        lower = None if self._how.precision == "fp32" else DTYPES[self._how.precision]
        saved = _SavedTensors()
        rows_of_pass = states.of_rows(options.get("segment_lengths"))
        with torch.autocast("cpu", lower, enabled=lower is not None), rows_of_pass, self, saved:
            hidden = self._body(input_ids=tokens, use_cache=False, **options).last_hidden_state
        self.hidden = hidden.nbytes // sum(rows)
        self._totals[3] = self._bytes({**self._shared, **saved.storages()})
        return self._totals.copy()

    def _bytes(self, storages: Mapping[int, torch.UntypedStorage]) -> int:
        return sum(self._sizes.get(key, storage.nbytes()) for key, storage in storages.items())

    def _counted(self, layer: Any, count: int, layers: list[Any]) -> Callable[..., Any]:
        """A layer's forward pass followed by its backward pass, with both measured."""
        forward, trained = layer.forward, [weight for weight in layer.parameters() if weight.requires_grad]

        def run(*args: Any, **kwargs: Any) -> Any:
            # Its input requires a gradient, like that of an inner layer; with an adapter the first layer's would not.
            given = args[0] if args else kwargs["hidden_states"]
            hidden = given.detach().requires_grad_()
            args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
            # Masks and positions are created once for all layers.
            shared = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
            shared.discard(id(hidden.untyped_storage()))
            self._graphs.append(given.grad_fn)
            saved = _SavedTensors()
            before, self._products, self._phase = self._now, 0, "forward"
            with saved:
                result = forward(*args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            storages = saved.storages()
            self._shared.update({key: storage for key, storage in storages.items() if key in shared})
            kept = self._bytes({key: storage for key, storage in storages.items() if key not in shared})
            self._peak, self._phase = self._now, "backward"
            torch.autograd.grad(output, [hidden, *trained], torch.empty_like(output), allow_unused=True)
            self._phase = "outside"
            self._totals[:3] += count * np.array([kept, self._products, hidden.nbytes])
            self._totals[4] = max(self._totals[4], self._peak - before)
            for other in layers:
                if isinstance(other, _Skipped):
                    other.in_tuple = isinstance(result, tuple)
            passed = output.detach().requires_grad_()
            return (passed, *result[1:]) if isinstance(result, tuple) else passed

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor)]
        if self._phase == "forward" and (is_kept(str(func)) or "grouped_mm" in str(func)):
            self._products += sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key in self._sizes:
                if func is torch.ops.aten.bernoulli_.float:
                    # A dropout mask has one byte per element; that of fake tensors is as wide as its input.
                    self._now += tensor.numel() - self._sizes[key]
                    self._sizes[key] = tensor.numel()
                continue
            copied = func is torch.ops.aten._to_copy.default and self._sizes.get(id(args[0].untyped_storage())) == 0
            if copied or (self._phase == "backward" and tuple(tensor.shape) in self._shapes):
                size = 0
            self._sizes[key] = size

            def gone(_: Any, key: int = key) -> None:
                self._now -= self._sizes.pop(key)
                del self._references[key]

            self._references[key] = weakref.ref(storage, gone)
            self._now += size
        self._peak = max(self._peak, self._now)
        return result
