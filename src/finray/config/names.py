"""What settings of TRL, PEFT, LLaMA-Factory and Axolotl are called here.

A name stands for a field, for a field with the value that it means, or for a sentence where no field is the same.
docs/guide/coming-from.md has this table.
"""

from __future__ import annotations

_BATCH = "`train.global_batch_size` counts the rows of a step, `train.micro_batch_size` those of a forward pass"
_FOLLOWS = "it follows from `train.global_batch_size`, `train.micro_batch_size` and `cluster.num_workers`"
_SAME_COMMAND = "not needed: the same command continues a run, `--fresh` starts over"
_NOT_NEEDED = "not needed: unused columns are ignored, and rows are packed instead of padded"
_READ_AHEAD = "not needed: the rows of the next step are read during this one"
_SFT = "not needed: finray does supervised fine-tuning"
_SCHEDULED = "set `{path}` to a number of steps"

NAMES: dict[str, str] = {
    # the model
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "base_model": "model.name",
    "model_id": "model.name",
    "model_revision": "model.revision",
    "tokenizer_name_or_path": "not needed: the tokenizer is the model's",
    "tokenizer_config": "not needed: the tokenizer is the model's",
    "attn_implementation": "model.attention",
    "flash_attn": "model.attention",
    "flash_attention": "model.attention",
    "template": "model.chat_template",
    "chat_template_jinja": "model.chat_template",
    "chat_template_path": "model.chat_template",
    "load_in_4bit": "model.quantization: 4bit",
    "load_in_8bit": "model.quantization: 8bit",
    "quantization_bit": "model.quantization",
    "quantization_method": "model.quantization",
    "add_tokens": "model.new_tokens",
    "new_special_tokens": "model.new_tokens",
    "special_tokens": "model.new_tokens",
    "tokens": "model.new_tokens",
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
    # data
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dataset_path": "data.source",
    "dataset_dir": "data.source",
    "train_file": "data.source",
    "datasets": "`data.source` is one source, `data.mix` several",
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
    # optimisation
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
    "adam_beta_1": "train.adam_beta1",
    "adam_beta_2": "train.adam_beta2",
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
    # run, checkpoints, evaluation, logging
    "run_name": "run.name",
    "data_seed": "run.seed",
    "overwrite_output_dir": _SAME_COMMAND,
    "resume_from_checkpoint": _SAME_COMMAND,
    "auto_resume_from_checkpoints": _SAME_COMMAND,
    "save_steps": "checkpoint.every_steps",
    "save_strategy": _SCHEDULED.format(path="checkpoint.every_steps"),
    "saves_per_epoch": _SCHEDULED.format(path="checkpoint.every_steps"),
    "save_total_limit": "checkpoint.keep_last",
    "load_best_model_at_end": "checkpoint.keep_best",
    "eval_steps": "evaluation.every_steps",
    "eval_strategy": _SCHEDULED.format(path="evaluation.every_steps"),
    "evals_per_epoch": _SCHEDULED.format(path="evaluation.every_steps"),
    "per_device_eval_batch_size": "evaluation.batch_size",
    "max_eval_samples": "evaluation.max_rows",
    "early_stopping_patience": "evaluation.early_stopping",
    "logging_steps": "tracking.log_every",
    "report_to": "tracking.trackers",
    "wandb_project": "tracking.trackers",
    # where it runs
    "deepspeed": "parallel.deepspeed_config",
    "fsdp": "parallel.strategy: fsdp",
    "fsdp_config": "parallel.strategy: fsdp",
    "num_processes": "cluster.num_workers",
    "num_gpus": "cluster.num_workers",
    "ray_num_workers": "cluster.num_workers",
    "use_ray": "not needed: every run is on Ray",
    "ray_run_name": "run.name",
    "ray_storage_path": "run.output_dir",
    "ray_init_kwargs": "cluster.address",
    "resources_per_worker": "cluster.cpus_per_worker",
}


def called_here(name: str) -> str:
    """What a setting of another system is here, as a hint behind a message; empty where it is not known."""
    found = NAMES.get(name, "")
    return f" (here: `{found}`)" if _is_field(found) else f" ({found})" if found else ""


def names_markdown() -> str:
    """The table for the guide."""
    rows = [f"| `{name}` | {f'`{found}`' if _is_field(found) else found} |" for name, found in sorted(NAMES.items())]
    return "\n".join(["| there | here |", "|---|---|", *rows]) + "\n"


def _is_field(found: str) -> bool:
    return bool(found) and "`" not in found and not found.startswith("not needed")
