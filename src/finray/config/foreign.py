"""Defaults of LLaMA-Factory and Axolotl, and settings that finray does not have, each with the reason.

Those that are another name of a field are in :mod:`finray.config.names`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LLAMA_FACTORY, AXOLOTL = "LLaMA-Factory", "Axolotl"
# What the projects assume, where that is not what finray assumes.
ASSUMED: dict[str, dict[str, Any]] = {
    LLAMA_FACTORY: {
        "cutoff_len": 2048,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.0,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "save_steps": 500,
        "logging_steps": 500,
    },
    AXOLOTL: {
        "sequence_len": 512,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "learning_rate": 2e-4,
        "logging_steps": 10,
        "save_total_limit": 4,
    },
}
# GPUs that work on the same rows, so that they do not count for the batch of a step.
SAME_ROWS = (
    *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
SIZES = (*SAME_ROWS, "expert_parallel_size", "expert_model_parallel_size")
# Fields of the section `preference` that are numbers (or names), and what the projects call them.
PREFERENCE_KEYS = {
    "beta": ("pref_beta", "rl_beta", "orpo_alpha"),
    "gamma": ("simpo_gamma",),
    "label_smoothing": ("dpo_label_smoothing",),
    "chosen_weight": ("pref_ftx", "cpo_alpha", "rpo_alpha"),
    "desirable_weight": ("kto_chosen_weight", "kto_desirable_weight"),
    "undesirable_weight": ("kto_rejected_weight", "kto_undesirable_weight"),
    "centering": ("center_rewards_coefficient",),
    "reference": ("ref_model",),
}
NUMBERS = {
    *(key for name, keys in PREFERENCE_KEYS.items() if name != "reference" for key in keys),
    *("per_device_train_batch_size", "micro_batch_size", "batch_size", "gradient_accumulation_steps", "max_samples"),
    *("learning_rate", "cosine_min_lr_ratio", "num_train_epochs", "num_epochs", "max_steps", "ray_num_workers"),
    *("warmup_steps", "warmup_ratio", "val_size", "val_set_size", "lora_rank", "lora_r", "logging_steps"),
    *("save_steps", "eval_steps", "saves_per_epoch", "evals_per_epoch", "dp_shard_size", "dp_replicate_size"),
    *("max_grad_norm", "early_stopping_patience", "early_stopping_steps", "save_total_limit", "lora_alpha"),
    *SIZES,
}
# Those that are whole, and the least that they may be.
LEAST = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "batch_size", "gradient_accumulation_steps"), 1
    ),
    **{"ray_num_workers": 1, "lora_rank": 1, "lora_r": 1, "max_samples": 0},
}
# Keys that describe something else than how a model is tuned, and say so for a whole file.
ELSEWHERE = {
    "export_dir": "it exports a model; use `finray export RUN --output DIR`",
    "infer_backend": "it is for inference; use `finray generate` or `finray chat`",
    "do_predict": "it answers prompts; use `finray evaluate` or `finray generate`",
}
NOT_OURS = {
    "use_galore": "GaLore",
    "use_apollo": "APOLLO",
    "use_badam": "BAdam",
    "use_adam_mini": "Adam-mini",
    "use_llama_pro": "LLaMA Pro",
    "pref_bco_weight": "the BCO loss",
    "dpo_use_weighting": "weights of pairs by their probability (WPO)",
    "dpo_norm_loss": "a loss that is normalised by the batch",
    "ref_model_adapters": "an adapter of the reference by its name",
    "ref_model_quantization_bit": "a reference that is quantized otherwise than the model",
    "ld_alpha": "LD-DPO",
    "rl_adapter_ref_model": "an adapter of the reference by its name",
    "use_dft_loss": "the DFT loss",
    "use_asft_loss": "the ASFT loss",
    "use_eaft_loss": "the EAFT loss",
    "mixture_of_depths": "mixture of depths",
    "fp8": "training in fp8",
    "qat": "quantization-aware training",
    "relora": "ReLoRA",
    "lisa_n_layers": "LISA",
    "peft": "LoftQ and other PEFT settings",
    "plugins": "plugins of Axolotl",
    "context_parallel_size": "context parallelism",
    "tensor_parallel_size": "tensor parallelism",
    "expert_parallel_size": "expert parallelism",
    "sequence_parallel_degree": "sequence parallelism",
    "sequence_parallel": "sequence parallelism",
    "tensor_model_parallel_size": "tensor parallelism",
    "pipeline_model_parallel_size": "pipeline parallelism",
    "expert_model_parallel_size": "expert parallelism",
    "processor_type": "vision-language models",
    "skip_prepare_dataset": "vision-language models, whose rows are prepared during training",
    "gptq": "GPTQ bases",
    "bnb_config_kwargs": "other settings of bitsandbytes; finray uses those of QLoRA",
    "lora_target_parameters": "LoRA on parameters outside linear layers, such as fused experts",
    "use_eaft": "the EAFT loss",
    "diffusion": "diffusion models",
    "cosine_constant_lr_ratio": "a cosine schedule that ends before the run",
    "experts_implementation": "kernels for experts",
    "use_kernels": "kernels of the Hub",
    "use_scattermoe": "kernels for experts",
    "use_sonicmoe": "kernels for experts",
    "use_v1_kernels": "kernels of LLaMA-Factory",
    "use_swanlab": "SwanLab",
    "use_otel_metrics": "OpenTelemetry",
    "llmcompressor": "compressed weights",
    "model_config": "changes to the model's config.json",
    "model_quantization_config": "bases that are quantized while they are loaded, except `model.quantization`",
    "model_quantization_config_kwargs": "bases that are quantized while they are loaded, except `model.quantization`",
    "quantization_type": "4 bits other than NF4",
    "use_onebitllms": "training with 1.58 bits",
    "reinit_weights": "new weights; the run starts from those of the model",
    "llama4_linearized_experts": "changes to experts",
    "tiled_mlp": "MLPs that are computed in tiles",
    "gemma4_hybrid_attn_impl": "attention that differs by layer",
    "fused_attn_kernel": "kernels of Axolotl",
    "use_dsv4_kernels": "kernels of Axolotl",
    "use_glm_dsa_kernels": "kernels of Axolotl",
    "nvfp4_merge_aware": "NVFP4 weights",
    "lr_quadratic_warmup": "a warm-up that is not linear",
    "min_sample_len": "a shortest length of rows",
    "sample_packing_sequentially": "packs in the order of the rows",
    "use_distributed_optimizer": "Megatron",
    "use_packed_sequences": "Megatron",
    "bias_activation_fusion": "Megatron",
    "apply_rope_fusion": "Megatron",
    "export_hf_on_finish": "Megatron",
    "use_mca": "Megatron",
    "use_megatron_bridge": "Megatron",
    "train_from_scratch": "new weights; the run starts from those of the model",
    "split_special_tokens": "special tokens that are split",
    "use_pose": "PoSE",
    "use_comet": "Comet",
    "use_trackio": "Trackio",
    "embedding_lr": "a learning rate of some layers",
    "embedding_lr_scale": "a learning rate of some layers",
    "lr_groups": "a learning rate of some layers",
    "loftq_config": "LoftQ",
    "lora_rank_pattern": "a rank of some layers",
    "lora_alpha_pattern": "an alpha of some layers",
    "flex_attention": "FlexAttention",
    "sage_attention": "SageAttention",
    "trainer_cls": "your own trainer",
    "added_tokens_overrides": "changes to tokens of the model; `model.new_tokens` adds more",
    "overrides_of_model_config": "changes to the model's config.json",
    "media_dir": "images and videos",
}
# Settings that begin so.
FAMILIES = {
    "galore_": "GaLore",
    "apollo_": "APOLLO",
    "badam_": "BAdam",
    "eaft_": "the EAFT loss",
    "asft_": "the ASFT loss",
    "gptq_": "GPTQ bases",
    "flash_attn_": "FlashAttention's kernels other than attention",
    "relora_": "ReLoRA",
    "lisa_": "LISA",
    "fp8_": "training in fp8",
    "kt_": "KTransformers",
    "use_kt": "KTransformers",
    "otel_": "OpenTelemetry",
    "swanlab_": "SwanLab",
    "image_": "images",
    "video_": "videos",
    "freeze_": "vision-language models",
    "quantize_moe_": "quantization of experts only",
    "dsv4_": "kernels of Axolotl",
    "flex_attn_": "FlexAttention",
    "jagged_restart_": "a learning rate that starts again",
    "expert_parallel_": "expert parallelism",
    "moe_": "Megatron",
    "megatron_": "Megatron",
    "overlap_": "Megatron",
    "recompute_": "Megatron",
    "oft_": "OFT",
    "dion_": "Dion",
    "qgalore_": "Q-GaLore",
    "hyper_parallel_": "Hyper Parallel",
    "pose_": "PoSE",
    "torch_compile_": "options of torch.compile; `train.compile` uses the defaults",
    "peft_": "other settings of PEFT",
    "comet_": "Comet",
    "trackio_": "Trackio",
}
SENTENCES = {
    "gradient_checkpointing_kwargs": "not needed: finray uses the non-reentrant variant",
    "dataset_prepared_path": "not needed: prepared data are in `<run.output_dir>/.prepared`, or in `prepare.dir`",
    "template": "the model's own chat template is used; `model.chat_template` names a Jinja file instead",
    "chat_template": "the model's own chat template is used; `model.chat_template` names a Jinja file instead",
    "chat_template_jinja": "`model.chat_template` takes it, for all data",
    "eot_tokens": "not needed: the chat template's end-of-turn token ends an answer",
    "loss_watchdog_threshold": "not needed: a non-finite loss stops the run and names the step",
    "loss_watchdog_patience": "not needed: a non-finite loss stops the run and names the step",
    "wandb_watch": "not supported: gradients of individual layers are not logged",
    "wandb_log_model": "not supported: checkpoints are not uploaded to W&B",
    "swanlab_project": "not supported: there is no tracker for SwanLab",
    "strict": "not needed: an unknown key is always an error",
    "ray_storage_path": "put `run.output_dir` on a shared directory",
    "pissa_iter": "not supported: finray always takes eight subspace iterations",
    "pissa_convert": "not needed: the saved adapter fits the original weights",
    "save_first_step": "not supported: test saving with `checkpoint.every_steps: 1` in a run of two steps",
    "upcast_layernorm": "not needed: norms are computed in fp32",
    "upcast_lmhead_output": "not needed: the loss is computed in fp32",
    "include_num_input_tokens_seen": "not needed: tokens are always counted",
    "include_tkps": "not needed: tokens per second are always recorded",
    "dataset_shuffle": "not needed: rows are shuffled by `run.seed`",
    "merge_lora": "use `finray export --merge` after the training",
    "lora_mlp_kernel": "not needed: finray has its own kernels for LoRA",
    "lora_qkv_kernel": "not needed: finray has its own kernels for LoRA",
    "lora_o_kernel": "not needed: finray has its own kernels for LoRA",
    "low_cpu_mem_usage": "not needed: weights are read from their files tensor by tensor",
    "xformers_attention": "not needed: `model.attention: auto`",
    "eval_table_size": "`finray evaluate` writes answers side by side",
    "debug": "not supported",
    "do_causal_lm_eval": "set `evaluation.generate_rows` to a number of rows",
    "resize_token_embeddings_to_32x": "not needed: the embeddings grow only with `model.new_tokens`",
    "eta_min": "`train.min_learning_rate`, if its scheduler uses it",
    "tokenizer_legacy": "not needed: the model's tokenizer is used",
    "tokenizer_use_mistral_common": "not supported: prompts are rendered by the model's Jinja template",
    "dataset_exact_deduplication": "not supported: `finray inspect` lists duplicate rows",
    "max_prompt_len": "not needed: `data.max_length` is the length of a prompt with one answer",
    "full_finetune": "not needed: set `adapter.method: none` for full fine-tuning",
    "is_llama_derived_model": "not needed: Transformers chooses the class from the model's files",
    "is_falcon_derived_model": "not needed: Transformers chooses the class from the model's files",
    "tokenizer_use_fast": "not needed: Transformers chooses the class from the model's files",
    "dataset_keep_in_memory": "not needed: data are read from disk during training",
    "curriculum_sampling": "not supported: rows are shuffled by `run.seed`",
    "s2_attention": "not supported: attention covers the whole row",
    "shift_attn": "not supported: attention covers the whole row",
    "rope_scaling": "not supported: change it in the model's config.json",
    "packing": "data.packing",
    "noisy_embedding_alpha": "not supported: finray adds no noise to embeddings",
    "chat_template_kwargs": "model.chat_template_arguments",
    "mlflow_run_name": "run.name",
    "chunked_cross_entropy": "not needed: logits are computed in chunks, and only where there is a label",
    "auto_find_batch_size": "not supported: `finray plan` shows the largest `train.micro_batch_size` that fits",
    "shuffle_before_merging_datasets": "not needed: rows are shuffled by `run.seed`",
    "disable_shuffling": "not supported: rows are shuffled by `run.seed`",
    "compute_accuracy": "not supported: the loss and the perplexity are computed during training",
    "enable_torch_profiler": "set `train.profile`",
    "profiler_steps": "set `train.profile`",
    "resize_vocab": "not needed: the embeddings grow only with `model.new_tokens`",
    "use_unsloth_gc": "set `train.gradient_checkpointing`",
    "use_reentrant_gc": "not needed: finray uses the non-reentrant variant",
    "buffer_size": "not needed: data are prepared in parts, and read from disk during training",
    "preprocessing_batch_size": "not needed: data are prepared in parts, and read from disk during training",
    "dataloader_drop_last": "not needed: every row of an epoch is trained on",
    "gc_steps": "not supported",
    "torch_empty_cache_steps": "not supported",
    "selective_checkpointing": "set `train.gradient_checkpointing: selective`",
    "do_sample": "options of `finray generate`",
    "temperature": "options of `finray generate`",
    "top_p": "options of `finray generate`",
    "top_k": "options of `finray generate`",
    "fsdp_transformer_layer_cls_to_wrap": "not needed: each layer of the model is sharded by itself",
    "experimental_skip_move_to_device": "not needed: weights are sharded while they are loaded",
    "accelerator_config": "not needed: there is no Accelerate",
    "streaming_multipack_buffer_size": "not needed: data are prepared before the training, and packed then",
    "pretrain_multipack_attn": "not needed: rows of a pack do not attend to each other",
    "flash_optimum": "not needed: `model.attention: auto`",
    "max_packed_sequence_len": "`data.max_length` is the length of a pack",
    "cls_model_config": "not needed: Transformers chooses the class from the model's files",
    "base_model_ignore_patterns": "not needed: only the files of the model are downloaded",
}


def zero_of(config: Any) -> tuple[int | None, bool]:
    """The ZeRO stage of DeepSpeed's config, and whether it offloads; None if the file's name does not say the stage."""
    if isinstance(config, Mapping):
        zero = config.get("zero_optimization") or 0
        if not isinstance(zero, Mapping):
            return zero if type(zero) is int else None, False
        offloads = [section for key, section in zero.items() if key.startswith("offload_")]
        to = [section.get("device") for section in offloads if isinstance(section, Mapping)]
        return zero.get("stage", 0), "cpu" in to or "nvme" in to
    name = Path(str(config)).name
    stage = re.search(r"z(?:ero)?_?([0-3])", name)
    return int(stage[1]) if stage else None, "offload" in name or "cpu" in name


def words(text: Any) -> list[str]:
    """A list of words, given as a list or separated by commas."""
    if isinstance(text, list):
        return [str(word) for word in text]
    return [word.strip() for word in str(text or "").split(",") if word.strip()]


def number(value: Any) -> Any:
    """YAML 1.1 takes `2e-5` for a text."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            value = kind(value)
            break
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None if value == "" else value
