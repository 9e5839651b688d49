"""DeepSpeed's configuration: the user's JSON, completed from the YAML or by defaults.

A value in the JSON that contradicts the YAML is an error that names both places: neither wins silently. Nothing here
needs torch or DeepSpeed, so that mistakes are found before workers are started.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.errors import ConfigError
from finray.files import opened

AUTO = "auto"
DEFAULT_STAGE = 2
_ZERO = "zero_optimization"
# Not compared while the precision is `auto`; filled in once it is known.
_PRECISION = ("bf16.enabled", "fp16.enabled")
# What DeepSpeed's Adam takes where the JSON omits them. The learning rate and the weight decay come with the parameter
# groups.
_DEFAULTS: dict[str, Any] = {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.eps": 1e-8}
# Settings that would change the rows, the arithmetic or the model without finray knowing.
_REFUSED = (
    "amp",
    "autotuning",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "elasticity",
    "pipeline",
    "progressive_layer_drop",
    "sparse_attention",
    "tensor_parallel",
    "torch_autocast",
)


def load(config: Config) -> dict[str, Any]:
    """The user's JSON, from its file or from the config; empty if there is none.
    Raises ConfigError: it cannot be read, or is not an object."""
    if not isinstance(config.parallel.deepspeed_config, str):
        return config.parallel.deepspeed_config or {}
    path = Path(config.parallel.deepspeed_config)
    where = f"parallel.deepspeed_config={path}"
    try:
        with opened(path) as stream:
            given = json.load(stream)
    except OSError as error:
        raise ConfigError(f"DeepSpeed's configuration cannot be read: {error.strerror}", where=where) from None
    except ValueError as error:
        raise ConfigError(f"DeepSpeed's configuration is not JSON: {error}", where=where) from None
    if not isinstance(given, dict):
        raise ConfigError("DeepSpeed's configuration is not a JSON object", where=where)
    return given


def check(config: Config) -> None:
    """Find contradictions between the JSON and the YAML; does nothing for other strategies.
    Raises ConfigError: every contradiction, each with both places."""
    if config.parallel.strategy != "deepspeed":
        return
    # If the number of workers is elastic, nothing in the JSON may depend on it.
    for workers in sorted({config.cluster.min_workers, config.cluster.max_workers}):
        given, train = load(config), config.train
        size, rate = train.global_batch_size, train.learning_rate
        _refuse(conflicts(given, config, precision=train.precision, workers=workers, size=size, rate=rate), config)


def _refuse(problems: Iterator[str], config: Config) -> None:
    contradictions, named = tuple(problems), config.parallel.deepspeed_config
    if contradictions:
        raise ConfigError(
            "DeepSpeed's configuration contradicts the YAML",
            where=f"parallel.deepspeed_config={named}" if isinstance(named, str) else "parallel.deepspeed_config",
            repair='make both agree, or write "auto" in the JSON: finray then fills in the value from the YAML',
            problems=contradictions,
        )


def stage(given: dict[str, Any], config: Config) -> int:
    """The ZeRO stage."""
    value = _at(given, f"{_ZERO}.stage")
    return int(value) if isinstance(value, int) else config.parallel.zero_stage or DEFAULT_STAGE


def conflicts(
    given: dict[str, Any], config: Config, *, precision: str, workers: int, size: int | str, rate: float | str
) -> Iterator[str]:
    """Contradictions between the JSON and the YAML, and settings that are not allowed.

    Args:
        given: the user's JSON.
        config: of the run.
        precision: ``fp32``, ``bf16`` or ``fp16``; ``auto`` if not known yet.
        workers: number of training workers.
        size: packs (or rows) per optimizer step; ``auto`` if not known yet.
        rate: the peak learning rate; ``auto`` if not known yet.
    """
    named = config.parallel.deepspeed_config
    name = Path(named).name if isinstance(named, str) else "deepspeed_config"

    def place(path: str) -> str:
        return f"`{name}: {path}`"

    fields = _fields(given, config, precision=precision, workers=workers, size=size, rate=rate)
    for path, (yaml, value) in fields.items():
        given_value = _at(given, path)
        if (
            given_value not in (None, AUTO)
            and not _same(given_value, value)
            and not (precision == AUTO and path in _PRECISION)
        ):
            yield f"{place(path)} is {json.dumps(given_value)}, `{yaml}` gives {json.dumps(value)}"
    given_value = _at(given, f"{_ZERO}.stage")
    if given_value not in (None, AUTO, 1, 2, 3):
        where = place(f"{_ZERO}.stage")
        yield f"{where} is {json.dumps(given_value)}: `parallel.strategy: deepspeed` is for 1, 2 and 3"
    if "scheduler" in given:
        yield f"{place('scheduler')} is there, and `train.schedule` decides the learning rate; leave the former out"
    if given.get("activation_checkpointing"):
        yield (
            f"{place('activation_checkpointing')} has no effect on a Transformers model; "
            "leave it out and set `train.gradient_checkpointing`"
        )
    if given.get("gradient_allreduce_op", "mean") != "mean":
        yield f"{place('gradient_allreduce_op')} must stay the mean: finray sums gradients over `cluster.num_workers`"
    if isinstance(given.get("optimizer"), dict) and (kind := config.train.optimizer) != "adamw":
        yield f"{place('optimizer')} and `train.optimizer: {kind}` each choose the optimizer; keep one"
    offload = _at(given, f"{_ZERO}.offload_optimizer.device")
    if config.parallel.cpu_offload and given and offload != "cpu":
        yield f"`parallel.cpu_offload` is true, and {place(f'{_ZERO}.offload_optimizer.device')} is not cpu"
    for what in ("offload_optimizer", "offload_param"):
        if _at(given, f"{_ZERO}.{what}.device") == "nvme":
            yield f"{place(f'{_ZERO}.{what}.device')} is nvme: checkpoints cannot be read back into that; use cpu"
    if given.get("zero_force_ds_cpu_optimizer") is True and "optimizer" not in given and offload == "cpu":
        yield (
            f"{place('zero_force_ds_cpu_optimizer')} asks for DeepSpeed's optimizer, and {place('optimizer')} names "
            "none, so `train.optimizer` is used"
        )
    for key, ours in (("loss_scale", 0), ("initial_scale_power", 16)) if precision == "fp16" else ():
        given_value = _at(given, f"fp16.{key}")
        if given_value not in (None, AUTO, ours):
            yield (
                f"{place(f'fp16.{key}')} is {json.dumps(given_value)}: with `train.precision: fp16` the scale of the "
                f"loss is 2^16 at first and then follows the gradients, which is {ours} here"
            )
    if precision == "fp16" and _at(given, "fp16.fp16_master_weights_and_grads"):
        yield f"{place('fp16.fp16_master_weights_and_grads')} is true, and `train.precision: fp16` trains fp32 weights"
    half = precision in ("bf16", "fp16")
    if stage(given, config) == 1 and half and _at(given, "data_types.grad_accum_dtype") == "fp32":
        where = place(f"{_ZERO}.stage")
        yield f"{place('data_types.grad_accum_dtype')} is fp32: in {precision} that needs {where} 2 or 3"
    for key in _REFUSED:
        if given.get(key):
            yield f"{place(key)} is nothing that finray can train with; leave it out"
    for path in _autos(given):
        if not (path.startswith((f"{_ZERO}.", "fp16.", "scheduler.")) or path in fields):
            yield f'{place(path)} is "auto", and nothing in the YAML says what it is'


def filled(config: Config, resolved: Resolved, *, workers: int, width: int) -> dict[str, Any]:
    """The complete configuration for DeepSpeed.

    Args:
        config: of the run.
        resolved: what the run decided.
        workers: number of training workers.
        width: the model's hidden size, from which Transformers' "auto" bucket sizes follow, as do finray's.

    Raises:
        ConfigError: JSON and YAML contradict each other.
    """
    given, precision = load(config), resolved.precision
    size, rate = resolved.global_batch_size, resolved.learning_rate
    _refuse(conflicts(given, config, precision=precision, workers=workers, size=size, rate=rate), config)
    fields = _fields(given, config, precision=precision, workers=workers, size=size, rate=rate)
    settings = copy.deepcopy(given)
    zero = settings.setdefault(_ZERO, {})
    zero["stage"] = stage(given, config)
    if config.parallel.cpu_offload and not given:
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": width * width * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }
    for key, default in sizes.items():
        if zero.get(key, None if given else AUTO) == AUTO:
            zero[key] = default
    for key in [key for key, value in zero.items() if value == AUTO]:
        del zero[key]
    for path, (_, value) in fields.items():
        given_value = _at(given, path)
        # Not set where the default is wanted: an optimizer that has no such argument would refuse it.
        differs = given_value is None and not _same(_DEFAULTS.get(path, value), value)
        if not path.startswith("optimizer.") or given_value == AUTO or differs:
            *parents, last = path.split(".")
            tree = settings
            for key in parents:
                tree = tree.setdefault(key, {})
            tree[last] = value
    # DeepSpeed requires this product; finray's steps may be smaller.
    micro, times = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    settings["train_batch_size"] = micro * times * workers
    settings.setdefault("zero_allow_untested_optimizer", True)
    settings.setdefault("zero_force_ds_cpu_optimizer", False)
    # The loss is already scaled when DeepSpeed gets it; the scale is part of finray's training state.
    settings["fp16"] = {"enabled": precision == "fp16", "loss_scale": 1.0}
    if precision in ("bf16", "fp16"):
        # Gradients of such weights are summed in fp32, over the ranks and over the micro-batches.
        settings.setdefault("communication_data_type", "fp32")
        if zero["stage"] > 1:
            settings.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return settings


def _fields(
    given: dict[str, Any], config: Config, *, precision: str, workers: int, size: int | str, rate: float | str
) -> dict[str, tuple[str, Any]]:
    """Fields that both files can set: by path in the JSON, the path in the YAML and its value there."""
    train = config.train
    micro = 1 if train.micro_batch_size == "auto" else train.micro_batch_size
    fields: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("train.micro_batch_size", micro),
        "gradient_clipping": ("train.max_grad_norm", train.max_grad_norm or 0.0),
    }
    # A value that depends on the data contradicts any number in the JSON; workers get the number.
    steps = AUTO if isinstance(size, str) else math.ceil(math.ceil(size / micro) / workers)
    fields["train_batch_size"] = "train.global_batch_size", size
    fields["gradient_accumulation_steps"] = (
        "train.global_batch_size / train.micro_batch_size / cluster.num_workers",
        steps,
    )
    fields |= {path: ("train.precision", precision == path.split(".")[0]) for path in _PRECISION}
    if config.parallel.zero_stage is not None:
        fields[f"{_ZERO}.stage"] = "parallel.zero_stage", config.parallel.zero_stage
    if isinstance(given.get("optimizer"), dict):
        betas = [train.adam_beta1, train.adam_beta2]
        fields["optimizer.params.lr"] = "train.learning_rate", rate
        fields["optimizer.params.betas"] = "train.adam_beta1, train.adam_beta2", betas
        fields["optimizer.params.eps"] = "train.adam_epsilon", train.adam_epsilon
        fields["optimizer.params.weight_decay"] = "train.weight_decay", train.weight_decay
    return fields


def _same(given: Any, value: Any) -> bool:
    if isinstance(given, list) and isinstance(value, list):
        return len(given) == len(value) and all(_same(*pair) for pair in zip(given, value, strict=True))
    if isinstance(given, bool) or isinstance(value, bool):
        return given is value
    if isinstance(given, int | float) and isinstance(value, int | float):
        return math.isclose(given, value, rel_tol=1e-9)
    return bool(given == value)


def _at(tree: dict[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _autos(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"
