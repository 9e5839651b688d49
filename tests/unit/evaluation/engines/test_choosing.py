"""What no engine takes, and the random numbers that answers are drawn with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finray.errors import ConfigError, DataError, ModelError
from finray.evaluation.engines import Continuation, Sampling, make_engine
from finray.evaluation.engines.base import check_adapter, check_continuations, check_prompts
from finray.evaluation.engines.sampling import NO_TOKEN
from finray.models.artifacts import Artifact


@pytest.mark.parametrize("size", [0, -5])
def test_an_engine_that_answers_no_rows_at_a_time_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "tokenizer.json").write_text("is not looked at")
    with pytest.raises(ConfigError, match=f"a batch cannot have {size} rows") as caught:
        make_engine("transformers", Artifact(tmp_path, None, {}), batch_size=size)
    assert caught.value.where == "--batch-size"


def test_prompts_and_continuations_that_are_just_short_enough() -> None:
    check_prompts([[1] * 4, [1]], [0, 6], 5)
    check_prompts([[1] * 9], [0], None)
    with pytest.raises(DataError, match="the prompt has 5 tokens; prompt and answer together may have 5") as caught:
        check_prompts([[1], [1] * 5], [0, 6], 5)
    assert caught.value.where == "prompt 7"
    with pytest.raises(DataError, match="empty") as caught:
        check_prompts([[1], []], [3, 1], 5)
    assert caught.value.where == "prompt 2"
    check_prompts([[0, 8]], [0], None, 9)
    for token in (-1, 9):
        with pytest.raises(DataError, match=f"the model has no embedding for the token {token}") as caught:
            check_prompts([[1], [1, token]], [0, 6], None, 9)
        assert caught.value.where == "prompt 7"
        with pytest.raises(DataError, match=f"the model has no embedding for the token {token}"):
            check_continuations([Continuation([1], [token])], None, 9)
    check_continuations([Continuation([1] * 3, [2] * 3)], 5)
    check_continuations([Continuation([1] * 30, [2] * 30)], None)
    with pytest.raises(DataError, match="the row has 7 tokens, but the model reads at most 5") as caught:
        check_continuations([Continuation([1], [2]), Continuation([1] * 3, [2] * 4)], 5)
    assert caught.value.where == "row 2"
    for adapter, is_merged in ((True, True), (True, False), (False, False)):
        check_adapter(adapter, is_merged=is_merged)
    with pytest.raises(ModelError, match="merged into the weights"):
        check_adapter(False, is_merged=True)


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "row", "step"), [(0, 0, 0), (5, 1000, 7), (2**63 - 1, 2**40, 3)])
def test_a_rows_random_numbers_are_philoxs_with_a_key_of_seed_and_row(seed: int, row: int, step: int) -> None:
    """Answers of an earlier version come again; the counter of the generator is the step."""
    sampling = Sampling(temperature=1.0, seed=seed)
    key = np.array([row, seed], dtype=np.uint64)
    counter = np.array([step, 0, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    assert sampling.uniform(row, step) == (bits >> 11) / 2**53
    first = int(np.random.Philox(key=key).random_raw())
    assert sampling.row_seed(row) == first // 2
    assert 0 <= sampling.row_seed(row) < 2**63


def test_the_token_is_the_first_whose_share_exceeds_the_number() -> None:
    # One without a share is never the token, whatever the number.
    shares = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25]]).log().expand(7, -1)
    drawn = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999, 1 - 2**-53]
    assert Sampling(temperature=1.0).draw(shares, drawn).tolist() == [1, 1, 2, 2, 4, 4, 4]
    # Twice the temperature is the root of each share, an integer is a number too.
    roots = torch.tensor([0.25, 0.5, 0.25]).sqrt()
    below = (roots.cumsum(0) / roots.sum()).tolist()
    near = [below[0] - 1e-3, below[0] + 1e-3, below[1] - 1e-3, below[1] + 1e-3]
    assert Sampling(temperature=2).draw(shares[:4], near).tolist() == [1, 2, 2, 4]
    assert Sampling(temperature=1.0, top_k=1).draw(shares[:3], [0.0, 0.5, 0.99]).tolist() == [2, 2, 2]
    assert Sampling(temperature=1.0, top_p=0.6).draw(shares[:1], [0.1]).tolist() == [2]
    assert Sampling().choose(shares, range(7), [0] * 7).tolist() == [2] * 7


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.001])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_row_whose_logits_are_not_finite_has_no_token_and_the_others_have(
    temperature: float, options: dict[str, Any]
) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, 1, -inf, 9], [0, nan, 1, 2], [0, inf, 1, 2], [-inf] * 4, [nan] * 4, [-inf, -inf, 3, -inf]]
    sampling = Sampling(temperature=temperature, **options)
    for dtype in (torch.float32, torch.bfloat16):
        found = sampling.choose(torch.tensor(rows, dtype=dtype), range(6), [0] * 6).tolist()
        assert found[1:5] == [NO_TOKEN] * 4
        assert found[5] == 2
        assert 0 <= found[0] < 4
    # Divided by the temperature it overflows.
    large = sampling.choose(torch.tensor([[1e37, -1e37, 0.0]]), [0], [0]).tolist()
    assert large == [NO_TOKEN if temperature == 0.001 else 0]


def test_text_is_cut_at_the_first_of_the_words_to_stop_at() -> None:
    sampling = Sampling(stop=("ab", "c", "never"))
    for text, cut in (("xxcxab", "xx"), ("xabc", "x"), ("abx", ""), ("xyz", "xyz"), ("", "")):
        assert sampling.cut(text) == cut
    assert Sampling().cut("abc") == "abc"


@pytest.mark.parametrize(
    ("field", "good", "bad", "wanted"),
    [
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31], "0 for all tokens, or from 1 to 2**31 - 1"),
        ("stop", [(), ("a", "b")], [("a", "")], "of one character or more"),
        ("repetition_penalty", [None, 0.01, 1, 100], [0.0099, 100.5, 0.0], "from 0.01 to 100; 1 is no penalty"),
        ("temperature", [0, 0.001, 1000], [0.00099, 1001, -0.1, 1e-320, float("nan")], "0, or from 0.001 to 1000"),
        ("max_new_tokens", [1, 2**31 - 1], [0, 2**31], "from 1 to 2**31 - 1"),
        ("top_p", [1e-9, 1.0], [0.0, 1.01, 2], "above 0, and at most 1"),
        ("seed", [0, 2**63 - 1], [-1, 2**63], "from 0 to 2**63 - 1"),
    ],
)
def test_an_option_out_of_its_range_is_told_the_range(field: str, good: list[Any], bad: list[Any], wanted: str) -> None:
    for value in good:
        assert getattr(Sampling(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            Sampling(**{field: value})
        assert caught.value.where == f"--{field.replace('_', '-')}"
        assert caught.value.repair == f"use a value {wanted}"
