"""Configuration: every problem at once, each with its path; overrides, presets, redaction, identity, pages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from finray.config.identity import FREE, differences, flatten, is_free
from finray.config.load import build_config, load_config, preset_names, read_preset, with_overrides
from finray.config.redact import is_secret_name, redact, redact_text
from finray.config.reference import reference_markdown, starter_yaml
from finray.config.schema import Config, sections
from finray.errors import ConfigError, FinrayError, from_dict

SMALL: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}}


def test_overrides_win_over_the_file_and_the_file_over_presets(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "preset: smollm2-lora\ndata: {source: mine.jsonl}\ntrain: {learning_rate: 1e-3}\nrun:\n  # only a comment\n"
    )
    config = load_config(path, ["train.max_steps=7", "adapter.target_modules=[q_proj, v_proj]"])
    assert config.data.source == "mine.jsonl"
    assert config.model.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.train.learning_rate == 1e-3
    assert config.train.max_steps == 7
    assert config.adapter.target_modules == ["q_proj", "v_proj"]


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.max_stps=1", "adapter.rank=0", "cluster.num_workers=many"])
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    for part in ("model: missing", "data: missing", "train.max_stps", "adapter.rank", "cluster.num_workers"):
        assert part in problems


def test_a_config_is_frozen() -> None:
    config = build_config(SMALL, source="test")
    with pytest.raises(ValueError, match="frozen"):
        config.train.learning_rate = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_configurations(name: str) -> None:
    build_config(read_preset(name), source=name)


def test_the_starter_file_is_a_configuration_with_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(starter_yaml(model="m", source="d.jsonl"))
    assert load_config(path) == build_config(SMALL, source="test")
    # Every field is there, commented or not, and uncommenting changes nothing.
    uncommented = path.read_text().replace("  # ", "  ", 200)
    for section, model in sections().items():
        for field in model.model_fields:
            assert f"  {field}: " in uncommented, f"{section}.{field}"


def test_the_reference_names_every_field_and_is_the_page_in_the_docs() -> None:
    text = reference_markdown()
    for section, model in sections().items():
        for field, info in model.model_fields.items():
            assert f"`{section}.{field}`" in text
            assert info.description, f"{section}.{field} has no description"
    page = Path(__file__).parents[3] / "docs" / "reference" / "config.md"
    assert page.read_text(encoding="utf-8") == text, "run `make docs`"


def test_sections_stay_small() -> None:
    assert all(len(model.model_fields) <= 22 for model in sections().values())


def test_a_saved_configuration_reads_back_as_itself() -> None:
    config = build_config({**SMALL, "cluster": {"env": {"A": "b"}}}, source="test")
    assert build_config(yaml.safe_load(yaml.safe_dump(config.plain())), source="test") == config


def test_only_what_cannot_change_what_is_learned_is_free() -> None:
    old = build_config(SMALL, source="test")
    free = {"cluster": {"num_workers": 4}, "tracking": {"log_every": 9}, "checkpoint": {"every_steps": 3}}
    new = build_config({**SMALL, **free, "train": {"micro_batch_size": 2}}, source="test")
    assert differences(old, new) == []
    other = build_config({**SMALL, "train": {"learning_rate": 1.0}, "run": {"seed": 3}}, source="test")
    assert [path for path, _, _ in differences(old, other)] == ["run.seed", "train.learning_rate"]
    for path in ("data.source", "train.global_batch_size", "adapter.rank", "model.name", "train.precision"):
        assert not is_free(path)
    assert all(path.split(".")[0] in sections() for path in FREE)
    assert "cluster.env" in flatten(old.plain())


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "api_key", "AWS_SECRET_ACCESS_KEY", "db.password", "WANDB_API_KEY", "token"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_new_tokens", "tokenizer", "target_modules", "keyboard", "NCCL_P2P_DISABLE"])
def test_names_that_only_look_like_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_are_masked_by_key_by_shape_and_by_environment() -> None:
    token = "hf_" + "a" * 30
    masked = redact({"HF_TOKEN": "x", "note": f"use {token}", "deep": [{"password": "p"}], "max_new_tokens": 5})
    assert masked == {"HF_TOKEN": "***", "note": "use ***", "deep": [{"password": "***"}], "max_new_tokens": 5}
    assert redact_text("at https://me:hunter22@host/x") == "at https://me:***@host/x"
    assert redact_text("it is s3cr3t-value", environ={"MY_TOKEN": "s3cr3t-value"}) == "it is ***"


def test_reading_an_override_twice_changes_nothing() -> None:
    once = load_config(None, ["model.name=m", "data.source=d", "train.epochs=2"])
    assert load_config(None, ["model.name=m", "data.source=d", "train.epochs=3", "train.epochs=2"]) == once


def test_overrides_of_a_config_give_the_config_that_the_file_with_them_gives(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: smollm2-lora\ntrain: {learning_rate: 1e-3}\nadapter: {rank: 4}\n")
    overrides = ["train.learning_rate=5e-4", "adapter.target_modules=[q_proj]", "evaluation.early_stopping=null"]
    config = load_config(path)
    changed = with_overrides(config, overrides)
    assert changed == load_config(path, overrides)
    assert changed.train.learning_rate == 5e-4
    assert (config.train.learning_rate, config.adapter.target_modules) == (
        1e-3,
        load_config(path).adapter.target_modules,
    )
    # What was left at its default stays so: an adapter that is continued fills in these fields.
    assert changed.adapter.model_fields_set == config.adapter.model_fields_set | {"target_modules"}
    assert "dropout" not in changed.adapter.model_fields_set
    assert with_overrides(config, []) == config


def test_overrides_of_a_config_are_checked() -> None:
    config = build_config(SMALL, source="test")
    with pytest.raises(ConfigError) as caught:
        with_overrides(config, ["train.max_stps=1", "adapter.rank=0", "nonsense"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "`nonsense` is not an override",
        "adapter.rank",
        "train.max_stps",
    ]


def test_an_override_reaches_into_a_list() -> None:
    raw: dict[str, Any] = {"model": {"name": "m"}, "data": {"mix": [{"source": "a"}, {"source": "b"}]}}
    config = build_config(raw, source="test", overrides=["data.mix.1.weight=3"])
    assert [one.weight for one in config.data.mix] == [None, 3]
    assert with_overrides(config, ["data.mix.0.source=c"]).data.mix[0].source == "c"
    assert raw["data"]["mix"][1] == {"source": "b"}
    for wrong in ("data.mix.2.weight=3", "data.mix.last.weight=3"):
        with pytest.raises(ConfigError, match=r"`data\.mix` is a list of 2"):
            with_overrides(config, [wrong])


def test_problems_of_nested_fields_have_their_whole_path() -> None:
    overrides = ["data.mix=[{source: a, wieght: 1}]", "data.source=null", "evaluation.early_stopping={patence: 1}"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.name=m", "train.profile={steps: [1, x]}", *overrides])
    problems = "\n".join(caught.value.problems)
    assert "data.mix.0.wieght: unknown key (did you mean `weight`?)" in problems
    assert "evaluation.early_stopping.patence: unknown key (did you mean `patience`?)" in problems
    assert "train.profile.steps.1: " in problems


@given(st.text(max_size=30))
def test_no_override_ends_in_a_traceback(text: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(None, ["model.name=m", "data.source=d", text])


@pytest.mark.parametrize("kind", [FinrayError, ConfigError])
def test_errors_survive_a_trip_through_json(kind: type[FinrayError]) -> None:
    error = kind("what", where="a.b", repair="do")
    again = from_dict(error.to_dict())
    assert type(again) is kind
    assert str(again) == str(error) == "a.b: what\n  repair: do"


def test_the_schema_has_no_two_fields_that_a_suggestion_would_confuse() -> None:
    assert Config.model_fields.keys() == sections().keys()


def test_checkpointing_of_older_files_is_understood() -> None:
    def value(given: Any) -> str:
        return build_config(
            {**SMALL, "train": {"gradient_checkpointing": given}}, source="t"
        ).train.gradient_checkpointing

    assert [value(True), value(False), value("selective")] == ["full", "none", "selective"]
    with pytest.raises(
        ConfigError, match=r"train\.gradient_checkpointing: input should be 'none', 'selective' or 'full'"
    ):
        value("some")
