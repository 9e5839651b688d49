"""Numbers as Markdown: medians with their range, the machine, and a section of the results file."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TITLE = "# Benchmark results"
INTRODUCTION = "Each section is written by the script it names, and replaced when that script is run again."


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements and their range."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From measurements, of which there must be one at least."""
        return cls(tuple(values))

    @classmethod
    def of_ratios(cls, over: Sequence[float], under: Sequence[float]) -> Spread:
        """From the ratios of measurements taken one after the other."""
        return cls(tuple(above / below for above, below in zip(over, under, strict=True)))

    @property
    def median(self) -> float:
        """The median."""
        return median(self.values)

    def show(self, digits: int, unit: str = "") -> str:
        """As `median (min-max)`."""
        low, high = (f"{value:.{digits}f}" for value in (min(self.values), max(self.values)))
        return f"{self.median:.{digits}f}{unit} ({low}–{high})"


def say(message: str) -> None:
    """Progress, on standard error."""
    print(message, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is set to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """This machine in words: CPU, cores, memory, system, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_cpu_name()}, {os.cpu_count()} cores, {memory:.0f} GiB memory, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def _cpu_name() -> str:
    """The model, and what of bf16 it does in hardware."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(_field(line) for line in lines)
    name = fields.get("model name", platform.machine())
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    return f"{name} ({', '.join(flags) or 'no bf16 instructions'})"


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def replace_section(path: Path, title: str, body: str) -> None:
    """Write a second-level section of a Markdown file, in the place of the one of that title if there is one."""
    text = path.read_text(encoding="utf-8") if path.is_file() else f"{TITLE}\n\n{INTRODUCTION}\n"
    head, *sections = text.rstrip().split("\n## ")
    section = f"{title}\n\n{body.strip()}\n"
    titles = [part.split("\n", 1)[0].strip() for part in sections]
    if title in titles:
        sections[titles.index(title)] = section
    else:
        sections.append(section)
    parts = [head, *sections]
    path.write_text("\n\n## ".join(part.strip() for part in parts) + "\n", encoding="utf-8")


def replace_parts(path: Path, title: str, parts: Mapping[str, str]) -> None:
    """Write third-level parts of a section, by their titles; the section's other parts stay as they are."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = next((part for part in text.split("\n## ") if part.split("\n", 1)[0].strip() == title), title)
    _, *old = found.split("\n### ")
    kept = {part.split("\n", 1)[0].strip(): part.partition("\n")[2].strip() for part in old}
    body = "\n\n".join(f"### {name}\n\n{content.strip()}" for name, content in {**kept, **parts}.items())
    replace_section(path, title, body)
