"""The judge of models that write: what it computes of whom, with which engine, and what a row shows of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finray.config.evaluation import ScoringConfig
from finray.errors import ConfigError
from finray.evaluation import answers as module
from finray.evaluation.answers import judge
from finray.evaluation.harness import Found
from finray.evaluation.outcome import Prediction
from finray.evaluation.scores.base import Answered
from finray.evaluation.subjects import EvaluationRequest, Subject

SAID = {"base": ["no", "b"], "tuned": ["a", "b"], "other": ["a", "no"]}
LOSSES = {"base": [[3.0, 2.0], [1.0, 1.0]], "tuned": [[1.0, 2.0], [1.0, 1.0]], "other": [[2.0, 4.0], [2.0, 1.0]]}


def shares(answers: list[str], references: list[str]) -> float:
    return sum(answer == right for answer, right in zip(answers, references, strict=True)) / 2


def points(answers: list[str], references: list[str]) -> float:
    return 1.5 * shares(answers, references)


def lost(answers: list[str], references: list[str]) -> float:
    return shares(answers, references) - 1


class Rows:
    numbers = (7, 3)
    split = SimpleNamespace(where=lambda number: f"rows.jsonl:{number}")

    def __init__(self, asks: bool = True) -> None:
        self.asks = asks

    def __len__(self) -> int:
        return 2

    def columns(self, config: Any) -> Any:
        assert config.data == "the run's"
        return [(at, {"choices": ["a", "b"], "id": at}) for at in range(2)]

    def prompt(self, index: int) -> str:
        return f"prompt {index}"

    def reference(self, index: int) -> str:
        return "ab"[index]


class Run:
    """A case, and what was asked of engines, models and lm-eval."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[Any] = []
        self.closed: list[str] = []
        self.work: list[Any] = []
        self.harness: list[Any] = []
        self.asked: list[Any] = []
        monkeypatch.setattr(module, "make_engine", self.engine)
        monkeypatch.setattr(module, "require_engine", lambda name: self.asked.append(name))
        monkeypatch.setattr(module.harness, "require", lambda: self.asked.append("lm-eval"))
        monkeypatch.setattr(module.harness, "run", self.run)
        monkeypatch.setattr(module, "Work", self.work_of)
        monkeypatch.setattr(
            module, "load_tokenizer", lambda model: SimpleNamespace(name=model.name, decode=self.decode)
        )

    def engine(self, name: str, artifact: Any, **options: Any) -> Any:
        self.engines.append((name, artifact.folder.name, options))
        close = lambda: self.closed.append(artifact.folder.name)  # noqa: E731
        return SimpleNamespace(name=f"engine {artifact.folder.name}", version="2", close=close, max_length=40)

    def run(self, engine: Any, tasks: Any, *, adapter: bool, seed: int, kept: Any, notify: Any) -> Any:
        assert kept.found == {}
        self.harness.append((engine.name, tasks, adapter, seed))
        return {"t acc": Found(0.5, None, None)}

    def decode(self, text: str, *, skip_special_tokens: bool) -> str:
        return text if skip_special_tokens else f"<{text}>"

    def work_of(self, subject: Any, rows: Any, case: Any, sampling: Any, opened: Any, task: Any) -> Any:
        assert task is None

        def answered(*given: Any) -> list[Answered]:
            self.work.append((subject.name, rows, sampling, *given[:-1], given[-1].name))
            opened()
            likely = {"log_likelihoods": (-1.0, -2.0), "choice_lengths": (1, 1), "right": 0} if given[2] else {}
            return [Answered((said, "x"), "ab"[at], **likely) for at, said in enumerate(SAID[subject.name])]  # type: ignore[arg-type]

        return SimpleNamespace(
            losses=lambda: np.array(LOSSES[subject.name]),
            answered=answered,
            made_by=[{"name": "old", "version": "1"}, {"name": subject.name, "version": "2"}],
        )

    def case(self, *, metrics: Any = ("exact_match",), scoring: Any = None, spread: Any = None, rows: Any = "all",
             asked: Any = None, **request: Any) -> Any:  # fmt: skip
        one, two = (
            SimpleNamespace(folder=Path(name), base=None, began_as=None, notes={}, tokenizer=SimpleNamespace(name=name))
            for name in ("model", "another")
        )
        subjects = [Subject("base", one, adapter=False), Subject("other", two), Subject("tuned", one)]  # type: ignore[arg-type]
        rows = Rows() if rows == "all" else rows
        own = {id(one): rows, id(two): rows}
        evaluation = SimpleNamespace(metrics=list(metrics), scoring=scoring, max_new_tokens=11, batch_size=6)
        return SimpleNamespace(
            request=EvaluationRequest(metrics=asked, **request),
            config=SimpleNamespace(
                foreign=("", frozenset()), evaluation=evaluation, data="the run's", cluster="a cluster"
            ),
            **{"rows": rows, "subjects": subjects, "tuned": subjects[-1], "dtype": "bf16", "spread": spread},
            notes=["a note"],
            run=None,
            folder=Path("nothing is written there"),
            by_artifact=lambda: [(one, [subjects[0], subjects[2]]), (two, [subjects[1]])],
            rows_for=lambda artifact: own[id(artifact)],
            progress=lambda what, done, *, total: self.asked.append((what, done, total)),
        )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_each_model_has_its_loss_and_scores_and_a_row_shows_all_answers(run: Run) -> None:
    names = tuple(f"{__name__}:{name}" for name in ("shares", "points", "lost"))
    case = run.case(metrics=("exact_match", *names), temperature=0.5, top_p=0.75, top_k=4, seed=9, stop=["s"])
    found = judge(case)
    assert list(found.totals) == ["exact_match", "shares", "points", "lost", "loss"]
    assert {name: own["loss"].tolist() for name, own in found.statistics.items()} == LOSSES
    exact = {name: own["exact_match"][:, 0].tolist() for name, own in found.statistics.items()}
    assert exact == {"base": [0, 1], "other": [1, 0], "tuned": [1, 1]}
    # In the order in which the models are shown, the evaluated one last.
    assert list(found.statistics) == list(found.values) == ["base", "other", "tuned"]
    tuned = found.values["tuned"]
    assert [(name, one.value, one.is_share, one.interval.low) for name, one in tuned.items()] == [
        ("shares", 1.0, True, None),
        ("points", 1.5, False, None),
        ("lost", 0.0, True, None),
    ]
    # Only what lies between 0 and 1 is shown as a percentage.
    base = found.values["base"]
    assert [(name, one.value, one.is_share) for name, one in base.items()] == [
        *(("shares", 0.5, True), ("points", 0.75, True), ("lost", -0.5, False)),
    ]
    assert found.prediction is not None
    assert found.prediction(1) == Prediction(
        **{"row": 3, "where": "rows.jsonl:3", "prompt": "<prompt 1>", "reference": "b"},
        answers={"base": ["b", "x"], "tuned": ["b", "x"], "other": ["no", "x"]},
        scores={"base": {"exact_match": 1.0}, "other": {"exact_match": 0.0}, "tuned": {"exact_match": 1.0}},
    )
    sampling = {"max_new_tokens": 11, "temperature": 0.5, "top_p": 0.75, "seed": 9, "top_k": 4, "stop": ("s",)}
    used = [{"name": name, "version": "1" if name == "old" else "2"} for name in ("old", "base", "tuned", "other")]
    assert found.made_by == {
        "engine": used,
        "sampling": {**sampling, "repetition_penalty": None},
        "metrics": ["exact_match", *names],
        "scoring": ScoringConfig().model_dump(),
        "harness": [],
    }
    assert [(one[0], one[1] is case.rows, *one[3:]) for one in run.work] == [
        ("base", True, {"answers"}, 1, {}, {}, "model"),
        ("tuned", True, {"answers"}, 1, {}, {}, "model"),
        ("other", True, {"answers"}, 1, {}, {}, "another"),
    ]
    assert {one[2].temperature for one in run.work} == {0.5}


def test_models_that_share_weights_share_an_engine_which_is_closed_before_the_next(run: Run) -> None:
    judge(run.case(engine="fast", repetition_penalty=1.5))
    options = {"batch_size": 6, "dtype": "bf16"}
    assert [(name, folder, of | options == of, of["notify"]) for name, folder, of in run.engines] == [
        ("fast", "model", True, run.engines[0][2]["notify"]),
        ("fast", "another", True, run.engines[1][2]["notify"]),
    ]
    assert {"replicas", "cluster"}.isdisjoint(run.engines[0][2])
    assert run.closed == ["model", "another"]
    assert run.asked == ["fast"]
    assert {one[2].repetition_penalty for one in run.work} == {1.5}


def test_replicas_are_made_by_what_spreads_them(run: Run) -> None:
    made: list[Any] = []

    def spread(*given: Any, **options: Any) -> Any:
        made.append(options)
        return run.engine(*given, **options)

    case = run.case(spread=spread, replicas=3)
    judge(case)
    assert [(one["replicas"], one["cluster"], one["batch_size"]) for one in made] == [(3, "a cluster", 6)] * 2
    made[0]["notify"]("more")
    assert case.notes == ["a note", "more"]


def test_lm_eval_is_asked_of_every_model_with_and_without_rows(run: Run) -> None:
    found = judge(run.case(harness=("t", "u"), seed=9))
    assert run.harness == [
        ("engine model", ("t", "u"), False, 9),
        ("engine model", ("t", "u"), True, 9),
        ("engine another", ("t", "u"), True, 9),
    ]
    assert found.harness == {name: {"t acc": Found(0.5, None, None)} for name in SAID}
    assert found.made_by["harness"] == ["t", "u"]
    assert {"name": "engine model", "version": "2"} in found.made_by["engine"]
    assert run.asked[:4] == ["lm-eval", "auto", ("base harness", 0, 2), ("base harness", 2, 2)]
    run.work.clear()
    # These scores need answers, choices and columns of rows.
    scoring = ScoringConfig(checker=f"{__name__}:shares", run_code=True)
    alone = judge(run.case(rows=None, harness=("t",), metrics=("multiple_choice", "pass_at_k"), scoring=scoring))
    assert (run.work, alone.prediction) == ([], None)
    assert alone.statistics == {name: {} for name in ("base", "other", "tuned")}
    assert [one["name"] for one in alone.made_by["engine"]] == ["engine model", "engine another"]


def test_rows_without_prompts_have_losses_only(run: Run) -> None:
    found = judge(run.case(rows=Rows(asks=False)))
    assert list(found.totals) == ["loss"]
    assert {name: list(own) for name, own in found.statistics.items()} == {name: ["loss"] for name in SAID}
    assert (run.work, run.engines, found.prediction) == ([], [], None)
    with pytest.raises(ConfigError, match=r"bleu, chrf: these rows are plain text") as caught:
        judge(run.case(rows=Rows(asks=False), asked=("bleu", "chrf")))
    assert caught.value.where == "--metrics"


def test_choices_and_columns_are_read_where_a_score_needs_them(run: Run) -> None:
    found = judge(run.case(metrics=("multiple_choice",)))
    assert [one[3:] for one in run.work[:1]] == [({"choices"}, 1, {0: ["a", "b"], 1: ["a", "b"]}, {}, "model")]
    assert found.prediction is None, "nothing was answered"
    assert found.statistics["tuned"]["multiple_choice"].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(("attempts", "temperature"), [(2, 0.0), (3, 0.5), (1, 0.0)])
def test_several_attempts_are_made_of_scores_that_take_them_and_need_a_temperature(
    run: Run, monkeypatch: pytest.MonkeyPatch, attempts: int, temperature: float
) -> None:
    scoring = ScoringConfig(checker=f"{__name__}:shares", run_code=True, attempts=attempts)
    monkeypatch.setattr("finray.evaluation.scores.code.PassAtK.statistics", lambda self, rows: np.ones((2, 1)))
    case = run.case(metrics=("pass_at_k",), scoring=scoring, temperature=temperature)
    if attempts > 1 and not temperature:
        with pytest.raises(ConfigError, match="2 attempts with greedy decoding give the same answer 2 times") as caught:
            judge(case)
        assert caught.value.where == "--temperature"
        return
    judge(case)
    wanted = ({"answers", "columns"}, attempts, {}, {at: {"choices": ["a", "b"], "id": at} for at in range(2)}, "model")
    assert run.work[0][3:] == wanted
    run.work.clear()
    # Other scores take the first answer.
    judge(run.case(scoring=scoring))
    assert run.work[0][4] == 1


@pytest.mark.parametrize("rows", ["all", None])
def test_an_interrupted_judge_says_what_is_kept_and_closes_its_engine(
    run: Run, monkeypatch: pytest.MonkeyPatch, rows: Any
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.harness, "run", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        judge(run.case(rows=rows, harness=("t",)))
    assert caught.value.__notes__ == ["finished rows are kept"]
    assert run.closed == ["model"]
