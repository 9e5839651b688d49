"""Checks of the tokens of every prepared row.

Rows are scanned in blocks with NumPy, so that a million rows take seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from finray.data.dataset.prepared import PreparedSplit
from finray.inspection.tokens import SpecialTokens

IntArray = npt.NDArray[np.int64]
Level = Literal["ok", "note", "warning", "problem"]

_BLOCK = 2048
_PLACES = 5
# A template may write this many tokens of white space after the end of a turn.
_TRAILING = 4


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: a sentence, how many of how many are affected, and where some of these are."""

    name: str
    level: Level
    finding: str
    count: int = 0
    of: int = 0
    where: tuple[str, ...] = ()


@dataclass
class Tally:
    """A count of rows, with the first few of them."""

    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, rows: PreparedSplit, numbers: IntArray) -> None:
        """Count each of these rows."""
        self.count += len(numbers)
        self.where += [rows.where(int(number)) for number in numbers[: max(0, _PLACES - len(self.where))]]


class TokenScan:
    """Counts special tokens in every row: ends of learned spans, BOS, unknown tokens, special tokens inside answers.

    Where all tokens are learned (``whole``), only the last token of a row ends a span. Where only parts of some answers
    are (``in_parts``), a span need not end with an end token.
    """

    def __init__(
        self, tokens: SpecialTokens, tokenizer: Any, *, max_length: int, whole: bool, in_parts: bool = False
    ) -> None:
        self._tokens = tokens
        self._decode = tokenizer.backend_tokenizer.decode
        self._max_length = max_length
        self._whole, self._in_parts = whole, in_parts
        self.rows = self.spans = 0
        # Ids of the tokens that end learned spans, and of special tokens inside them, to how often.
        self.ends: Counter[int] = Counter()
        self.inside: Counter[int] = Counter()
        # Special tokens that stand behind a span without an end.
        self.behind: Counter[int] = Counter()
        # Spans that end with none of the end tokens: though the row had room, or because it is full.
        self.open, self.cut = Tally(), Tally()
        self.doubled_bos, self.no_bos, self.unknown, self.inside_rows = Tally(), Tally(), Tally(), Tally()
        # The unknown token can be told apart only if it has an id of its own.
        self.unk = None if tokens.unk in (tokens.bos, tokens.eos, tokens.pad) else tokens.unk

    def add(self, rows: PreparedSplit, *, labelled: bool = False) -> None:
        """Scan every row of a split. Labelled text has no token to learn, and token types where others have a mask."""
        self.rows += len(rows)
        # A long text is cut into several rows of one source row; only the first of them begins with BOS.
        later = np.ones(len(rows), dtype=bool)
        later[np.unique(rows.source_rows, return_index=True)[1]] = False
        for first in range(0, len(rows), _BLOCK):
            numbers = np.arange(first, min(first + _BLOCK, len(rows)), dtype=np.int64)
            self._add_block(rows, numbers, later[numbers], labelled=labelled)

    def _add_block(
        self, rows: PreparedSplit, numbers: IntArray, later: npt.NDArray[np.bool_], *, labelled: bool
    ) -> None:
        # All rows of the block end to end: `owner` is the row of each token, `starts` and `stops` where rows lie.
        parts = [rows.row(number) for number in numbers.tolist()]
        ids = np.concatenate([row_ids for row_ids, _ in parts])
        learned = np.concatenate([mask for _, mask in parts]).astype(bool) & (not labelled)
        lengths = np.array([len(row_ids) for row_ids, _ in parts], dtype=np.int64)
        owner, stops = np.repeat(numbers, lengths), np.cumsum(lengths)
        starts = stops - lengths

        if self._tokens.bos is not None:
            begins = ids[starts] == self._tokens.bos
            second = ids[np.minimum(starts + 1, stops - 1)] == self._tokens.bos
            self.doubled_bos.add(rows, numbers[begins & second & (lengths > 1)])
            if self._tokens.puts_bos:
                self.no_bos.add(rows, numbers[~begins & ~later])
        if self.unk is not None:
            self.unknown.add(rows, np.unique(owner[ids == self.unk]))

        next_learned = np.append(learned[1:], False)
        next_learned[stops - 1] = False
        last = np.flatnonzero(learned & ~next_learned)
        if self._whole and len(last):
            last = last[np.append(np.diff(owner[last]) > 0, True)]
        if not len(last):
            return
        # The token that ends each span, in front of trailing white space.
        at = last.copy()
        for _ in range(_TRAILING):
            white = self._are_space(ids[at]) & (at > 0) & learned[at - 1] & (owner[at - 1] == owner[at])
            if not white.any():
                break
            at = np.where(white, at - 1, at)
        ended = np.isin(ids[at], list(self._tokens.ends))
        self.spans += len(last)
        self.ends.update(ids[at][ended].tolist())
        within = owner[last] - numbers[0]
        full = (last + 1 == stops[within]) & (lengths[within] >= self._max_length)
        self.cut.add(rows, owner[last][~ended & full])
        self.open.add(rows, owner[last][~ended & ~full])
        following, ends_at = last[~ended] + 1, stops[within][~ended]
        for _ in range(_TRAILING):
            following, ends_at = following[following < ends_at], ends_at[following < ends_at]
            following = following + self._are_space(ids[following])
        following = following[following < ends_at]
        self.behind.update(ids[following[np.isin(ids[following], list(self._tokens.special))]].tolist())
        if not self._whole:
            special = np.isin(ids, list(self._tokens.special)) & learned
            special[at[ended]] = False
            self.inside.update(ids[special].tolist())
            self.inside_rows.add(rows, np.unique(owner[special]))

    def _are_space(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        candidates = [token for token in np.unique(tokens).tolist() if token not in self._tokens.special]
        return np.isin(
            tokens, [token for token in candidates if self._decode([token], skip_special_tokens=False).isspace()]
        )

    def checks(self, *, kind: str) -> tuple[Check, ...]:
        """The results.

        Args:
            kind: ``chat``, where a chat template writes BOS and not the tokenizer; ``text``, where long rows are cut
                into pieces of which only the last has an end.
        """
        tokens, rows, spans = self._tokens, self.rows, self.spans
        stops = ", ".join(tokens.name(token) for token in sorted(tokens.stops)) or "none"
        others = Counter({token: count for token, count in self.ends.items() if token not in tokens.stops})
        bos = "BOS" if tokens.bos is None else tokens.name(tokens.bos)
        with_bos = f"every row begins with {bos} once" if tokens.puts_bos else f"no row begins with {bos} twice"
        unk = "" if self.unk is None else tokens.name(self.unk)
        none, open_ends = Tally(), ": the model does not learn to stop there"
        if openers := [token for token, _ in self.behind.most_common() if token not in tokens.stops]:
            named = ", ".join(f"{tokens.name(token)} ({token})" for token in openers)
            open_ends += f". The next turn begins with {named}: add its id to eos_token_id in generation_config.json"
        return (
            _check(
                "Learned text ends with an end token",
                spans,
                f"every learned span that was not cut off ends with one: {_listed(self.ends, tokens) or 'none'}",
                **{
                    "note" if self._in_parts else "problem": (
                        self.open,
                        "learned spans end without an end-of-turn or EOS token"
                        + ("; rows have parts that are not learned" if self._in_parts else open_ends),
                    )
                },
            ),
            _check(
                "Serving stops at these tokens",
                spans,
                f"a server stops at {stops}",
                problem=(
                    Tally(others.total()),
                    f"answers end with {_listed(others, tokens)}, but a server stops only at {stops}: it would keep "
                    "generating",
                ),
            ),
            _check(
                "Learned text that is cut off",
                spans,
                f"{self.cut.count:,} pieces of long texts continue in another row"
                if kind == "text" and self.cut.count
                else "no learned span is cut off at data.max_length",
                warning=(
                    none if kind == "text" else self.cut,
                    "learned spans are cut off at data.max_length, so their end is not learned",
                ),
            ),
            _check(
                "BOS",
                rows,
                "the tokenizer has no BOS" if tokens.bos is None else with_bos,
                problem=(self.doubled_bos, f"rows begin with {bos} twice: the text has one, and another was added")
                if self.doubled_bos.count or kind == "chat"
                else (self.no_bos, f"rows do not begin with {bos}, which the tokenizer puts before a prompt"),
                note=(
                    self.no_bos,
                    f"rows do not begin with {bos}: the chat template writes none, and neither does a chat server that "
                    "renders the template",
                ),
            ),
            _check(
                "Special tokens inside learned text",
                rows,
                "none, except at its end",
                warning=(
                    self.inside_rows,
                    f"rows have special tokens inside their learned text: {_listed(self.inside, tokens)}",
                ),
            ),
            _check(
                "Unknown tokens",
                rows,
                f"no row contains {unk}" if unk else "the tokenizer has no unknown token: it can encode every text",
                warning=(self.unknown, f"rows contain {unk}: text that the tokenizer cannot encode is lost"),
            ),
            self._padding(),
        )

    def _padding(self) -> Check:
        tokens = self._tokens
        if tokens.pad is None:
            return Check("Padding and EOS", "ok", "the tokenizer has no padding token, and finray needs none")
        pad = tokens.name(tokens.pad)
        if tokens.pad != tokens.eos:
            return Check("Padding and EOS", "ok", f"padding is {pad}, EOS is another token")
        finding = (
            f"both are {pad}. finray does not pad, so EOS is learned anyway; a tool that masks the padding token "
            "in the loss would mask EOS too"
        )
        return Check("Padding and EOS", "note", finding)


def _check(name: str, of: int, otherwise: str, **cases: tuple[Tally, str]) -> Check:
    """The first case that was counted, by its level; ``ok`` with the words for none."""
    for level, (tally, text) in cases.items():
        if tally.count:
            return Check(name, cast(Level, level), f"{tally.count:,} {text}", tally.count, of, tuple(tally.where))
    return Check(name, "ok", otherwise, 0, of)


def _listed(counts: Counter[int], tokens: SpecialTokens) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{tokens.name(token)} ({count:,})" for token, count in ordered[:6])
