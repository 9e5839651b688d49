"""vLLM answers as Transformers does, with an adapter beside the weights and merged into them: `make test-engines`.

In fp32 on a CPU its kernels sum in another order: logits differ by some 1e-5, which changes a greedy answer only where
two tokens are as near to each other as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.errors import DataError, ModelError
from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import Answer, Continuation, Engine, Sampling, make_engine
from finray.evaluation.generate import generate_text
from finray.evaluation.prompts import Prompt

pytest.importorskip("vllm", reason="an environment of its own has vLLM: make test-engines")

TEXTS = ("The capital of France is", "One two three four", "Hello", "A dog and a cat went", "2 + 2 =")
GREEDY = Sampling(max_new_tokens=16)


@pytest.fixture(scope="module")
def ours(adapter: Path) -> Engine:
    return make_engine("transformers", artifact_of(adapter), dtype=torch.float32)


@pytest.fixture(scope="module")
def vllm(adapter: Path) -> Iterator[Engine]:
    made = make_engine("vllm", artifact_of(adapter), dtype=torch.float32, batch_size=4)
    yield made
    made.close()


def said(engine: Engine, sampling: Sampling = GREEDY, **options: Any) -> list[Answer]:
    ids = [engine.tokenizer(text)["input_ids"] for text in TEXTS]
    return sorted(engine.generate(ids, sampling, **options), key=lambda answer: answer.row)


def test_greedy_answers_are_those_of_transformers_with_the_adapter_and_without(vllm: Engine, ours: Engine) -> None:
    tuned, base = said(vllm), said(vllm, adapter=False)
    assert tuned == said(ours)
    assert base == said(ours, adapter=False)
    assert tuned != base, "the adapter changes some"


def test_likelihoods_are_those_of_transformers(vllm: Engine, ours: Engine) -> None:
    rows = [Continuation(vllm.tokenizer(TEXTS[0])["input_ids"], one) for one in ([7042, 30], [260], [5, 6, 7])]
    for adapter in (True, False):
        found = {one.row: one for one in vllm.log_likelihood(rows, adapter=adapter)}
        for right in ours.log_likelihood(rows, adapter=adapter):
            assert found[right.row].logprobs == pytest.approx(right.logprobs, abs=2e-3)
            assert found[right.row].is_greedy == right.is_greedy


def test_stop_strings_seeds_and_tokens_as_they_come(vllm: Engine, ours: Engine) -> None:
    stop = Sampling(16, stop=("\n",))
    told: list[tuple[int, int]] = []
    answers = said(vllm, stop, on_token=lambda *one: told.append(one))
    assert [(one.text, one.finish) for one in answers] == [(one.text, one.finish) for one in said(ours, stop)]
    assert [token for row, token in told if row == 0][: len(answers[0].tokens)] == list(answers[0].tokens)
    warm = Sampling(12, temperature=1.2, top_k=40, seed=3)
    assert said(vllm, warm) == said(vllm, warm)
    assert [one.tokens for one in said(vllm, warm)] != [
        one.tokens for one in said(vllm, Sampling(12, 1.2, seed=4, top_k=40))
    ]


def test_prompts_that_leave_no_room_are_refused(vllm: Engine) -> None:
    assert vllm.max_length is not None
    with pytest.raises(DataError, match="together may have"):
        list(vllm.generate([[5] * vllm.max_length], GREEDY))


def test_a_merged_adapter_gives_the_same_answers_and_no_base(adapter: Path, ours: Engine) -> None:
    merged = make_engine("vllm", artifact_of(adapter), dtype=torch.float32, batch_size=4, merge=True)
    assert said(merged) == said(ours)
    with pytest.raises(ModelError, match="merged"):
        said(merged, adapter=False)
    merged.close()


def test_auto_takes_vllm_and_says_nothing(adapter: Path) -> None:
    lines: list[str] = []
    found = generate_text(
        adapter, [Prompt("Hello")], sampling=Sampling(4), batch_size=2, engine="auto", notify=lines.append
    )
    assert len(found) == 1
    assert lines == []
