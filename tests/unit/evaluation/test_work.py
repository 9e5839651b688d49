"""The work of one model, with an engine that answers by numbers: what it is asked, what is kept, what is told of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finray.config.requests import EvaluationRequest
from finray.errors import DataError
from finray.evaluation import work as module
from finray.evaluation.engines import Continuation, Likelihood, Sampling
from finray.evaluation.rows import EvaluationRows
from finray.evaluation.subjects import Subject
from finray.evaluation.work import Work
from finray.models.artifacts import Artifact

# Token ids and what is learned of them, by row of the split. Tokens are characters.
SPLIT = [
    ("ab|cd", [0, 0, 0, 1, 1]),
    ("xyz", [1, 1, 1]),
    ("q:no.", [0, 0, 1, 1, 1]),
    ("ab|cde", [0, 1, 0, 1, 0, 1]),
    ("not evaluated", [0] * 12 + [1]),
    ("s: yes!", [0, 0, 1, 1, 1, 1, 0]),
]
NUMBERS = (5, 0, 3, 1, 2)


class Split:
    chosen = ""

    def row(self, number: int) -> tuple[Any, Any]:
        text, mask = SPLIT[number]
        return np.array([ord(letter) for letter in text], dtype=np.int32), np.array(mask, dtype=np.uint8)

    def where(self, number: int) -> str:
        return f"rows.jsonl:{number + 1}"


class Words:
    """Tokens are characters; `.` is a special token."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, ids))
        return text.replace(".", "") if skip_special_tokens else text


class Engine:
    """The likelihood of a token is given by the one before it. The last come first."""

    name, version = "counting", "1.5"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool) -> Iterator[Likelihood]:
        self.asked.append(([("".join(map(chr, one.context)), "".join(map(chr, one.tokens))) for one in rows], adapter))
        for number, one in reversed(list(enumerate(rows))):
            before = [one.context[-1], *one.tokens[:-1]]
            yield Likelihood(
                number,
                tuple(-token / 1000 - previous for token, previous in zip(one.tokens, before, strict=True)),
                True,
            )


def logprob(text: str, at: int) -> float:
    return -ord(text[at]) / 1000 - ord(text[at - 1])


class Made:
    """A model's work in a folder, and what it has told."""

    def __init__(self, folder: Path, **subject: Any) -> None:
        self.told: list[tuple[Any, ...]] = []
        case: Any = SimpleNamespace(
            folder=folder,
            request=EvaluationRequest(engine="counting", replicas=2),
            dtype="torch.float32",
            rates=[],
            notes=[],
            progress=lambda what, done, *, total, rate: self.told.append((what, done, total, rate)),
        )
        dataset: Any = SimpleNamespace(content="c0de")
        split: Any = Split()
        self.case, self.engine = case, Engine()
        rows = EvaluationRows("eval", split, NUMBERS, dataset, True, None, "train")
        own: Any = SimpleNamespace(
            **{"name": "tuned", "identity": {"weights": "w"}, "adapter": False, "turns": True, **subject}
        )
        self.work = Work(own, rows, case, Sampling(), lambda: self.engine)


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has its part."""
    monkeypatch.setattr(module, "_ROWS", 1)


def belongs_to(folder: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{kind}-*.jsonl"))
    return [json.loads(file.read_text().splitlines()[0])["belongs_to"] for file in files]


BELONGS = {"model": {"weights": "w"}, "rows": "c0de/eval", "engine": "counting", "dtype": "torch.float32"}
COUNTING = {"name": "counting", "version": "1.5"}


def test_losses_are_summed_over_what_is_learned_and_asked_for_in_parts(tmp_path: Path) -> None:
    made = Made(tmp_path)
    found = made.work.losses()
    learned = {5: (2, 3, 4, 5), 0: (3, 4), 3: (1, 3, 5), 1: (1, 2), 2: (2, 3, 4)}
    right = [[-sum(logprob(SPLIT[row][0], at) for at in learned[row]), len(learned[row])] for row in NUMBERS]
    np.testing.assert_allclose(found, right, rtol=1e-12)
    # From the first token that is learned to the end of the row; the first of a row has nothing before it.
    assert made.engine.asked == [
        ([("s:", " yes!"), ("ab|", "cd")], False),
        ([("a", "b|cde"), ("x", "yz")], False),
        ([("q:", "no.")], False),
    ]
    assert [one[:3] for one in made.told] == [("tuned loss", done, 5) for done in (1, 2, 3, 4, 5)]
    (rate,) = made.case.rates
    assert (rate.model, rate.part, rate.rows, rate.tokens) == ("tuned", "loss", 5, 4 + 2 + 5 + 2 + 4)
    assert made.told[-1][3] == rate.text()
    assert 0 <= rate.seconds < 60
    assert made.work.made_by == [COUNTING]
    assert belongs_to(tmp_path, "losses") == [BELONGS]
    # What follows the last one counts only where it decides on positions.
    (tmp_path / "cut").mkdir()
    cut = Made(tmp_path / "cut", turns=False)
    assert cut.work.losses().tolist() == found.tolist()
    assert cut.engine.asked == [([("s:", " yes"), ("ab|", "cd")], False), *made.engine.asked[1:]]


def test_a_models_configuration_says_whether_positions_depend_on_the_row(tmp_path: Path) -> None:
    for rope, turns in (
        ({"rope_type": "default"}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        (None, True),
    ):
        plain = {"model_type": "llama", "rope_parameters": {**(rope or {}), "rope_theta": 1e4}}
        (tmp_path / "config.json").write_text(json.dumps(plain) if rope else "{")
        assert Subject("tuned", Artifact(tmp_path, None, {})).turns is turns


CHOICES = {0: ["no", "yes"], 1: ["cd", "é"], 2: ["x", "e", "ff"], 3: ["a", "b", "no"]}


def test_the_likelihoods_of_choices_begin_where_answers_do_in_training(tmp_path: Path) -> None:
    made = Made(tmp_path)
    # A prompt of no token cannot be scored: of row 1 all is learned.
    made.work.rows = EvaluationRows(
        "eval", made.work.rows.split, (5, 0, 3, 2), made.work.rows.dataset, True, None, "train"
    )
    found = made.work.likelihoods(CHOICES, Words())

    def total(prompt: str, choice: str) -> float:
        text = prompt + choice
        return sum(logprob(text, at) for at in range(len(prompt), len(text)))

    assert found == [
        ((pytest.approx(total("s:", " no")), pytest.approx(total("s:", " yes"))), (2, 3), 1),
        ((pytest.approx(total("ab|", "cd")), pytest.approx(total("ab|", "é"))), (2, 2), 0),
        (tuple(pytest.approx(total("ab|cd", one)) for one in ("x", "e", "ff")), (1, 1, 2), 1),
        (tuple(pytest.approx(total("q:", one)) for one in ("a", "b", "no")), (1, 1, 2), 2),
    ]
    assert len(made.engine.asked) == 2
    (rate,) = made.case.rates
    assert (rate.part, rate.rows, rate.tokens) == ("choices", 4, 3 + 4 + 2 + 1 + 1 + 1 + 2 + 1 + 1 + 2)
    # Other choices are another question; the same ones are not asked again.
    made.engine.asked.clear()
    assert made.work.likelihoods(CHOICES, Words()) == found
    assert made.engine.asked == []
    made.work.likelihoods({**CHOICES, 3: ["no", "b"]}, Words())
    assert len(made.engine.asked) == 2
    with pytest.raises(DataError, match="the answer `no` is not one of the choices a, b") as caught:
        made.work.likelihoods({**CHOICES, 3: ["a", "b"]}, Words())
    assert caught.value.where == "rows.jsonl:3"
