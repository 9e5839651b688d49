"""`finray convert`: settings whose meaning depends on others, and what is lost of them."""

from __future__ import annotations

import datetime
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finray import limits
from finray.config import foreign, names
from finray.config.load import load_config
from finray.config.schema import sections
from finray.errors import ConfigError, FinrayError
from tests.support import runs
from tests.support.examples import examples
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
    hub = {"dataset_dir": "ONLINE", "max_samples": None}
    for changes, expected in (
        ({"eval_dataset": "org/held", **hub}, ("org/held", "train")),
        # As many as those to train on.
        ({"eval_dataset": "held"}, ("data/held.json", "train[:1000]")),
    ):
        found = fields(yaml.safe_dump(yaml.safe_load(LLAMA_FACTORY) | changes | {"val_size": None}), tmp_path)
        assert (found["data.eval_source"], found["data.eval_split"]) == expected


_KNOWN = [
    *(*names.NAMES, *names.OFF, *names.METHODS, *foreign.NOT_OURS, *foreign.SENTENCES, *foreign.ELSEWHERE),
    *(*foreign.NUMBERS, *foreign.ASSUMED[foreign.AXOLOTL], *(f"{start}x" for start in foreign.FAMILIES)),
    *(name for kind in sections().values() for name in kind.model_fields),
    *("adapter", "fsdp_config", "plugins", "output_dir", "save_strategy", "wandb_mode", "a.b", ""),
]
_SOURCE_KEYS = ("path", "type", "roles", "roles_to_train", "data_files", "message_property_mappings", "name", "shards")
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(10**20, 2**500) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["lora", "steps", "epoch", "1e-3", "a,b", "~nobody/x", "\x85a: b", "chat_template", "x" * 5000])
    | st.dates() | st.binary(max_size=4)
)  # fmt: skip
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.none() | st.dates(), inner, max_size=3)
    ),
    max_leaves=6,
)
_SOURCES = st.lists(st.dictionaries(st.sampled_from(_SOURCE_KEYS), _VALUES, max_size=4), max_size=2) | _VALUES
_FILES = st.tuples(
    st.sampled_from([{"model_name_or_path": "m", "dataset": "d"}, {"base_model": "m", "datasets": ["org/rows"]}]),
    st.dictionaries(st.sampled_from(_KNOWN) | st.integers() | st.dates() | st.none(), _VALUES, max_size=6),
    st.none() | _SOURCES,
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=_FILES)
def test_any_file_comes_to_a_config_or_to_one_message(file: tuple[Any, Any, Any], tmp_path: Path) -> None:
    plain, changes, sources = file
    plain = plain | changes | ({"datasets": sources} if sources is not None and "base_model" in plain else {})
    try:
        found = converted(yaml.safe_dump(plain, allow_unicode=True), tmp_path)
    except FinrayError:
        return
    text = found.text("theirs.yaml")
    assert yaml.safe_load(text) == found.plain
    load_config(found.plain)
    for one in found.lost:
        assert one.line or one.key.partition(":")[0] not in plain


def test_a_key_that_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    text = yaml.safe_dump(SMALL) + "5: 6\n~: 1\n2024-01-01: {2024-01-02: [!!set {a}]}\nother: &m {weird: 1}\n<<: *m\n"
    found = converted(text, tmp_path)
    assert [(one.line, one.key) for one in found.lost] == [
        *((5, "5: 6"), (6, "~: 1"), (7, '2024-01-01: {"2024-01-02": [["a"]]}')),
        *((8, "weird: 1"), (8, 'other: {"weird": 1}')),
    ]
    assert found.unknown == ["5", "~", "2024-01-01", "weird", "other"]
    assert datetime.date(2024, 1, 1) not in found.plain


def _pipe(folder: Path, text: str) -> Path:
    """A pipe to which somebody writes; the shell's `<(...)` and `/dev/stdin` are such."""
    os.mkfifo(folder / "pipe")
    threading.Thread(target=lambda: (folder / "pipe").write_text(text), daemon=True).start()
    return folder / "pipe"


def test_a_file_is_read_once_so_it_may_be_a_pipe(tmp_path: Path) -> None:
    code, out, err = runs.finray("convert", _pipe(tmp_path, LLAMA_FACTORY))
    assert (code, err) == (0, "")
    assert yaml.safe_load(out) == converted(LLAMA_FACTORY, tmp_path).plain


def test_a_pipe_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PIPE_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    for command in ("convert", "plan"):
        code, _, err = runs.finray(command, tmp_path / "pipe")
        assert (code, "nothing was written to it for 0.1 seconds" in err) == (2, True), err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the config names no model"),
        (b"# nothing\n", "the config names no model"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"base_model: m\ndatasets:\n\t- path: d\n", "spaces instead of tabs"),
        (b"base_model: m\nseed: 1\nseed: 2\n", "duplicate key `seed`"),
        (b"- base_model: m\n", "must consist of sections"),
        (b'base_model: m\nwandb_name: "\\ud800"\n', "holds U+D800"),
        (None, "is a directory"),
    ],
)
def test_a_file_that_is_no_config_is_one_message(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.mkdir() if content is None else file.write_bytes(content)
    code, _, err = runs.finray("convert", file)
    assert (code, said in err) == (2, True), err


def test_reasons_tell_what_is_missing_from_what_is_not_needed(tmp_path: Path) -> None:
    text = yaml.safe_dump(SMALL | {"dpo_beta": 0.1, "trl": {"beta": 0.1}, "rl": None})
    assert {why.partition(":")[0] for why in lost(text, tmp_path).values()} == {
        "needed and missing",
        "write `train.objective",
    }
    found = lost(yaml.safe_dump(SMALL | {"special_tokens": {"pad_token": "<p>", "eos_token": "<e>"}}), tmp_path)
    assert {key: why.split(":")[0] for key, why in found.items()} == {
        "special_tokens.pad_token": "not needed",
        "special_tokens.eos_token": "not supported",
    }
    (misspelt,) = converted(yaml.safe_dump(SMALL) + "sequenc_len: 8\n", tmp_path).lost
    assert "line 5, `sequenc_len: 8`" in str(misspelt)
    assert "did you mean `sequence_len`?" in str(misspelt)
