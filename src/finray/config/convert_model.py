"""The model and the adapter of a config of LLaMA-Factory or Axolotl."""

from __future__ import annotations

import re
from collections.abc import Mapping

from finray.config import names
from finray.config.convert_file import ForeignFile
from finray.config.foreign import AXOLOTL, words
from finray.errors import ConfigError
from finray.limits import cut


def read_model(file: ForeignFile) -> None:
    """The section `model`."""
    file.put("model.name", file.get("model_name_or_path", "base_model"))
    if file.get("trust_remote_code"):
        file.lose("trust_remote_code", "set model.trust_remote_code if you have read the model's code")
    bits = file.get("quantization_bit")
    if bits is None and (file.get("load_in_4bit") or file.raw.get("adapter") == "qlora"):
        bits = 4
    if bits is None and file.get("load_in_8bit"):
        bits = 8
    if bits in (4, 8):
        file.put("model.quantization", f"{bits}bit")
    elif bits is not None:
        file.lose("quantization_bit", "here: 4bit or 8bit")
    file.used.update(("load_in_4bit", "load_in_8bit"))
    if file.get("quantization_method") not in (None, "bnb", "bitsandbytes"):
        file.lose("quantization_method", "not supported: `model.quantization` has finray's own 4bit and 8bit")
    if file.get("double_quantization") is False:
        file.lose("double_quantization", "not supported: 4bit is NF4 with double quantization")
    if file.raw.get("chat_template") in ("tokenizer_default", "jinja"):
        file.used.add("chat_template")
    if (template := file.get("chat_template_jinja")) is not None:
        file.put("model.chat_template", template, "chat_template_jinja")
    attention = file.get("attn_implementation", "flash_attn")
    if attention in ("flash_attention_2", "fa2", True) or file.get("flash_attention"):
        file.notes.append("finray uses FlashAttention 2 if it is installed")
    elif attention not in (None, "auto", "sdpa", "eager", "disabled", False):
        file.lose(
            file.key("attn_implementation", "flash_attn"),
            "set `model.attention`; `auto` uses the fastest that is installed",
        )
    _tokens(file)
    if (thinks := file.get("enable_thinking")) is not None:
        file.put("model.chat_template_arguments", {"enable_thinking": thinks}, "enable_thinking")


def _tokens(file: ForeignFile) -> None:
    """New tokens are added; tokens for other roles, such as the end of a text, are not."""
    roles, added = file.get("special_tokens"), file.get("tokens", "add_tokens", "new_special_tokens")
    new = [] if isinstance(added, Mapping) else words(added)
    for key, value in roles.items() if isinstance(roles, Mapping) else ():
        if key == "additional_special_tokens":
            new += [token for token in words(value) if token not in new]
        elif value not in (None, ""):
            why = f"not supported: the model's own {key} is used, which its tokenizer_config.json names"
            padding = "not needed: rows are packed instead of padded"
            file.lose(f"special_tokens.{key}", padding if key == "pad_token" else why, value)
    for key, value in (("tokens", added), ("special_tokens", roles)):
        if value is not None and (isinstance(value, Mapping) == (key == "tokens")):
            file.lose(key, names.NAMES["special_tokens"])
    if new:
        file.put("model.new_tokens", new, file.key("tokens", "add_tokens", "new_special_tokens", "special_tokens"))


def read_adapter(file: ForeignFile) -> None:
    """The section `adapter`."""
    method = file.get("adapter") if file.system == AXOLOTL else file.get("finetuning_type")
    if file.system == AXOLOTL and method not in (None, "lora", "qlora"):
        raise ConfigError(
            f"`adapter: {cut(str(method), 80)}` is not supported",
            where=f"{file.path}: line {file.lines.get('adapter', 0)}",
            repair="finray has LoRA, rsLoRA, DoRA and PiSSA: adapter.method",
        )
    targets = file.get("lora_target", "lora_target_modules")
    linear, rank, alpha = file.get("lora_target_linear"), file.get("lora_rank", "lora_r"), file.get("lora_alpha")
    dropout = file.get("lora_dropout")
    kinds = [kind for kind in ("rslora", "dora") if file.get(f"use_{kind}") or file.get(f"peft_use_{kind}")]
    kinds += ["pissa"] if file.get("pissa_init") else []
    if method in (None, "full"):
        file.put("adapter.method", "none")
        return
    file.put("adapter.method", kinds[0] if kinds else "lora")
    if len(kinds) > 1:
        file.notes.append(f"adapter.method is one: {kinds[0]}, and not {kinds[1]} as well")
    if rank is not None:
        file.put("adapter.rank", rank)
        file.put("adapter.alpha", alpha if alpha is not None else 2 * rank)
    file.put("adapter.dropout", dropout or 0.0)
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)*", targets) and targets != "all":
        targets = [target.strip() for target in targets.split(",")]
    file.put("adapter.target_modules", "all-linear" if linear or targets in (None, "all") else targets)
    if linear and any(not target.endswith("_proj") for target in words(targets)):
        file.lose("lora_target_modules", "`adapter.target_modules` has all linear layers, or a list of your own")
    if file.system == AXOLOTL and targets is None and not linear:
        file.notes.append("the file names no layers for the adapter; adapter.target_modules is all-linear")
    if kept := file.get("additional_target", "lora_modules_to_save"):
        file.put("adapter.modules_to_save", words(kept), file.key("additional_target", "lora_modules_to_save"))
