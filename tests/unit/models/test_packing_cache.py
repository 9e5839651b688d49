"""The packing check is made once for a configuration, and again where something that it depends on has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from finray.config.resolved import Packing
from finray.config.schema import ModelConfig
from finray.config.tasks import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from finray.models import packing_cache, packing_check
from finray.models.packing_cache import cached_packing, packing_of, packing_of_config, store_packing

SAFE = Packing(True, "llama", pads=True)
UNSAFE = Packing(False, "mamba", "it carries a state from token to token")


def test_a_check_is_remembered_until_what_it_depends_on_changes(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    text = (tiny_model_dir / "config.json").read_text(encoding="utf-8")
    (copy / "config.json").write_text(text, encoding="utf-8")
    model, cache = ModelConfig(name=str(copy)), tmp_path / "cache"
    assert cached_packing(model, cache) is None
    found = packing_of(model, cache)
    assert found.safe
    assert cached_packing(model, cache) == found
    # It is that of the configuration, whatever its name.
    assert cached_packing(ModelConfig(name=str(tiny_model_dir)), cache) == found
    assert cached_packing(model.model_copy(update={"trust_remote_code": True}), cache) is None
    (copy / "config.json").write_text(text + " ", encoding="utf-8")
    assert cached_packing(model, cache) is None
    store_packing(model, cache, UNSAFE)
    assert packing_of(model, cache) == UNSAFE


def test_a_damaged_or_missing_cache_is_no_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = ModelConfig(name=str(tiny_model_dir))
    (tmp_path / "file").write_text("", encoding="utf-8")
    store_packing(model, tmp_path / "file", SAFE)
    store_packing(model, tmp_path, SAFE)
    for entry in tmp_path.glob("*.json"):
        entry.write_text("{", encoding="utf-8")
    assert cached_packing(model, tmp_path) is None
    assert cached_packing(ModelConfig(name=str(tmp_path / "nothing")), tmp_path) is None


@pytest.mark.long
def test_a_warm_driver_imports_neither_torch_nor_transformers(tiny_model_dir: Path, tmp_path: Path) -> None:
    store_packing(ModelConfig(name=str(tiny_model_dir)), tmp_path, SAFE)
    script = f"""
import sys
from pathlib import Path
from finray.config.load import build_config
from finray.planning.placement import device_of, place
from finray.models.packing_cache import packing_of
from finray.planning.resolve import resolve
plain = {{"run": {{"name": "x"}}, "model": {{"name": {str(tiny_model_dir)!r}}}, "data": {{"source": "d"}}}}
config = build_config(plain, source="test")
placement = place(config.cluster, [{{"CPU": 4.0}}])
packing = packing_of(config.model, Path({str(tmp_path)!r}))
assert resolve(config, placement, device_of(placement), packing=packing).packs
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_loaded_models_configuration_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    check = packing_check.check_packing_of

    def counted(config: Any, **options: Any) -> Packing:
        checked.append(config)
        return check(config, **options)

    monkeypatch.setattr(packing_check, "check_packing_of", counted)

    def llama(**fields: Any) -> Any:
        return AutoConfig.for_model("llama", **fields)

    for _ in range(2):
        assert packing_of_config(llama(), folder=tmp_path) == replace(SAFE, hidden_size=4096)
    assert len(checked) == 1
    # Where it was loaded from says nothing; what it is does.
    moved = llama()
    moved._name_or_path, moved.dtype = "elsewhere", "bfloat16"
    assert packing_of_config(moved, folder=tmp_path) == replace(SAFE, hidden_size=4096)
    assert len(checked) == 1
    assert not packing_of_config(AutoConfig.for_model("bloom"), folder=tmp_path).is_told
    assert packing_of_config(llama(rope_theta=5e5), folder=tmp_path).safe
    assert packing_of_config(llama(), auto_class="AutoModelForSequenceClassification", folder=tmp_path).safe
    assert len(checked) == 4


def test_a_gguf_file_is_known_by_its_size_and_time(tmp_path: Path) -> None:
    """It is too large to be read for this."""
    file = tmp_path / "model.gguf"
    model = ModelConfig(name=str(file))
    assert cached_packing(model, tmp_path) is None
    store_packing(model, tmp_path, UNSAFE)
    assert list(tmp_path.iterdir()) == []
    file.write_bytes(b"one")
    os.utime(file, (100, 100))
    store_packing(model, tmp_path, UNSAFE)
    assert cached_packing(model, tmp_path) == UNSAFE
    os.utime(file, (100, 101))
    assert cached_packing(model, tmp_path) is None
    file.write_bytes(b"longer")
    os.utime(file, (100, 100))
    assert cached_packing(model, tmp_path) is None


def test_another_task_or_another_version_of_a_library_is_another_check(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(name=str(tiny_model_dir))
    store_packing(model, tmp_path, UNSAFE)
    assert cached_packing(model.model_copy(update={"task": SEQUENCE_CLASSIFICATION.name}), tmp_path) is None
    # A task of the user's own: the class of its models counts.
    named = model.model_copy(update={"task": "own.py:task"})
    classes = ["AutoModelForCausalLM"]
    monkeypatch.setattr(packing_cache, "task_spec", lambda name: replace(CAUSAL_LM, auto_class=classes[-1]))
    store_packing(named, tmp_path, UNSAFE)
    assert cached_packing(named, tmp_path) == UNSAFE
    classes.append("AutoModelForMaskedLM")
    assert cached_packing(named, tmp_path) is None
    for library in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(packing_cache, "version", lambda name, new=library: "99" if name == new else version(name))
            assert cached_packing(model, tmp_path) is None
    assert cached_packing(model, tmp_path) == UNSAFE


def test_a_model_of_the_hub_is_known_by_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, file: str, *, revision: str | None) -> str:
        path = tmp_path / f"{name.replace('/', '-')}-{revision}"
        path.write_text(f"{name} {file} {revision}")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    models = [ModelConfig(name="some/model", revision=one) for one in ("first", "second")]
    store_packing(models[0], tmp_path / "cache", UNSAFE)
    assert [cached_packing(one, tmp_path / "cache") for one in models] == [UNSAFE, None]


def test_the_users_cache_is_used_unless_told_otherwise(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, folder = ModelConfig(name=str(tiny_model_dir)), tmp_path / "finray" / "packing"
    assert packing_of(model) == replace(SAFE, hidden_size=64)
    assert cached_packing(model, folder) == replace(SAFE, hidden_size=64)
    store_packing(model, folder, UNSAFE)
    assert cached_packing(model) == packing_of(model) == UNSAFE
    assert packing_of_config(AutoConfig.for_model("llama")) == replace(SAFE, hidden_size=4096)
    assert len(list(folder.iterdir())) == 2


def test_what_failed_for_another_reason_is_tried_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = ModelConfig(name=str(tiny_model_dir))
    store_packing(model, tmp_path, Packing(False, "llama", "too little memory", lasting=False))
    assert cached_packing(model, tmp_path) is None
    store_packing(model, tmp_path, UNSAFE)
    assert cached_packing(model, tmp_path) == UNSAFE
