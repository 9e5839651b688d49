"""What an inspection of data found, and how a terminal shows it; ``page.py`` makes a page of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from finray.config.redact import redact_text
from finray.config.schema import Config
from finray.data.dataset.report import COUNTERS
from finray.errors import DataError
from finray.inspection.checks import Check, Level
from finray.inspection.labels import ClassBalance
from finray.inspection.measure import Duplicates, RowView, SplitView
from finray.inspection.prompt_parity import PromptParity
from finray.inspection.show import class_table, length_bars, split_table, stretches_text
from finray.inspection.tokens import shortened
from finray.results import AsIs, Result, Table
from finray.tracking.console import several

_STYLES = {"ok": "green", "note": "cyan", "warning": "bold yellow", "problem": "bold red"}
_SHOWN_TOKENS = 400
_ORDER: dict[Level, int] = {"problem": 0, "warning": 1, "note": 2, "ok": 3}
# Share of copies above which duplicates are a warning.
_MANY_COPIES = 0.01
# Counters of the preparation: the level if it is not zero, and the name of the check.
_COUNTERS: dict[str, tuple[Level, str]] = {
    "answers_lost": ("problem", "Answers lost"),
    "unlearnable": ("warning", "Nothing to learn"),
    "empty_answers": ("warning", "Empty answers"),
    "truncated": ("warning", "Rows cut off"),
    "dropped_too_long": ("warning", "Rows too long"),
    "bad_rows": ("warning", "Bad rows"),
    "system_unused": ("warning", "System message without effect"),
    "system_ignored": ("warning", "System message ignored"),
    "answers_rewritten": ("warning", "Answers rewritten"),
    "joined_words": ("warning", "Prompt and completion"),
    "calls_left_out": ("warning", "Tool calls left out"),
    "unpaired_tags": ("warning", "Tags of reasoning"),
    "special_in_prompts": ("warning", "Special tokens in prompts"),
    "doubled_eos": ("problem", "End token twice"),
    "equal_answers": ("warning", "Equal answers"),
    "inverted_margins": ("warning", "Margins below zero"),
    "unwanted_answers": ("warning", "Unwanted answers"),
    "numbers_as_text": ("note", "Numbers"),
    "tools_as_text": ("note", "Tools as text"),
    "split_conversations": ("note", "Conversations split"),
}
_MEANINGS = COUNTERS | {"split_conversations": "became several: the chat template rewrites earlier turns"}


@dataclass(frozen=True, slots=True)
class Inspection(Result):
    """Everything that ``finray inspect`` shows.

    Attributes:
        config: what was inspected.
        format: formats of the sources, and whether they were detected.
        prepared: directory of the prepared dataset.
        refusal: why preparation refused the data, if it did.
        classes: the labels of each split of labelled text; else none.
    """

    config: Config
    format: str
    prepared: str
    splits: tuple[SplitView, ...]
    duplicates: tuple[Duplicates, ...]
    checks: tuple[Check, ...]
    parity: PromptParity
    examples: tuple[RowView, ...]
    refusal: DataError | None = None
    classes: tuple[ClassBalance, ...] = ()

    @property
    def sources(self) -> str:
        """Sources of the rows."""
        data = self.config.data
        named = [data.source, *(entry.source for entry in data.mix), data.eval_source]
        return ", ".join(redact_text(source) for source in named if source is not None)

    def plain(self) -> dict[str, Any]:
        """The inspection as JSON types."""
        plain = asdict(self)
        return {
            "sources": self.sources,
            **{
                name: plain[name]
                for name in ("format", "prepared", "splits", "classes", "duplicates", "parity", "examples")
            },
            "checks": [asdict(check) for check in findings(self)],
            "refusal": None if self.refusal is None else self.refusal.to_dict(),
        }

    def print(self, console: Console) -> None:
        """On a terminal, readable without colours too."""
        unicode = console.encoding.lower().startswith("utf")
        # Brackets mark learned text where there are no colours.
        brackets = None if console.is_terminal and not console.no_color else ("⟦", "⟧") if unicode else ("[[", "]]")
        checks = findings(self)
        level, sentence = verdict(checks)
        data = self.config.data
        facts = Table.grid(padding=(0, 2))
        for label, value in (
            ("source", self.sources),
            ("model", self.config.model.name),
            ("format", self.format),
            ("learned", "labels") if self.classes else ("train_on", data.train_on),
            ("max_length", f"{data.max_length:,}"),
        ):
            facts.add_row(Text(label, style="dim"), Text(value))
        console.print(facts)
        console.print(Text(f"\n{sentence}\n", style=_STYLES[level]))
        if self.splits:
            console.print(split_table(self.splits, labelled=bool(self.classes)))
        if self.classes:
            console.print(Text("\nlabels", style="bold"))
            console.print(class_table(self.classes, self.splits))
        for split in self.splits[:1]:
            console.print(Text(f"\nrow lengths of {split.name} (tokens)", style="bold"))
            console.print(length_bars(split.histogram, bar="█" if unicode else "#"))
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
        for difference in self.parity.differences:
            follow = "1 answer follows" if difference.count == 1 else f"{difference.count:,} answers follow"
            place = f"{difference.where}, message {difference.turn + 1}, from token {difference.position}"
            title = f"\n{follow} another prompt than the served one; {place}:"
            console.print(Text(title, style="bold red"))
            console.print(AsIs(stretches_text(difference.excerpt())), soft_wrap=True)
        each = iter(self.examples)
        for view in each:
            learned = f", {view.supervised:,} learned" if view.label is None or view.supervised else ""
            size = f"{len(view.tokens):,} tokens{learned}{'' if view.label is None else f', label {view.label}'}"
            other = next(each) if view.side is not None else None
            if other is not None:
                size = f"{view.supervised:,} and {other.supervised:,} tokens of answers"
            what = "row" if other is None else "pair of row"
            console.print(Text(f"\n{view.split}, {what} {view.index:,} ({view.where}): {size}", style="bold"))
            tokens = view.tokens if other is None else view.tokens[: view.prompt]
            stretches = shortened(tokens, _SHOWN_TOKENS // 2, _SHOWN_TOKENS // 2)
            console.print(AsIs(stretches_text(stretches, brackets=brackets)), soft_wrap=True)
            if other is not None:
                # Both answers side by side, behind the prompt that they have in common.
                answers = [
                    stretches_text(
                        shortened(side.tokens[side.prompt :], _SHOWN_TOKENS // 4, _SHOWN_TOKENS // 4), brackets=brackets
                    )
                    for side in (view, other)
                ]
                table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold", expand=True)
                for side in (view, other):
                    table.add_column(side.title, ratio=1)
                table.add_row(*map(AsIs, answers))
                console.print(table)


def findings(inspection: Inspection) -> tuple[Check, ...]:
    """All checks: prompt parity, duplicates, the counters of the preparation, special tokens; the worst first."""
    counted = [
        Check(
            f"{name} ({split.name})",
            level,
            f"{count:,} of {of:,} rows {_MEANINGS[key]}",
            count,
            of,
            split.cut_at if key == "truncated" else split.places.get(key, ()),
        )
        for split in inspection.splits
        for of in [split.counts.get("source_rows", split.rows)]
        for key, (level, name) in _COUNTERS.items()
        if (count := split.counts.get(key, 0)) > 0
    ]
    checks = [
        *([] if inspection.classes else [parity_check(inspection.parity)]),
        *(_duplicates(duplicates) for duplicates in inspection.duplicates),
        *counted,
        *inspection.checks,
    ]
    return tuple(sorted(checks, key=lambda check: _ORDER[check.level]))


def verdict(checks: tuple[Check, ...]) -> tuple[Level, str]:
    """The worst level, and a sentence with the number of problems or warnings."""
    problems, warnings = (sum(check.level == level for check in checks) for level in ("problem", "warning"))
    if problems:
        return "problem", f"{problems} problem{'s' if problems > 1 else ''} that will hurt training"
    if warnings:
        return "warning", f"{warnings} thing{'s' if warnings > 1 else ''} to look at"
    return checks[0].level, "No problems found"


def parity_check(parity: PromptParity) -> Check:
    """The comparison with served prompts, in a sentence."""
    name = "Training continues the served prompt"
    rows = f"{parity.rows:,} of {parity.of:,} rows compared"
    if not parity.turns and not parity.refused:
        return Check(name, "ok", "plain text has no prompt: nothing to compare", 0, parity.rows)
    if parity.holds:
        finding = f"{rows}: each of {parity.turns:,} answers continues exactly the prompt that a server renders"
        return Check(name, "ok", finding, 0, parity.turns)
    differing = parity.turns - parity.matching
    parts = []
    if differing:
        parts.append(f"{differing:,} of {parity.turns:,} answers follow another prompt than a server will render")
    if parity.refused:
        parts.append(f"the chat template refuses a prompt of {parity.refused:,} rows ({parity.refusal})")
    places = tuple(difference.where for difference in parity.differences[:3])
    total = parity.turns + parity.refused
    return Check(name, "problem", f"{rows}: {'; '.join(parts)}", differing + parity.refused, total, places)


def _duplicates(duplicates: Duplicates) -> Check:
    where = tuple(" = ".join(group.where) for group in duplicates.examples[:3])
    rows, of = f"{duplicates.rows:,}", f"{duplicates.of:,}"
    if len(duplicates.splits) == 1:
        name = f"Duplicates inside {duplicates.splits[0]}"
        if not duplicates.rows:
            return Check(name, "ok", f"no two of the {of} rows have the same tokens", 0, duplicates.of)
        level: Level = "warning" if duplicates.rows > duplicates.of * _MANY_COPIES else "note"
        finding = (
            f"{rows} of {of} rows ({duplicates.rows / duplicates.of:.2%}) say what an earlier row says, to the token"
        )
        return Check(name, level, finding, duplicates.rows, duplicates.of, where)
    first, second = duplicates.splits
    name = f"Rows of {second} in {first}"
    if not duplicates.rows:
        return Check(name, "ok", f"none of the {of} rows of {second} is in {first}", 0, duplicates.of)
    finding = f"{rows} of {of} rows of {second} are also in {first}, so scores on them say little"
    return Check(name, "warning", finding, duplicates.rows, duplicates.of, where)
