"""Tokenizers shaped like those of real families: their special tokens, their kind of BPE, their chat template.

The vocabulary is small and made on the spot; what decides masks is real: which tokens are special, which of them
swallow white space beside them, whether text is normalized, and whether BOS is added in front.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import WORDS

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"


@dataclass(frozen=True)
class Family:
    """What of a family's tokenizer matters to rendering and masks.

    Attributes:
        eos: the token that ends a turn in generation, as the family's tokenizer declares it.
        special: further special tokens.
        plain: added tokens that are not special: one id each, and part of the text.
        bos: put in front of plain text by the tokenizer, and by the template where it names it.
        words: how text is cut into words: ``gpt2`` or ``newer`` (both byte-level), or ``sentencepiece`` (not at all;
            spaces are `▁` and unknown characters are bytes).
        nfc: text is normalized before it is tokenized.
        strips: special tokens that swallow white space, as (left, right).
    """

    eos: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    bos: str | None = None
    words: str = "gpt2"
    nfc: bool = False
    strips: tuple[bool, bool] = (False, False)


_LLAMA = Family(
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
    special=("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    words="newer",
)
_MISTRAL = Family(
    eos="</s>",
    bos="<s>",
    special=(
        *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    words="sentencepiece",
)
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_CHATML = Family(eos="<|im_end|>", special=("<|endoftext|>", "<|im_start|>"))

FAMILIES: dict[str, Family] = {
    "llama-3": _LLAMA,
    "llama-3.1": _LLAMA,
    "qwen-2.5": Family(
        eos="<|im_end|>", special=("<|endoftext|>", "<|im_start|>"), plain=_TOOL_TAGS, nfc=True, words="newer"
    ),
    "qwen-3": Family(
        eos="<|im_end|>",
        special=("<|endoftext|>", "<|im_start|>"),
        plain=(*_TOOL_TAGS, "<tool_response>", "</tool_response>", "<think>", "</think>"),
        nfc=True,
        words="newer",
    ),
    "gemma-3": Family(
        eos="<end_of_turn>", bos="<bos>", special=("<eos>", "<pad>", "<start_of_turn>"), words="sentencepiece"
    ),
    "mistral-v0.3": _MISTRAL,
    "mistral-small": _MISTRAL,
    "phi-3": Family(
        eos="<|endoftext|>",
        bos="<s>",
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        words="sentencepiece",
        strips=(False, True),
    ),
    "phi-4": Family(
        eos="<|im_end|>", special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>"), strips=(True, True), words="newer"
    ),
    "smollm2": _CHATML,
    "smollm3": Family(
        eos="<|im_end|>", special=("<|im_start|>", "<|end_of_text|>"), plain=("<think>", "</think>", *_TOOL_TAGS)
    ),
    "chatml": _CHATML,
    "chatml-markers": _CHATML,
    "zephyr": Family(eos="</s>", bos="<s>", words="sentencepiece"),
    "glm-4.5": Family(
        eos="<|endoftext|>",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        plain=("<think>", "</think>", *_TOOL_TAGS, "<tool_response>", "</tool_response>"),
        words="newer",
    ),
    "deepseek-r1": Family(
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        special=("<｜User｜>", "<｜Assistant｜>"),
        plain=("<think>", "</think>"),
    ),
}


def template(name: str) -> str:
    """The family's chat template."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(name: str) -> Any:
    """The family's tokenizer with its chat template. It is shared: do not change it."""
    family = FAMILIES[name]
    core = Tokenizer.from_str(
        _sentencepiece() if family.words == "sentencepiece" else _byte_level(family.words == "newer")
    )
    if family.nfc:
        core.normalizer = normalizers.NFC()
    left, right = family.strips
    names = [token for token in (family.bos, family.eos, *family.special) if token]
    core.add_special_tokens([AddedToken(token, lstrip=left, rstrip=right, normalized=False) for token in names])
    core.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    if family.bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, core.token_to_id(family.bos))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=family.bos, eos_token=family.eos, pad_token=family.eos
    )
    made.chat_template = template(name)
    return made


# Runs of white space and punctuation, so that tokens exist which could join a prompt with an answer.
_CORPUS = [" ".join(WORDS), "one\n\ntwo\n\n\nthree", "a  b   c", "user: yes\nassistant: no\n", '{"a": "b"}', ">\n>\n\n"]


# How Llama 3 and Qwen cut text into words: line breaks stay together, and cling to punctuation before them.
_NEWER = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def _byte_level(newer: bool) -> str:
    """BPE over bytes, with GPT-2's way to cut text into words or the newer one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if newer:
        cut = pre_tokenizers.Split(Regex(_NEWER), behavior="isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _CORPUS * 8, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return str(core.to_str())


@cache
def _sentencepiece() -> str:
    """BPE over `▁` with bytes for what is unknown. The byte tokens join after training, as tokens like any other."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    # As in Gemma's vocabulary, no token holds both line breaks and letters.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    core.train_from_iterator(_CORPUS * 8, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    trained = json.loads(core.to_str())["model"]
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    merges = [tuple(merge) for merge in trained["merges"]]
    core = Tokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(known)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return str(core.to_str())
