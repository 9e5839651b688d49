"""Locates tokens in their text by the number of bytes of each.

Computing offsets in the Rust library takes a quarter of its time. In byte-level vocabularies (GPT-2, Llama 3, Qwen,
SmolLM and others) tokens are the bytes of their text, so widths give the same result if they add up to the text.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import models, normalizers, pre_tokenizers

# Words, a run of white space, digits, and characters of two to four bytes.
_PROBE = "a é \n\n漢 🎉's 12!"
_UNKNOWN = 2**40


# Of characters of a text: the token in which each begins, and whether it is the first of that token.
Places = dict[int, tuple[int, bool]]


def joined_ids(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """The token ids of rows, one row after the other. From lists of Python's numbers, three times as fast as NumPy."""
    return np.frombuffer(b"".join([struct.pack(f"{len(row)}i", *row) for row in rows]), dtype=np.int32)


class Widths:
    """Bytes of each token of a byte-level vocabulary, by id. ``composes``: the tokenizer normalizes text to Unicode
    NFC."""

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

    def places(
        self, texts: Sequence[str], ids: Sequence[Sequence[int]], characters: Sequence[Sequence[int]]
    ) -> list[Places | None]:
        """Where some characters of each text are; None for a text to which the widths of its tokens do not add up.

        A token that absorbs adjacent white space stands for more bytes than its width; no token stands for fewer.

        Args:
            texts: the texts.
            ids: tokens of each.
            characters: positions in each text, up to its length.
        """
        # All texts are treated as one: the first byte of each token, and the end of the last.
        starts = np.concatenate([[0], self._widths[joined_ids(ids)].cumsum()])
        bounds = np.cumsum([0, *map(len, ids)])
        before, sizes = starts[bounds].tolist(), np.diff(starts[bounds]).tolist()
        is_ascii = [text.isascii() for text in texts]
        fits = [
            size == (len(text) if ascii else len(text.encode()))
            and size > 0
            and (ascii or not self._composes or unicodedata.is_normalized("NFC", text))
            for text, ascii, size in zip(texts, is_ascii, sizes, strict=True)
        ]
        wanted = [
            start + (at if ascii else len(text[:at].encode()))
            for text, some, ascii, start, fit in zip(texts, characters, is_ascii, before, fits, strict=False)
            if fit
            for at in some
        ]
        tokens = starts.searchsorted(wanted, side="right") - 1
        pairs = zip(tokens.tolist(), (starts[tokens] == wanted).tolist(), strict=True)
        return [
            {at: (token - first, is_first) for at, (token, is_first) in zip(some, pairs, strict=False)} if fit else None
            for some, first, fit in zip(characters, bounds.tolist(), fits, strict=False)
        ]
