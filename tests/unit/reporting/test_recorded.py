"""Run directories as they are read: whole, half-written, still going, damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from finray.errors import DataError
from finray.evaluation.subjects import files_of
from finray.records import Note
from finray.reporting import recorded
from finray.reporting.recorded import EARLIER_WEIGHTS, is_held, read_run, runs_in, size_of
from tests.support.recorded import at_work, prediction, write_evaluation, write_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", starts=[(0, 2), (20, 4)], notes=[Note("look", 12, "warning")])
    write_evaluation(path, [prediction(0, base=0, tuned=1), prediction(1, base=1, tuned=1)])
    write_evaluation(path, [prediction(0, base=0, tuned=0)], name="test", confusion=True)
    run = read_run(path)
    assert (run.name, run.state, run.step, run.total_steps, run.problems) == ("run", "finished", 40, 40, ())
    raw = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [one.loss for one in run.train] == [one["loss"] for one in raw if one["kind"] == "train"]
    assert [one.metrics["eval_loss"] for one in run.evals] == [one["eval_loss"] for one in raw if one["kind"] == "eval"]
    assert run.train[2].grad_norm is None
    assert [one.message for one in run.notes] == ["look"]
    assert [(one.header.step, one.header.world_size) for one in run.starts] == [(0, 2), (20, 4)]
    # The loss of evaluations falls with the steps.
    assert run.best is not None
    assert (run.best.metric, run.best.step) == ("eval_loss", 40)
    assert run.best.value == min(one["eval_loss"] for one in raw if one["kind"] == "eval")
    assert [one.name for one in run.evaluations] == ["", "test"]
    own, test = run.evaluations
    assert own.models["tuned"]["exact_match"].text() == "100.0%"
    assert own.models["base"]["perplexity"].low is None
    assert [one.answers["tuned"] for one in own.answered] == ["tuned says 0", "tuned says 1"]
    assert test.confusion["tuned"][1] == (2, 9, 1)
    assert read_run(path, with_answers=False).evaluations[0].answered == ()


# An accuracy is better the more it is, and the first of two that are equal is meant; of a user's metric the checkpoints
# say which is better, and else it is not guessed.
@pytest.mark.parametrize(
    ("metric", "mode", "best"),
    [("accuracy", "", (0.9, 20)), ("wer", "min", (0.5, 10)), ("wer", "max", (0.9, 20)), ("wer", "", None)],
)
def test_the_best_checkpoint_is_that_of_the_metric_that_chooses(
    tmp_path: Path, metric: str, mode: str, best: tuple[float, int] | None
) -> None:
    line = '{{"kind": "eval", "step": {}, "{}": {}, "eval_targets": 3, "eval_seconds": 0.5}}\n'
    lines = [line.format(step, metric, value) for step, value in ((10, 0.5), (20, 0.9), (30, 0.9), (40, 0.7))]
    config = {"evaluation": {"metric": metric}}
    path = write_run(tmp_path / "run", steps=5, config=config, lines=lines, finished=False)
    state = path / "checkpoint-000020" / "training_state" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"data": "d", "metric_mode": mode}))
    run = read_run(path)
    assert (run.best and (run.best.metric, run.best.value, run.best.step)) == (best and (metric, *best))
    assert run.data == "d"


def test_a_run_is_going_on_while_somebody_holds_its_lock(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", finished=False)
    assert not is_held(path)
    with at_work(path):
        assert is_held(path)
        assert read_run(path).state == "running"
    assert not is_held(path)
    assert read_run(path).state == "stopped"


def test_a_half_written_run_is_read_as_it_stands(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=7, finished=False, lines=['{"kind": "train", "step": 8, "lo'])
    (path / "failures.jsonl").write_text('{"error": "first"}\nnot json\n{"error": "OSError: no space"}\n{"err')
    run = read_run(path)
    assert (run.state, run.step, run.total_steps, run.best, run.summary) == ("stopped", 7, 40, None, None)
    assert run.failure == "OSError: no space"
    assert run.phases["train"] == pytest.approx(0.7)
    assert run.problems == ()


def test_what_cannot_be_read_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    folder = write_evaluation(path, [prediction(0, base=0, tuned=1)])
    with (folder / "predictions.jsonl").open("a") as stream:
        stream.write('[1]\n{"answers": {}}\n{"row": 3, "answ')
    (path / "summary.json").write_text('{"chosen_step": "x"')
    (path / "config.yaml").write_text("model: [\n")
    (path / "starts.jsonl").write_text('{"time": 1}\nnonsense\n')
    write_evaluation(path, [prediction(0, base=0, tuned=1)], name="broken")
    (path / "evaluation" / "broken" / "metrics.json").write_text('{"rows": "many"}')
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "step": 41, "loss": "small"}\n{"kind": "unheard", "step": 41}\n\x00\n')
    run = read_run(path)
    assert run.step == 40
    assert run.state == "stopped"
    assert len(run.evaluations[0].answered) == 1
    named = sorted(problem.partition(":")[0] for problem in run.problems)
    assert named == ["config.yaml", "metrics.json", "metrics.jsonl", "summary.json"]


@pytest.mark.parametrize(
    ("name", "weights", "earlier"),
    [
        ("", "final", True),
        ("test", "final", True),
        ("", "checkpoint-000040", True),
        # Scores of a checkpoint stay its own.
        ("checkpoint-000040", "checkpoint-000040", False),
        ("checkpoint-000040/test", "checkpoint-000040", False),
    ],
)
def test_scores_of_weights_that_were_trained_further_are_said_to_be_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weights: str, earlier: bool
) -> None:
    path, own = write_run(tmp_path / "run"), ("a note of the evaluation",)
    (path / "final").mkdir()
    file = path / "final" / "adapter_model.safetensors"
    file.write_text("weights")
    folder = write_evaluation(path, [prediction(0, base=0, tuned=1)], name=name)
    plain = json.loads((folder / "metrics.json").read_text())

    def notes(model: object) -> tuple[str, ...]:
        plain["made_by"]["model"] = model
        (folder / "metrics.json").write_text(json.dumps(plain))
        return read_run(path).evaluations[0].notes

    # Also of a run that lay elsewhere then.
    made_by = {"weights": {**files_of(str(path / "final")), "name": f"/elsewhere/{weights}"}, "base": None}
    assert notes(made_by) == own
    file.unlink()
    assert notes(made_by) == own, "a copy behind a URL is read without its weights"
    file.write_text("weights")
    os.utime(file, ns=(7, 7))
    assert notes(made_by) == (*own, *([EARLIER_WEIGHTS] if earlier else []))
    # A file that was downloaded has the time of that.
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "local_copy", lambda place, *, weights: path)
        assert read_run("s3://bucket/run").evaluations[0].notes == own
    # What is damaged says nothing of weights.
    for damaged in (None, 5, {"weights": [1]}, {"weights": {"files": 3}}):
        assert notes(damaged) == own


def test_the_runs_of_a_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "a")
    (tmp_path / ".prepared").mkdir()
    (tmp_path / "other").mkdir()
    assert [path.name for path in runs_in(tmp_path)] == ["a", "b"]
    assert runs_in(tmp_path / "a") == [tmp_path / "a"]
    with pytest.raises(DataError, match="the directory does not exist"):
        runs_in(tmp_path / "none")
    (tmp_path / "file").write_text("")
    for name, said in (("other", "holds no run"), ("file", "is no directory"), ("none", "does not exist")):
        with pytest.raises(DataError, match=said):
            read_run(tmp_path / name)


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "weights").write_bytes(b"x" * 1000)
    (tmp_path / "final" / "other").write_bytes(b"y" * 10)
    assert size_of(tmp_path) == 1010
    os.link(tmp_path / "weights", tmp_path / "final" / "weights")
    assert size_of(tmp_path) == 1010
