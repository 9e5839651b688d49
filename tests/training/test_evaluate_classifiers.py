"""`finray evaluate` on a classifier's run: scores, intervals, the commonest label beside it, files and refusals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from sklearn import metrics as sk

import finray
from finray.checkpoint.rundir import RunDir, saved_config
from finray.data.dataset.prepared import PreparedSplit
from finray.errors import ConfigError, DataError
from finray.evaluation import classifiers, classify
from finray.evaluation.rows import splits_of
from finray.evaluation.statistics import spearman_interval
from finray.tasks.sequence_classification import SequenceClassification
from tests.support import runs, tiny
from tests.support.evaluated import evaluate
from tests.support.runs import Plain


def finished(plain: Plain) -> Path:
    """The directory of a finished run."""
    config = runs.config_of(plain)
    made = RunDir.of(config)
    runs.run_alone(plain, made.path)
    made.keep_config(config)
    made.keep_resolved(runs.resolved_of(config))
    made.make_final(best=None, warn=lambda message: None)
    return made.path


@pytest.fixture(scope="module")
def run(classifier_run: Callable[..., Plain]) -> Path:
    return finished(classifier_run({"data.eval_ratio": 0.3, "train.max_steps": 4}, rows=60))


def trained_on(run: Path) -> PreparedSplit:
    return splits_of(RunDir(run), saved_config(RunDir(run)))[0].train


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_scores_are_those_of_the_written_predictions(run: Path) -> None:
    found = evaluate(run)
    written = lines(found.folder)
    truth, said = [one["reference"] for one in written], [one["answers"]["tuned"] for one in written]
    commonest = [one["answers"]["commonest"] for one in written]
    assert len(set(commonest)) == 1
    scores = {name: one.value for name, one in found.tuned.scores.items()}
    assert scores["accuracy"] == pytest.approx(sk.accuracy_score(truth, said))
    assert scores["f1_macro"] == pytest.approx(sk.f1_score(truth, said, average="macro"))
    assert scores["matthews_corrcoef"] == pytest.approx(sk.matthews_corrcoef(truth, said))
    assert found.base.scores["accuracy"].value == pytest.approx(sk.accuracy_score(truth, commonest))
    assert np.array_equal(found.confusion["tuned"], sk.confusion_matrix(truth, said, labels=list(found.classes)))
    low, high = found.tuned.scores["accuracy"].interval.low, found.tuned.scores["accuracy"].interval.high
    assert low is not None
    assert high is not None
    assert low < scores["accuracy"] < high or scores["accuracy"] in (0.0, 1.0)
    assert len(found.sentences) == 1
    assert "commonest" in found.sentences[0]


def test_a_baseline_with_another_vocabulary_reads_the_rows_by_its_own(run: Path, tmp_path: Path) -> None:
    """The same classifier with its tokens in another order: read by its own tokenizer, it says the same."""
    other = tmp_path / "other"
    finray.export(run, output=other)
    file, size = other / "tokenizer.json", 384
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    order = [0, 1, 2, *range(size - 1, 2, -1)]
    tokenizer["model"]["vocab"] = {token: order[place] for token, place in tokenizer["model"]["vocab"].items()}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = load_file(other / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("word_embeddings.weight")]
    weights[name] = weights[name][order].contiguous()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    found = evaluate(run, baselines=[str(other)], output=tmp_path / "out")
    assert [one.name for one in found.models] == ["other", "tuned"], "no commonest label where a baseline is named"
    for one in lines(found.folder):
        said, probability = one["answers"], {model: each["probability"] for model, each in one["scores"].items()}
        assert said["other"] == said["tuned"]
        assert probability["other"] == pytest.approx(probability["tuned"], rel=3e-3)
    assert len({one["scores"]["tuned"]["probability"] for one in lines(found.folder)}) > 3
    areas = [one.scores["roc_auc"] for one in found.models]
    (area,) = [one for one in found.compared if one.score == "roc_auc"]
    assert area.test.difference == pytest.approx(areas[1].value - areas[0].value, abs=1e-9)
    assert area.test.p > 0.05


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_several_classes_and_numbers_of_pairs_of_texts(
    problem: str, classifier_run: Callable[..., Plain], tmp_path: Path
) -> None:
    """From the file over the training to the scores, which are those of the written predictions."""
    several = [["animal"], [], ["animal", "plant"], ["plant"]]
    rows = [
        {
            "premise": f"the {word} walks",
            "hypothesis": f"a {tiny.WORDS[at // 2]} is there",
            "label": several[at % 4] if problem == "multi_label" else at % 5 / 4 - 0.375,
        }
        for at, word in enumerate(tiny.WORDS[:36])
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = {"data.source": str(source), "data.eval_ratio": 0.4, "run.output_dir": str(tmp_path / "out")}
    plainly = {"class_weights": None, "label_smoothing": 0.0}
    settings = {"train": {"max_steps": 6, "learning_rate": 0.02}, "evaluation.every_steps": 6}
    made = finished(classifier_run({**changes, **settings, "classification": plainly}))
    trained = runs.records(made, "eval")[-1]
    assert trained["step"] == 6
    found = evaluate(made)
    written = lines(found.folder)
    assert len(written) > 8
    assert "the" in written[0]["prompt"]
    assert "is there" in written[0]["prompt"]
    scores = {name: one.value for name, one in found.tuned.scores.items()}
    truth, said = [one["reference"] for one in written], [one["answers"]["tuned"] for one in written]
    if problem == "multi_label":
        assert set(truth) <= {"animal", "", "animal, plant", "plant"}
        expected = {"accuracy": float(np.mean([one == other for one, other in zip(truth, said, strict=True)]))}
        columns = [[[name in one for name in ("animal", "plant")] for one in texts] for texts in (truth, said)]
        expected["f1_macro"] = sk.f1_score(*map(np.array, columns), average="macro", zero_division=0)
    else:
        # Predictions are written with four digits: enough for this one, and too few for a correlation.
        numbers = [[float(one) for one in texts] for texts in (truth, said)]
        expected = {"mean_squared_error": sk.mean_squared_error(*numbers)}
        ranks = spearman_interval(scores["spearman"], len(written))
        assert found.tuned.scores["spearman"].interval == ranks
        assert ranks.low is not None
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, rel=1e-2)
    # The evaluation in training held out the same rows.
    for name in (*expected, "f1_weighted" if problem == "multi_label" else "pearson"):
        assert trained[name] == pytest.approx(scores[name], abs=1e-3)
    assert "commonest" in found.sentences[0]


def test_what_is_said_without_looking_is_the_commonest_label_of_the_training_rows(run: Path) -> None:
    train = trained_on(run)
    counts = {name: train.labels.count(name) for name in set(train.labels)}
    assert lines(evaluate(run).folder)[0]["answers"]["commonest"] == max(counts, key=lambda name: counts[name])


def test_the_page_and_the_file_have_the_confusion_matrix(run: Path, tmp_path: Path) -> None:
    found = evaluate(run, output=tmp_path / "new")
    console = Console(record=True, width=120)
    found.print(console)
    text = console.export_text()
    assert "rows by class (down) and prediction (across)" in text
    assert "perplexity" not in text
    content = json.loads((found.folder / "metrics.json").read_text(encoding="utf-8"))
    assert content["classes"] == list(found.classes)
    assert content["confusion"]["tuned"] == [list(line) for line in found.confusion["tuned"]]
    (rate,) = content["rates"]
    assert (rate["model"], rate["part"], rate["rows"]) == ("tuned", "labels", found.rows)
    assert rate["tokens"] > found.rows


def test_a_killed_evaluation_continues_with_the_rows_that_it_has(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(run, output=tmp_path / "whole")
    monkeypatch.setattr(classify, "TOKENS", 40)
    logits, passes, last = SequenceClassification.logits_SC, list[int](), [3]

    def dying(self: SequenceClassification, batch: Any) -> Any:
        if len(passes) == last[0]:
            raise KeyboardInterrupt
        passes.append(len(batch.rows))
        return logits(self, batch)

    monkeypatch.setattr(SequenceClassification, "logits_SC", dying)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, output=tmp_path / "again")
    done = sum(passes)
    assert 0 < done < whole.rows
    last[0] = 1000
    again = evaluate(run, output=tmp_path / "again")
    assert sum(passes) == whole.rows
    # Other packs: equal up to the last bits.
    assert [one["answers"] for one in lines(again.folder)] == [one["answers"] for one in lines(whole.folder)]
    for name, found in whole.tuned.scores.items():
        assert again.tuned.scores[name].value == pytest.approx(found.value, rel=1e-6), name
    # A third time computes nothing; another model computes everything.
    assert evaluate(run, output=tmp_path / "again").tuned.scores.keys() == whole.tuned.scores.keys()
    assert sum(passes) == whole.rows
    evaluate(run / "checkpoint-000004", output=tmp_path / "again")
    assert sum(passes) == 2 * whole.rows


def test_rows_of_a_file_are_scored_and_those_of_the_training_data_are_named(run: Path, tmp_path: Path) -> None:
    train = trained_on(run)
    source = Path(finray.load_config(run / "config.yaml").data.source or "")
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    place = int(train.source_rows[0])
    file = tmp_path / "others.jsonl"
    texts = [rows[place], {**rows[place], "text": "a text that nobody has seen before in this place"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in texts), encoding="utf-8")
    found = evaluate(run, file=file)
    assert found.rows == 2
    assert found.overlap is not None
    assert found.overlap.equal == (0,)


OF_ANSWERS: dict[str, Any] = {
    **{"metrics": ["exact_match"], "harness": ["exact_match"], "replicas": 2, "engine": "vllm", "temperature": 0.5},
    **{"stop": ["."], "max_new_tokens": 9, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "batch_size": 4},
}


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_what_is_asked_of_answers_is_refused(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.evaluation.harness.require", lambda: None)
    with pytest.raises(ConfigError, match="predicts labels") as raised:
        evaluate(run, **{name: OF_ANSWERS[name]})
    assert raised.value.where == f"--{name.replace('_', '-')}"


def test_classes_that_are_never_predicted_and_too_many_classes_are_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(self: SequenceClassification, batch: Any) -> Any:
        return torch.tensor([[2.0, 0.0, -1.0]]).repeat(len(batch.rows), 1)

    monkeypatch.setattr(SequenceClassification, "logits_SC", first)
    # As many as are named.
    monkeypatch.setattr(classifiers, "_NAMED", 2)
    found = evaluate(run, output=tmp_path / "some", metrics=[])
    counts = Counter(one["reference"] for one in lines(found.folder))
    (only,) = {one["answers"]["tuned"] for one in lines(found.folder)}
    (note,) = [note for note in found.notes if "never predicts" in note]
    assert all(f"{name} ({count})" in note for name, count in counts.items() if name != only)
    assert f"{only} (" not in note
    assert " more" not in note
    # Precision and recall are shares of the rows of their class.
    recall = found.tuned.scores[f"recall_{only}"]
    assert (recall.value, recall.rows) == (1.0, counts[only])
    assert found.tuned.scores["f1_macro"].interval.low is not None
    # A row of three classes is a matrix of nine numbers.
    monkeypatch.setattr(classifiers, "_MOST_NUMBERS", 9 * found.rows - 1)
    several = evaluate(run, output=tmp_path / "many")
    assert "3 classes are too many: F1, precision and recall have no intervals" in several.notes
    assert several.tuned.scores["f1_macro"].value == found.tuned.scores["f1_macro"].value
    assert several.tuned.scores["f1_macro"].interval.low is None


def test_rows_with_an_unknown_label_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "unknown.jsonl"
    rows = [{"text": "one", "label": "mineral"}, {"text": "two", "label": "animal"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    with pytest.raises(DataError, match="mineral"):
        evaluate(run, file=file)


def test_whole_numbers_in_a_file_are_ids_of_the_runs_classes(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    rows = [{"text": "one", "label": 2}, {"text": "two", "label": 0}, {"text": "three", "label": "neither"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    assert [one["reference"] for one in lines(evaluate(run, file=file).folder)] == ["plant", "animal", "neither"]
