"""Tokens a second, CPU seconds a token and memory of finray, of TRL as it comes and at its best, and of Trainer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from cpu.plan import PEERS, TRL, Plan, Result, run_finray
from finray.planning.placement import ALLOCATOR
from harness.processes import environment, run_script
from harness.report import Spread, say, table
from harness.rows import Row, write_rows

TRAINER = PEERS / "trainer_sft.py"


def _run_peer(plan: Plan, seed: int, script: Path, rows: Sequence[Row], allocator: str | None, *extra: str) -> Result:
    """A peer once through rows given in the order they are to be seen in, the warm-up's first."""
    file = write_rows(plan.folder / "rows_peer.jsonl", rows)
    options = [*plan.common, "--rows", str(file), "--seed", str(seed), "--batch-size", str(plan.batch_size)]
    options += ["--steps", str(len(rows) // plan.batch_size), "--warmup-steps", str(plan.warmup), *extra]
    return run_script(plan.peer_python, script, options, env=environment(threads=plan.threads, allocator=allocator))


def run_trl_default(plan: Plan, seed: int) -> Result:
    """TRL as it comes, on the sample in a random order."""
    shuffled = random.Random(seed).sample(plan.rows, len(plan.rows))
    rows = shuffled[: plan.warmup * plan.batch_size] + shuffled
    return _run_peer(plan, seed, TRL, rows, None, "--mode", "default", "--sequential")


def run_trl_best(plan: Plan, seed: int) -> Result:
    """TRL at its best, on batches of one length."""
    extra = ("--mode", "best", "--sequential", "--padding", "padded")
    return _run_peer(plan, seed, TRL, _by_length(plan, seed), ALLOCATOR, *extra)


def run_trainer(plan: Plan, seed: int) -> Result:
    """Transformers' Trainer with PEFT, on batches of one length."""
    return _run_peer(plan, seed, TRAINER, _by_length(plan, seed), ALLOCATOR)


def _by_length(plan: Plan, seed: int) -> list[Row]:
    """Batches of one length in a random order; the longest warms up, so that memory is there."""
    batches = random.Random(seed).sample(plan.batches, len(plan.batches))
    return [row for batch in [*plan.batches[-plan.warmup :], *batches] for row in batch]


SYSTEMS: dict[str, Callable[[Plan, int], Result]] = {
    "finray": lambda plan, seed: run_finray(plan, seed, "--limit"),
    "TRL, defaults": run_trl_default,
    "TRL, best": run_trl_best,
    "Trainer": run_trainer,
}
TARGET = 1.8


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
    """All peers saw the same tokens, and all systems trained as many parameters."""
    tokens = {result["tokens"] for name, runs in results.items() if name != "finray" for result in runs}
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
    """Medians with ranges, and finray's share of each peer's."""
    rows = [
        [name, *(Spread.of([read(result) for result in runs]).show(digits) for _, read, digits in MEASURES)]
        for name, runs in results.items()
    ]
    ours = results["finray"]
    best = float("inf")
    for name, runs in list(results.items())[1:]:
        ratios = [
            Spread.of_ratios([read(result) for result in ours], [read(result) for result in runs])
            for _, read, _ in MEASURES
        ]
        rows.append([f"finray ÷ {name}", *(ratio.show(2, "×") for ratio in ratios)])
        best = min(best, ratios[0].median)
    verdict = "met" if best >= TARGET else "missed"
    shown = table(["", *(name for name, _, _ in MEASURES)], rows)
    return f"{shown}\n\nAim: at least {TARGET:.1f}× the tokens/s of the best-tuned peer; {verdict} ({best:.2f}×)."
