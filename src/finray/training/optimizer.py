"""AdamW (Loshchilov & Hutter 2019) over named parameters, and its state as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from finray.config.schema import TrainConfig
from finray.errors import CheckpointError
from finray.parallel.base import StateReader
from finray.parallel.tensors import fill, shape_of


def treatment(name: str, dimensions: int, train: TrainConfig, *, lora_plus_ratio: float = 1.0) -> tuple[float, float]:
    """Factor of the learning rate and weight decay of a parameter.

    Norms, biases and magnitudes (anything below two dimensions) have no decay. The B matrices of LoRA learn
    ``lora_plus_ratio`` times as fast as the rest (LoRA+, Hayou et al. 2024).
    """
    return lora_plus_ratio if ".lora_B." in name else 1.0, train.weight_decay if dimensions >= 2 else 0.0


def parameter_groups(
    parameters: Mapping[str, torch.nn.Parameter], train: TrainConfig, *, lora_plus_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Parameters that are treated alike, as torch's optimizers take them; ``factor`` is of the learning rate."""
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        treated = treatment(name, len(shape_of(parameter)), train, lora_plus_ratio=lora_plus_ratio)
        groups.setdefault(treated, []).append(parameter)
    return [
        {"params": own, "factor": factor, "lr": factor * train.learning_rate, "weight_decay": decay}
        for (factor, decay), own in groups.items()
    ]


def torch_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], train: TrainConfig, *, lora_plus_ratio: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer that the train section names, over parameters that may be shards."""
    return torch.optim.AdamW(
        parameter_groups(parameters, train, lora_plus_ratio=lora_plus_ratio),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        fused=True,
    )


class Optimizer:
    """Updates named parameters; norms and biases (anything below two dimensions) have no weight decay.

    Args:
        parameters: name to parameter, in a fixed order.
        train: the train section.
        lora_plus_ratio: how much faster the B matrices of LoRA learn than the rest.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], train: TrainConfig, *, lora_plus_ratio: float = 1.0
    ) -> None:
        self.parameters = dict(parameters)
        self._adam = torch_optimizer(self.parameters, train, lora_plus_ratio=lora_plus_ratio)

    def update(self, learning_rate: float) -> None:
        """One update from the gradients, which are freed."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate * group["factor"]
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """The moments and update counts as ``<parameter>/<kind>`` tensors."""
        return {
            f"{name}/{kind}": value
            for name, parameter in self.parameters.items()
            for kind, value in self._adam.state.get(parameter, {}).items()
        }

    def restore(self, reader: StateReader) -> None:
        """Put back what :meth:`state` gave, this rank's rows of it.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        kinds: dict[str, list[str]] = {}
        for key in reader.shapes:
            name, kind = key.rsplit("/", 1)
            kinds.setdefault(name, []).append(kind)
        if kinds and kinds.keys() != self.parameters.keys():
            raise CheckpointError("the optimizer state belongs to other parameters")
        for name, own in kinds.items():
            parameter = self.parameters[name]
            self._adam.state[parameter] = {kind: _read(reader, f"{name}/{kind}", parameter) for kind in sorted(own)}


@torch.no_grad()
def _read(reader: StateReader, key: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A moment in the shape and on the device of its parameter; a count beside it, where AdamW's kernel wants it."""
    if not reader.shapes[key]:
        return reader.read(key).to(parameter.device)
    value = torch.zeros_like(parameter, dtype=torch.float32)
    fill(value, lambda start, stop: reader.read(key, start, stop))
    return value
