"""Token ids as text that can be shown, one piece per token, and a tokenizer's special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A character has at most four bytes in UTF-8, so at most four tokens are held back until it is complete.
_LONGEST_CHARACTER = 4
_BROKEN = "\ufffd"
_INVISIBLE = re.compile(r"( |\n|\t|\r|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b-\u200f\u2028\u2029\ufeff])")
_KINDS = {" ": "space", "\n": "line", "\t": "tab"}


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token as it is shown; its text is empty where a later token completes the character."""

    id: int
    text: str
    learned: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a row or of two aligned prompts.

    Its kind is ``same``, ``trained`` or ``served`` for tokens that only that prompt has, or ``gap``, which stands for
    ``left_out`` tokens that are not shown.
    """

    kind: str
    tokens: Sequence[TokenView] = ()
    left_out: int = 0


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        bos, eos, pad, unk: ids, None if there is no such token.
        special: ids of all special tokens.
        stops: ids at which a server ends an answer: EOS, and those of the model's generation settings.
        puts_bos: whether the tokenizer itself puts BOS in front of a text.
        names: id to text, of the special tokens.
    """

    bos: int | None
    eos: int | None
    pad: int | None
    unk: int | None
    special: frozenset[int]
    stops: frozenset[int]
    puts_bos: bool
    names: dict[int, str] = field(default_factory=dict)

    def name(self, token: int) -> str:
        """The token as text."""
        return self.names.get(token, f"token {token}")

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that may end a turn: EOS, and every special token that is not BOS, padding or unknown."""
        others = {self.bos, self.unk, self.pad} - {self.eos}
        return frozenset(self.special - others | ({self.eos} if self.eos is not None else set()))


def special_tokens(tokenizer: Any, *, stops: Iterable[int] = ()) -> SpecialTokens:
    """Read the special tokens of a Transformers tokenizer; ``stops`` are the EOS ids of the generation settings."""
    bos, eos, pad, unk = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk"))
    names = {int(token): str(added.content) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for token in (bos, eos, pad, unk):
        if token is not None:
            names.setdefault(int(token), str(tokenizer.convert_ids_to_tokens(int(token))))
    return SpecialTokens(
        bos=bos,
        eos=eos,
        pad=pad,
        unk=unk,
        special=frozenset(names),
        stops=frozenset([*stops, *([] if eos is None else [eos])]),
        puts_bos=bos is not None and tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos],
        names=names,
    )


def token_views(
    ids: Sequence[int], mask: Sequence[int], tokenizer: Any, special: frozenset[int]
) -> tuple[TokenView, ...]:
    """Each token with the text that it adds (:func:`token_texts`); those of ``mask`` 1 are targets of the loss."""
    texts = token_texts(ids, tokenizer)
    return tuple(
        TokenView(int(token), text, bool(learned), int(token) in special)
        for token, text, learned in zip(ids, texts, mask, strict=True)
    )


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds to those before it; together they are the decoded row.

    A token that holds only a part of a character adds nothing, and the token that completes the character all of it.
    """
    decode = tokenizer.backend_tokenizer.decode
    tokens = [int(token) for token in ids]
    texts: list[str] = []
    # Some tokenizers drop the space in front of a token that is decoded alone, so the token before it is decoded too.
    context = shown = 0
    for at in range(len(tokens)):
        before = decode(tokens[context:shown], skip_special_tokens=False)
        after = decode(tokens[context : at + 1], skip_special_tokens=False)
        if after.endswith(_BROKEN) and at + 1 - shown < _LONGEST_CHARACTER and at + 1 < len(tokens):
            texts.append("")
        else:
            texts.append(after[len(before) :])
            context, shown = shown, at + 1
    return texts


def segments(text: str) -> list[tuple[str, str]]:
    """Text cut at white space and invisible characters, as pairs of kind and text.

    The kinds are ``text``, ``space``, ``line``, ``tab``, and ``control`` with the code point (``U+200B``) as text.
    """
    return [
        (_KINDS.get(piece, "control"), piece if piece in _KINDS else f"U+{ord(piece):04X}")
        if _INVISIBLE.fullmatch(piece)
        else ("text", piece)
        for piece in _INVISIBLE.split(text)
        if piece
    ]


def shortened(tokens: Sequence[TokenView], first: int, last: int) -> list[Stretch]:
    """The first and the last tokens, with a gap between them if that leaves out more than a few."""
    left_out = len(tokens) - first - last
    if left_out <= 12:
        return [Stretch("same", tokens)]
    ends = [
        Stretch("same", tokens[:first]),
        Stretch("gap", (), left_out),
        Stretch("same", tokens[len(tokens) - last :]),
    ]
    return [stretch for stretch in ends if stretch.tokens or stretch.left_out]
