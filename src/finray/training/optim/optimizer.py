"""The optimizer over named parameters: its updates, and its state as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from finray import compat
from finray.config.schema import TrainConfig
from finray.parallel.base import SHARED, StateReader, kinds_of_state, stateful
from finray.sharding import shape_of
from finray.training.optim.rounded_adamw import RoundedAdamW
from finray.training.optim.sharded import Adafactor, MuonAndAdamW

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
# Embeddings and heads are not hidden matrices, norms do not decay.
Roles = Mapping[str, str]


def param_group_options(
    name: str, dimensions: int, train: TrainConfig, *, lora_plus_ratio: float, role: str
) -> tuple[float, float]:
    """Learning rate factor and weight decay of a parameter.

    Norms, biases and magnitudes (anything below two dimensions) have no decay. The B matrices of LoRA learn
    ``lora_plus_ratio`` times as fast as the rest (LoRA+, Hayou et al. 2024).
    """
    decays = dimensions >= 2 and role != "norm"
    return lora_plus_ratio if ".lora_B." in name else 1.0, train.weight_decay if decays else 0.0


def parameter_groups(
    parameters: Mapping[str, torch.nn.Parameter],
    train: TrainConfig,
    *,
    lora_plus_ratio: float,
    roles: Roles | None,
) -> list[dict[str, Any]]:
    """Parameter groups, as torch's optimizers take them.

    ``lr_scale`` is a factor of the learning rate; ``use_muon`` marks matrices that are neither embedding nor head.
    """
    groups: dict[tuple[float, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        role, dimensions = (roles or {}).get(name, ""), len(shape_of(parameter))
        treated = param_group_options(name, dimensions, train, lora_plus_ratio=lora_plus_ratio, role=role)
        groups.setdefault((*treated, dimensions == 2 and not role), []).append(parameter)
    return [
        {
            "params": parameters_of_group,
            "lr_scale": scale,
            # The loop gives each step its rate.
            "lr": 0.0,
            "weight_decay": decay,
            "use_muon": muon,
        }
        for (scale, decay, muon), parameters_of_group in groups.items()
    ]


def torch_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    train: TrainConfig,
    *,
    lora_plus_ratio: float = 1.0,
    roles: Roles | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """The optimizer of the train section, over parameters that may be shards.

    A step with ``found_inf`` equal to one changes neither weights nor state.
    """
    groups = parameter_groups(parameters, train, lora_plus_ratio=lora_plus_ratio, roles=roles)
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
    }
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=0.0)
    if train.optimizer == "muon":
        return MuonAndAdamW(groups, **options)
    if train.optimizer in EIGHT_BIT:
        # Imports bitsandbytes.
        from finray.training.optim.adamw_8bit import AdamW8bit

        eight: torch.optim.Optimizer = AdamW8bit(groups, paged=train.optimizer.startswith("paged"), **options)
        return eight
    if train.precision == "bf16-true":
        names = {parameter: name for name, parameter in parameters.items()}
        return RoundedAdamW(groups, names=names, seed=seed, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def warnings_of(train: TrainConfig, device: torch.device) -> list[str]:
    """Warnings about an optimizer on a device."""
    if train.optimizer == "paged_adamw_8bit" and device.type == "cpu":
        return ["paging has no effect with weights in CPU memory: paged_adamw_8bit is adamw_8bit here"]
    return []


class Optimizer:
    """Updates named parameters.

    Args:
        parameters: name to parameter, in a fixed order.
        train: the train section.
        lora_plus_ratio: learning rate factor of the B matrices of LoRA.
        roles: ``embedding``, ``head`` or ``norm``, for parameters that have such a role; only Muon treats the first two
            differently.
        seed: for the rounding of weights that are stored in bf16.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        train: TrainConfig,
        *,
        lora_plus_ratio: float = 1.0,
        roles: Roles | None = None,
        seed: int = 0,
    ) -> None:
        self.parameters = dict(parameters)
        self.inner = torch_optimizer(self.parameters, train, lora_plus_ratio=lora_plus_ratio, roles=roles, seed=seed)
        self._state = stateful(self.inner)
        self._device = next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))

    def step(self, learning_rate: float, *, found_inf: torch.Tensor | None = None) -> None:
        """One update from the gradients, which are then freed.

        Args:
            learning_rate: for groups with factor one.
            found_inf: fp32 scalar on the device; if it is one, nothing is changed.
        """
        for group in self.inner.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        if found_inf is not None:
            # Waits if weights are offloaded: torch's AdamW would not, and might read it before it has arrived.
            found_inf = found_inf.to(self._device)
        compat.set_found_inf(self.inner, found_inf)
        self.inner.step()
        self.inner.zero_grad()

    def sharded_state(self) -> dict[str, torch.Tensor]:
        """The moments and update counts as ``<parameter>/<kind>`` tensors, which may be shards."""
        state = {
            f"{name}/{kind}": value
            for name, parameter in self.parameters.items()
            for kind, value in self._state.state_of(parameter).items()
        }
        return state | {f"{SHARED}/{kind}": value for kind, value in self._state.shared_state().items()}

    def load_sharded_state(self, reader: StateReader) -> None:
        """Restore this rank's rows of the state from :meth:`sharded_state`.
        Raises CheckpointError: the state belongs to other parameters, or to another optimizer."""
        for name, kinds in kinds_of_state(reader, self.parameters).items():
            self._state.load_state_of(self.parameters[name], name, kinds, reader)
