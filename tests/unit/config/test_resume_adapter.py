"""Going on from an adapter: what it says of itself is taken over, and contradictions name both places."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from finray.config.adapter_files import CONTINUED
from finray.config.load import build_config
from finray.config.resume_adapter import with_start
from finray.config.schema import Config
from finray.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 24,
    "use_rslora": True,
    "target_modules": ["v_proj", "q_proj"],
    "modules_to_save": None,
    "bias": "none",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    (tmp_path / "finray.json").write_text(json.dumps({"new_tokens": ["<x>"]}), encoding="utf-8")
    return tmp_path


def config(folder: Path, model: dict[str, Any] | None = None, **adapter: Any) -> Config:
    plain = {
        "model": {"name": "m", **(model or {})},
        "data": {"source": "rows.jsonl"},
        "adapter": {"start_from": str(folder), **adapter},
    }
    return build_config(plain, source="test")


def test_what_is_left_open_is_taken_over(folder: Path) -> None:
    found = with_start(config(folder, dropout=0.1))
    assert found.adapter.model_dump() == {
        **found.adapter.model_dump(),
        "method": "rslora",
        "rank": 8,
        "alpha": 24.0,
        "dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"],
    }
    assert found.model.new_tokens == ["<x>"]
    # Once more, of a config in which everything is said.
    assert with_start(build_config(found.plain(), source="saved")) == found


@pytest.mark.parametrize("place", ["adapter_config.json", "finray.json"])
def test_the_base_is_of_the_revision_that_the_adapter_was_trained_on(folder: Path, place: str) -> None:
    """On other weights it would be noise."""
    for file in ("adapter_config.json", "finray.json"):
        content = json.loads((folder / file).read_text())
        content |= {"base_model_name_or_path": "m", **({"revision": "v1"} if file == place else {})}
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    found = with_start(config(folder))
    assert found.model.revision == "v1"
    assert with_start(build_config(found.plain(), source="saved")) == found
    with pytest.raises(ConfigError, match="says v2, but the adapter to continue from has v1") as caught:
        with_start(config(folder, model={"revision": "v2"}))
    assert "model.revision" in str(caught.value.where)
    # Of a copy under another name nothing is known.
    assert with_start(config(folder, model={"name": "copy"})).model.revision is None
    assert with_start(config(folder, model={"name": "copy", "revision": "v2"})).model.revision == "v2"


@pytest.mark.parametrize(
    ("theirs", "task", "said"),
    [
        ("SEQ_CLS", "sequence_classification", None),
        ("CAUSAL_LM", "causal_lm", None),
        (None, "causal_lm", None),
        ("CAUSAL_LM", "sequence_classification", "the adapter is for CAUSAL_LM"),
        (None, "sequence_classification", "the adapter is for no task that it names"),
        ("SEQ_CLS", "causal_lm", "the adapter is for SEQ_CLS, and model.task causal_lm needs CAUSAL_LM"),
    ],
)
def test_an_adapter_of_another_task_is_refused_and_a_classifiers_head_is_no_setting(
    folder: Path, theirs: str | None, task: str, said: str | None
) -> None:
    # As PEFT writes it for a classifier, whatever its head is called.
    saved = ["classifier", "score"] if theirs == "SEQ_CLS" else None
    settings = {**SETTINGS, "task_type": theirs, "modules_to_save": saved}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if said is None:
        assert with_start(config(folder, model={"task": task})).adapter.modules_to_save == []
        return
    with pytest.raises(ConfigError, match=said):
        with_start(config(folder, model={"task": task}))


def test_a_finished_run_stands_for_its_adapter(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "final").symlink_to(folder)
    assert with_start(config(run)).adapter.start_from == str(run / "final")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"rank": 16}, "adapter.rank"),
        ({"method": "dora"}, "adapter.method"),
        ({"target_modules": ["q_proj"]}, "adapter.target_modules"),
        ({"model": {"new_tokens": ["<y>"]}}, "model.new_tokens"),
    ],
)
def test_contradictions_name_both_places(folder: Path, fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_start(config(folder, **fields))
    assert place in str(caught.value.where)
    assert str(folder) in str(caught.value.where)
    with pytest.raises(ConfigError, match="2 fields differ"):
        with_start(config(folder, rank=16, alpha=1.0))
    # The same said twice is none.
    with_start(config(folder, rank=8, target_modules=["q_proj", "v_proj"], method="rslora"))
    with_start(config(folder, target_modules="all-linear"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "type IA3"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base"),
        ({"bias": "all"}, "biases"),
    ],
)
def test_adapters_that_cannot_be_continued(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **change}), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        with_start(config(folder))


def test_every_setting_of_peft_is_continued_or_refused_by_its_name(folder: Path) -> None:
    """Also one that the next version of PEFT will have."""
    fields = {one.name for one in dataclasses.fields(LoraConfig)}
    assert fields >= CONTINUED
    refused = fields - CONTINUED | {"a_setting_of_tomorrow"}
    assert refused > {"lora_bias", "layer_replication", "ensure_weight_tying", "use_qalora", "velora_config"}
    for name in refused:
        (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, name: True}), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"adapter with `{name}`"):
            with_start(config(folder))
    # Rows of tokens that finray has not added.
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, "trainable_token_indices": [5, 9]}))
    assert with_start(config(folder)).model.new_tokens == ["<x>"]
    (folder / "finray.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter with `trainable_token_indices`"):
        with_start(config(folder))
    # What PEFT writes of a plain adapter.
    plain = LoraConfig(r=4, target_modules=["q_proj"]).to_dict()
    text = json.dumps({**plain, **SETTINGS}, default=lambda one: getattr(one, "value", None) or sorted(one))
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    assert with_start(config(folder)).adapter.method == "rslora"


def test_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no adapter"):
        with_start(config(tmp_path / "nowhere"))
