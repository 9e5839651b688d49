"""What `finray serve` refuses before Ray is started and a weight is read: one message, exit code 2."""

from __future__ import annotations

import json
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.runtime import cluster
from finray.serving import models
from finray.serving.models import ServeSettings, find, find_adapter
from tests.support import ports, served, tiny
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
        (("one", "--adapter", "a b=one"), "--adapter: `a b` cannot be the name of a model"),
        (("one", "--name", "a b"), "--name: `a b` cannot be the name of a model"),
        (("base", "--base", "elsewhere"), "it is a full model, which has no base model"),
        (("base", "--adapter", "x=one", "--adapter", "x=one"), "two models are named `x`"),
        (("base", "--adapter", "base=one"), "two models are named `base`"),
        (("base", "--adapter", "x=strange"), "a different base model"),
        (("base", "--adapter", "x=other"), "full model, not an adapter"),
        (("one", "--api-key-env", "FINRAY_NO_SUCH_KEY"), "no variable FINRAY_NO_SUCH_KEY"),
        (("one", "--adapters-from", "none"), "none` is not a directory"),
        (("one", "--adapters-from", "french=runs/french"), "is not a directory"),
        (("one", "--adapters-from", ".", "--host", "0.0.0.0"), "everybody who reaches this address could add adapters"),
        (("one", "--allow-host", "http://x"), "`http://x` is not the name of a host"),
        (("~nobody2/x",), "a path begins with `~` and a name that is no user's here"),
        (("one", "--adapter", "x=~nobody2/x"), "a path begins with `~` and a name that is no user's here"),
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
    # Not the default one, which a test that serves might have.
    with ports.reserved() as port:
        code, out, err = finray("serve", *words, "--port", port)
    assert (code, out) == (2, ""), err
    assert said in err
    assert "Traceback" not in err


@pytest.fixture
def moved(folder: Path, tmp_path: Path) -> Path:
    """A base model at another place than its adapters say; one of them says none."""
    shutil.copytree(folder / "base", tmp_path / "base")
    for name, base in (("one", "old/place"), ("nameless", None)):
        shutil.copytree(folder / "one", tmp_path / name)
        settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "base"), [("base", "base"), ("one", "base"), ("nameless", "base"), ("org/model", "org/model")]
)
def test_the_base_of_adapters_may_have_moved_whatever_is_served_beside_them(
    moved: Path, monkeypatch: pytest.MonkeyPatch, model: str, base: str
) -> None:
    monkeypatch.chdir(moved)
    # The Hub is not asked.
    monkeypatch.setattr("finray.evaluation.artifacts._notes_on_hub", lambda *_: {})
    monkeypatch.setattr(models, "load_tokenizer", lambda model: SimpleNamespace(chat_template="x"))
    found = find(ServeSettings(model, adapters=(("x", "one"), ("y", "nameless")), base=base))
    assert found.artifact.model.name == (str(moved / "base") if model == "base" else base)
    assert [name for name, _ in found.adapters] == ["x", "y"]
    with pytest.raises(ModelError, match=r"full model, not an adapter"):
        find(ServeSettings(model, adapters=(("x", "base"),), base=base))


@pytest.mark.parametrize(
    ("trained", "served_one", "fits"),
    [("main", None, True), (None, "main", True), ("v1", "v1", True), ("v1", None, False)],
)
def test_an_adapter_of_another_revision_is_refused_by_its_revision(
    moved: Path, trained: str | None, served_one: str | None, fits: bool
) -> None:
    settings = json.loads((moved / "one" / "adapter_config.json").read_text())
    changed = {**settings, "base_model_name_or_path": "org/model", "revision": trained}
    (moved / "one" / "adapter_config.json").write_text(json.dumps(changed))
    of = ModelConfig(name="org/model", revision=served_one)
    said = r"it was trained on org/model \(revision v1\), but org/model is served"
    with nullcontext() if fits else pytest.raises(ModelError, match=said):
        assert find_adapter(str(moved / "one"), of=of, base=None).base is not None
    assert find_adapter(str(moved / "one"), of=of, base="org/model").base == ModelConfig(name="org/model")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--adapter", "more=one"), "a classifier cannot be served with adapters"),
        (("--adapters-from", "."), "--adapters-from: a classifier cannot be served with adapters"),
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
    with ports.reserved() as port:
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
    with ports.reserved() as port:
        code, _, err = finray("serve", folder / "one", "--adapter", f"again={folder / 'one'}", "--port", port)
    assert code == 1
    assert "Ray is started" in err
