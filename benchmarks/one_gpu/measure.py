"""Time, memory and business of the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from finray.config.schema import TrainConfig
from finray.parallel.ddp import DDPStrategy
from finray.tasks.causal_lm import CausalLM
from finray.training.loader import StepData
from finray.training.loop import peak_memory
from finray.training.nonfinite import Watch
from finray.training.optim.optimizer import Optimizer
from finray.training.state import TrainState
from finray.training.step import train_step
from harness.flops import count_work, wait

Result = dict[str, Any]
OUT_OF_MEMORY = {"error": "out of memory"}


def bf16_peak(device: torch.device) -> tuple[float, int]:
    """FLOPs a second of a square bf16 matrix product, the best of five goes, and its size."""
    size, repeats = (8192, 20) if device.type == "cuda" else (512, 2)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def go() -> float:
        wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(left, right, out=product)
        wait(device)
        return time.perf_counter() - started

    go()
    return 2 * size**3 * repeats / min(go() for _ in range(5)), size


def forget(device: torch.device) -> None:
    """Free what the last case held, and count peaks anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def unless_full(action: Callable[[], Result], device: torch.device) -> Result:
    """The result of a case, or that the device has too little memory for it."""
    try:
        return action()
    except torch.OutOfMemoryError:
        return dict(OUT_OF_MEMORY)
    finally:
        forget(device)


def stepper(task: CausalLM, device: torch.device) -> Callable[[StepData], torch.Tensor]:
    """finray's optimizer step on a process of its own; gives the loss, unread."""
    strategy = DDPStrategy(device)
    train = TrainConfig(learning_rate=1e-4)
    optimizer = Optimizer(task.trainable(), train)
    state = TrainState(random_key=1)
    watch = Watch(state, device, scaled=False)

    def step(data: StepData) -> torch.Tensor:
        result = train_step(
            task,
            strategy,
            optimizer,
            data,
            state,
            watch,
            learning_rate=train.learning_rate,
            max_grad_norm=train.max_grad_norm,
        )
        state.step += 1
        return result.loss

    return step


def time_steps(task: CausalLM, data: Sequence[StepData], device: torch.device, *, warmup: int, peak: float) -> Result:
    """Train over some steps, of which the first are not timed.

    The clock runs from an idle device to an idle device over all timed steps: nothing is read in between, as in a run
    between two records.
    """
    step = stepper(task, device)
    for item in data[:warmup]:
        step(item)
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    timed = data[warmup:]
    started = time.perf_counter()
    losses = [step(item) for item in timed]
    wait(device)
    seconds = time.perf_counter() - started
    memory = peak_memory(device)
    kernels = kernel_seconds(lambda: [step(item) for item in timed[:2]], device)
    tokens = sum(item.tokens for item in timed)
    lengths = [length for item in timed for _, batch in item.shares for length in batch.lengths]
    work = count_work(task.model, lengths, share_with_logits=sum(item.supervised for item in timed) / tokens)
    share = sum(item.tokens for item in timed[:2]) / tokens
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "share_of_peak": work.flops * tokens / seconds / peak,
        "peak_memory_bytes": memory,
        "busy_share": None if kernels is None else kernels / (seconds * share),
        "work": work.plain(),
        "losses": [float(loss) for loss in losses],
    }


def kernel_seconds(action: Callable[[], Any], device: torch.device) -> float | None:
    """Time of all kernels of an action; None without a GPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        action()
        wait(device)
    events = profiler.events() or []
    return 1e-6 * float(sum(event.time_range.elapsed_us() for event in events if _is_kernel(event)))


def _is_kernel(event: Any) -> bool:
    """Whether an event of the profiler is a kernel: on the device, and no copy, fill, or named range."""
    on_device = event.device_type.name == "CUDA" and not event.is_user_annotation
    return on_device and not event.name.startswith(("Memcpy", "Memset"))
