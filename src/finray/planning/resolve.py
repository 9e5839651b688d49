"""Resolves every ``auto`` in a config: :func:`resolve` reads all of them, except ``use_gpu`` in ``placement.py``.

The size of a step and the number of epochs depend on the data, which are prepared later: ``data/dataset/run_data.py``.

Imports no torch, except for ``parallel.strategy: auto`` with several workers, which needs an estimate of the model's
memory. ``data.format: auto`` is not a choice of hardware: the columns of the source decide it in ``data/formats/``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from finray.config.resolved import BY_ROW, Execution, Packing, Precision
from finray.config.schema import Config, ModelConfig
from finray.errors import ConfigError
from finray.parallel.deepspeed import config as deepspeed_config
from finray.planning.findings import refuse
from finray.planning.placement import Device, Placement
from finray.planning.steps import choose_learning_rate
from finray.planning.strategy import StrategyChoice, estimated_choice

if TYPE_CHECKING:
    from finray.planning.blueprint import ModelShape

PACKED, FLASH = "finray_packed", "flash_attention_2"
_BITS: dict[str, Literal[4, 8] | None] = {"none": None, "4bit": 4, "8bit": 8}


def resolve(
    config: Config,
    placement: Placement,
    device: Device,
    *,
    packing: Packing | None,
    before: Execution | None = None,
    shape: ModelShape | None = None,
    chose: Callable[[StrategyChoice], None] = lambda choice: None,
    missing: Callable[[ConfigError], None] = refuse,
) -> Execution:
    """Decide everything that a config leaves open, except for what depends on the data.

    Args:
        config: of the run, with absolute paths.
        placement: of its workers.
        device: device of a worker.
        packing: whether rows of the model may be packed; None if unknown, which counts as yes.
        before: what the run began with, if it is continued. It keeps precision, bits, packing and attention, because
            others would change what is learned; its strategy changes where that no longer fits into memory.
        shape: of the model, whose memory is estimated where the strategy is ``auto``; None builds it.
        chose: called with the strategy and the reason, if it is ``auto``.
        missing: called for a required package that is not installed here. If it returns, the package is assumed to
            exist.

    Raises:
        ConfigError: what is requested, or what the run started with, is not possible on this device.
        ModelError: the model's configuration cannot be loaded.
    """
    precision = _precision(config, device, before)
    bits = None if config.adapter.method == "none" else _base_bits(config, placement, device, before, missing)
    together = packing is None or packing.safe
    if before is not None and before.packs and packing is not None and not packing.safe:
        raise _lost("packed rows", "model.name", packing.warning)
    attention = BY_ROW
    if packing is None or packing.is_told:
        attention = _attention(config.model, device, precision, before, missing)
    if attention == BY_ROW and _is_zero3(config, config.parallel.strategy):
        # Each worker would gather weights as often as it has rows of other lengths, and all must gather together.
        together = False
        if before is not None and before.packs:
            reason = "its attention gets each row alone, which ZeRO-3 cannot do"
            raise _lost("packed rows", "parallel.strategy", reason)
    together = together and (before is None or before.packs)
    liger = config.train.liger
    execution = Execution(
        precision=precision,
        bits=bits,
        attention=attention if together else None,
        packs=together,
        strategy=config.parallel.strategy,
        use_gpu=placement.use_gpu,
        liger=device.kind == "cuda" and find_spec("liger_kernel") is not None if liger == "auto" else liger,
        learning_rate=choose_learning_rate(
            config, hidden_size=None if packing is None else packing.hidden_size, before=before
        ),
        weights="bf16" if config.train.precision == "bf16-true" else "fp32",
    )
    if execution.strategy != "auto":
        require_whole_weights(config, execution)
        return execution
    # Where the number of workers follows the cluster, one strategy serves all of them, and each has most where they are
    # fewest.
    fewest, most = placement.bounds
    if most == 1:
        choice = StrategyChoice("ddp", "there is only one worker")
    else:
        choice = estimated_choice(
            config,
            execution,
            device,
            shape,
            workers=fewest,
            before=None if before is None else before.strategy,
            may_grow=most > fewest,
        )
    chose(choice)
    execution = replace(execution, strategy=choice.strategy)
    require_whole_weights(config, execution)
    return execution


def _is_zero3(config: Config, strategy: str) -> bool:
    return strategy == "deepspeed" and deepspeed_config.stage(deepspeed_config.load(config), config) == 3


def _precision(config: Config, device: Device, before: Execution | None) -> Precision:
    """Precision of the arithmetic."""
    if config.train.precision == "bf16-true":
        return "bf16"
    if config.train.precision != "auto":
        return config.train.precision
    if before is None:
        return "bf16" if device.bf16 else "fp32"
    if before.precision == "bf16" and not device.bf16:
        raise _lost("bf16", "train.precision=auto", f"{device.name} has no bf16 arithmetic")
    return before.precision


def _base_bits(
    config: Config,
    placement: Placement,
    device: Device,
    before: Execution | None,
    missing: Callable[[ConfigError], None],
) -> Literal[4, 8] | None:
    """Bits of an adapter's base weights; None if they are not quantized."""
    if config.model.quantization != "auto":
        return _BITS[config.model.quantization]
    if before is not None:
        return before.bits
    if device.kind != "cuda" or placement.bounds[1] != 1:
        return None
    if find_spec("bitsandbytes") is None:
        missing(
            ConfigError(
                "on a single GPU `auto` means 8bit, which needs the package bitsandbytes, which is not installed",
                where="model.quantization=auto",
                repair="pip install 'finray[quantization]', or set model.quantization to none",
            )
        )
    return 8


def require_whole_weights(config: Config, execution: Execution) -> None:
    """Check that every worker holds the whole model that answers prompts at evaluations.

    Answers have different lengths, and workers with sharded weights would have to run every step together. Raises
    ConfigError: the strategy shards the weights.
    """
    asks = config.evaluation.generate_rows is not None and config.evaluation.mode == "inline"
    shares = execution.strategy == "fsdp" or _is_zero3(config, execution.strategy)
    if asks and shares:
        raise ConfigError(
            f"with sharded weights ({execution.strategy}) the model cannot answer prompts between two steps",
            where="evaluation.generate_rows",
            repair="set evaluation.mode to async, which loads the full model on its own resources, or "
            "parallel.strategy to ddp" + (", or parallel.zero_stage to 2" if execution.strategy == "deepspeed" else ""),
        )


def needs_torch(config: Config) -> bool:
    """Whether the model's memory will be estimated: for the strategy, or for the micro-batches of a cluster's GPUs."""
    away = config.cluster.address or os.environ.get("RAY_ADDRESS")
    on_gpus = bool(away) and config.cluster.use_gpu is not False and config.train.micro_batch_size == "auto"
    return on_gpus or (config.parallel.strategy == "auto" and config.cluster.max_workers > 1)


def _attention(
    model: ModelConfig,
    device: Device,
    precision: Precision,
    before: Execution | None,
    missing: Callable[[ConfigError], None],
) -> str:
    """Transformers' name of the attention over packed rows."""
    # FlashAttention 2 needs an Ampere GPU or a later one, as bf16 does. The driver's packages stand for the workers'.
    able = device.kind == "cuda" and device.bf16 and precision != "fp32"
    works = able and find_spec("flash_attn") is not None
    wanted = {"packed": PACKED, FLASH: FLASH}.get(model.attention)
    if wanted is None and before is not None:
        wanted = before.attention
    if wanted == FLASH and not works:
        reason = "FlashAttention 2 needs a GPU of compute capability 8.0, and bf16 or fp16"
        if able:
            reason = "FlashAttention 2 needs the package flash-attn, which is not installed"
        error = ConfigError(
            reason, where="model.attention", repair="`pip install flash-attn`, or set model.attention to auto"
        )
        if model.attention != FLASH:
            error = _lost("FlashAttention 2", "model.attention=auto", reason)
        if not able:
            raise error
        missing(error)
    return wanted or (FLASH if works else PACKED)


def _lost(setting: str, where: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the run began with {setting}, and cannot continue with it: {reason}",
        where=where,
        repair="continue it with the hardware and libraries that it began with, or start over with --fresh",
    )
