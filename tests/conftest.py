"""Shared fixtures: tiny models and tokenizers made on the spot, one Ray cluster, and the real small chat model."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import stranger

# Before anything else is imported: libraries read the environment as they are loaded.
HOME = stranger.settle(os.environ)

from tools import quarantine  # noqa: E402

from tests.support import forks, s3, tiny  # noqa: E402
from tests.support.examples import examples  # noqa: E402

# Under nohup it would be ignored, by every process of a test too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# How long an example takes says more of the machine than of the code. The gate tries the same examples each time, a
# night others.
NIGHTLY = "FINRAY_TEST_NIGHTLY" in os.environ
settings.register_profile("finray", max_examples=examples(100), deadline=None, derandomize=not NIGHTLY, database=None)
settings.load_profile("finray")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.train_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A two-layer Llama of width 64 with its tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny.save_model("llama", folder, tokenizer)
    return folder


@pytest.fixture
def tiny_adapter_dir(tmp_path: Path, tiny_model_dir: Path, tokenizer: Any) -> Path:
    """An adapter that changes the tiny model, with its tokenizer."""
    import torch

    from finray.config.schema import AdapterConfig, ModelConfig
    from finray.models import adapters
    from finray.models.loading import load_model
    from tests.support import adapted

    base = load_model(ModelConfig(name=str(tiny_model_dir)), dtype=torch.float32)
    model = adapters.add_lora(base, AdapterConfig(rank=4), seed=1)
    adapted.change(model, 0.05)
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapted.save_adapter(model, folder)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Makes configs of small runs: ``tiny_run({"train.max_steps": 2}, rows=24)``, each in a directory of its own."""

    def build(
        changes: Mapping[str, Any] | None = None, *, rows: int = 30, model: Path = tiny_model_dir
    ) -> dict[str, Any]:
        from tests.support import runs

        folder = tmp_path_factory.mktemp("run")
        return runs.tiny_run(model, tiny.write_chat_rows(folder, rows), folder / "out", changes)

    return build


@pytest.fixture(scope="session")
def classifier_run(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Makes configs of small runs of a classifier, as `tiny_run` does: ``classifier_run({...}, family="roberta")``."""

    def build(changes: Mapping[str, Any] | None = None, *, rows: int = 44, family: str = "bert") -> dict[str, Any]:
        from tests.support import runs

        folder = tmp_path_factory.mktemp("classifier")
        tiny.save_encoder(family, folder / "model", tokenizer)
        plain = runs.tiny_run(folder / "model", tiny.write_labelled_rows(folder, rows), folder / "out")
        own = {"model.task": "sequence_classification", "adapter.target_modules": "all-linear", "data.packing": False}
        own |= {"classification": {"class_weights": {"animal": 2.0, "plant": 0.5}, "label_smoothing": 0.1}}
        return runs.changed(plain, own, changes or {})

    return build


@pytest.fixture(scope="session")
def dropout_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The same with dropout in its attention: a step's result depends on the random state."""
    folder = tmp_path_factory.mktemp("dropout-llama")
    tiny.save_model("llama", folder, tokenizer, attention_dropout=0.1)
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real SmolLM2-135M-Instruct, which `make test` puts in place before the tests start."""
    folder = ROOT / ".models" / "SmolLM2-135M-Instruct"
    assert (folder / "config.json").is_file(), "run `make .models/SmolLM2-135M-Instruct` first"
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the benchmarks, which are scripts: from their folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


# The variables that each fixture of a session has put into the environment.
SHARED: dict[str, set[str]] = {}


def share(fixture: str, variables: Mapping[str, str]) -> None:
    """Put variables into the environment: only tests that ask for the fixture see them."""
    SHARED.setdefault(fixture, set()).update(variables)
    os.environ.update(variables)


# Ends the shared Ray.
RAY = ExitStack()


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if scheduling_group(request.node.nodeid.partition("::")[0]) != "ray":
        # No later test of this process uses it. A test that has Ray's core read another token would break the
        # connection, and with it this process.
        RAY.close()
    for fixture in SHARED.keys() - set(request.fixturenames):
        for name in SHARED[fixture]:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def s3_socket() -> Iterator[socket.socket]:
    """Where the S3 server of a session will answer. Ray's workers have the environment that Ray was started in, so the
    address and the credentials are there before the shared Ray is."""
    with s3.reserve() as listening:
        share("s3_socket", s3.environment(listening))
        yield listening


@pytest.fixture(scope="session")
def s3_server(s3_socket: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    """A running S3 server."""
    with s3.serve(s3_socket, tmp_path_factory.mktemp("s3") / "requests.log") as server:
        yield server


@pytest.fixture
def bucket(s3_server: s3.Server) -> s3.Bucket:
    """A new bucket."""
    return s3_server.bucket()


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the Hub, empty at first, of every process that a session starts with its shared Ray or later."""
    folder = tmp_path_factory.mktemp("hub")
    share("hub_cache", {"HF_HUB_CACHE": str(folder)})
    return folder


@pytest.fixture(scope="session")
def forked(hub_cache: Path, s3_socket: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands, and workers of the shared Ray, are forked from one process that has imported what they all import."""
    with forks.server(tmp_path_factory.mktemp("forks")):
        yield


@pytest.fixture(scope="session")
def ray_cluster(forked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One local Ray for all tests of a session; its address, which `finray` processes join through RAY_ADDRESS.

    It has four CPUs by its own account, so that three workers can be placed on a machine with two cores.
    """
    import secrets

    if "PYTEST_XDIST_WORKER" in os.environ:
        # The parent is common to all processes of a session: a second Ray would be seen here.
        (tmp_path_factory.getbasetemp().parent / "ray").touch(exist_ok=False)

    from finray.runtime import cluster

    # As a Ray that finray starts: without what nobody reads, such as a process beside each run that waits for the end
    # of its machine.
    variables = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
    share("ray_cluster", {**cluster.LOCAL_RAY, **variables})
    import ray

    with RAY:
        RAY.enter_context(forks.forking_ray())
        options = {
            "address": "local",
            "num_cpus": 4,
            "include_dashboard": False,
            "object_store_memory": 128 * 2**20,
            "log_to_driver": False,
            # It would kill workers for memory that others on this machine use.
            "_system_config": {"memory_monitor_refresh_ms": 0},
        }
        with cluster._without_observers():
            cluster._start(ray, options)
        RAY.callback(ray.shutdown)
        address = ray.get_runtime_context().gcs_address
        share("ray_cluster", {"RAY_ADDRESS": address})
        yield address


@pytest.fixture(autouse=True)
def _no_group_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share a cluster of four CPUs: one that leaves a placement group would be the failure of another test."""
    yield
    if "ray_cluster" in request.fixturenames:
        from tests.support.runs import wait_for_no_group

        wait_for_no_group()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses Ray comes first: it takes longest, and the other processes of pytest-xdist have the rest."""
    # Ray's core reads RAY_AUTH_MODE as it is loaded: later `ray_cluster` could not reach the Ray that it starts.
    assert "ray" not in sys.modules, "a test file imports Ray at its top; import it in the test"
    quarantine.mark(items, quarantine.read())
    items.sort(key=lambda item: scheduling_group(item.nodeid.partition("::")[0]) != "ray")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which of pytest-xdist's processes a test runs in: files stay together, and all files that use Ray.

    What the fixtures of a session or of a file make is then made once. pytest-xdist 3.8's own `xdist_group` mark does
    nothing with pytest 9.2: it writes the group into `item._nodeid`, which pytest no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scheduling_group(nodeid.partition("::")[0])

    # In the order of collection, and not by the number of tests: unit tests, which are short, come last.
    config.option.loadscopereorder = False
    return ByFile(config, log)


@cache
def scheduling_group(file: str) -> str:
    """The name of what runs in one process: a test file's path, or `ray` for all that share the Ray of a session."""
    return "ray" if "ray_cluster: str" in (ROOT / file).read_text(encoding="utf-8") else file


def pytest_unconfigure() -> None:
    if HOME is not None:
        stranger.remove(HOME)
