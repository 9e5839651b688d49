"""Each row of the guide for users of other systems names something that is there, and takes what the row says.

Commands are parsed; the configs that they train are planned. Fields exist and take the values beside them, files are
there. tests/journeys/test_docs_commands.py runs the shell blocks, test_seeds_jobs.py beside it the whole jobs.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig
from tools.docs_checks.test_commands import understand
from transformers import TrainingArguments

from finray.config.load import load_config, preset_names
from finray.config.reference import reference_markdown
from finray.config.schema import Config, sections
from finray.planning import plan as planning
from finray.planning.model import plan_model
from finray.planning.plan import make_plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "coming-from.md").read_text(encoding="utf-8")
RUN = {"model": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "data": {"source": "org/rows"}}
SPAN = re.compile(r"`([^`]+)`")
FIELDS = set(re.findall(r"^\| `([a-z_.]+)` \|", reference_markdown(), re.MULTILINE))
# What each system had: every row of its documents, by a word of it.
HAD = {
    "A self-hosted Ray cluster with LoRA": [
        *(
            "ray start --head",
            "ray start --address",
            "ray status",
            "dashboard",
            "ray stop",
            "NFS",
            "Docker image",
            "image to the nodes",
        ),
        *("generate-jobspec.sh", "training.sh", "tokenizing", "LoRA", "4-bit", "mixed precision", "accumulation"),
        *("checkpoints", "merge", "artifacts", "added and removed", "training.log", "nvidia-smi", "10 Gb/s"),
        "requirements.txt",
    ],
    "Ray Train Parameter-Efficient Fine-Tuning (PEFT) Framework": [
        *("docker", "ray_train_sft.py", "--hf_model_id", "--full_ft", "--lora_rank", "--lora_alpha", "--lora_dropout"),
        *("--lora_target_modules", "--max_steps", "--per_device_train_batch_size", "--per_device_eval_batch_size"),
        *("--gradient_accumulation_steps", "--learning_rate", "--min_learning_rate", "--weight_decay"),
        *("--warmup_ratio", "--max_grad_norm", "--lr_scheduler_type", "--max_seq_length", "--data_dir"),
        *("--results_dir", "--logging_dir", "--logging_steps", "--save_steps", "--eval_steps", "--save_total_limit"),
        *("--max_eval_samples", "--early_stopping_patience", "--early_stopping_threshold", "--seed"),
        *("--dataloader_num_workers", "--remove_unused_columns", "--hfdc_dataset_name", "--hfdc_dataset_config"),
        *("--hfdc_split", "--hfdc_train_split_ratio", "--hfdc_val_test_split_ratio", "--hfdc_input_template"),
        *("--hfdc_output_template", "--hfdc_field_mapping", "--hfdc_num_proc", "converter", "test.jsonl"),
        *(".data_ready", "FlashAttention 2", "FSDP", "early stopping", "max_failures", "TensorBoard", "W&B"),
        *("test_checkpoint.py", "--batch_size", "sampling flags", "vLLM", "predictions.jsonl", "BERTScore"),
        *("convert_checkpoint_to_hf.py", "--no_merge", "ray start --head", "expandable_segments", "out of memory"),
        *("GPUs and batch sizes", "HFDatasetConfig", "dataset_module.py", "results/"),
    ],
    "Tutorial for Ray": [
        *(
            "process.py",
            "parallel_process.py",
            "counter.py",
            "counter_ray.py",
            "config.py",
            "data/rust",
            "plain language modelling",
            "train_llm.py",
            "ray job submit",
            "model_name",
        ),
        *("batch_size", "learning_rate", "num_epochs", "storage_path", "num_workers", "use_gpu", "GPUs per worker"),
        *("a cap on steps", "DistributedSampler", "checkpoint", "next epoch", "dashboard", "script", "LoRA"),
        *("uv sync", "ray start --head"),
    ],
    "BERT on SST-2 with LoRA": [
        *("replicas", "resources", "r 8, alpha 16", "accuracy", "64 rows", "DDP", "8-bit", "gradient checkpointing"),
        *("trainable parameters", "rank 0 uploads", "RESULT_MODEL_ID", "HF_TOKEN", "RUN_NAME", "LOCAL_RANK"),
        *("NODE_RANK", "logs of all processes", "logging_steps", "shared volume", "main.py"),
        *("utils/training_utils.py", "requirements.txt"),
    ],
    "Ray Train with DeepSpeed ZeRO-3": [
        *(
            "ray_train_llm.py",
            "ds_zero3.json",
            "16-bit weights on save",
            "zero_to_fp32.py",
            "fp16",
            "paged 8-bit AdamW",
        ),
        *("IMDB, 512 tokens, 90/10", "W&B", "wall clock", "mean loss", "time_total_s", "last-checkpoint/", "root"),
        *("going on", "NCCL_P2P_DISABLE", "PYTORCH_CUDA_ALLOC_CONF", "versions", "login", "gradient norm", "rng_state"),
        *("git lfs", "per_device_batch", "epochs", "lr", "ray_results/", "requirements.txt"),
    ],
    "From TRL": [
        *("SFTTrainer", "SFTConfig", "load_dataset", "eval_dataset", "eval_strategy", "messages", "dataset_text_field"),
        *("formatting_func", "max_length", "packing", "padding_free", "assistant_only_loss", "completion_only_loss"),
        *("chat_template_path", "LoraConfig", "use_rslora", "use_dora", "pissa", "load_in_4bit", "save_total_limit"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "use_liger_kernel"),
        *("accelerate launch", "DeepSpeed", "resume_from_checkpoint", "report_to", "EarlyStoppingCallback"),
        *("compute_metrics", "save_model", "merge_and_unload", "push_to_hub"),
    ],
    "From Unsloth": [
        *("FastLanguageModel.from_pretrained", "max_seq_length", "dtype", "load_in_4bit", "load_in_8bit"),
        *("full_finetuning", "get_peft_model", "use_rslora", "loftq_config", "use_gradient_checkpointing"),
        *("random_state", "get_chat_template", "standardize_sharegpt", "apply_chat_template", "for_inference"),
        *("train_on_responses_only", "SFTTrainer", "adamw_8bit", "torchrun", "fast_inference"),
        *("save_pretrained_merged", "save_pretrained_gguf", "push_to_hub_merged"),
    ],
}
# What the script before says in other words than the file after it.
FIELD_OF = {
    "model": "model.name",
    "model_name": "model.name",
    "data_files": "data.source",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
    "optim": "train.optimizer",
    "max_length": "data.max_length",
    "max_seq_length": "data.max_length",
    "packing": "data.packing",
    "save_steps": "checkpoint.every_steps",
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.target_modules",
    "seed": "run.seed",
    "random_state": "run.seed",
}
LITERAL = (ast.Constant, ast.List)
# Fields that SFTConfig has beside those of TrainingArguments.
OF_SFT = {"max_length", "packing", "assistant_only_loss", "dataset_text_field"}


def part(section: str) -> str:
    """A section of the page."""
    text = PAGE[PAGE.index(f"\n## {section}\n") + 4 :]
    return text[: text.find("\n## ")]


def rows(section: str) -> list[tuple[str, str]]:
    """What it had, and what is here, of each row of a section's tables."""
    found = re.findall(r"^\| (.*?) \| (.*) \|$", part(section), re.MULTILINE)
    return [(had, here) for had, here in found if here not in ("the command here", "here", "---")]


def check(here: str, folder: Path) -> None:
    """See that what a row names is there.

    Raises:
        Exception: it is not.
    """
    found = 0
    for span in SPAN.findall(here):
        words = shlex.split(span)
        if span.startswith("finray "):
            understand(span)
            if words[1] == "train" and len(words) > 2:
                plan_of(words[2], tuple(words[3:]), folder)
        elif match := re.fullmatch(r"([a-z]+(?:\.[a-z_]+)+)(?:: (.+))?", span):
            if match[1].split(".")[0] not in sections() or match[1].endswith((".py", ".json")):
                continue
            assert match[1] in FIELDS, f"there is no field {match[1]}"
            if match[2]:
                plan_of("my-run.yaml", (f"{match[1]}={match[2]}",), folder)
        elif re.match(r"(deploy|examples)/", span) or words[0] == "python":
            assert (ROOT / words[words[0] == "python"]).is_file(), span
        elif span.startswith("--"):
            assert span in ("--to", "--dashboard-host"), f"whose option is {span}?"
            continue
        else:
            continue
        found += 1
    assert found or here.startswith("not needed: "), f"names nothing of finray's: {here}"


PLANNED: dict[tuple[str, ...], Any] = {}


@pytest.fixture(autouse=True)
def each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with its adapter is planned once, with its problems, for all rows that train it in their ways."""

    def plan_once(config: Config, found: Any, **options: Any) -> Any:
        key = (config.model.model_dump_json(), config.adapter.model_dump_json())
        if key not in PLANNED:
            PLANNED[key] = plan_model(config, found, **options)
        return PLANNED[key]

    monkeypatch.setattr(planning, "plan_model", plan_once)


@lru_cache
def plan_of(config: str, overrides: tuple[str, ...], folder: Path) -> None:
    """Plan what a command trains, for GPUs that are not here."""
    base: Any = config if config in preset_names() else ROOT / config if (ROOT / config).is_file() else RUN
    options = [one for one in overrides if not one.startswith("-")]
    if not any("run.output_dir" in one for one in options):
        options.append(f"run.output_dir={folder}")
    made = load_config(base, options)
    # What is on other machines cannot be planned here.
    if made.run.output_dir == str(folder) and made.cluster.address is None:
        plan = make_plan(made, gpu="h100-80gb", environ={}, offline=True)
        assert plan.starts is not False, plan.problems


@pytest.mark.parametrize("section", HAD)
def test_what_a_system_had_is_here(section: str, tmp_path: Path) -> None:
    found = rows(section)
    named = " ".join(had for had, _ in found)
    assert [word for word in HAD[section] if word not in named] == []
    problems = []
    for had, here in found:
        try:
            check(here.replace("`config.yaml`", "the old file").replace("DIR", "org/rows"), tmp_path)
        except Exception as error:
            problems.append(f"{had}: {error!r}")
    assert problems == []


@pytest.mark.parametrize("section", ["From TRL", "From Unsloth"])
def test_the_file_after_says_what_the_script_before_did(section: str, tmp_path: Path) -> None:
    script = re.findall(r"^```python\n(.*?)^```", part(section), re.MULTILINE | re.DOTALL)[0]
    after = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", part(section), re.MULTILINE | re.DOTALL)[0])
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    given = {
        (ast.unparse(call.func), str(word.arg)): word.value for call in calls for word in call.keywords if word.arg
    }
    # Every word has a row; Unsloth's users find those of TRL in the section before.
    named = " ".join(had for one in ("From TRL", section) for had, _ in rows(one))
    ours = {(call, word) for call, word in given if call not in ("load_dataset", "tokenizer.apply_chat_template")}
    assert sorted(word for _, word in ours if word not in named) == []
    values = {word: ast.literal_eval(value) for (_, word), value in given.items() if isinstance(value, LITERAL)}
    for word, value in values.items():
        if (field := FIELD_OF.get(word)) is not None:
            section_, name = field.split(".")
            assert after[section_].get(name, 0) == value, word
    assert (
        values["gradient_accumulation_steps"] * values["per_device_train_batch_size"]
        == (after["train"]["global_batch_size"])
    )
    assert f"{after['run'].get('output_dir', 'runs')}/{after['run']['name']}" == values["output_dir"]
    # The words are those of the libraries.
    peft = {word for call, word in given if call in ("LoraConfig", "FastLanguageModel.get_peft_model")}
    assert peft - {field.name for field in dataclasses.fields(LoraConfig)} <= {
        "use_gradient_checkpointing",
        "random_state",
    }
    arguments = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {word for call, word in given if call == "SFTConfig"} <= arguments | OF_SFT
    plan = make_plan(
        load_config(after, [f"run.output_dir={tmp_path}", "data.source=org/rows"]),
        gpu="rtx4090-24gb",
        environ={},
        offline=True,
    )
    assert plan.starts is not False, plan.problems


@pytest.mark.parametrize(
    "here",
    [
        *("`finray trian my-run.yaml`", "`finray evaluate runs/x --batchsize 4`", "`checkpoint.every_epoch: 1`"),
        *("`finray train my-run.yaml train.lr=1`", "`adapter.method: none`, `adapter.rank: many`", "nothing at all"),
        *("`finray train my-run.yaml checkpoint.every_epochs=0`", "`examples/jobs/none.yaml`", "`data.packing: 7`"),
        *("`finray train my-run.yaml cluster.num_workers=none`", "`deploy/none.sh`", "`--to`"),
        "`finray train my-run.yaml parallel.zero_stage=3`",
    ],
)
def test_a_row_of_something_that_is_not_here_is_seen(here: str, tmp_path: Path) -> None:
    """The negative control."""
    with pytest.raises(Exception, match=r".+"):
        check(here, tmp_path)
