"""What is learned: the answers and their end-of-turn, and nothing else; on real families' template shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from finray.data.formats.examples import Chat, Completion, Labelled, Message, Text
from finray.data.tokenize.encode import Tokenizer, Tokens
from finray.errors import DataError
from tests.support import tiny
from tests.support.examples import examples
from tests.support.talk import mask_of, rows_of


def make(
    tokenizer: Any, *, train_on: str = "completion", max_length: int = 512, on_too_long: str = "truncate"
) -> Tokenizer:
    return Tokenizer(tokenizer, train_on=train_on, max_length=max_length, on_too_long=on_too_long)  # type: ignore[arg-type]


def learned_text(tokenizer: Any, chat: Any, **options: Any) -> str:
    """Text of the learned tokens, with a bar where learning stops and starts again."""
    rows = rows_of(make(tokenizer, **options), chat)
    (row,) = rows
    parts: list[str] = []
    last = -2
    for at, (token, learned) in enumerate(zip(row.ids, mask_of(row), strict=True)):
        if learned:
            parts += (["|"] if at != last + 1 and parts else []) + [tokenizer.decode([token])]
            last = at
    return "".join(parts)


@pytest.fixture
def with_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The tokenizer with another template."""

    def use(template: str) -> Any:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return tokenizer

    return use


def conversation(*turns: tuple[str, str]) -> Chat:
    return Chat(tuple(Message(role, content) for role, content in turns))


def test_an_end_of_turn_that_begins_with_another_special_token_is_learned_whole() -> None:
    tokenizer = tiny.train_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>!", "<|im"]})
    tokenizer.chat_template = tiny.CHATML.replace("<|im_end|>", "<|im_end|>!")
    chat = conversation(("user", "one"), ("assistant", "dog"), ("user", "two"), ("assistant", "cat"))
    assert learned_text(tokenizer, chat) == "dog<|im_end|>!|cat<|im_end|>!"


_TOKENIZER = tiny.train_tokenizer()


def test_a_tokenizer_must_be_a_fast_one_and_have_an_end_of_sequence(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no fast \(Rust\) version") as caught:
        make(object())
    assert caught.value.where == "model.name"
    other = tiny.train_tokenizer()
    other.eos_token = None
    for example in (Text("one"), Completion("one", "two")):
        with pytest.raises(DataError, match="no end-of-sequence token"):
            make(other).encode([example])


def test_what_a_tokenizer_puts_in_front_of_every_text_is_there_once_and_is_no_target() -> None:
    tokenizer = tiny.train_tokenizer()
    plain = make(tokenizer)
    assert plain.bos_text == ""
    (without,) = rows_of(plain, Text("one two"))
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    # A token of that name alone is not put there.
    assert make(tokenizer).bos_text == ""
    begin = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)])
    tokenizer.backend_tokenizer.post_processor = begin
    encoder = make(tokenizer)
    assert encoder.bos_text == "<|endoftext|>"
    (row,) = rows_of(encoder, Text("one two"))
    assert row.ids == [bos, *without.ids]
    assert mask_of(row) == [0, *mask_of(without)]
    (pair,) = rows_of(encoder, Completion("one ", "two"))
    assert (pair.ids[0], mask_of(pair)[0]) == (bos, 0)
    learned = tokenizer.decode([token for token, mask in zip(pair.ids, mask_of(pair), strict=True) if mask])
    assert learned == "two<|im_end|>"
    # Rendered conversations have their own.
    (chat,) = rows_of(encoder, conversation(("user", "one"), ("assistant", "two")))
    assert bos not in chat.ids


def test_truncation_and_padding_that_a_tokenizers_file_asks_for_do_not_happen() -> None:
    tokenizer = tiny.train_tokenizer()
    (expected,) = rows_of(make(tokenizer), Text("one two three"))
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    (row,) = rows_of(make(tokenizer), Text("one two three"))
    assert row == expected


def test_labelled_text_has_the_special_tokens_of_a_classifier_and_says_whether_it_was_cut(tokenizer: Any) -> None:
    whole = tokenizer("one two three four")["input_ids"]
    for limit in (len(whole) - 1, len(whole), len(whole) + 1):
        encoder = make(tokenizer, max_length=limit)
        # The second too: each call of a tokenizer of Transformers sets anew whether it truncates.
        for _ in range(2):
            (encoded,) = encoder.encode([Labelled("one two three four", "b")])
            (row,) = encoded.rows
            assert (row.ids, row.spans, row.label) == (whole[:limit], (), "b")
            assert row.truncated == (limit < len(whole))
            assert encoded.truncated_tokens == max(0, len(whole) - limit)
            assert row.supervised == 1


@pytest.mark.parametrize(
    ("spans", "count"), [(((0, 3),), 2), (((0, 1),), 0), (((0, 1), (2, 5)), 3), (((1, 2),), 1), (((0, 0), (2, 5)), 3)]
)
def test_the_first_token_of_a_row_is_no_target(spans: tuple[tuple[int, int], ...], count: int) -> None:
    assert Tokens([7] * 5, spans).supervised == count


def test_prompts_that_end_in_white_space_are_served_as_they_are_trained_however_many_there_are(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.data.tokenize.encode._MOST_TAILS", 3)
    encoder = make(tokenizer)
    for number in range(12):
        for space in ("  ", " \n", "\n\n"):
            for prompt in (f"row {number}:{space}", space):
                (row,) = rows_of(encoder, Completion(prompt, "yes"))
                served = tokenizer(prompt, add_special_tokens=False)["input_ids"]
                assert row.ids[: len(served)] == served
                assert mask_of(row)[len(served)] == 1
                assert not any(mask_of(row)[: len(served)])
        assert len(encoder._tails) <= 4


@settings(deadline=None, max_examples=examples(60))
@given(words=st.integers(1, 60), limit=st.integers(3, 20), overlap=st.integers(0, 18))
def test_each_token_of_a_long_text_is_learned_once_whatever_its_pieces_share(
    words: int, limit: int, overlap: int
) -> None:
    """`prepare.chunk_overlap`: what a piece shares with the one before is there to be read, and not learned again."""
    overlap = min(overlap, limit - 2)
    tokenizer = _TOKENIZER
    text = " ".join(tiny.WORDS[at % len(tiny.WORDS)] for at in range(words))
    whole = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    encoder = Tokenizer(
        tokenizer, train_on="completion", max_length=limit, on_too_long="truncate", chunk_overlap=overlap
    )
    pieces = rows_of(encoder, Text(text))
    learned = [0] * len(whole)
    for number, piece in enumerate(pieces):
        start = number * (limit - overlap)
        if overlap == 0 and number == len(pieces) - 1 and len(whole) - start == 1:
            # One token alone has nothing to be predicted from, and takes the last of the piece before.
            start -= 1
        elif overlap == 0 and number == len(pieces) - 2 and len(whole) - start == limit + 1:
            assert piece.ids == whole[start : start + limit - 1]
        assert piece.ids == whole[start : start + len(piece.ids)]
        assert 2 <= len(piece.ids) <= limit or len(whole) == 1
        for at, is_learned in enumerate(mask_of(piece)):
            learned[start + at] += int(is_learned)
        assert not number or not any(mask_of(piece)[:overlap])
    assert learned == [1] * len(whole)


def test_a_cut_off_row_is_the_beginning_of_the_whole_one_and_learns_all_that_is_left(tokenizer: Any) -> None:
    chat = conversation(("user", "one two three"), ("assistant", " ".join(tiny.WORDS)))
    (whole,) = rows_of(make(tokenizer), chat)
    begins, end = mask_of(whole).index(1), len(whole.ids)
    for limit in (begins + 1, begins + 2, begins + 9, end - 3):
        (row,) = rows_of(make(tokenizer, max_length=limit), chat)
        assert row.ids == whole.ids[:limit]
        assert mask_of(row) == mask_of(whole)[:limit]
        assert mask_of(row)[-1]
        assert row.truncated
    assert not whole.truncated
    encoded = make(tokenizer, max_length=end - 3).encode([chat])[0]
    assert (encoded.truncated_tokens, encoded.answers_lost, encoded.dropped) == (3, 0, 0)


def test_an_answer_that_is_cut_off_whole_is_counted(tokenizer: Any) -> None:
    chat = conversation(("user", " ".join(tiny.WORDS)), ("assistant", "one"))
    encoded = make(tokenizer, max_length=20).encode([chat])[0]
    assert (encoded.rows, encoded.answers_lost) == ([], 1) or (encoded.answers_lost, encoded.rows[0].supervised) == (
        1,
        0,
    )
    dropped = make(tokenizer, max_length=20, on_too_long="drop").encode([chat])[0]
    with pytest.raises(DataError, match=r"data\.max_length is 20"):
        make(tokenizer, max_length=20, on_too_long="error").encode([chat])
    (whole,) = rows_of(make(tokenizer), chat)
    assert (dropped.rows, dropped.dropped, dropped.dropped_tokens) == ([], 1, len(whole.ids))


def test_a_template_that_rewrites_answers_is_noted(with_template: Callable[[str], Any]) -> None:
    upper = (
        "{% for m in messages %}<|im_start|>{{ m['content'] | upper if m['role'] == 'assistant' else m['content'] }}"
    )
    chat = conversation(("user", "a"), ("assistant", "b"))
    (noted,) = make(with_template(upper + "<|im_end|>{% endfor %}")).encode([chat])
    assert noted.notes == {"answers_rewritten"}
    (faithful,) = make(with_template(upper.replace(" | upper", "") + "<|im_end|>{% endfor %}")).encode([chat])
    assert faithful.notes == frozenset()


def test_without_a_generation_prompt_the_header_is_learned_too(with_template: Callable[[str], Any]) -> None:
    """A server that renders no header leaves it to the model to write one."""
    plain = tiny.CHATML.split("{% if add_generation_prompt %}")[0]
    chat = conversation(("user", "what"), ("assistant", "a dog"))
    assert learned_text(with_template(plain), chat) == "<|im_start|>assistant\na dog<|im_end|>"


def test_a_template_without_an_end_of_turn_gets_the_end_of_sequence(with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    (row,) = rows_of(make(tokenizer), conversation(("user", "a"), ("assistant", "the dog")))
    assert row.ids[-1] == tokenizer.eos_token_id
    assert mask_of(row)[-1] == 1
