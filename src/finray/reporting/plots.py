"""Interactive plots of a page. What they look like and how they behave is in ``plots.js``, which draws with uPlot.

uPlot is vendored because a page stays small enough to be mailed: 51 kB of script, where plotly's smallest bundle has
1.1 MB and its Python package 4.8 MB. It zooms, links the cursors of several plots, and draws a million points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Series:
    """Values by x, ascending in x. A value that is None or not finite is a gap in the curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot, as :func:`histogram` and :func:`curves` make it and templates show it: ``{{ figure(plot) }}``.

    Attributes:
        limit: place and label of a vertical line.
        group: plots of one group share their x axis: cursor and zoom.
    """

    kind: Literal["bars", "lines"]
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit: tuple[float, str] | None = None
    group: str | None = None
    log: bool = False

    def plain(self) -> dict[str, Any]:
        """The plot as JSON types, as ``plots.js`` reads it."""
        return {
            "kind": self.kind,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "series": [{"label": one.label, "x": list(one.x), "y": [_finite(y) for y in one.y]} for one in self.series],
            "limit": self.limit,
            "group": self.group,
            "log": self.log,
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
        counts: bar *i* stands for values from ``i * width + 1`` to ``(i + 1) * width``.
        width: values per bar.
        limit: place and label of a vertical line; it is left out where the bars do not reach it.
    """
    edges = [number * width for number in range(len(counts) + 1)]
    # The last edge closes the last bar and has none of its own.
    series = Series(y_label, edges, [*counts, None])
    shown = limit if limit is not None and limit[0] <= edges[-1] else None
    return Plot(kind="bars", title=title, x_label=x_label, y_label=y_label, series=(series,), limit=shown)


def curves(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, group: str | None = None, log: bool = False
) -> Plot:
    """A line for each series, all with the same axes.

    Args:
        series: the lines; each has its own x values, so runs of different length and interval go together.
        group: plots of one group share cursor and zoom.
        log: whether the y axis is logarithmic; values that are not positive are gaps then.
    """
    if log:
        series = [Series(one.label, one.x, [y if y is not None and y > 0 else None for y in one.y]) for one in series]
    return Plot(kind="lines", title=title, x_label=x_label, y_label=y_label, series=tuple(series), group=group, log=log)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
