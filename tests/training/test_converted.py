"""A file of LLaMA-Factory and one of Axolotl, converted and trained: the losses are those of a config written by hand.

Neither of the two is installed here. What their keys mean is in the hand-written configs, from their documentation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import runs, tiny

pytestmark = pytest.mark.nightly

LLAMA_FACTORY = """\
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: mine
cutoff_len: 48
output_dir: {output}/mine
logging_steps: 1
save_steps: 4
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 2.0e-2
lr_scheduler_type: cosine
warmup_steps: 2
max_steps: 6
seed: 7
"""
AXOLOTL = """\
base_model: {model}
datasets:
  - path: {rows}
    type: chat_template
    ds_type: json
sequence_len: 96
sample_packing: true
adapter: lora
lora_r: 4
lora_alpha: 16
lora_dropout: 0.0
lora_target_linear: true
micro_batch_size: 1
gradient_accumulation_steps: 3
max_steps: 6
optimizer: adamw_torch
lr_scheduler: linear
learning_rate: 0.02
warmup_steps: 1
weight_decay: 0.1
max_grad_norm: 0.5
seed: 7
bf16: false
output_dir: {output}/mine
"""
DATASETS = {"mine": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}}
DATASETS["mine"]["tags"] = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
DATASETS["mine"]["tags"] |= {"assistant_tag": "assistant", "system_tag": "system"}
# alpha is twice the rank there, weight decay 0 and the largest norm 1 unless the file says otherwise.
AS_LLAMA_FACTORY = {
    "run.seed": 7,
    "adapter": {"method": "lora", "rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
    "data": {"max_length": 48, "packing": False},
    "train": {"micro_batch_size": 2, "global_batch_size": 4, "max_steps": 6, "learning_rate": 0.02},
    "train.schedule": "cosine",
    "train.warmup_steps": 2,
    "train.weight_decay": 0.0,
    "train.max_grad_norm": 1.0,
}
AS_AXOLOTL = {
    "run.seed": 7,
    "adapter": {"method": "lora", "rank": 4, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"},
    "data": {"max_length": 96, "on_too_long": "drop", "packing": True},
    "train": {"micro_batch_size": 1, "global_batch_size": 3, "max_steps": 6, "learning_rate": 0.02},
    "train.schedule": "linear",
    "train.warmup_steps": 1,
    "train.weight_decay": 0.1,
    "train.max_grad_norm": 0.5,
}


@pytest.mark.parametrize(("text", "by_hand"), [(LLAMA_FACTORY, AS_LLAMA_FACTORY), (AXOLOTL, AS_AXOLOTL)])
def test_a_converted_file_learns_what_the_same_config_by_hand_does(
    text: str, by_hand: dict[str, Any], tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = tiny.write_chat_rows(tmp_path, 24).rename(tmp_path / "rows.jsonl")
    (tmp_path / "dataset_info.json").write_text(json.dumps(DATASETS))
    foreign = tmp_path / "theirs.yaml"
    foreign.write_text(text.format(model=tiny_model_dir, rows=rows, output=tmp_path / "out"))
    table = ("--dataset-info", tmp_path / "dataset_info.json") if text is LLAMA_FACTORY else ()
    code, out, err = runs.finray("convert", foreign, "--output", tmp_path / "ours.yaml", "--workers", 1, *table)
    assert code == 0, out + err
    converted = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    # What each system leaves to its own defaults is no part of what is learned.
    shown = {"tracking": {"tensorboard": False, "log_every": 1}, "evaluation.on_start": False}
    runs.run_alone(runs.changed(converted, shown, {"train.precision": "fp32"}), tmp_path / "converted")
    plain = runs.tiny_run(tiny_model_dir, rows, tmp_path / "out", by_hand)
    runs.run_alone(plain, tmp_path / "by-hand")
    losses = runs.values(tmp_path / "converted", "loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    for key in ("loss", "grad_norm", "lr", "supervised"):
        assert runs.values(tmp_path / "converted", key) == runs.values(tmp_path / "by-hand", key), key
    # The negative control: another rate is another curve.
    runs.run_alone(runs.changed(plain, {"train.learning_rate": 0.019}), tmp_path / "other")
    assert runs.values(tmp_path / "other", "loss") != losses
