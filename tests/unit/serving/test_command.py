"""What `finray serve` refuses before Ray is started and a weight is read: one message, exit code 2."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from finray.runtime import cluster
from tests.support import served, tiny
from tests.support.labelled import bert_tokenizer, save_classifier
from tests.support.runs import finray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = served.save_adapters(tmp_path_factory.mktemp("served"), tokenizer, ("one",))
    tiny.save_model("llama", folder / "other", tokenizer, hidden_size=32)
    served.save_adapter(folder / "other", folder / "strange", tokenizer, target_modules=["q_proj"])
    # A run that was killed before its first checkpoint.
    (folder / "begun").mkdir()
    (folder / "begun" / "config.yaml").write_text("model: {name: m}\ndata: {source: d}\n")
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> Any:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(cluster, "connected", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing/run",), "there is no directory missing/run here"),
        (("begun",), "the run has no checkpoint yet"),
        (("one", "--adapter", "two=missing"), "missing"),
        (("one", "--adapter", "two"), "`two` is not of the form NAME=PATH"),
        (("one", "--adapter", "a b=one"), "cannot be the name of a model"),
        (("base", "--adapter", "x=one", "--adapter", "x=one"), "two models are named `x`"),
        (("base", "--adapter", "base=one"), "two models are named `base`"),
        (("base", "--adapter", "x=strange"), "a different base model"),
        (("base", "--adapter", "x=other"), "full model, not an adapter"),
        (("one", "--api-key-env", "FINRAY_NO_SUCH_KEY"), "no variable FINRAY_NO_SUCH_KEY"),
        (("one", "--host", "192.0.2.1"), "--host 192.0.2.1"),
        (("one", "--dtype", "int3"), "`int3`"),
        (("one", "--engine", "fast"), "unknown engine `fast`"),
        (("one", "--engine", "vllm"), "vLLM is not installed"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_started(
    words: tuple[str, ...], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("finray.evaluation.engines.vllm.find_spec", lambda name: None)
    # A port of its own: else a test that serves might have the default one.
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    code, out, err = finray("serve", *words, "--port", port)
    assert (code, out) == (2, ""), err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--adapter", "more=one"), "a classifier cannot be served with adapters"),
        (("--engine", "vllm"), "vLLM does not run classifiers"),
        # The negative control.
        (("--engine", "auto"), "Ray is started"),
    ],
)
def test_what_a_classifier_cannot_be_served_with_is_said(
    words: tuple[str, ...], said: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_classifier("bert", tmp_path, bert_tokenizer())
    monkeypatch.chdir(folder)
    monkeypatch.setattr("finray.evaluation.engines.vllm.find_spec", lambda name: name)
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    code, out, err = finray("serve", adapter, *words, "--port", port)
    assert (code, out) == (1 if said == "Ray is started" else 2, "")
    assert said in err


def test_a_port_in_use_is_said_before_the_model_is_looked_at(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = finray("serve", folder / "one", "--port", port)
    assert code == 2
    assert f"--port {port}: the address is already in use" in err


def test_what_can_be_served_starts(folder: Path) -> None:
    """The negative control."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    code, _, err = finray("serve", folder / "one", "--adapter", f"again={folder / 'one'}", "--port", port)
    assert code == 1
    assert "Ray is started" in err
