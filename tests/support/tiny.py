"""Tiny models and tokenizers, built and not downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "tree",
    "river",
    "mountain",
    "bread",
    "water",
    "light",
    "stone",
    "green",
    "blue",
    "small",
    "large",
    "runs",
    "sleeps",
    "sings",
    "walks",
    "reads",
    "writes",
    "answer",
    "question",
    "number",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "yes",
    "no",
    "please",
    "thank",
    "you",
    "what",
    "is",
    "where",
    "when",
    "how",
    "many",
    "some",
    "every",
    "never",
    "always",
    "tomorrow",
    "today",
    "yesterday",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHARED = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHARED},
    "qwen3": {"model_type": "qwen3", **_SHARED},
    # A window far shorter than the rows, so that windowed and full layers both matter.
    "gemma3": {
        "model_type": "gemma3_text",
        **_SHARED,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gemma2": {
        "model_type": "gemma2",
        **_SHARED,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 5.0,
    },
    "qwen2": {"model_type": "qwen2", **_SHARED},
    "mistral": {"model_type": "mistral", **_SHARED, "sliding_window": 6},
    "mixtral": {"model_type": "mixtral", **_SHARED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SHARED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "phi3": {"model_type": "phi3", **_SHARED},
    # Scores are biased by distance instead of positions, in an attention that is all its own: it cannot be packed.
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 384,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": 384,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    # No attention at all.
    "mamba": {
        "model_type": "mamba",
        "vocab_size": 384,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 8,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}


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
    """A randomly initialised tiny model of a family, in fp32."""
    from transformers import AutoConfig

    settings = {**FAMILIES[family], **overrides}
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Default initialisation is so small that every attention pattern is uniform, and a leak would not show.
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return model


def save_model(family: str, folder: Path, tokenizer: Any, **overrides: Any) -> None:
    """Write a tiny model and its tokenizer."""
    build_model(family, **overrides).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


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
