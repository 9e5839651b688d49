"""An inspection in sentences: everything that was looked at, the worst first."""

from __future__ import annotations

from finray.inspection.measure import Duplicates, Inspection, SplitView
from finray.inspection.prompt_parity import ServingCheck
from finray.inspection.token_checks import Check, Level

_ORDER: dict[Level, int] = {"problem": 0, "warning": 1, "note": 2, "ok": 3}
_MANY_COPIES = 0.01
_PLACES = 3

# Counter of the preparation, the level where it is not zero, its name, and what it says.
_COUNTERS: tuple[tuple[str, Level, str, str], ...] = (
    ("answers_lost", "problem", "Answers lost", "lost the whole answer to data.max_length"),
    ("unlearnable", "warning", "Nothing to learn", "had nothing to learn and were left out"),
    ("truncated", "warning", "Rows cut off", "were cut off at data.max_length"),
    ("dropped_too_long", "warning", "Rows too long", "were dropped: longer than data.max_length"),
    ("bad_rows", "warning", "Bad rows", "could not be used and were dropped"),
    ("system_ignored", "warning", "System message ignored", "have a system message that the chat template leaves out"),
    ("answers_rewritten", "warning", "Answers rewritten", "have an answer that the chat template changes"),
    ("tools_as_text", "note", "Tools as text", "have tools or calls that the chat template cannot write itself"),
    ("split_conversations", "note", "Conversations split", "became several: the chat template rewrites earlier turns"),
)


def findings(inspection: Inspection) -> tuple[Check, ...]:
    """All checks: serving, duplicates, the counters of the preparation, special tokens; the worst first."""
    checks = [
        serving_check(inspection.serving),
        *(_duplicates(found) for found in inspection.duplicates),
        *(check for split in inspection.splits for check in _counters(split)),
        *inspection.checks,
    ]
    return tuple(sorted(checks, key=lambda check: _ORDER[check.level]))


def verdict(checks: tuple[Check, ...]) -> tuple[Level, str]:
    """The worst level, and a sentence that counts."""
    for level, one, many in (
        ("problem", "problem that will hurt training", "problems that will hurt training"),
        ("warning", "thing to look at", "things to look at"),
    ):
        count = sum(check.level == level for check in checks)
        if count:
            return checks[0].level, f"{count} {one if count == 1 else many}"
    return checks[0].level, "Nothing wrong was found"


def serving_check(serving: ServingCheck) -> Check:
    """The comparison with serving, in a sentence."""
    name = "Training continues the served prompt"
    rows = f"{serving.rows:,} of {serving.of:,} rows compared"
    if not serving.turns and not serving.refused:
        return Check(name, "ok", "plain text has no prompt: nothing to compare", 0, serving.rows)
    if serving.holds:
        finding = f"{rows}: each of {serving.turns:,} answers continues exactly the prompt that serving renders"
        return Check(name, "ok", finding, 0, serving.turns)
    differing = serving.turns - serving.matching
    places = tuple(difference.where for difference in serving.differences[:_PLACES])
    parts = []
    if differing:
        parts.append(f"{differing:,} of {serving.turns:,} answers follow another prompt than serving will render")
    if serving.refused:
        parts.append(f"the chat template refuses the prompt of {serving.refused:,} answers ({serving.refusal})")
    finding = f"{rows}: {'; '.join(parts)}"
    return Check(name, "problem", finding, differing + serving.refused, serving.turns + serving.refused, places)


def _duplicates(found: Duplicates) -> Check:
    where = tuple(" = ".join(group.where) for group in found.examples[:_PLACES])
    if len(found.splits) == 1:
        (split,) = found.splits
        name = f"Duplicates inside {split}"
        if not found.rows:
            return Check(name, "ok", f"no two of the {found.of:,} rows have the same tokens", 0, found.of)
        level: Level = "warning" if found.rows > found.of * _MANY_COPIES else "note"
        finding = (
            f"{found.rows:,} of {found.of:,} rows ({found.rows / found.of:.2%}) are copies of {found.groups:,} others"
        )
        return Check(name, level, finding, found.rows, found.of, where)
    first, second = found.splits
    name = f"Rows of {second} in {first}"
    if not found.rows:
        return Check(name, "ok", f"none of the {found.of:,} rows of {second} is in {first}", 0, found.of)
    finding = f"{found.rows:,} of {found.of:,} rows of {second} are in {first} too, so scores on them mean less"
    return Check(name, "warning", finding, found.rows, found.of, where)


def _counters(split: SplitView) -> list[Check]:
    # A row that lost its answer has nothing to learn left: it is told once.
    counts = split.counts
    of = split.counts.get("source_rows", split.rows)
    return [
        Check(f"{name} ({split.name})", level, f"{count:,} of {of:,} rows {text}", count, of)
        for key, level, name, text in _COUNTERS
        if (count := counts.get(key, 0)) > 0
    ]
