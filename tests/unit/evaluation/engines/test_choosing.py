"""Which engine is made of a name and what it is given; and the random numbers that answers are drawn with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finray.errors import ConfigError, DataError, ModelError
from finray.evaluation import engines
from finray.evaluation.engines import Continuation, Sampling, base, joins_gpus, make_engine, require_engine
from finray.evaluation.engines import transformers as own
from finray.evaluation.engines.base import Loading, check_adapter, check_continuations, check_prompts
from finray.evaluation.engines.sampling import NO_TOKEN
from finray.models.artifacts import Artifact

ARTIFACT = Artifact(Path("a-model"), None, {})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Loading]]:
    """Engines by name and what they were made of, on a machine without a GPU that computes in fp16, say."""
    found: list[tuple[str, Loading]] = []

    def named(group: str, name: str, *, where: str) -> Callable[[Loading], Any]:
        assert (group, where) == ("finray.engines", "--engine")
        return lambda loading: found.append((name, loading)) or name

    monkeypatch.setattr(engines, "load_named", named)
    monkeypatch.setattr(base, "load_tokenizer", lambda model: f"tokenizer of {model.name}")
    monkeypatch.setattr(base, "inference_device", lambda: torch.device("meta"))
    default = {torch.device("meta"): torch.float16}
    monkeypatch.setattr(base, "inference_dtype", lambda precision, device: precision or default[device])
    return found


@pytest.mark.parametrize(("has_vllm", "name"), [(True, "vllm"), (False, "transformers")])
def test_auto_is_vllm_where_it_is_installed(
    made: list[tuple[str, Loading]], monkeypatch: pytest.MonkeyPatch, has_vllm: bool, name: str
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda package: package if has_vllm and package == "vllm" else None)
    lines: list[str] = []
    options: dict[str, Any] = {"batch_size": 7, "merge": True, "dtype": torch.float64, "notify": lines.append}
    assert make_engine("auto", ARTIFACT, **options) == name  # type: ignore[comparison-overlap]
    device = torch.device("meta")
    expected = Loading(ARTIFACT, "tokenizer of a-model", device, torch.float64, 7, True, lines.append)
    assert made == [(name, expected)]
    why = "using finray's own engine, because vLLM is not installed (pip install vllm)"
    assert lines == ([] if has_vllm else [why])
    assert [joins_gpus(one) for one in ("auto", "vllm", "transformers")] == [has_vllm, True, False]


@pytest.mark.parametrize("size", [0, -5])
def test_an_engine_that_answers_no_rows_at_a_time_is_refused(made: list[tuple[str, Loading]], size: int) -> None:
    with pytest.raises(ConfigError, match=f"a batch cannot have {size} rows") as caught:
        make_engine("transformers", ARTIFACT, batch_size=size)
    assert (caught.value.where, bool(caught.value.repair), made) == ("--batch-size", True, [])


def test_a_model_that_vllm_does_not_take_is_answered_by_finrays_own(
    made: list[tuple[str, Loading]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = engines.load_named

    def refuse(loading: Loading) -> Any:
        raise ModelError("vLLM cannot load the model: odd", repair="none")

    monkeypatch.setattr(engines, "find_spec", lambda package: package)
    monkeypatch.setattr(
        engines, "load_named", lambda group, name, **more: refuse if name == "vllm" else usual(group, name, **more)
    )
    lines: list[str] = []
    make_engine("auto", ARTIFACT, notify=lines.append)
    assert lines == ["using finray's own engine: vLLM cannot load the model: odd"]
    # Whoever asks for vLLM gets vLLM, or why not.
    with pytest.raises(ModelError, match="odd"):
        make_engine("vllm", ARTIFACT, notify=lines.append)
    assert len(lines) == 1
    (only,) = made
    plain = Loading(ARTIFACT, "tokenizer of a-model", torch.device("meta"), torch.float16, 32, False, lines.append)
    assert only == ("transformers", plain)
    assert (Loading.of(ARTIFACT).batch_size, Loading.of(ARTIFACT).merge, Loading.of(ARTIFACT).dtype) == (
        *(32, False),
        torch.float16,
    )


def test_an_engine_that_needs_a_package_is_asked_for_it_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Needy:
        @staticmethod
        def require() -> None:
            asked.append("needy")

    monkeypatch.setattr(engines, "load_named", lambda group, name, *, where: Needy if name == "needy" else object)
    for name in ("auto", "plain", "needy"):
        require_engine(name)
    assert asked == ["needy"]


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


def test_both_kinds_of_devices_have_a_limit_of_tokens_in_a_pass() -> None:
    """A GPU that has none could not answer at all."""
    assert own.PASS_TOKENS["cuda"] > own.PASS_TOKENS["cpu"] > 1000
