"""The job of each of the five older systems, from examples/jobs, end to end by the `finray` command under Ray: trained
by its own strategy on two workers, then evaluated, asked or exported as that system did.

The models are tiny ones, and the rows have the columns of the real ones. tests/training/test_examples.py compares the
numbers of the files with those in the systems' documents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finray.config.load import load_config
from tests.support import forks, runs, tiny

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
ROWS: dict[str, list[dict[str, Any]]] = {
    "cluster_lora": [{"instruction": f"say {at}", "input": "", "output": f"it is {at}"} for at in range(40)],
    "peft_fsdp": [{"instruction": f"say {at}", "input": "one two", "output": f"it is {at}"} for at in range(40)],
    "rust_tutorial": [{"content": f"fn one_{at}() {{ two three {at} }}"} for at in range(40)],
    "bloomz_zero3": [{"text": f"one two three four {at}", "label": at % 2} for at in range(40)],
    "bert_sst2": [
        {"sentence": f"one two {'three' if at % 2 else 'four'} {at}", "label": "positive" if at % 2 else "negative"}
        for at in range(40)
    ],
}
# On CPUs, with two workers, in few and small steps.
SMALL: dict[str, Any] = {
    "data.subset": None,
    "data.train_split": "train",
    "data.max_length": 64,
    "train.max_steps": 4,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
    "train.precision": "fp32",
    "train.optimizer": "adamw",
    "cluster.use_gpu": False,
    "cluster.cpus_per_worker": 1,
    "evaluation.on_start": False,
    "tracking.log_every": 1,
    "tracking.record_samples": True,
}
# What belongs to the source of a preset, which a source of one's own replaces.
RUST = {"data.format": "text", "data.field_mapping": {"text": "content"}}


def finray(*words: object) -> str:
    """Run a command where the examples are; what it prints.

    Raises:
        AssertionError: it fails.
    """
    code, out, err = forks.finray(*words, cwd=ROOT)
    assert code == 0, out + err
    return out


def train(
    name: str, model: Path, folder: Path, changes: dict[str, Any] | None = None, file: Path | None = None
) -> Path:
    """Train the job of a file of examples/jobs on a stand-in; its run.

    Raises:
        AssertionError: it fails, or not by two workers, or its losses are not those of one process without Ray.
    """
    file = file or ROOT / "examples" / "jobs" / f"{name}.yaml"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    own = {"model.name": str(model), "data.source": str(folder / "rows.jsonl"), "run.output_dir": str(folder / "runs")}
    overrides = [f"{field}={json.dumps(value)}" for field, value in {**SMALL, **own, **(changes or {})}.items()]
    finray("train", file, *overrides)
    config, real = load_config(file, overrides), load_config(file)
    run = folder / "runs" / str(config.run.name)
    assert runs.values(run, "step") == [1, 2, 3, 4]
    assert len(runs.read_workers(run)) == 2
    # What the stand-in has of the real one.
    assert config.parallel.strategy == real.parallel.strategy
    assert config.adapter == real.adapter.model_copy(update={"dropout": config.adapter.dropout})
    assert config.classification == real.classification
    assert config.data.field_mapping == real.data.field_mapping
    assert config.data.input_template == real.data.input_template
    if config.classification.labels is None:
        alone = [*overrides, "parallel.strategy=ddp", "parallel.zero_stage=null", "parallel.deepspeed_config=null"]
        plain = load_config(file, alone).model_dump(mode="json", exclude_unset=True)
        runs.run_alone(plain, folder / "alone")
        runs.assert_same_curve(run, folder / "alone")
    return run


def test_lora_on_a_cluster_is_merged(ray_cluster: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = train("cluster_lora", tiny_model_dir, tmp_path)
    finray("export", run, "--output", tmp_path / "merged", "--dtype", "fp32")
    assert not list((tmp_path / "merged").glob("adapter_*"))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    assert tuned.keys() == before.keys()
    moved = {name for name, weight in tuned.items() if not weight.equal(before[name])}
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= moved


def test_lora_by_fsdp_is_scored_on_test_rows(ray_cluster: str, tokenizer: Any, tmp_path: Path) -> None:
    tiny.save_model("qwen3", tmp_path / "model", tokenizer)
    # Dropout is not the same for one worker and for two.
    shares = {"data.eval_ratio": 0.1, "data.test_ratio": 0.1, "evaluation.every_steps": 2, "adapter.dropout": 0.0}
    run = train("peft_fsdp", tmp_path / "model", tmp_path, {"cluster.num_workers": 2, **shares})
    assert [record["step"] for record in runs.records(run, "eval")] == [2, 4]
    sampling = ("--temperature", 0.7, "--top-p", 0.9, "--max-new-tokens", 8, "--seed", 1)
    finray("evaluate", run, "--split", "test", "--max-rows", 3, "--batch-size", 2, *sampling)
    answers = (run / "evaluation" / "test" / "predictions.jsonl").read_text().splitlines()
    assert len(answers) == 3
    finray("export", run, "--adapter", "--output", tmp_path / "adapter")
    assert runs.adapter_weights(tmp_path / "adapter")


def test_a_code_model_writes_on(ray_cluster: str, tokenizer: Any, tmp_path: Path) -> None:
    tiny.save_model("gpt2", tmp_path / "model", tokenizer)
    run = train("rust_tutorial", tmp_path / "model", tmp_path, {"checkpoint.every_steps": 2, **RUST})
    assert {"checkpoint-000002", "checkpoint-000004"} <= {path.name for path in run.iterdir()}
    said = json.loads(finray("generate", run, "fn main() {", "--raw", "--max-new-tokens", 8, "--json"))
    assert said["answers"]


def test_the_file_with_replicas_is_a_classifier_with_an_accuracy(
    ray_cluster: str, tokenizer: Any, tmp_path: Path
) -> None:
    tiny.save_encoder("bert", tmp_path / "model", tokenizer)
    old = (ROOT / "examples" / "jobs" / "bert_sst2.yaml").read_text()
    assert "\nreplicas: 4 " in old
    (tmp_path / "config.yaml").write_text(old.replace("\nreplicas: 4 ", "\nreplicas: 2 "))
    shares = {"data.eval_split": None, "data.eval_ratio": 0.2, "model.quantization": "none"}
    run = train("bert_sst2", tmp_path / "model", tmp_path, shares, tmp_path / "config.yaml")
    finray("evaluate", run)
    scores = json.loads((run / "evaluation" / "metrics.json").read_text())["models"]["tuned"]
    lines = (run / "evaluation" / "predictions.jsonl").read_text().splitlines()
    right = [line["answers"]["tuned"] == line["reference"] for line in map(json.loads, lines)]
    assert len(right) == 8
    assert scores["accuracy"]["value"] == sum(right) / 8


def test_zero_3_leaves_its_shards_and_a_plain_model(ray_cluster: str, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny.save_model("bloom", tmp_path / "model", tokenizer)
    run = train(
        "bloomz_zero3",
        tmp_path / "model",
        tmp_path,
        {"data.packing": False, "data.train_on": "all", "data.format": "text"},
    )
    # DeepSpeed's own files are there, and do not go into what is handed on.
    assert (run / "checkpoint-000004" / "deepspeed" / "zero_to_fp32.py").is_file()
    assert not (run / "final" / "deepspeed").exists()
    # The figure that the old script printed: the mean over all targets.
    losses, targets = runs.values(run, "loss"), runs.values(run, "supervised")
    mean = sum(loss * count for loss, count in zip(losses, targets, strict=True)) / sum(targets)
    summary = json.loads((run / "summary.json").read_text())["summary"]
    assert summary["mean_loss"] == pytest.approx(mean, rel=1e-6)
    assert summary["train_seconds"] > 0
    finray("evaluate", run, "--max-rows", 2)
    finray("export", run, "--output", tmp_path / "exported", "--dtype", "fp32")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").num_parameters() > 0


def test_every_example_is_trained() -> None:
    assert sorted(path.stem for path in (ROOT / "examples" / "jobs").glob("*.yaml")) == sorted(ROWS)
