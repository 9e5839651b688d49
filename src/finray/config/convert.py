"""A YAML file of LLaMA-Factory or Axolotl as a config of finray, and of each of its lines what became of it.

Most keys are names for fields (:data:`finray.config.names.NAMES`). What needs more than another name is here. What
both projects assume where a file says nothing is written out where finray assumes something else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from finray.config import foreign, names
from finray.config.convert_data import ForeignData
from finray.config.converted import Converted, Lost
from finray.config.foreign import AXOLOTL, LLAMA_FACTORY, number, words
from finray.config.load import build_config, read_yaml_lines
from finray.config.redact import redact
from finray.config.replicas import legal_name
from finray.config.schema import NO_TEXT, Config, sections
from finray.errors import ConfigError, did_you_mean
from finray.limits import cut, shown

_SIGNS = {"model_name_or_path": LLAMA_FACTORY, "base_model": AXOLOTL}
# Unknown keys of which it is said what they are like: to look for that takes a millisecond.
_LIKENESSES = 100


def convert(path: Path, *, workers: int | None = None, dataset_info: Path | None = None) -> Converted:
    """Read a file of LLaMA-Factory or Axolotl.

    Args:
        path: the YAML file.
        workers: number of processes that it was run with, if it does not say so.
        dataset_info: LLaMA-Factory's table of datasets, if it is not where the file says.

    Raises:
        ConfigError: it is of neither, or trains something that finray does not.
    """
    raw, lines = read_yaml_lines(path, repair="give a training config of LLaMA-Factory or Axolotl")
    for key, value in raw.items():
        raw[key] = _json(value)
        if odd := NO_TEXT.search(f"{key} {raw[key]}"):
            raise ConfigError(f"holds U+{ord(odd[0]):04X}, which is no character", where=f"{path}: line {lines[key]}")
    if "model_class" in raw or {"model", "train_dataset"} <= set(raw):
        raise ConfigError(
            "this config is in the form of LLaMA-Factory v1, which finray does not read",
            where=str(path),
            repair="convert a config with `model_name_or_path`, or write the run with `finray init`",
        )
    if not set(_SIGNS) & set(raw):
        known = ", or ".join(f"`{sign}`, as in a config of {system}" for sign, system in _SIGNS.items())
        own = any(isinstance(raw.get(name), Mapping) for name in sections())
        raise ConfigError(
            "this is already a finray config" if own else f"the config names no model: {known} is missing",
            where=str(path),
            repair="run `finray plan` on it" if own else "give a training config of LLaMA-Factory or Axolotl",
        )
    system = next(system for sign, system in _SIGNS.items() if sign in raw)
    for key, what in foreign.ELSEWHERE.items():
        if raw.get(key) and not raw.get("do_train"):
            raise ConfigError(f"this config is not for training: {what}", where=f"{path}: {key}")
    for key in foreign.NUMBERS & set(raw):
        value = raw[key] = number(raw[key])
        if value is None:
            continue
        if value is False and key not in foreign.LEAST:
            # Off, as nothing.
            raw[key] = None
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            what = "a number"
        elif key in foreign.LEAST and (not isinstance(value, int) or value < foreign.LEAST[key]):
            what = f"a whole number of {foreign.LEAST[key]} or more"
        else:
            continue
        raise ConfigError(
            f"`{key}: {shown(value)}` is not {what}",
            where=f"{path}: line {lines.get(key, 0)}",
            repair="correct it, or leave the key out",
        )
    reading = _Reading(system, raw, lines, path, workers, dataset_info)
    reading.read()
    return reading.checked()


def _json(value: Any) -> Any:
    """What YAML read, as JSON types: the names in it are text, and so are dates and bytes."""
    if isinstance(value, Mapping):
        return {str(key): _json(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json(one) for one in value]
    return value if isinstance(value, str | int | float | None) else str(value)


@dataclass
class _Reading:
    system: str
    raw: dict[str, Any]
    lines: dict[str, int]
    path: Path
    workers: int | None
    dataset_info: Path | None
    out: dict[str, Any] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Which key a field came from.
    origin: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def get(self, *keys: str) -> Any:
        """The value of the first key that says something, else what the system assumes; all of them are used."""
        self.used.update(keys)
        for key in keys:
            if self.raw.get(key) not in (None, "", [], {}):
                return self.raw[key]
        return next((one for key in keys if (one := foreign.ASSUMED[self.system].get(key)) is not None), None)

    def put(self, path: str, value: Any, key: str = "") -> None:
        section, _, name = path.partition(".")
        self.out.setdefault(section, {})[name] = value
        self.origin[path] = key or next((key for key in self.raw if names.NAMES.get(key) == path), name)

    def lose(self, key: str, why: str, value: Any = None) -> None:
        self.used.add(key)
        name = key.rpartition(".")[2]
        given = json.dumps(redact({name: self.raw.get(key, value)})[name], ensure_ascii=False)
        line = self.lines.get(key) or self.lines.get(key.partition(".")[0], 0)
        self.lost.append(Lost(line, cut(f"{key}: {given}"), why))

    def read(self) -> None:
        """Everything, in the order in which one says it."""
        self.refuse()
        for step in (self.model, self.adapter, self.data, self.train, self.checkpoints, self.hub, self.machines):
            step()
        for key, value in self.raw.items():
            if key not in self.used:
                self.plain(key, value)

    def plain(self, key: str, value: Any) -> None:
        """A key that is only called something else here."""
        if value is None or value in ("", [], {}):
            return
        target = (names.OFF.get(key) if value is False else None) or foreign.SENTENCES.get(key)
        target = target or names.missing(key, value) or names.NAMES.get(key)
        owner = next((f"{one}.{key}" for one, kind in sections().items() if key in kind.model_fields), None)
        families = (what for start, what in foreign.FAMILIES.items() if key.startswith(start))
        if absent := foreign.NOT_OURS.get(key) or next(families, None):
            # A size of 1 asks for nothing.
            if value is not False and not (key in foreign.SIZES and value == 1):
                self.lose(key, f"not supported: {absent}")
        elif names.asks_nothing(key, value) and (target or key in names.OFF):
            return
        elif target is None and owner is not None:
            self.put_new(owner, value, key)
        elif target is None:
            if not (value is False and key.startswith(("use_", "do_", "eval_"))):
                self.lose(key, "")
        elif match := re.fullmatch(r"([a-z]+\.\w+): (\S+)", target):
            if value is True or value is False:
                self.put_new(match[1], yaml.safe_load(match[2]), key)
            else:
                self.lose(key, f"see {match[1]}")
        elif re.fullmatch(r"[a-z]+\.\w+", target):
            self.put_new(target, value, key)
        else:
            self.lose(key, target)

    def put_new(self, path: str, value: Any, key: str) -> None:
        """Set a field that no other key has set."""
        section, _, name = path.partition(".")
        if name not in self.out.get(section, {}):
            self.put(path, value, key)
        elif self.out[section][name] != value:
            self.lose(key, f"`{path}` says it")

    def refused(self, key: str, message: str, repair: str) -> ConfigError:
        """The error of a key that makes it another training."""
        return ConfigError(message, where=f"{self.path}: line {self.lines.get(key, 0)}", repair=repair)

    def refuse(self) -> None:
        """What would train something else than the file says is an error."""
        for key in ("stage", "rl"):
            if (stage := self.get(key)) not in (None, False, "sft", "pt"):
                what = names.not_yet(str(stage))
                why = f"finray has no {what} yet" if what else "finray does not know it"
                raise self.refused(key, f"`{key}: {cut(str(stage), 80)}` is not supported: {why}", names.HERE_IS)
        if (kind := self.get("finetuning_type")) not in (None, "lora", "full"):
            message = f"`finetuning_type: {cut(str(kind), 80)}` is not supported{did_you_mean(str(kind), ['lora'])}"
            raise self.refused("finetuning_type", message, "use lora or full")
        for key in ("reward_model", "process_reward_model"):
            if self.get(key):
                raise self.refused(
                    key, f"`{key}` is not supported: finray has no training of reward models yet", names.HERE_IS
                )
        if self.get("kd_trainer"):
            message = "`kd_trainer` is not supported: finray has no distillation yet"
            raise self.refused("kd_trainer", message, names.HERE_IS)
        started = words(self.raw.get("adapter_name_or_path"))
        if len(started) > 1:
            raise self.refused(
                "adapter_name_or_path",
                "the adapters before the last are merged into the model there, which finray does not do",
                f"merge them first (`finray export {started[0]} --output merged`), name the result as "
                f"`model_name_or_path`, and leave `adapter_name_or_path: {started[-1]}`",
            )
        if started and self.get("create_new_adapter"):
            raise self.refused(
                "create_new_adapter",
                "the adapter is merged into the model there, and a new one trained on top, which finray does not do",
                f"merge it first (`finray export {started[0]} --output merged`), name the result as "
                "`model_name_or_path`, and leave both keys out",
            )
        self.used.update(("do_train", "do_predict", "do_eval", "create_new_adapter"))

    def model(self) -> None:
        self.put("model.name", self.get("model_name_or_path", "base_model"))
        if self.get("trust_remote_code"):
            self.lose("trust_remote_code", "set model.trust_remote_code if you have read the model's code")
        bits = self.get("quantization_bit")
        if bits is None and (self.get("load_in_4bit") or self.raw.get("adapter") == "qlora"):
            bits = 4
        if bits is None and self.get("load_in_8bit"):
            bits = 8
        if bits in (4, 8):
            self.put("model.quantization", f"{bits}bit")
        elif bits is not None:
            self.lose("quantization_bit", "here: 4bit or 8bit")
        self.used.update(("load_in_4bit", "load_in_8bit"))
        if self.get("quantization_method") not in (None, "bnb", "bitsandbytes"):
            self.lose("quantization_method", "not supported: `model.quantization` has finray's own 4bit and 8bit")
        if self.get("double_quantization") is False:
            self.lose("double_quantization", "not supported: 4bit is NF4 with double quantization")
        if self.raw.get("chat_template") in ("tokenizer_default", "jinja"):
            self.used.add("chat_template")
        if (template := self.get("chat_template_jinja")) is not None:
            self.put("model.chat_template", template, "chat_template_jinja")
        attention = self.get("attn_implementation", "flash_attn")
        if attention in ("flash_attention_2", "fa2", True) or self.get("flash_attention"):
            self.notes.append("finray uses FlashAttention 2 if it is installed")
        elif attention not in (None, "auto", "sdpa", "eager", "disabled", False):
            self.lose(
                self.key("attn_implementation", "flash_attn"),
                "set `model.attention`; `auto` uses the fastest that is installed",
            )
        self.tokens()
        if (thinks := self.get("enable_thinking")) is not None:
            self.put("model.chat_template_arguments", {"enable_thinking": thinks}, "enable_thinking")

    def tokens(self) -> None:
        """New tokens are added; a token of another role, such as an end of text, is not."""
        own, added = self.get("special_tokens"), self.get("tokens", "add_tokens", "new_special_tokens")
        new = [] if isinstance(added, Mapping) else words(added)
        for key, value in own.items() if isinstance(own, Mapping) else ():
            if key == "additional_special_tokens":
                new += [one for one in words(value) if one not in new]
            elif value not in (None, ""):
                why = f"not supported: the model's own {key} is used, which its tokenizer_config.json names"
                padding = "not needed: rows are packed instead of padded"
                self.lose(f"special_tokens.{key}", padding if key == "pad_token" else why, value)
        for key, value in (("tokens", added), ("special_tokens", own)):
            if value is not None and (isinstance(value, Mapping) == (key == "tokens")):
                self.lose(key, names.NAMES["special_tokens"])
        if new:
            self.put("model.new_tokens", new, self.key("tokens", "add_tokens", "new_special_tokens", "special_tokens"))

    def adapter(self) -> None:
        method = self.get("adapter") if self.system == AXOLOTL else self.get("finetuning_type")
        if self.system == AXOLOTL and method not in (None, "lora", "qlora"):
            raise ConfigError(
                f"`adapter: {cut(str(method), 80)}` is not supported",
                where=f"{self.path}: line {self.lines.get('adapter', 0)}",
                repair="finray has LoRA, rsLoRA, DoRA and PiSSA: adapter.method",
            )
        targets = self.get("lora_target", "lora_target_modules")
        linear, rank, alpha = self.get("lora_target_linear"), self.get("lora_rank", "lora_r"), self.get("lora_alpha")
        dropout = self.get("lora_dropout")
        kinds = [kind for kind in ("rslora", "dora") if self.get(f"use_{kind}") or self.get(f"peft_use_{kind}")]
        kinds += ["pissa"] if self.get("pissa_init") else []
        if method in (None, "full"):
            self.put("adapter.method", "none")
            return
        self.put("adapter.method", kinds[0] if kinds else "lora")
        if len(kinds) > 1:
            self.notes.append(f"adapter.method is one: {kinds[0]}, and not {kinds[1]} as well")
        if rank is not None:
            self.put("adapter.rank", rank)
            self.put("adapter.alpha", alpha if alpha is not None else 2 * rank)
        self.put("adapter.dropout", dropout or 0.0)
        if isinstance(targets, str) and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)*", targets) and targets != "all":
            targets = [one.strip() for one in targets.split(",")]
        self.put("adapter.target_modules", "all-linear" if linear or targets in (None, "all") else targets)
        if linear and any(not one.endswith("_proj") for one in words(targets)):
            self.lose("lora_target_modules", "`adapter.target_modules` has all linear layers, or a list of your own")
        if self.system == AXOLOTL and targets is None and not linear:
            self.notes.append("the file names no layers for the adapter; adapter.target_modules is all-linear")
        if kept := self.get("additional_target", "lora_modules_to_save"):
            self.put("adapter.modules_to_save", words(kept), self.key("additional_target", "lora_modules_to_save"))

    def data(self) -> None:
        self.put("data.max_length", self.get("cutoff_len", "sequence_len", "max_seq_length"))
        data = ForeignData(self.raw, self.path, self.dataset_info, self.lose, self.notes)
        if self.system == AXOLOTL:
            packs = bool(self.get("sample_packing"))
            found = [one for given in self.sources("datasets", "pretraining_dataset") for one in data.axolotl(given)]
            held = [one for given in self.sources("test_datasets") for one in data.axolotl(given)]
            if self.raw.get("datasets") and self.raw.get("pretraining_dataset"):
                self.lose("pretraining_dataset", "`datasets` is read; further sources can be added to data.mix")
            elif self.raw.get("pretraining_dataset"):
                self.notes.append("all rows are prepared before the training; data.train_split takes a part of them")
            # Axolotl drops conversations that are too long. Plain text is cut into pieces.
            long = self.get("excess_length_strategy")
            if long is not None or any(one.get("format") != "text" for one in found):
                self.put("data.on_too_long", {"raise": "error"}.get(long, long or "drop"), "excess_length_strategy")
        else:
            pretraining = self.raw.get("stage") == "pt"
            packs = bool(self.get("neat_packing") or self.get("packing"))
            packs |= pretraining and self.raw.get("packing") is None
            limit = self.get("max_samples")
            found = [data.factory(one, limit) for one in words(self.get("dataset"))]
            held = [data.factory(one, limit, held=True) for one in words(self.get("eval_dataset"))]
            self.used.update(("dataset_dir", "preprocessing_num_workers"))
            if pretraining:
                self.put("data.train_on", "all")
        self.used.update(("eval_sample_packing", "eval_packing"))
        if not found:
            raise ConfigError("the config names no data", where=f"{self.path}: dataset")
        if len(found) == 1:
            for name, value in found[0].items():
                self.put(f"data.{'train_split' if name == 'split' else name}", value)
        else:
            # Plain text is learned whole, whatever `train_on` says.
            learned = [one.pop("train_on", None) for one in found]
            if all(learned):
                self.put("data.train_on", learned[0])
            self.put("data.mix", found)
        self.shares(found)
        if self.get("train_on_inputs") or self.get("train_on_prompt"):
            self.put("data.train_on", "all")
        self.put("data.packing", packs)
        share = self.get("val_size", "val_set_size")
        sized, named = (
            self.key("val_size", "val_set_size"),
            "test_datasets" if self.system == AXOLOTL else "eval_dataset",
        )
        if held:
            self.held(held, named)
            if share:
                self.lose(sized, f"`{named}` has the rows to evaluate on")
        elif share:
            # From 2 on a number of rows, for all three.
            self.put("data.eval_ratio", int(share) if share > 1 else share, sized)

    def held(self, held: list[dict[str, Any]], key: str) -> None:
        """The evaluation rows: read with the data section's format and columns, without its subset and revision."""
        first, here = held[0], self.out["data"]
        self.put("data.eval_source", first["source"])
        if "split" in first:
            self.put("data.eval_split", first["split"])
        for name in ("subset", "revision"):
            if name in first:
                self.lose(f"{key}.{name}", "not supported: `data.eval_source` has none of its own", first[name])
        for name in ("format", "field_mapping", "input_template", "output_template"):
            if first.get(name) != here.get(name):
                self.lose(f"{key}.{name}", f"`data.{name}` is for the evaluation rows too", first.get(name))
        if len(held) > 1:
            self.notes.append("only one evaluation source is supported: data.eval_source")

    def shares(self, found: list[dict[str, Any]]) -> None:
        """LLaMA-Factory's probabilities of several datasets, as weights; `concat` takes all rows, as finray does."""
        keys = ("mix_strategy", "interleave_probs")
        strategy, shares = self.get(keys[0]) or "concat", [number(one) for one in words(self.get(keys[1]))]
        if len(found) < 2 or strategy == "concat":
            return
        if len(shares) == len(found) and all(isinstance(one, int | float) and one > 0 for one in shares):
            for one, share in zip(found, shares, strict=True):
                one["weight"] = share
            self.notes.append("a mix has as many rows as its sources; there it ends with the first or last of them")
            return
        for key in keys:
            if self.raw.get(key) is not None:
                self.lose(key, "set data.mix.N.weight, the share of each dataset")

    def sources(self, *keys: str) -> list[Any]:
        found = self.get(*keys) or []
        return found if isinstance(found, list) else [found]

    def batch(self) -> None:
        """Rows of a step, and of each GPU."""
        per = self.get("per_device_train_batch_size", "micro_batch_size")
        times = self.get("gradient_accumulation_steps")
        if times is None and isinstance(whole := self.raw.get("batch_size"), int) and isinstance(per, int):
            # Axolotl's batch is that of one GPU.
            self.used.add("batch_size")
            times = whole // per
        times = times or 1
        shared = math.prod(self.size(name) for name in foreign.SAME_ROWS)
        grid = self.size("dp_shard_size") * self.size("dp_replicate_size") * shared
        given = self.get("ray_num_workers") or self.workers
        self.workers = given or grid
        if given is None and grid > 1:
            self.notes.append(f"the sizes in the file need {grid} GPUs; --workers sets another number")
        elif "ray_num_workers" not in self.raw:
            self.notes.append(f"the number of GPUs is not in the file; using {self.workers} (--workers)")
        self.put("train.micro_batch_size", per)
        if all(isinstance(one, int) and not isinstance(one, bool) for one in (per, times, self.workers)):
            rows, least = per * times * max(1, self.workers // shared), per * self.workers
            odd = least > 0 and rows % least > 0
            if odd:
                self.notes.append(f"the batch is {rows} there, because {shared} GPUs share the same rows; here {least}")
            self.put("train.global_batch_size", least if odd else rows)

    def size(self, name: str) -> int:
        """The number of GPUs that a key names; 1 without it."""
        value = self.raw.get(name)
        return value if isinstance(value, int) and value >= 1 else 1

    def train(self) -> None:
        self.batch()
        steps = self.get("max_steps")
        if steps is not None and steps > 0:
            self.put("train.max_steps", steps)
        else:
            self.put("train.epochs", self.get("num_train_epochs", "num_epochs"))
        self.used.update(("num_train_epochs", "num_epochs"))
        self.put("train.learning_rate", self.get("learning_rate"))
        if self.get("max_grad_norm") == 0 or (
            self.system == LLAMA_FACTORY and self.raw.get("max_grad_norm", 1) is None
        ):
            # As Transformers' Trainer takes both.
            self.put("train.max_grad_norm", None, "max_grad_norm")
        elif (most := self.get("max_grad_norm")) is not None:
            self.put("train.max_grad_norm", most, "max_grad_norm")
        options = self.get("lr_scheduler_kwargs") or {}
        options = dict(options) if isinstance(options, Mapping) else {"lr_scheduler_kwargs": options}
        for name in ("min_lr_rate", "min_lr"):
            given, rate = options.get(name), number(options.pop(name, None))
            if isinstance(rate, int | float):
                options[name] = rate
            elif rate is not None:
                self.lose(f"lr_scheduler_kwargs.{name}", "not a number", given)
        share = self.get("cosine_min_lr_ratio") or options.pop("min_lr_rate", None)
        if (least := share * self.out["train"]["learning_rate"] if share else options.pop("min_lr", None)) is not None:
            self.put("train.min_learning_rate", least)
        if options:
            self.put("train.schedule_options", options, "lr_scheduler_kwargs")
        schedule = str(self.get("lr_scheduler_type", "lr_scheduler"))
        self.put("train.schedule", names.VALUES.get(schedule, schedule), self.key("lr_scheduler_type", "lr_scheduler"))
        steps_up, ratio = self.get("warmup_steps"), self.get("warmup_ratio")
        if schedule == "constant":
            # Transformers' has no warm-up; `constant_with_warmup` has.
            self.put("train.warmup_steps", 0)
        elif isinstance(steps_up, float) and 0 < steps_up < 1:
            # A part of one step is a share of all, as Transformers takes it.
            self.put("train.warmup_ratio", steps_up)
        elif steps_up is not None and (steps_up or not ratio):
            # 0 steps leave it to the ratio, as for Transformers.
            self.put("train.warmup_steps", steps_up)
        elif ratio is not None:
            self.put("train.warmup_ratio", ratio)
        optimizer = self.get("optim", "optimizer")
        if self.get("use_muon"):
            self.put("train.optimizer", "muon")
        elif optimizer is not None:
            self.put("train.optimizer", names.VALUES.get(str(optimizer), optimizer), self.key("optim", "optimizer"))
            if str(optimizer) in ("paged_adamw", "paged_adamw_32bit"):
                self.notes.append("only 8-bit states are paged; `train.optimizer: paged_adamw_8bit` saves memory")
        full = self.out["adapter"]["method"] == "none"
        half, wide = self.get("bf16", "bfloat16"), self.get("fp16", "float16")
        if self.system == AXOLOTL and not {"bf16", "bfloat16"} & set(self.raw):
            half = "auto"
        if self.get("pure_bf16"):
            exact = self.out["train"].get("optimizer", "adamw") == "adamw" and not self.raw.get("deepspeed")
            self.put("train.precision", "bf16-true" if full and exact else "bf16")
            if full and not exact:
                self.lose("pure_bf16", "not supported: `train.precision: bf16-true` needs AdamW, without DeepSpeed")
        elif half is True or half == "full":
            self.put("train.precision", "bf16")
        elif half is None or half == "auto" or half is False:
            self.put("train.precision", "fp16" if wide is True else "auto" if half == "auto" else "fp32")
        else:
            self.lose(self.key("bf16", "bfloat16"), "set `train.precision`; `auto` is bf16 where the hardware has it")
            self.put("train.precision", "auto")
        if self.system == AXOLOTL and full and self.out["train"]["precision"] in ("auto", "bf16"):
            self.notes.append("weights are bf16 there, fp32 here: train.precision: bf16-true is as there, with AdamW")
        again = self.get("gradient_checkpointing", "use_gradient_checkpointing")
        off = self.get("disable_gradient_checkpointing")
        whole = not off if self.system == LLAMA_FACTORY else bool(again) or bool(self.fsdp("activation_checkpointing"))
        self.put("train.gradient_checkpointing", "full" if whole else "none")
        if again == "offload" or self.get("activation_offloading"):
            self.put("train.activation_offload", True)
        if self.get("enable_liger_kernel", "use_liger_kernel") or self.get("liger_rms_norm"):
            self.put("train.liger", "auto")
        self.used.update(("liger_rope", "liger_glu_activation", "liger_fused_linear_cross_entropy"))
        self.used.update(("use_muon", "use_unsloth"))
        given = self.raw.get("plugins") or []
        plugins = given if isinstance(given, list) else [given]
        if all("liger" in str(one) or "CutCrossEntropy" in str(one) for one in plugins):
            self.used.add("plugins")

    def key(self, *keys: str) -> str:
        """The key of these that the file has."""
        return next((key for key in keys if key in self.raw), keys[0])

    def checkpoints(self) -> None:
        folder = Path(str(self.get("output_dir") or "runs/run"))
        name = legal_name(str(self.get("run_name", "wandb_name") or folder.name)) or "run"
        self.put("run.output_dir", str(folder.parent))
        self.put("run.name", name)
        if self.get("seed") is not None:
            self.put("run.seed", self.raw["seed"])
        evaluates = any(name in self.out["data"] for name in ("eval_ratio", "eval_source"))
        self.interval("save", "checkpoint")
        if kept := self.get("save_total_limit"):
            self.put("checkpoint.keep_last", kept, "save_total_limit")
        else:
            self.notes.append("all checkpoints are kept there, and the newest two here: checkpoint.keep_last")
        if evaluates:
            if isinstance(greater := self.get("greater_is_better"), bool):
                self.put("evaluation.metric_mode", "max" if greater else "min", "greater_is_better")
            self.interval("eval", "evaluation")
            stops = ("early_stopping_patience", "early_stopping_steps")
            if (patience := self.get(*stops)) is not None:
                stopping = {"patience": patience}
                if (gain := self.get("early_stopping_threshold")) is not None:
                    stopping["min_gain"] = gain
                self.put("evaluation.early_stopping", stopping, self.key(*stops))
        else:
            self.used.update(("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch"))
            self.used.update(("eval_batch_size", "per_device_eval_batch_size"))
            for key in ("early_stopping_patience", "early_stopping_steps", "early_stopping_threshold"):
                if self.get(key) is not None:
                    self.lose(key, "the file holds out no rows to evaluate on")
        report = self.get("report_to")
        trackers_named = {str(one) for one in (report if isinstance(report, list) else [report] if report else [])}
        if self.raw.get("wandb_project") or self.get("use_wandb"):
            trackers_named.add("wandb")
        if self.get("use_mlflow") or self.raw.get("mlflow_tracking_uri") or self.raw.get("mlflow_experiment_name"):
            trackers_named.add("mlflow")
        if self.raw.get("wandb_mode") == "disabled" and self.get("wandb_mode"):
            trackers_named.discard("wandb")
        if "tensorboard" in trackers_named:
            self.put("tracking.tensorboard", True)
        if trackers := sorted(trackers_named & {"wandb", "mlflow"}):
            self.put("tracking.trackers", trackers)
        if others := sorted(trackers_named - {"wandb", "mlflow", "tensorboard", "none"}):
            self.lose("report_to", f"not supported: {', '.join(others)}")
        if self.get("use_tensorboard"):
            self.put("tracking.tensorboard", True)
        if (every := self.get("logging_steps")) >= 1:
            self.put("tracking.log_every", int(every), "logging_steps")
        else:
            self.lose("logging_steps", "set tracking.log_every to a number of steps")

    def interval(self, kind: str, section: str) -> None:
        """How often it saves or evaluates: in steps, or in parts of an epoch."""
        strategy = self.get(f"{kind}_strategy")
        if strategy is None and kind == "eval":
            strategy = self.get("evaluation_strategy")
        every, times = self.get(f"{kind}_steps"), self.get(f"{kind}s_per_epoch")
        train = self.out["train"]
        if strategy == "steps" and every is None:
            every = self.get("logging_steps") if kind == "eval" else 500
        if strategy in ("no", False):
            if kind == "save":
                self.lose("save_strategy", "not supported: finray always saves, every `checkpoint.every_steps` steps")
            return
        if strategy is None and every is None and self.system == AXOLOTL and kind == "save":
            strategy = "epoch" if times is None else None
        if strategy == "epoch":
            times = 1
        if strategy is None and kind == "eval" and every is not None and self.system == LLAMA_FACTORY:
            self.lose("eval_steps", "it needs eval_strategy: steps; here `evaluation.every_steps`")
        elif isinstance(times, int | float) and times > 0:
            self.put(f"{section}.every_epochs", 1 / times, f"{kind}s_per_epoch")
        elif strategy == "best":
            self.notes.append("use checkpoint.keep_best, which saves every new best model")
        elif isinstance(every, int) and every >= 1:
            self.put(f"{section}.every_steps", every, f"{kind}_steps")
        elif isinstance(every, float) and 0 < every < 1:
            # A share of the run.
            if "max_steps" in train:
                self.put(f"{section}.every_steps", math.ceil(every * train["max_steps"]), f"{kind}_steps")
            else:
                self.put(f"{section}.every_epochs", every * train["epochs"], f"{kind}_steps")
        elif every is not None:
            self.lose(f"{kind}_steps", f"set `{section}.every_steps` or `every_epochs`")

    def hub(self) -> None:
        """Axolotl pushes if there is a name, LLaMA-Factory if `push_to_hub` is true as well."""
        pushes, name = bool(self.raw.get("push_to_hub")), self.raw.get("hub_model_id")
        if name and not pushes and self.system == LLAMA_FACTORY:
            self.lose("hub_model_id", "nothing is pushed there without `push_to_hub: true`; here `export.push_to_hub`")
            name = None
        if pushes == bool(name):
            self.used.add("push_to_hub")

    def machines(self) -> None:
        self.put("cluster.num_workers", self.workers)
        self.used.update(("ray_num_workers", "use_ray"))
        if self.get("deepspeed"):
            stage, offload = foreign.zero_of(self.raw["deepspeed"])
            if stage is None:
                self.lose("deepspeed", "set parallel.strategy: deepspeed, and parallel.deepspeed_config to this file")
            elif stage == 0:
                self.lose("deepspeed", "ZeRO stage 0 shards nothing: parallel.strategy is ddp")
            else:
                self.put("parallel.strategy", "deepspeed")
                self.put("parallel.zero_stage", stage)
                if offload:
                    self.put("parallel.cpu_offload", True)
                self.notes.append(
                    f"of DeepSpeed's config only ZeRO {stage} is used; parallel.deepspeed_config takes a whole file"
                )
        elif self.get("fsdp", "fsdp_config"):
            self.put("parallel.strategy", "fsdp")
            kind = f"{self.raw.get('fsdp')} {self.fsdp('sharding_strategy')}".lower()
            if isinstance(self.raw.get("fsdp_config"), str):
                self.lose("fsdp_config", "the file is not read; set `parallel.cpu_offload` and others here")
            if self.fsdp("offload_params") or "offload" in kind:
                self.put("parallel.cpu_offload", True)
            if self.fsdp("reshard_after_forward") is False or "shard_grad_op" in kind:
                self.put("parallel.reshard_after_forward", False)
            if "hybrid_shard" in kind:
                self.notes.append("set parallel.shard_size to the GPUs of a machine: hybrid sharding")
        elif self.system == LLAMA_FACTORY and self.workers != 1:
            # DDP, unless it was started with an Accelerate config for FSDP, which is another file.
            self.put("parallel.strategy", "auto")
        size, copies = self.get("dp_shard_size") or 1, self.get("dp_replicate_size") or 1
        if size > 1:
            self.put("parallel.strategy", "fsdp")
        if copies > 1:
            self.put("parallel.shard_size", size)
        self.used.add("fsdp_version")

    def fsdp(self, name: str) -> Any:
        """A setting of `fsdp_config`, with or without its prefix."""
        own = self.raw.get("fsdp_config")
        return own.get(name, own.get(f"fsdp_{name}")) if isinstance(own, Mapping) else None

    def checked(self) -> Converted:
        """Without the values that finray does not take, each of which is named."""
        for _ in range(sum(map(len, self.out.values())) + 1):
            try:
                build_config(self.out, source=str(self.path))
                break
            except ConfigError as error:
                place = next((re.match(r"([a-z]+\.\w+)", one) for one in error.problems if "." in one[:40]), None)
                section, _, name = (place[1] if place else "").partition(".")
                if name not in self.out.get(section, {}) or f"{section}.{name}" in (
                    "model.name",
                    "data.source",
                    "data.mix",
                ):
                    raise
                value = self.out[section].pop(name)
                key = self.origin.get(f"{section}.{name}") or name
                why = error.problems[0].partition(": ")[2] or error.message
                # The message quotes the value as it is.
                secret = redact({key: value}) != {key: value}
                self.lose(key, "not supported here" if secret else f"not supported: {why}", value)
        ordered = {one: self.out[one] for one in Config.model_fields if self.out.get(one)}
        known = [*names.NAMES, *foreign.NOT_OURS, *foreign.SENTENCES]
        lost = sorted(self.lost, key=lambda one: one.line)
        for at in [at for at, one in enumerate(lost) if not one.why][:_LIKENESSES]:
            lost[at] = replace(lost[at], near=did_you_mean(lost[at].key.partition(":")[0], known))
        return Converted(self.system, ordered, lost, self.notes)
