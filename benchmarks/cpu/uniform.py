"""Rows of one length, of which only a short answer is learned: packing has nothing to gain here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from cpu.plan import Plan, Result, run_finray
from cpu.speed import run_trainer, run_trl_best
from harness.report import Spread, say, table
from harness.rows import Row, uniform_rows

ROW_TOKENS = 128
BATCH = 8
TARGET = 0.98

SYSTEMS: dict[str, Callable[[Plan, int], Result]] = {
    "finray": lambda plan, seed: run_finray(plan, seed),
    "TRL, best": lambda plan, seed: run_trl_best(plan, seed),
    "Trainer": lambda plan, seed: run_trainer(plan, seed),
}


def uniform_plan(plan: Plan) -> Plan:
    """The plan with batches of eight rows of 128 tokens each, template included: as many tokens as a pack holds."""
    rows = uniform_rows(plan.model, count=BATCH * len(plan.batches), tokens=ROW_TOKENS, seed=plan.seed)
    batches: list[list[Row]] = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    random.Random(plan.seed).shuffle(batches)
    return dataclasses.replace(plan, batches=batches, batch_size=BATCH)


def measure_uniform(plan: Plan) -> dict[str, list[Result]]:
    """finray and the peers at their best, in turn."""
    uniform = uniform_plan(plan)
    results: dict[str, list[Result]] = {name: [] for name in SYSTEMS}
    for pair in range(plan.pairs):
        for name, run in SYSTEMS.items():
            result = run(uniform, plan.seed + pair)
            results[name].append(result)
            say(f"uniform {pair + 1}/{plan.pairs} {name}: {result['tokens_per_s']:.1f} tokens/s")
    if len({run["padded_tokens"] - run["tokens"] for runs in results.values() for run in runs}) != 1:
        raise RuntimeError("the rows are not of one length: somebody padded")
    return results


def show_uniform(results: dict[str, list[Result]]) -> str:
    """Rates, and finray's over each peer's."""
    rates = {name: [run["tokens_per_s"] for run in runs] for name, runs in results.items()}
    rows = [[name, Spread.of(values).show(1), "–"] for name, values in rates.items()]
    ratios = {name: Spread.of_ratios(rates["finray"], values) for name, values in rates.items() if name != "finray"}
    for row in rows:
        if row[0] in ratios:
            row[2] = ratios[row[0]].show(2, "×")
    least = min(ratio.median for ratio in ratios.values())
    verdict = "met" if least >= TARGET else "missed"
    return (
        f"{table(['', 'tokens/s', 'finray ÷ it'], rows)}\n\nEvery row has {ROW_TOKENS} tokens, of which an answer of a "
        f"word or two is learned; the peers' batches are of {BATCH} rows, finray's packs hold as many. Aim: at least "
        f"{TARGET:.2f}× the best peer; {verdict} ({least:.2f}×)."
    )
