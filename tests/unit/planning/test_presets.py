"""Presets: shapes of their models that come with finray, and plans that ask no Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finray.config.load import build_config, preset_names, read_preset
from finray.config.schema import AdapterConfig, Config, ModelConfig
from finray.planning.blueprint import build_blueprint
from finray.planning.plan import make_plan
from finray.planning.result import Plan
from finray.pretrained.bundled_configs import bundled_config

pytestmark = pytest.mark.long

# As published by those who made the models.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Salesforce/codegen-350M-mono": 356_712_448,
    "bert-base-uncased": 109_483_778,  # with a pooler, and a head for two classes
    "bigscience/bloomz-1b1": 1_065_314_304,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_bundled_configs_have_the_published_number_of_parameters(name: str) -> None:
    tasks = {
        preset["model"]["name"]: preset["model"].get("task", "causal_lm") for preset in map(read_preset, preset_names())
    }
    shape = bundled_config(ModelConfig(name=name, task=tasks[name]))
    assert shape is not None
    assert build_blueprint(shape, AdapterConfig(method="none")).parameters == PARAMETERS[name]
    # Another revision may be another model.
    assert bundled_config(ModelConfig(name=name, revision="main")) is None


def config_of(**sections: Any) -> Config:
    return build_config({"preset": "llama3-8b-lora", **sections}, source="test")


def planned(config: Config, *, offline: bool) -> Plan:
    return make_plan(config, gpu="h100-80gb", environ={}, offline=offline)


def test_without_the_option_a_hub_out_of_reach_is_a_problem_and_memory_is_known_all_the_same(tmp_path: Path) -> None:
    plan = planned(config_of(run={"output_dir": str(tmp_path)}), offline=False)
    assert plan.starts is False
    assert any("the Hub cannot be reached" in one.message for one in plan.problems)
    assert plan.unchecked == ()
    assert plan.memory is not None


def test_what_is_wrong_without_any_network_stays_a_problem_offline(tmp_path: Path) -> None:
    wrong = config_of(
        run={"output_dir": str(tmp_path)}, adapter={"target_modules": ["vproj"]}, data={"source": "no-such.jsonl"}
    )
    messages = [one.message for one in planned(wrong, offline=True).problems]
    assert any("matches no module" in message for message in messages)
    assert any("does not exist" in message or "no such file" in message.lower() for message in messages), messages
    unknown = config_of(run={"output_dir": str(tmp_path)}, model={"name": "nobody/knows-this"})
    plan = planned(unknown, offline=True)
    assert plan.model is None
    assert any("nobody/knows-this" in str(one.where) for one in plan.unchecked)


def test_a_source_of_ones_own_does_not_inherit_the_presets_way_to_read() -> None:
    config = build_config({"preset": "rust-coder", "data": {"source": "mine.jsonl"}}, source="test")
    assert (config.data.format, config.data.field_mapping, config.data.train_split) == ("auto", {}, "train")
    assert config.data.max_length == 1024
    kept = build_config({"preset": "rust-coder", "data": {"max_length": 512}}, source="test")
    assert kept.data.field_mapping == {"text": "content"}
