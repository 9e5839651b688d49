"""An inspection as one HTML page that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from markupsafe import Markup, escape

from finray.inspection.checks import findings, verdict
from finray.inspection.measure import Inspection, SplitView
from finray.inspection.tokens import Stretch, segments, shortened
from finray.reporting.page import render
from finray.reporting.plots import Plot, histogram

_SHOWN_TOKENS = 1600
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
        token_parts={split.name: token_parts(split) for split in inspection.splits},
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


def token_parts(split: SplitView) -> list[Part]:
    """Where the tokens of a split went, as CSS class, label, count and share: learned, prompt, cut off, dropped."""
    return _parts(
        ("learned", "learned", split.supervised),
        ("prompt", "not learned", split.tokens - split.supervised),
        ("cut", "cut off", split.counts.get("truncated_tokens", 0)),
        ("dropped", "dropped", split.counts.get("dropped_tokens", 0)),
    )


def row_parts(split: SplitView) -> list[Part]:
    """What became of the source rows; nothing for a split that was held out of another one's rows."""
    counts = split.counts
    if not counts:
        return []
    cut = counts.get("truncated", 0)
    return _parts(
        ("learned", "whole", counts.get("rows", split.rows) - cut),
        ("cut", "cut off", cut),
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
