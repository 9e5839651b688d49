"""Peak memory of every contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpu.plan import Result
from cpu.workers import DDP, FSDP
from harness.report import Spread, table

GIB = 2**30


def show_memory(alone: Mapping[str, Sequence[Result]], groups: Mapping[str, Sequence[Result]]) -> str:
    """Peak resident memory, summed over processes, beside finray's share of each peer's.

    Args:
        alone: contenders of one process by name, finray among them.
        groups: contenders of one and of two processes with a thread each.
    """
    rows = []
    for results, ours in ((alone, ("finray",)), (groups, (DDP, FSDP))):
        for name, runs in results.items():
            peaks = [run["peak_rss_bytes"] / GIB for run in runs]
            largest = [run.get("largest_rss_bytes", run["peak_rss_bytes"]) / GIB for run in runs]
            peer = not name.startswith("finray")
            cells = [_ratio(results[our], runs) if peer else "–" for our in ours]
            rows.append([name, Spread.of(peaks).show(2), Spread.of(largest).show(2), *cells, *["–"] * (2 - len(cells))])
    head = ["", "all processes, GiB", "the largest, GiB", "finray (ddp) ÷ it", "finray (fsdp) ÷ it"]
    return table(head, rows)


def _ratio(ours: Sequence[Result], theirs: Sequence[Result]) -> str:
    return Spread.of_ratios([run["peak_rss_bytes"] for run in ours], [run["peak_rss_bytes"] for run in theirs]).show(
        2, "×"
    )
