"""Locates tokens in their text by the number of bytes of each.

Computing offsets in the Rust library takes a quarter of its time. In byte-level vocabularies (GPT-2, Llama 3, Qwen,
SmolLM and others) tokens are the bytes of their text, so widths give the same result if they add up to the text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import models, normalizers, pre_tokenizers

# Words, a run of white space, digits, and characters of two to four bytes.
_PROBE = "a é \n\n漢 🎉's 12!"
_UNKNOWN = 2**40


@dataclass(frozen=True, slots=True)
class Places:
    """End positions of the tokens of a text, in bytes."""

    text: str
    ends: npt.NDArray[np.int64]

    def _byte(self, character: int) -> int:
        return character if self.text.isascii() else len(self.text[:character].encode())

    def token_at(self, character: int) -> int:
        """The token in which the character begins."""
        return int(self.ends.searchsorted(self._byte(character), side="right"))

    def border(self, character: int) -> int | None:
        """Number of tokens before a character; None if a token straddles that position."""
        before = self.token_at(character)
        reached = int(self.ends[before - 1]) if before else 0
        return before if reached == self._byte(character) else None


class Widths:
    """Bytes of each token of a byte-level vocabulary.

    Args:
        widths: by token id.
        composes: whether the tokenizer normalizes text to Unicode NFC.
    """

    def __init__(self, widths: npt.NDArray[np.int64], *, composes: bool) -> None:
        self._widths, self._composes = widths, composes

    @classmethod
    def of(cls, backend: Any) -> Widths | None:
        """For a tokenizer of the Rust library; None if its tokens are not the bytes of their text."""
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(_PROBE)
        cut = backend.pre_tokenizer and backend.pre_tokenizer.pre_tokenize_str(_PROBE)
        if not cut or "".join(piece for piece, _ in cut) != bytewise[0][0]:
            return None
        composes = isinstance(backend.normalizer, normalizers.NFC)
        if not isinstance(backend.model, models.BPE) or not (composes or backend.normalizer is None):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        widths = np.full(max(vocabulary.values()) + 1, _UNKNOWN, dtype=np.int64)
        # In the vocabulary, a byte is one character.
        widths[list(vocabulary.values())] = [len(token) for token in vocabulary]
        for number, token in backend.get_added_tokens_decoder().items():
            widths[number] = len(token.content.encode())
        if backend.model.unk_token is not None:
            # It may stand for any number of bytes.
            widths[vocabulary.get(backend.model.unk_token, 0)] = _UNKNOWN
        return cls(widths, composes=composes)

    def places(self, text: str, ids: Sequence[int]) -> Places | None:
        """The token positions in a text; None if the widths do not add up to it.

        A token that absorbs adjacent white space stands for more bytes than its width; no token stands for fewer.
        """
        ends = self._widths[np.array(ids, dtype=np.int64)].cumsum()
        length = len(text) if text.isascii() else len(text.encode())
        is_same = not self._composes or unicodedata.is_normalized("NFC", text)
        return Places(text, ends) if is_same and len(ends) and ends[-1] == length else None
