"""One worker and two: what the second adds, and Accelerate's FSDP2 on the same rows."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from statistics import median

from cpu.plan import BATCH, FINRAY, PEERS, Plan, Result
from finray.planning.placement import ALLOCATOR
from harness.processes import environment, run_group
from harness.report import Spread, say, table
from harness.rows import write_rows

ACCELERATE = PEERS / "accelerate_sft.py"
PACKS = 2
ONE, DDP, FSDP, PEER = (
    "finray, 1 worker",
    "finray, 2 workers, ddp",
    "finray, 2 workers, fsdp",
    "Accelerate FSDP2, 2 processes",
)


def together(results: Sequence[Result], *, tokens: str) -> Result:
    """The results of the ranks of one run as one: CPU seconds, memory and the rate of matrix products are summed.

    Args:
        results: of each rank.
        tokens: `shared` where every rank counts those of all, `own` where each counts its own.
    """
    first = results[0]
    count = first["tokens"] if tokens == "shared" else sum(result["tokens"] for result in results)
    seconds = max(result["seconds"] for result in results)
    cpu = sum(result["cpu_seconds"] for result in results)
    merged = {
        **first,
        "tokens": count,
        "seconds": seconds,
        "tokens_per_s": count / seconds,
        "cpu_seconds": cpu,
        "cpu_seconds_per_token": cpu / count,
        "peak_rss_bytes": sum(result["peak_rss_bytes"] for result in results),
        "largest_rss_bytes": max(result["peak_rss_bytes"] for result in results),
        "startup_seconds": max(result["startup_seconds"] for result in results),
    }
    if first.get("limit"):
        rate = sum(result["limit"]["gemm_flops_per_s"] for result in results)
        merged["limit"] = {**first["limit"], "gemm_flops_per_s": rate}
    return merged


def _run_finray(plan: Plan, seed: int, workers: int, strategy: str) -> Result:
    rows = write_rows(plan.folder / "rows_workers.jsonl", plan.rows)
    options = [*plan.common, "--rows", str(rows), "--warmup-steps", str(plan.warmup), "--seed", str(seed)]
    options += ["--packs", str(PACKS), "--strategy", strategy, "--limit"]
    env = environment(threads=1, allocator=ALLOCATOR)
    return together(run_group(sys.executable, FINRAY, options, env=env, processes=workers), tokens="shared")


def _run_accelerate(plan: Plan, seed: int) -> Result:
    """Two batches of neighbouring lengths to a step, one for each process; the steps in a random order."""
    steps = [plan.batches[at : at + 2] for at in range(0, len(plan.batches) - 1, 2)]
    shuffled = random.Random(seed).sample(steps, len(steps))
    ordered = [*steps[-1:] * plan.warmup, *shuffled]
    # The script deals rows out by turns.
    rows = [row for first, second in ordered for pair in zip(first, second, strict=True) for row in pair]
    file = write_rows(plan.folder / "rows_accelerate.jsonl", rows)
    options = [*plan.common, "--rows", str(file), "--seed", str(seed), "--batch-size", str(BATCH)]
    options += ["--steps", str(len(ordered)), "--warmup-steps", str(plan.warmup)]
    env = environment(threads=1, allocator=ALLOCATOR)
    return together(run_group(plan.peer_python, ACCELERATE, options, env=env, processes=2), tokens="own")


SYSTEMS: dict[str, Callable[[Plan, int], Result]] = {
    ONE: lambda plan, seed: _run_finray(plan, seed, 1, "ddp"),
    DDP: lambda plan, seed: _run_finray(plan, seed, 2, "ddp"),
    FSDP: lambda plan, seed: _run_finray(plan, seed, 2, "fsdp"),
    PEER: _run_accelerate,
}


def measure_workers(plan: Plan) -> dict[str, list[Result]]:
    """Every system, in turn, `pairs` times; one thread to a process."""
    results: dict[str, list[Result]] = {name: [] for name in SYSTEMS}
    for pair in range(plan.pairs):
        for name, run in SYSTEMS.items():
            result = run(plan, plan.seed + pair)
            results[name].append(result)
            say(
                f"workers {pair + 1}/{plan.pairs} {name}: {result['tokens_per_s']:.1f} tokens/s, "
                f"{result['peak_rss_bytes'] / 2**30:.2f} GiB"
            )
        _require_same_steps([results[name][-1] for name in (ONE, DDP, FSDP)])
    return results


def _require_same_steps(runs: Sequence[Result]) -> None:
    """The same tokens, and the same loss at every step, to the noise of bf16."""
    losses = [run["losses"] for run in runs]
    apart = max(abs(value / losses[0][at] - 1) for other in losses for at, value in enumerate(other))
    if len({run["tokens"] for run in runs}) != 1 or apart > 0.01:
        raise RuntimeError(f"one worker and two did not do the same: losses apart by {apart:.1e}")


def show_workers(results: dict[str, list[Result]]) -> str:
    """Rates, the second worker's worth, and the ratios to the peer."""
    alone = [run["tokens_per_s"] for run in results[ONE]]
    rows = []
    for name, runs in results.items():
        rate = [run["tokens_per_s"] for run in runs]
        two = name in (DDP, FSDP)
        rows.append(
            [
                name,
                Spread.of(rate).show(1),
                Spread.of_ratios(rate, [2 * value for value in alone]).show(2) if two else "–",
                Spread.of([1e3 * run["cpu_seconds_per_token"] for run in runs]).show(2),
                Spread.of([run["startup_seconds"] for run in runs]).show(1),
            ]
        )
    peer = [run["tokens_per_s"] for run in results[PEER]]
    for name in (DDP, FSDP):
        ratio = Spread.of_ratios([run["tokens_per_s"] for run in results[name]], peer)
        rows.append([f"{name} ÷ {PEER}", ratio.show(2, "×"), "–", "–", "–"])
    head = ["", "tokens/s", "scaling efficiency", "CPU ms/token", "start to first step, s"]
    return f"{table(head, rows)}\n\n{_bound(results)}"


def _bound(results: dict[str, list[Result]]) -> str:
    """How matrix products alone scale from one process to two on this machine."""
    rates = {name: [run["limit"]["gemm_flops_per_s"] for run in results[name]] for name in (ONE, DDP, FSDP)}
    both = [median([ddp, fsdp]) / (2 * one) for one, ddp, fsdp in zip(rates[ONE], rates[DDP], rates[FSDP], strict=True)]
    return (
        "Efficiency is the rate of two workers of one thread each over twice that of one worker of one thread, with "
        f"the same {PACKS} packs in every step. Two processes that do nothing but the model's matrix products reach "
        f"{Spread.of(both).show(2)} here: two cores may share what makes them fast."
    )
