"""An inspection as one HTML page that needs nothing else: no network, no files beside it, no scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from finray.errors import DataError
from finray.inspection.findings import findings, verdict
from finray.inspection.measure import Histogram, Inspection, SplitView
from finray.inspection.prompt_parity import ServingDifference
from finray.inspection.token_views import TokenView

PLOT_HEIGHT = 190.0
# A bar of one row beside one of a million must still be seen.
_LEAST_BAR = 1.5
_BAR_SHARE = 0.86
_Y_TICKS = 4
_X_TICKS = 5
_SHOWN_TOKENS = 1600
_CONTEXT_TOKENS = 24
_LEAST_GAP = 12
_WHITE = re.compile(r"( +|\n|\t|\r|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b-\u200f\u2028\u2029\ufeff])")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: left edge and width in percent of the plot, top and height in pixels, and what it stands for."""

    x: float
    width: float
    y: float
    height: float
    count: int
    label: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: its place (percent across, or pixels down) and its number."""

    at: float
    value: int


@dataclass(frozen=True, slots=True)
class Plot:
    """A histogram that is ready to be drawn."""

    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit: float | None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stacked bar."""

    key: str
    label: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a token's text: ``text``, or white space that is made visible (``space``, ``line``, ``tab``,
    ``control``)."""

    kind: str
    text: str


def page(inspection: Inspection) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        number=lambda value: f"{value:,}",
        percent=percent,
        segments=segments,
        fixed=lambda value: f"{value:.3f}".rstrip("0").rstrip("."),
    )
    checks = findings(inspection)
    level, sentence = verdict(checks)
    source = resources.files("finray.inspection").joinpath("page.html.j2").read_text(encoding="utf-8")
    limit = inspection.header.max_length
    return environment.from_string(source).render(
        inspection=inspection,
        header=inspection.header,
        checks=checks,
        level=level,
        verdict=sentence,
        plots={split.name: plot(split.histogram, limit) for split in inspection.splits},
        token_parts={split.name: token_parts(split) for split in inspection.splits},
        row_parts={split.name: row_parts(split) for split in inspection.splits},
        plot_height=PLOT_HEIGHT,
        shown=shown,
        around=around,
    )


def write_page(inspection: Inspection, file: Path) -> None:
    """Write the page.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        file.write_text(page(inspection), encoding="utf-8")
    except OSError as error:
        raise DataError(f"the page cannot be written: {error.strerror}", where=str(file)) from None


def percent(share: float) -> str:
    """A share for people: never 0 % or 100 % unless it is."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share > 0.9995:
        return "> 99.9%"
    return "< 0.1%" if share < 0.0005 else f"{share:.1%}"


def plot(lengths: Histogram, limit: int) -> Plot:
    """Place bars and ticks; ``limit`` is drawn as a line where the axis reaches it."""
    bins = len(lengths.counts)
    top = _nice(max(lengths.counts))
    bars = []
    for number, count in enumerate(lengths.counts):
        height = max(_LEAST_BAR, count / top * PLOT_HEIGHT) if count else 0.0
        low, high = number * lengths.width + 1, (number + 1) * lengths.width
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        label = f"{span} tokens: {count:,} {'row' if count == 1 else 'rows'}"
        inset = (1 - _BAR_SHARE) / 2
        bars.append(
            Bar((number + inset) / bins * 100, _BAR_SHARE / bins * 100, PLOT_HEIGHT - height, height, count, label)
        )
    end = bins * lengths.width
    step = _nice(max(1, math.ceil(end / _X_TICKS)), powers=True)
    x_ticks = tuple(Tick(value / end * 100, value) for value in range(0, end + 1, step))
    y_step = max(1, top // _Y_TICKS)
    y_ticks = tuple(Tick(PLOT_HEIGHT - value / top * PLOT_HEIGHT, value) for value in range(0, top + 1, y_step))
    return Plot(tuple(bars), x_ticks, y_ticks, limit / end * 100 if limit <= end else None)


def _nice(value: int, *, powers: bool = False) -> int:
    """The next round number: a power of two, or 1, 2, 4, 6 or 8 times a power of ten (which can be cut in four)."""
    if powers:
        return 1 << (value - 1).bit_length()
    scale = int(10 ** (len(str(value)) - 1))
    for factor in (1, 2, 4, 6, 8, 10):
        if factor * scale >= value:
            return max(factor * scale, _Y_TICKS if value > 1 else 1)
    return value


def token_parts(split: SplitView) -> tuple[Part, ...]:
    """Where the tokens of a split went: learned, prompt, cut off and dropped."""
    counts = split.counts
    return _parts(
        ("learned", "learned", split.supervised),
        ("prompt", "not learned", split.tokens - split.supervised),
        ("cut", "cut off", int(counts.get("truncated_tokens", 0))),
        ("dropped", "dropped", int(counts.get("dropped_tokens", 0))),
    )


def row_parts(split: SplitView) -> tuple[Part, ...]:
    """What became of the rows that were read; nothing for a split that was taken from another one's rows."""
    counts = split.counts
    if not counts:
        return ()
    cut = int(counts.get("truncated", 0))
    return _parts(
        ("learned", "whole", int(counts.get("rows", split.rows)) - cut),
        ("cut", "cut off", cut),
        ("dropped", "too long, dropped", int(counts.get("dropped_too_long", 0))),
        ("nothing", "nothing to learn, dropped", int(counts.get("unlearnable", 0))),
        ("bad", "bad, dropped", int(counts.get("bad_rows", 0))),
    )


def _parts(*counted: tuple[str, str, int]) -> tuple[Part, ...]:
    total = sum(count for _, _, count in counted) or 1
    return tuple(Part(key, label, count, count / total) for key, label, count in counted if count > 0)


def segments(text: str) -> tuple[Segment, ...]:
    """Text with white space and invisible characters set apart."""
    found = []
    for piece in _WHITE.split(text):
        if not piece:
            continue
        if piece[0] == " ":
            found += [Segment("space", " ")] * len(piece)
        elif piece in ("\n", "\t"):
            found.append(Segment("line" if piece == "\n" else "tab", piece))
        elif _WHITE.fullmatch(piece):
            found.append(Segment("control", f"U+{ord(piece):04X}"))
        else:
            found.append(Segment("text", piece))
    return tuple(found)


def shown(tokens: Sequence[TokenView]) -> tuple[Sequence[TokenView], int, Sequence[TokenView]]:
    """The tokens of a row that are shown: a first part, how many are left out, and a last part."""
    if len(tokens) <= _SHOWN_TOKENS:
        return tokens, 0, ()
    half = _SHOWN_TOKENS // 2
    return tokens[:half], len(tokens) - 2 * half, tokens[-half:]


@dataclass(frozen=True, slots=True)
class Aligned:
    """A stretch of two prompts side by side; ``left_out`` tokens that both have are not shown in its middle."""

    kind: str
    head: Sequence[TokenView]
    left_out: int
    tail: Sequence[TokenView]


def around(difference: ServingDifference) -> tuple[Aligned, ...]:
    """Both prompts with what they have in common shortened to what is next to a difference."""
    found = []
    last = len(difference.pieces) - 1
    for at, piece in enumerate(difference.pieces):
        before = 0 if at == 0 else _CONTEXT_TOKENS
        behind = 0 if at == last else _CONTEXT_TOKENS
        if piece.kind != "same" or len(piece.tokens) <= before + behind + _LEAST_GAP:
            found.append(Aligned(piece.kind, piece.tokens, 0, ()))
        else:
            tail = piece.tokens[-behind:] if behind else ()
            found.append(Aligned("same", piece.tokens[:before], len(piece.tokens) - before - len(tail), tail))
    return tuple(found)
