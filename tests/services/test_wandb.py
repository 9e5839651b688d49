"""What W&B's own client writes and sends: read back from its files, and at a stand-in for its service."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import RunDir
from finray.tracking.jsonl import read_records
from tests.services.handing_over import RUN_ID, sending, train_and_be_killed, write
from tests.services.standin import Standin
from tests.support import runs

pytest.importorskip("wandb", reason="`make test-services` runs these in an environment of their own")

ROOT = Path(__file__).parents[2]


def records_of(path: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: blocks of 32 KiB with pieces of protobuf messages, as LevelDB's log has them.

    W&B's own process writes it, a block at a time, and may still be at the last one: a piece that is not whole ends it.
    """
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + size > len(content):
            return
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        # A whole one, or the last piece of one.
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def exits_of(path: Path) -> list[int]:
    return [one.exit.exit_code for one in records_of(path) if one.WhichOneof("record_type") == "exit"]


def runs_of(path: Path) -> list[Any]:
    return [one.run for one in records_of(path) if one.WhichOneof("record_type") == "run"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    found = (one.history for one in records_of(path) if one.WhichOneof("record_type") == "history")
    return [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in one.item} for one in found
    ]


def send_and_be_killed(run_dir: Path, mode: str) -> None:
    """Hand all records over in another process, which is killed before they can be anywhere."""
    code = "import sys; from tests.services.handing_over import killed; killed(*sys.argv[1:])"
    ended = subprocess.run([sys.executable, "-c", code, str(run_dir), mode], cwd=ROOT, timeout=240, check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    made = Standin()
    monkeypatch.setenv("WANDB_BASE_URL", made.url)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    try:
        yield made
    finally:
        made.close()


def offline_run(tiny_run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    own = {"tracking.trackers": ["wandb"], "tracking.wandb_mode": "offline", "tracking.wandb_project": "p"}
    return tiny_run({**own, "data.eval_ratio": 0.2, "evaluation.every_steps": 4, "train.max_steps": 12}, rows=24)


def require_the_run(run_dir: Path, eventually: Any) -> None:
    """One file, of one run, with each number that the run's own records have, once and in their order."""
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    # W&B's process writes the last block after its client has said that the run is finished.
    eventually(lambda: exits_of(file) == [0])
    (started,) = runs_of(file)
    assert (started.run_id, started.project) == ((run_dir / "run_id").read_text(), "p")
    rows = rows_of(file)
    for kind, name in (("train", "loss"), ("train", "lr"), ("eval", "eval_loss")):
        found = [(row[f"{kind}/step"], row[f"{kind}/{name}"]) for row in rows if f"{kind}/step" in row]
        written = (one for one in read_records(run_dir / "metrics.jsonl") if one["kind"] == kind)
        assert found == [(one["step"], one[name]) for one in written]
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(1, 13))


def test_its_files_have_the_run(tiny_run: Callable[..., dict[str, Any]], tmp_path: Path, eventually: Any) -> None:
    assembled = runs.assemble_alone(offline_run(tiny_run), tmp_path / "run")
    assembled.loop.run()
    assembled.loop.trackers.finish(complete=True, patience_s=240)
    require_the_run(tmp_path / "run", eventually)


@pytest.mark.nightly
def test_after_a_kill_in_mid_run_its_files_have_one_run_and_no_step_twice(
    tiny_run: Callable[..., dict[str, Any]], tmp_path: Path, eventually: Any
) -> None:
    plain, run_dir = offline_run(tiny_run), tmp_path / "run"
    train_and_be_killed(plain, run_dir, step=7, tracker="wandb")
    run_id = (run_dir / "run_id").read_text()
    # What it had handed over is in the memory of W&B's own process, or in a file that ends in the middle.
    assembled = runs.assemble_alone(plain, run_dir)
    assembled.loop.run()
    assembled.loop.trackers.finish(complete=True, patience_s=240)
    assert (run_dir / "run_id").read_text() == run_id
    require_the_run(run_dir, eventually)


def test_a_kill_loses_nothing_and_the_run_is_one(service: Standin, tmp_path: Path) -> None:
    write(tmp_path, 5)
    first = sending(tmp_path, "online")
    first.catch_up()
    first.close(complete=False)
    assert service.steps(RUN_ID) == [1, 2, 3, 4, 5]
    assert service.runs[RUN_ID]["exitcode"] == 1
    write(tmp_path, 9)
    # Its rows are on their way, or are not.
    send_and_be_killed(tmp_path, "online")
    assert json.loads((tmp_path / "sent-wandb.json").read_text())[0]["train"] == 9
    last = sending(tmp_path, "online")
    write(tmp_path, 10)
    last.catch_up()
    last.close(complete=True)
    assert service.steps(RUN_ID) == list(range(1, 11))
    assert list(service.runs) == [RUN_ID]
    run = service.runs[RUN_ID]
    assert (run["displayName"], run["tags"], run["exitcode"]) == ("r", ["small"], 0)
    assert [run["history"][at]["train/loss"] for at in sorted(run["history"])] == [1 / step for step in range(1, 11)]
    assert run["summary"]["train/mean_loss"] == pytest.approx(sum(1 / step for step in range(1, 11)) / 10)


@pytest.mark.nightly
def test_a_service_that_takes_nothing_ends_in_time_and_gets_everything_later(service: Standin, tmp_path: Path) -> None:
    write(tmp_path, 4)
    service.takes_rows = False
    code = "import sys; from tests.services.handing_over import unanswered; unanswered(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=240, check=True)
    assert service.steps(RUN_ID) == []
    service.takes_rows = True
    again = sending(tmp_path, "online")
    again.catch_up()
    again.close(complete=True)
    assert service.steps(RUN_ID) == [1, 2, 3, 4]


@pytest.mark.nightly
def test_a_finished_run_is_handed_over_by_a_command(
    service: Standin, tiny_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plain = tiny_run({"train.max_steps": 3, "tracking.wandb_project": "p"}, rows=12)
    run_dir = tmp_path / "run"
    runs.run_alone(plain, run_dir)
    RunDir(run_dir).keep_config(runs.config_of(plain))
    code, out, err = runs.finray("sync", run_dir, "--to", "wandb")
    assert code == 0, err
    assert "sent 3 records to wandb" in out
    assert service.steps((run_dir / "run_id").read_text()) == [1, 2, 3]
    code, out, _ = runs.finray("sync", run_dir, "--to", "wandb")
    assert (code, "has every record" in out) == (0, True)
    assert service.steps((run_dir / "run_id").read_text()) == [1, 2, 3]
