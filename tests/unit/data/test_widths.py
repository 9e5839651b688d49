"""Masks that follow from the widths of tokens, against those from the offsets of the Rust library."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from finray.data.formats.examples import Chat, Completion, Example, Message, Text
from finray.data.tokenize import encode
from finray.data.tokenize.encode import Encoded, Tokenizer
from finray.data.tokenize.widths import Places, Widths
from finray.errors import DataError
from tests.support import families
from tests.support.written_out import WRITTEN

# White space that tokens share with their neighbours, characters of several bytes, some that Unicode's NFC composes,
# and a special token in the middle of a text.
SAID = (
    "a dog",
    " a",
    "a ",
    "\n\na",
    "what \n\n",
    "12",
    "é 漢\u3000",
    "🎉",
    "e\u0301",
    "\u00a0",
    "a<|im_end|> b",
    "a  b",
)
FAMILIES = sorted(WRITTEN)


def examples() -> list[Example]:
    pairs = list(product(SAID, SAID))
    chats = [Chat((Message("user", asked), Message("assistant", said))) for asked, said in pairs]
    return [*chats, *(Completion(asked, said) for asked, said in pairs), *map(Text, SAID)]


def encoded(tokenizer: Any, train_on: str, monkeypatch: pytest.MonkeyPatch, *, many: int) -> list[Encoded | str]:
    """What becomes of each example; a refusal is its message."""
    monkeypatch.setattr(encode, "_MANY_TEXTS", many)
    encoder = Tokenizer(tokenizer, train_on=train_on, max_length=64, on_too_long="truncate")  # type: ignore[arg-type]
    found: list[Encoded | str] = []
    for example in examples():
        try:
            found += encoder.encode([example])
        except DataError as error:
            found.append(str(error))
    return found


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[Places | None]:
    """What was found by widths."""
    found: list[Places | None] = []

    def places(self: Any, *given: Any, own: Any = Widths.places) -> list[Places | None]:
        found.extend(placed := own(self, *given))
        return placed

    monkeypatch.setattr(Widths, "places", places)
    return found


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_by_widths_are_those_by_offsets(
    name: str, train_on: str, monkeypatch: pytest.MonkeyPatch, placed: list[Places | None]
) -> None:
    tokenizer = families.tokenizer(name)
    by_widths = encoded(tokenizer, train_on, monkeypatch, many=0)
    # All in one batch, too.
    encoder = Tokenizer(tokenizer, train_on=train_on, max_length=64, on_too_long="truncate")  # type: ignore[arg-type]
    good = [
        (example, found) for example, found in zip(examples(), by_widths, strict=True) if isinstance(found, Encoded)
    ]
    assert encoder.encode([example for example, _ in good]) == [found for _, found in good]
    placed.clear()
    assert by_widths == encoded(tokenizer, train_on, monkeypatch, many=0)
    count = sum(place is not None for place in placed)
    assert by_widths == encoded(tokenizer, train_on, monkeypatch, many=1_000_000)
    is_bytes = families.FAMILIES[name].words != "sentencepiece"
    assert (Widths.of(tokenizer.backend_tokenizer) is not None) == is_bytes
    assert count > len(SAID) ** 2 if is_bytes and train_on == "assistant" else not count or is_bytes


def test_masks_by_widths_where_offsets_leave_spaces_out(
    monkeypatch: pytest.MonkeyPatch, placed: list[Places | None]
) -> None:
    tokenizer = families.tokenizer("llama-3")
    backend = tokenizer.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    try:
        by_widths = encoded(tokenizer, "assistant", monkeypatch, many=0)
        assert any(place is not None for place in placed)
        assert by_widths == encoded(tokenizer, "assistant", monkeypatch, many=1_000_000)
    finally:
        backend.post_processor = before


@given(rows=st.lists(st.tuples(st.text("a é漢🎉\n", max_size=12), st.booleans()), min_size=1, max_size=6))
def test_places_among_other_texts_are_those_of_each_token(rows: list[tuple[str, bool]]) -> None:
    backend = families.tokenizer("smollm2").backend_tokenizer
    widths = Widths.of(backend)
    assert widths is not None
    encodings = [backend.encode(text, add_special_tokens=False) for text, _ in rows]
    # Of some, the last token is missing.
    ids = [encoding.ids[: len(encoding.ids) - cut] for encoding, (_, cut) in zip(encodings, rows, strict=True)]
    found = widths.places([text for text, _ in rows], ids, [range(len(text) + 1) for text, _ in rows])
    for (text, cut), encoding, own, places in zip(rows, encodings, ids, found, strict=True):
        if cut or not text:
            assert places is None
            continue
        assert places is not None
        # A character of several bytes may have several tokens: it begins in the first.
        firsts = [start for start, _ in encoding.offsets]
        for at in range(len(text)):
            token, is_first = places[at]
            assert token == next(number for number, (low, high) in enumerate(encoding.offsets) if low <= at < high)
            assert is_first == (at in firsts)
        assert places[len(text)] == (len(own), True)
