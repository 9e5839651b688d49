"""Gradients of a data-parallel group lie in buckets, which are summed in one order on every rank."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from finray.errors import CheckpointError, FinrayError
from finray.parallel import base, ddp
from finray.parallel.base import OtherRankFailed, grad_norm, kinds_of_state, on_all_ranks, stateful
from finray.parallel.ddp import DDPStrategy
from tests.support.ranks import Group

CPU = torch.device("cpu")
SIZES = [(3, 4), (5,), (2, 2), (30,), (7,), (1,)]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[float]]]]:
    """Every sum over four ranks, of which each has the same: how it was asked for, and what it was given."""
    asked: list[tuple[str, list[float]]] = []

    class Work:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def wait(self) -> None:
            # Not before: nobody may read what is on its way.
            self.tensor.mul_(4)

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Any:
        # As gloo and NCCL want it.
        assert tensor.is_contiguous()
        asked.append(("async" if async_op else "sync", tensor.flatten().tolist()))
        if async_op:
            return Work(tensor)
        return tensor.mul_(4)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    monkeypatch.setattr(ddp.dist, "all_reduce", all_reduce)
    yield asked
    dist.destroy_process_group()


def parameters(dtypes: dict[int, torch.dtype] | None = None) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    kinds = dtypes or {}
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(kinds.get(at, torch.float32)))
        for at, size in enumerate(SIZES)
    ]


def strategy_over(own: list[torch.nn.Parameter], monkeypatch: pytest.MonkeyPatch, elements: int = 12) -> DDPStrategy:
    monkeypatch.setattr(ddp, "BUCKET_ELEMENTS", elements)
    strategy = DDPStrategy(CPU)
    optimizer: Any = SimpleNamespace(parameters={str(at): one for at, one in enumerate(own)})
    module = torch.nn.Module()
    assert strategy.prepare(module, optimizer) == (module, optimizer)
    return strategy


def loss_of(own: list[torch.nn.Parameter], factor: float, without: tuple[int, ...] = ()) -> torch.Tensor:
    parts = [(one.float() ** 2).sum() * (at + 1) for at, one in enumerate(own) if at not in without]
    return torch.stack(parts).sum() * factor


@pytest.mark.parametrize("without", [(), (2,), (1, 3), (3,)])
@pytest.mark.parametrize("elements", [1, 12, 17, 1000])
def test_the_sum_of_gradients_is_that_of_all_micro_batches_on_all_ranks(
    sums: list[Any], monkeypatch: pytest.MonkeyPatch, elements: int, without: tuple[int, ...]
) -> None:
    own = parameters()
    strategy = strategy_over(own, monkeypatch, elements)
    for _ in range(2):
        for number, factor in enumerate((1.0, 2.0, 0.5)):
            strategy.backward(loss_of(own, factor, without), last=number == 2)
        extra = strategy.all_reduce_gradients(own, torch.tensor([3.0, 1.0], dtype=torch.float64))
        assert extra.tolist() == [12.0, 4.0]
        for at, one in enumerate(own):
            expected = torch.zeros_like(one) if at in without else 4 * 3.5 * 2 * (at + 1) * one.detach()
            torch.testing.assert_close(one.grad, expected)
        # The optimizer frees them, and the next step begins from nothing.
        for one in own:
            one.grad = None


def test_buckets_follow_the_order_of_the_parameters_up_to_their_size_and_by_dtype(
    sums: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for elements, dtypes, layout in (
        # 12 | 5 + 4 | 30, larger than a bucket | 7 + 1.
        (12, {}, [[0], [1, 2], [3], [4, 5]]),
        # One that is exactly full.
        (17, {}, [[0, 1], [2], [3], [4, 5]]),
        (12, {2: torch.bfloat16}, [[0], [1], [2], [3], [4, 5]]),
        (12, {0: torch.bfloat16}, [[0], [1, 2], [3], [4, 5]]),
    ):
        own = parameters(dtypes)  # type: ignore[arg-type]
        strategy = strategy_over(own, monkeypatch, elements)
        sums.clear()
        strategy.backward(loss_of(own, 1.0), last=True)
        strategy.all_reduce_gradients(own, torch.zeros(1))
        # From the last to the first, whichever gradient was ready first, and what else is summed at the end.
        assert [(how, len(values)) for how, values in sums] == [
            *(("async", sum(own[at].numel() for at in bucket)) for bucket in reversed(layout)),
            ("sync", 1),
        ]
        for bucket in layout:
            assert len({own[at].grad.untyped_storage().data_ptr() for at in bucket}) == 1  # type: ignore[union-attr]


def test_a_bucket_is_on_its_way_during_the_last_backward_pass_and_not_before(
    sums: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = parameters()
    strategy = strategy_over(own, monkeypatch)
    strategy.backward(loss_of(own, 1.0), last=False)
    assert sums == []
    # The second bucket from the end is not complete: those before it wait for it.
    strategy.backward(loss_of(own, 1.0, without=(3,)), last=True)
    assert len(sums) == 1
    strategy.all_reduce_gradients(own, torch.zeros(1))
    assert len(sums) == 5
    assert [values for how, values in sums if how == "async"][1] == pytest.approx((8 * own[3]).tolist())


def test_a_gradient_that_is_not_contiguous_is_summed_all_the_same(
    sums: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Autograd gives a gradient the strides of its parameter.
    weight = torch.nn.Parameter(torch.ones(4, 3).T)
    strategy = strategy_over([weight], monkeypatch)
    factor = torch.arange(12.0).reshape(4, 3)
    strategy.backward((weight.T * factor).sum(), last=True)
    strategy.all_reduce_gradients([weight], torch.zeros(1))
    torch.testing.assert_close(weight.grad, 4 * factor.T)


def test_one_process_alone_has_no_buckets_and_gives_zeros_for_what_has_no_gradient() -> None:
    own = parameters()
    strategy = DDPStrategy(CPU)
    strategy.prepare(torch.nn.Module(), SimpleNamespace(parameters=dict(enumerate(own))))  # type: ignore[arg-type]
    strategy.broadcast_parameters(own)
    strategy.backward(loss_of(own, 1.0, without=(2,)), last=True)
    assert own[2].grad is None
    extra = torch.tensor([2.0])
    assert strategy.all_reduce_gradients(own, extra) is extra
    assert extra.tolist() == [2.0]
    assert own[2].grad is not None
    assert own[2].grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(own[1].grad, 4 * own[1].detach())
    assert (strategy.is_alone, strategy.rank, strategy.world_size) == (True, 0, 1)
    assert (strategy.broadcast_object({"a": 1}), strategy.all_gather_object(3)) == ({"a": 1}, [3])


# --- what all strategies share ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_the_norm_is_one_number_in_fp32(dtype: torch.dtype, other: torch.dtype) -> None:
    """In bf16 the root of 1,000 would be off by a part in 10,000; a model may keep some weights in fp32."""
    own = [torch.nn.Parameter(torch.zeros(1000, dtype=dtype)), torch.nn.Parameter(torch.zeros(1, dtype=other))]
    own[0].grad, own[1].grad = torch.ones(1000, dtype=dtype), torch.full((1,), 40.0, dtype=other)
    spare = torch.nn.Parameter(torch.zeros(3))
    norm = grad_norm([*own, spare])
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(2600**0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("device", "shared_gpu", "backend"),
    [
        ("cpu", False, "gloo"),
        ("cpu", True, "gloo"),
        ("cuda:1", False, "cpu:gloo,cuda:nccl"),
        # NCCL refuses two ranks on one GPU.
        ("cuda:1", True, "gloo"),
    ],
)
def test_gpus_that_are_not_shared_have_nccl(device: str, shared_gpu: bool, backend: str) -> None:
    assert base.backend_of(torch.device(device), shared_gpu=shared_gpu) == backend
    if not shared_gpu:
        assert base.backend_of(torch.device(device)) == backend


class Reader:
    def __init__(self, **held: torch.Tensor) -> None:
        self.held = {name.replace("__", "/"): value for name, value in held.items()}
        self.shapes = {name: tuple(value.shape) for name, value in self.held.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.held[name][start:stop] if self.held[name].ndim else self.held[name]


def test_state_of_other_parameters_or_of_another_shape_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    two = Reader(a__x=torch.zeros(1), b__x=torch.zeros(1), b__y=torch.zeros(1), shared__map=torch.zeros(1))
    assert kinds_of_state(two, {"a": 1, "b": 1}) == {"a": {"x"}, "b": {"x", "y"}}
    # Before the first update there is none of any.
    assert kinds_of_state(Reader(shared__map=torch.zeros(1)), {"a": 1}) == {}
    for names in ("a", "ac", "abc"):
        with pytest.raises(CheckpointError, match="belongs to different parameters"):
            kinds_of_state(two, dict.fromkeys(names))
    optimizer = torch.optim.AdamW([weight])
    moments = {"w__exp_avg": torch.ones(2, 3), "w__exp_avg_sq": torch.ones(2, 3), "w__step": torch.tensor(4.0)}
    kinds = {"exp_avg", "exp_avg_sq", "step"}
    stateful(optimizer).load_state_of(weight, "w", kinds, Reader(**moments))
    assert {name: one.tolist() for name, one in optimizer.state[weight].items()} == {
        "exp_avg": [[1.0] * 3] * 2, "exp_avg_sq": [[1.0] * 3] * 2, "step": 4.0,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="w/exp_avg has a different shape"):
        stateful(optimizer).load_state_of(weight, "w", kinds, Reader(**{**moments, "w__exp_avg": torch.ones(3, 2)}))
    with pytest.raises(CheckpointError, match="belongs to a different optimizer"):
        stateful(optimizer).load_state_of(weight, "w", kinds - {"step"}, Reader(**moments))


def test_what_fails_on_any_rank_fails_on_all_with_the_message_of_the_first() -> None:
    def fails() -> int:
        raise CheckpointError("mine", where="here", repair="there")

    others = [None, CheckpointError("second").to_dict(), CheckpointError("third").to_dict()]
    for action, gathered, said in (
        (fails, lambda own: [own, *others[1:]], "mine"),
        (lambda: 3, lambda own: [own, *others[1:]], "second"),
    ):
        strategy: Any = SimpleNamespace(all_gather_object=gathered)
        with pytest.raises(CheckpointError) as caught:
            on_all_ranks(strategy, action)
        assert caught.value.message == said
    alone: Any = SimpleNamespace(all_gather_object=lambda own: [own, None])
    assert on_all_ranks(alone, lambda: 3) == 3


ERRORS = {
    "disk": OSError(errno.ENOSPC, "No space left on device", "/run/x"),
    "no name": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "odd": OSError(errno.EIO, "Input/output error", "/run/x"),
    "ours": ZeroDivisionError("division by zero"),
    "memory": MemoryError(),
    "theirs": RuntimeError("CUDA error for hf_abcdefghijklmnopqrstuvwxyz0123\nmore"),
}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_one_rank_raises_no_rank_waits_for_it(kind: str, failing: int) -> None:
    error = ERRORS[kind]

    def action(rank: int) -> None:
        if rank == failing:
            raise error

    found = Group(2).run(lambda strategy: on_all_ranks(strategy, lambda: action(strategy.rank)))
    if kind in ("disk", "no name"):
        assert {type(one) for one in found} == {FinrayError}, "a retry is useless: all ranks return it alike"
        assert {one.repair for one in found} == {"free some disk space"}
        assert {one.where for one in found} == {"/run/x" if kind == "disk" else None}
        return
    assert found[failing] is error
    other = found[1 - failing]
    assert isinstance(other, OtherRankFailed)
    said = {"odd": "OSError: [Errno 5] Input/output error: '/run/x'", "ours": "ZeroDivisionError: division by zero"}
    said |= {"memory": "MemoryError: MemoryError", "theirs": "RuntimeError: CUDA error for ***"}
    assert str(other) == f"rank {failing} failed: {said[kind]}"
