"""Results as Markdown: medians with ranges, the machine, and RESULTS.md with its first table."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

TITLE = "# Benchmark results"
INTRODUCTION = (
    "Measured by `python benchmarks/run.py`; each line and each section is replaced when its case is run again. A "
    "section shows the command of its day, and some scripts have other names since: `python benchmarks/run.py --list` "
    "names the cases. A figure without an aim is here to be watched."
)
HEAD = ["figure", "aim", "result", "", "date"]


def spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    """The median of some measurements; if there are several, with minimum and maximum in parentheses."""
    middle, low, high = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit}" if len(values) == 1 else f"{middle}{unit} ({low}–{high})"


def say(message: str) -> None:
    """Print progress on standard error."""
    print(message, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """A description of this machine: CPU and its bf16 support, cores, memory, operating system, Python."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{fields.get('model name', platform.machine())} ({', '.join(flags) or 'no bf16 instructions'}), "
        f"{os.cpu_count()} cores, {memory:.0f} GiB memory, {platform.system()} {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}"
    )


def write(path: Path, group: str, title: str, body: str, figures: Sequence[Sequence[str]], date: str) -> None:
    """Write a case's section and its lines of the first table into the results, replacing older ones.

    Args:
        path: RESULTS.md.
        group: second-level heading.
        title: third-level heading.
        body: the section.
        figures: lines of the first table, without the date.
        date: of the measurement.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    head, *sections = text.split("\n## ")
    lines = {cells[0]: cells for cells in map(_cells, head.splitlines()) if len(cells) == len(HEAD)}
    lines = {name: cells for name, cells in lines.items() if name not in (HEAD[0], "---")}
    lines |= {figure[0]: [*figure, date] for figure in figures}
    groups = dict(_titled(section) for section in sections)
    parts = groups.setdefault(group, {"": ""})
    parts[title] = body.strip()
    shown = [TITLE, INTRODUCTION, table(HEAD, list(lines.values()))]
    for name, cases in groups.items():
        shown += [f"## {name}", *(f"### {case}\n\n{content}" if case else content for case, content in cases.items())]
    path.write_text("\n\n".join(part for part in shown if part) + "\n", encoding="utf-8")


def _titled(section: str) -> tuple[str, dict[str, str]]:
    """A second-level section as its title and its third-level parts; text before the first part has no title."""
    title, _, rest = section.partition("\n")
    before, *parts = re.split(r"^### ", rest, flags=re.MULTILINE)
    named = {name.strip(): body.strip() for name, _, body in (part.partition("\n") for part in parts)}
    return title.strip(), {"": before.strip(), **named}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
