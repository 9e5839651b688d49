"""Masks that follow from the widths of tokens, against those from the offsets of the Rust library."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
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

    def places(self: Any, text: str, ids: Any, own: Any = Widths.places) -> Places | None:
        found.append(own(self, text, ids))
        return found[-1]

    monkeypatch.setattr(Widths, "places", places)
    return found


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_by_widths_are_those_by_offsets(
    name: str, train_on: str, monkeypatch: pytest.MonkeyPatch, placed: list[Places | None]
) -> None:
    tokenizer = families.tokenizer(name)
    by_widths = encoded(tokenizer, train_on, monkeypatch, many=0)
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


def test_tokens_that_do_not_add_up_to_their_text_have_no_places() -> None:
    backend = families.tokenizer("smollm2").backend_tokenizer
    widths = Widths.of(backend)
    assert widths is not None
    text = "a dog é 漢"
    ids = backend.encode(text, add_special_tokens=False).ids
    places = widths.places(text, ids)
    assert places is not None
    assert places.border(len("a dog é 漢")) == len(ids)
    assert widths.places(text, ids[1:]) is None
    assert widths.places(text + " ", ids) is None
