"""A CUDA device made of shapes and dtypes, for a machine that has none; needs a CUDA build of torch.

Tensors are fake: every operation says what it would give, and nothing is computed. What cannot be known without a value
(``.item()``, ``nonzero``) raises, and so does every copy from the device to the CPU that is not asynchronous: on a GPU
each of them would wait for the device.

Autograd's engine asks the driver about each device, so the graph is walked here, in Python.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)


class Operations(TorchDispatchMode):
    """Counts operations by name, and notes the dtypes of their tensors; one that would wait for the device raises.

    Args:
        may_wait: it does not.
    """

    def __init__(self, *, may_wait: bool = False) -> None:
        super().__init__()
        self._may_wait = may_wait
        self.seen: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        name = str(operation)
        self.seen[name] += 1
        self.dtypes[name] |= {one.dtype for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        # Fake tensors may join a number on the CPU with others on the device; real ones may not.
        assert name not in ("aten.stack.default", "aten.cat.default") or len({one.device for one in args[0]}) == 1, name
        source = args[1] if name == "aten.copy_.default" else args[0] if args else None
        asynchronous = (
            self._may_wait
            or kwargs.get("non_blocking", False)
            or (name == "aten.copy_.default" and args[2:] == (True,))
        )
        if isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor) and not asynchronous:
            assert not (source.is_cuda and result.device.type == "cpu"), f"{name} waits for the device"
        return result


@contextmanager
def fake_cuda(*, capability: tuple[int, int] = (9, 0), may_wait: bool = False) -> Iterator[Operations]:
    """Inside, ``cuda`` is a device: of compute capability 9.0, and without values."""

    def wait(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the device is waited for")

    operations, engine = Operations(may_wait=may_wait), _Backward()
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "is_bf16_supported", lambda including_emulation=True: capability >= (8, 0)),
            (torch.cuda, "synchronize", wait),
            (torch.amp.autocast_mode.torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.Tensor, "backward", lambda loss: engine.run(loss)),
            (torch.Tensor, "register_hook", lambda tensor, hook: engine.register_hook(tensor, hook)),
            (torch.autograd.Variable, "_execution_engine", engine),
            (torch.Tensor, "pin_memory", lambda tensor: tensor),
            (torch.Tensor, "is_pinned", lambda tensor: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(operations)
        yield operations


class _Stream:
    """A stream, or an event, of a device that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = DEVICE

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = record_event = _nothing


@contextmanager
def two_fake_ranks() -> Iterator[DeviceMesh]:
    """torch's fake process group: this process is rank 0 of two, and collectives give tensors of the right shape.

    To be entered before :func:`fake_cuda`: a mesh is made of numbers that are read.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stream = _Stream()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for name, value in (
            ("device_count", lambda: 1),
            ("current_device", lambda: 0),
            ("set_device", lambda device: None),
            ("Stream", _Stream),
            ("Event", _Stream),
            ("current_stream", lambda device=None: stream),
            ("stream", lambda given: stream),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", return_value=None))
        yield init_device_mesh("cuda", (2,))


def on_fake_cuda(model: Any) -> Any:
    """A model on the CPU with its parameters and buffers put on the device; tied ones stay tied."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = torch.nn.Parameter(torch.empty_like(parameter, device=DEVICE), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(parameter, made)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(buffer, torch.empty_like(buffer, device=DEVICE))
    return model


class _Backward:
    """A backward pass in Python: every node of the graph once, after all that use its outputs, with its hooks."""

    def __init__(self) -> None:
        self._hooks: dict[tuple[Any, int], list[Any]] = {}
        self._callbacks: list[Any] = []

    def register_hook(self, tensor: torch.Tensor, hook: Any) -> None:
        """Stands for `torch.Tensor.register_hook`."""
        self._hooks.setdefault((tensor.grad_fn, tensor.output_nr), []).append(hook)

    def queue_callback(self, callback: Any) -> None:
        """Stands for the engine's: FSDP frees what it has gathered at the end of a backward pass."""
        self._callbacks.append(callback)

    @torch.no_grad()
    def run(self, loss: torch.Tensor) -> None:
        """Stands for `torch.Tensor.backward` of a scalar."""
        # What is checkpointed is computed again once in each backward pass, told apart by this number.
        with mock.patch.object(torch._C, "_current_graph_task_id", return_value=id(loss)):
            incoming: dict[Any, dict[int, torch.Tensor]] = {loss.grad_fn: {0: torch.ones_like(loss)}}
            for node in _from_loss_to_leaves(loss):
                if given := incoming.pop(node, None):
                    for index in given:
                        for hook in self._hooks.pop((node, index), []):
                            changed = hook(given[index])
                            given[index] = given[index] if changed is None else changed
                    for target, index, gradient in _differentiate(node, given):
                        slot = incoming.setdefault(target, {})
                        slot[index] = slot[index] + gradient if index in slot else gradient
        while self._callbacks:
            self._callbacks.pop(0)()


def _from_loss_to_leaves(loss: torch.Tensor) -> list[Any]:
    order: list[Any] = []
    visited: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order[::-1]


def _differentiate(node: Any, given: dict[int, torch.Tensor]) -> Iterator[tuple[Any, int, torch.Tensor]]:
    """What a node hands on: (following node, which of its outputs, gradient)."""
    arguments = [given.get(index) for index in range(len(node._input_metadata))]
    edges = node.next_functions
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        # It answers for every argument, and knows what follows for the tensors alone.
        made = [one for one, wanted in zip(node.apply(*arguments), node.needs_input_grad, strict=False) if wanted]
        edges = [edge for edge in edges if edge[0] is not None]
    else:
        made = node(*arguments)
        made = made if isinstance(made, tuple) else (made,)
    for (target, index), gradient in zip(edges, made, strict=False):
        if target is not None and gradient is not None:
            # As the engine does: sums over what was broadcast, and a cast to the dtype of what is differentiated.
            wanted = target._input_metadata[index]
            yield target, index, gradient.sum_to_size(wanted.shape).to(wanted.dtype)
