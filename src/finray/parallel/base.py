"""The interface of strategies, and their common parts. The loop knows no strategy by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from finray import compat
from finray.config.redact import redact_text
from finray.errors import CheckpointError, FinrayError, from_dict, of_storage
from finray.files import first_line
from finray.sharding import FlatShard, full_tensor, load_local, local_rows

T = TypeVar("T")


# Prefix, in place of a parameter's name, for state that is shared by all parameters.
SHARED = "shared"


class StateReader(Protocol):
    """Optimizer state in a checkpoint: any rows of tensors named ``<parameter>/<kind>``."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor; all rows by default."""


def kinds_of_state(reader: StateReader, parameters: Mapping[str, Any]) -> dict[str, set[str]]:
    """The kinds of state that a checkpoint has for each parameter; empty before the first update.
    Raises CheckpointError: the state belongs to other parameters."""
    kinds: dict[str, set[str]] = {}
    for key in reader.shapes:
        name, _, kind = key.rpartition("/")
        kinds.setdefault(name, set()).add(kind)
    kinds.pop(SHARED, None)
    if kinds and kinds.keys() != parameters.keys():
        raise CheckpointError("the optimizer state belongs to different parameters")
    return kinds


class StatefulOptimizer:
    """What finray needs from a torch optimizer beyond its updates: the state of a parameter, or of a flat vector.

    A vector is what a library joined from many parameters; a rank may hold any elements of each. Here state is a tensor
    of the parameter's shape for each kind, and a count.
    """

    state: Any

    def initial_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state before the first update; here AdamW's."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter by kind, as tensors that are sharded by rows like the parameter."""
        return dict(self.state.get(parameter, {}))

    def shared_state(self) -> dict[str, torch.Tensor]:
        """State that is shared by all parameters."""
        return {}

    @torch.no_grad()
    def load_state_of(self, parameter: torch.nn.Parameter, name: str, kinds: set[str], reader: StateReader) -> None:
        """Load the state from :meth:`state_of`, with the same rows per rank or others.
        Raises CheckpointError: the state belongs to another optimizer."""
        state = self.initial_state(parameter)
        if state.keys() != kinds:
            raise CheckpointError(f"the state of {name} belongs to a different optimizer")
        for kind, value in state.items():
            key = f"{name}/{kind}"
            if reader.shapes[key] != tuple(value.shape):
                raise CheckpointError(f"{key} has a different shape in the optimizer")
            load_local(value, partial(reader.read, key))
        self.state[parameter] = state

    def vector_state(self, vector: torch.nn.Parameter) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
        """The state of a vector by kind: a number, or one (fp32) per element; and the state of its blocks."""
        return self.state.get(vector, {}), {}

    def kinds_to_read(self, name: str, kinds: set[str]) -> set[str]:  # noqa: ARG002
        """The kinds that :meth:`load_vector_state` needs, of those that a checkpoint has of a parameter.
        Raises CheckpointError: the state belongs to another optimizer."""
        return kinds

    def rows(self, reader: StateReader, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a parameter's state in fp32, for a vector, however they were stored."""
        return reader.read(f"{name}/{kind}", start, stop)

    def load_vector_state(
        self,
        vector: torch.nn.Parameter,
        group: dict[str, Any],  # noqa: ARG002
        values: dict[str, torch.Tensor],
        blocks: dict[str, torch.Tensor],  # noqa: ARG002
    ) -> None:
        """Load the state from :meth:`vector_state`; ``blocks`` is empty if the vector was split differently then."""
        self.state[vector].update({kind: value.to(vector.device) for kind, value in values.items()})


class _Plain(StatefulOptimizer):
    """The state of an optimizer from elsewhere: torch's AdamW, or one created by DeepSpeed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state = optimizer.state
        # Not by isinstance: every optimizer subclasses torch's. DeepSpeed's count is a number.
        self._is_torchs = type(optimizer).__module__.startswith("torch.")

    def load_vector_state(self, vector: torch.nn.Parameter, *rest: Any) -> None:
        super().load_vector_state(vector, *rest)
        if not self._is_torchs and "step" in self.state[vector]:
            self.state[vector]["step"] = int(self.state[vector]["step"])


def stateful(optimizer: torch.optim.Optimizer) -> StatefulOptimizer:
    """The state of an optimizer. torch's AdamW is not subclassed: DeepSpeed supports exactly that class."""
    return optimizer if isinstance(optimizer, StatefulOptimizer) else _Plain(optimizer)


class NamedOptimizer(Protocol):
    """An optimizer over named parameters, as the loop sees it.

    Attributes:
        parameters: by name, in a fixed order.
        inner: the torch optimizer, for a strategy that drives it itself.
    """

    parameters: dict[str, torch.nn.Parameter]
    inner: torch.optim.Optimizer

    def step(self, learning_rate: float, *, found_inf: torch.Tensor | None = None) -> None:
        """One update from the gradients, which are then freed.

        Args:
            learning_rate: of parameter groups whose ``lr_scale`` is one.
            found_inf: fp32 scalar on the device; if it is one, weights and state stay unchanged.
        """

    def sharded_state(self) -> Mapping[str, torch.Tensor | FlatShard]:
        """The moments and update counts as ``<parameter>/<kind>`` tensors, or this rank's shard of them."""

    def load_sharded_state(self, reader: StateReader) -> None:
        """Load this rank's shard of the state from :meth:`sharded_state`, from any strategy and world size.
        Raises CheckpointError: the state belongs to other parameters, or to another optimizer."""


class Strategy(Protocol):
    """Distributes the work of one run over ``world_size`` processes."""

    rank: int
    world_size: int
    device: torch.device
    # Where this rank's parameters are, or its rows of them.
    parameter_device: torch.device
    # Every rank must run the same number of forward passes, because each is a collective.
    lockstep: bool
    # Weights are built on the meta device and loaded after `shard`, each rank its own rows.
    shards_weights: bool

    def shard(self, module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        """Shard the weights of a module over the ranks, block by block and then the rest; or leave them whole."""

    def prepare(self, module: torch.nn.Module, optimizer: NamedOptimizer) -> tuple[torch.nn.Module, NamedOptimizer]:
        """The module to call for a forward pass, and the optimizer, after :meth:`shard`."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate a micro-batch's gradients; ``last`` marks the step's last one on this rank."""

    def broadcast_parameters(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make parameters equal that each rank has initialized itself, before the first step."""

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks in place, and return the sum of ``extra`` (1-D fp64)."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks, in place."""

    def unscale_gradients(self, parameters: Sequence[torch.nn.Parameter], scale: torch.Tensor) -> None:
        """Divide summed gradients by the loss scale (fp32 scalar on the device) before they are clipped."""

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""

    def save_library_checkpoint(self, folder: Path) -> bool:
        """Write the checkpoint of the strategy's own library (a collective); False if it has none."""

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank (plain Python values)."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank (plain Python values)."""


def backend_of(device: torch.device, *, shared_gpu: bool = False) -> str:
    """torch's backend of a process group whose ranks have such devices.

    Args:
        device: of this rank.
        shared_gpu: whether several ranks may have the same GPU, which NCCL refuses.
    """
    # Gloo takes what is in CPU memory: gradients that are offloaded, and objects.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shared_gpu else "gloo"


class ProcessGroup:
    """One process of torch.distributed's default group, or the only process if that is not initialized.

    The default behaviour of strategies: nothing is sharded, and gradients are ordinary ones.
    """

    lockstep = False
    shards_weights = False

    def __init__(self, device: torch.device) -> None:
        self.device = self.parameter_device = device
        self.is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.world_size = 1 if self.is_alone else dist.get_world_size()

    def shard(self, module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        """Keeps every weight whole."""

    def prepare(self, module: torch.nn.Module, optimizer: NamedOptimizer) -> tuple[torch.nn.Module, NamedOptimizer]:
        """Returns both unchanged."""
        return module, optimizer

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002
        """An ordinary backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def broadcast_parameters(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Does nothing: every rank has loaded its rows of the same files, or a library broadcasts them."""

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter], extra: torch.Tensor) -> torch.Tensor:
        """Gradients are already summed, or there is one rank; a missing gradient becomes zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self.all_reduce(extra)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks, in place."""
        if not self.is_alone:
            dist.all_reduce(values)
        return values

    @torch.no_grad()
    def unscale_gradients(self, parameters: Sequence[torch.nn.Parameter], scale: torch.Tensor) -> None:
        """Divide this rank's gradients, or its rows of them, in place."""
        gradients = [local_rows(parameter.grad)[0] for parameter in parameters if parameter.grad is not None]
        if gradients:
            # Those of offloaded weights are in CPU memory.
            compat.foreach_mul_(gradients, scale.reciprocal().to(gradients[0].device))

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""
        norm = grad_norm(parameters)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm.to(self.device)

    def save_library_checkpoint(self, folder: Path) -> bool:  # noqa: ARG002
        """Nothing."""
        return False

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.is_alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def grad_norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """The global norm of gradients, which may be shards.

    Computed in fp32 even for bf16 gradients: torch's function would return a bf16 number.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if all(gradient.dtype != torch.bfloat16 for gradient in gradients):
        return full_tensor(torch.nn.utils.get_total_norm(gradients))
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return full_tensor(torch.linalg.vector_norm(torch.stack(norms)))


class OtherRankFailed(RuntimeError):
    """Another rank has failed, for a reason that is none of finray's own errors: what a retry would do is unknown."""


def on_all_ranks(strategy: Strategy, action: Callable[[], T]) -> T:
    """Run an action on every rank, and fail on all if it fails on any, so that no rank waits for one that has failed.

    ``action`` must not use a collective itself. Raises FinrayError: the failure of the lowest rank that failed, on all
    ranks alike; OtherRankFailed: that rank has another failure, which it raises itself.
    """
    failure: dict[str, Any] | None = None
    local_error: Exception | None = None
    result: list[T] = []
    try:
        result.append(action())
    except Exception as error:
        local_error = error
        converted = error if isinstance(error, FinrayError) else of_storage(error)
        failure = {"unknown": redact_text(f"{type(error).__name__}: {first_line(error)}")}
        failure = failure if converted is None else converted.to_dict()
    failures = [(rank, error) for rank, error in enumerate(strategy.all_gather_object(failure)) if error is not None]
    if not failures:
        return result[0]
    rank, first = failures[0]
    if "unknown" not in first:
        raise from_dict(first)
    if local_error is not None and rank == strategy.rank:
        raise local_error
    raise OtherRankFailed(f"rank {rank} failed: {first['unknown']}")
