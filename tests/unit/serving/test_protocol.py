"""How tokens are told to a client."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from finray.serving.batching import TokenLogprob
from finray.serving.protocol import chat_logprobs, completion_logprobs, token_text
from tests.support import families


@pytest.mark.parametrize("family", ["chatml", "gemma-3"])
@given(text=st.text(alphabet="the cat é☃😀\n\ufffd", min_size=1, max_size=12))
def test_the_bytes_of_tokens_are_those_of_the_text(family: str, text: str) -> None:
    tokenizer = families.tokenizer(family)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    told = [token_text(tokenizer, one) for one in tokens]
    assert b"".join(content for _, content in told) == text.encode()
    # What is a character, or several, is told as such; what is part of one by its bytes.
    for said, content in told:
        whole = content.decode(errors="replace")
        is_part = "\ufffd" in whole and content != whole.encode()
        assert said == ("bytes:" + "".join(f"\\x{one:02x}" for one in content) if is_part else whole)


def test_parts_of_a_character_are_different_tokens() -> None:
    tokenizer = families.tokenizer("chatml")
    first, second, *_ = tokenizer("😀", add_special_tokens=False)["input_ids"]
    chosen = [TokenLogprob(first, -0.5, ((first, -0.5), (second, -1.5)))]
    (content,) = chat_logprobs(tokenizer, chosen)["content"]
    assert content["bytes"] == list("😀".encode()[: len(content["bytes"])])
    assert content["token"].startswith("bytes:\\xf0")
    assert len(completion_logprobs(tokenizer, chosen)["top_logprobs"][0]) == 2


def test_a_token_keeps_the_space_that_a_decoder_takes_from_the_beginning_of_a_text() -> None:
    """Decoders of Llama 2, Mistral and TinyLlama do: a token by itself would be told without it."""
    tokenizer = copy.deepcopy(families.tokenizer("gemma-3"))
    usual = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([*usual, decoders.Strip(" ", 1, 0)])
    tokens = tokenizer.convert_tokens_to_ids(["\u2581c", "at", "\u2581", "\u2581wh", "\u2581\u2581", "<0x41>"])
    said = [token_text(tokenizer, one) for one in tokens]
    assert said == [(text, text.encode()) for text in (" c", "at", " ", " wh", "  ", "A")]
    text = tokenizer.decode(tokens)
    assert text == "cat  wh  A"
    # Offsets are those of the text that the client has.
    bare = tokenizer.convert_tokens_to_ids("c")
    chosen = [TokenLogprob(one, -0.5, ((one, -0.5), (bare, -1.5))) for one in tokens]
    told = completion_logprobs(tokenizer, chosen)
    assert told["text_offset"] == [0, 1, 3, 4, 7, 9]
    assert told["top_logprobs"][0] == {" c": -0.5, "c": -1.5}
    assert completion_logprobs(tokenizer, chosen[3:5], 4)["text_offset"] == [4, 7]
