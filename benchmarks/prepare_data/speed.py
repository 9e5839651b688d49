"""Preparation side by side, for growing numbers of rows: tokens a second, peak memory, fill of the packs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.processes import Watched, run_watched
from harness.report import Spread, say, table
from prepare_data.plan import PEERS, Plan, empty_folder, rows_file, run_environment

FINRAY = "finray"
ALONE = "the tokenizer alone"
MAP = "datasets.map"
MAP_PACK = "datasets.map + TRL's packing"
TRL = "TRL's trainer"

SPEED_AIMS = {MAP: 1.7, ALONE: 0.8}
FILL_AIM = 0.98
FILL_ROWS = 10_000
WARM_AIM_S = 0.5
# "Flat" has to be some number: what a million more rows may add.
FLAT_AIM = 1.25

Results = dict[int, dict[str, list[Watched]]]
Read = Callable[[Watched], float | None]


def _datasets(way: str) -> Callable[[Plan, Path, Path], list[str]]:
    def command(plan: Plan, rows: Path, _folder: Path) -> list[str]:
        script = str(PEERS / "datasets_prepare.py")
        processes = ["--processes", str(plan.threads)]
        return [plan.peer_python, script, *plan.common, "--rows", str(rows), "--way", way, *processes]

    return command


def _alone(plan: Plan, rows: Path, _folder: Path) -> list[str]:
    return [plan.peer_python, str(PEERS / "tokenizer_alone.py"), *plan.common, "--rows", str(rows)]


def _finray(plan: Plan, rows: Path, folder: Path) -> list[str]:
    script = str(PEERS / "finray_prepare.py")
    # With all cores finray chooses by itself; Ray counts the machine's, also where this process is kept to fewer.
    workers = [] if plan.threads == os.cpu_count() else ["--workers", str(plan.threads)]
    return [sys.executable, script, *plan.common, "--rows", str(rows), "--work", str(folder / "prepared"), *workers]


CONTENDERS: dict[str, Callable[[Plan, Path, Path], list[str]]] = {
    FINRAY: _finray,
    MAP: _datasets("map"),
    MAP_PACK: _datasets("map-pack"),
    TRL: _datasets("trl"),
    ALONE: _alone,
}


def measure_speed(plan: Plan) -> Results:
    """Every contender in turn, as often as the plan says, for every number of rows that it can do in time."""
    results: Results = {}
    for rows in plan.sizes:
        before = results[max(results)] if results else {}
        chosen = [name for name in CONTENDERS if _in_time(plan, name, rows, before, first=not results)]
        results[rows] = {name: [] for name in chosen}
        with rows_file(plan, rows) as file:
            for number in range(plan.runs_at(rows)):
                for name in chosen:
                    watched = _run_once(plan, name, file)
                    results[rows][name].append(watched)
                    _say_run(f"{rows:,} rows, {number + 1}/{plan.runs_at(rows)}, {name}", watched)
    return results


def _in_time(plan: Plan, name: str, rows: int, before: dict[str, list[Watched]], *, first: bool) -> bool:
    """Whether a run would stay within the limit, taking time to grow with the rows."""
    if first:
        return True
    if not before.get(name):
        return False
    known = int(before[name][0].result["rows"])
    expected: float = max(run.seconds for run in before[name]) * rows / known
    if expected > plan.limit_s:
        say(f"{name} left out from {rows:,} rows on: a run would take some {expected:.0f} s")
    return expected <= plan.limit_s


def _run_once(plan: Plan, name: str, file: Path) -> Watched:
    with empty_folder(plan) as folder:
        return run_watched(CONTENDERS[name](plan, file, folder), env=run_environment(plan, folder))


def _say_run(what: str, watched: Watched) -> None:
    result = watched.result
    fill = "" if result["fill"] is None else f", fill {result['fill']:.2%}"
    say(
        f"{what}: {result['tokens']:,} tokens in {result['seconds']:.1f} s, {_rate(watched):,.0f} tokens/s, "
        f"{watched.peaks.resident / 2**30:.2f} GiB ({watched.peaks.proportional / 2**30:.2f} shared once){fill}"
    )


def _rate(run: Watched) -> float:
    return float(run.result["tokens"] / run.result["seconds"])


def _rate_with_ray(run: Watched) -> float:
    return float(run.result["tokens"] / (run.result["start_seconds"] + run.result["seconds"]))


def _resident(run: Watched) -> float:
    return run.peaks.resident / 2**30


def _proportional(run: Watched) -> float:
    return run.peaks.proportional / 2**30


def _of(runs: Sequence[Watched], read: Read) -> Spread | None:
    values = [value for value in (read(run) for run in runs) if value is not None]
    return Spread.of(values) if values else None


def _show(spread: Spread | None, digits: int, unit: str = "") -> str:
    return "–" if spread is None else spread.show(digits, unit)


MEASURES: tuple[tuple[str, Read, int], ...] = (
    ("seconds", lambda run: run.result["seconds"], 1),
    ("1,000 tokens/s", lambda run: _rate(run) / 1e3, 1),
    ("process start to ready, s", lambda run: run.result["process_seconds"], 1),
    ("peak memory, GiB", _resident, 2),
    ("the same, shared pages once", _proportional, 2),
    ("fill, %", lambda run: None if run.result["fill"] is None else 100 * run.result["fill"], 2),
)


def show_speed(results: Results) -> str:
    """A table for each number of rows, how things grow, what is found again, and the aims."""
    parts = [_show_size(rows, runs) for rows, runs in results.items()]
    parts += [_show_growth(results), _show_warm(results), _show_aims(results)]
    return "\n\n".join(parts)


def _show_size(rows: int, by_name: dict[str, list[Watched]]) -> str:
    lines = []
    for name, runs in by_name.items():
        lines.append([name, *(_show(_of(runs, read), digits) for _, read, digits in MEASURES)])
        if name == FINRAY:
            with_ray = [
                _show(_of(runs, lambda run: run.result["start_seconds"] + run.result["seconds"]), 1),
                _show(_of(runs, lambda run: _rate_with_ray(run) / 1e3), 1),
            ]
            lines.append(["finray, with Ray's start", *with_ray, "", "", "", ""])
    for name in [name for name in by_name if name != FINRAY]:
        lines.append([f"finray ÷ {name}", *(_ratio(by_name, name, read) for _, read, _ in MEASURES[:5]), ""])
    head = ["", *(name for name, _, _ in MEASURES)]
    count = max(len(runs) for runs in by_name.values())
    title = f"**{rows:,} rows**, {_show_tokens(by_name)}; runs of each: {count}"
    return f"{title}\n\n{table(head, lines)}"


def _ratio(by_name: dict[str, list[Watched]], name: str, read: Read) -> str:
    ours, theirs = _of(by_name[FINRAY], read), _of(by_name[name], read)
    return "–" if ours is None or theirs is None else f"{ours.median / theirs.median:.2f}×"


def _show_tokens(by_name: dict[str, list[Watched]]) -> str:
    """How many tokens each contender counted, and whether they did the same work."""
    tokens = {name: runs[0].result["tokens"] for name, runs in by_name.items()}
    rows = by_name[FINRAY][0].result["rows"]
    apart = max(tokens.values()) - min(tokens.values())
    if not apart:
        verdict = f"{tokens[FINRAY]:,} tokens by everybody's count"
    else:
        counts = ", ".join(f"{name} {count:,}" for name, count in tokens.items())
        # An end-of-sequence token more or less in a row is a matter of taste; more is not the same work.
        verdict = f"{'tokens' if apart <= rows else '**not the same tokens**'}: {counts}"
    learned = {name: runs[0].result["learned"] for name, runs in by_name.items()}
    known = ", ".join(f"{name} {count:,}" for name, count in learned.items() if count is not None)
    return f"{verdict}; learned: {known}"


def _show_growth(results: Results) -> str:
    """Rates, memory and fill by the number of rows, and the rates without what a start costs."""
    head = ["", *(f"{rows:,} rows" for rows in results)]
    measures: tuple[tuple[str, Read, int], ...] = (
        ("1,000 tokens/s", lambda run: _rate(run) / 1e3, 1),
        ("peak memory, GiB", _resident, 2),
        ("the same, shared pages once", _proportional, 2),
        ("fill, %", lambda run: None if run.result["fill"] is None else 100 * run.result["fill"], 2),
    )
    parts = ["**How it grows** (medians)"]
    for title, read, digits in measures:
        lines = []
        for name in CONTENDERS:
            cells = [_median(results[rows].get(name, []), read, digits) for rows in results]
            if any(cell != "–" for cell in cells):
                lines.append([name, *cells])
        parts.append(table([title, *head[1:]], lines))
    parts.append(_show_marginal(results))
    return "\n\n".join(parts)


def _median(runs: Sequence[Watched], read: Read, digits: int) -> str:
    spread = _of(runs, read)
    return "–" if spread is None else f"{spread.median:.{digits}f}"


def _marginal(results: Results, name: str) -> float | None:
    """Tokens a second of what the largest size has more than the smallest: start-up falls out."""
    sizes = [rows for rows in results if results[rows].get(name)]
    if len(sizes) < 2:
        return None
    small, large = results[sizes[0]][name], results[sizes[-1]][name]
    tokens = large[0].result["tokens"] - small[0].result["tokens"]
    medians = [_of(runs, lambda run: run.result["seconds"]) for runs in (small, large)]
    seconds = [spread.median for spread in medians if spread is not None]
    return tokens / (seconds[1] - seconds[0]) if seconds[1] > seconds[0] else None


def _show_marginal(results: Results) -> str:
    rates = {name: _marginal(results, name) for name in CONTENDERS}
    known = [f"{name} {rate / 1e3:,.0f}" for name, rate in rates.items() if rate is not None]
    if not known:
        return "One size was measured, so nothing can be said of growth."
    return (
        "Without what a start costs (the tokens that the largest size of each has more than the smallest, over the "
        f"seconds it takes more), in 1,000 tokens/s: {', '.join(known)}."
    )


def _show_warm(results: Results) -> str:
    phases = ("find", "open_and_plan", "first_batch")
    lines = []
    for rows, by_name in results.items():
        runs = by_name.get(FINRAY, [])
        if runs:
            cells = [_show(_of(runs, _warm_phase(phase)), 3) for phase in phases]
            lines.append([f"{rows:,} rows", *cells, _show(_of(runs, _warm), 3)])
    head = ["", "found, s", "opened and packs planned, s", "first batch, s", "together, s"]
    title = "**finray when it is prepared already**, from the config to the first batch, without Ray"
    return f"{title}\n\n{table(head, lines)}"


def _warm_phase(phase: str) -> Read:
    return lambda run: run.result["warm"][phase]


def _warm(run: Watched) -> float:
    return float(sum(run.result["warm"].values()))


def _show_aims(results: Results) -> str:
    lines = [line for name, aim in SPEED_AIMS.items() for line in _speed_aim(results, name, aim)]
    ours = {rows: runs[FINRAY] for rows, runs in results.items() if runs.get(FINRAY)}
    largest, smallest = max(ours), min(ours)
    fills = [runs[0].result["fill"] for rows, runs in ours.items() if rows >= FILL_ROWS]
    if fills:
        lines.append(
            _aim(f"fill of {FILL_ROWS:,} rows and more", f"{min(fills):.2%}", "≥ 98 %", min(fills) >= FILL_AIM)
        )
    if largest > smallest:
        peaks = [_of(ours[rows], _proportional) for rows in (smallest, largest)]
        low, high = (spread.median for spread in peaks if spread is not None)
        what = f"peak memory (shared pages once) with {largest:,} rows ÷ with {smallest:,}"
        lines.append(_aim(what, f"{high / low:.2f}×", f"flat (≤ {FLAT_AIM}×)", high / low <= FLAT_AIM))
    warm = _of(ours[largest], _warm)
    if warm is not None:
        what = f"prepared already, {largest:,} rows: first batch"
        lines.append(_aim(what, f"{warm.median:.2f} s", f"< {WARM_AIM_S} s", warm.median < WARM_AIM_S))
    return f"**Aims**\n\n{table(['', 'measured', 'aim', ''], lines)}"


def _speed_aim(results: Results, name: str, aim: float) -> list[list[str]]:
    """The ratio of the rates at the largest number of rows that both did."""
    both = [rows for rows, runs in results.items() if runs.get(name) and runs.get(FINRAY)]
    if not both:
        return []
    rows = max(both)
    ours, theirs = (_of(results[rows][contender], _rate) for contender in (FINRAY, name))
    if ours is None or theirs is None:
        return []
    ratio = ours.median / theirs.median
    return [_aim(f"tokens/s ÷ those of {name}, {rows:,} rows", f"{ratio:.2f}×", f"≥ {aim}×", ratio >= aim)]


def _aim(what: str, measured: str, wanted: str, met: bool) -> list[str]:
    return [what, measured, wanted, "met" if met else "missed"]
