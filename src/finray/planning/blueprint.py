"""The shapes of a model, counted without its weights: what a memory estimate and a plan need to know.

The model is built on torch's meta device, so only its configuration is read. Adapters are added there by the same code
that adds them in training, so the counts are those of the run. What a module does is told from where it stands: in a
decoder layer, linear layers under one parent are a block; the last of them that writes the model's width is its
outlet, the others are its inlets. Parts that fit no such pattern (experts kept as one tensor, state-space layers) are
counted as parameters, and named in :attr:`Blueprint.unknown`, because their activations are not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from finray.config.schema import AdapterConfig, ModelConfig
from finray.models import adapters, vocabulary
from finray.models.head import plain_head
from finray.pretrained.tokenizers import new_ids, new_tokens, not_loaded, silence_transformers, source_options


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer.

    Attributes:
        name: the ending of its name, such as ``q_proj``.
        inputs: width of what it reads.
        outputs: width of what it writes.
        bias: whether it has one.
        adapted: whether it has a LoRA adapter.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    adapted: bool = False

    @property
    def weights(self) -> int:
        """Elements of the matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Block:
    """The linear layers of one attention or feed-forward module, and how many decoder layers have such a one.

    Attributes:
        kind: ``attention`` or ``mlp``.
        inlets: the layers that read what enters the block.
        outlet: the layer that writes what leaves it.
        count: how many equal blocks there are.
    """

    kind: str
    inlets: tuple[LinearShape, ...]
    outlet: LinearShape
    count: int

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Inlets and outlet."""
        return (*self.inlets, self.outlet)

    @property
    def opened(self) -> int:
        """Elements per token that the inlets write."""
        return sum(linear.outputs for linear in self.inlets)

    @property
    def query(self) -> int:
        """Elements per token of all query heads (attention blocks)."""
        return self.outlet.inputs

    @property
    def gated(self) -> bool:
        """Whether the inlets give a gate and what it gates (feed-forward blocks)."""
        return self.opened >= 2 * self.outlet.inputs


@dataclass(frozen=True, slots=True)
class Norms:
    """Normalisations of one kind in all decoder layers.

    Attributes:
        width: elements per token that one of them reads.
        count: how many there are.
        composed: written in Python operations that work in fp32 (Llama's and its relatives'), not one kernel.
    """

    width: int
    count: int
    composed: bool


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Counts and shapes of a model with its adapter, if it has one.

    Attributes:
        parameters: all of them, as the header of a run counts them.
        trainable: those that are trained.
        adapter: those of the adapter.
        embedding: elements of the input embedding.
        vocabulary: its rows.
        hidden: width of the residual stream.
        layers: decoder layers.
        layer: parameters of the largest decoder layer, without its adapter.
        heads: query heads.
        context: most positions (``max_position_embeddings``), or None where the model names none.
        learned_positions: whether positions are rows of a table, so that the context is a hard limit.
        tied: whether the head is the input embedding.
        plain_head: whether the head is a projection that ``finray.models.head`` computes in chunks.
        head_is_adapted: whether the head has an adapter.
        blocks: linear layers of the decoder.
        norms: normalisations of the decoder.
        final_norm_is_composed: as :attr:`Norms.composed`, of the one after the last layer.
        activation: name of the feed-forward's activation.
        softcap: whether attention scores are capped.
        window: most tokens that a token sees in windowed layers, or None.
        rank: rank of the adapter, 0 without one.
        other_linears: linear layers outside of blocks, the head left out, and how many there are of each.
        unknown: kinds of modules in the decoder whose activations are not counted.
    """

    parameters: int
    trainable: int
    adapter: int
    embedding: int
    vocabulary: int
    hidden: int
    layers: int
    layer: int
    heads: int
    context: int | None
    learned_positions: bool
    tied: bool
    plain_head: bool
    head_is_adapted: bool
    blocks: tuple[Block, ...]
    norms: tuple[Norms, ...]
    final_norm_is_composed: bool
    activation: str
    softcap: bool
    window: int | None
    rank: int
    other_linears: tuple[tuple[LinearShape, int], ...] = ()
    unknown: tuple[str, ...] = ()

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
        """Elements of the decoder's linear layers: what quantisation stores in fewer bits."""
        inside = sum(linear.weights * block.count for block in self.blocks for linear in block.linears)
        return inside + sum(linear.weights * count for linear, count in self.other_linears)

    def with_lora(self, rank: int) -> Blueprint:
        """The same model with the adapter ``lora`` of a rank on all linear layers but the head."""
        if self.adapter:
            return self
        blocks = tuple(
            replace(
                block,
                inlets=tuple(replace(linear, adapted=True) for linear in block.inlets),
                outlet=replace(block.outlet, adapted=True),
            )
            for block in self.blocks
        )
        others = tuple((replace(linear, adapted=True), count) for linear, count in self.other_linears)
        counted = [(linear, block.count) for block in blocks for linear in block.linears] + list(others)
        adapter = sum(rank * (linear.inputs + linear.outputs) * count for linear, count in counted)
        return replace(
            self,
            parameters=self.parameters + adapter,
            trainable=adapter,
            adapter=adapter,
            blocks=blocks,
            other_linears=others,
            rank=rank,
        )


def build_meta_model(model: ModelConfig) -> Any:
    """The model on the meta device: every module and shape, no weights read and none made.

    Raises:
        ModelError: the configuration cannot be loaded, or is of no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    silence_transformers()
    try:
        config = AutoConfig.from_pretrained(**source_options(model))
        # Older configurations of GGUF files and quantised checkpoints would start a quantiser.
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=model.trust_remote_code
            )
            added = new_tokens(model)
            if added is not None:
                vocabulary.widen(made, added)
            return made
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise not_loaded("model's configuration", model, error) from error


def build_blueprint(model: ModelConfig, adapter: AdapterConfig) -> Blueprint:
    """The blueprint of a model and its adapter.

    Raises:
        ModelError: the model cannot be built, or the adapter's target modules match nothing.
    """
    return draw_blueprint(build_meta_model(model), adapter, new_ids(model))


def draw_blueprint(model: Any, adapter: AdapterConfig, new_tokens: tuple[int, ...] = ()) -> Blueprint:
    """As :func:`build_blueprint`, of a model on any device; the adapter is added to this very model.

    Raises:
        ModelError: the adapter's target modules match nothing.
    """
    names = dict(model.named_modules())
    head = plain_head(model)
    base = sum(parameter.numel() for parameter in model.parameters())
    wrapped = model
    if adapter.method != "none":
        model.requires_grad_(False)
        with torch.device("meta"):
            wrapped = adapters.add_lora(model, adapter, seed=0, new_tokens=new_tokens)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    total = sum(parameter.numel() for parameter in wrapped.parameters())
    trainable = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)
    head_name = next((name for name, module in names.items() if module is model.get_output_embeddings()), None)
    parts = _Inventory(model.config.get_text_config(), names, adapted, head_name)
    return Blueprint(
        parameters=total,
        trainable=trainable,
        adapter=total - base,
        plain_head=head is not None,
        head_is_adapted=head_name in adapted,
        tied=head is not None and head.weight_VH is names[_embedding_name(names, model)].weight,
        rank=adapter.rank if adapter.method != "none" else 0,
        **parts.shapes(names[_embedding_name(names, model)]),
    )


def _embedding_name(names: dict[str, Any], model: Any) -> str:
    wanted = model.get_input_embeddings()
    return next(name for name, module in names.items() if module is wanted)


class _Inventory:
    """Sorts the modules of a model into blocks, norms and the rest.

    Args:
        config: the text model's configuration.
        names: name to module, as it was before adapters were added.
        adapted: names of the modules that have an adapter.
        head: name of the head.
    """

    def __init__(self, config: Any, names: dict[str, Any], adapted: set[str], head: str | None) -> None:
        self._config = config
        self._names = names
        self._adapted = adapted
        self._head = head
        self._hidden = int(config.hidden_size)
        self._layers = _decoder_layers(names)
        self._children: dict[str, list[str]] = {}
        for name, module in names.items():
            if _is_linear(module) and name != head:
                self._children.setdefault(name.rpartition(".")[0], []).append(name)

    def shapes(self, embedding: Any) -> dict[str, Any]:
        """Everything of a :class:`Blueprint` that follows from the modules."""
        config = self._config
        found: Counter[tuple[str, tuple[LinearShape, ...], LinearShape]] = Counter()
        others: Counter[LinearShape] = Counter()
        for parent, children in self._children.items():
            shapes = [self._shape(name) for name in children]
            outlets = [shape for shape in shapes if shape.outputs == self._hidden]
            if self._in_layer(parent) and len(shapes) > 1 and outlets:
                outlet = outlets[-1]
                inlets = list(shapes)
                inlets.remove(outlet)
                found[self._kind(parent), tuple(inlets), outlet] += 1
            else:
                others.update(shapes)
        blocks = tuple(Block(kind, inlets, outlet, count) for (kind, inlets, outlet), count in found.items())
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        context = getattr(config, "max_position_embeddings", None)
        return {
            "embedding": embedding.weight.numel(),
            "vocabulary": embedding.weight.shape[0],
            "hidden": self._hidden,
            "layers": len(self._layers),
            "layer": max((self._parameters(layer) for layer in self._layers), default=0),
            "heads": int(getattr(config, "num_attention_heads", 1)),
            "context": None if context is None else int(context),
            "learned_positions": self._has_position_table(embedding),
            "blocks": blocks,
            "norms": self._norms(blocks),
            "final_norm_is_composed": self._final_norm_is_composed(),
            "activation": str(
                getattr(config, "hidden_act", None)
                or getattr(config, "hidden_activation", None)
                or getattr(config, "activation_function", "silu")
            ),
            "softcap": getattr(config, "attn_logit_softcapping", None) is not None,
            "window": None if window is None else int(window),
            "other_linears": tuple(others.items()),
            "unknown": self._unknown(),
        }

    def _shape(self, name: str) -> LinearShape:
        module = self._names[name]
        if type(module).__name__ == "Conv1D":
            inputs, outputs = module.weight.shape
        else:
            outputs, inputs = module.weight.shape
        bias = getattr(module, "bias", None) is not None
        return LinearShape(name.rpartition(".")[2], int(inputs), int(outputs), bias, name in self._adapted)

    def _in_layer(self, name: str) -> bool:
        return any(name.startswith(f"{layer}.") for layer in self._layers)

    def _kind(self, parent: str) -> str:
        return "attention" if "attention" in type(self._names[parent]).__name__.lower() else "mlp"

    def _parameters(self, layer: str) -> int:
        # The names were taken before adapters were added, and PEFT keeps the wrapped layers as they were.
        parts = (module for name, module in self._names.items() if name == layer or name.startswith(f"{layer}."))
        return sum(tensor.numel() for module in parts for tensor in module.parameters(recurse=False))

    def _norms(self, blocks: tuple[Block, ...]) -> tuple[Norms, ...]:
        attention = next((block for block in blocks if block.kind == "attention"), None)
        counts: Counter[tuple[int, bool]] = Counter()
        for name, module in self._names.items():
            if not (_is_norm(module) and self._in_layer(name)):
                continue
            width = int(module.weight.shape[0])
            if width != self._hidden and attention is not None and name.rpartition(".")[2][:1] in "qkv":
                # One vector for all heads: what it reads is as wide as the queries, or as the keys.
                keys = (attention.opened - attention.query) // 2
                width = attention.query if name.rpartition(".")[2].startswith("q") else keys
            counts[width, _is_composed(module)] += 1
        return tuple(Norms(width, count, composed) for (width, composed), count in counts.items())

    def _final_norm_is_composed(self) -> bool:
        outside = [m for name, m in self._names.items() if _is_norm(m) and not self._in_layer(name)]
        return any(_is_composed(module) for module in outside)

    def _has_position_table(self, embedding: Any) -> bool:
        tables = [module for module in self._names.values() if isinstance(module, torch.nn.Embedding)]
        return any(table is not embedding and table.weight.shape[1] == self._hidden for table in tables)

    def _unknown(self) -> tuple[str, ...]:
        kinds = {
            type(module).__name__
            for name, module in self._names.items()
            if self._in_layer(name)
            and any(True for _ in module.parameters(recurse=False))
            and not (_is_linear(module) or _is_norm(module) or isinstance(module, torch.nn.Embedding))
        }
        return tuple(sorted(kinds))


def _decoder_layers(names: dict[str, Any]) -> list[str]:
    """Names of the decoder layers: the members of the longest module list."""
    lists = [name for name, module in names.items() if isinstance(module, torch.nn.ModuleList)]
    longest = max(lists, key=lambda name: len(names[name]), default=None)
    return [] if longest is None else [f"{longest}.{index}" for index in range(len(names[longest]))]


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1


def _is_composed(module: Any) -> bool:
    return not isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)
