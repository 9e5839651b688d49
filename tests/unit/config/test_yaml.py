"""Config files from anybody: every text ends in a configuration or in one message, soon and in little memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finray.config.load import build_config, load_config, parse_yaml, read_yaml
from finray.config.schema import Config
from finray.errors import ConfigError, FinrayError
from tests.support import runs
from tests.support.examples import examples

SMALL: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}}
_FIELDS = st.sampled_from(
    [
        *("model.name", "data.source", "data.mix", "data.max_length", "train.epochs", "train.max_steps", "run.name"),
        *("adapter.rank", "adapter.target_modules", "evaluation", "cluster.env", "train.profile", "train", "preset"),
        *("run.seed", "model.chat_template_arguments", "data.field_mapping", "model.new_tokens", "run.output_dir"),
    ]
)
_SCALARS = st.none() | st.booleans() | st.integers() | st.integers(10**8, 10**40) | st.floats() | st.text(max_size=20)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
# Pieces that mean something to a YAML parser, in any order.
_PIECES = (
    *("&a ", "*a", "[", "]", "{", "}", ": ", "- ", "? ", "\n", "  ", "!!int ", "!!timestamp ", "2024-99-99", "'"),
    *("1_", "|\n", "<<: ", "model", "data", "0x", "1:99", ".inf", "%", "---\n", "\x00", "=", "~"),
)
_YAML = st.lists(st.sampled_from(_PIECES) | st.text(max_size=4)).map("".join)


def _built(plain: dict[str, Any]) -> tuple[Config | None, str]:
    """The configuration, or what is wrong with it."""
    try:
        return build_config(plain, source="x"), ""
    except FinrayError as error:
        return None, str(error)


@settings(max_examples=examples(300))
@given(_YAML)
def test_any_text_is_a_value_or_one_error(text: str) -> None:
    try:
        data, said = parse_yaml(text, name="run.yaml"), ""
    except FinrayError as error:
        data, said = None, str(error)
    if isinstance(data, dict):
        said = _built(data)[1]
    assert len(said) < 30_000


@settings(max_examples=examples(300))
@given(st.dictionaries(_FIELDS, _VALUES, max_size=4))
# A number as a name would be text in the run's own file, and so another configuration when it continues.
@example({"model.chat_template_arguments": {"": {0: None}}})
@example({"parallel.strategy": "deepspeed", "parallel.deepspeed_config": {"optimizer": {0: None}}})
def test_any_values_make_a_configuration_or_one_error(values: dict[str, Any]) -> None:
    plain = runs.changed(SMALL, {name: one for name, one in values.items() if "." in name})
    config, said = _built({**plain, **{name: one for name, one in values.items() if "." not in name}})
    assert len(said) < 30_000
    assert config is None or _built(config.plain()) == (config, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {name: {{ MODEL }}}", "a key must be a name; text with braces needs quotes"),
        ("model:\n  ? [a, b]\n  : 1", "a key must be a name"),
        ("model: " + "[" * 3000, "more than 50 levels"),
        ("model: " + "{a: " * 3000, "more than 50 levels"),
        ("model: &a [*a]", "an alias refers to a value that contains it"),
        ("run: {seed: 2024-99-99}", "month must be in 1..12"),
        ("model: \x00", "special characters are not allowed"),
        ("model: {name: m}\n---\nmodel: {name: n}\n", "expected a single document"),
        (f"run: {{seed: 0x{'f' * 5000}}}", "a number is too large"),
        ("run: {seed: !!int ''}", "not valid YAML"),
        (f"run: {{seed: {'9' * 5000}}}", "4300 digits"),
        ("model:\n\tname: m\n", "cannot start any token"),
    ],
)
def test_yaml_that_is_no_config_is_one_message(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML") as caught:
        load_config(path)
    assert said in caught.value.message
    assert str(path) in str(caught.value.where)
    assert len(str(caught.value)) < 1000
    assert ("spaces instead of tabs" in str(caught.value.repair)) == ("\t" in text)


def test_windows_line_endings_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel:\r\n  name: m\r\ndata:\r\n  source: d\r\n")
    config = load_config(path)
    assert (config.model.name, config.data.source) == ("m", "d")


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_large_file_is_refused_and_never_cut_off(letter: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text(f"# {letter * 999_990}\nrun: {{name: a}}\ntrain: {{seed: 1}}\n")
    with pytest.raises(ConfigError, match="more than 1,000,000 bytes, which is the limit") as caught:
        load_config(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("value", ["$HOME/rows.jsonl", "${HOME}/rows.jsonl", "/data/${USER}/rows.jsonl"])
def test_a_variable_in_a_path_is_an_error_and_no_name_of_a_directory(value: str) -> None:
    for field in ("data.source", "run.output_dir", "prepare.dir"):
        with pytest.raises(ConfigError, match=rf"{field}: environment variables such as .* are not expanded"):
            load_config({"model": {"name": "m"}, "data": {"source": "d"}}, {field: value})
    # A dollar sign alone is a name like any other, and templates have their own use for it.
    assert load_config({"model": {"name": "m"}, "data": {"source": "cost-in-$.csv"}}).data.source == "cost-in-$.csv"


def test_aliases_that_grow_without_end_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [lol]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    merges = ["a0: &a0 {k: v}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30))]
    for text in ("\n".join(lines), "\n".join(merges)):
        started = time.process_time()
        with pytest.raises(ConfigError, match="aliases expand to more than"):
            parse_yaml(text, name="x")
        assert time.process_time() - started < 5
    # A few are what they are for.
    assert parse_yaml("a: &x {k: 1}\nb: {<<: *x}\nc: [*x, *x]", name="x")["b"] == {"k": 1}
    with pytest.raises(ConfigError) as caught:
        build_config({**SMALL, "run": {"name": parse_yaml("\n".join(lines[:4]), name="x")}}, source="x")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "latin-1"])
def test_a_file_in_another_encoding_is_named(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("model: {name: Zoë}".encode(encoding))
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_a_thousand_problems_are_not_a_thousand_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({**SMALL, "train": {f"nope{number}": number for number in range(1000)}}, source="x")
    assert "1000 problems" in caught.value.message
    assert caught.value.problems[-1] == "and 940 more"
