"""`finray convert`: settings whose meaning depends on others, and what is lost of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finray.errors import ConfigError
from tests.unit.config.test_convert import AXOLOTL, LLAMA_FACTORY, converted, fields

SMALL = {"base_model": "m", "datasets": [{"path": "org/rows", "type": "alpaca"}]}


def lost(text: str, folder: Path, **options: Any) -> dict[str, str]:
    """The reasons, by key."""
    return {one.key.partition(":")[0]: one.why for one in converted(text, folder, **options).lost}


def test_a_secret_is_not_copied_into_the_config(tmp_path: Path) -> None:
    keys = ("hub_token", "hf_hub_token", "wandb_api_key", "swanlab_api_key")
    plain = SMALL | dict.fromkeys(keys, "s3cr3t")
    plain |= {"ray_init_kwargs": {"env": {"HF_TOKEN": "s3cr3t"}}, "debug": "hf_abcdefghijklmnop1234"}
    found = converted(yaml.safe_dump(plain), tmp_path)
    assert {"***" in one.key for one in found.lost if one.key.startswith((*keys, "ray_", "debug"))} == {True}
    assert "s3cr3t" not in found.text("theirs.yaml")
    assert "hf_abc" not in found.text("theirs.yaml")


@pytest.mark.parametrize(
    ("text", "changes", "pushes", "listed"),
    [
        (LLAMA_FACTORY, {"hub_model_id": "me/x"}, False, {"hub_model_id"}),
        (LLAMA_FACTORY, {"hub_model_id": "me/x", "push_to_hub": False}, False, {"hub_model_id"}),
        (LLAMA_FACTORY, {"hub_model_id": "me/x", "push_to_hub": True}, True, set()),
        (LLAMA_FACTORY, {"push_to_hub": True}, False, {"push_to_hub"}),
        (LLAMA_FACTORY, {"push_to_hub": False}, False, set()),
        # For Axolotl the name is enough.
        (AXOLOTL, {"hub_model_id": "me/x"}, True, set()),
    ],
)
def test_a_run_that_does_not_push_there_does_not_push_here(
    text: str, changes: dict[str, Any], pushes: bool, listed: set[str], tmp_path: Path
) -> None:
    text = yaml.safe_dump(yaml.safe_load(text) | changes)
    assert fields(text, tmp_path).get("export.push_to_hub") == ("me/x" if pushes else None)
    assert lost(text, tmp_path).keys() & {"hub_model_id", "push_to_hub"} == listed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, {"train.warmup_ratio": 0.1, "train.warmup_steps": None}),
        ({"warmup_steps": 0}, {"train.warmup_steps": 0}),
        ({"micro_batch_size": 2.0, "gradient_accumulation_steps": "1e1"}, {"train.global_batch_size": 20}),
        ({"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}}, {}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}}},
            {"parallel.cpu_offload": True},
        ),
        ({"deepspeed": {"zero_optimization": 3}}, {"parallel.zero_stage": 3}),
        ({"wandb_project": "p", "wandb_mode": "disabled"}, {"tracking.trackers": None}),
        ({"val_set_size": 0.1, "greater_is_better": True}, {"evaluation.metric_mode": "max"}),
        ({"val_set_size": 0.1, "greater_is_better": False}, {"evaluation.metric_mode": "min"}),
    ],
)
def test_what_a_setting_comes_to_beside_others(
    changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    text = yaml.safe_dump(SMALL | changes)
    found = fields(text, tmp_path)
    expected = expected or {"parallel.cpu_offload": None}
    assert {name: found.get(name) for name in expected} == expected
    assert not lost(text, tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (
            {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["embed_tokens"]},
            "lora_target_modules",
        ),
        ({"fsdp_config": "fsdp.json"}, "fsdp_config"),
        ({"pretraining_dataset": "org/text"}, "pretraining_dataset"),
        ({"logging_steps": 0.1}, "logging_steps"),
        ({"test_datasets": [{"path": "org/held", "type": "alpaca", "name": "main"}]}, "test_datasets.subset"),
        ({"test_datasets": [{"path": "org/held", "type": "alpaca", "revision": "v1"}]}, "test_datasets.revision"),
        ({"test_datasets": [{"path": "org/held", "type": "completion"}]}, "test_datasets.format"),
    ],
)
def test_what_has_no_place_is_listed(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert key in lost(yaml.safe_dump(SMALL | changes), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batch_size": 0, "batch_size": 8}, "`micro_batch_size: 0` is not a whole number of 1 or more"),
        ({"micro_batch_size": 2.5}, "`micro_batch_size: 2.5` is not a whole number of 1 or more"),
        ({"logging_steps": float("inf")}, "`logging_steps: inf` is not a number"),
        ({"learning_rate": "nan"}, "`learning_rate: nan` is not a number"),
        ({"datasets": [{"path": "a", "name": 5}, {"path": "b"}]}, "data.mix.0.subset"),
    ],
)
def test_a_number_that_is_no_size_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        converted(yaml.safe_dump(SMALL | changes), tmp_path)


@pytest.mark.parametrize(
    ("probabilities", "weights"), [("0.7,0.3", [0.7, 0.3]), ("0.7", [None, None]), (None, [None, None])]
)
def test_probabilities_of_datasets_are_weights(
    probabilities: str | None, weights: list[float | None], tmp_path: Path
) -> None:
    changes = {"mix_strategy": "interleave_under", "interleave_probs": probabilities}
    text = yaml.safe_dump(yaml.safe_load(LLAMA_FACTORY) | changes)
    assert [one.get("weight") for one in fields(text, tmp_path)["data.mix"]] == weights
    assert ("mix_strategy" in lost(text, tmp_path)) == (weights[0] is None)


@pytest.mark.parametrize(
    ("about", "limit", "expected", "noted"),
    [
        ({"hf_hub_url": "org/a", "num_samples": 10}, "1e3", {"split": "train[:10]"}, "num_samples"),
        ({"hf_hub_url": "org/a", "split": "train[:10]"}, 1000, {"split": "train[:10]"}, ""),
        ({"hf_hub_url": "org/a", "split": "train[5:]"}, 10, {"split": "train[5:15]"}, ""),
        ({"hf_hub_url": "org/a", "split": "train[:1%]"}, 10, {"split": "train[:1%]"}, "max_samples"),
        ({"hf_hub_url": "org/a", "revision": "v1"}, None, {"revision": "v1"}, ""),
        ({"file_name": None}, None, {}, ""),
        ({"ms_hub_url": "org/a"}, None, {}, "ms_hub_url"),
        ({"script_url": "a.py"}, None, {}, "script_url"),
        ({"file_name": "a.json", "ranking": True}, None, {}, "ranking"),
        ({"file_name": "a.json", "columns": {"images": "seen"}}, None, {}, "columns.images"),
    ],
)
def test_what_the_table_says_of_a_dataset_is_read_or_noted(
    about: dict[str, Any], limit: object, expected: dict[str, Any], noted: str, tmp_path: Path
) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": about, "theirs": {"file_name": "b.json"}}))
    text = yaml.safe_dump(yaml.safe_load(LLAMA_FACTORY) | {"max_samples": limit})
    options = {"dataset_info": tmp_path / "dataset_info.json"}
    first = fields(text, tmp_path, **options)["data.mix"][0]
    assert first | expected == first
    assert not first["source"].endswith("None")
    assert [
        one for one in converted(text, tmp_path, **options).notes if f"{noted} " in one and "mine" in one
    ] or not noted


def test_rows_to_evaluate_of_the_hub_are_those_of_the_split_that_is_read_there(tmp_path: Path) -> None:
    changes = {"eval_dataset": "org/held", "dataset_dir": "ONLINE", "max_samples": None, "val_size": None}
    found = fields(yaml.safe_dump(yaml.safe_load(LLAMA_FACTORY) | changes), tmp_path)
    assert (found["data.eval_source"], found["data.eval_split"]) == ("org/held", "train")
