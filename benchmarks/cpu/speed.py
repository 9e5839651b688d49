"""Tokens a second, CPU seconds a token and peak memory of finray and of TRL, as it comes and at its best."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cpu.plan import BATCH, TRL, Plan, Result, run_finray
from finray.runtime.cluster import ALLOCATOR
from harness.processes import environment, run_script
from harness.report import Spread, say, table
from harness.rows import Row, write_rows


def _run_trl(plan: Plan, seed: int, mode: str, rows: Sequence[Row], allocator: str | None, *extra: str) -> Result:
    """TRL once through rows given in the order they are to be seen in, the warm-up's first."""
    file = write_rows(plan.folder / f"rows_{mode}.jsonl", rows)
    options = [*plan.common, "--rows", str(file), "--mode", mode, "--sequential", "--seed", str(seed)]
    options += ["--steps", str(len(rows) // BATCH), "--warmup-steps", str(plan.warmup), *extra]
    return run_script(plan.peer_python, TRL, options, env=environment(threads=plan.threads, allocator=allocator))


def run_trl_default(plan: Plan, seed: int) -> Result:
    """TRL as it comes, on the sample in a random order."""
    shuffled = random.Random(seed).sample(plan.rows, len(plan.rows))
    return _run_trl(plan, seed, "default", shuffled[: plan.warmup * BATCH] + shuffled, None)


def run_trl_best(plan: Plan, seed: int) -> Result:
    """TRL at its best, on batches of one length in a random order; the longest warms up, so that memory is there."""
    batches = random.Random(seed).sample(plan.batches, len(plan.batches))
    ordered = [*plan.batches[-plan.warmup :], *batches]
    rows = [row for batch in ordered for row in batch]
    return _run_trl(plan, seed, "best", rows, ALLOCATOR, "--padding", "padded")


SYSTEMS: dict[str, Callable[[Plan, int], Result]] = {
    "finray": run_finray,
    "TRL, defaults": run_trl_default,
    "TRL, best": run_trl_best,
}


def measure_speed(plan: Plan) -> dict[str, list[Result]]:
    """Every system, in turn, `pairs` times."""
    results: dict[str, list[Result]] = {name: [] for name in SYSTEMS}
    for pair in range(plan.pairs):
        for name, run in SYSTEMS.items():
            result = run(plan, plan.seed + pair)
            results[name].append(result)
            say(
                f"speed {pair + 1}/{plan.pairs} {name}: {result['tokens_per_s']:.1f} tokens/s, "
                f"{result['tokens']} tokens in {result['seconds']:.1f} s, "
                f"{result['peak_rss_bytes'] / 2**30:.2f} GiB"
            )
    _require_same_work(results)
    return results


def _require_same_work(results: dict[str, list[Result]]) -> None:
    """Both of TRL's modes saw the same tokens, and all systems trained as many parameters."""
    tokens = {result["tokens"] for name in ("TRL, defaults", "TRL, best") for result in results[name]}
    trained = {result["settings"]["trainable_parameters"] for runs in results.values() for result in runs}
    if len(tokens) != 1 or len(trained) != 1:
        raise RuntimeError(f"the runs are not of equal work: tokens {tokens}, trained parameters {trained}")


MEASURES: tuple[tuple[str, Callable[[Result], float], int], ...] = (
    ("tokens/s", lambda result: result["tokens_per_s"], 1),
    ("CPU ms/token", lambda result: 1e3 * result["cpu_seconds_per_token"], 2),
    ("peak memory, GiB", lambda result: result["peak_rss_bytes"] / 2**30, 2),
    ("start to first step, s", lambda result: result["startup_seconds"], 1),
)


def show_speed(results: dict[str, list[Result]]) -> str:
    """Medians with ranges, and finray's share of each of TRL's."""
    rows = [
        [name, *(Spread.of([read(result) for result in runs]).show(digits) for _, read, digits in MEASURES)]
        for name, runs in results.items()
    ]
    ours = results["finray"]
    for name, runs in list(results.items())[1:]:
        ratios = [
            Spread.of_ratios([read(result) for result in ours], [read(result) for result in runs]).show(2, "×")
            for _, read, _ in MEASURES
        ]
        rows.append([f"finray ÷ {name}", *ratios])
    return table(["", *(name for name, _, _ in MEASURES)], rows)
