"""How tokens are told to a client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
