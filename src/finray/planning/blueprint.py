"""Parameter counts of a model, built on torch's meta device from its config, without weights.

Adapters are added by the same code as in training, so the counts are those of the run.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finray import compat
from finray.config.schema import AdapterConfig, ModelConfig
from finray.config.tasks import CAUSAL_LM, task_spec
from finray.errors import FinrayError
from finray.models import adapters, targets, towers
from finray.models.head import plain_head
from finray.models.loading import load_model
from finray.models.packing_check import row_limit
from finray.planning.layers import LayerProbe, decoder_layers
from finray.pretrained.tokenizers import new_ids
from finray.pretrained.weights import StoredWeights, stored_weights


class LinearShape(NamedTuple):
    """A linear layer: width of its input and output."""

    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        """Elements of the matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Counts and widths of a model with its adapter, if it has one."""

    parameters: int  # all of them, as the header of a run counts them
    trainable: int
    adapter: int
    embedding: int  # elements of the input embedding
    vocabulary: int  # its rows
    hidden: int
    layers: int
    layer: int  # parameters of the largest decoder layer, without its adapter
    query: int  # elements per token of all query heads of a layer
    linears: tuple[tuple[LinearShape, int], ...]  # all but the head, and how many there are of each
    experts: int = 0  # elements of matrices that are those of all experts of a layer
    tied: bool = True  # whether the head is the input embedding
    chunks_head: bool = True  # whether `finray.models.head` makes its logits in chunks
    rank: int = 0  # of the adapter, 0 without one
    window: int | None = None  # most tokens that a token attends to, in layers with a sliding window
    context: int | None = None  # most positions (`max_position_embeddings`), where the model names them
    learned_positions: bool = False  # positions are rows of a table, so that the context is a hard limit
    classifies: bool = False  # a label for each row, and no logits of tokens
    causal: bool = True  # whether a token attends to those before it alone
    kept: int = 0  # parameters of parts that do not read text, which stay as they are
    parts: tuple[str, ...] = ()  # their names
    adapted: str = ""  # what the adapter is on, where that is not all linear layers

    @property
    def base(self) -> int:
        """Parameters without the adapter."""
        return self.parameters - self.adapter

    @property
    def head(self) -> int:
        """Elements of the matrix that makes logits of tokens; a classifier's own head is among the linear layers."""
        return 0 if self.classifies else self.vocabulary * self.hidden

    @property
    def linear_weights(self) -> int:
        """Elements of all linear layers but the head: what quantization stores in fewer bits."""
        return sum(linear.weights * count for linear, count in self.linears)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The input of a memory estimate: counts, layers that can be run, and headers of the model's files, if any.

    ``model`` is on the meta device, with its adapter.
    """

    model: Any
    blueprint: Blueprint
    probe: LayerProbe
    stored: StoredWeights | None = None

    def with_lora(self, rank: int) -> ModelShape:
        """The same model with LoRA, if it has no adapter yet."""
        if self.blueprint.adapter:
            return self
        adapter = AdapterConfig(rank=rank)
        probe = self.probe.with_adapter(lambda model: adapters.add_lora(model, adapter, seed=0))
        model = copy.deepcopy(self.model)
        return replace(self, model=model, blueprint=draw_blueprint(model, adapter), probe=probe)


def model_shape(model: ModelConfig, adapter: AdapterConfig, *, packs: bool) -> ModelShape:
    """The shape of a model with its adapter.
    Raises ModelError: the model cannot be built, or the adapter's target modules match nothing."""
    built = load_model(model, dtype=torch.float32, on_meta=True)
    blueprint = draw_blueprint(built, adapter, new_ids(model), task_spec(model.task).peft_type)
    return ModelShape(built, blueprint, LayerProbe(built, packs=packs), stored_in(model))


def stored_in(model: ModelConfig) -> StoredWeights | None:
    """The headers of a model directory's weights; damaged files are reported by the quick checks."""
    folder = Path(model.name)
    if not (folder / "config.json").is_file():
        return None
    try:
        return stored_weights(folder)
    except FinrayError:
        return None


def build_blueprint(model: ModelConfig, adapter: AdapterConfig) -> Blueprint:
    """The blueprint of a model and its adapter.
    Raises ModelError: the model cannot be built, or the adapter's target modules match nothing."""
    built = load_model(model, dtype=torch.float32, on_meta=True)
    return draw_blueprint(built, adapter, new_ids(model), task_spec(model.task).peft_type)


def draw_blueprint(
    model: Any, adapter: AdapterConfig, new_tokens: tuple[int, ...] = (), task_type: str = CAUSAL_LM.peft_type
) -> Blueprint:
    """As :func:`build_blueprint`, of a Transformers model on any device; the adapter is added to this very model.
    Raises ModelError: the adapter's target modules match nothing."""
    config = model.config.get_text_config()
    table, output, head = model.get_input_embeddings(), model.get_output_embeddings(), plain_head(model)
    base = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model)[1] or []]
    parts = towers.other_parts(model)
    kept = sum(weight.numel() for part in parts for weight in model.get_submodule(part).parameters())
    of_text: Any = towers.text_tower(model) if parts else model
    linears = [
        module
        for module in of_text.modules()
        if module is not output and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    context, is_learned = row_limit(model)
    masks = {module.is_causal for module in of_text.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    tied = head is not None and head.weight_VH is table.weight
    vocabulary_rows, hidden = (int(size) for size in table.weight.shape)
    experts = sum(weight.numel() for weight in targets.experts_of(model).values())
    wrapped = model
    if adapter.method != "none":
        model.requires_grad_(False)
        with torch.device("meta"):
            wrapped = adapters.add_lora(model, adapter, seed=0, new_tokens=new_tokens, task_type=task_type)
    total = sum(parameter.numel() for parameter in wrapped.parameters())
    head_is_adapted = any(module.base_layer is output for module in model.modules() if hasattr(module, "lora_A"))
    # GPT-2 keeps its matrices transposed.
    sides = [
        module.weight.shape if type(module).__name__ == "Conv1D" else module.weight.shape[::-1] for module in linears
    ]
    counts = Counter(LinearShape(int(inputs), int(outputs)) for inputs, outputs in sides)
    # Of the layer with the widest queries, and the window of the layers that have one.
    names = ("num_attention_heads", "head_dim", "sliding_window")
    heads, widths, windows = (compat.layer_values(config, name) for name in names)
    query = max(
        int(count or 1) * int(width or int(config.hidden_size) // (count or 1))
        for count, width in zip(heads, widths, strict=True)
    )
    window = max((size or 0 for size in windows), default=0) or None
    window = window if getattr(config, "use_sliding_window", True) else None
    return Blueprint(
        parameters=total,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        adapter=total - base,
        embedding=vocabulary_rows * hidden,
        vocabulary=vocabulary_rows,
        hidden=int(config.hidden_size),
        layers=len(layers),
        layer=max(layers, default=0),
        query=query,
        linears=tuple(counts.items()),
        experts=experts,
        tied=tied,
        chunks_head=head is not None and not head_is_adapted,
        rank=adapter.rank if adapter.method != "none" else 0,
        window=None if window is None else int(window),
        context=context,
        learned_positions=is_learned,
        classifies=output is None,
        causal=masks != {False},
        kept=kept,
        parts=tuple(parts),
        adapted="" if adapter.method == "none" else targets.described(wrapped),
    )
