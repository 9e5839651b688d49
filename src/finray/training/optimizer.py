"""AdamW (Loshchilov & Hutter 2019) over named parameters, and its state as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from finray.checkpoint.pieces import PieceReader
from finray.config.schema import TrainConfig
from finray.errors import CheckpointError
from finray.parallel.tensors import fill


def torch_optimizer(parameters: Mapping[str, torch.nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that the train section names, over parameters that may be shards."""
    decayed = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    plain = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
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
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], train: TrainConfig) -> None:
        self.parameters = dict(parameters)
        self._adam = torch_optimizer(self.parameters, train)

    def update(self, learning_rate: float) -> None:
        """One update from the gradients, which are freed."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """The moments and update counts as ``<parameter>/<kind>`` tensors."""
        return {
            f"{name}/{kind}": value
            for name, parameter in self.parameters.items()
            for kind, value in self._adam.state.get(parameter, {}).items()
        }

    def restore(self, reader: PieceReader) -> None:
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
def _read(reader: PieceReader, key: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A moment in the shape and on the device of its parameter; a count beside it, where AdamW's kernel wants it."""
    if not reader.shapes[key]:
        return reader.read(key).to(parameter.device)
    value = torch.zeros_like(parameter, dtype=torch.float32)
    fill(value, lambda start, stop: reader.read(key, start, stop))
    return value
