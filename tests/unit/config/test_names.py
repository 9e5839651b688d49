"""Settings of TRL, LLaMA-Factory and Axolotl: each mistaken name gets the right hint, and no hint misleads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from finray.config.load import load_config
from finray.config.names import NAMES, OFF, names_markdown
from finray.config.schema import sections
from finray.errors import ConfigError
from tests.unit.config.test_convert import AXOLOTL, LLAMA_FACTORY

ROOT = Path(__file__).parents[3]
NOTHING = "unknown keys without effect, which can be removed"


def problems(**written: object) -> dict[str, str]:
    """What is said of each key."""
    with pytest.raises(ConfigError) as caught:
        load_config({"model": {"name": "m"}, "data": {"source": "d"}, **written})
    return dict(problem.split(": ", 1) for problem in caught.value.problems)


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL], ids=["LLaMA-Factory", "Axolotl"])
def test_every_key_of_another_systems_file_is_told_what_it_is_here(text: str) -> None:
    file = {key: value for key, value in yaml.safe_load(text).items() if key != "shpeed"}
    found = problems(**{key: value for key, value in file.items() if key != "adapter"})
    nothing = found.pop(NOTHING, "").split(", ")
    assert found.keys() | {*nothing} - {""} == file.keys() - {"adapter"}
    for key, said in found.items():
        # A field here, or why none is needed.
        assert re.search(r"`[a-z]+\.[a-z_]+|not needed|needed and missing|it follows", said), f"{key}: {said}"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model_name_or_path", "in finray: `model.name`"),
        ("cutoff_len", "in finray: `data.max_length`"),
        ("gradient_accumulation_steps", "it follows from `train.global_batch_size`"),
        ("train.lr", "in finray: `train.learning_rate`"),
        ("train.bf16", "in finray: `train.precision: bf16`"),
        ("stage", "not needed: finray does supervised fine-tuning"),
        ("train.batch_size", "`train.global_batch_size` is the batch of an optimizer step"),
        ("train.packing", "did you mean `data.packing`?"),
        ("train.betas", "`train.adam_beta1` and `train.adam_beta2`"),
        ("lora", "the section is `adapter`"),
        ("wandb_project", "did you mean `tracking.wandb_project`?"),
        ("datasets", "`data.format` its type"),
    ],
)
def test_a_name_of_another_system_is_explained_in_files_and_in_overrides(key: str, said: str) -> None:
    assert said in problems(**{key: 1})[key]
    if "." not in key:
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_config({"model": "m", "data": "d"}, [f"{key}=1"])


def test_names_that_are_like_nothing_get_no_hint() -> None:
    assert problems(colour=1)["colour"] == "unknown key"
    assert problems(**{"train.moon": 1})["train.moon"] == "unknown key"


def test_a_name_where_a_section_belongs_is_told_its_field(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: m}\ndata: {source: d}\nadapter: lora\n")
    with pytest.raises(ConfigError, match=r"got 'lora' \(did you mean `adapter.method`\?\)"):
        load_config(path)


def test_what_the_table_names_is_there_and_takes_the_value() -> None:
    for name, found in (*NAMES.items(), *OFF.items()):
        for path in re.findall(r"`([a-z_]+\.[a-z_0-9]+)`", found) or re.findall(r"^([a-z]+\.[a-z_0-9]+)", found):
            section, field = path.split(".")
            assert field in sections()[section].model_fields, f"{name}: {found}"
            assert name != field, f"{name} is the name here too"
        if re.fullmatch(r"[a-z]+\.[a-z_0-9]+: \S+", found):
            path, value = found.split(": ")
            load_config({"model": "m", "data": "d"}, [f"{path}={value}"])


def test_the_guide_has_the_table() -> None:
    page = (ROOT / "docs" / "guide" / "coming-from.md").read_text(encoding="utf-8")
    assert names_markdown() in page, "put what finray.config.names.names_markdown() gives into the page"


def test_what_asks_for_nothing_is_one_line_and_what_off_asks_for_is_not() -> None:
    found = problems(
        load_in_8bit=False,
        load_in_4bit=False,
        fp16=False,
        tf32=False,
        wandb_watch=None,
        resume_from_checkpoint=None,
        special_tokens={},
        bf16=False,
        sample_packing=False,
        flash_attention=False,
        assistant_only_loss=False,
        strange=False,
        **{"train.max_stps": None, "train.lr": None},
    )
    asked = "load_in_8bit, load_in_4bit, fp16, tf32, wandb_watch, resume_from_checkpoint, special_tokens, strange"
    assert {*found.pop(NOTHING).split(", ")} == {*asked.split(", "), "train.lr"}
    assert found == {
        "bf16": "unknown key (in finray: `train.precision: fp32`)",
        "sample_packing": "unknown key (in finray: `data.packing: false`)",
        "flash_attention": "unknown key (in finray: `model.attention: packed`)",
        "assistant_only_loss": "unknown key (in finray: `data.train_on: all`)",
        "train.max_stps": "unknown key (did you mean `max_steps`?)",
    }


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("train.optimizer", "adamw_bnb_8bit", "(in finray: `adamw_8bit`)"),
        ("train.optimizer", "adamw_torch", "(in finray: `adamw`)"),
        ("train.schedule", "cosin", "(did you mean `cosine`?)"),
        ("train.schedule", "constant_with_warmup", "(in finray: `constant`)"),
        ("train.precision", "bfloat16", "(in finray: `bf16`)"),
        ("model.quantization", 8, "(in finray: `8bit`)"),
        ("model.attention", "sdpa", "(in finray: `packed`)"),
        ("data.source", ["a", "b"], "(several sources are `data.mix: [{source: ...}, {source: ...}]`)"),
        ("tracking.trackers", "tensorboard", "(write [tensorboard])"),
        ("train.schedule", "xyzzy", ""),
    ],
)
def test_a_value_of_another_system_or_a_misspelt_one_is_told_what_it_is_here(
    path: str, value: object, hint: str
) -> None:
    assert problems(**{path: value})[path].endswith(f", got {value!r} {hint}".rstrip())
