"""The names of settings of TRL, PEFT, LLaMA-Factory and Axolotl in finray.

A name stands for a field, for a field with the value that it means, or for a sentence where no field is the same.
docs/guide/coming-from.md has this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from finray.errors import did_you_mean

_BATCH = "`train.global_batch_size` is the batch of an optimizer step, `train.micro_batch_size` that of a forward pass"
_FOLLOWS = "it follows from `train.global_batch_size`, `train.micro_batch_size` and `cluster.num_workers`"
_SAME_COMMAND = "not needed: the same command continues a run, `--fresh` starts over"
_NOT_NEEDED = "not needed: unused columns are ignored, and rows are packed instead of padded"
_READ_AHEAD = "not needed: the next step's rows are loaded in the background"
_SFT = "not needed: finray does supervised fine-tuning"
_SAFE = "not needed: weights are written as safetensors"
_PLACED = "not needed: Ray Train starts and connects the workers"
_TOKENIZERS = "not needed: Transformers chooses the class from the model's files"
_PUBLISHED = "not supported: publish the output of `finray export`"
_NOT_HERE = "not supported: `docs/guide/extending.md` shows how to add a task with its own loss"
_TOKENS = "the model's own are used, as its files have them; `model.new_tokens` adds more"
_ON_TOP = (
    "a new adapter is trained where `adapter.start_from` is not set; to train one on top of another, merge that with "
    "`finray export`, and set `model.name` to the output"
)
_FLASH = "not needed: `model.attention: auto` uses FlashAttention if it is installed"
_LIGER = "`train.liger` enables Liger's norms, rotary embeddings and gated MLPs; the loss is finray's"
_INTERVAL = "`epoch`: `{path}.every_epochs: 1`; `steps`: `{path}.every_steps`"
_SCHEDULED = "set `{path}` to a number of steps"

NAMES: dict[str, str] = {
    # the model
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "base_model": "model.name",
    "model_id": "model.name",
    "model_revision": "model.revision",
    "revision_of_model": "model.revision",
    "tokenizer_name_or_path": "not needed: the model's tokenizer is used",
    "tokenizer_config": "not needed: the model's tokenizer is used",
    "attn_implementation": "model.attention",
    "flash_attn": "model.attention",
    "flash_attention": _FLASH,
    "template": "model.chat_template",
    "chat_template_jinja": "model.chat_template",
    "chat_template_path": "model.chat_template",
    "load_in_4bit": "model.quantization: 4bit",
    "load_in_8bit": "model.quantization: 8bit",
    "quantization_bit": "model.quantization",
    "quantization_method": "model.quantization",
    "add_tokens": "model.new_tokens",
    "new_special_tokens": "model.new_tokens",
    "special_tokens": _TOKENS,
    "tokens": "model.new_tokens",
    "eager_attention": "model.attention",
    "sdp_attention": "model.attention",
    "xformers_attention": "model.attention",
    "double_quantization": "model.quantization",
    "bnb_4bit_quant_type": "model.quantization",
    "bnb_4bit_compute_dtype": "model.quantization",
    "bnb_4bit_use_double_quant": "model.quantization",
    "model_type": _TOKENIZERS,
    "tokenizer_type": _TOKENIZERS,
    "use_fast_tokenizer": _TOKENIZERS,
    "hf_hub_token": "not needed: HF_TOKEN in the environment",
    "hub_token": "not needed: HF_TOKEN in the environment",
    "hf_use_auth_token": "not needed: HF_TOKEN in the environment",
    "cache_dir": "not needed: HF_HOME in the environment",
    # sections
    "lora": "the section is `adapter`",
    "peft": "the section is `adapter`",
    "logging": "the section is `tracking`",
    "eval": "the section is `evaluation`",
    # adapters
    "finetuning_type": "adapter.method",
    "use_peft": "adapter.method",
    "peft_type": "adapter.method",
    "use_lora": "adapter.method",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "lora_target_linear": "adapter.target_modules: all-linear",
    "lora_modules_to_save": "adapter.modules_to_save",
    "additional_target": "adapter.modules_to_save",
    "use_rslora": "adapter.method: rslora",
    "use_dora": "adapter.method: dora",
    "peft_use_rslora": "adapter.method: rslora",
    "peft_use_dora": "adapter.method: dora",
    "pissa_init": "adapter.method: pissa",
    "loraplus_lr_ratio": "adapter.lora_plus_ratio",
    "adapter_name_or_path": "adapter.start_from",
    "lora_model_dir": "adapter.start_from",
    "init_lora_weights": "`adapter.method` has `pissa` and others",
    "create_new_adapter": _ON_TOP,
    "lora_fan_in_fan_out": "not needed: it follows from the type of the layer",
    "unfrozen_parameters": "not supported: without an adapter all weights are trained",
    # data
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dataset_path": "data.source",
    "dataset_dir": "data.source",
    "train_file": "data.source",
    "datasets": "`data.source` is the path of one source, `data.format` its type; several are `data.mix`",
    "dataset_config": "data.subset",
    "dataset_config_name": "data.subset",
    "dataset_train_split": "data.train_split",
    "dataset_test_split": "data.eval_split",
    "dataset_text_field": "data.field_mapping",
    "eval_dataset": "data.eval_source",
    "test_datasets": "data.eval_source",
    "val_size": "data.eval_ratio",
    "val_set_size": "data.eval_ratio",
    "mix_strategy": "data.mix",
    "interleave_probs": "data.mix",
    "default_system": "data.system",
    "system_prompt": "data.system",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "sequence_len": "data.max_length",
    "model_max_length": "data.max_length",
    "sample_packing": "data.packing",
    "neat_packing": "data.packing",
    "train_on_inputs": "data.train_on: all",
    "train_on_prompt": "data.train_on: all",
    "mask_history": "data.train_on: last_assistant",
    "roles_to_train": "data.train_on",
    "assistant_only_loss": "data.train_on: assistant",
    "completion_only_loss": "data.train_on: completion",
    "max_samples": "`data.train_split` takes a slice, such as `train[:1000]`",
    "preprocessing_num_workers": "prepare.num_workers",
    "dataset_num_proc": "prepare.num_workers",
    "dataset_processes": "prepare.num_workers",
    "dataset_prepared_path": "prepare.dir",
    "tokenized_path": "prepare.dir",
    "dataloader_num_workers": _READ_AHEAD,
    "remove_unused_columns": _NOT_NEEDED,
    "pad_to_sequence_len": _NOT_NEEDED,
    "group_by_length": _NOT_NEEDED,
    "eval_packing": "data.packing",
    "eval_sample_packing": "data.packing",
    "padding_free": _NOT_NEEDED,
    "dataset_kwargs": "data.format",
    "ds_type": "data.format",
    "formatting_func": "data.converter",
    "field_messages": "data.field_mapping",
    "message_property_mappings": "data.field_mapping",
    "default_system_message": "data.system",
    "train_on_eos": "not needed: the end-of-turn token is always trained on",
    "train_on_eot": "not needed: the end-of-turn token is always trained on",
    "streaming": "not needed: data are prepared in parts, and read from disk during training",
    "shuffle_merged_datasets": "not needed: rows are shuffled by `run.seed`",
    "overwrite_cache": "not needed: changed data are prepared again; `finray cache` lists and removes prepared data",
    "dataloader_pin_memory": _READ_AHEAD,
    "dataloader_prefetch_factor": _READ_AHEAD,
    # optimization
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "batch_size": _BATCH,
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": _FOLLOWS,
    "lr": "train.learning_rate",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "num_warmup_steps": "train.warmup_steps",
    "optim": "train.optimizer",
    "betas": "`train.adam_beta1` and `train.adam_beta2`",
    "adam_betas": "`train.adam_beta1` and `train.adam_beta2`",
    "adam_beta_1": "train.adam_beta1",
    "adam_beta_2": "train.adam_beta2",
    "adam_eps": "train.adam_epsilon",
    "gradient_clipping": "train.max_grad_norm",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "fp32": "train.precision: fp32",
    "mixed_precision": "train.precision",
    "torch_dtype": "train.precision",
    "dtype": "train.precision",
    "activation_offloading": "train.activation_offload",
    "torch_compile": "train.compile",
    "use_liger_kernel": "train.liger",
    "enable_liger_kernel": "train.liger",
    "stage": _SFT,
    "do_train": _SFT,
    "rl": _SFT,
    "num_steps": "train.max_steps",
    "lr_scheduler_kwargs": "train.schedule_options",
    "cosine_min_lr_ratio": "train.min_learning_rate",
    "min_lr": "train.min_learning_rate",
    "loraplus_lr_embedding": "not supported: embeddings are trained with `train.learning_rate`",
    "pure_bf16": "`train.precision: bf16-true` with `adapter.method: none`",
    "bfloat16": "train.precision: bf16",
    "float16": "train.precision: fp16",
    "tf32": "not supported: finray leaves torch's default",
    "gradient_checkpointing_kwargs": "train.gradient_checkpointing",
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    "disable_gradient_checkpointing": "train.gradient_checkpointing",
    "use_unsloth": _LIGER,
    "liger_rope": _LIGER,
    "liger_rms_norm": _LIGER,
    "liger_layer_norm": _LIGER,
    "liger_rms_norm_gated": _LIGER,
    "liger_glu_activation": _LIGER,
    "liger_fused_linear_cross_entropy": _LIGER,
    "cut_cross_entropy": "not needed: logits are computed in chunks, and only where there is a label",
    "label_smoothing_factor": _NOT_HERE,
    "neftune_noise_alpha": "not supported: finray adds no noise to embeddings",
    # run, checkpoints, evaluation, logging
    "run_name": "run.name",
    "data_seed": "run.seed",
    "overwrite_output_dir": _SAME_COMMAND,
    "resume_from_checkpoint": _SAME_COMMAND,
    "auto_resume_from_checkpoints": _SAME_COMMAND,
    "save_steps": "checkpoint.every_steps",
    "save_strategy": _INTERVAL.format(path="checkpoint"),
    "saves_per_epoch": "`checkpoint.every_epochs` is 1 divided by it",
    "save_total_limit": "checkpoint.keep_last",
    "load_best_model_at_end": "checkpoint.keep_best",
    "eval_steps": "evaluation.every_steps",
    "eval_strategy": _INTERVAL.format(path="evaluation"),
    "evals_per_epoch": "`evaluation.every_epochs` is 1 divided by it",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "max_eval_samples": "evaluation.max_rows",
    "early_stopping_patience": "evaluation.early_stopping",
    "early_stopping_threshold": "evaluation.early_stopping",
    "early_stopping_min_delta": "evaluation.early_stopping",
    "logging_steps": "tracking.log_every",
    "report_to": "tracking.trackers",
    "mlflow_tracking_uri": "tracking.mlflow_uri",
    "mlflow_experiment_name": "tracking.mlflow_experiment",
    "evaluation_strategy": _INTERVAL.format(path="evaluation"),
    "do_eval": _SCHEDULED.format(path="evaluation.every_steps"),
    "eval_on_start": "evaluation.on_start",
    "eval_batch_size": "evaluation.batch_size",
    "predict_with_generate": "evaluation.generate_rows",
    "do_causal_lm_eval": "evaluation.generate_rows",
    "eval_causal_lm_metrics": "evaluation.metrics",
    "generation_max_length": "evaluation.max_new_tokens",
    "eval_max_new_tokens": "evaluation.max_new_tokens",
    "metric_for_best_model": "evaluation.metric",
    "greater_is_better": "evaluation.metric_mode",
    "early_stopping_steps": "evaluation.early_stopping",
    "logging_strategy": _SCHEDULED.format(path="tracking.log_every"),
    "logging_dir": "run.output_dir",
    "plot_loss": "not needed: `finray report` draws the curves of a run",
    "wandb_name": "run.name",
    "wandb_run_id": "run.name",
    "use_wandb": "tracking.trackers: [wandb]",
    "use_tensorboard": "tracking.tensorboard",
    "save_safetensors": _SAFE,
    "save_only_model": _SAME_COMMAND,
    "push_to_hub": "set a model name under `export`, or use `finray push` after the run",
    "hub_model_id": "export.push_to_hub",
    "hub_strategy": "`end`: `export.push_to_hub`; `checkpoint`: `export.push_every_checkpoint`",
    "export_dir": _PUBLISHED,
    # where it runs
    "deepspeed": "parallel.deepspeed_config",
    "fsdp": "parallel.strategy: fsdp",
    "fsdp_config": "parallel.strategy: fsdp",
    "num_processes": "cluster.num_workers",
    "num_gpus": "cluster.num_workers",
    "ray_num_workers": "cluster.num_workers",
    "fsdp_version": "parallel.strategy: fsdp",
    "local_rank": _PLACED,
    "device_map": _PLACED,
    "ddp_timeout": _PLACED,
    "ddp_find_unused_parameters": _PLACED,
    "use_ray": "not needed: every run uses Ray",
    "ray_run_name": "run.name",
    "ray_storage_path": "run.output_dir",
    "ray_init_kwargs": "cluster.address",
    "resources_per_worker": "cluster.cpus_per_worker",
}


# What `false` asks for, where it is not what finray does without the setting.
OFF: dict[str, str] = {
    "bf16": "train.precision: fp32",
    "bfloat16": "train.precision: fp32",
    "flash_attention": "model.attention: packed",
    "flash_attn": "model.attention: packed",
    "sample_packing": "data.packing: false",
    "neat_packing": "data.packing: false",
    "assistant_only_loss": "data.train_on: all",
    "completion_only_loss": "data.train_on: all",
    "use_peft": "adapter.method: none",
    "use_lora": "adapter.method: none",
    "use_wandb": "",
    "use_tensorboard": "tracking.tensorboard: false",
}

# Values of other systems, of settings that have the same name, and what they are called here.
VALUES: dict[str, str] = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "8bit",
    "int4": "4bit",
    "nf4": "4bit",
    "8": "8bit",
    "4": "4bit",
    "sdpa": "packed",
    "eager": "packed",
    "fa2": "flash_attention_2",
    "unsloth": "full",
    "chat_template": "messages",
    "openai": "messages",
    "completion": "text",
}

# Values that nothing here is the same as.
VALUES_NOT_HERE: dict[str, str] = {
    "reduce_lr_on_plateau": "not supported: such a run depends on its evaluations, and cannot be resumed or extended "
    "exactly; use `cosine`, or `wsd`, which stays at the peak and falls at the end, with `evaluation.early_stopping`",
}


# What is needed and missing: names of methods, and how settings of them begin.
_PAIRS = "training on pairs of answers"
_IPO = "training with this loss of pairs"
_PREFERENCES = "training on preferences of this kind"
_REWARDS = "training of a reward model"
_PROCESS_REWARDS = "training of process reward models"
_REINFORCEMENT = "reinforcement learning"
_SWEEPS = "sweeps over settings"
METHODS: dict[str, str] = {
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo"), _PAIRS),
    "ipo": _IPO,
    **dict.fromkeys(("cpo", "bco", "sppo"), _PREFERENCES),
    **dict.fromkeys(("rm", "reward", "reward_model", "reward_modeling"), _REWARDS),
    **dict.fromkeys(("prm", "process_reward_model"), _PROCESS_REWARDS),
    **dict.fromkeys(("ppo", "grpo", "gdpo", "rloo", "online_dpo", "rl", "rlhf", "reinforce"), _REINFORCEMENT),
    **dict.fromkeys(("tune", "sweep", "sweeps", "hpo", "search"), _SWEEPS),
    **dict.fromkeys(("distill", "distillation", "kd", "gkd"), "distillation"),
}
_METHODS_SETTINGS: dict[str, str] = {
    **dict.fromkeys(("pref_", "dpo_", "kto_", "simpo_", "orpo_", "rpo_", "precompute_ref"), _PAIRS),
    "cpo_": _PREFERENCES,
    **dict.fromkeys(("ref_model", "rl_", "ppo_", "grpo_", "reward_funcs", "trl", "vllm_server"), _REINFORCEMENT),
    **dict.fromkeys(("reward_model", "center_rewards"), _REWARDS),
    "process_reward_model": _PROCESS_REWARDS,
    **dict.fromkeys(("ref_", "dpo", "kto", "orpo"), _PAIRS),
    "kd_": "distillation",
}
HERE_IS = "finray trains on prompts and answers, conversations, pairs of answers, plain text, and texts with labels"


# Keys that only one system's files have, beside the name of the model, which others have too.
SIGNS: dict[str, tuple[str, frozenset[str]]] = {
    "LLaMA-Factory": (
        "model_name_or_path",
        frozenset(("stage", "finetuning_type", "dataset", "dataset_dir", "template", "cutoff_len", "lora_target")),
    ),
    "Axolotl": ("base_model", frozenset(("datasets", "pretraining_dataset", "sequence_len", "micro_batch_size"))),
}


def system_of(config: Mapping[str, object]) -> str:
    """The system whose config this is; empty if `finray convert` does not read it."""
    return next((name for name, (sign, keys) in SIGNS.items() if sign in config and keys & config.keys()), "")


def not_yet(method: str) -> str:
    """A sentence about another system's name for what finray does not have yet, or has as an objective; else empty."""
    return _sentence(METHODS.get(method.lower().replace("-", "_"), ""))


def _sentence(method: str) -> str:
    if method == _PAIRS:
        return "write `train.objective: dpo` (or `kto`, `orpo`, `simpo`), and its numbers into the section `preference`"
    if method == _IPO:
        return "write `train.objective: dpo` and `preference.loss: ipo`"
    if method == _REWARDS:
        return "write `train.objective: reward`, and its numbers into the section `preference`"
    return f"finray has no {method} yet" if method else ""


def missing(name: str, value: object = None) -> str:
    """The sentence for a setting of something that finray does not have yet, or has as an objective; else empty."""
    method = not_yet(str(value)) if name in ("stage", "rl", "task", "method", "trainer_type") else ""
    if isinstance(value, Mapping) or not method:
        method = not_yet(name) if name not in ("rl", "reward") or isinstance(value, Mapping) else method
    if not method:
        starts = (method for start, method in _METHODS_SETTINGS.items() if name.startswith(start))
        method = _sentence(next(starts, ""))
    return method if not method or method.startswith("write") else f"needed and missing: {method}"


def value_here(value: object, values: Iterable[str]) -> str:
    """A hint for a value of another system or a misspelt one; empty if nothing is similar."""
    if (why := VALUES_NOT_HERE.get(str(value))) is not None:
        return f" ({why})"
    names = [*values]
    here = VALUES.get(str(value), "")
    return f" (in finray: `{here}`)" if here in names else did_you_mean(str(value), names)


def asks_nothing(name: str, value: object) -> bool:
    """Whether a setting of another system has no effect: it is empty, or off as in finray."""
    if value is False:
        target = NAMES.get(name, "")
        return OFF.get(name) == "" or (name not in OFF and (not target or ": " in target or target.startswith("not ")))
    return value is None or value in ("", [], {})


def called_here(name: str, value: object = None) -> str:
    """A hint, behind a message, for a setting of another system; empty if it is unknown."""
    hint = OFF.get(name) if value is False else None
    hint = hint or missing(name, value) or NAMES.get(name, "")
    return f" (in finray: `{hint}`)" if _is_field(hint) else f" ({hint})" if hint else ""


def names_markdown() -> str:
    """The table for the guide."""
    rows = [
        f"| `{name}` | {f'`{meaning}`' if _is_field(meaning) else meaning} |" for name, meaning in sorted(NAMES.items())
    ]
    return "\n".join(["| their name | in finray |", "|---|---|", *rows]) + "\n"


def _is_field(meaning: str) -> bool:
    return bool(meaning) and "`" not in meaning and not meaning.startswith(("not ", "needed "))
