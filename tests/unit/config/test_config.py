"""Configuration: every problem at once, each with its path; overrides, presets, redaction, identity, pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finray.config.identity import FREE, differences, flatten, is_free
from finray.config.load import build_config, load_config, read_preset
from finray.config.redact import MASK, redact
from finray.config.reference import full_yaml, json_schema, reference_markdown, starter_yaml
from finray.config.schema import Config, sections
from finray.errors import ConfigError, FinrayError, from_dict

SMALL: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}}
TEMPLATES = {"input_template": "{q}", "output_template": "{a}"}


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
    # Nothing of rows that the preset holds out of its own source, unless others are held out.
    for held_out, every in ([], None), (["data.eval_ratio=0.1"], 100):
        preset = load_config(None, ["preset=reward-lora", "data.source=mine.jsonl", *held_out])
        assert (preset.data.eval_split, preset.evaluation.every_steps) == (None, every)


def test_an_override_of_one_field_keeps_what_a_preset_says_beside_it() -> None:
    before = load_config(None, ["preset=qwen3-8b-lora"]).evaluation.early_stopping
    assert before is not None
    after = load_config(None, ["preset=qwen3-8b-lora", "evaluation.early_stopping.patience=5"]).evaluation
    assert after.early_stopping == before.model_copy(update={"patience": 5})
    assert before.min_gain == 0.001
    env = load_config(None, ["preset=bloomz-zero3", "cluster.env.X=a"]).cluster.env
    assert env == {**load_config(None, ["preset=bloomz-zero3"]).cluster.env, "X": "a"}
    assert len(env) > 1


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.max_stps=1", "adapter.rank=0", "cluster.num_workers=many"])
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    for part in ("model: missing", "data: missing", "train.max_stps", "adapter.rank", "cluster.num_workers"):
        assert part in problems


def test_the_starter_file_is_a_configuration_with_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(full_yaml(model="m", source="d.jsonl"))
    assert load_config(path) == build_config(SMALL, source="test")
    # Every field is there, commented or not, and uncommenting changes nothing.
    uncommented = path.read_text().replace("  # ", "  ", 400)
    for section, model in sections().items():
        for field in model.model_fields:
            assert f"  {field}: " in uncommented, f"{section}.{field}"


def test_the_short_starter_file_has_15_lines_and_holds_rows_out_beside_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(starter_yaml(model="a: b", source="my rows.jsonl"))
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# yaml-language-server: $schema=")
    assert len(lines) == 15
    assert max(map(len, lines)) <= 120
    config = load_config(path)
    assert (config.model.name, config.data.source) == ("a: b", "my rows.jsonl")
    # Epochs are left open: a file of few rows is passed over more than once.
    own = {"model": {"name": "a: b"}, "data": {"source": "my rows.jsonl", "eval_ratio": 0.1}}
    assert config == build_config(own, source="test")


def test_the_schema_for_editors_takes_a_file_with_a_preset_and_refuses_an_unknown_field() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate({"preset": "smollm2-lora", "data": {"max_length": 99}}, json_schema())
    for wrong in ({"preset": "no-such"}, {"train": {"max_stps": 1}}, {"train": {"epochs": "many"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, json_schema())


def test_the_reference_names_and_describes_every_field() -> None:
    text = reference_markdown()
    for section, model in sections().items():
        for field, info in model.model_fields.items():
            assert f"`{section}.{field}`" in text
            assert info.description, f"{section}.{field} has no description"


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("train.max_grad_norm", "float > 0 \\| null"),
        ("train.warmup_ratio", "0 ≤ float < 1"),
        ("train.micro_batch_size", "int ≥ 1 \\| `auto`"),
        ("data.mix.N.weight", "float > 0 \\| null"),
        ("data.max_length", "int ≥ 8"),
        ("adapter.alpha", "float > 0"),
        ("model.trust_remote_code", "bool"),
    ],
)
def test_the_reference_says_which_numbers_a_field_takes(field: str, kind: str) -> None:
    (row,) = [line for line in reference_markdown().splitlines() if line.startswith(f"| `{field}` |")]
    assert row.split(" | ")[1] == kind


def test_a_saved_configuration_reads_back_as_itself() -> None:
    config = build_config({**SMALL, "cluster": {"env": {"A": "b"}}}, source="test")
    assert build_config(yaml.safe_load(yaml.safe_dump(config.plain())), source="test") == config


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {"cluster.num_workers": 4, "tracking.log_every": 9, "train.micro_batch_size": 2}, []),
        ({}, {"train.learning_rate": 1.0, "run.seed": 3}, ["run.seed", "train.learning_rate"]),
        # A run from before `auto` read prompts and completions as a chat can continue: its rows are compared.
        ({}, {"data.format": "prompt_completion"}, []),
        ({}, {"data.system": "s"}, ["data.system"]),
        # What was masked goes on without the variable.
        ({"data.source": "/data/***/rows.jsonl"}, {"data.source": "/data/training-data/rows.jsonl"}, []),
        ({"data.source": "/data/***/rows.jsonl"}, {"data.source": "/data/a/others.jsonl"}, ["data.source"]),
    ],
)
def test_only_what_cannot_change_what_is_learned_is_free(
    old: dict[str, Any], new: dict[str, Any], expected: list[str]
) -> None:
    before, after = (load_config(SMALL, changes) for changes in (old, new))
    assert [path for path, _, _ in differences(before, after)] == expected
    for path in ("data.source", "train.global_batch_size", "adapter.rank", "model.name", "train.precision"):
        assert not is_free(path)
    assert all(path.split(".")[0] in sections() for path in FREE)
    assert "cluster.env" in flatten(before.plain())


WAYS: dict[str, Callable[[Path], Config]] = {
    "strings": lambda path: load_config(path, ["train.max_steps=7", "data.mix.1.weight=2", "model.revision=v1"]),
    "mapping": lambda path: load_config(
        path, {"train": {"max_steps": 7}, "data.mix.1.weight": 2, "model": {"revision": "v1"}}
    ),
    "keywords": lambda path: load_config(
        path, {"data.mix.1.weight": 2.0}, train={"max_steps": 7}, model={"revision": "v1"}
    ),
    "a name alone": lambda path: load_config(
        path, {"data.mix.1.weight": 2}, train={"max_steps": 7}, model="m", **{"model.revision": "v1"}
    ),
    "a config": lambda path: load_config(
        load_config(path, model={"revision": "v1"}, train={"max_steps": 7}), ["data.mix.1.weight=2"]
    ),
    "a mapping for a config": lambda path: load_config(
        {**yaml.safe_load(path.read_text()), "train.max_steps": 7}, {"data.mix.1.weight": 2}, model={"revision": "v1"}
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_configuration_is_the_same_however_it_is_said(way: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: m}\ndata: {mix: [{source: a}, {source: b}]}\ntrain: {learning_rate: 1e-3}\n")
    config = WAYS[way](path)
    assert config == build_config(
        {
            "model": {"name": "m", "revision": "v1"},
            "data": {"mix": [{"source": "a"}, {"source": "b", "weight": 2}]},
            "train": {"learning_rate": 1e-3, "max_steps": 7},
        },
        source="test",
    )
    assert config.train.model_fields_set == {"learning_rate", "max_steps"}


def test_a_preset_is_a_config_unless_a_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("smollm2-lora") == build_config(read_preset("smollm2-lora"), source="test")
    (tmp_path / "smollm2-lora").write_text("model: {name: mine}\ndata: {source: d}\n")
    assert load_config("smollm2-lora").model.name == "mine"
    with pytest.raises(ConfigError, match=r"did you mean `llama3-8b-lora`"):
        load_config("llama-8b-lora")


def test_what_a_wrong_file_may_mean_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("question,answer\nWhy: because,yes\n")
    Path("my-run.yaml").touch()
    Path("model").mkdir()
    Path("model/config.json").touch()
    for name, said in (
        ("my-rum.yaml", r"does not exist \(did you mean `my-run.yaml`\?\)"),
        ("smollm2-lor", r"does not exist \(did you mean `smollm2-lora`\?\)"),
        ("other.yaml", "the file does not exist\n"),
        ("model", "the directory of a model, not a config file\n  repair: `finray init my-run.yaml --model model`"),
        (".", "this is a directory, not a config file"),
        ("rows.csv", "this is a file of data, not a config\n  repair: `finray init my-run.yaml --data rows.csv`"),
        (None, r"finray\.yaml: the file does not exist"),
        ([{"prompt": "p", "completion": "c"}], r"a list is not a config\s.*data="),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(name)  # type: ignore[arg-type]
    Path("finray.yaml").write_text("model: {name: m}\ndata: {source: here}\n")
    assert load_config().data.source == "here"


def test_what_is_wrong_in_a_mapping_has_the_path_that_it_has_in_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": "m", "data": "d", "train.": 1, "data.mix.0.weight": 3}, train={"max_stps": 3}, trian={})
    keyword, field = caught.value.problems[:2]
    assert keyword == "`trian` is no option of this function and no section of a config (did you mean `train`?)"
    assert field.startswith("`train.` is not a field:")
    assert any(problem.startswith("train.max_stps: unknown key") for problem in caught.value.problems)


def test_a_number_sign_in_an_override_begins_no_comment() -> None:
    words = ["data.system=Answer # in a word", "data.input_template=#{q}", "data.output_template='{a} #'"]
    config = load_config(None, ["model.name=m", "data.source=d", *words])
    assert (config.data.system, config.data.input_template) == ("Answer # in a word", "#{q}")
    assert config.data.output_template == "{a} #"
    assert load_config(config, ["data.system=null"]).data.system is None


@pytest.mark.parametrize(
    "text",
    [
        *("{answer}", "Answer: {answer}", r"Instruction: {instruction}\n{x}", "{{ messages }}"),
        # YAML would make one line of these, and a comment of the second.
        *("Line one\nLine two\n", "Title\n# Rules\n  Be brief.", "- one\n- two"),
    ],
)
def test_a_template_in_an_override_is_text_as_it_stands(text: str) -> None:
    config = load_config(None, ["model.name=m", "data.source=d", f"model.chat_template={text}", f"data.system={text}"])
    assert (config.model.chat_template, config.data.system) == (text, text)
    # YAML's own ways to write several lines.
    for quoted in ('"one\\ntwo"', "|-\n  one\n  two"):
        assert load_config(None, ["model.name=m", "data.source=d", f"data.system={quoted}"]).data.system == "one\ntwo"
    # A field that takes more than text still takes YAML.
    with pytest.raises(ConfigError, match=r"data.field_mapping"):
        load_config(None, ["model.name=m", "data.source=d", f"data.field_mapping=[{text}"])


def test_an_override_reaches_into_a_list() -> None:
    raw: dict[str, Any] = {"model": {"name": "m"}, "data": {"mix": [{"source": "a"}, {"source": "b"}]}}
    config = build_config(raw, source="test", overrides=["data.mix.1.weight=3"])
    assert [one.weight for one in config.data.mix] == [None, 3]
    assert load_config(config, ["data.mix.0.source=c"]).data.mix[0].source == "c"
    assert raw["data"]["mix"][1] == {"source": "b"}
    for wrong in ("data.mix.2.weight=3", "data.mix.last.weight=3"):
        with pytest.raises(ConfigError, match=r"`data\.mix` is a list of 2"):
            load_config(config, [wrong])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # As older files have it.
        ("train.gradient_checkpointing=true", "full"),
        ("train.gradient_checkpointing=false", "none"),
        ("cluster.use_gpu=false", False),
        ("model.chat_template_arguments={a: true}", {"a": True}),
        ("adapter.target_modules=q_proj,v_proj", ["q_proj", "v_proj"]),
        ("adapter.target_modules= q_proj ,v_proj", ["q_proj", "v_proj"]),
        *((f"adapter.target_modules={text}", text) for text in ("all-linear", r".*\.(q|v)_proj", r".*\.\d{1,2}\..*")),
        # Tokens of a template are no secrets, and what was masked is read again.
        *(
            (f"model.chat_template_arguments={{{name}: {json.dumps(value)}}}", {name: value})
            for name, value in (("eos_token", "<s>"), ("think_token", "<t>"), ("api_key", MASK), ("max_new_tokens", 5))
        ),
    ],
)
def test_a_value_is_what_it_is_meant_as(override: str, expected: object) -> None:
    config = load_config(SMALL, [override]).plain()
    section, _, field = override.partition("=")[0].partition(".")
    assert config[section][field] == expected


def test_problems_of_nested_fields_have_their_whole_path() -> None:
    overrides = ["data.mix=[{source: a, wieght: 1}]", "data.source=null", "evaluation.early_stopping={patence: 1}"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.name=m", "train.profile={steps: [1, x]}", *overrides])
    problems = "\n".join(caught.value.problems)
    assert "data.mix.0.wieght: unknown key (did you mean `weight`?)" in problems
    assert "evaluation.early_stopping.patence: unknown key (did you mean `patience`?)" in problems
    assert "train.profile.steps.1: " in problems


@pytest.mark.parametrize("kind", [FinrayError, ConfigError])
def test_errors_survive_a_trip_through_json(kind: type[FinrayError]) -> None:
    error = kind("what", where="a.b", repair="do")
    again = from_dict(error.to_dict())
    assert type(again) is kind
    assert str(again) == str(error) == "a.b: what\n  repair: do"


@pytest.mark.parametrize(
    "override",
    [
        *("train.learning_rate=true", "train.max_steps=yes", "train.global_batch_size=on", "adapter.rank=true"),
        *("run.seed=true", "cluster.num_workers=true", "train.profile={steps: [true, 5]}", "train.epochs=false"),
    ],
)
def test_a_boolean_is_no_number(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.name=m", "data.source=d", override])
    (problem,) = caught.value.problems
    assert override.partition("=")[0] in problem
    assert "must be a number, got" in problem


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('run.name="run\\n"', "becomes a directory name"),
        ("run.output_dir=https://host/runs", "a URL that can be written to"),
        ("run.output_dir=s3://bucket", "names only a bucket"),
        ("run.local_dir=s3://bucket/runs", "must be a local directory"),
        ('run.output_dir="a\\0b"', "holds U+0000"),
        ("run.output_dir=~nobody-of-that-name/x", "there is no home directory `~nobody-of-that-name`"),
        ("data.source=~nobody-of-that-name/x", "there is no home directory"),
        ('data.source="\\ud800.jsonl"', "holds U+D800"),
        ('data.field_mapping={prompt: "\\ud800"}', "holds U+D800"),
        ("data.max_length=1000000000", "less than or equal to 16777216"),
        ("data.mix=[{source: a, count: 1000000000}]", "less than or equal to 100000000"),
        ("train.max_steps=99999999999999999999", "less than 2147483648"),
        ("cluster.env={A: hf_aaaaaaaaaaaaaaaaaaaaaaaaaa}", "the value of A looks like a secret"),
        ("train.gradient_checkpointing=some", "input should be 'none', 'selective' or 'full'"),
        ("adapter.target_modules='.*(q_proj'", "not a regular expression"),
        # In every checkpoint, which may be published.
        ("model.chat_template_arguments={api_key: abc}", "looks like a secret"),
        ("model.chat_template_arguments={tools_of: {password: 12345678}}", "looks like a secret"),
        ("model.chat_template_arguments={note: hf_abcdefghijklmnopqrst}", "looks like a secret"),
        # Ray counts in ten-thousandths.
        ("cluster.gpus_per_worker=0.00001", "greater than or equal to 0.0001"),
    ],
)
def test_a_value_that_nothing_can_be_made_of_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.name=m", *(["data.source=d"] if "data." not in override else []), override])
    assert said in "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"converter": "my:f"}, None),
        ({"converter": "my:f", "of_entry": {"format": "auto"}}, None),
        ({"converter": "my:f", "of_entry": {"format": "text"}}, "data.mix.1: data.converter replaces format"),
        ({"converter": "my:f", "of_entry": {"field_mapping": {"text": "a"}}}, "data.mix.1: data.converter replaces"),
        ({"of_entry": {**TEMPLATES, "format": "text"}}, "data.mix.1.input_template has no effect with format text"),
        ({"format": "alpaca", "of_entry": TEMPLATES}, "data.mix.1.input_template has no effect with format alpaca"),
        ({"format": "alpaca", "of_entry": {**TEMPLATES, "format": "template"}}, None),
        ({"of_entry": {"format": "template"}}, "data.mix.1.format: template requires"),
        # An entry that has no use for the templates of the others says so.
        ({**TEMPLATES, "of_entry": {"format": "text"}}, None),
        ({**TEMPLATES, "of_entry": {"format": "template"}}, None),
    ],
)
def test_a_setting_of_a_source_in_a_mix_that_would_be_ignored_is_refused(
    data: dict[str, Any], said: str | None
) -> None:
    entry = {"source": "b", **data.pop("of_entry", {})}
    raw = {"model": {"name": "m"}, "data": {"mix": [{"source": "a"}, entry], **data}}
    if said is None:
        build_config(raw, source="test")
        return
    with pytest.raises(ConfigError) as caught:
        build_config(raw, source="test")
    assert said in "\n".join(caught.value.problems)


def test_a_column_called_token_is_no_secret() -> None:
    config = load_config(None, ["model.name=m", "data.source=d", "data.field_mapping={text: token}"])
    plain = {**config.plain()["data"], "field_mapping": {"token": "a", "password": "b"}}
    assert redact({"data": plain})["data"]["field_mapping"] == {"token": "a", "password": "b"}


def test_scores_of_a_class_or_a_model_whose_name_is_that_of_a_secret_are_shown_and_secrets_are_not() -> None:
    """The document of ``finray evaluate --json``."""
    score = {"value": 0.5, "low": 0.25, "high": None, "interval": "Wilson", "share": True}
    models = {"reset-password": {"precision_reset_password": score, "token_f1": score, "perplexity": 2.0}}
    shown = {
        "models": models,
        "without_training_rows": models,
        "confusion": {"reset-password": [[1, 2], [3, 4]]},
        "made_by": {"baselines": {"reset-password": {"weights": {"files": [["model.safetensors", 5, 7]]}}}},
        "predictions": [{"answers": {"reset-password": "a cat"}, "scores": {"reset-password": {"f1_token": 1.0}}}],
    }
    assert redact(shown) == shown
    token = "hf_" + "a" * 30
    for name in ("models", "answers", "scores", "baselines"):
        assert redact({name: {"reset-password": [f"use {token}"]}}) == {name: {"reset-password": ["use ***"]}}
        assert redact({name: {"m": "s3cr3t-value"}}, environ={"MY_TOKEN": "s3cr3t-value"}) == {name: {"m": "***"}}
    # Everywhere else a name masks all that it holds, whatever that is.
    for secret in ("x", 12345678, 0.5, ["x"], {"value": 0.5}, {"models": {"value": "x"}}):
        assert redact({"models": {}, "made_by": {"api_key": secret}}) == {"models": {}, "made_by": {"api_key": "***"}}


def test_a_variable_does_not_mask_the_path_that_it_is_a_word_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "training-data")
    assert redact({"source": "/home/me/training-data/rows.jsonl"}) == {"source": "/home/me/training-data/rows.jsonl"}
    assert redact({"note": "use training-data"}) == {"note": "use ***"}


def test_bf16_weights_are_refused_where_they_could_not_be_rounded() -> None:
    true, full = {"train.precision": "bf16-true"}, {"adapter.method": "none"}
    for changes, said in (
        ({}, "bf16-true is for full fine-tuning"),
        (full | {"parallel.strategy": "deepspeed"}, "but DeepSpeed updates its own fp32 copies"),
        *(
            (full | {"train.optimizer": kind}, f"{kind} does not support")
            for kind in ("adamw_8bit", "adafactor", "muon")
        ),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            load_config(SMALL, true | changes)
        assert "train.precision" in str(caught.value)
    load_config(SMALL, true | full)
