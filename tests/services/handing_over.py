"""Hands records to W&B's client, also in a process of its own; imports little."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from finray.tracking import wandb
from finray.tracking.follow import Followed, Sending

RUN_ID = "f" * 32


def sending(run_dir: Path, mode: str) -> Sending:
    tracking = {"wandb_mode": mode, "wandb_project": "p", "wandb_entity": "me", "tags": ["small"]}
    return Sending(
        "wandb", wandb.WandbService(), Followed(RUN_ID, run_dir, {"run": {"name": "r"}, "tracking": tracking})
    )


def write(run_dir: Path, steps: int) -> None:
    lines = [{"kind": "train", "step": step, "loss": 1 / step, "time": 1000.0 + step} for step in range(1, steps + 1)]
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
        one.service.close(complete=True)
    except TimeoutError:
        return
    raise AssertionError("it ended as if the service had everything")
