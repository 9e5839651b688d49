"""Checks whether a model's rows can be packed, on a small random model of the same architecture.

Packing needs a model that passes the row lengths on to its attention, uses the given positions, and lets no token
affect another in any other way. A list of model names cannot guarantee that, and the real weights are not needed. So
the model's own configuration is shrunk, a random model is created from it on the CPU in fp32, and its logits for packed
rows are compared with those of each row alone with Transformers' own attention. That takes less than a second, gives
the same answer in a plan and on every worker, and also detects attention that finray's cannot express: of such a model
the attention gets each row alone (:mod:`finray.models.by_row`), if that passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from finray import compat
from finray.config.resolved import BY_ROW, Packing
from finray.config.schema import ModelConfig
from finray.config.tasks import CAUSAL_LM, task_spec
from finray.errors import ModelError
from finray.files import first_line
from finray.models import attention, states
from finray.models.packed import PackedModel, ProbeRows
from finray.models.ropes import FIXED, rope_types
from finray.models.towers import text_tower
from finray.pretrained.tokenizers import check_exists, loading_options, not_loaded, silence_transformers

# Row lengths of the test: longer than the window of the small model, and different.
_LENGTHS = (9, 17, 5)
_VOCABULARY = 160
_WINDOW = 6
# Positions after which rotary embeddings change, where their name in configurations says it: one row is longer.
_TURN, _TURNS_AT = 12, "original_max_position_embeddings"
# fp32 sums in another order differ by 1e-6 of the largest logit; a leak or a wrong position by a tenth or more.
_TOLERANCE = 1e-3
_WIDTH, _HEADS, _HEAD, _EXPERTS = 64, 4, 16, 4
# Experts of a token: two where there are more, and a model may have its reason for one.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
# Names of sizes in configurations, and their reduced values.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"), _WIDTH),
    "embedding_dim": _WIDTH,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("linear_num_heads", "n_mamba_heads"), _HEADS),
    **dict.fromkeys(("mamba_headdim", "attention_head_dim"), 2 * _WIDTH // _HEADS),
    **dict.fromkeys(("head_dim", "d_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEAD),
    **dict.fromkeys(("linear_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), _HEAD),
    "qk_head_dim": 2 * _HEAD,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 2 * _WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), _WIDTH),
    **dict.fromkeys(("expert_ffn_hidden_size", "hidden_size_per_layer_input"), _WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "zero_expert_num"), _EXPERTS),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "time_step_rank", "mamba_dt_rank"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    "rotary_dim": _HEAD // 2,
    "query_pre_attn_scalar": _HEAD,
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
# Where it is open, the depth is that of a stack which is run through several times.
_STACKED = "num_layers_per_stack"
_WINDOWS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size"),
    # Of ModernBERT; of Doge; the keys that sparse attention keeps; where scores begin to be scaled by position.
    *("local_attention", "keep_window_size", "index_topk", "floor_scale", "log_scaling_n_floor"),
)
_LAYERS = 8
_SHARED = ("num_key_value_heads", "num_kv_heads")
# Layers at the end that take keys and values of earlier ones.
_BORROWING = "num_kv_shared_layers"
# Fields of layers that differ from the others, by their number.
_PER_LAYER = "per_layer_config"
_SECTIONS = "mrope_section"
# Of heads whose size is the sum of these, in DeepSeek's attention.
_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim")
# Heads of a state, their size and groups, where both together are a multiple of the width: that factor is first.
_STATES = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("expand", "num_heads", "head_dim", "n_groups"),
)
# Ways to shrink, one after the other until a model can compute. The first is the cheapest; in the second, sizes that
# a configuration leaves open get a value; the third leaves what depends on each other in ways that no name tells, and
# has fewer layers, experts and tokens.
_WAYS: tuple[dict[str, bool], ...] = ({}, {"filled": True}, {"narrow": False})
_VOLUME = (
    *("vocab_size", "vocab_size_per_layer_input", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_group", "topk_group", *_CHOSEN),
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "moe_intermediate_size"),
)
_MOST_PARAMETERS = 200_000_000
_NO_SIZE = ("model_type", "transformers_version", "architectures", "quantization_config", "dtype")


def check_packing(model: ModelConfig) -> Packing:
    """Test whether rows of a model may be packed.

    Args:
        model: the model section; only the model's configuration is read.

    Returns:
        The finding. A model that cannot be shrunk counts as not safe.

    Raises:
        ModelError: the configuration cannot be loaded, or is that of an encoder and the task a causal language model's.
    """
    check_exists(model.name)
    silence_transformers()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(**loading_options(model)).get_text_config()
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise not_loaded("model's configuration", model, error) from None
    spec = task_spec(model.task)
    code = model.trust_remote_code
    return check_packing_of(config, auto_class=spec.auto_class, trust_remote_code=code, name=model.name)


@torch.no_grad()
def check_packing_of(
    config: Any, *, auto_class: str = CAUSAL_LM.auto_class, trust_remote_code: bool = False, name: str = ""
) -> Packing:
    """As :func:`check_packing`, for a Transformers configuration of a named model; random state is not changed.
    Raises ModelError: an encoder is to be a causal language model."""
    family, positions, width = str(config.model_type), None, getattr(config, "hidden_size", None)
    pads = False

    def unsafe(reason: str, error: Exception | None = None) -> Packing:
        # A missing package or too little memory says nothing about the model.
        fleeting = isinstance(error, ImportError | MemoryError | OSError) or "allocate" in str(error)
        return Packing(False, family, reason, positions, width, pads=pads, lasting=not fleeting)

    # A caller may be in autocast, and its rounding would look like a leak.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        try:
            small = small_model(config, auto_class, dtype=torch.float32, trust_remote_code=trust_remote_code)
            context, is_learned = row_limit(small)
            if is_learned and context is not None:
                # The small model has another position table and padding index, after which positions may begin.
                begins = 0 if context == small.config.max_position_embeddings else config.pad_token_id + 1
                positions = int(config.max_position_embeddings) - begins
            has_states = bool(states.stateful(small))
            for parameter in small.parameters():
                if parameter.ndim >= 2:
                    # New weights are so small that attention is nearly uniform, and a wrong position would hardly
                    # matter.
                    parameter.mul_(4.0)
            small.eval()
            if auto_class == CAUSAL_LM.auto_class and _sees_ahead(small):
                raise ModelError(
                    f"a {family} of this configuration sees the tokens that it is to predict: its attention goes both "
                    "ways",
                    where=f"model.name={name or family}",
                    repair="take a causal language model; if this was trained as one, config.json must say so, mostly "
                    "by `is_decoder: true`",
                )
            pads = auto_class == CAUSAL_LM.auto_class and _may_pad(small)
            if compat.accepts_attention(small):
                small.set_attn_implementation("eager")
            # A decoder's rows are pooled at the start of their padding, and there is none.
            if getattr(small.config.get_text_config(), "pad_token_id", None) is None:
                small.config.get_text_config().pad_token_id = 0
            rows = [torch.randint(3, _VOCABULARY, (1, length)) for length in _LENGTHS]
            alone = [_results(small, ProbeRows(row), None) for row in rows]
            expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
        except ModelError:
            raise
        except Exception as error:
            return unsafe(f"no small model of its kind can be tried out ({first_line(error)[:120]})", error)
        safe = Packing(True, family, positions=positions, hidden_size=width, has_states=has_states, pads=pads)
        failure: Exception | None = None
        if compat.carries_state(small) and not has_states:
            reason = "it carries a state from token to token"
        elif not compat.accepts_attention(small):
            reason = "its attention is its own and cannot be told where rows end"
        else:
            attention.register()
            reason, failure = _tried(small, rows, expected, attention.NAME)
            if not reason:
                return safe
        # Then its own attention, which gets each row alone.
        return unsafe(reason, failure) if _tried(small, rows, expected, BY_ROW)[0] else replace(safe, by_row=True)


def _tried(
    small: Any, rows: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], attention_name: str
) -> tuple[str, Exception | None]:
    """Why packed rows do not give what is expected of rows alone, with an exception if there was one; "" if they do."""
    try:
        if compat.accepts_attention(small):
            small.set_attn_implementation("eager" if attention_name == BY_ROW else attention_name)
        packed = _results(small, ProbeRows(*rows), attention_name)
    except Exception as error:
        return f"it refuses joined rows ({first_line(error)[:120]})", error
    if any(its.shape != ours.shape for its, ours in zip(expected, packed, strict=True)):
        return "its head makes something else of joined rows", None
    apart = [float((ours - its).abs().max() / its.abs().max()) for its, ours in zip(expected, packed, strict=True)]
    if all(difference <= _TOLERANCE for difference in apart):
        return "", None
    what = f"its logits for joined rows are not those of the rows alone (apart by {max(apart):.1%} of the largest)"
    return what, None


def row_limit(model: Any) -> tuple[int | None, bool]:
    """Maximum positions of a row by a Transformers model's configuration, and whether they are a learned table, which
    cannot be exceeded."""
    config, table = model.config.get_text_config(), model.get_input_embeddings()
    context = getattr(config, "max_position_embeddings", None)
    tables = [
        module
        for module in text_tower(model).modules()
        if isinstance(module, torch.nn.Embedding)
        and module is not table
        and module.embedding_dim == config.hidden_size
        # Not the table of token types.
        and module.num_embeddings >= (context or 0)
    ]
    if tables and context is not None and tables[0].num_embeddings == context:
        # RoBERTa's positions start after the padding index.
        padding = tables[0].padding_idx
        context -= 0 if padding is None else padding + 1
    return None if context is None else int(context), bool(tables)


def _sees_ahead(model: Any) -> bool:
    """Whether another last token changes what a model makes of those before it."""
    row = torch.randint(3, _VOCABULARY - 1, (1, _LENGTHS[0]))
    other = row.clone()
    other[0, -1] += 1
    before, after = (_results(model, ProbeRows(each), None)[0][:-1] for each in (row, other))
    return float((after - before).abs().max()) > _TOLERANCE * float(before.abs().max())


def _may_pad(model: Any) -> bool:
    """Whether a row that is padded on its left gets the same answer of Transformers' ``generate``, with its cache."""
    row, padding = torch.randint(3, _VOCABULARY, (1, _LENGTHS[2])), _LENGTHS[0] - _LENGTHS[2]
    padded = torch.nn.functional.pad(row, (padding, 0))
    mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    try:
        alone, other = (
            model.generate(ids, attention_mask=seen, **options, output_logits=True, return_dict_in_generate=True).logits
            for ids, seen in ((row, torch.ones_like(row)), (padded, mask))
        )
    except Exception:
        # A model's code may fail in any way, here and where it would be used.
        return False
    return float((other[-1] - alone[-1]).abs().max()) <= _TOLERANCE * float(alone[-1].abs().max())


def _results(model: Any, batch: ProbeRows, attention_name: str | None) -> list[torch.Tensor]:
    """Hidden states of each token, and logits: per token, or per row for a classifier."""
    packed = PackedModel(model, precision="fp32", attention_name=attention_name, device=torch.device("cpu"))
    hidden_TH = packed.hidden_TH(batch)
    if packed.inner.base_model is packed.inner:
        return [hidden_TH]
    if model.get_output_embeddings() is None:
        return [hidden_TH, packed.logits_SC(batch)]
    return [hidden_TH, packed.logits_KV(batch, torch.arange(len(hidden_TH)))]


def small_model(config: Any, auto_class: str, **options: Any) -> Any:
    """A random model of a configuration's kind on the CPU, by the first way to shrink it that works.

    Raises:
        Exception: whatever the model's code said to the first.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    build = getattr(transformers, auto_class).from_config
    if auto_class == CAUSAL_LM.auto_class and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The text part of a model for images, of which Transformers has no decoder with a head.
        body = transformers.AutoModel.from_config if type(config) in MODEL_MAPPING else None
        build = body or compat.builds_text(config) or build
    errors = []
    for way in _WAYS:
        try:
            small = shrunk(config, **way)
            # Parts of a model for images have sizes of their own.
            if not way.get("narrow", True) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                with torch.device("meta"):
                    size = build(small, **options).num_parameters()
                if size > _MOST_PARAMETERS:
                    continue
            model = build(small, **options).eval()
            compat.name_body(model)
            # A model with a state computes token by token, and is not asked.
            if not compat.carries_state(model):
                model(torch.full((1, 3), 3), use_cache=False)
            return model
        except Exception as error:
            errors.append(error)
    raise errors[0]


def shrunk(config: Any, *, narrow: bool = True, filled: bool = False) -> Any:
    """A configuration of the same kind with small sizes; all other fields stay.

    Args:
        config: of a text model.
        narrow: shrink widths and heads too; else only layers, experts and tokens.
        filled: give a size to fields that have none.
    """
    plain = {name: value for name, value in config.to_dict().items() if name not in _NO_SIZE}
    sizes = {name: size for name, size in _SIZES.items() if narrow or name in _VOLUME}
    depth = next((int(plain[name]) for name in _DEPTHS if isinstance(plain.get(name), int)), _LAYERS)
    lists = {name: value for name, value in plain.items() if isinstance(value, list | tuple) and len(value) == depth}
    # Enough layers to include each kind: of attention, of experts or none, and of those that borrow keys and values.
    named = [list(kinds) for kinds in lists.values() if all(isinstance(kind, str) for kind in kinds)]
    needed = [kinds.index(kind) + 1 for kinds in named for kind in set(kinds)]
    layers = min(depth, max(2, *needed) if needed else _LAYERS if narrow else 2)
    if borrowing := min(plain.get(_BORROWING) or 0, layers):
        layers = min(depth, layers + borrowing)
    small = {name: _small(name, value, sizes, plain) for name, value in plain.items()}
    small.pop(_PER_LAYER, None)
    small |= {name: layers for name in _DEPTHS if plain.get(name) is not None}
    small |= {name: None for name in (_STACKED,) if name in plain}
    small |= {name: small[name][:layers] for name in lists}
    if borrowing:
        small[_BORROWING] = borrowing
    if (varied := plain.get(_PER_LAYER)) is not None:
        kept = {int(at): fields for at, fields in varied.items() if int(at) < layers}
        small[_PER_LAYER] = {at: _small_layer(fields, sizes, plain) for at, fields in kept.items()}
    if set(rope_types(config)) - {*FIXED, "longrope"} and "max_position_embeddings" in small:
        # Dynamic NTK begins where the model's own positions end.
        small["max_position_embeddings"] = _TURN
    if narrow:
        if plain.get("head_dim") and plain["head_dim"] == sum(plain.get(name) or 0 for name in _PARTS):
            small["head_dim"] = sum(small[name] for name in _PARTS)
        for factor, heads, head, groups in _STATES:
            if all(isinstance(plain.get(name), int) for name in ("hidden_size", factor, heads, head)) and (
                plain["hidden_size"] * plain[factor] == plain[heads] * plain[head]
            ):
                small |= {heads: _HEADS, head: plain[factor] * _WIDTH // _HEADS, groups: min(2, plain.get(groups, 1))}
        if plain.get("attention_hidden_size"):
            small["attention_hidden_size"] = _WIDTH * (plain["attention_hidden_size"] // plain["hidden_size"])
        if plain.get("mamba_d_ssm"):
            # Of Falcon-H1, whose state is narrower than that multiple.
            small |= {"mamba_d_ssm": 2 * _WIDTH, "mamba_n_heads": _HEADS, "mamba_d_head": 2 * _WIDTH // _HEADS}
    if filled:
        unset = {name: size for name, size in _SIZES.items() if name in plain and plain[name] is None}
        small |= unset | {name: _HEADS for name in _SHARED if name in plain and plain[name] is None}
    return type(config)(**small)


def _small(name: str, value: Any, sizes: dict[str, int], plain: dict[str, Any]) -> Any:
    """The reduced value of a field, or of each layer's in a list, by the sizes and the whole configuration."""
    if value is None or isinstance(value, bool):
        return value
    if name in _WINDOWS:
        return _WINDOW
    if name.endswith("_token_id"):
        # ProphetNet computes with its padding token at 0 only.
        return min(1, value) if isinstance(value, int) else 1
    if name == _TURNS_AT:
        return _TURN
    if isinstance(value, dict):
        # Of rotary embeddings, maybe for each kind of layer; or of a part of the model.
        return {key: _small_setting(key, entry, sizes, plain) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_small(name, each, sizes, plain) for each in value) if name in sizes else value
    if not isinstance(value, int) or not value:
        return value
    if name in _CHOSEN and name in sizes:
        return min(value, sizes[name])
    if name in _SHARED and "num_attention_heads" in sizes:
        return _HEADS if value == plain.get("num_attention_heads") else min(2, value)
    return sizes.get(name, value)


def _small_layer(fields: dict[str, Any], sizes: dict[str, int], plain: dict[str, Any]) -> dict[str, Any]:
    """The reduced fields of a layer that differs from the others; its heads are as many times as large as theirs."""
    small = {name: _small(name, value, sizes, plain | fields) for name, value in fields.items()}
    if "head_dim" in fields and "head_dim" in sizes:
        small["head_dim"] = _HEAD * max(1, fields["head_dim"] // plain["head_dim"])
    return small


def _small_setting(name: str, value: Any, sizes: dict[str, int], plain: dict[str, Any]) -> Any:
    """The reduced value in a nested section: rotary embeddings have a factor for each half of a head's size."""
    if name == _SECTIONS and "head_dim" in sizes:
        # How many of a head's frequencies are of time, height and width.
        rest = [_HEAD // 2 * part // sum(value) for part in value[1:]]
        return [_HEAD // 2 - sum(rest), *rest]
    if isinstance(value, list | tuple):
        return value[: _HEAD // 2] if "head_dim" in sizes else value
    if isinstance(value, dict) or name == _TURNS_AT:
        return _small(name, value, sizes, plain)
    return value
