"""An inspection as one HTML page that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from itertools import cycle

from markupsafe import Markup, escape

from finray.inspection.labels import ClassBalance
from finray.inspection.measure import SplitView
from finray.inspection.result import Inspection, findings, verdict
from finray.inspection.tokens import Stretch, segments, shortened
from finray.limits import cut
from finray.reporting.page import render
from finray.reporting.plots import Plot, histogram

_SHOWN_TOKENS = 1600
_SHOWN_CLASSES = 20
# Of the bars of classes.
_COLOURS = ("learned", "cut", "nothing", "dropped", "bad")
# White space is shown, but not selected and copied with the text.
_VISIBLE = {
    "space": Markup('<i class="sp"> </i>'),
    "line": Markup('<i class="w">↵</i>\n'),
    "tab": Markup('<i class="w">⇥</i>\t'),
}


def page(inspection: Inspection) -> str:
    """The whole page."""
    checks = findings(inspection)
    level, sentence = verdict(checks)
    limit = inspection.config.data.max_length
    return render(
        resources.files("finray.inspection").joinpath("page.html.j2").read_text(encoding="utf-8"),
        inspection=inspection,
        checks=checks,
        level=level,
        verdict=sentence,
        lengths={split.name: lengths_plot(split, limit) for split in inspection.splits},
        token_parts={split.name: token_parts(split, labelled=bool(inspection.classes)) for split in inspection.splits},
        class_parts={balance.split: class_parts(balance) for balance in inspection.classes},
        row_parts={split.name: row_parts(split) for split in inspection.splits},
        row_html=lambda tokens: stretches_html(shortened(tokens, _SHOWN_TOKENS // 2, _SHOWN_TOKENS // 2)),
        stretches_html=stretches_html,
    )


def lengths_plot(split: SplitView, limit: int) -> Plot:
    """Rows of a split by length, with ``data.max_length`` as a line."""
    lengths = split.histogram
    return histogram(
        lengths.counts,
        width=lengths.width,
        title=split.name,
        x_label="tokens in a row",
        y_label="rows",
        limit=(limit, f"max_length {limit:,}"),
    )


Part = tuple[str, str, int, float]


def token_parts(split: SplitView, *, labelled: bool = False) -> list[Part]:
    """Where the tokens of a split went, as CSS class, label, count and share: learned, prompt, cut off, dropped."""
    learned = 0 if labelled else split.supervised
    return _parts(
        ("learned", "learned", learned),
        ("prompt", "text" if labelled else "not learned", split.tokens - learned),
        ("cut", "cut off", split.counts.get("truncated_tokens", 0)),
        ("dropped", "dropped", split.counts.get("dropped_tokens", 0)),
    )


def class_parts(labels: ClassBalance) -> list[Part]:
    """The classes of a split with their rows, the largest first; nothing for numbers."""
    ordered = sorted(labels.rows, key=lambda counted: -counted[1])
    shown, rest = ordered[:_SHOWN_CLASSES], ordered[_SHOWN_CLASSES:]
    parts = [(key, cut(name, 60), rows) for key, (name, rows) in zip(cycle(_COLOURS), shown, strict=False)]
    return _parts(*parts, ("prompt", f"{len(rest):,} other classes", sum(rows for _, rows in rest)))


def row_parts(split: SplitView) -> list[Part]:
    """What became of the source rows; nothing for a split that was held out of another one's rows."""
    counts = split.counts
    if not counts:
        return []
    lost = counts.get("answers_lost", 0)
    # Those that lost their answer were truncated too, and are no rows.
    cut = counts.get("truncated", 0) - lost
    return _parts(
        ("learned", "whole", counts.get("rows", split.rows) - cut),
        ("cut", "cut off", cut),
        ("dropped", "lost their whole answer, dropped", lost),
        ("dropped", "too long, dropped", counts.get("dropped_too_long", 0)),
        ("nothing", "nothing to learn, dropped", counts.get("unlearnable", 0)),
        ("bad", "bad, dropped", counts.get("bad_rows", 0)),
    )


def _parts(*counted: tuple[str, str, int]) -> list[Part]:
    total = sum(count for _, _, count in counted) or 1
    return [(key, label, count, count / total) for key, label, count in counted if count > 0]


def stretches_html(stretches: Iterable[Stretch]) -> Markup:
    """Tokens as elements with their id as title; the first one that only one of two prompts has is framed."""
    parts: list[str] = []
    marked = False
    for stretch in stretches:
        if stretch.kind == "gap":
            parts.append(f'<span class="gap"> … {stretch.left_out:,} tokens are not shown … </span>')
        differs = stretch.kind in ("trained", "served")
        for token in stretch.tokens:
            classes = ["t", "l" if token.learned else "m", *(["s"] if token.special else [])]
            if differs:
                classes += [f"only-{stretch.kind}", *([] if marked else ["first"])]
                marked = True
            text = "".join(
                _VISIBLE.get(kind) or (escape(part) if kind == "text" else f'<i class="w">{part}</i>')
                for kind, part in segments(token.text)
            )
            # A token without text is a part of a character.
            shown = text or '<i class="w">⋯</i>'
            parts.append(f'<span class="{" ".join(classes)}" title="{token.id}">{shown}</span>')
    return Markup("".join(parts))
