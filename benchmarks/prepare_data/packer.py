"""The packer by itself: seconds on one core, and how full the packs are, for up to a million documents."""

from __future__ import annotations

import sys
from typing import Any

from harness.processes import run_script
from harness.report import Spread, say, table
from prepare_data.plan import PEERS, Plan, empty_folder, rows_file, run_environment

MILLION = 1_000_000
SECONDS_AIM = 60.0
FILL_AIM = 0.98


def measure_packer(plan: Plan) -> dict[str, Any]:
    """Plan the packs of documents whose lengths are drawn from the rows'."""
    with rows_file(plan, len(plan.base)) as file, empty_folder(plan) as folder:
        options = [*plan.common, "--rows", str(file), "--seed", str(plan.seed), "--runs", str(plan.pairs)]
        options += ["--documents", *(str(count) for count in plan.documents)]
        # The lengths are counted with every core; the script then keeps to one for the plans.
        env = run_environment(plan, folder) | {"TOKENIZERS_PARALLELISM": "true"}
        result = run_script(sys.executable, PEERS / "finray_pack.py", options, env=env)
    for made in result["plans"]:
        say(f"packer: {made['documents']:,} documents, fill {made['fill']:.3%}, {made['seconds']} s")
    return result


def show_packer(result: dict[str, Any], capacity: int) -> str:
    """Seconds and fill by the number of documents."""
    lines = [
        [
            f"{made['documents']:,}",
            f"{made['packs']:,}",
            f"{100 * made['fill']:.3f}",
            Spread.of(made["seconds"]).show(2),
        ]
        for made in result["plans"]
    ]
    shape = result["lengths"]
    text = (
        f"Packs of {capacity} tokens, planned in one process that is kept to one core. Lengths are drawn from those of "
        f"the rows: {shape['least']} to {shape['most']} tokens, median {shape['median']:.0f}, mean "
        f"{shape['mean']:.0f}. Every plan was checked to hold each document once and no pack above its capacity."
    )
    return f"{text}\n\n{table(['documents', 'packs', 'fill, %', 'seconds'], lines)}\n\n{_show_aims(result)}"


def _show_aims(result: dict[str, Any]) -> str:
    least = min(made["fill"] for made in result["plans"])
    parts = [f"fill of at least {FILL_AIM:.0%}: {'met' if least >= FILL_AIM else 'missed'} ({least:.2%} at worst)"]
    for made in result["plans"]:
        if made["documents"] >= MILLION:
            seconds = Spread.of(made["seconds"]).median
            verdict = "met" if seconds < SECONDS_AIM else "missed"
            parts.append(f"a million documents in under {SECONDS_AIM:.0f} s: {verdict} ({seconds:.1f} s)")
    return f"Aims: {'; '.join(parts)}."
