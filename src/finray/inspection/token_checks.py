"""Checks of special tokens over every prepared row: ends of what is learned, BOS, EOS, padding, unknown tokens.

Rows are looked at in blocks, with NumPy, so that a million rows take seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from finray.inspection.token_views import SpecialTokens

IntArray = npt.NDArray[np.int64]
Level = Literal["ok", "note", "warning", "problem"]

_BLOCK = 2048
_SHOWN = 5
# White space that a template writes behind the end of a turn, at most so many tokens of it.
_TRAILING = 4


class Rows(Protocol):
    """The rows of a prepared split, as :class:`finray.data.dataset.prepared.PreparedSplit` gives them."""

    lengths: IntArray
    supervised: IntArray
    source_rows: IntArray
    digests: IntArray

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Token ids and loss mask."""

    def where(self, number: int) -> str:
        """``file:row`` of the source."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: short name.
        level: ``ok``, ``note`` (worth knowing), ``warning`` or ``problem``.
        finding: what was found, in a sentence.
        count: how many of ``of`` are at fault (or noted).
        where: a few of the rows.
    """

    name: str
    level: Level
    finding: str
    count: int = 0
    of: int = 0
    where: tuple[str, ...] = ()


@dataclass
class Tally:
    """A count with the first few places."""

    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, rows: Rows, numbers: IntArray) -> None:
        """Count one for each row number."""
        self.count += len(numbers)
        for number in numbers[: max(0, _SHOWN - len(self.where))]:
            self.where.append(rows.where(int(number)))


@dataclass
class Scan:
    """What a look at every token of every row found.

    Attributes:
        rows, spans: rows, and learned spans whose end was looked at.
        ends: id of the last token of a span to how often.
        open: spans that end with none of the end tokens though the row had room.
        cut: spans that end where the row is full.
        doubled_bos, no_bos, unknown: rows.
        inside: special token inside a learned span, not at its end, to how often.
        inside_rows: those rows.
    """

    rows: int = 0
    spans: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    open: Tally = field(default_factory=Tally)
    cut: Tally = field(default_factory=Tally)
    doubled_bos: Tally = field(default_factory=Tally)
    no_bos: Tally = field(default_factory=Tally)
    unknown: Tally = field(default_factory=Tally)
    inside: Counter[int] = field(default_factory=Counter)
    inside_rows: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class _Block:
    """Rows laid end to end: ``owner`` is the row number of each token, ``starts`` and ``stops`` of each row."""

    ids: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_]
    owner: IntArray
    starts: IntArray
    stops: IntArray
    first_row: int


@dataclass(frozen=True)
class Scanner:
    """Looks at rows.

    Args:
        tokens: the special tokens.
        tokenizer: the Transformers tokenizer.
        max_length: tokens at which a row is full.
        whole: whether everything is learned, so that only the end of a row is an end.
    """

    tokens: SpecialTokens
    tokenizer: Any
    max_length: int
    whole: bool

    def scan(self, splits: Mapping[str, Rows]) -> Scan:
        """Look at every row of every split."""
        found = Scan()
        for rows in splits.values():
            found.rows += len(rows)
            pieces = _pieces(rows.source_rows)
            for first in range(0, len(rows), _BLOCK):
                block = _block(rows, first, min(first + _BLOCK, len(rows)))
                self._bos(found, rows, block, pieces)
                self._unknown(found, rows, block)
                self._spans(found, rows, block)
        return found

    def _bos(self, found: Scan, rows: Rows, block: _Block, pieces: npt.NDArray[np.bool_]) -> None:
        if self.tokens.bos is None:
            return
        numbers = np.arange(block.first_row, block.first_row + len(block.starts))
        first = block.ids[block.starts] == self.tokens.bos
        longer = block.stops - block.starts > 1
        second = block.ids[np.where(longer, block.starts + 1, block.starts)] == self.tokens.bos
        found.doubled_bos.add(rows, numbers[first & second & longer])
        if self.tokens.puts_bos:
            found.no_bos.add(rows, numbers[~first & ~pieces[numbers]])

    def _unknown(self, found: Scan, rows: Rows, block: _Block) -> None:
        if can_tell_unknown(self.tokens):
            found.unknown.add(rows, np.unique(block.owner[block.ids == self.tokens.unk]))

    def _spans(self, found: Scan, rows: Rows, block: _Block) -> None:
        last = _last_of_spans(block, whole=self.whole)
        if not len(last):
            return
        at = self._before_white_space(block, last)
        ended = np.isin(block.ids[at], list(self.tokens.ends))
        found.spans += len(last)
        found.ends.update(_counted(block.ids[at][ended]))
        row = block.owner[last]
        local = row - block.first_row
        full = (last + 1 == block.stops[local]) & (block.stops[local] - block.starts[local] >= self.max_length)
        found.cut.add(rows, row[~ended & full])
        found.open.add(rows, row[~ended & ~full])
        if not self.whole:
            special = np.isin(block.ids, list(self.tokens.special)) & block.learned
            special[at[ended]] = False
            found.inside.update(_counted(block.ids[special]))
            found.inside_rows.add(rows, np.unique(block.owner[special]))

    def _before_white_space(self, block: _Block, last: IntArray) -> IntArray:
        """The ends of spans, moved in front of trailing white space."""
        at = last.copy()
        for _ in range(_TRAILING):
            white = np.isin(block.ids[at], self._white_space(np.unique(block.ids[at])))
            white &= at > 0
            white &= block.learned[at - 1] & (block.owner[at - 1] == block.owner[at])
            if not white.any():
                break
            at = np.where(white, at - 1, at)
        return at

    def _white_space(self, ids: npt.NDArray[np.int32]) -> list[int]:
        decode = self.tokenizer.backend_tokenizer.decode
        candidates = [int(token) for token in ids if int(token) not in self.tokens.special]
        return [token for token in candidates if decode([token], skip_special_tokens=False).isspace()]


def _pieces(source_rows: IntArray) -> npt.NDArray[np.bool_]:
    """Which rows are later pieces of a source row that was cut into several."""
    later = np.ones(len(source_rows), dtype=bool)
    later[np.unique(source_rows, return_index=True)[1]] = False
    return later


def _block(rows: Rows, first: int, stop: int) -> _Block:
    parts = [rows.row(number) for number in range(first, stop)]
    lengths = np.array([len(ids) for ids, _ in parts], dtype=np.int64)
    stops = np.cumsum(lengths)
    return _Block(
        ids=np.concatenate([ids for ids, _ in parts]),
        learned=np.concatenate([mask for _, mask in parts]).astype(bool),
        owner=np.repeat(np.arange(first, stop, dtype=np.int64), lengths),
        starts=stops - lengths,
        stops=stops,
        first_row=first,
    )


def _last_of_spans(block: _Block, *, whole: bool) -> IntArray:
    """Positions of the last token of every learned span (of every row's last one only, where all is learned)."""
    next_learned = np.append(block.learned[1:], False)
    next_learned[block.stops - 1] = False
    last = np.flatnonzero(block.learned & ~next_learned)
    if whole and len(last):
        last = last[np.append(np.diff(block.owner[last]) > 0, True)]
    return last


def _counted(ids: npt.NDArray[np.int32]) -> dict[int, int]:
    unique, counts = np.unique(ids, return_counts=True)
    return {int(token): int(count) for token, count in zip(unique, counts, strict=True)}


def can_tell_unknown(tokens: SpecialTokens) -> bool:
    """Whether the unknown token has an id of its own."""
    return tokens.unk is not None and tokens.unk not in (tokens.bos, tokens.eos, tokens.pad)


def checks_of(found: Scan, tokens: SpecialTokens, *, kind: str) -> tuple[Check, ...]:
    """What the scan means, check by check.

    Args:
        found: the scan.
        tokens: the special tokens.
        kind: ``chat`` where a chat template writes BOS, and not the tokenizer; ``text`` where long rows are cut into
            pieces, of which only the last has an end.
    """
    return (
        _ends_check(found, tokens),
        _stops_check(found, tokens),
        _cut_check(found, pieces=kind == "text"),
        _bos_check(found, tokens, chat=kind == "chat"),
        _inside_check(found, tokens),
        _unknown_check(found, tokens),
        _pad_check(tokens),
    )


def _listed(counts: Mapping[int, int], tokens: SpecialTokens) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{tokens.name(token)} ({count:,})" for token, count in ordered[:6])


def _ends_check(found: Scan, tokens: SpecialTokens) -> Check:
    name = "Learned text ends with an end token"
    if found.open.count:
        return Check(
            name,
            "problem",
            f"{found.open.count:,} learned spans end with no end-of-turn or EOS token: there the model does not learn "
            "to stop",
            found.open.count,
            found.spans,
            tuple(found.open.where),
        )
    ends = _listed(found.ends, tokens) or "none"
    return Check(name, "ok", f"every learned span that was not cut off ends with one: {ends}", 0, found.spans)


def _stops_check(found: Scan, tokens: SpecialTokens) -> Check:
    name = "Serving stops at these tokens"
    others = {token: count for token, count in found.ends.items() if token not in tokens.stops}
    stops = ", ".join(tokens.name(token) for token in sorted(tokens.stops)) or "none"
    if others:
        finding = f"answers end with {_listed(others, tokens)}, but a server stops at {stops}: it would run on"
        return Check(name, "problem", finding, sum(others.values()), found.spans)
    return Check(name, "ok", f"a server stops at {stops}", 0, found.spans)


def _cut_check(found: Scan, *, pieces: bool) -> Check:
    name = "Learned text that is cut off"
    if found.cut.count and pieces:
        return Check(name, "ok", f"{found.cut.count:,} pieces of long texts go on in another row", 0, found.spans)
    if found.cut.count:
        finding = f"{found.cut.count:,} learned spans run into data.max_length, so their end is not learned there"
        return Check(name, "warning", finding, found.cut.count, found.spans, tuple(found.cut.where))
    return Check(name, "ok", "no learned span runs into data.max_length", 0, found.spans)


def _bos_check(found: Scan, tokens: SpecialTokens, *, chat: bool) -> Check:
    name = "BOS"
    if tokens.bos is None:
        return Check(name, "ok", "the tokenizer has no BOS", 0, found.rows)
    bos = tokens.name(tokens.bos)
    doubled, missing = found.doubled_bos, found.no_bos
    if doubled.count:
        finding = f"{doubled.count:,} rows begin with {bos} twice: it is in the text, and put in front of it again"
        return Check(name, "problem", finding, doubled.count, found.rows, tuple(doubled.where))
    if missing.count and chat:
        finding = (
            f"{missing.count:,} rows do not begin with {bos}: the chat template writes none. A chat server that "
            "renders the template adds none either"
        )
        return Check(name, "note", finding, missing.count, found.rows, tuple(missing.where))
    if missing.count:
        finding = f"{missing.count:,} rows do not begin with {bos}, which the tokenizer puts in front of a prompt"
        return Check(name, "problem", finding, missing.count, found.rows, tuple(missing.where))
    usual = f"every row begins with {bos} once" if tokens.puts_bos else f"no row begins with {bos} twice"
    return Check(name, "ok", usual, 0, found.rows)


def _inside_check(found: Scan, tokens: SpecialTokens) -> Check:
    name = "Special tokens inside learned text"
    if found.inside:
        finding = f"{found.inside_rows.count:,} rows hold them in the middle: {_listed(found.inside, tokens)}"
        return Check(name, "warning", finding, found.inside_rows.count, found.rows, tuple(found.inside_rows.where))
    return Check(name, "ok", "none but at its end", 0, found.rows)


def _unknown_check(found: Scan, tokens: SpecialTokens) -> Check:
    name = "Unknown tokens"
    if not can_tell_unknown(tokens):
        return Check(
            name, "ok", "the tokenizer has no unknown token of its own: every text can be written", 0, found.rows
        )
    unk = tokens.name(int(tokens.unk or 0))
    if found.unknown.count:
        finding = f"{found.unknown.count:,} rows hold {unk}: text that the tokenizer cannot write is lost"
        return Check(name, "warning", finding, found.unknown.count, found.rows, tuple(found.unknown.where))
    return Check(name, "ok", f"no row holds {unk}", 0, found.rows)


def _pad_check(tokens: SpecialTokens) -> Check:
    name = "Padding and EOS"
    if tokens.pad is None:
        return Check(name, "ok", "the tokenizer has no padding token, and finray needs none")
    if tokens.pad == tokens.eos:
        finding = (
            f"both are {tokens.name(tokens.pad)}. finray never pads, so EOS is learned all the same; tools that hide "
            "the padding token from the loss would hide EOS too"
        )
        return Check(name, "note", finding)
    return Check(name, "ok", f"padding is {tokens.name(tokens.pad)}, EOS is another token")
