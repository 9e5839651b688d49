"""Interactive plots of a page, drawn by ``plots.js`` with uPlot.

uPlot is vendored to keep pages small enough for mail: 51 kB of script, while plotly's smallest bundle has 1.1 MB and
its Python package 4.8 MB. It zooms, links the cursors of several plots, and draws a million points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Series:
    """Values by x, ascending in x. None or a non-finite value is a gap in the curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int | None = None  # index of the colour; None means the index of the series in the plot


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line that marks an event at this x."""

    x: float
    label: str
    colour: int | None = None  # index of the colour of its series; None for a separate colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot, created by :func:`histogram` or :func:`curves` and shown by templates: ``{{ figure(plot) }}``."""

    kind: Literal["bars", "lines"]
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit: tuple[float, str] | None = None  # position and label of a vertical line
    group: str | None = None  # plots of a group share cursor and zoom of the x axis
    marks: tuple[Mark, ...] = ()  # more vertical lines

    def plain(self) -> dict[str, Any]:
        """The plot as JSON types, as ``plots.js`` reads it."""
        return {
            "kind": self.kind,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "series": [
                {
                    "label": curve.label,
                    "x": list(curve.x),
                    "y": [y if y is not None and math.isfinite(y) else None for y in curve.y],
                    **({} if curve.colour is None else {"colour": curve.colour}),
                }
                for curve in self.series
            ],
            "marks": [{"x": mark.x, "label": mark.label, "colour": mark.colour} for mark in self.marks],
            "limit": self.limit,
            "group": self.group,
        }


def histogram(
    counts: Sequence[int],
    *,
    width: int,
    title: str,
    x_label: str,
    y_label: str,
    limit: tuple[float, str] | None = None,
) -> Plot:
    """A bar for each count.

    Args:
        counts: bar *i* is the number of values from ``i * width + 1`` to ``(i + 1) * width``.
        width: values per bar.
        limit: position and label of a vertical line; omitted if it is beyond the bars.
    """
    edges = [number * width for number in range(len(counts) + 1)]
    # The last edge closes the last bar.
    series = Series(y_label, edges, [*counts, None])
    shown = limit if limit is not None and limit[0] <= edges[-1] else None
    return Plot(kind="bars", title=title, x_label=x_label, y_label=y_label, series=(series,), limit=shown)


def curves(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    group: str | None = None,
    marks: Sequence[Mark] = (),
) -> Plot:
    """A line for each series, all with the same axes.

    Args:
        series: the lines; each has its own x values, so runs of different length and interval can be combined.
        group: plots of one group share cursor and zoom.
        marks: vertical lines.
    """
    return Plot(
        kind="lines",
        title=title,
        x_label=x_label,
        y_label=y_label,
        series=tuple(series),
        group=group,
        marks=tuple(marks),
    )


def thinned(series: Series, most: int) -> Series:
    """A curve of at most ``most`` points that looks the same: the minimum and maximum of each interval are kept.

    The first and last point are kept, too. Gaps are kept only if a whole interval is empty.

    Args:
        series: the curve.
        most: maximum number of points; at least 4.
    """
    count = len(series.x)
    if count <= most:
        return series
    stretches = (most - 2) // 2
    kept = {0, count - 1}
    for number in range(stretches):
        first, end = number * count // stretches, (number + 1) * count // stretches
        points = [(y, at) for at, y in enumerate(series.y[first:end], first) if y is not None and math.isfinite(y)]
        kept |= {min(points)[1], max(points)[1]} if points else {first}
    places = sorted(kept)
    return replace(series, x=[series.x[at] for at in places], y=[series.y[at] for at in places])
