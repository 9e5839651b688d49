"""What a prepared dataset holds: counts, lengths, packs, duplicates, and rows token by token.

Nothing here prints; the command line shows an :class:`Inspection` on a terminal or as a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.data.dataset.prepared import PreparedSplit
from finray.data.sampling.packing import plan_packs
from finray.errors import DataError
from finray.inspection.checks import Check, TokenScan
from finray.inspection.prompt_parity import PromptParity
from finray.inspection.tokens import SpecialTokens, TokenView, token_views

IntArray = npt.NDArray[np.int64]

_BINS = 32
_SHOWN_GROUPS = 5
_SHOWN_PLACES = 4
_EXTREMES = 5
_PREVIEW_TOKENS = 64
_PREVIEW_CHARACTERS = 100
_ANSWERING_ROLES = ("assistant", "model")
_AROUND_ROLES = "<|>[]#: \n"


@dataclass(frozen=True, slots=True)
class Header:
    """What was inspected, as text.

    Attributes:
        model: model name.
        sources: sources of the rows.
        format: formats of the sources, and whether they were detected.
        train_on: ``data.train_on``.
        max_length: ``data.max_length``.
        packing: ``data.packing``.
        kind: what rows are: ``chat``, ``completion`` or ``text``.
        prepared: directory of the prepared dataset.
    """

    model: str
    sources: str
    format: str
    train_on: str
    max_length: int
    packing: bool
    kind: str
    prepared: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Rows by length: bin *i* counts lengths of ``i * width + 1`` to ``(i + 1) * width`` tokens."""

    width: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows fill packs of ``capacity`` tokens; ``padded_fill`` is the fill if all were padded to the longest."""

    capacity: int
    packs: int
    fill: float
    rows_per_pack: float
    tokens_per_pack: float
    padded_fill: float


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row in one line: source, size, the end of its first prompt, and the beginning of what is learned after it."""

    index: int
    where: str
    tokens: int
    supervised: int
    prompt: str
    learned: str


@dataclass(frozen=True, slots=True)
class DuplicateGroup:
    """Rows with the same tokens: how many, where some of them are, and one of them."""

    count: int
    where: tuple[str, ...]
    row: RowSummary


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Exact duplicates.

    Attributes:
        splits: one name (copies inside a split), or two (rows of the second that are also in the first).
        rows: copies beyond the first of each text, or rows of the second split that the first has too.
        groups: number of distinct texts among them.
        of: rows that were compared (of the second split, if there are two).
        examples: the largest groups.
    """

    splits: tuple[str, ...]
    rows: int
    groups: int
    of: int
    examples: tuple[DuplicateGroup, ...]


@dataclass(frozen=True, slots=True)
class SplitView:
    """A split in numbers.

    Attributes:
        name: ``train``, ``eval`` or ``test``.
        rows, tokens, supervised: totals; supervised tokens are the targets of the loss.
        quantiles: tokens of the shortest row, the median, the 95th percentile and the longest.
        counts: counters of the preparation (rows read, truncated, dropped and so on); empty if the split was held out
            of another one's rows.
        histogram: rows by length.
        packing: None without packing, and for splits that are not trained on.
        longest, shortest: a few rows.
    """

    name: str
    rows: int
    tokens: int
    supervised: int
    quantiles: tuple[int, int, int, int]
    counts: Mapping[str, int]
    histogram: Histogram
    packing: Packing | None
    longest: tuple[RowSummary, ...]
    shortest: tuple[RowSummary, ...]

    @property
    def dropped(self) -> int:
        """Source rows that became no row."""
        return sum(self.counts.get(key, 0) for key in ("dropped_too_long", "unlearnable", "answers_lost", "bad_rows"))


@dataclass(frozen=True, slots=True)
class RowView:
    """A row, token by token."""

    split: str
    index: int
    where: str
    tokens: tuple[TokenView, ...]

    @property
    def supervised(self) -> int:
        """Number of targets; the first token is never one."""
        return sum(token.learned for token in self.tokens[1:])


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that ``finray inspect`` shows; ``refusal`` is why preparation refused the data, if it did."""

    header: Header
    splits: tuple[SplitView, ...]
    duplicates: tuple[Duplicates, ...]
    checks: tuple[Check, ...]
    parity: PromptParity
    examples: tuple[RowView, ...]
    refusal: DataError | None = None


@dataclass(frozen=True)
class Inspector:
    """Measures the splits of a prepared dataset.

    Args:
        header: what is inspected.
        splits: name to rows; the first is trained on.
        counters: split name to the counters of its preparation.
        tokenizer: the Transformers tokenizer.
        tokens: its special tokens.
    """

    header: Header
    splits: Mapping[str, PreparedSplit]
    counters: Mapping[str, Mapping[str, int]]
    tokenizer: Any
    tokens: SpecialTokens

    def inspect(self, parity: PromptParity, *, examples: int, chosen: Sequence[str] = ()) -> Inspection:
        """Measure everything.

        Args:
            parity: the comparison with what a server renders.
            examples: number of rows shown, spread over the training rows, if none is chosen.
            chosen: rows to show, by index in the training split or by ``file:row``.

        Raises:
            DataError: a chosen row does not exist.
        """
        header, names = self.header, list(self.splits)
        scan = TokenScan(self.tokens, self.tokenizer, max_length=header.max_length, whole=header.train_on == "all")
        for rows in self.splits.values():
            scan.add(rows)
        train = self.splits[names[0]]
        count = min(examples, len(train))
        found = [(names[0], number * len(train) // count) for number in range(count)]
        if chosen:
            found = [pair for wanted in chosen for pair in self._find(wanted)]
        inside = [self._duplicates(name) for name in names]
        across = [self._shared(first, second) for first, second in combinations(names, 2)]
        return Inspection(
            header=header,
            splits=tuple(self._split(name, packed=name == names[0] and header.packing) for name in names),
            duplicates=(*inside, *across),
            checks=scan.checks(kind=header.kind),
            parity=parity,
            examples=tuple(self._view(split, number) for split, number in found),
        )

    def _split(self, name: str, *, packed: bool) -> SplitView:
        rows = self.splits[name]
        low, median, high, top = np.quantile(rows.lengths, [0, 0.5, 0.95, 1], method="lower").tolist()
        longest, shortest = (np.argsort(key, kind="stable")[:_EXTREMES] for key in (-rows.lengths, rows.lengths))
        return SplitView(
            name=name,
            rows=len(rows),
            tokens=int(rows.lengths.sum()),
            supervised=int(rows.supervised.sum()),
            quantiles=(low, median, high, top),
            counts=dict(self.counters.get(name, {})),
            histogram=histogram(rows.lengths),
            packing=packing(rows.lengths, self.header.max_length) if packed else None,
            longest=tuple(self._summary(rows, int(number)) for number in longest),
            shortest=tuple(self._summary(rows, int(number)) for number in shortest),
        )

    def _summary(self, rows: PreparedSplit, number: int) -> RowSummary:
        ids, mask = rows.row(number)
        start = int(mask.argmax()) if mask.any() else len(ids)
        stop = start + int((mask[start:] == 0).argmax()) if (mask[start:] == 0).any() else len(ids)
        decode = self.tokenizer.backend_tokenizer.decode
        # A stretch of tokens may begin or end inside a character.
        text = decode(ids[max(0, start - _PREVIEW_TOKENS) : start].tolist(), skip_special_tokens=False).strip("\ufffd")
        before = " ".join(last_question(text, self.tokens.names.values()).split())
        learned = decode(ids[start : min(stop, start + _PREVIEW_TOKENS)].tolist(), skip_special_tokens=True)
        after = " ".join(learned.strip("\ufffd").split())
        return RowSummary(
            number,
            rows.where(number),
            int(rows.lengths[number]),
            int(rows.supervised[number]),
            before if len(before) <= _PREVIEW_CHARACTERS else f"…{before[1 - _PREVIEW_CHARACTERS :]}",
            after if len(after) <= _PREVIEW_CHARACTERS else f"{after[: _PREVIEW_CHARACTERS - 1]}…",
        )

    def _duplicates(self, name: str) -> Duplicates:
        rows = self.splits[name]
        # A mix may repeat a row on purpose: a row is not a duplicate of itself.
        pairs = np.unique(np.stack([rows.digests, rows.source_rows], axis=1), axis=0)
        digests, counts = np.unique(pairs[:, 0], return_counts=True)
        copied = digests[counts > 1]
        extra = int((counts[counts > 1] - 1).sum())
        return Duplicates((name,), extra, len(copied), len(pairs), self._groups([rows], copied))

    def _shared(self, first: str, second: str) -> Duplicates:
        known, asked = self.splits[first], self.splits[second]
        found = np.isin(asked.digests, known.digests)
        shared = np.unique(asked.digests[found])
        examples = self._groups([known, asked], shared)
        return Duplicates((first, second), int(found.sum()), len(shared), len(asked), examples)

    def _groups(self, splits: list[PreparedSplit], digests: IntArray) -> tuple[DuplicateGroup, ...]:
        """The largest groups of rows with one of these digests; places are taken from every split in turn."""
        total = np.zeros(len(digests), dtype=np.int64)
        for rows in splits:
            chosen = rows.digests[np.isin(rows.digests, digests)]
            total += np.bincount(np.searchsorted(digests, chosen), minlength=len(digests))
        groups = []
        for at in np.argsort(-total, kind="stable")[:_SHOWN_GROUPS]:
            numbers = [np.flatnonzero(rows.digests == digests[at]) for rows in splits]
            limit = max(1, _SHOWN_PLACES // len(splits))
            where = [
                rows.where(int(number)) for rows, found in zip(splits, numbers, strict=True) for number in found[:limit]
            ]
            groups.append(DuplicateGroup(int(total[at]), tuple(where), self._summary(splits[0], int(numbers[0][0]))))
        return tuple(groups)

    def _find(self, wanted: str) -> list[tuple[str, int]]:
        name, rows = next(iter(self.splits.items()))
        if wanted.isdigit():
            if int(wanted) >= len(rows):
                raise DataError(
                    f"there is no prepared row {wanted}: {name} has {len(rows):,} rows",
                    where="--row",
                    repair="count from 0, or name the source as FILE:NUMBER",
                )
            return [(name, int(wanted))]
        found = [
            (split, number)
            for split, some in self.splits.items()
            for number in range(len(some))
            if f"/{some.where(number)}".endswith(f"/{wanted}")
        ]
        if not found:
            raise DataError(
                f"no prepared row comes from {wanted}",
                where="--row",
                repair="give FILE:NUMBER as in messages (rows count from 1); the row may have been dropped",
            )
        return found

    def _view(self, split: str, number: int) -> RowView:
        rows = self.splits[split]
        ids, mask = rows.row(number)
        views = token_views(ids.tolist(), mask.tolist(), self.tokenizer, self.tokens.special)
        return RowView(split, number, rows.where(number), views)


def last_question(prompt: str, special: Iterable[str]) -> str:
    """The last stretch of a prompt between special tokens, without the role name that opens the answer."""
    names = sorted(filter(None, special), key=len, reverse=True)
    parts = re.split("|".join(map(re.escape, names)), prompt) if names else [prompt]
    parts = [part for part in parts if part.strip()]
    if len(parts) > 1 and parts[-1].strip(_AROUND_ROLES) in _ANSWERING_ROLES:
        parts.pop()
    return parts[-1].strip() if parts else ""


def histogram(lengths: IntArray) -> Histogram:
    """Rows by length, in at most 32 bins whose width is a power of two."""
    longest = int(lengths.max())
    width = 1
    while width * _BINS < longest:
        width *= 2
    counts = np.bincount((lengths - 1) // width)
    return Histogram(width, tuple(counts.tolist()))


def packing(lengths: IntArray, capacity: int) -> Packing:
    """How rows of these lengths fill packs."""
    plan = plan_packs(lengths, capacity)
    tokens = int(lengths.sum())
    return Packing(
        capacity=capacity,
        packs=len(plan),
        fill=plan.fill,
        rows_per_pack=len(lengths) / len(plan),
        tokens_per_pack=tokens / len(plan),
        padded_fill=tokens / (len(lengths) * int(lengths.max())),
    )
