"""Writes the files of one version of finray, for tests/training/test_earlier_versions.py.

    PYTHONPATH=CHECKOUT/src .venv/bin/python tests/data/written/write.py NAME

runs the `finray` of a checkout on ``model``, ``rows.jsonl`` and ``train.yaml`` beside this file, always in one place,
and keeps what it left in the folder NAME: the run directory without logs, and the prepared dataset.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# It stands in files with digests, so it is no temporary directory.
WRITTEN_AT = Path("/tmp/finray-written")
KEPT = ["config.yaml", "resolved.json", "run_id", "attempt", "metrics.jsonl", "starts.jsonl", "summary.json", "final"]
KEPT += ["checkpoint-000002"]


def main(name: str) -> None:
    WRITTEN_AT.mkdir(mode=0o700)
    try:
        shutil.copytree(HERE / "model", WRITTEN_AT / "model")
        for one in ("rows.jsonl", "train.yaml"):
            shutil.copy(HERE / one, WRITTEN_AT)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", "from finray.cli.main import main; main()", "train", "train.yaml"]
        subprocess.run(command, cwd=WRITTEN_AT, env=environment, check=True)
        target = HERE / name
        target.mkdir()
        for one in KEPT:
            path = WRITTEN_AT / "runs" / "run" / one
            if path.is_dir():
                shutil.copytree(path, target / "runs" / "run" / one)
            elif path.is_file():
                (target / "runs" / "run").mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / "runs" / "run")
        ignored = shutil.ignore_patterns(".digests*", ".locks", "*.lock")
        shutil.copytree(WRITTEN_AT / "runs" / ".prepared", target / "runs" / ".prepared", ignore=ignored)
    finally:
        shutil.rmtree(WRITTEN_AT)


if __name__ == "__main__":
    main(sys.argv[1])
