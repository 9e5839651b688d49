"""Runs on Google Cloud Storage, through gcsfs itself: a server of the emulator takes Google's place."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.objects import Objects
from finray.errors import StorageError
from tests.support import runs

pytest.importorskip("gcp_storage_emulator", reason="`make test-services` runs these in an environment of their own")

BUCKET = "finray-tests"
# Ends with whoever started it, however that ended.
_SERVE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()
"""


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables by which gcsfs finds the server, in this process and for workers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path / "google.log").open("wb") as log:
        words = [sys.executable, "-c", _SERVE, str(port), BUCKET]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log)
    # Without an account, gcsfs cannot ask what kind of bucket it is.
    env = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    try:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        until = time.monotonic() + 120
        while True:
            with socket.socket() as asking:
                if asking.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, (tmp_path / "google.log").read_text(errors="replace")
            assert time.monotonic() < until
            time.sleep(0.1)
        yield env
    finally:
        server.kill()
        server.wait()


def test_a_run_is_continued_elsewhere_from_its_newest_whole_checkpoint(
    google: dict[str, str], tiny_run: Callable[..., runs.Plain], ray_cluster: str, tmp_path: Path
) -> None:
    from finray.runtime import driver

    bucket, copies = Objects(f"gs://{BUCKET}"), tmp_path / "copies"
    plain = tiny_run({"train.max_steps": 4, "train.schedule": "constant", "checkpoint.every_steps": 2}, rows=24)
    bucket.upload(Path(plain["data"]["source"]), "rows.jsonl")
    undisturbed = runs.changed(plain, {"train.max_steps": 6})
    there = {"run.output_dir": f"gs://{BUCKET}/runs", "run.local_dir": str(copies), "cluster.env": google}
    plain = runs.changed(plain, there, {"data.source": f"gs://{BUCKET}/rows.jsonl", "cluster.num_workers": 2})
    driver.train(runs.config_of(plain))
    run = Objects(f"gs://{BUCKET}/runs/run")
    found = {name.partition("/")[0] for name in run.files()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "final", "checkpoints.json"} <= found

    # Another machine has no copy, and a byte of the newest checkpoint has changed.
    shutil.rmtree(copies)
    code, out, err = runs.finray("generate", f"gs://{BUCKET}/runs/run", "hello", "--max-new-tokens", 2)
    assert (code, bool(out)) == (0, True), err
    (newest,) = (one for one in run.files() if "checkpoint-000004-" in one and "adapter_model" in one)
    content = bytearray(run.read(newest) or b"")
    content[-1] ^= 1
    run.write(newest, bytes(content))
    said: list[Any] = []
    longer = driver.train(runs.config_of(runs.changed(plain, {"train.max_steps": 6})), handle=said.append)
    assert any(newest in str(one) and "has changed" in str(one) for one in said), said
    runs.run_alone(undisturbed, tmp_path / "undisturbed")
    runs.assert_same_curve(longer.run_dir, tmp_path / "undisturbed", rel=1e-5)


def test_a_bucket_that_is_not_there_is_named(google: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="create the bucket") as caught:
        Objects("gs://finray-none/runs", sleep=lambda seconds: None).write("a", b"b")
    assert caught.value.where == "gs://finray-none/runs/a"
