"""An inspection on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import rich.table
from rich.console import Console
from rich.text import Text

from finray.inspection.checks import findings, verdict
from finray.inspection.tokens import segments, shortened
from finray.limits import cut
from finray.results import AsIs, Table
from finray.tracking.console import several

if TYPE_CHECKING:
    from finray.inspection.measure import Histogram, Inspection
    from finray.inspection.tokens import Stretch

_STYLES = {"ok": "green", "note": "cyan", "warning": "bold yellow", "problem": "bold red"}
_LEARNED = "bold green"
_MASKED = "dim"
_ONLY = {"trained": "bold yellow", "served": "bold cyan"}
_BARS = 16
_BAR_WIDTH = 50
_SHOWN_TOKENS = 400
_SHOWN_CLASSES = 20


def print_inspection(console: Console, found: Inspection) -> None:
    """Print an inspection, readable without colours too."""
    unicode = console.encoding.lower().startswith("utf")
    # Brackets mark learned text where there are no colours.
    brackets = None if console.is_terminal and not console.no_color else ("⟦", "⟧") if unicode else ("[[", "]]")
    checks = findings(found)
    level, sentence = verdict(checks)
    data = found.config.data
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("source", found.sources),
        ("model", found.config.model.name),
        ("format", found.format),
        ("learned", "labels") if found.classes else ("train_on", data.train_on),
        ("max_length", f"{data.max_length:,}"),
    ):
        facts.add_row(Text(label, style="dim"), Text(value))
    console.print(facts)
    console.print(Text(f"\n{sentence}\n", style=_STYLES[level]))
    if found.splits:
        console.print(_splits(found))
    if found.classes:
        console.print(Text("\nlabels", style="bold"))
        console.print(_classes(found))
    for split in found.splits[:1]:
        console.print(Text(f"\nrow lengths of {split.name} (tokens)", style="bold"))
        console.print(_bars(split.histogram, bar="█" if unicode else "#"))
        if split.packing is not None:
            console.print(
                f"{several(split.packing.packs, 'pack')}, {split.packing.fill:.1%} full: "
                f"{split.packing.tokens_per_pack:,.0f} of {split.packing.capacity:,} tokens and "
                f"{split.packing.rows_per_pack:.1f} rows in each",
                highlight=False,
            )
    console.print(Text("\nchecks", style="bold"))
    table = Table.grid(padding=(0, 2))
    for check in checks:
        finding = Text(check.finding)
        if check.where and check.level in ("problem", "warning"):
            finding.append("\n" + "; ".join(check.where), style="dim")
        table.add_row(Text(check.level, style=_STYLES[check.level]), Text(check.name, style="bold"), finding)
    console.print(table)
    for difference in found.parity.differences:
        follow = "1 answer follows" if difference.count == 1 else f"{difference.count:,} answers follow"
        title = (
            f"\n{follow} another prompt than the served one; {difference.where}, message {difference.turn + 1}, from "
            f"token {difference.position}:"
        )
        console.print(Text(title, style="bold red"))
        console.print(AsIs(stretches_text(difference.excerpt())), soft_wrap=True)
    for view in found.examples:
        learned = f"{view.supervised:,} learned" if view.label is None else f"label {view.label}"
        size = f"{len(view.tokens):,} tokens, {learned}"
        console.print(Text(f"\n{view.split}, row {view.index:,} ({view.where}): {size}", style="bold"))
        stretches = shortened(view.tokens, _SHOWN_TOKENS // 2, _SHOWN_TOKENS // 2)
        console.print(AsIs(stretches_text(stretches, brackets=brackets)), soft_wrap=True)


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


def _splits(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("split")
    learned = ("labels",) if found.classes else ("learned", "share")
    for column in ("rows", "tokens", *learned, "cut off", "dropped", "answers lost", "shortest", "longest"):
        table.add_column(column, justify="right")
    for split in found.splits:
        counts = split.counts
        lost = [f"{number:,}" for number in (counts.get("truncated", 0), split.dropped, counts.get("answers_lost", 0))]
        table.add_row(
            Text(split.name, style="bold"),
            *(f"{number:,}" for number in (split.rows, split.tokens, split.supervised)),
            *([] if found.classes else [f"{split.supervised / split.tokens:.1%}"]),
            # Rows held out by ratio are counted with those that they were taken from.
            *(lost if counts else ["-"] * 3),
            *(f"{number:,}" for number in (split.quantiles[0], split.quantiles[3])),
        )
    return table


def _classes(found: Inspection) -> Table:
    """Rows of each class in each split, the largest classes of the training rows first; of numbers their range."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    if found.classes[0].problem == "regression":
        table.add_column("split")
        for column in ("least", "mean", "largest"):
            table.add_column(column, justify="right")
        for one in found.classes:
            table.add_row(Text(one.split, style="bold"), f"{one.low:g}", f"{one.mean:g}", f"{one.high:g}")
        return table
    table.add_column("class")
    for one in found.classes:
        table.add_column(one.split, justify="right")
    counts = [dict(one.rows) for one in found.classes]
    names = sorted({name: None for own in counts for name in own}, key=lambda name: -counts[0].get(name, 0))
    for name in names[:_SHOWN_CLASSES]:
        each = ((own.get(name, 0), split.rows) for own, split in zip(counts, found.splits, strict=True))
        table.add_row(Text(cut(name, 60), style="bold"), *(f"{rows:,} ({rows / size:.1%})" for rows, size in each))
    if len(names) > _SHOWN_CLASSES:
        table.add_row(Text(f"and {len(names) - _SHOWN_CLASSES:,} more", style="dim"))
    return table


def _bars(lengths: Histogram, *, bar: str) -> rich.table.Table:
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
