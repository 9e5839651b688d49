"""A model counted without its weights: built on torch's meta device from its configuration alone.

Adapters are added there by the same code that adds them in training, so the counts are those of the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finray.config.schema import AdapterConfig, ModelConfig
from finray.config.tasks import CAUSAL_LM, task_spec
from finray.errors import FinrayError
from finray.models import adapters
from finray.models.head import plain_head
from finray.models.loading import load_model
from finray.planning.layers import LayerProbe, decoder_layers
from finray.pretrained.tokenizers import new_ids
from finray.pretrained.weights import StoredWeights, stored_weights


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer: width of its input and output, and whether it has a LoRA adapter."""

    inputs: int
    outputs: int
    adapted: bool = False

    @property
    def weights(self) -> int:
        """Elements of the matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Counts and widths of a model with its adapter, if it has one.

    Attributes:
        parameters: all of them, as the header of a run counts them.
        trainable: those that are trained.
        adapter: those of the adapter.
        embedding: elements of the input embedding.
        vocabulary: its rows.
        hidden: width of the hidden states.
        layers: decoder layers.
        layer: parameters of the largest decoder layer, without its adapter.
        query: elements per token of all query heads of a layer.
        linears: all linear layers but the head, and how many there are of each.
        tied: whether the head is the input embedding.
        plain_head: whether the head is a projection that ``finray.models.head`` computes in chunks.
        head_is_adapted: whether the head has an adapter.
        rank: rank of the adapter, 0 without one.
        window: most tokens that a token attends to in layers with a sliding window; None without such layers.
        context: most positions (``max_position_embeddings``), or None where the model names none.
        learned_positions: whether positions are rows of a table, so that the context is a hard limit.
    """

    parameters: int
    trainable: int
    adapter: int
    embedding: int
    vocabulary: int
    hidden: int
    layers: int
    layer: int
    query: int
    linears: tuple[tuple[LinearShape, int], ...]
    tied: bool = True
    plain_head: bool = True
    head_is_adapted: bool = False
    rank: int = 0
    window: int | None = None
    context: int | None = None
    learned_positions: bool = False

    @property
    def base(self) -> int:
        """Parameters without the adapter."""
        return self.parameters - self.adapter

    @property
    def head(self) -> int:
        """Elements of the head's matrix."""
        return self.vocabulary * self.hidden

    @property
    def linear_weights(self) -> int:
        """Elements of all linear layers but the head: what quantisation stores in fewer bits."""
        return sum(linear.weights * count for linear, count in self.linears)

    def with_lora(self, rank: int) -> Blueprint:
        """The same model with the adapter ``lora`` of a rank on all linear layers but the head."""
        if self.adapter:
            return self
        linears = tuple((replace(linear, adapted=True), count) for linear, count in self.linears)
        adapter = sum(rank * (linear.inputs + linear.outputs) * count for linear, count in linears)
        parameters = self.parameters + adapter
        return replace(self, parameters=parameters, trainable=adapter, adapter=adapter, linears=linears, rank=rank)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an estimate of memory reads of a model.

    Attributes:
        blueprint: its counts.
        probe: runs its layers.
        stored: headers of its files, or None where there are none here.
    """

    blueprint: Blueprint
    probe: LayerProbe
    stored: StoredWeights | None = None

    def with_lora(self, rank: int) -> ModelShape:
        """The same model under LoRA, if it has no adapter yet."""
        if self.blueprint.adapter:
            return self
        probe = self.probe.with_adapter(lambda model: adapters.add_lora(model, AdapterConfig(rank=rank), seed=0))
        return replace(self, blueprint=self.blueprint.with_lora(rank), probe=probe)


def model_shape(model: ModelConfig, adapter: AdapterConfig, *, packs: bool) -> ModelShape:
    """The shape of a model with its adapter.

    Raises:
        ModelError: the model cannot be built, or the adapter's target modules match nothing.
    """
    built = build_meta_model(model)
    blueprint = draw_blueprint(built, adapter, new_ids(model), task_spec(model.task).peft_type)
    return ModelShape(blueprint, LayerProbe(built, packs=packs), stored_in(model))


def stored_in(model: ModelConfig) -> StoredWeights | None:
    """The headers of a model directory's weights; damaged files are a problem that the quick checks have noted."""
    folder = Path(model.name)
    if not (folder / "config.json").is_file():
        return None
    try:
        return stored_weights(folder)
    except FinrayError:
        return None


def build_meta_model(model: ModelConfig) -> Any:
    """The model on the meta device: every module and shape, no weights read and none made.

    Raises:
        ModelError: the configuration cannot be loaded, or is of no model for the task.
    """
    return load_model(model, dtype=torch.float32, on_meta=True)


def build_blueprint(model: ModelConfig, adapter: AdapterConfig) -> Blueprint:
    """The blueprint of a model and its adapter.

    Raises:
        ModelError: the model cannot be built, or the adapter's target modules match nothing.
    """
    return draw_blueprint(build_meta_model(model), adapter, new_ids(model), task_spec(model.task).peft_type)


def draw_blueprint(
    model: Any, adapter: AdapterConfig, new_tokens: tuple[int, ...] = (), task_type: str = CAUSAL_LM.peft_type
) -> Blueprint:
    """As :func:`build_blueprint`, of a Transformers model on any device; the adapter is added to this very model.

    Raises:
        ModelError: the adapter's target modules match nothing.
    """
    config = model.config.get_text_config()
    table, output, head = model.get_input_embeddings(), model.get_output_embeddings(), plain_head(model)
    base = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model)[1] or []]
    linears = {
        name: module
        for name, module in model.named_modules()
        if module is not output and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D")
    }
    positions = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module is not table and module.embedding_dim == config.hidden_size
    ]
    tied = head is not None and head.weight_VH is table.weight
    vocabulary_rows, hidden = (int(size) for size in table.weight.shape)
    if adapter.method != "none":
        model.requires_grad_(False)
        with torch.device("meta"):
            wrapped = adapters.add_lora(model, adapter, seed=0, new_tokens=new_tokens, task_type=task_type)
        total = sum(parameter.numel() for parameter in wrapped.parameters())
    else:
        total = base
    adapted = {id(module.base_layer) for module in model.modules() if hasattr(module, "lora_A")}
    counts: Counter[LinearShape] = Counter()
    for module in linears.values():
        # GPT-2 keeps its matrices transposed.
        sides = module.weight.shape if type(module).__name__ == "Conv1D" else module.weight.shape[::-1]
        counts[LinearShape(int(sides[0]), int(sides[1]), id(module) in adapted)] += 1
    heads = int(getattr(config, "num_attention_heads", 1))
    head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    context = getattr(config, "max_position_embeddings", None)
    return Blueprint(
        parameters=total,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        adapter=total - base,
        embedding=vocabulary_rows * hidden,
        vocabulary=vocabulary_rows,
        hidden=int(config.hidden_size),
        layers=len(layers),
        layer=max(layers, default=0),
        query=heads * int(head_dim),
        linears=tuple(counts.items()),
        tied=tied,
        plain_head=head is not None,
        head_is_adapted=id(output) in adapted,
        rank=adapter.rank if adapter.method != "none" else 0,
        window=None if window is None else int(window),
        context=None if context is None else int(context),
        learned_positions=bool(positions),
    )
