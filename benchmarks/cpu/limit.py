"""How much of what this machine can do a run reaches: counted FLOPs over the rate of its matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpu.plan import Result
from harness.report import Spread, table

TARGET = 0.55


def show_limit(results: Mapping[str, Sequence[Result]]) -> str:
    """Of every system whose runs timed matrix products: what a token costs, the limit, and the share of it."""
    rows = []
    shares: dict[str, Spread] = {}
    for name, runs in results.items():
        if not all(run.get("limit") for run in runs):
            continue
        costs = [run["limit"]["flops_per_token"] for run in runs]
        rates = [run["limit"]["gemm_flops_per_s"] for run in runs]
        limits = [rate / cost for rate, cost in zip(rates, costs, strict=True)]
        speeds = [run["tokens_per_s"] for run in runs]
        shares[name] = Spread.of_ratios(speeds, limits)
        rows.append(
            [
                name,
                f"{Spread.of(costs).median / 1e6:,.0f}",
                Spread.of([rate / 1e9 for rate in rates]).show(0),
                Spread.of(limits).show(0),
                Spread.of(speeds).show(1),
                Spread.of([100 * share for share in shares[name].values]).show(0, " %"),
            ]
        )
    head = ["", "MFLOPs a token", "matrix products, GFLOP/s", "limit, tokens/s", "tokens/s", "share of the limit"]
    verdicts = ", ".join(f"{name} {'met' if share.median >= TARGET else 'missed'}" for name, share in shares.items())
    return f"{table(head, rows)}\n\nAim: at least {TARGET:.0%}; {verdicts}."
