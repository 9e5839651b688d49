"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients (2) and weights (3) are sharded over the ranks.

DeepSpeed sums the gradients, drives the optimizer and clips; finray decides the micro-batches, the learning rate and
when a step ends, and reads and writes weights and moments in its own portable format.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finray import compat
from finray.config.resolved import Execution, Resolved
from finray.config.schema import Config
from finray.parallel.base import NamedOptimizer, ProcessGroup, backend_of
from finray.parallel.deepspeed import config as deepspeed_config
from finray.parallel.deepspeed.state import ZeroOptimizer, ZeroWeight
from finray.sharding import attach_store

# Subfolder of DeepSpeed's files in a checkpoint.
_TAG = "shards"
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedStrategy(ProcessGroup):
    """One process of a group that DeepSpeed drives.

    Args:
        device: of this rank.
        config: of the run.
        resolved: what the run decided. In bf16 and fp16 the model computes with weights of that dtype, and the
            optimizer has fp32 copies.
    """

    lockstep = True

    def __init__(self, device: torch.device, config: Config, resolved: Resolved) -> None:
        if not dist.is_initialized():
            # DeepSpeed needs a process group even for one process.
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
        super().__init__(device)
        self._config = config
        self._resolved = resolved
        self._deepspeed = _library(device, fp16=resolved.precision == "fp16")
        self.stage = deepspeed_config.stage(deepspeed_config.load(config), config)
        self.shards_weights = self.stage == 3
        self._engine: Any = None

    @classmethod
    def from_config(cls, config: Config, execution: Execution, device: torch.device) -> DeepSpeedStrategy:
        """Create it from a config."""
        # Its settings have the size of a step, so its workers start once the data are prepared.
        assert isinstance(execution, Resolved)
        return cls(device, config, execution)

    def shard(self, module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:  # noqa: ARG002
        """Under stage 3, pass every weight to ``zero.Init`` as soon as it is allocated, one at a time."""
        if not self.shards_weights:
            return
        one_by_one = _OneByOne(module, self.device, _HALVES.get(self._resolved.precision))
        self._deepspeed.zero.Init(module=one_by_one, config_dict_or_path=self._settings(module))
        for parameter in module.parameters():
            attach_store(parameter, ZeroWeight(parameter))

    def prepare(self, module: torch.nn.Module, optimizer: NamedOptimizer) -> tuple[torch.nn.Module, NamedOptimizer]:
        """DeepSpeed's engine around the module, with the JSON's optimizer or, by default, finray's."""
        settings = self._settings(module)
        theirs = "optimizer" in settings
        # The groups define which parameters have no weight decay, for any optimizer.
        groups = [
            {key: group[key] for key in ("params", "lr", "weight_decay", "lr_scale")}
            for group in optimizer.inner.param_groups
        ]
        self._engine, *_ = self._deepspeed.initialize(
            model=module,
            optimizer=None if theirs else optimizer.inner,
            model_parameters=groups if theirs else None,
            config=settings,
            dist_init_required=False,
        )
        return self._engine, ZeroOptimizer(self._engine, optimizer.parameters)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate gradients; on the last micro-batch DeepSpeed reduces them over the ranks, if it has not done
        so."""
        # Set explicitly, because DeepSpeed counts micro-batches, and steps and ranks may have different numbers.
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks. The loss is already divided by the targets of the whole step.
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Gradients are already summed; only ``extra`` is left."""
        return self.all_reduce(extra)

    def unscale_gradients(self, parameters: Sequence[torch.nn.Parameter], scale: torch.Tensor) -> None:  # noqa: ARG002
        """Pass the scale to DeepSpeed, whose update divides by it and then resets it."""
        self._engine.optimizer.loss_scaler.cur_scale = float(scale)

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:  # noqa: ARG002
        """The gradient norm; the update clips, by the same rule and to the same limit."""
        zero = self._engine.optimizer
        norm = compat.zero3_gradient_norm(zero) if self.stage == 3 else zero.scaled_global_norm()
        # DeepSpeed returns -1 if the norm is not finite.
        return torch.where(norm < 0, torch.full_like(norm, torch.nan), norm / zero.loss_scale)

    def save_library_checkpoint(self, folder: Path) -> bool:
        """Write DeepSpeed's own files, with the script that converts them to fp32 weights; finray never reads them."""
        if not self._config.parallel.keep_deepspeed_shards:
            return False
        folder.mkdir()
        self._engine.save_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=True)
        return True

    def _settings(self, module: torch.nn.Module) -> dict[str, Any]:
        configs = (getattr(part, "config", None) for part in module.modules())
        model: Any = next(config for config in configs if hasattr(config, "get_text_config"))
        return deepspeed_config.filled(
            self._config,
            self._resolved,
            workers=self.world_size,
            width=int(model.get_text_config().hidden_size),
        )


class _OneByOne(torch.nn.Module):
    """A model on the meta device whose parameters are allocated when they are accessed.

    ``zero.Init`` shards each before it accesses the next, so that no rank ever holds more than one whole.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._module = [module]
        self._device = device
        self._dtype = dtype

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:  # noqa: ARG002
        """Every parameter once; tied ones stay tied."""
        made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        for part in self._module[0].modules():
            for name, old in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if id(old) in made:
                    setattr(part, name, made[id(old)][1])
                    continue
                data = torch.empty(old.shape, dtype=self._dtype or old.dtype, device=self._device)
                new = torch.nn.Parameter(data, requires_grad=old.requires_grad)
                made[id(old)] = old, new
                setattr(part, name, new)
                yield new


def _library(device: torch.device, *, fp16: bool) -> Any:
    """Import and initialize DeepSpeed on this device, in the existing process group."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    # Its logger is created on import.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by names that torch deprecates, with a warning in every step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    compat.without_compiled_collectives()
    if fp16 and device.type == "cpu":
        compat.allow_fp16_on_cpu()
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False, verbose=False)
    return deepspeed
