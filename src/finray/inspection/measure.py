"""What a prepared dataset holds: counts, lengths, packs, duplicates, and rows token by token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.config.schema import DataConfig
from finray.data.dataset.prepared import PreparedSplit
from finray.data.formats.labels import Label
from finray.data.sampling.order import mix
from finray.data.sampling.packing import PackPlan
from finray.errors import DataError
from finray.inspection.checks import Check, TokenScan
from finray.inspection.labels import label_text
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
class Histogram:
    """Rows by length: bin *i* counts lengths of ``i * width + 1`` to ``(i + 1) * width`` tokens."""

    width: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackingView:
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
    """Exact duplicates."""

    splits: tuple[str, ...]  # one name (copies inside a split), or two (rows of the second that are also in the first)
    rows: int  # copies beyond the first of each text, or rows of the second split that the first has too
    groups: int  # number of distinct texts among them
    of: int  # rows that were compared (of the second split, if there are two)
    examples: tuple[DuplicateGroup, ...]  # the largest groups


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
        cut_at: some rows that were cut off, as ``file:row``.
        places: of other counters, some of the rows.
    """

    name: str
    rows: int
    tokens: int
    supervised: int
    quantiles: tuple[int, int, int, int]
    counts: Mapping[str, int]
    histogram: Histogram
    packing: PackingView | None
    longest: tuple[RowSummary, ...]
    shortest: tuple[RowSummary, ...]
    cut_at: tuple[str, ...] = ()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Source rows that became no row."""
        return sum(self.counts.get(key, 0) for key in ("dropped_too_long", "unlearnable", "answers_lost", "bad_rows"))


@dataclass(frozen=True, slots=True)
class RowView:
    """A row, token by token; ``label`` is that of labelled text, which has no token to learn, or of an answer that is
    ``desirable`` or not, and ``side`` is ``chosen`` or ``rejected`` for the rows of a pair, which follow each other."""

    split: str
    index: int
    where: str
    tokens: tuple[TokenView, ...]
    label: str | None = None
    side: str | None = None
    reference: float | None = None  # of a pair, log-probability of the answer (nats), where a run has computed it

    @property
    def title(self) -> str:
        """Of an answer: its side, and how likely the reference finds it."""
        return f"{self.side}" + (f", {self.reference:.1f} nats" if self.reference is not None else "")

    @property
    def supervised(self) -> int:
        """Number of targets; the first token is never one."""
        return sum(token.learned for token in self.tokens[1:])

    @property
    def prompt(self) -> int:
        """Number of tokens before the first that is learned."""
        return next((at for at, token in enumerate(self.tokens) if token.learned), len(self.tokens))


@dataclass(frozen=True)
class Inspector:
    """Measures the splits of a prepared dataset.

    Args:
        data: the data section of the config.
        splits: name to rows; the first is trained on.
        counters: split name to the counters of its preparation.
        tokenizer: the Transformers tokenizer.
        tokens: its special tokens.
        plan: how the training rows form packs; None if a step packs its own.
        cut_at: split name to some rows that were cut off.
        labels: split name to the labels of labelled text; nothing for other rows.
        places: split name to some rows of each counter.
        are_pairs: whether two rows each are a pair.
        desirable: split name to which of its answers are desirable; nothing for other rows.
    """

    data: DataConfig
    splits: Mapping[str, PreparedSplit]
    counters: Mapping[str, Mapping[str, int]]
    tokenizer: Any
    tokens: SpecialTokens
    plan: PackPlan | None
    cut_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Sequence[Label]] = field(default_factory=dict)
    places: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    are_pairs: bool = False
    desirable: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def _read(self, name: str, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Tokens of a row, and which are learned; labelled text has token types there, and no token to learn."""
        ids, mask = self.splits[name].row(number)
        return ids, np.zeros_like(mask) if name in self.labels else mask

    def checks(self, *, kind: str) -> tuple[Check, ...]:
        """Checks of the tokens of every row of this kind (``chat``, ``completion`` or ``text``)."""
        whole = self.data.train_on == "all"
        in_parts = any(counts.get("partly_learned") for counts in self.counters.values())
        length = self.data.max_length
        scan = TokenScan(self.tokens, self.tokenizer, max_length=length, whole=whole, in_parts=in_parts)
        for rows in self.splits.values():
            scan.add(rows, labelled=bool(self.labels))
        # For labelled text those that are not about what is generated.
        return tuple(check for check in scan.checks(kind=kind) if not self.labels or check.name == "Unknown tokens")

    def examples(self, count: int, chosen: Sequence[str]) -> tuple[RowView, ...]:
        """So many rows (or pairs) spread over the training rows; or those chosen, by index in them or by ``file:row``.
        Raises DataError: a chosen row does not exist."""
        name, train = next(iter(self.splits.items()))
        starts = train.groups.starts[:-1] if self.are_pairs else np.arange(len(train))
        count = min(count, len(starts))
        places = [(name, int(starts[number * len(starts) // count])) for number in range(count)]
        if chosen:
            places = [pair for wanted in chosen for pair in self._find(wanted)]
        if self.are_pairs:
            firsts = dict.fromkeys((split, number - number % 2) for split, number in places)
            places = [(split, first + place) for split, first in firsts for place in (0, 1)]
        views = []
        for split, number in places:
            rows = self.splits[split]
            ids, mask = self._read(split, number)
            tokens = token_views(ids.tolist(), mask.tolist(), self.tokenizer, self.tokens.special)
            label = label_text(self.labels[split][number]) if self.labels else None
            if self.desirable:
                label = "desirable" if self.desirable[split][number] else "undesirable"
            side = ("chosen", "rejected")[number % 2] if self.are_pairs else None
            has_reference = self.are_pairs and "reference" in rows.columns
            reference = float(rows.column("reference", number).sum()) if has_reference else None
            views.append(RowView(split, number, rows.where(number), tokens, label, side, reference))
        return tuple(views)

    def split_views(self) -> tuple[SplitView, ...]:
        """Each split in numbers."""
        views: list[SplitView] = []
        for name, rows in self.splits.items():
            low, median, high, top = np.quantile(rows.lengths, [0, 0.5, 0.95, 1], method="lower").tolist()
            longest, shortest = (np.argsort(key, kind="stable")[:_EXTREMES] for key in (-rows.lengths, rows.lengths))
            # Only the first split is trained on.
            plan = self.plan if self.data.packing and not views else None
            view = SplitView(
                name=name,
                rows=len(rows),
                tokens=int(rows.lengths.sum()),
                supervised=int(rows.supervised.sum()),
                quantiles=(low, median, high, top),
                counts=dict(self.counters.get(name, {})),
                histogram=histogram(rows.lengths),
                packing=None if plan is None else packing(rows.lengths, plan),
                longest=tuple(self._summary(name, int(number)) for number in longest),
                shortest=tuple(self._summary(name, int(number)) for number in shortest),
                cut_at=self.cut_at.get(name, ()),
                places=self.places.get(name, {}),
            )
            views.append(view)
        return tuple(views)

    def _summary(self, name: str, number: int) -> RowSummary:
        rows, (ids, mask) = self.splits[name], self._read(name, number)
        start = int(mask.argmax()) if mask.any() else len(ids)
        stop = start + int((mask[start:] == 0).argmax()) if (mask[start:] == 0).any() else len(ids)
        decode = self.tokenizer.backend_tokenizer.decode
        # A stretch of tokens may begin or end inside a character.
        text = decode(ids[max(0, start - _PREVIEW_TOKENS) : start].tolist(), skip_special_tokens=False).strip("\ufffd")
        before = " ".join(last_question(text, self.tokens.names.values()).split())
        learned = decode(ids[start : min(stop, start + _PREVIEW_TOKENS)].tolist(), skip_special_tokens=True)
        after = " ".join(learned.strip("\ufffd").split())
        if self.labels:
            text = self.tokenizer.decode(ids[-_PREVIEW_TOKENS:].tolist(), skip_special_tokens=True)
            before, after = " ".join(text.split()), label_text(self.labels[name][number])
        return RowSummary(
            number,
            rows.where(number),
            int(rows.lengths[number]),
            int(rows.supervised[number]),
            before if len(before) <= _PREVIEW_CHARACTERS else f"…{before[1 - _PREVIEW_CHARACTERS :]}",
            after if len(after) <= _PREVIEW_CHARACTERS else f"{after[: _PREVIEW_CHARACTERS - 1]}…",
        )

    def duplicates(self) -> tuple[Duplicates, ...]:
        """Copies inside each split, then rows of each split that are also in one before it."""
        duplicates = []
        for name, rows in self.splits.items():
            # A mix may repeat a row on purpose: a row is not a duplicate of itself.
            pairs = np.unique(np.stack([self._digests(rows), rows.source_rows], axis=1), axis=0)
            digests, counts = np.unique(pairs[:, 0], return_counts=True)
            copied = digests[counts > 1]
            extra = int((counts[counts > 1] - 1).sum())
            duplicates.append(Duplicates((name,), extra, len(copied), len(pairs), self._groups([name], copied)))
        for first, second in combinations(self.splits, 2):
            earlier, later = self.splits[first], self.splits[second]
            both = np.isin(self._digests(later), self._digests(earlier))
            shared = np.unique(self._digests(later)[both])
            groups = self._groups([first, second], shared)
            duplicates.append(Duplicates((first, second), int(both.sum()), len(shared), len(later), groups))
        return tuple(duplicates)

    def _groups(self, names: list[str], digests: IntArray) -> tuple[DuplicateGroup, ...]:
        """The largest groups of rows with one of these digests; places are taken from every split in turn."""
        splits = [self.splits[name] for name in names]
        total = np.zeros(len(digests), dtype=np.int64)
        once = []
        for rows in splits:
            # Each row once, also where a mix repeats it.
            pairs = np.stack([self._digests(rows), rows.source_rows], axis=1)
            once.append(np.sort(np.unique(pairs, axis=0, return_index=True)[1]))
            chosen = self._digests(rows)[once[-1]]
            chosen = chosen[np.isin(chosen, digests)]
            total += np.bincount(np.searchsorted(digests, chosen), minlength=len(digests))
        groups = []
        for at in np.argsort(-total, kind="stable")[:_SHOWN_GROUPS]:
            numbers = [
                first_rows[self._digests(rows)[first_rows] == digests[at]]
                for rows, first_rows in zip(splits, once, strict=True)
            ]
            limit = max(1, _SHOWN_PLACES // len(splits))
            where = [
                rows.where(int(number)) for rows, same in zip(splits, numbers, strict=True) for number in same[:limit]
            ]
            groups.append(DuplicateGroup(int(total[at]), tuple(where), self._summary(names[0], int(numbers[0][0]))))
        return tuple(groups)

    def _digests(self, rows: PreparedSplit) -> IntArray:
        """Of each row; of a pair both rows have that of the pair."""
        if not self.are_pairs:
            return rows.digests
        chosen, rejected = rows.digests[::2], rows.digests[1::2]
        return np.repeat(chosen ^ mix(rejected.view(np.uint64)).view(np.int64), 2)

    def _find(self, wanted: str) -> list[tuple[str, int]]:
        name, rows = next(iter(self.splits.items()))
        if wanted.isdecimal():
            if int(wanted) >= len(rows):
                raise DataError(
                    f"there is no row {wanted}: {name} has {len(rows):,} rows",
                    where="--row",
                    repair="count from 0, or give FILE:NUMBER of the source",
                )
            return [(name, int(wanted))]
        places = [
            (split, number)
            for split, some in self.splits.items()
            for number in range(len(some))
            if f"/{some.where(number)}".endswith(f"/{wanted}")
        ]
        if not places:
            raise DataError(
                f"there is no row from {wanted}",
                where="--row",
                repair="give FILE:NUMBER as messages show it (rows count from 1); the row may have been dropped",
            )
        return places


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


def packing(lengths: IntArray, plan: PackPlan) -> PackingView:
    """How rows of these lengths fill packs."""
    return PackingView(
        capacity=plan.capacity,
        packs=len(plan),
        fill=plan.fill,
        rows_per_pack=len(lengths) / len(plan),
        tokens_per_pack=plan.tokens / len(plan),
        padded_fill=plan.tokens / (len(lengths) * int(lengths.max())),
    )
