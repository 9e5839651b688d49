"""What `finray export --onnx` refuses before anything is loaded; tests/services has the export itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finray.publishing.onnx import PACKAGES
from tests.support.runs import finray


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chat model, of which nothing may be loaded."""
    monkeypatch.setattr("finray.publishing.onnx.export_model", pytest.fail)
    monkeypatch.setattr("finray.errors.find_spec", lambda name: object())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "finray.json").write_text(json.dumps({"task": "causal_lm"}))
    return tmp_path


def refused(folder: Path, *words: Any) -> str:
    code, out, err = finray("export", folder / "model", "--output", folder / "made", "--onnx", *words)
    assert (code, out) == (2, "")
    assert not (folder / "made").exists()
    return err


def test_a_model_that_is_no_classifier(folder: Path) -> None:
    assert "only classifiers are exported to ONNX" in refused(folder)


@pytest.mark.parametrize("missing", PACKAGES)
def test_a_package_that_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr("finray.errors.find_spec", lambda name: None if name == missing else object())
    said = refused(folder)
    assert f"needs the package {missing}, which is not installed" in said
    assert "pip install 'finray[onnx]'" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--adapter",), "an adapter cannot be exported to ONNX by itself"),
        (("--max-shard-size", "1GB"), "an ONNX model is a single file"),
        (("--gguf", "f16"), "GGUF or to ONNX"),
    ],
)
def test_options_that_do_not_fit(folder: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused(folder, *words)


def test_a_directory_that_is_not_empty(folder: Path) -> None:
    code, _, err = finray("export", folder / "model", "--output", folder / "model", "--onnx")
    assert code == 2
    assert "not empty" in err
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["config.json", "finray.json"]
