"""Hands records to W&B's client, and trains until it is killed, in processes of their own; imports little."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from finray.tracking import wandb
from finray.tracking.follow import Followed, Sending

RUN_ID = "f" * 32


def sending(run_dir: Path, mode: str) -> Sending:
    tracking = {"wandb_mode": mode, "wandb_project": "p", "wandb_entity": "me", "tags": ["small"]}
    return Sending(
        "wandb", wandb.WandbService(), Followed(RUN_ID, run_dir, {"run": {"name": "r"}, "tracking": tracking})
    )


def write(run_dir: Path, steps: int) -> None:
    lines = [
        {"kind": "train", "step": step, "loss": 1 / step, "supervised": 3, "time": 1000.0 + step}
        for step in range(1, steps + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def killed(run_dir: str, mode: str) -> None:
    sending(Path(run_dir), mode).catch_up()
    os.kill(os.getpid(), signal.SIGKILL)


def unanswered(run_dir: str) -> None:
    """In another process: its end does not wait for the service, and neither does the process."""
    wandb._FINISH_S = 1.0
    one = sending(Path(run_dir), "online")
    one.catch_up()
    try:
        one.close(complete=True)
    except TimeoutError:
        return
    raise AssertionError("it ended as if the service had everything")


def train_and_be_killed(plain: dict[str, Any], run_dir: Path, *, step: int, tracker: str) -> None:
    """Train in another process until it is killed, in a step and when the tracker has some of the records."""
    code = "import sys; from tests.services.handing_over import train_until; train_until(*sys.argv[1:])"
    words = [sys.executable, "-c", code, json.dumps(plain), str(run_dir), str(step), tracker]
    ended = subprocess.run(words, cwd=Path(__file__).parents[2], timeout=480, check=False)
    assert ended.returncode == -signal.SIGKILL


def train_until(plain: str, run_dir: str, step: str, tracker: str) -> None:
    from tests.support import runs

    cursor, until = Path(run_dir) / f"sent-{tracker}.json", time.monotonic() + 240

    def told(record: Any) -> None:
        if type(record).__name__ != "TrainRecord" or record.step != int(step):
            return
        while not cursor.exists() or json.loads(cursor.read_text())[0]["train"] == 0:
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    runs.run_alone(json.loads(plain), Path(run_dir), notify=told)
