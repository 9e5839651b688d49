"""Token ids as text that can be shown, one piece per token, and what a tokenizer's special tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A character of UTF-8 has at most four bytes, so no more tokens than that wait for the rest of one.
_LONGEST_CHARACTER = 4
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token as it is shown.

    Attributes:
        id: token id.
        text: what the token adds to the text; empty where it is a part of a character that a later token completes.
        learned: whether the token is a target of the loss.
        special: whether it is a special token of the tokenizer.
    """

    id: int
    text: str
    learned: bool
    special: bool


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer says of its special tokens.

    Attributes:
        bos, eos, pad, unk: ids, None where there is no such token.
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
        """Tokens that may end a turn: every special token that has no other duty."""
        others = {self.bos, self.unk, self.pad} - {self.eos}
        return frozenset(self.special - others | ({self.eos} if self.eos is not None else set()))


def special_tokens(tokenizer: Any, *, stops: Iterable[int] = ()) -> SpecialTokens:
    """Read the special tokens of a Transformers tokenizer; ``stops`` are the EOS ids of the generation settings."""
    added = tokenizer.added_tokens_decoder
    names = {int(token): str(entry.content) for token, entry in added.items() if entry.special}
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
        if token is not None:
            names.setdefault(int(token), str(tokenizer.convert_ids_to_tokens(int(token))))
    bos = tokenizer.bos_token_id
    first = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
    eos = tokenizer.eos_token_id
    return SpecialTokens(
        bos=bos,
        eos=eos,
        pad=tokenizer.pad_token_id,
        unk=tokenizer.unk_token_id,
        special=frozenset(names),
        stops=frozenset([*stops, *([] if eos is None else [eos])]),
        puts_bos=bos is not None and first == [bos],
        names=names,
    )


def token_views(
    ids: Sequence[int], mask: Sequence[int], tokenizer: Any, special: frozenset[int]
) -> tuple[TokenView, ...]:
    """Each token with the text that it adds.

    The texts together are the decoded row. A token that holds only a part of a character has an empty text, and the
    token that completes the character has all of it.
    """
    texts = token_texts(ids, tokenizer)
    return tuple(
        TokenView(int(token), text, bool(learned), int(token) in special)
        for token, text, learned in zip(ids, texts, mask, strict=True)
    )


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds to those before it."""
    decode = tokenizer.backend_tokenizer.decode
    tokens = [int(token) for token in ids]
    texts: list[str] = []
    # Decoding a token alone loses the space in front of it in some tokenizers, so the token before it comes along.
    context = shown = 0
    for at in range(len(tokens)):
        before = decode(tokens[context:shown], skip_special_tokens=False)
        after = decode(tokens[context : at + 1], skip_special_tokens=False)
        waiting = after.endswith(_BROKEN) and at + 1 - shown < _LONGEST_CHARACTER and at + 1 < len(tokens)
        if waiting:
            texts.append("")
            continue
        texts.append(after[len(before) :])
        context, shown = shown, at + 1
    return texts
