"""Numbers that existing runs depend on: with others, prepared data would be other files and sums have other bits."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.checkpoint import manifest, objects
from finray.data.dataset import plan
from finray.data.sampling import splits
from finray.data.sampling.packing import plan_packs
from finray.data.sources import pieces
from finray.data.tokenize import chat
from finray.evaluation import overlap, statistics
from finray.evaluation.engines import vllm
from finray.models import attention, blocks, head, packed
from finray.models.export import TOLERANCE
from finray.parallel import ddp
from finray.parallel.ddp import _Bucket
from finray.training import allocator, evaluator, nonfinite
from finray.training.optim import adamw_8bit, rounded_adamw
from finray.training.optim.optimizer import Optimizer
from finray.training.state import TrainState


def test_how_sources_are_cut_and_files_are_laid_out() -> None:
    """A change of any is another digest of the same rows, on which no run continues."""
    assert (pieces.PIECE_BYTES, pieces.ROWS_PER_PIECE, pieces.MOST_PARTS) == (4_194_304, 8_192, 4_096)
    assert (plan.FORMAT_VERSION, plan.ROWS_PER_BATCH, plan._ROWS_THAT_DECIDE) == (2, 1_024, 100)
    assert manifest.FORMAT_VERSION == 2
    assert chat.RENDER_DATE == (2024, 7, 26)
    assert (adamw_8bit.BLOCK, adamw_8bit.SMALLEST) == (256, 4_096)
    assert (splits.MOST_REPEATS, splits.FEW) == (1_000, 1_000_000)


def test_in_which_pieces_sums_are_made() -> None:
    assert (head.CHUNK_ELEMENTS, head.CHUNK_ROWS) == ({"cpu": 12_582_912, "cuda": 67_108_864}, 64)
    assert (ddp.BUCKET_ELEMENTS, attention.EXPLICIT_UP_TO) == (8_388_608, 512)
    assert (attention.BATCHED_UP_TO, attention.BATCHED_FROM) == (128, 16)
    assert (attention.LENGTHS_OF, attention.COUNTS_OF) == (16, 4)
    assert (blocks.SMALLEST_OFFLOAD, packed._PROBES) == (1_048_576, 32)
    assert TOLERANCE == {"fp32": 0.0001, "bf16": 0.05, "fp16": 0.01}


def test_by_which_numbers_scores_are_judged() -> None:
    """Intervals, p-values and what counts as known of the training data; guide and reports name them."""
    assert (statistics.LEVEL, statistics._RESAMPLES, statistics._SWAPS) == (0.95, 2_000, 4_000)
    assert (statistics._ALL_SWAPS, statistics._MOST_ROWS, statistics._GROUPS) == (12, 10_000, 5_000)
    assert (overlap.RUN, overlap._COMMON, overlap._NAMED) == (13, 10, 20)


def test_numbers_that_others_have_set() -> None:
    """torch's GradScaler; kernels of vLLM; S3, which takes 10,000 parts."""
    assert (nonfinite.FIRST_SCALE, nonfinite.GROWTH_STEPS, nonfinite.MOST_SKIPPED) == (65_536.0, 2_000, 20)
    assert vllm._RANKS == (8, 16, 32, 64, 128, 256, 320, 512)
    assert (objects._PART, objects._PARTS, objects.TRIES) == (67_108_864, 9_000, 6)
    assert evaluator.MOST_OUT == 4


def test_rows_of_one_length_stay_in_their_order() -> None:
    plan = plan_packs([5] * 100, 10)
    assert plan.rows.tolist() == list(range(100))
    assert plan_packs([3, 9] * 40, 9).rows.tolist() == [*range(1, 80, 2), *range(0, 80, 2)]


@pytest.mark.parametrize(("but_large", "mapping"), [(False, [(-4, 0)]), (True, [(-4, 65_536), (-3, 33_554_432)])])
@pytest.mark.parametrize("taken", [True, False])
def test_the_c_library_is_told_by_the_numbers_of_its_header(
    but_large: bool, mapping: list[tuple[int, int]], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M_ARENA_MAX, M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h."""
    told: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        told.append((name, value))
        return int(taken or name != -1)

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(sys, "platform", "linux")
    assert allocator.keep_freed_memory(but_large=but_large) is taken
    assert told == [(-8, 1), *mapping, (-1, 2_147_483_647)]
    told.clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "linux")
    # Another C library has no such function.
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()
    assert told == []


# --- on whichever device: `meta` stands for a GPU, and a CPU's tensor among its own is an error -----------------------

META = torch.device("meta")


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no such device."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())


@pytest.mark.parametrize("scaled", [True, False])
def test_what_is_observed_of_a_step_stays_on_the_device(scaled: bool) -> None:
    from finray.training.nonfinite import NonFiniteGuard

    guard = NonFiniteGuard(TrainState(), META, scaled=scaled)
    found = guard.observe(1, torch.zeros((), device=META, dtype=torch.float64), torch.zeros((), device=META), (1,))
    loss = guard.scale(torch.zeros((), device=META))
    held = [one for one in vars(guard).values() if isinstance(one, torch.Tensor)]
    assert {one.device.type for one in (found, loss, *held)} == {"meta"}
    assert (found.dtype, guard._seen.dtype) == (torch.float32, torch.float64)
    assert {one.dtype for one in (guard._good, guard._skipped, guard._in_row)} == {torch.int64}


@pytest.mark.usefixtures("no_autocast")
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attention_is_worked_out_on_the_device(window: int | None, softcap: float | None) -> None:
    query = torch.zeros(1, 2, 6, 8, device=META)
    found, _ = attention.packed_attention(
        *(torch.nn.Module(), query, query, query, None),
        **{"segment_lengths": (2, 4), "sliding_window": window, "softcap": softcap},
    )
    assert (found.device.type, found.shape) == ("meta", (1, 6, 2, 8))


@pytest.mark.usefixtures("no_autocast")
def test_a_loss_is_summed_on_the_device() -> None:
    hidden, weight = (torch.zeros(size, 4, device=META, requires_grad=True) for size in (5, 9))
    loss = head.loss_sum(head.Head(weight), hidden, torch.zeros(5, dtype=torch.int64, device=META), chunk=2)
    assert (loss.device.type, loss.dtype) == ("meta", torch.float32)
    row = packed.JoinedRows(torch.zeros(1, 7, dtype=torch.int64, device=META))
    assert {one.device.type for one in (row.positions_1T, row.cu_seqlens)} == {"meta"}
    assert (row.cu_seqlens.dtype, row.lengths) == (torch.int32, (7,))


def test_gradients_lie_in_buckets_on_the_device() -> None:
    bucket = _Bucket(torch.bfloat16)
    own = [torch.nn.Parameter(torch.zeros(3, device=META, dtype=torch.bfloat16)) for _ in range(2)]
    for at, parameter in enumerate(own):
        bucket.offsets[parameter] = 3 * at
    assert (bucket.all_gradients().device.type, bucket.all_gradients().dtype) == ("meta", torch.bfloat16)


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "bf16-true"])
def test_the_state_of_an_optimizer_is_on_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rounded_adamw.CHUNK, "meta", 5)
    from tests.support.optimizing import train_config

    dtype = torch.bfloat16 if kind == "bf16-true" else torch.float32
    sizes: dict[str, tuple[int, ...]] = {"a": (4, 3), "b": (3,), "c": (2, 4, 3)}
    parameters = {name: torch.nn.Parameter(torch.zeros(size, device=META, dtype=dtype)) for name, size in sizes.items()}
    optimizer = Optimizer(parameters, train_config(kind))
    for one in parameters.values():
        one.grad = torch.zeros_like(one)
    if kind != "adamw":
        # torch's fused kernel has no such device.
        optimizer.step(0.1, found_inf=torch.zeros((), device=META))
        assert {one.device.type for one in optimizer.sharded_state().values()} == {"meta"}
    from finray.parallel.base import stateful

    for one in parameters.values():
        state: dict[str, Any] = stateful(optimizer.inner).initial_state(one)
        assert {value.device.type for value in state.values()} == {"meta"}
        assert state["step"].dtype == torch.float32


def test_an_offloaded_tensor_is_copied_without_a_wait_into_memory_that_a_gpu_can_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []

    class Held:
        def copy_(self, tensor: Any, **options: Any) -> None:
            said.append(("copy", options))

        def to(self, device: Any, **options: Any) -> str:
            said.append((device, options))
            return "back"

    def empty(shape: Any, **options: Any) -> Any:
        said.append((shape, options))
        return held

    held = Held()
    monkeypatch.setattr(blocks.torch, "empty", empty)
    tensor: Any = SimpleNamespace(shape=(2, 3), dtype=torch.bfloat16, device="cuda:1", is_cuda=True)
    kept = blocks._pack(lambda one: True, tensor)
    assert kept == ("cuda:1", held)
    assert blocks._unpack(kept) == "back"  # type: ignore[comparison-overlap]
    quickly = {"non_blocking": True}
    assert said == [
        ((2, 3), {"dtype": torch.bfloat16, "pin_memory": True}),
        ("copy", quickly),
        ("cuda:1", quickly),
    ]
    stays = torch.ones(2)
    assert blocks._unpack(blocks._pack(lambda one: False, stays)) is stays


def test_the_scale_of_attention_without_one_is_that_of_its_width() -> None:
    query = torch.randn(1, 1, 3, 4)
    for softcap in (None, 100.0):
        one, other = (
            attention.packed_attention(
                *(torch.nn.Module(), query, query, query, None),
                **{"segment_lengths": (3,), "softcap": softcap, "scaling": scaling},
            )[0]
            for scaling in (None, 1 / math.sqrt(4))
        )
        torch.testing.assert_close(one, other)
