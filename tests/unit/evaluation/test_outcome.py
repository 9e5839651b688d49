"""The result of an evaluation as JSON, as files and as a person sees it: every field by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from finray.errors import FinrayError, ModelError
from finray.evaluation.outcome import Compared, Comparison, ModelScores, Prediction, Rate, ScoreEstimate, write
from finray.evaluation.overlap import Overlap
from finray.evaluation.statistics import Interval, Paired
from finray.results import PlainConsole
from tests.support.small_disk import files_of_at_most

NONE = Interval(None, None, "none: why")


def loss(value: float) -> ScoreEstimate:
    return ScoreEstimate(value, NONE)


def share(value: float, low: float, high: float) -> ScoreEstimate:
    return ScoreEstimate(value, Interval(low, high, "Wilson"), is_share=True)


BASE = ModelScores("base", {"loss": loss(2.0), "exact_match": share(0.25, 0.1, 0.5)})
OTHER = ModelScores("other", {"loss": loss(3.0)})
TUNED = ModelScores("tuned", {"exact_match": share(0.75, 0.5, 0.9), "loss": loss(1.0), "bleu": loss(1234.56)})
MATCH = Compared("exact_match", "base", 8, Paired(0.5, Interval(0.2, 0.7, "Agresti-Min"), 0.03125, "McNemar", 5, 1))
LOSS = Compared("loss", "base", 8, Paired(-1.0, Interval(-1.5, -0.5, "bootstrap"), 0.00001, "permutation"))
ASKED = Prediction(4, "a.jsonl:5", "why?", "so", {"base": ["no"], "tuned": ["so", "thus"]}, {"tuned": {"m": 1.0}})


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    return Comparison((BASE, TUNED), (MATCH, LOSS), ("tuned is better.",), 8, (ASKED,), tmp_path)


def shown(result: Comparison, **options: Any) -> list[str]:
    console = PlainConsole(file=StringIO(), record=True, width=160)
    result.print(console, **options)
    return [line.strip() for line in console.export_text().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("score", "text", "difference"),
    [
        (share(0.75, 0.5, 0.9), "75.0% [50.0, 90.0]", "12.5 points"),
        (ScoreEstimate(0.75, NONE, is_share=True), "75.0%", "12.5 points"),
        (ScoreEstimate(0.123456, Interval(0.1, 12.3456, "t")), "0.1235 [0.1, 12.35]", "0.125"),
        (ScoreEstimate(0.5, Interval(0.1, None, "t")), "0.5", "0.125"),
        (ScoreEstimate(0.5, Interval(None, 0.1, "t")), "0.5", "0.125"),
        (ScoreEstimate(999.94, NONE), "999.9", "0.125"),
        (ScoreEstimate(1000.0, NONE), "1000.0", "0.125"),
        (ScoreEstimate(-123456.78, NONE), "-123456.8", "0.125"),
    ],
)
def test_a_score_is_a_percentage_or_a_number_of_four_digits(score: ScoreEstimate, text: str, difference: str) -> None:
    assert score.text() == text
    assert score.difference(0.125) == difference


def test_scores_as_json() -> None:
    assert share(0.75, 0.5, 0.9).json() == {"value": 0.75, "low": 0.5, "high": 0.9, "interval": "Wilson", "share": True}
    assert loss(2.0).json() == {"value": 2.0, "low": None, "high": None, "interval": "none: why"}
    assert BASE.json() == {
        "loss": loss(2.0).json(),
        "exact_match": share(0.25, 0.1, 0.5).json(),
        "perplexity": math.exp(2.0),
    }
    assert ModelScores("m", {"accuracy": loss(1.0)}).json() == {"accuracy": loss(1.0).json()}
    assert (BASE.metrics, BASE.loss, BASE.perplexity) == ({"exact_match": 0.25}, 2.0, math.exp(2.0))
    assert ModelScores("m", {"loss": loss(10_000.0)}).perplexity == math.exp(700.0)
    assert MATCH.json() == {
        **{"score": "exact_match", "baseline": "base", "rows": 8, "difference": 0.5, "low": 0.2, "high": 0.7},
        **{"p": 0.03125, "test": "McNemar", "gained": 5, "lost": 1},
    }
    assert LOSS.json() == {
        **{"score": "loss", "baseline": "base", "rows": 8, "difference": -1.0, "low": -1.5, "high": -0.5},
        **{"p": 0.00001, "test": "permutation"},
    }


def test_a_comparison_as_json_holds_what_was_found_beside_the_scores(found: Comparison) -> None:
    plain = found.json()
    assert plain["comparisons"] == [{"model": "tuned", **MATCH.json()}, {"model": "tuned", **LOSS.json()}]
    assert (plain["in_training_data"], {"classes", "confusion"}.isdisjoint(plain)) == (None, True)
    confusion: Any = {"tuned": ((1, 2), (3, 4))}
    overlap = Overlap((1,), (2, 3), (("a:1", "b:2", 0.5),))
    more = replace(found, overlap=overlap, held_out=(OTHER,), classes=("no", "yes"), confusion=confusion).json()
    named = [{"row": "a:1", "training_row": "b:2", "shared": 0.5}]
    assert more["in_training_data"] == {"equal": 1, "shares_13_words": 2, "rows": named}
    assert more["without_training_rows"] == {"other": OTHER.json()}
    assert (more["classes"], more["confusion"]) == (["no", "yes"], confusion)


def test_the_evaluated_model_is_the_last_and_the_baseline_the_first(found: Comparison) -> None:
    assert (found.tuned, found.base) == (TUNED, BASE)
    with pytest.raises(ModelError, match="there is no baseline"):
        _ = replace(found, models=(TUNED,)).base


def test_a_table_has_a_column_for_each_model_and_each_p(found: Comparison) -> None:
    lines = [" ".join(line.replace("┃", "│").replace("│", " ").split()) for line in shown(found)]
    assert lines[0] == "8 rows; 95 % intervals"
    assert "base tuned p" in lines
    at = lines.index("exact match 25.0% [10.0, 50.0] 75.0% [50.0, 90.0] 0.031")
    assert lines[at + 1 : at + 4] == ["loss 2 1 < 0.001", "perplexity 7.389 2.718", "bleu 1234.6"]
    both = [" ".join(line.replace("┃", " ").split()) for line in shown(replace(found, models=(BASE, OTHER, TUNED)))]
    assert "base other tuned p against base p against other" in both
    against = replace(LOSS, baseline="other", test=replace(LOSS.test, p=0.25))
    three = replace(found, models=(BASE, OTHER, TUNED), compared=(MATCH, LOSS, against))
    assert "loss 2 3 1 < 0.001 0.25" in [" ".join(line.replace("│", " ").split()) for line in shown(three)]
    assert not any("intervals" in line for line in shown(replace(found, models=(ModelScores("m", {}),))))


def test_what_is_said_below_the_table(found: Comparison, tmp_path: Path) -> None:
    lines = shown(found)
    at = lines.index("tuned is better.")
    assert [" ".join(line.split()) for line in lines[at + 2 :]] == [
        *("prompt why?", "expected so", "base no", "tuned so"),
        f"predictions: {tmp_path / 'predictions.jsonl'}",
    ]
    assert not any("why?" in line for line in shown(found, samples=0))
    many = replace(found, predictions=(ASKED,) * 5)
    assert sum("why?" in line for line in shown(many)) == 3
    bare = shown(replace(found, predictions=()))
    assert bare[-1] == f"scores: {tmp_path / 'metrics.json'} (these rows have no prompts)"
    more = replace(found, rates=(Rate("tuned", "loss", 10, 5000, 4.0),), notes=("a note",))
    lines = shown(more)
    at = lines.index("tuned is better.")
    assert lines[at + 1 : at + 3] == ["tuned loss: 2.5 rows/s, 1,250 tokens/s", "a note"]


def test_rows_of_the_training_data_are_said_and_three_of_them_named(found: Comparison) -> None:
    named = tuple((f"a:{number}", f"b:{number}", 0.5) for number in range(4))
    lines = shown(replace(found, overlap=Overlap((1,), (2, 3), named), held_out=(BASE,)))
    at = lines.index("a:0 is like b:0 (50% of it)")
    assert lines[at - 1].startswith("3 of the 8 rows are in the training data, whole or in part (1 whole, 2 share runs")
    assert lines[at + 1 : at + 4] == [
        "a:1 is like b:1 (50% of it)",
        "a:2 is like b:2 (50% of it)",
        "without them, base: loss 2, exact match 25.0% [10.0, 50.0]",
    ]
    assert not any("training data" in line for line in shown(replace(found, overlap=Overlap((), (), ()))))


def test_scores_and_answers_are_written_as_they_are_shown(found: Comparison, tmp_path: Path) -> None:
    said = replace(found, predictions=(replace(ASKED, prompt="warum? äöü"), ASKED), sentences=("äöü ist besser.",))
    write(said)
    assert '\n    "äöü ist besser."\n' in (tmp_path / "metrics.json").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8")) == json.loads(json.dumps(said.json()))
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [one.json() for one in said.predictions]
    assert "äöü" in lines[0]
    (tmp_path / "more").mkdir()
    write(replace(found, predictions=(), folder=tmp_path / "more"))
    assert [one.name for one in (tmp_path / "more").iterdir()] == ["metrics.json"]
    # Answers of an earlier evaluation are no part of this one.
    write(replace(said, folder=tmp_path / "more"))
    write(replace(found, predictions=(), folder=tmp_path / "more"))
    assert (tmp_path / "more" / "predictions.jsonl").read_text(encoding="utf-8") == ""
    with pytest.raises(FinrayError, match="the scores cannot be written: ") as caught:
        write(replace(found, folder=tmp_path / "nowhere"))
    assert caught.value.where == str(tmp_path / "nowhere")
    # Those of an earlier evaluation are still there where a disk is full.
    with files_of_at_most(20), pytest.raises(FinrayError, match="the scores cannot be written: "):
        write(replace(said, rows=9))
    assert json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8")) == json.loads(json.dumps(said.json()))
    assert (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines() == lines
    # Also where the disk has room for the answers, and not for the scores.
    short = replace(ASKED, prompt="why", reference="", answers={}, scores={})
    with files_of_at_most(300), pytest.raises(FinrayError, match="the scores cannot be written: "):
        write(replace(said, predictions=(short,)))
    assert (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines() == lines
    assert sorted(one.name for one in tmp_path.iterdir()) == ["metrics.json", "more", "predictions.jsonl"]
