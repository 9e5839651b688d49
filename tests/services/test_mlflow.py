"""A real MLflow server has what the run says, once, whatever happens to either side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import RunDir
from finray.tracking.follow import Followed
from finray.tracking.jsonl import read_records
from finray.tracking.mlflow import MlflowService
from tests.services.conftest import Server
from tests.services.handing_over import train_and_be_killed
from tests.support import runs

mlflow = pytest.importorskip("mlflow", reason="`make test-services` runs these in an environment of their own")

EXPERIMENT = "tests"


def config(tiny_run: Callable[..., dict[str, Any]], server: Server, **changes: Any) -> dict[str, Any]:
    own = {"tracking.trackers": ["mlflow"], "tracking.mlflow_uri": server.url, "tracking.mlflow_experiment": EXPERIMENT}
    own |= {"tracking.tags": ["small"], "data.eval_ratio": 0.2, "evaluation.every_steps": 4}
    return tiny_run({**own, **changes}, rows=24)


def the_run(server: Server) -> tuple[Any, Any]:
    client = mlflow.MlflowClient(tracking_uri=server.url)
    (experiment,) = client.search_experiments(filter_string=f"name = '{EXPERIMENT}'")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def points(server: Server, name: str) -> list[tuple[int, float, int]]:
    client, found = the_run(server)
    return [(one.step, one.value, one.timestamp) for one in client.get_metric_history(found.info.run_id, name)]


def written(run_dir: Path, kind: str, name: str) -> list[tuple[int, float, int]]:
    found = (one for one in read_records(run_dir / "metrics.jsonl") if one["kind"] == kind)
    return [(one["step"], one[name], round(one["time"] * 1000)) for one in found]


def test_the_server_has_the_runs_numbers_config_and_tags(
    mlflow_server: Server, tiny_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    plain = config(tiny_run, mlflow_server)
    assembled = runs.assemble_alone(plain, run_dir)
    assembled.loop.run()
    assembled.loop.trackers.finish(complete=True, patience_s=240)
    assert [step for step, _, _ in points(mlflow_server, "train/loss")] == list(range(1, 9))
    for kind, names in {"train": ["loss", "lr", "tokens"], "eval": ["eval_loss", "perplexity"]}.items():
        for name in names:
            assert points(mlflow_server, f"{kind}/{name}") == written(run_dir, kind, name)
    _, found = the_run(mlflow_server)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params["train.learning_rate"] == "0.01"
    assert found.data.params["model.name"] == plain["model"]["name"]
    assert found.data.tags["finray.run_id"] == (run_dir / "run_id").read_text()
    assert found.data.tags["finray.final"] == str(run_dir / "final")
    assert found.data.tags["small"] == "true"
    losses, targets = (written(run_dir, "train", name) for name in ("loss", "supervised"))
    weighted = sum(loss * count for (_, loss, _), (_, count, _) in zip(losses, targets, strict=True))
    ((step, mean, _),) = points(mlflow_server, "train/mean_loss")
    assert (step, mean) == (8, pytest.approx(weighted / sum(count for _, count, _ in targets)))


@pytest.mark.nightly
def test_a_kill_and_a_resume_are_one_run_and_no_step_is_there_twice(
    mlflow_server: Server,
    tiny_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
) -> None:
    plain = config(tiny_run, mlflow_server)
    first, cut = tmp_path / "run", tmp_path / "cut"
    runs.run_alone(plain, first)
    # As it was when it was killed: step 7 is done and sent, the last checkpoint is that of step 4, and the cursor was
    # not written for a while.
    runs.cut(first, cut, step=4)
    (cut / "sent-mlflow.json").unlink()
    changed = runs.changed(plain, {"train.max_steps": 12})
    runs.run_alone(changed, cut)
    assert [step for step, _, _ in points(mlflow_server, "train/loss")] == list(range(1, 13))
    assert [step for step, _, _ in points(mlflow_server, "eval/eval_loss")] == [4, 8, 12]
    _, found = the_run(mlflow_server)
    assert found.data.params["train.max_steps"] == "8"
    assert found.data.tags["changed.train.max_steps"] == "12"
    # Had the server not been asked, the steps that were done again would be there twice.
    (cut / "sent-mlflow.json").unlink()
    monkeypatch.setattr(MlflowService, "_history", lambda self, name: [])
    with_config(changed, cut)
    eventually(lambda: runs.finray("sync", cut)[0] == 0)
    assert [step for step, _, _ in points(mlflow_server, "train/loss")].count(6) == 2


def test_a_kill_in_mid_run_leaves_one_run_and_no_step_twice(
    mlflow_server: Server, tiny_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plain, run_dir = config(tiny_run, mlflow_server, **{"train.max_steps": 12}), tmp_path / "run"
    train_and_be_killed(plain, run_dir, step=7, tracker="mlflow")
    _, before = the_run(mlflow_server)
    assert before.info.status == "RUNNING"
    assert points(mlflow_server, "train/loss")
    assembled = runs.assemble_alone(plain, run_dir)
    assembled.loop.run()
    assembled.loop.trackers.finish(complete=True, patience_s=240)
    _, after = the_run(mlflow_server)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    assert after.data.tags["finray.run_id"] == (run_dir / "run_id").read_text()
    for kind, name, steps in (("train", "loss", list(range(1, 13))), ("eval", "eval_loss", [4, 8, 12])):
        # The time is that of the first attempt where a step was done again.
        found = [(step, value) for step, value, _ in points(mlflow_server, f"{kind}/{name}")]
        assert found == [(step, value) for step, value, _ in written(run_dir, kind, name)]
        assert [step for step, _ in found] == steps


def test_a_server_that_stops_changes_no_bit_and_gets_what_it_missed(
    mlflow_server: Server, tiny_run: Callable[..., dict[str, Any]], tmp_path: Path, eventually: Any
) -> None:
    plain = config(tiny_run, mlflow_server, **{"train.max_steps": 12})
    told: list[Any] = []
    cursor = tmp_path / "down" / "sent-mlflow.json"

    def tell(record: Any) -> None:
        told.append(record)
        if type(record).__name__ == "TrainRecord" and record.step == 5:
            # It has some of the steps.
            eventually(lambda: cursor.exists() and json.loads(cursor.read_text())[0]["train"] > 0)
            mlflow_server.stop()

    loop = runs.assemble_alone(plain, tmp_path / "down", notify=tell).loop
    loop.run()
    loop.trackers.finish(complete=True, patience_s=1)
    warnings = [one.message for one in told if getattr(one, "level", "") == "warning"]
    assert len([one for one in warnings if "the tracker mlflow" in one]) == 1
    assert "finray sync" in warnings[-1]

    alone = runs.changed(plain, {"tracking.trackers": []})
    runs.run_alone(alone, tmp_path / "alone")
    assert runs.trace(tmp_path / "down") == runs.trace(tmp_path / "alone")
    left, right = (runs.adapter_weights(tmp_path / name / "checkpoint-000012") for name in ("down", "alone"))
    assert all(bool((left[name] == right[name]).all()) for name in left)

    mlflow_server.start()
    run_dir = with_config(plain, tmp_path / "down")
    eventually(lambda: runs.finray("sync", run_dir)[0] == 0)
    assert points(mlflow_server, "train/loss") == written(run_dir, "train", "loss")
    eventually(lambda: "mlflow has every record" in runs.finray("sync", run_dir)[1])
    assert points(mlflow_server, "train/loss") == written(run_dir, "train", "loss")


@pytest.mark.nightly
def test_labels_that_no_name_may_have_and_more_numbers_than_a_request_takes(
    mlflow_server: Server, tmp_path: Path
) -> None:
    """A classifier's metrics have its labels in their names."""
    tracking = {"mlflow_uri": mlflow_server.url, "mlflow_experiment": EXPERIMENT, "tags": ["lr=1e-4"]}
    plain = {"run": {"name": "r"}, "tracking": tracking, "classification": {"class_weights": {"Q&A": 2.0}}}
    service = MlflowService()
    followed = Followed("e" * 32, tmp_path, plain)
    service.where(followed)
    service.open(followed, None)
    many = {f"recall_{number}": number / 1500 for number in range(1500)}
    record = {"kind": "eval", "step": 3, "time": 1003.0, "precision_C++": 0.5, "precision_don't": 0.25, **many}
    service.send([{"kind": "train", "step": 3, "loss": 1.0, "time": 1003.0}, record])
    client, found = the_run(mlflow_server)
    metrics = found.data.metrics
    assert (metrics["train/loss"], metrics["eval/precision_C_2b_2b"], metrics["eval/precision_don_27t"]) == (
        1,
        0.5,
        0.25,
    )
    assert metrics["eval/recall_1499"] == pytest.approx(1499 / 1500)
    assert found.data.tags["lr_3d1e-4"] == "true"
    assert found.data.params["classification.class_weights"] == '{"Q&A": 2.0}'
    assert client.get_metric_history(found.info.run_id, "eval/recall_0")[0].step == 3


def with_config(plain: dict[str, Any], run_dir: Path) -> Path:
    """What the driver writes, which tests that train alone have not."""
    RunDir(run_dir).keep_config(runs.config_of(plain))
    return run_dir


@pytest.mark.nightly
def test_a_finished_run_is_handed_to_a_server_that_its_config_does_not_name(
    mlflow_server: Server,
    tiny_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
) -> None:
    plain = tiny_run({"train.max_steps": 3}, rows=12)
    runs.run_alone(plain, tmp_path / "run")
    run_dir = with_config(plain, tmp_path / "run")
    code, _, err = runs.finray("sync", run_dir)
    assert (code, "has no tracker to send to" in err) == (2, True)
    code, _, err = runs.finray("sync", run_dir, "--to", "mlflow")
    assert (code, "MLflow needs an address" in err) == (2, True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    # A machine that is busy may not answer in time.
    eventually(lambda: runs.finray("sync", run_dir, "--to", "mlflow")[0] == 0)
    assert points(mlflow_server, "train/loss") == written(run_dir, "train", "loss")
    # A copy of it is the same run there.
    again = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    (again / "sent-mlflow.json").unlink()
    eventually(lambda: runs.finray("sync", again, "--to", "mlflow")[0] == 0)
    assert points(mlflow_server, "train/loss") == written(run_dir, "train", "loss")
