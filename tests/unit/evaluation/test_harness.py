"""lm-eval's tasks: the engine as lm-eval asks it, beside lm-eval's own model; and what becomes of its results."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from finray.errors import FinrayError
from finray.evaluation import harness
from finray.evaluation.engines import Answer, Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.harness import TaskMetric, joined
from finray.evaluation.outcome import ModelScores, ScoreEstimate
from finray.evaluation.result_cache import ResultCache
from finray.evaluation.statistics import Interval

LIMIT = 24


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Path, tokenizer: Any) -> tuple[Any, Any]:
    """finray's engine as a model of lm-eval, and lm-eval's own."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=LIMIT - 1)
    engine = TransformersEngine.of(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval(), tokenizer, batch_size=2
    )
    engine.max_length = LIMIT
    return model_of(engine, True), theirs


def model_of(engine: Any, adapter: bool) -> Any:
    """The engine as a model of lm-eval that knows no result from before."""
    known: dict[int, Any] = {}
    return harness._model(engine, adapter, harness._Results(known, known.__setitem__))


def cache_in(folder: Path) -> ResultCache:
    return ResultCache(folder, "harness", {"model": "tiny"})


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


SHORT, LONG = "the cat runs", " ".join(["the dog sings", "a river", "seven green trees sleep"] * 9)


def test_likelihoods_are_those_of_lm_evals_own_model(pair: tuple[Any, Any]) -> None:
    """With a context and without one, and of a context that is too long, of which the beginning is left out."""
    requests = asked("loglikelihood", (SHORT, " away"), ("", "tree"), (LONG, " two three"), (SHORT, " and a dog"))
    ours, theirs = (one.loglikelihood(requests, disable_tqdm=True) for one in pair)
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], rel=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_what_greedy_search_would_say_is_greedy(pair: tuple[Any, Any]) -> None:
    ours, _ = pair
    (said,) = ours.generate_until(asked("generate_until", (SHORT, {"max_gen_toks": 2, "until": []})))
    found = ours.loglikelihood(asked("loglikelihood", (SHORT, said), (SHORT, said[:-1] + "@")), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]


@pytest.mark.parametrize("text", [SHORT, LONG, "a"])
def test_rolling_likelihoods_are_those_of_lm_evals_own_model(pair: tuple[Any, Any], text: str) -> None:
    """Of a text of several windows too: each continues from the last token of the one before."""
    requests = asked("loglikelihood_rolling", (text,), (text + " water",))
    ours, theirs = (one.loglikelihood_rolling(requests, disable_tqdm=True) for one in pair)
    assert ours == pytest.approx(theirs, rel=1e-4)


class Recorder:
    """An engine that notes what it is asked, and answers with the number of the row."""

    name, version, max_length = "recorder", "1", 40

    def __init__(self, tokenizer: Any, text: str = "{row} and.more;") -> None:
        self.tokenizer, self.text = tokenizer, text
        self.calls: list[tuple[list[list[int]], Sampling, list[int], bool]] = []

    def generate(self, prompts: Any, sampling: Sampling, *, rows: Any, adapter: bool) -> Any:
        self.calls.append(([list(one) for one in prompts], sampling, list(rows), adapter))
        yield from (Answer(row, (1,), sampling.cut(self.text.format(row=row)), "stop") for row in reversed(rows))


def test_answers_by_their_options_and_in_the_order_of_the_requests(tokenizer: Any) -> None:
    engine = Recorder(tokenizer)
    one, other = (
        {"until": [".", ""], "max_gen_toks": 5},
        {"until": ";", "do_sample": True, "temperature": 0.5, "top_p": 0.9},
    )
    plain = {"temperature": 0.7}
    requests = asked("generate_until", ("one", one), (LONG, other), ("two", dict(one)), ("three", plain))
    found = model_of(engine, False).generate_until(requests)
    assert found == ["0 and", "1 and.more", "2 and", "3 and.more;"]
    first, second, third = engine.calls
    assert first == (
        [tokenizer("one")["input_ids"], tokenizer("two")["input_ids"]],
        Sampling(5, stop=(".",)),
        [0, 2],
        False,
    )
    assert second[1:] == (Sampling(256, 0.5, 0.9, stop=(";",)), [1], False)
    assert third[1:] == (Sampling(256), [3], False), "a temperature without sampling is none"
    model_of(engine, False).generate_until(asked("generate_until", ("one", {"do_sample": True})))
    assert engine.calls[-1][1] == Sampling(256), "nor is sampling without a temperature"
    # Room is left for the answer, at the cost of the beginning; where there is none for both, a token is read.
    short = {"max_gen_toks": 30, "until": []}
    model_of(engine, True).generate_until(asked("generate_until", (LONG, short)))
    assert engine.calls[-1][0] == [tokenizer(LONG)["input_ids"][-10:]]
    assert engine.calls[-1][3] is True
    for room, read in ((39, 1), (40, 1), (50, 1), (38, 2)):
        options = {"max_gen_toks": room, "until": []}
        model_of(engine, True).generate_until(asked("generate_until", (LONG, options)))
        assert engine.calls[-1][0] == [tokenizer(LONG)["input_ids"][-read:]]


@pytest.mark.parametrize(
    ("texts", "counted"), [((SHORT,), ""), ((SHORT, LONG), "1 prompt of lm-eval was"), ((LONG,) * 2, "2 prompts of")]
)
def test_prompts_that_lost_their_beginning_are_counted_and_the_longest_is_named(
    lm_eval_says: dict[str, Any], tokenizer: Any, texts: tuple[str, ...], counted: str, tmp_path: Path
) -> None:
    told: list[str] = []
    options = {"max_gen_toks": 5, "until": []}
    lm_eval_says["ask"] = lambda model: model.generate_until(
        asked("generate_until", *((text, options) for text in texts))
    )
    harness.run(Recorder(tokenizer), ["t"], adapter=True, seed=0, cache=cache_in(tmp_path), notify=told.append)
    longest = len(tokenizer(LONG)["input_ids"]) + 5
    said = (
        f" too long and lost the beginning: with what follows, the longest has {longest} tokens, and the model reads 40"
    )
    assert [line[: len(counted)] for line in told] == [counted] * bool(counted)
    assert all(line.endswith(said) for line in told)


def test_the_tokenizers_side_of_the_model(tokenizer: Any) -> None:
    model = model_of(Recorder(tokenizer), True)
    assert model.eot_token_id == model.prefix_token_id == tokenizer.eos_token_id
    assert model.tokenizer_name == str(tokenizer.name_or_path)
    chat = [{"role": "user", "content": "a cat"}]
    assert model.apply_chat_template(chat).endswith("assistant\n")
    assert model.apply_chat_template(chat) == model.apply_chat_template(chat, add_generation_prompt=False) + (
        "<|im_start|>assistant\n"
    )
    with_bos = SimpleNamespace(eos_token_id=5, bos_token_id=9, name_or_path="x")
    assert model_of(Recorder(with_bos), True).prefix_token_id == 9


RESULTS = {
    "higher_is_better": {"t": {"acc": True, "bleu": False, "words": False}, "group": {"acc": None}},
    "results": {
        "t": {
            "alias": "t",
            "acc,none": 0.75,
            "acc_stderr,none": 0.1,
            "f1,none": 0.9,
            "f1_stderr,none": "N/A",
            "bleu,none": 30.0,
            "bleu_stderr,none": 2.0,
            "exact,strict": 0.5,
            "exact_stderr,strict": 0.2,
            "words,none": "many",
            "part,none": 0.5,
            # A count of lm-eval's, and no metric: those name their filter.
            "sample_len": 4,
        },
        "group": {"acc,none": 0.6, "acc_stderr,none": 0.05},
    },
    "samples": {
        "t": [
            {"filter": "none", "doc_id": 2, "acc": 1.0, "f1": 0.2, "bleu": ("a", "b"), "part": 0.5},
            {"filter": "none", "doc_id": 0, "acc": 0.0, "f1": 0.2, "bleu": ("a", "b"), "part": ("a", "b")},
            {"filter": "none", "doc_id": 3, "acc": True, "f1": 0.2, "bleu": ("a", "b")},
            {"filter": "none", "doc_id": 1, "acc": np.float64(1), "f1": 0.2, "bleu": ("a", "b")},
            {"filter": "strict", "doc_id": 1, "exact": 1},
            {"filter": "strict", "doc_id": 0, "exact": 0},
        ]
    },
}


@pytest.fixture
def lm_eval_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def simple_evaluate(model: Any, **options: Any) -> Any:
        seen.update(options, model=model)
        if isinstance(seen.get("error"), BaseException):
            raise seen["error"]
        seen.get("ask", lambda model: None)(model)
        return RESULTS

    monkeypatch.setattr("lm_eval.simple_evaluate", simple_evaluate)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: options)
    return seen


def test_metrics_of_lm_eval_with_their_rows_where_they_are_means(
    lm_eval_says: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    found = harness.run(Recorder(tokenizer), ["t", "group"], adapter=True, seed=4, cache=cache_in(tmp_path))
    assert set(found) == {"t acc", "t f1", "t bleu", "t part", "t exact (strict)", "group acc"}
    rows = found["t acc"].rows
    assert rows is not None
    assert rows.tolist() == [[0.0], [1.0], [1.0], [1.0]], "in the order of the documents"
    assert (found["t acc"].value, found["t acc"].error) == (0.75, 0.1)
    assert found["t f1"] == TaskMetric(0.9, None, None), "no mean of its rows"
    assert found["t bleu"] == TaskMetric(30.0, 2.0, None, higher_is_better=False), "rows without numbers"
    assert found["t part"] == TaskMetric(0.5, None, None), "only some rows are numbers"
    strict = found["t exact (strict)"].rows
    assert strict is not None
    assert strict.tolist() == [[0.0], [1.0]]
    assert found["group acc"] == TaskMetric(0.6, 0.05, None), "a group has no samples"
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    assert {lm_eval_says[name] for name in seeds} == {4}
    assert lm_eval_says["bootstrap_iters"] == 0
    assert lm_eval_says["task_manager"] == {"include_path": None, "include_defaults": True}


def test_task_files_are_found_by_the_name_that_stands_in_them(
    lm_eval_says: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("group: x\ntask: colours  \nmore: 1\n", encoding="utf-8")
    engine: Any = Recorder(tokenizer)
    harness.run(engine, [str(file)], adapter=True, seed=0, cache=cache_in(tmp_path))
    assert lm_eval_says["tasks"] == ["colours"]
    assert lm_eval_says["task_manager"] == {"include_path": [str(tmp_path)], "include_defaults": False}
    harness.run(engine, [str(file), "arc_easy"], adapter=True, seed=0, cache=cache_in(tmp_path))
    assert lm_eval_says["tasks"] == ["colours", "arc_easy"]
    assert lm_eval_says["task_manager"]["include_defaults"] is True


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such task\nmore"), "lm-eval failed: ValueError: no such task"),
        (FinrayError("our own"), "our own"),
        # Memory that is full is not lm-eval's fault.
        (MemoryError("all of it"), ""),
    ],
)
def test_whatever_lm_eval_raises_is_one_message(
    lm_eval_says: dict[str, Any], tokenizer: Any, error: Exception, expected: str, tmp_path: Path
) -> None:
    lm_eval_says["error"] = error
    with pytest.raises((FinrayError, MemoryError)) as caught:
        harness.run(Recorder(tokenizer), ["a", "b"], adapter=True, seed=0, cache=cache_in(tmp_path))
    assert isinstance(caught.value, MemoryError) == (not expected)
    assert getattr(caught.value, "message", "") == expected


class Dying:
    """An engine that is killed after so many results, and notes for which rows it was asked."""

    def __init__(self, engine: Any, most: int | None = None) -> None:
        self._engine, self.left, self.computed = engine, most, 0
        self.name, self.version, self.max_length = "dying", "1", engine.max_length
        self.tokenizer = engine.tokenizer

    def _some(self, results: Any) -> Any:
        for one in results:
            if self.left is not None and not self.left:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            self.computed += 1
            yield one

    def generate(self, *given: Any, **options: Any) -> Any:
        return self._some(self._engine.generate(*given, **options))

    def log_likelihood(self, *given: Any, **options: Any) -> Any:
        return self._some(self._engine.log_likelihood(*given, **options))


def test_a_killed_harness_asks_for_the_rest_alone(
    lm_eval_says: dict[str, Any], pair: tuple[Any, Any], tiny_model_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Likelihoods, windows of a text, and answers, one of which is asked for twice."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    engine = TransformersEngine.of(model, tokenizer, batch_size=2)
    engine.max_length = LIMIT
    choices = asked("loglikelihood", (SHORT, " away"), (SHORT, " and a dog"), (LONG, " two three"))
    texts = asked("loglikelihood_rolling", (LONG,), (SHORT,))
    drawn = {"max_gen_toks": 3, "until": [], "do_sample": True, "temperature": 1.0}
    answers_ = asked("generate_until", (SHORT, drawn), ("a cat", {"max_gen_toks": 4, "until": []}), (SHORT, drawn))
    results: list[Any] = []

    def ask(model: Any) -> None:
        likelihoods = model.loglikelihood(choices, disable_tqdm=True)
        results.append((likelihoods, model.loglikelihood_rolling(texts), model.generate_until(answers_)))

    lm_eval_says["ask"] = ask
    (tmp_path / "whole").mkdir()
    whole = Dying(engine)
    harness.run(whole, ["t"], adapter=True, seed=0, cache=cache_in(tmp_path / "whole"))  # type: ignore[arg-type]
    computed = 0
    for most in (2, 3, None):
        some = Dying(engine, most)
        with contextlib.suppress(KeyboardInterrupt):
            harness.run(some, ["t"], adapter=True, seed=0, cache=cache_in(tmp_path))  # type: ignore[arg-type]
        computed += some.computed
    assert computed == whole.computed
    first, last = results
    # Rows in other batches may differ in the last bits.
    for one, other in zip(first[0], last[0], strict=True):
        assert other == (pytest.approx(one[0]), one[1])
    assert last[1:] == (pytest.approx(first[1]), first[2])
    likelihoods, _, said = last
    expected = pair[1].loglikelihood(choices, disable_tqdm=True)
    assert [one for one, _ in likelihoods] == pytest.approx([one for one, _ in expected], rel=1e-4)
    assert said[0] != said[2], "the same prompt is drawn for twice"
    # In another order nothing is asked for either.
    choices, texts = choices[::-1], texts[::-1]
    harness.run(Dying(engine, 0), ["t"], adapter=True, seed=0, cache=cache_in(tmp_path))  # type: ignore[arg-type]
    assert results[-1] == (last[0][::-1], last[1][::-1], last[2])


def test_scores_of_the_harness_beside_those_of_a_model_and_the_last_against_each_other() -> None:
    rows = {
        name: np.array(values)[:, None]
        for name, values in {"base": [0.0, 0, 1, 0, 0], "tuned": [1.0, 0, 1, 1, 1]}.items()
    }
    models = [
        ModelScores(name, {"loss": ScoreEstimate(2.0, Interval(1, 3, "x"))}) for name in ("other", "base", "tuned")
    ]
    several = {"t bleu": TaskMetric(40.0, 2.0, None), "t one": TaskMetric(0.5, None, None)}
    several["t f1"] = TaskMetric(0.97, 0.02, None)
    found = {name: {"t acc": TaskMetric(float(own.mean()), 0.1, own), **several} for name, own in rows.items()}
    nearly = np.array([[0.9], [1.0], [1.0], [1.0], [0.95]])
    found["tuned"]["t f1"] = TaskMetric(0.97, 0.02, nearly)
    found["other"] = {"t acc": TaskMetric(0.5, 0.1, np.zeros((4, 1))), **several}
    with_them, compared = joined(models, found, seed=0)
    assert [one.name for one in with_them] == ["other", "base", "tuned"]
    tuned = with_them[2].scores
    assert list(tuned) == ["loss", "t acc", "t bleu", "t one", "t f1"]
    assert tuned["t f1"].interval.high == 1.0, "no share is larger"
    assert (tuned["t acc"].value, tuned["t acc"].interval.method, tuned["t acc"].is_share) == (0.8, "Wilson", True)
    bleu = tuned["t bleu"]
    assert (bleu.interval.low, bleu.interval.high) == pytest.approx((40 - 1.96 * 2, 40 + 1.96 * 2), abs=1e-3)
    assert bleu.is_share is False
    assert (tuned["t one"].interval.low, tuned["t one"].interval.high) == (None, None)
    (one,) = compared
    assert (one.score, one.baseline, one.rows) == ("t acc", "base", 5), "other rows cannot be compared"
    assert (one.test.difference, one.test.gained, one.test.lost) == (pytest.approx(0.6), 3, 0)
    assert joined(models, {}, seed=0) == (models, [])
    # Rows of the baseline alone cannot be compared either.
    without = {"base": found["base"], "tuned": {"t acc": TaskMetric(0.8, 0.1, None)}}
    assert joined(models[1:], without, seed=0)[1] == []
