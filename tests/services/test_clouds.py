"""Runs on Google's and on Azure's storage, through gcsfs and adlfs: emulators take the place of the services."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finray.checkpoint.objects import Objects
from finray.errors import StorageError
from tests.support import runs

BUCKET = "finray-tests"
# Ends with whoever started it, however that ended.
_GOOGLE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2]).run()
"""
# Where `make test-services` puts Microsoft's emulator, which npm installs.
AZURITE = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"


@contextmanager
def serving(words: list[str], port: int, log: Path, env: dict[str, str] | None = None) -> Iterator[None]:
    """A server, from when it listens."""
    with log.open("wb") as out:
        server = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, **(env or {})}
        )
    try:
        until = time.monotonic() + 120
        while True:
            with socket.socket() as asking:
                if asking.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < until
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


@contextmanager
def google(port: int, log: Path) -> Iterator[dict[str, str]]:
    pytest.importorskip("gcp_storage_emulator", reason="`make test-services` runs these in an environment of their own")
    with serving([sys.executable, "-c", _GOOGLE, str(port), BUCKET], port, log):
        # Without an account, gcsfs cannot ask what kind of bucket it is.
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


@contextmanager
def azure(port: int, log: Path) -> Iterator[dict[str, str]]:
    if not AZURITE.exists():
        pytest.skip("`make test-services` runs these in an environment of their own")
    from azure.storage.blob import BlobServiceClient

    key = base64.b64encode(os.urandom(64)).decode()
    words = [str(AZURITE), "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
    with serving([*words, "--disableTelemetry"], port, log, {"AZURITE_ACCOUNTS": f"finray:{key}"}):
        account = f"DefaultEndpointsProtocol=http;AccountName=finray;AccountKey={key};"
        account += f"BlobEndpoint=http://127.0.0.1:{port}/finray;"
        BlobServiceClient.from_connection_string(account).create_container(BUCKET)
        yield {"AZURE_STORAGE_CONNECTION_STRING": account}


@pytest.fixture(params=["gs", "az"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A scheme of URLs; the environment says where its server is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = {"gs": google, "az": azure}[request.param]
    with serve(port, tmp_path / "cloud.log") as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield str(request.param)


def test_a_run_is_continued_elsewhere_from_its_newest_whole_checkpoint(
    cloud: str, tiny_run: Callable[..., runs.Plain], tmp_path: Path
) -> None:
    bucket, copies = Objects(f"{cloud}://{BUCKET}"), tmp_path / "copies"
    plain = tiny_run({"train.max_steps": 4, "train.schedule": "constant", "checkpoint.every_steps": 2}, rows=24)
    bucket.upload(Path(plain["data"]["source"]), "rows.jsonl")
    undisturbed = runs.changed(plain, {"train.max_steps": 6})
    there = {"run.output_dir": f"{cloud}://{BUCKET}/runs", "run.local_dir": str(copies)}
    plain = runs.changed(plain, there, {"data.source": f"{cloud}://{BUCKET}/rows.jsonl", "cluster.num_workers": 2})
    file = runs.write_config(plain, tmp_path / "config.yaml")
    # A Ray of its own: the workers have the account from the environment of their node.
    code, out, err = runs.cli("train", str(file), env={"RAY_ADDRESS": None})
    assert code == 0, out + err
    run = Objects(f"{cloud}://{BUCKET}/runs/run")
    found = {name.partition("/")[0] for name in run.files()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "final", "checkpoints.json"} <= found

    # Another machine has no copy, and a byte of the newest checkpoint has changed.
    shutil.rmtree(copies)
    code, out, err = runs.finray("generate", f"{cloud}://{BUCKET}/runs/run", "hello", "--max-new-tokens", 2)
    assert (code, bool(out)) == (0, True), err
    (newest,) = (one for one in run.files() if "checkpoint-000004-" in one and "adapter_model" in one)
    content = bytearray(run.read(newest) or b"")
    content[-1] ^= 1
    run.write(newest, bytes(content))
    code, out, err = runs.cli("train", str(file), "train.max_steps=6", env={"RAY_ADDRESS": None, "COLUMNS": "1000"})
    assert code == 0, out + err
    assert any(newest in line and "has changed" in line for line in (out + err).splitlines()), out + err
    runs.run_alone(undisturbed, tmp_path / "undisturbed")
    (copy,) = copies.rglob("metrics.jsonl")
    runs.assert_same_curve(copy.parent, tmp_path / "undisturbed", rel=1e-5)


# Not `az`: adlfs tries for many minutes to write into a container that is not there.
@pytest.mark.parametrize("cloud", ["gs"], indirect=True)
def test_a_bucket_that_is_not_there_is_named(cloud: str) -> None:
    with pytest.raises(StorageError, match="create the bucket") as caught:
        Objects(f"{cloud}://finray-none/runs", sleep=lambda seconds: None).write("a", b"b")
    assert caught.value.where == f"{cloud}://finray-none/runs/a"
