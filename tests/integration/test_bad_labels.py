"""A classifier's bad input as a user meets it: one message with the repair, exit code 2, and no run begun."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs, tiny
from tests.support.runs import Plain, changed, finray


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(label: Any) -> list[dict[str, Any]]:
    return [{"text": f"the cat walks {word}", "label": label} for word in tiny.WORDS[:8]]


LONG = {"text": "the cat " * 60, "label": "animal"}
# What is changed of a good run, its rows, its held-out rows, and what is said.
CASES: dict[str, tuple[dict[str, Any], list[Any] | None, list[Any] | None, list[str]]] = {
    "labels that the training rows lack": (
        {},
        None,
        [*texts("animal"), *texts("mineral")],
        ["held.jsonl:9: the label `mineral`", "which have animal, neither, plant"],
    ),
    "one class only": ({}, texts("animal"), None, ["all 8 rows to train on have the label `animal`"]),
    "a label that is null": ({}, [*texts("animal"), *texts(None)], None, ["own.jsonl:9: the column `label` is null"]),
    "rows beyond the positions": (
        {"data.max_length": 100},
        None,
        [LONG],
        ["the longest row has 100 tokens, but the model has 80 positions", "data.max_length=80"],
    ),
    "a metric of no class": (
        {"evaluation.metric": "recall_mineral"},
        None,
        texts("animal"),
        ["no metric `recall_mineral` for single_label labels; the classes are animal, neither, plant"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_run_and_its_plan_are_refused_with_one_message(
    case: tuple[dict[str, Any], list[Any] | None, list[Any] | None, list[str]],
    classifier_run: Callable[..., Plain],
    tmp_path: Path,
    ray_cluster: str,
) -> None:
    changes, rows, held, expected = case
    data = {} if rows is None else {"data.source": write(tmp_path / "own.jsonl", rows)}
    data |= {} if held is None else {"data.eval_source": write(tmp_path / "held.jsonl", held)}
    base = {"run.output_dir": str(tmp_path / "out"), "classification.class_weights": None}
    plain = changed(classifier_run(base), data, changes)
    config = runs.write_config(plain, tmp_path / "run.yaml")
    for command, sign in (("plan", "problem: "), ("train", "error: ")):
        code, out, err = finray(command, config)
        said = out + err
        assert code == 2, said
        assert "Traceback" not in said
        # What is wrong with the file itself is said the same way by every command.
        assert said.count(sign) + (command == "plan") * said.count("error: ") == 1, said
        for part in expected:
            assert part in said
        assert "starting 1 worker" not in said
    assert not list((tmp_path / "out").glob("run/checkpoint-*"))


def test_labels_are_looked_at_as_soon_as_they_are_prepared(
    classifier_run: Callable[..., Plain], tmp_path: Path
) -> None:
    source = write(tmp_path / "own.jsonl", texts("animal"))
    changes = {"run.output_dir": str(tmp_path / "out"), "data.source": source, "classification.class_weights": None}
    plain = classifier_run(changes)
    code, out, err = finray("prepare", runs.write_config(plain, tmp_path / "run.yaml"))
    assert (code, err.count("error: ")) == (2, 1), out + err
    assert "all 8 rows to train on have the label `animal`" in err


def test_accuracy_is_no_metric_of_a_causal_model(tiny_run: Callable[..., Plain], tmp_path: Path) -> None:
    plain = tiny_run({"evaluation.metric": "accuracy", "data.eval_ratio": 0.2, "run.output_dir": str(tmp_path)})
    code, out, err = finray("train", runs.write_config(plain, tmp_path / "run.yaml"))
    assert (code, err.count("error: ")) == (2, 1), out + err
    assert "causal_lm has no metric `accuracy`" in err
    assert "use one of: eval_loss, perplexity" in err
