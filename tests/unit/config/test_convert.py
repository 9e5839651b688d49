"""`finray convert`: files as users of LLaMA-Factory and Axolotl write them, and what becomes of each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finray.config.convert import convert
from finray.config.load import load_config
from finray.errors import ConfigError
from tests.support import runs, tiny

pytestmark = pytest.mark.long

# Written for these tests, in the form of both projects' documentation.
LLAMA_FACTORY = """\
### model
model_name_or_path: org/model
trust_remote_code: true
quantization_bit: 4

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
loraplus_lr_ratio: 16.0
use_dora: true

### dataset
dataset: mine,theirs
template: llama3
cutoff_len: 4096
max_samples: 1000
preprocessing_num_workers: 16

### output
output_dir: saves/model/lora/sft
logging_steps: 10
save_steps: 250
overwrite_output_dir: true
report_to: none
resume_from_checkpoint: null

### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1e-4
lr_scheduler_type: cosine
bf16: true
ray_num_workers: 4
shpeed: ludicrous

### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 125
"""
AXOLOTL = """\
base_model: org/model
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: org/rows
    type: chat_template
    split: train[:20%]
    field_messages: talk
    message_property_mappings: {role: from, content: value}
val_set_size: 0.05
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
wandb_project:
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
special_tokens: {pad_token: "<|end|>"}
"""


def converted(text: str, folder: Path, **options: Any) -> Any:
    path = folder / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    return convert(path, **options)


def fields(text: str, folder: Path, **options: Any) -> dict[str, Any]:
    """The fields of what a file comes to, by their paths; it is a config."""
    found = converted(text, folder, **options)
    load_config(found.plain)
    return {f"{section}.{name}": value for section, own in found.plain.items() for name, value in own.items()}


def test_a_file_of_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = {
        "mine": {"file_name": "mine.json"},
        "theirs": {
            "hf_hub_url": "org/theirs",
            "formatting": "sharegpt",
            "columns": {"messages": "talk"},
            "tags": {"role_tag": "role", "content_tag": "content"},
        },
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    found = fields(LLAMA_FACTORY, tmp_path)
    mine = {"source": f"{tmp_path}/data/mine.json", "split": "train[:1000]", "format": "alpaca"}
    theirs = {"source": "org/theirs", "split": "train[:1000]", "format": "messages"}
    assert found == {
        "run.output_dir": "saves/model/lora",
        "run.name": "sft",
        "model.name": "org/model",
        "model.quantization": "4bit",
        "adapter.method": "dora",
        "adapter.rank": 8,
        "adapter.alpha": 16,
        "adapter.dropout": 0.0,
        "adapter.target_modules": ["q_proj", "v_proj"],
        "adapter.lora_plus_ratio": 16.0,
        "data.mix": [mine, theirs | {"field_mapping": {"messages": "talk"}}],
        "data.max_length": 4096,
        "data.packing": False,
        "data.eval_ratio": 0.1,
        "train.micro_batch_size": 2,
        # 2 rows on each of 4 GPUs, 8 times.
        "train.global_batch_size": 64,
        "train.epochs": 3.0,
        "train.learning_rate": 1e-4,
        "train.schedule": "cosine",
        "train.warmup_ratio": 0.0,
        "train.precision": "bf16",
        "train.gradient_checkpointing": "full",
        # DDP, or FSDP if an Accelerate config was given as well.
        "parallel.strategy": "auto",
        "checkpoint.every_steps": 250,
        "evaluation.every_steps": 125,
        "evaluation.batch_size": 1,
        "tracking.log_every": 10,
        "cluster.num_workers": 4,
    }


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    assert fields(AXOLOTL, tmp_path, workers=2) == {
        "run.output_dir": "outputs",
        "run.name": "qlora-out",
        "model.name": "org/model",
        "model.quantization": "4bit",
        "adapter.method": "lora",
        "adapter.rank": 32,
        "adapter.alpha": 16,
        "adapter.dropout": 0.0,
        "adapter.target_modules": "all-linear",
        "data.source": "org/rows",
        "data.train_split": "train[:20%]",
        "data.format": "sharegpt",
        "data.field_mapping": {"conversations": "talk"},
        "data.max_length": 2048,
        "data.on_too_long": "drop",
        "data.packing": True,
        "data.eval_ratio": 0.05,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 16,
        "train.epochs": 4,
        "train.learning_rate": 2e-4,
        "train.schedule": "cosine",
        "train.warmup_ratio": 0.1,
        "train.optimizer": "adamw_8bit",
        "train.precision": "auto",
        "train.gradient_checkpointing": "full",
        "parallel.strategy": "deepspeed",
        "parallel.zero_stage": 3,
        "parallel.cpu_offload": True,
        "checkpoint.every_epochs": 1.0,
        "checkpoint.keep_last": 4,
        "evaluation.every_epochs": 0.25,
        "tracking.log_every": 1,
        "cluster.num_workers": 2,
    }


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL])
def test_every_line_is_carried_over_or_named_with_its_number(text: str, tmp_path: Path) -> None:
    found = converted(text, tmp_path)
    lines = text.splitlines()
    for one in found.lost:
        assert lines[one.line - 1].startswith(one.key.partition(":")[0].partition(".")[0])
    lost = {one.key.partition(":")[0] for one in found.lost}
    assert found.unknown == (["shpeed"] if "shpeed" in text else [])
    assert lost == (
        {"trust_remote_code", "template", "overwrite_output_dir", "shpeed"}
        if "shpeed" in text
        else {"gradient_checkpointing_kwargs", "special_tokens.pad_token"}
    )
    # As comments, and the rest of the file is the config.
    assert yaml.safe_load(found.text("theirs.yaml")) == found.plain
    assert all(f"#   {one}\n" in found.text("theirs.yaml") for one in found.lost)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stage": "pt"}, {"data.train_on": "all", "data.packing": True}),
        ({"finetuning_type": "full", "pure_bf16": True}, {"adapter.method": "none", "train.precision": "bf16-true"}),
        ({"bf16": False}, {"train.precision": "fp32"}),
        ({"bf16": False, "fp16": True}, {"train.precision": "fp16"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, {"train.schedule": "constant"}),
        ({"pissa_init": True, "use_dora": False}, {"adapter.method": "pissa"}),
        ({"lora_target": "all"}, {"adapter.target_modules": "all-linear"}),
        ({"max_steps": 30}, {"train.max_steps": 30}),
        ({"optim": "paged_adamw_8bit"}, {"train.optimizer": "paged_adamw_8bit"}),
        ({"deepspeed": "examples/deepspeed/ds_z2_config.json"}, {"parallel.zero_stage": 2}),
        ({"disable_gradient_checkpointing": True}, {"train.gradient_checkpointing": "none"}),
        ({"report_to": ["wandb", "tensorboard"]}, {"tracking.trackers": ["wandb"], "tracking.tensorboard": True}),
        ({"report_to": "swanlab"}, {}),
        ({"save_strategy": "epoch"}, {"checkpoint.every_epochs": 1.0}),
        ({"early_stopping_patience": 3}, {"evaluation.early_stopping": {"patience": 3}}),
        # A number of rows, as Transformers' trainer takes 0 and null for no clipping.
        ({"val_size": 500}, {"data.eval_ratio": 500}),
        ({"max_grad_norm": 0}, {"train.max_grad_norm": None}),
        ({"adapter_name_or_path": "saves/a"}, {"adapter.start_from": "saves/a"}),
        ({"create_new_adapter": True}, {"adapter.start_from": None}),
        ({"warmup_steps": 0.1}, {"train.warmup_ratio": 0.1}),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, {"parallel.strategy": "fsdp", "parallel.shard_size": 2}),
        # A schedule without warm-up, whatever the file says of it; the one with warm-up is another.
        ({"lr_scheduler_type": "constant"}, {"train.schedule": "constant", "train.warmup_steps": 0}),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, {"train.min_learning_rate": 1e-5}),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-6}}, {"train.min_learning_rate": 1e-6}),
        # YAML 1.1 takes these for texts.
        ({"lr_scheduler_kwargs": {"min_lr": "1e-6"}}, {"train.min_learning_rate": 1e-6}),
        ({"stage": "pt", "packing": False}, {"data.packing": False}),
        ({"additional_target": "embed_tokens,lm_head"}, {"adapter.modules_to_save": ["embed_tokens", "lm_head"]}),
        ({"new_special_tokens": "<a>,<b>"}, {"model.new_tokens": ["<a>", "<b>"]}),
        ({"enable_thinking": False}, {"model.chat_template_arguments": {"enable_thinking": False}}),
        ({"save_steps": 0.25}, {"checkpoint.every_epochs": 0.75}),
        ({"save_steps": 0.25, "max_steps": 30}, {"checkpoint.every_steps": 8}),
        ({"eval_steps": None}, {"evaluation.every_steps": 10}),
        ({"eval_strategy": "no"}, {"evaluation.every_steps": None}),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"parallel.zero_stage": 3, "parallel.cpu_offload": None}),
        ({"deepspeed": "ds_z0_config.json"}, {"parallel.strategy": None}),
        ({"fsdp": "full_shard auto_wrap offload"}, {"parallel.strategy": "fsdp", "parallel.cpu_offload": True}),
        ({"fsdp": "shard_grad_op"}, {"parallel.reshard_after_forward": False}),
        # Four GPUs of which two share their rows: half as many rows as four.
        ({"context_parallel_size": 2}, {"train.global_batch_size": 32}),
        ({"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}, {"train.global_batch_size": 64}),
        ({"finetuning_type": "full", "pure_bf16": True, "optim": "adamw_8bit"}, {"train.precision": "bf16"}),
        ({"val_size": 1}, {}),
        ({"pref_beta": 0.1, "ref_model": "org/model"}, {}),
        ({"loraplus_lr_embedding": 1e-6}, {}),
        ({"deepspeed": "mine.json"}, {}),
        ({"eval_strategy": None, "eval_steps": 10}, {}),
        ({"optim": "sgd"}, {}),
        ({"quantization_bit": 3}, {}),
        ({"lr_scheduler_kwargs": {"min_lr_rate": "low"}}, {}),
    ],
)
def test_what_a_setting_comes_to(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump(yaml.safe_load(LLAMA_FACTORY) | changes)
    if "pure_bf16" in changes:
        text = yaml.safe_dump(yaml.safe_load(text) | {"quantization_bit": None})
    found = fields(text, tmp_path)
    assert {name: found.get(name) for name in expected} == expected
    if not expected:
        lost = {one.key.partition(":")[0].partition(".")[0] for one in converted(text, tmp_path).lost}
        assert {name for name, value in changes.items() if value is not None} <= lost


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "alpaca"}, {"data.format": "alpaca"}),
        ({"type": "completion", "field": "body"}, {"data.train_on": "all", "data.field_mapping": {"text": "body"}}),
        (
            {"type": {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction}"}},
            {"data.input_template": "Q: {q}", "data.output_template": "{a}"},
        ),
        (
            {
                "type": {
                    "field_instruction": "input",
                    "field_input": "instruction",
                    "format": "Q {instruction} C {input}",
                }
            },
            {"data.input_template": "Q {input} C {instruction}", "data.output_template": "{output}"},
        ),
        ({"name": "main", "data_files": ["a.jsonl"]}, {"data.subset": "main"}),
        # Files of a dataset on the Hub, and files that a builder reads.
        ({"type": "alpaca", "data_files": "a.jsonl"}, {"data.source": "hf://datasets/org/rows/a.jsonl"}),
        (
            {"type": "alpaca", "data_files": ["a.jsonl"], "revision": "v1"},
            {"data.source": "hf://datasets/org/rows@v1/a.jsonl", "data.revision": None},
        ),
        ({"path": "json", "data_files": "a.jsonl", "type": "alpaca"}, {"data.source": "a.jsonl"}),
        (
            {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "alpaca"},
            {"data.mix": [{"source": "a.jsonl", "format": "alpaca"}, {"source": "b.jsonl", "format": "alpaca"}]},
        ),
        ({"type": "alpaca:chat"}, {"data.format": "alpaca", "data.on_too_long": "drop"}),
        # Plain text is cut into pieces by both.
        ({"type": "completion"}, {"data.on_too_long": None}),
        # The column of messages is `messages`, also where their fields are those of ShareGPT.
        (
            {"type": "chat_template", "message_field_role": "from", "message_field_content": "value"},
            {"data.format": "sharegpt", "data.field_mapping": {"conversations": "messages"}},
        ),
        ({"type": "chat_template", "field_tools": "functions"}, {"data.field_mapping": {"tools": "functions"}}),
    ],
)
def test_what_a_source_of_axolotl_comes_to(source: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump(yaml.safe_load(AXOLOTL) | {"datasets": [{"path": "org/rows", **source}]})
    found = fields(text, tmp_path)
    assert {name: found.get(name) for name in expected} == expected


def test_what_a_prompt_of_axolotls_own_says_to_the_system_is_listed(tmp_path: Path) -> None:
    kind = {"field_instruction": "q", "system_prompt": "Be brief.", "field_system": "s", "system_format": "{system}"}
    text = yaml.safe_dump(yaml.safe_load(AXOLOTL) | {"datasets": [{"path": "org/rows", "type": kind}]})
    lost = [one.key for one in converted(text, tmp_path).lost]
    assert [one for one in lost if "datasets.type" in one] == [
        'datasets.type.field_system: "s"',
        'datasets.type.system_prompt: "Be brief."',
    ]


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ({"field_thinking": "thinking", "template_thinking_key": "thinking"}, []),
        ({"field_thinking": "thought", "template_thinking_key": "thinking"}, ["datasets.field_thinking"]),
        ({"roles_to_train": ["assistant"], "train_on_eos": "turn", "roles": {"user": ["human", "user"]}}, []),
        ({"roles_to_train": ["user", "assistant"]}, ["datasets.roles_to_train"]),
        ({"train_on_eos": "all"}, ["datasets.train_on_eos"]),
        ({"roles": {"assistant": ["oracle"]}}, ["datasets.roles"]),
        # What is no role at all, and no mapping.
        ({"roles": ["user"]}, ["datasets.roles"]),
        ({"roles": {"user": "human"}}, []),
        # Nothing is learned there but marked messages.
        ({"roles_to_train": []}, ["datasets.roles_to_train"]),
        (
            {"roles_to_train": 5, "message_property_mappings": ["role"]},
            ["datasets.message_property_mappings", "datasets.roles_to_train"],
        ),
        ({"drop_system_message": True}, ["datasets.drop_system_message"]),
        ({"drop_system_message": False, "ds_type": "json"}, []),
        ({"chat_template": "chatml"}, ["datasets.chat_template"]),
        ({"message_property_mappings": {"role": "speaker", "content": "said"}}, ["datasets.message_property_mappings"]),
    ],
)
def test_what_is_lost_of_a_source_of_axolotl(source: dict[str, Any], lost: list[str], tmp_path: Path) -> None:
    text = yaml.safe_dump({"base_model": "m", "datasets": [{"path": "org/rows", "type": "chat_template", **source}]})
    found = converted(text, tmp_path)
    assert [one.key.partition(":")[0] for one in found.lost] == lost


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Without the key it is `auto`, and with an empty one off.
        ({"bf16": None}, {"train.precision": "fp32"}),
        ({"excess_length_strategy": "truncate"}, {"data.on_too_long": "truncate"}),
        ({"excess_length_strategy": "raise"}, {"data.on_too_long": "error"}),
        ({"activation_offloading": "legacy"}, {"train.activation_offload": True}),
        ({"batch_size": 8, "gradient_accumulation_steps": None}, {"train.global_batch_size": 8}),
        ({"evals_per_epoch": 0}, {"evaluation.every_steps": None, "evaluation.every_epochs": None}),
        ({"save_steps": 50, "save_total_limit": 2}, {"checkpoint.every_steps": 50, "checkpoint.keep_last": 2}),
        ({"tokens": ["<a>"]}, {"model.new_tokens": ["<a>"]}),
        ({"mlflow_tracking_uri": "http://host"}, {"tracking.trackers": ["mlflow"]}),
        ({"chat_template": "tokenizer_default"}, {"train.schedule": "cosine"}),
        (
            {"deepspeed": None, "gradient_checkpointing": None, "fsdp_config": {"activation_checkpointing": True}},
            {"parallel.strategy": "fsdp", "train.gradient_checkpointing": "full"},
        ),
        (
            {"deepspeed": None, "fsdp": ["full_shard"], "fsdp_config": {"fsdp_offload_params": True}},
            {"parallel.cpu_offload": True},
        ),
        # As many GPUs as the sizes multiply to, of which two share their rows.
        (
            {"deepspeed": None, "dp_shard_size": 4, "tensor_parallel_size": 2},
            {"cluster.num_workers": 8, "train.global_batch_size": 32, "parallel.strategy": "fsdp"},
        ),
        ({"plugins": ["axolotl.integrations.other.Plugin", "axolotl.integrations.liger.LigerPlugin"]}, {}),
        (
            {"chat_template": "jinja", "chat_template_jinja": "{{ messages }}"},
            {"model.chat_template": "{{ messages }}"},
        ),
        ({"special_tokens": {"additional_special_tokens": ["<a>"]}}, {"model.new_tokens": ["<a>"]}),
        ({"val_set_size": 200.0}, {"data.eval_ratio": 200}),
        ({"tensor_parallel_size": 2}, {}),
    ],
)
def test_what_a_setting_of_axolotl_comes_to(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump(yaml.safe_load(AXOLOTL) | changes)
    found = fields(text, tmp_path)
    assert {name: found.get(name) for name in expected} == expected
    lost = {one.key.partition(":")[0] for one in converted(text, tmp_path).lost}
    assert (set(changes) <= lost) == (not expected)


def test_what_axolotl_assumes(tmp_path: Path) -> None:
    found = fields("base_model: m\ndatasets: [{path: org/rows, type: alpaca}]\n", tmp_path)
    assert found["train.precision"] == "auto"
    assert (found["checkpoint.every_epochs"], found["checkpoint.keep_last"]) == (1.0, 4)
    assert (found["data.on_too_long"], found["tracking.log_every"]) == ("drop", 10)


def test_that_all_weights_are_in_bf16_there_is_said_of_a_full_fine_tuning(tmp_path: Path) -> None:
    plain = {"base_model": "m", "datasets": [{"path": "org/rows", "type": "alpaca"}]}
    for changes, expected in (
        *(({}, True), ({"bf16": True}, True), ({"bf16": False}, False), ({"adapter": "lora"}, False)),
        ({"bf16": False, "fp16": True}, False),
    ):
        notes = converted(yaml.safe_dump(plain | changes), tmp_path).notes
        assert any("train.precision: bf16-true is as there" in note for note in notes) is expected
    assert not any("bf16-true" in note for note in converted(LLAMA_FACTORY, tmp_path).notes)


def test_a_text_among_conversations_does_not_change_what_is_learned_of_them(tmp_path: Path) -> None:
    sources = [{"path": "org/text", "type": "completion"}, {"path": "org/talk", "type": "chat_template"}]
    found = fields(yaml.safe_dump({"base_model": "m", "datasets": sources}), tmp_path)
    assert "data.train_on" not in found
    assert "data.train_on" in fields(yaml.safe_dump({"base_model": "m", "datasets": [sources[0]] * 2}), tmp_path)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"hf_hub_url": "org/a", "split": "test"}, {"source": "org/a", "split": "test[:1000]", "format": "alpaca"}),
        ({"hf_hub_url": "org/a", "folder": "en"}, {"source": "org/a:en"}),
        ({"file_name": "a.json", "formatting": "openai"}, {"format": "messages"}),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "functions"}},
            {"format": "sharegpt", "field_mapping": {"conversations": "talk", "tools": "functions"}},
        ),
        ({"file_name": "a.json", "columns": {"history": "before"}}, {"field_mapping": {"history": "before"}}),
    ],
)
def test_what_a_dataset_of_llama_factory_comes_to(
    about: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": about, "theirs": {"file_name": "b.json"}}))
    found = fields(LLAMA_FACTORY, tmp_path, dataset_info=tmp_path / "dataset_info.json")["data.mix"][0]
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "content",
    [
        b'["alpaca"]',
        b'{"mine": null}',
        b'{"mine": []}',
        b'{"mine": {"columns": [1]}}',
        b'{"mine": {"tags": {"role_tag": 5}}}',
        b'{"mine": {"file_name": 5}}',
        b'{"mine": ',
        b"\xff",
        b"",
    ],
)
def test_a_table_of_datasets_that_is_none_is_one_message(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        fields(LLAMA_FACTORY, tmp_path, dataset_info=tmp_path / "dataset_info.json")
    assert caught.value.where == str(tmp_path / "dataset_info.json")
    assert "dataset_info.json" in str(caught.value.repair)


def test_where_the_datasets_of_llama_factory_are(tmp_path: Path) -> None:
    changed = yaml.safe_load(LLAMA_FACTORY) | {"dataset": "org/rows", "max_samples": None, "dataset_dir": "ONLINE"}
    assert fields(yaml.safe_dump(changed), tmp_path)["data.source"] == "org/rows"
    changed |= {"dataset": "mine", "dataset_dir": "REMOTE:org/all"}
    assert fields(yaml.safe_dump(changed), tmp_path)["data.source"] == "hf://datasets/org/all/mine.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\nmodel_class: llm\ntrain_dataset: d.yaml\n", "LLaMA-Factory v1"),
        ("model_name_or_path: m\ndo_predict: true\neval_dataset: d\n", "finray evaluate"),
        (LLAMA_FACTORY + "max_steps: ten\n", "`max_steps: 'ten'` is not a number"),
        (LLAMA_FACTORY.replace("stage: sft", "stage: ppo"), "line 7: `stage: ppo` is not supported"),
        (LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: freeze"), "line 9: `finetuning_type: freeze"),
        (AXOLOTL + "rl: grpo\n", "line 35: `rl: grpo` is not supported"),
        ("model: {name: m}\ndata: {source: d}\n", "already a finray config"),
        (LLAMA_FACTORY + "adapter_name_or_path: a,b\n", "line 44: the adapters before the last are merged"),
        (LLAMA_FACTORY + "adapter_name_or_path: a\ncreate_new_adapter: true\n", "line 45: the adapter is merged"),
        (AXOLOTL + "rl: [dpo]\n", "line 35: `rl: ['dpo']` is not supported"),
        (AXOLOTL + "kd_trainer: true\n", "finray has no distillation yet"),
        ("lora_rank: 8\n", "names no model"),
        ("model_name_or_path: m\nexport_dir: out\n", "finray export"),
        ("model_name_or_path: m\n", "names no data"),
        ("base_model: [", "not valid YAML"),
    ],
)
def test_what_cannot_be_converted_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(text, tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL])
def test_the_command_writes_a_config_that_plans(text: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = tiny.write_chat_rows(tmp_path, 40)
    plain = yaml.safe_load(text)
    sign = "model_name_or_path" if "model_name_or_path" in plain else "base_model"
    plain |= {sign: str(tiny_model_dir), "load_in_4bit": False, "adapter": "lora", "quantization_bit": None}
    plain |= {"deepspeed": None, "output_dir": str(tmp_path / "out" / "mine"), "max_samples": None}
    plain |= {"dataset": "mine"} if sign == "model_name_or_path" else {"datasets": [{"path": str(rows)}]}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": rows.name, "formatting": "alpaca"}}))
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(plain))
    words = ("convert", tmp_path / "theirs.yaml", "-o", tmp_path / "mine.yaml")
    code, out, err = runs.finray(*words, "--dataset-info", tmp_path / "dataset_info.json", "--workers", "2")
    assert code == 0, err
    assert "not carried over" in out
    changes = ["data.format=auto", "cluster.num_workers=1", "train.optimizer=adamw", "train.precision=fp32"]
    code, out, err = runs.finray("plan", tmp_path / "mine.yaml", *changes, "data.max_length=128")
    assert code == 0, out + err
    code, _, err = runs.finray(*words)
    assert code == 2
    assert "already exists" in err
