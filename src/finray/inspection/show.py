"""Tables and rows of an inspection, as a terminal shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import rich.table
from rich.text import Text

from finray.inspection.labels import ClassBalance
from finray.inspection.measure import Histogram, SplitView
from finray.inspection.tokens import Stretch, segments
from finray.limits import cut
from finray.results import Table

_LEARNED = "bold green"
_MASKED = "dim"
_ONLY = {"trained": "bold yellow", "served": "bold cyan"}
_BARS = 16
_BAR_WIDTH = 50
_SHOWN_CLASSES = 20


def stretches_text(stretches: Iterable[Stretch], *, brackets: tuple[str, str] | None = None) -> Text:
    """Tokens as text, learned ones in another style and, if there are any, between brackets.

    Characters that would control the terminal are written as code points.
    """
    text = Text()
    opened, closed = brackets or ("", "")
    for stretch in stretches:
        if stretch.kind == "gap":
            text.append(f" ... {stretch.left_out:,} tokens are not shown ... ", style="italic")
        for learned, run in groupby(stretch.tokens, key=lambda token: token.learned):
            parts = segments("".join(token.text for token in run))
            joined = "".join(f"<{part}>" if kind == "control" else part for kind, part in parts)
            if stretch.kind in _ONLY:
                text.append(f"{{only {stretch.kind}: {joined}}}", style=_ONLY[stretch.kind])
            else:
                text.append(f"{opened}{joined}{closed}" if learned else joined, style=_LEARNED if learned else _MASKED)
    return text


def split_table(splits: Sequence[SplitView], *, labelled: bool) -> Table:
    """Each split in numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("split")
    learned = ("labels",) if labelled else ("learned", "share")
    for column in ("rows", "tokens", *learned, "cut off", "dropped", "answers lost", "shortest", "longest"):
        table.add_column(column, justify="right")
    for split in splits:
        counts = split.counts
        lost = [f"{number:,}" for number in (counts.get("truncated", 0), split.dropped, counts.get("answers_lost", 0))]
        table.add_row(
            Text(split.name, style="bold"),
            *(f"{number:,}" for number in (split.rows, split.tokens, split.supervised)),
            *([] if labelled else [f"{split.supervised / split.tokens:.1%}"]),
            # Rows held out by ratio are counted with those that they were taken from.
            *(lost if counts else ["-"] * 3),
            *(f"{number:,}" for number in (split.quantiles[0], split.quantiles[3])),
        )
    return table


def class_table(classes: Sequence[ClassBalance], splits: Sequence[SplitView]) -> Table:
    """Rows of each class in each split, the largest classes of the training rows first; the range of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    if classes[0].problem == "regression":
        table.add_column("split")
        for column in ("least", "mean", "largest"):
            table.add_column(column, justify="right")
        for balance in classes:
            numbers = (f"{balance.low:g}", f"{balance.mean:g}", f"{balance.high:g}")
            table.add_row(Text(balance.split, style="bold"), *numbers)
        return table
    table.add_column("class")
    for balance in classes:
        table.add_column(balance.split, justify="right")
    counts = [dict(balance.rows) for balance in classes]
    names = sorted({name: None for rows in counts for name in rows}, key=lambda name: -counts[0].get(name, 0))
    for name in names[:_SHOWN_CLASSES]:
        in_splits = ((rows.get(name, 0), split.rows) for rows, split in zip(counts, splits, strict=True))
        table.add_row(Text(cut(name, 60), style="bold"), *(f"{rows:,} ({rows / size:.1%})" for rows, size in in_splits))
    if len(names) > _SHOWN_CLASSES:
        table.add_row(Text(f"and {len(names) - _SHOWN_CLASSES:,} more", style="dim"))
    return table


def length_bars(lengths: Histogram, *, bar: str) -> rich.table.Table:
    """A histogram with bars of this character."""
    joined = -(-len(lengths.counts) // _BARS)
    counts = [sum(lengths.counts[at : at + joined]) for at in range(0, len(lengths.counts), joined)]
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column()
    for number, count in enumerate(counts):
        width = lengths.width * joined
        size = max(1, round(count / max(counts) * _BAR_WIDTH)) if count else 0
        first, last = number * width + 1, (number + 1) * width
        lengths_here = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        table.add_row(lengths_here, f"{count:,}", Text(bar * size, style="green"))
    return table
