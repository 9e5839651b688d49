"""``finray inspect``: what training will see, on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finray.cli import show
from finray.config.load import load_config

if TYPE_CHECKING:
    # At run time these would import NumPy and Transformers, which other commands have no use for.
    from finray.inspection.measure import Histogram, Inspection, RowView
    from finray.inspection.prompt_parity import ServingDifference
    from finray.inspection.token_checks import Check
    from finray.inspection.token_views import TokenView

_STYLES = {"ok": "green", "note": "cyan", "warning": "bold yellow", "problem": "bold red"}
_LEARNED = "bold green"
_MASKED = "dim"
_ONLY = {"trained": "bold yellow", "served": "bold cyan"}
_BARS = 16
_BAR_WIDTH = 50
_SHOWN_TOKENS = 400


def inspect(
    config: Annotated[Path, typer.Argument(help="YAML config file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: section.field=value.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write everything as one HTML page here.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Examples shown, spread over the training rows.")] = 3,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Show this row: FILE:NUMBER of the source, or index in the training rows. May be repeated."),
    ] = None,
    compare: Annotated[int, typer.Option(min=0, help="Rows compared with what a server renders; 0 for all.")] = 1000,
) -> None:
    """Show rows as tokens, what is learned of them, and what is wrong with the data; no training, no GPU."""
    from finray.inspection.inspect import inspect as run_inspection
    from finray.inspection.page import write_page

    settings = load_config(config, overrides or [])
    found = run_inspection(settings, examples=rows, chosen=row or [], compared=compare or None)
    console = show.console()
    print_inspection(console, found)
    if html is not None:
        write_page(found, html)
        console.print(f"\nwrote {html}", highlight=False, markup=False, soft_wrap=True)
    if found.refusal is not None:
        raise found.refusal


def print_inspection(console: Console, found: Inspection) -> None:
    """Print an inspection, so that it can be read without colours too."""
    from finray.inspection.findings import findings, verdict

    checks = findings(found)
    level, sentence = verdict(checks)
    header = found.header
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("source", header.sources),
        ("model", header.model),
        ("format", header.format),
        ("learned", header.learned),
        ("max_length", f"{header.max_length:,}"),
    ):
        facts.add_row(Text(label, style="dim"), Text(value))
    console.print(facts)
    console.print(Text(f"\n{sentence}\n", style=_STYLES[level]))
    if found.splits:
        console.print(_splits(found))
    for split in found.splits[:1]:
        console.print(Text(f"\nrow lengths of {split.name} (tokens)", style="bold"))
        console.print(_bars(split.histogram, ascii_only=not _can_draw(console)))
        if split.packing is not None:
            console.print(
                f"{split.packing.packs:,} packs, {split.packing.fill:.1%} full: {split.packing.tokens_per_pack:,.0f} "
                f"of {split.packing.capacity:,} tokens and {split.packing.rows_per_pack:.1f} rows in each",
                highlight=False,
            )
    console.print(Text("\nchecks", style="bold"))
    console.print(_checks(checks))
    for difference in found.serving.differences:
        _print_difference(console, difference)
    for view in found.examples:
        _print_row(console, view)


def _can_draw(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _splits(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("split")
    for column in ("rows", "tokens", "learned", "share", "cut off", "dropped", "answers lost", "shortest", "longest"):
        table.add_column(column, justify="right")
    for split in found.splits:
        counts = split.counts
        dropped = sum(counts.get(key, 0) for key in ("dropped_too_long", "unlearnable", "answers_lost", "bad_rows"))
        numbers = (split.rows, split.tokens, split.supervised)
        # Rows held out by ratio are counted with those that they were taken from.
        lost = (counts.get("truncated", 0), dropped, counts.get("answers_lost", 0)) if counts else ("-", "-", "-")
        table.add_row(
            Text(split.name, style="bold"),
            *(f"{number:,}" for number in numbers),
            f"{split.supervised / split.tokens:.1%}",
            *(f"{number:,}" if isinstance(number, int) else number for number in lost),
            *(f"{number:,}" for number in (split.quantiles[0], split.quantiles[3])),
        )
    return table


def _bars(lengths: Histogram, *, ascii_only: bool) -> Table:
    joined = -(-len(lengths.counts) // _BARS)
    counts = [sum(lengths.counts[at : at + joined]) for at in range(0, len(lengths.counts), joined)]
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column()
    for number, count in enumerate(counts):
        width = lengths.width * joined
        size = max(1, round(count / max(counts) * _BAR_WIDTH)) if count else 0
        bar = Text(("#" if ascii_only else "█") * size, style="green")
        table.add_row(f"{number * width + 1:,} to {(number + 1) * width:,}", f"{count:,}", bar)
    return table


def _checks(checks: Sequence[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        finding = Text(check.finding)
        if check.where and check.level in ("problem", "warning"):
            finding.append("\n" + "; ".join(check.where), style="dim")
        table.add_row(Text(check.level, style=_STYLES[check.level]), Text(check.name, style="bold"), finding)
    return table


def _print_row(console: Console, view: RowView) -> None:
    title = (
        f"\n{view.split}, row {view.index:,} ({view.where}): {len(view.tokens):,} tokens, {view.supervised:,} learned"
    )
    console.print(Text(title, style="bold"))
    console.print(row_text(view.tokens, brackets=_brackets(console)), soft_wrap=True)


def _brackets(console: Console) -> tuple[str, str] | None:
    """What marks learned text where there are no colours."""
    if console.is_terminal and not console.no_color:
        return None
    return ("⟦", "⟧") if _can_draw(console) else ("[[", "]]")


def row_text(tokens: Sequence[TokenView], *, brackets: tuple[str, str] | None) -> Text:
    """A row as text, learned tokens in another style; between brackets where there are any."""
    half = _SHOWN_TOKENS // 2
    left_out = max(0, len(tokens) - 2 * half)
    text = _runs(tokens[: half if left_out else len(tokens)], brackets)
    if left_out:
        text.append(f" ... {left_out:,} tokens are not shown ... ", style="italic")
        text.append_text(_runs(tokens[-half:], brackets))
    return text


def _runs(tokens: Sequence[TokenView], brackets: tuple[str, str] | None) -> Text:
    text = Text()
    opened, closed = brackets or ("", "")
    for learned, run in groupby(tokens, key=lambda token: token.learned):
        joined = visible("".join(token.text for token in run))
        text.append(f"{opened}{joined}{closed}" if learned else joined, style=_LEARNED if learned else _MASKED)
    return text


def visible(text: str) -> str:
    """Text for a terminal: characters that would steer it are written out."""
    from finray.inspection.page import segments

    return "".join(f"<{part.text}>" if part.kind == "control" else part.text for part in segments(text))


def _print_difference(console: Console, difference: ServingDifference) -> None:
    from finray.inspection.page import around

    count = "1 answer" if difference.count == 1 else f"{difference.count:,} answers"
    console.print(
        Text(
            f"\n{count} {'follows' if difference.count == 1 else 'follow'} another prompt than the served one; "
            f"{difference.where}, message {difference.turn + 1}, from token {difference.position}:",
            style="bold red",
        )
    )
    text = Text()
    for piece in around(difference):
        shown = [visible("".join(token.text for token in part)) for part in (piece.head, piece.tail)]
        if piece.kind == "same":
            gap = f" ... {piece.left_out:,} equal tokens ... " if piece.left_out else ""
            text.append(gap.join(shown), style=_MASKED)
        else:
            text.append(f"{{only {piece.kind}: {shown[0]}}}", style=_ONLY[piece.kind])
    console.print(text, soft_wrap=True)
