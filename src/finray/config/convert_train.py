"""The training of a config of LLaMA-Factory or Axolotl: steps, checkpoints, evaluations and machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from finray.config import foreign, names
from finray.config.convert_file import ForeignFile
from finray.config.foreign import AXOLOTL, LLAMA_FACTORY, number
from finray.config.replicas import legal_name


def read_train(file: ForeignFile) -> None:
    """The section `train`."""
    _batch(file)
    steps = file.get("max_steps")
    if steps is not None and steps > 0:
        file.put("train.max_steps", steps)
    else:
        file.put("train.epochs", file.get("num_train_epochs", "num_epochs"))
    file.used.update(("num_train_epochs", "num_epochs"))
    file.put("train.learning_rate", file.get("learning_rate"))
    if file.get("max_grad_norm") == 0 or (file.system == LLAMA_FACTORY and file.raw.get("max_grad_norm", 1) is None):
        # As Transformers' Trainer takes both.
        file.put("train.max_grad_norm", None, "max_grad_norm")
    elif (most := file.get("max_grad_norm")) is not None:
        file.put("train.max_grad_norm", most, "max_grad_norm")
    _read_schedule(file)
    optimizer = file.get("optim", "optimizer")
    if file.get("use_muon"):
        file.put("train.optimizer", "muon")
    elif optimizer is not None:
        file.put("train.optimizer", names.VALUES.get(str(optimizer), optimizer), file.key("optim", "optimizer"))
        if str(optimizer) in ("paged_adamw", "paged_adamw_32bit"):
            file.notes.append("only 8-bit states are paged; `train.optimizer: paged_adamw_8bit` saves memory")
    _read_precision(file)


def _read_schedule(file: ForeignFile) -> None:
    """The learning rate over the run."""
    options = file.get("lr_scheduler_kwargs") or {}
    options = dict(options) if isinstance(options, Mapping) else {"lr_scheduler_kwargs": options}
    for name in ("min_lr_rate", "min_lr"):
        given, rate = options.get(name), number(options.pop(name, None))
        if isinstance(rate, int | float):
            options[name] = rate
        elif rate is not None:
            file.lose(f"lr_scheduler_kwargs.{name}", "not a number", given)
    share = file.get("cosine_min_lr_ratio") or options.pop("min_lr_rate", None)
    if (least := share * file.out["train"]["learning_rate"] if share else options.pop("min_lr", None)) is not None:
        file.put("train.min_learning_rate", least)
    if options:
        file.put("train.schedule_options", options, "lr_scheduler_kwargs")
    schedule = str(file.get("lr_scheduler_type", "lr_scheduler"))
    file.put("train.schedule", names.VALUES.get(schedule, schedule), file.key("lr_scheduler_type", "lr_scheduler"))
    steps_up, ratio = file.get("warmup_steps"), file.get("warmup_ratio")
    if schedule == "constant":
        # Transformers' has no warm-up; `constant_with_warmup` has.
        file.put("train.warmup_steps", 0)
    elif isinstance(steps_up, float) and 0 < steps_up < 1:
        # A part of one step is a share of all, as Transformers takes it.
        file.put("train.warmup_ratio", steps_up)
    elif steps_up is not None and (steps_up or not ratio):
        # 0 steps leave it to the ratio, as for Transformers.
        file.put("train.warmup_steps", steps_up)
    elif ratio is not None:
        file.put("train.warmup_ratio", ratio)


def _read_precision(file: ForeignFile) -> None:
    """Precision, and which activations are computed again."""
    full = file.out["adapter"]["method"] == "none"
    half, wide = file.get("bf16", "bfloat16"), file.get("fp16", "float16")
    if file.system == AXOLOTL and not {"bf16", "bfloat16"} & set(file.raw):
        half = "auto"
    if file.get("pure_bf16"):
        exact = file.out["train"].get("optimizer", "adamw") == "adamw" and not file.raw.get("deepspeed")
        file.put("train.precision", "bf16-true" if full and exact else "bf16")
        if full and not exact:
            file.lose("pure_bf16", "not supported: `train.precision: bf16-true` needs AdamW, without DeepSpeed")
    elif half is True or half == "full":
        file.put("train.precision", "bf16")
    elif half is None or half == "auto" or half is False:
        file.put("train.precision", "fp16" if wide is True else "auto" if half == "auto" else "fp32")
    else:
        file.lose(file.key("bf16", "bfloat16"), "set `train.precision`; `auto` is bf16 where the hardware has it")
        file.put("train.precision", "auto")
    if file.system == AXOLOTL and full and file.out["train"]["precision"] in ("auto", "bf16"):
        file.notes.append("weights are bf16 there, fp32 here: train.precision: bf16-true is as there, with AdamW")
    again = file.get("gradient_checkpointing", "use_gradient_checkpointing")
    off = file.get("disable_gradient_checkpointing")
    whole = not off if file.system == LLAMA_FACTORY else bool(again) or bool(file.fsdp("activation_checkpointing"))
    file.put("train.gradient_checkpointing", "full" if whole else "none")
    if again == "offload" or file.get("activation_offloading"):
        file.put("train.activation_offload", True)
    if file.get("enable_liger_kernel", "use_liger_kernel") or file.get("liger_rms_norm"):
        file.put("train.liger", "auto")
    file.used.update(("liger_rope", "liger_glu_activation", "liger_fused_linear_cross_entropy"))
    file.used.update(("use_muon", "use_unsloth"))
    given = file.raw.get("plugins") or []
    plugins = given if isinstance(given, list) else [given]
    if all("liger" in str(plugin) or "CutCrossEntropy" in str(plugin) for plugin in plugins):
        file.used.add("plugins")


def _batch(file: ForeignFile) -> None:
    """Rows of a step, and of each GPU."""
    per = file.get("per_device_train_batch_size", "micro_batch_size")
    times = file.get("gradient_accumulation_steps")
    if times is None and isinstance(whole := file.raw.get("batch_size"), int) and isinstance(per, int):
        # Axolotl's batch is that of one GPU.
        file.used.add("batch_size")
        times = whole // per
    times = times or 1
    shared = math.prod(file.size(name) for name in foreign.SAME_ROWS)
    grid = file.size("dp_shard_size") * file.size("dp_replicate_size") * shared
    given = file.get("ray_num_workers") or file.workers
    file.workers = given or grid
    if given is None and grid > 1:
        file.notes.append(f"the sizes in the file need {grid} GPUs; --workers sets another number")
    elif "ray_num_workers" not in file.raw:
        file.notes.append(f"the number of GPUs is not in the file; using {file.workers} (--workers)")
    file.put("train.micro_batch_size", per)
    if all(isinstance(size, int) and not isinstance(size, bool) for size in (per, times, file.workers)):
        rows, least = per * times * max(1, file.workers // shared), per * file.workers
        odd = least > 0 and rows % least > 0
        if odd:
            file.notes.append(f"the batch is {rows} there, because {shared} GPUs share the same rows; here {least}")
        file.put("train.global_batch_size", least if odd else rows)


def read_checkpoints(file: ForeignFile) -> None:
    """The sections `run`, `checkpoint`, `evaluation` and `tracking`."""
    folder = Path(str(file.get("output_dir") or "runs/run"))
    name = legal_name(str(file.get("run_name", "wandb_name") or folder.name)) or "run"
    file.put("run.output_dir", str(folder.parent))
    file.put("run.name", name)
    if file.get("seed") is not None:
        file.put("run.seed", file.raw["seed"])
    evaluates = any(name in file.out["data"] for name in ("eval_ratio", "eval_source"))
    _interval(file, "save", "checkpoint")
    if kept := file.get("save_total_limit"):
        file.put("checkpoint.keep_last", kept, "save_total_limit")
    else:
        file.notes.append("all checkpoints are kept there, and the newest two here: checkpoint.keep_last")
    if evaluates:
        if isinstance(greater := file.get("greater_is_better"), bool):
            file.put("evaluation.metric_mode", "max" if greater else "min", "greater_is_better")
        _interval(file, "eval", "evaluation")
        stops = ("early_stopping_patience", "early_stopping_steps")
        if (patience := file.get(*stops)) is not None:
            stopping = {"patience": patience}
            if (gain := file.get("early_stopping_threshold")) is not None:
                stopping["min_gain"] = gain
            file.put("evaluation.early_stopping", stopping, file.key(*stops))
    else:
        file.used.update(("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch"))
        file.used.update(("eval_batch_size", "per_device_eval_batch_size"))
        for key in ("early_stopping_patience", "early_stopping_steps", "early_stopping_threshold"):
            if file.get(key) is not None:
                file.lose(key, "the file holds out no rows to evaluate on")
    report = file.get("report_to")
    trackers_named = {str(tracker) for tracker in (report if isinstance(report, list) else [report] if report else [])}
    if file.raw.get("wandb_project") or file.get("use_wandb"):
        trackers_named.add("wandb")
    if file.get("use_mlflow") or file.raw.get("mlflow_tracking_uri") or file.raw.get("mlflow_experiment_name"):
        trackers_named.add("mlflow")
    if file.raw.get("wandb_mode") == "disabled" and file.get("wandb_mode"):
        trackers_named.discard("wandb")
    if "tensorboard" in trackers_named:
        file.put("tracking.tensorboard", True)
    if trackers := sorted(trackers_named & {"wandb", "mlflow"}):
        file.put("tracking.trackers", trackers)
    if others := sorted(trackers_named - {"wandb", "mlflow", "tensorboard", "none"}):
        file.lose("report_to", f"not supported: {', '.join(others)}")
    if file.get("use_tensorboard"):
        file.put("tracking.tensorboard", True)
    if (every := file.get("logging_steps")) >= 1:
        file.put("tracking.log_every", int(every), "logging_steps")
    else:
        file.lose("logging_steps", "set tracking.log_every to a number of steps")


def _interval(file: ForeignFile, kind: str, section: str) -> None:
    """How often it saves or evaluates: in steps, or in parts of an epoch."""
    strategy = file.get(f"{kind}_strategy")
    if strategy is None and kind == "eval":
        strategy = file.get("evaluation_strategy")
    every, times = file.get(f"{kind}_steps"), file.get(f"{kind}s_per_epoch")
    train = file.out["train"]
    if strategy == "steps" and every is None:
        every = file.get("logging_steps") if kind == "eval" else 500
    if strategy in ("no", False):
        if kind == "save":
            file.lose("save_strategy", "not supported: finray always saves, every `checkpoint.every_steps` steps")
        return
    if strategy is None and every is None and file.system == AXOLOTL and kind == "save":
        strategy = "epoch" if times is None else None
    if strategy == "epoch":
        times = 1
    if strategy is None and kind == "eval" and every is not None and file.system == LLAMA_FACTORY:
        file.lose("eval_steps", "it needs eval_strategy: steps; here `evaluation.every_steps`")
    elif isinstance(times, int | float) and times > 0:
        file.put(f"{section}.every_epochs", 1 / times, f"{kind}s_per_epoch")
    elif strategy == "best":
        file.notes.append("use checkpoint.keep_best, which saves every new best model")
    elif isinstance(every, int) and every >= 1:
        file.put(f"{section}.every_steps", every, f"{kind}_steps")
    elif isinstance(every, float) and 0 < every < 1:
        # A share of the run.
        if "max_steps" in train:
            file.put(f"{section}.every_steps", math.ceil(every * train["max_steps"]), f"{kind}_steps")
        else:
            file.put(f"{section}.every_epochs", every * train["epochs"], f"{kind}_steps")
    elif every is not None:
        file.lose(f"{kind}_steps", f"set `{section}.every_steps` or `every_epochs`")


def read_hub(file: ForeignFile) -> None:
    """Axolotl pushes if there is a name, LLaMA-Factory if `push_to_hub` is true as well."""
    pushes, name = bool(file.raw.get("push_to_hub")), file.raw.get("hub_model_id")
    if name and not pushes and file.system == LLAMA_FACTORY:
        file.lose("hub_model_id", "nothing is pushed there without `push_to_hub: true`; here `export.push_to_hub`")
        name = None
    if pushes == bool(name):
        file.used.add("push_to_hub")


def read_machines(file: ForeignFile) -> None:
    """The sections `cluster` and `parallel`."""
    file.put("cluster.num_workers", file.workers)
    file.used.update(("ray_num_workers", "use_ray"))
    if file.get("deepspeed"):
        stage, offload = foreign.zero_of(file.raw["deepspeed"])
        if stage is None:
            file.lose("deepspeed", "set parallel.strategy: deepspeed, and parallel.deepspeed_config to this file")
        elif stage == 0:
            file.lose("deepspeed", "ZeRO stage 0 shards nothing: parallel.strategy is ddp")
        else:
            file.put("parallel.strategy", "deepspeed")
            file.put("parallel.zero_stage", stage)
            if offload:
                file.put("parallel.cpu_offload", True)
            file.notes.append(
                f"of DeepSpeed's config only ZeRO {stage} is used; parallel.deepspeed_config takes a whole file"
            )
    elif file.get("fsdp", "fsdp_config"):
        file.put("parallel.strategy", "fsdp")
        kind = f"{file.raw.get('fsdp')} {file.fsdp('sharding_strategy')}".lower()
        if isinstance(file.raw.get("fsdp_config"), str):
            file.lose("fsdp_config", "the file is not read; set `parallel.cpu_offload` and others here")
        if file.fsdp("offload_params") or "offload" in kind:
            file.put("parallel.cpu_offload", True)
        if file.fsdp("reshard_after_forward") is False or "shard_grad_op" in kind:
            file.put("parallel.reshard_after_forward", False)
        if "hybrid_shard" in kind:
            file.notes.append("set parallel.shard_size to the GPUs of a machine: hybrid sharding")
    elif file.system == LLAMA_FACTORY and file.workers != 1:
        # DDP, unless it was started with an Accelerate config for FSDP, which is another file.
        file.put("parallel.strategy", "auto")
    size, copies = file.get("dp_shard_size") or 1, file.get("dp_replicate_size") or 1
    if size > 1:
        file.put("parallel.strategy", "fsdp")
    if copies > 1:
        file.put("parallel.shard_size", size)
    file.used.add("fsdp_version")
