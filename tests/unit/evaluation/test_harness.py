"""lm-eval's tasks: the engine as lm-eval asks it, beside lm-eval's own model; and what becomes of its results."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from finray.errors import ConfigError, FinrayError
from finray.evaluation import answers, harness
from finray.evaluation.engines import Answer, Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.harness import Found, joined
from finray.evaluation.kept import Kept
from finray.evaluation.outcome import Estimate, Evaluated
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


def kept_in(folder: Path) -> Kept:
    return Kept(folder, "harness", {"model": "tiny"})


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


def test_rolling_likelihoods_by_hand(pair: tuple[Any, Any], tokenizer: Any) -> None:
    ours, theirs = pair
    ids = [tokenizer.eos_token_id, *tokenizer(SHORT)["input_ids"]]
    with torch.no_grad():
        logprobs = theirs.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = float(sum(logprobs[at, token] for at, token in enumerate(ids[1:])))
    assert ours.loglikelihood_rolling(asked("loglikelihood_rolling", (SHORT,))) == [pytest.approx(expected, abs=1e-4)]


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


def test_what_is_known_is_known_by_all_that_was_asked(tiny_model_dir: Path, tokenizer: Any) -> None:
    """In a later call with other requests, in another order; a repeated one has results of its own."""
    recorder, known = Recorder(tokenizer, "{row}"), dict[int, Any]()

    def said(*requests: tuple[str, dict[str, Any]]) -> list[str]:
        model = harness._model(recorder, True, harness._Results(known, known.__setitem__))
        return list(model.generate_until(asked("generate_until", *requests)))

    few, more, drawn = {"max_gen_toks": 2}, {"max_gen_toks": 3}, {"do_sample": True, "temperature": 0.5}
    assert said(("a", few), ("a", more), *[("a", drawn)] * 3, ("b", few)) == ["0", "1", "2", "3", "4", "5"]
    assert said(("b", few), *[("a", drawn)] * 3, ("a", more), ("a", few)) == ["5", "2", "3", "4", "1", "0"]
    whole = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    engine: Any = Dying(TransformersEngine.of(whole, tokenizer, batch_size=2))
    choices = [(SHORT, " away"), (SHORT, " and a dog"), ("a river", " away")]
    likely = []
    for order in (choices, choices[::-1]):
        model = harness._model(engine, True, harness._Results(known, known.__setitem__))
        likely.append(model.loglikelihood(asked("loglikelihood", *order), disable_tqdm=True))
    assert likely[0] == likely[1][::-1]
    assert (engine.computed, len({value for value, _ in likely[0]})) == (3, 3)


def test_a_model_without_a_limit_gets_all_of_a_text(tokenizer: Any) -> None:
    engine: Any = Recorder(tokenizer)
    engine.max_length = None
    model = model_of(engine, True)
    text = " ".join([LONG] * 40)
    model.generate_until(asked("generate_until", (text, {"max_gen_toks": 30, "until": []})))
    assert engine.calls[-1][0] == [tokenizer(text)["input_ids"]]
    assert len(engine.calls[-1][0][0]) > 2000
    assert model.too_long == []


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
    harness.run(Recorder(tokenizer), ["t"], adapter=True, seed=0, kept=kept_in(tmp_path), notify=told.append)
    longest = len(tokenizer(LONG)["input_ids"]) + 5
    said = (
        f" too long and lost the beginning: with what follows, the longest has {longest} tokens, and the model reads 40"
    )
    assert [line[: len(counted)] for line in told] == [counted] * bool(counted)
    assert all(line.endswith(said) for line in told)


def test_a_choice_whose_question_lost_its_beginning_is_counted_and_a_text_in_windows_is_not(
    pair: tuple[Any, Any],
) -> None:
    ours, _ = pair
    before = len(ours.too_long)
    ours.loglikelihood_rolling(asked("loglikelihood_rolling", (LONG,)), disable_tqdm=True)
    ours.loglikelihood(asked("loglikelihood", (SHORT, " away")), disable_tqdm=True)
    assert len(ours.too_long) == before
    ours.loglikelihood(asked("loglikelihood", (LONG, " away")), disable_tqdm=True)
    assert len(ours.too_long) == before + 1


def test_the_tokenizers_side_of_the_model(tokenizer: Any) -> None:
    model = model_of(Recorder(tokenizer), True)
    assert model.eot_token_id == model.prefix_token_id == tokenizer.eos_token_id
    assert model.tokenizer_name == str(tokenizer.name_or_path)
    chat = [{"role": "user", "content": "a cat"}]
    for more in (True, False):
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=more)
        assert model.apply_chat_template(chat, add_generation_prompt=more) == expected
    assert model.apply_chat_template(chat).endswith("assistant\n")

    class WithBos:
        eos_token_id, bos_token_id, name_or_path = 5, 9, "x"

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(text), options.get("add_special_tokens", 7)]}

    other = model_of(Recorder(WithBos()), True)
    assert (other.eot_token_id, other.prefix_token_id) == (5, 9)
    assert other.tok_encode("abc") == [3, 7]
    assert other.tok_encode("abc", add_special_tokens=False) == [3, False]
    assert other.tok_encode("abc", add_special_tokens=True) == [3, True]


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
    found = harness.run(Recorder(tokenizer), ["t", "group"], adapter=True, seed=4, kept=kept_in(tmp_path))
    assert set(found) == {"t acc", "t f1", "t bleu", "t part", "t exact (strict)", "group acc"}
    rows = found["t acc"].rows
    assert rows is not None
    assert rows.tolist() == [[0.0], [1.0], [1.0], [1.0]], "in the order of the documents"
    assert (found["t acc"].value, found["t acc"].error) == (0.75, 0.1)
    assert found["t f1"] == Found(0.9, None, None), "no mean of its rows"
    assert found["t bleu"] == Found(30.0, 2.0, None, higher_is_better=False), "rows without numbers"
    assert found["t part"] == Found(0.5, None, None), "only some rows are numbers"
    strict = found["t exact (strict)"].rows
    assert strict is not None
    assert strict.tolist() == [[0.0], [1.0]]
    assert found["group acc"] == Found(0.6, 0.05, None), "a group has no samples"
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
    harness.run(engine, [str(file)], adapter=True, seed=0, kept=kept_in(tmp_path))
    assert lm_eval_says["tasks"] == ["colours"]
    assert lm_eval_says["task_manager"] == {"include_path": [str(tmp_path)], "include_defaults": False}
    harness.run(engine, [str(file), "arc_easy"], adapter=True, seed=0, kept=kept_in(tmp_path))
    assert lm_eval_says["tasks"] == ["colours", "arc_easy"]
    assert lm_eval_says["task_manager"]["include_defaults"] is True
    other = tmp_path / "more" / "file.yaml"
    other.parent.mkdir()
    other.write_text("task: shapes\n", encoding="utf-8")
    harness.run(engine, [str(file), str(other)], adapter=True, seed=0, kept=kept_in(tmp_path))
    assert lm_eval_says["tasks"] == ["colours", "shapes"]
    assert lm_eval_says["task_manager"]["include_path"] == [str(tmp_path), str(other.parent)]


def test_lm_eval_prints_errors_alone(lm_eval_says: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    theirs = logging.getLogger("lm_eval")
    before = theirs.level
    try:
        theirs.setLevel(logging.INFO)
        harness.run(Recorder(tokenizer), ["t"], adapter=True, seed=0, kept=kept_in(tmp_path))
        assert not theirs.isEnabledFor(logging.WARNING)
        assert theirs.isEnabledFor(logging.ERROR)
    finally:
        theirs.setLevel(before)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such task\nmore"), "lm-eval failed: ValueError: no such task"),
        (FinrayError("our own"), "our own"),
    ],
)
def test_whatever_lm_eval_raises_is_one_message(
    lm_eval_says: dict[str, Any], tokenizer: Any, error: Exception, expected: str, tmp_path: Path
) -> None:
    lm_eval_says["error"] = error
    with pytest.raises(FinrayError) as caught:
        harness.run(Recorder(tokenizer), ["a", "b"], adapter=True, seed=0, kept=kept_in(tmp_path))
    assert caught.value.message == expected
    assert caught.value.where in ("--harness a,b", None, "")


def test_memory_that_is_full_is_not_lm_evals_fault(
    lm_eval_says: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    lm_eval_says["error"] = MemoryError()
    with pytest.raises(MemoryError):
        harness.run(Recorder(tokenizer), ["a"], adapter=True, seed=0, kept=kept_in(tmp_path))


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
        results.append(
            (
                model.loglikelihood(choices, disable_tqdm=True),
                model.loglikelihood_rolling(texts),
                model.generate_until(answers_),
            )
        )

    lm_eval_says["ask"] = ask
    (tmp_path / "whole").mkdir()
    whole = Dying(engine)
    harness.run(whole, ["t"], adapter=True, seed=0, kept=kept_in(tmp_path / "whole"))  # type: ignore[arg-type]
    computed = 0
    for most in (2, 3, None):
        some = Dying(engine, most)
        with contextlib.suppress(KeyboardInterrupt):
            harness.run(some, ["t"], adapter=True, seed=0, kept=kept_in(tmp_path))  # type: ignore[arg-type]
        computed += some.computed
    assert computed == whole.computed
    first, last = results
    assert last == first
    likelihoods, _, said = last
    expected = pair[1].loglikelihood(choices, disable_tqdm=True)
    assert [one for one, _ in likelihoods] == pytest.approx([one for one, _ in expected], rel=1e-4)
    assert said[0] != said[2], "the same prompt is drawn for twice"
    again = Dying(engine, 0)
    harness.run(again, ["t"], adapter=True, seed=0, kept=kept_in(tmp_path))  # type: ignore[arg-type]
    assert results[-1] == first


def test_what_the_harness_is_asked_and_what_it_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run(engine: Any, tasks: Any, **options: Any) -> dict[str, Found]:
        options.pop("notify")("prompts were too long")
        kept.append(options.pop("kept"))
        seen.update(options, engine=engine, tasks=tasks)
        return {"t acc": Found(0.5, None, None)}

    monkeypatch.setattr(harness, "run", run)
    progress: list[tuple[str, int, int]] = []
    kept: list[Kept] = []
    case: Any = SimpleNamespace(
        request=SimpleNamespace(harness=("a", "b"), seed=7, engine="auto"),
        folder=tmp_path,
        dtype=torch.float32,
        notes=[],
        progress=lambda what, done, *, total: progress.append((what, done, total)),
    )
    engine: Any = SimpleNamespace(max_length=40)
    for adapter in (True, False):
        subject: Any = SimpleNamespace(name="tuned", adapter=adapter, identity={"of": adapter})
        assert answers._harness(case, subject, engine) == {"t acc": Found(0.5, None, None)}
        assert seen == {"engine": engine, "tasks": ("a", "b"), "adapter": adapter, "seed": 7}
    assert case.notes == ["prompts were too long"] * 2
    belongs = {"engine": "auto", "dtype": "torch.float32", "reads": 40, "seed": 7}
    assert [one._belongs for one in kept] == [{"model": {"of": adapter}, **belongs} for adapter in (True, False)]
    assert progress == [("tuned harness", 0, 2), ("tuned harness", 2, 2)] * 2


def test_scores_of_the_harness_beside_those_of_a_model_and_the_last_against_each_other() -> None:
    rows = {
        name: np.array(values)[:, None]
        for name, values in {"base": [0.0, 0, 1, 0, 0], "tuned": [1.0, 0, 1, 1, 1]}.items()
    }
    models = [Evaluated(name, {"loss": Estimate(2.0, Interval(1, 3, "x"))}) for name in ("other", "base", "tuned")]
    found = {
        "base": {
            "t acc": Found(0.2, 0.1, rows["base"]),
            "t bleu": Found(30.0, 2.0, None),
            "t one": Found(0.5, None, None),
        },
        "tuned": {
            "t acc": Found(0.8, 0.1, rows["tuned"]),
            "t bleu": Found(40.0, 2.0, None),
            "t one": Found(0.6, None, None),
        },
    }
    found["other"] = {
        "t acc": Found(0.5, 0.1, np.zeros((4, 1))),
        "t bleu": found["base"]["t bleu"],
        "t one": found["base"]["t one"],
    }
    with_them, compared = joined(models, found, seed=0)
    assert [one.name for one in with_them] == ["other", "base", "tuned"]
    tuned = with_them[2].scores
    assert list(tuned) == ["loss", "t acc", "t bleu", "t one"]
    assert (tuned["t acc"].value, tuned["t acc"].interval.method, tuned["t acc"].is_share) == (0.8, "Wilson", True)
    bleu = tuned["t bleu"]
    assert (bleu.interval.low, bleu.interval.high) == (
        pytest.approx(40 - 1.96 * 2, abs=1e-3),
        pytest.approx(40 + 1.96 * 2, abs=1e-3),
    )
    assert bleu.is_share is False
    assert (tuned["t one"].interval.low, tuned["t one"].interval.high) == (None, None)
    (one,) = compared
    assert (one.score, one.baseline, one.rows) == ("t acc", "base", 5), "other rows cannot be compared"
    assert (one.found.difference, one.found.gained, one.found.lost) == (pytest.approx(0.6), 3, 0)
    assert joined(models, {}, seed=0) == (models, [])
    edges = {str(value): Found(value, None, None) for value in (-0.5, 0.0, 1.0, 1.5)}
    ((edged,), _) = joined(models[2:], {"tuned": edges}, seed=0)
    shares = {name: one.is_share for name, one in edged.scores.items() if name != "loss"}
    assert shares == {"-0.5": False, "0.0": True, "1.0": True, "1.5": False}
    # Rows of the baseline alone cannot be compared either.
    without = {"base": found["base"], "tuned": {"t acc": Found(0.8, 0.1, None)}}
    assert joined(models[1:], without, seed=0)[1] == []


def test_the_seed_draws_the_interval_and_the_test_of_graded_rows_of_the_harness() -> None:
    draw = np.random.default_rng(3)
    first = draw.random((20, 1))
    rows = {"base": first, "tuned": first + draw.normal(0.1, 0.3, (20, 1))}
    models = [Evaluated(name, {}) for name in rows]
    found = {name: {"t f1": Found(float(own.mean()), None, own)} for name, own in rows.items()}
    drawn = [joined(models, found, seed=seed) for seed in (0, 5, 5)]
    spans = [with_them[1].scores["t f1"].interval for with_them, _ in drawn]
    tests = [one.found for _, (one,) in drawn]
    assert spans[0] != spans[1] == spans[2]
    assert tests[0].interval != tests[1].interval == tests[2].interval
    assert tests[0].p != tests[1].p == tests[2].p


def test_lm_eval_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.require()
    monkeypatch.setattr(harness, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(ConfigError, match="not installed") as caught:
        harness.require()
    assert caught.value.where == "--harness"
