"""Tiny models and tokenizers, built and not downloaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

_LIST = """
the a cat dog house tree river mountain bread water light stone green blue small large runs sleeps sings
walks reads writes answer question number one two three four five six seven eight nine ten yes no please
thank you what is where when how many some every never always tomorrow today yesterday
"""
WORDS = _LIST.split()

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_IDS = {"vocab_size": 384, "bos_token_id": 0, "eos_token_id": 2}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
_SHARED = _IDS | _SIZES | {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
# A window far shorter than the rows, so that windowed and full layers both matter.
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
_SOFTCAPPED = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0}
_EXPERTS = {"num_experts_per_tok": 2}
# Where Gemma 4 differs from Gemma 3: larger heads in full layers, embeddings of each layer, borrowed keys and values.
_GEMMA4: dict[str, Any] = {"num_hidden_layers": 4, "global_head_dim": 32, "num_kv_shared_layers": 2}
_GEMMA4 |= {
    "hidden_size_per_layer_input": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Layers that carry a state, and the attention between them; chunks and blocks that are shorter than the rows.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = _HYBRID | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_NEMOTRON = {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 4, "mamba_head_dim": 32}
_NEMOTRON |= {"n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "conv_kernel": 3, "num_hidden_layers": 4}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4}
# A cap that changes nothing: finray's head knows others.
_GRIFFIN = {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6, "logits_soft_cap": 1e6}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# The type of the model, and its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SHARED),
    "qwen3": ("qwen3", _SHARED),
    "gemma3": ("gemma3_text", _SHARED | _WINDOWS),
    "gpt2": ("gpt2", _IDS | _GPT2 | _NO_DROPOUT),
    "gemma2": ("gemma2", _SHARED | _WINDOWS | _SOFTCAPPED),
    "qwen2": ("qwen2", _SHARED),
    "mistral": ("mistral", _SHARED | {"sliding_window": 6}),
    "mixtral": ("mixtral", _SHARED | _EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _SHARED | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 64}),
    "phi3": ("phi3", _SHARED),
    # Scores are biased by distance instead of positions, in an attention of its own.
    "bloom": ("bloom", _IDS | {"hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0}),
    "opt": ("opt", _IDS | _SIZES | {"word_embed_proj_dim": 64, "ffn_dim": 128, "dropout": 0.0, "pad_token_id": 1}),
    "gpt_neox": ("gpt_neox", _IDS | _SIZES | {"intermediate_size": 128}),
    # Sinks, and windows in every second layer.
    "gpt_oss": ("gpt_oss", _SHARED | _EXPERTS | {"num_local_experts": 4, "sliding_window": 6}),
    "gemma4": ("gemma4_text", _SHARED | _GEMMA4 | {"vocab_size_per_layer_input": 384}),
    # No attention at all.
    "mamba": ("mamba", _IDS | {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}),
}
# Some layers carry a state from token to token. Their states are all kept alike, but handed on in ways of their own.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _SHARED | _DELTA),
    "nemotron_h": ("nemotron_h", _SHARED | _NEMOTRON),
    "granitemoehybrid": ("granitemoehybrid", _SHARED | _MAMBA | {"layer_types": ["mamba", "attention"]}),
    "falcon_h1": ("falcon_h1", _SHARED | _MAMBA | {"mamba_d_ssm": 128}),
    # Their layers hand nothing on to what carries the state.
    "jamba": ("jamba", _SHARED | _JAMBA),
    "mamba": FAMILIES["mamba"],
    # A convolution, and nothing else; no convolution; a block that returns a pair and reads positions.
    "lfm2": ("lfm2", _SHARED | {"layer_types": ["conv", "full_attention"]}),
    "minimax": ("minimax", _SHARED | _EXPERTS | _HYBRID | {"block_size": 8, "num_local_experts": 4}),
    "recurrent_gemma": ("recurrent_gemma", _SHARED | _GRIFFIN),
}

# Experts joined into one parameter: PEFT knows the names of earlier versions of some, which shared experts and layers
# without experts have as well; others hold their matrices transposed, with biases, or beside a router that is a layer.
_FEW = {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
_LLAMA4 = {"num_local_experts": 4, "moe_layers": [1], "intermediate_size_mlp": 128, "attention_chunk_size": 8}
_BESIDE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_BESIDE |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 384}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "qwen2_moe": ("qwen2_moe", _SHARED | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32}),
    "gpt_oss": ("gpt_oss", _SHARED | _EXPERTS | {"num_local_experts": 4, **_KINDS}),
    "glm4_moe": ("glm4_moe", _SHARED | _FEW),
    "deepseek_v3": ("deepseek_v3", _SHARED | _FEW | _LATENT),
    "llama4": ("llama4_text", _SHARED | _LLAMA4),
    "gemma4": ("gemma4_text", _SHARED | _BESIDE | {"per_layer_config": {1: {"head_dim": 32}}, **_KINDS}),
}

# Attention that cannot be told where rows end: biases by distance, chunks, positions that are counted, and keys that a
# layer chooses for those after it.
_BART = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "dropout": 0.0}
_INDEX = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 32, "indexer_types": ["full", "shared"]}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": FAMILIES["bloom"],
    "llama4": EXPERTS["llama4"],
    "bart": ("bart", _IDS | _BART | {"pad_token_id": 1, "max_position_embeddings": 64}),
    "glm_moe_dsa": ("glm_moe_dsa", _SHARED | _FEW | _LATENT | _INDEX),
}

# Models that read images too. Their tensors have other names in files than in memory (Mistral 3, LLaVA); positions have
# three axes (Qwen2-VL); tokens of images are asked for in training (Gemma 3); the text part is a causal language model
# in which experts are fused (Llama 4), or PEFT takes the experts of earlier versions (GLM-4.5V).
_IMAGE = 300
_PATCHES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_PATCHES |= {"image_size": 28, "patch_size": 14}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_OF_QWEN = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4}
_GLM = _FEW | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_OF_LLAMA4 = _PATCHES | {"intermediate_size": 256, "vision_output_dim": 64}
_OF_LLAMA4 |= {"projector_input_dim": 64, "projector_output_dim": 64}
READERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": ("mistral", {}, _PATCHES | {"model_type": "pixtral", "head_dim": 16}),
    "qwen2_vl": ("qwen2_vl_text", _AXES, _OF_QWEN),
    "gemma3": ("gemma3_text", _WINDOWS, _PATCHES | {"model_type": "siglip_vision_model"}),
    "llava": ("llama", {}, _PATCHES | {"model_type": "clip_vision_model", "projection_dim": 64}),
    "idefics3": ("llama", {}, _PATCHES),
    "glm4v_moe": ("glm4v_moe_text", _GLM, {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}),
    "llama4": ("llama4_text", _LLAMA4, _OF_LLAMA4),
}
_READ = {"image_token_index": _IMAGE, "image_token_id": _IMAGE, "spatial_merge_size": 1, "mm_tokens_per_image": 4}

# Values that are no family's defaults: eps, activation, windows, positions, what is a bias and what is not.
_ENCODER = _SIZES | {"vocab_size": 384, "intermediate_size": 96, "max_position_embeddings": 80, "pad_token_id": 0}
_BERT = _ENCODER | {"type_vocab_size": 3, "layer_norm_eps": 1e-3, "hidden_act": "gelu_new"}
_MODERN = _ENCODER | {"num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 2}
_MODERN |= {"norm_eps": 1e-3, "attention_bias": True, "cls_token_id": 1, "sep_token_id": 2}
_DISTIL = {"vocab_size": 384, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 80}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    # MiniLM is a BERT with more heads than its width asks for, and without token types of pairs.
    "minilm": ("bert", _ENCODER | {"hidden_size": 48, "num_attention_heads": 12, "type_vocab_size": 2}),
    "distilbert": ("distilbert", _DISTIL | {"pad_token_id": 0, "activation": "relu"}),
    "roberta": ("roberta", _BERT | {"type_vocab_size": 1, "pad_token_id": 5}),
    "modernbert": ("modernbert", _MODERN),
    "modernbert-mean": ("modernbert", _MODERN | {"classifier_pooling": "mean", "classifier_activation": "silu"}),
}


def build_classifier(family: str, *, classes: int = 3, seed: int = 0, **overrides: Any) -> Any:
    """A randomly initialized tiny classifier of a family of encoders or decoders, in fp32."""
    kind, settings = (ENCODERS | FAMILIES)[family]
    config = AutoConfig.for_model(kind, **settings | overrides, num_labels=classes)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As in `build_model`; biases and norms get values, so that one that is left out shows.
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            if name.endswith("pooler.dense.weight"):
                # Else its tanh has no gradient.
                parameter.mul_(0.1)
    return model


def train_tokenizer() -> Any:
    """A byte-level BPE tokenizer with ChatML special tokens, trained on a few words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def build_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A randomly initialized tiny model of a family, in fp32."""
    kind, settings = (FAMILIES | HYBRIDS | EXPERTS | OWN)[family]
    config = AutoConfig.for_model(kind, **settings | overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Default initialization is so small that every attention pattern is uniform, and a leak would not show.
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return model


def build_reader(family: str) -> Any:
    """A randomly initialized tiny model of a family that reads images, in fp32."""
    text, settings, vision = READERS[family]
    known = vars(AutoConfig.for_model(family))
    parts = {"text_config": {"model_type": text, **_SHARED, **settings}, "vision_config": vision}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **parts, **{name: value for name, value in _READ.items() if name in known})
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def save_model(family: str, folder: Path, tokenizer: Any, **overrides: Any) -> None:
    """Write a tiny model and its tokenizer."""
    build_model(family, **overrides).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def save_reader(family: str, folder: Path, tokenizer: Any) -> None:
    """Write a tiny model that reads images, its tokenizer, and what prepares images for it."""
    build_reader(family).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.25, 0.125]}), encoding="utf-8")


def write_empty_weights(folder: Path) -> None:
    """The weights of the model whose ``config.json`` lies there: a sparse file of zeros, which takes no room."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    header, end = {}, 0
    for name, tensor in model.named_parameters():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def in_hub_cache(cache: Path, tokenizer: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The model ``org/tiny`` of the Hub as it is in the cache: by branch (``main``, ``v1``), each with weights of its
    own, and a chat template that begins with the name of the branch."""
    place = cache / "models--org--tiny"
    (place / "refs").mkdir(parents=True)
    models = {}
    for number, branch in enumerate(("main", "v1")):
        snapshot = place / "snapshots" / (str(number) * 40)
        models[branch] = build_model("llama", seed=number)
        models[branch].save_pretrained(str(snapshot))
        tokenizer.save_pretrained(str(snapshot))
        (snapshot / "chat_template.jinja").write_text(branch + CHATML, encoding="utf-8")
        (place / "refs" / branch).write_text(str(number) * 40, encoding="utf-8")
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return models


def chat_rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    """Conversations of varied length, made from the tokenizer's words."""
    rows = []
    for index in range(start, start + count):
        words = [WORDS[(index * 7 + step * step) % len(WORDS)] for step in range(3 + index % 9)]
        answer = [WORDS[(index * 5 + step * 3) % len(WORDS)] for step in range(1 + index % 6)]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": " ".join(words)},
                    {"role": "assistant", "content": " ".join(answer)},
                ]
            }
        )
    return rows


def write_chat_rows(folder: Path, count: int, *, start: int = 0) -> Path:
    """Those conversations as a JSONL file."""
    path = folder / "rows.jsonl"
    rows = chat_rows(count, start=start)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_encoder(family: str, folder: Path, tokenizer: Any, **overrides: Any) -> None:
    """Write the body of a tiny encoder (or decoder), without a head, and a tokenizer."""
    kind, settings = (ENCODERS | FAMILIES)[family]
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(kind, **settings | overrides)).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def write_labelled_rows(folder: Path, count: int) -> Path:
    """Texts of varied length as a JSONL file; the label is whether an animal or a plant comes in them, or neither."""
    path = folder / "labelled.jsonl"
    rows = []
    for index in range(count):
        words = [WORDS[(index * 7 + step * step) % len(WORDS)] for step in range(3 + index % 9)]
        label = "animal" if {"cat", "dog"} & set(words) else "plant" if "tree" in words else "neither"
        rows.append({"text": " ".join(words), "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
