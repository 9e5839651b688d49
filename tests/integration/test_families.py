"""Models of many families train packed under every strategy, and learn what plain Transformers teaches row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.families import STEPS, examine
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.models import attention
from tests.support import runs, tiny
from tests.support.group import run_all

# Those of the gate, and those of make test-nightly.
GATE = ["gemma3", "gpt2"]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma3", "phi3", "gpt2", "bloom", "opt"]
# Of these the text part is trained.
READERS = ["qwen2_vl", "glm4v_moe"]
# What people use most.
DENSE = ("llama", "qwen2", "qwen3", "mistral", "ministral3", "phi3", "gemma3_text", "gemma4_text", "olmo3", "smollm3")
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3")
HYBRIDS = ("qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h", "lfm2")
OF_IMAGES = ("mistral3", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "smolvlm", "llama4")
STRATEGIES = {"ddp": {}, "fsdp": {}, "deepspeed": {"zero_stage": 3, "keep_deepspeed_shards": False}}
# A module with parameters that these have, another family has too: DeepSpeed, which takes longest, gathers those.
LIKE_OTHERS = ("qwen2", "qwen3", "mistral")
RATE = 0.005


def strategies(family: str) -> list[str]:
    return [one for one in STRATEGIES if one != "deepspeed" or family not in LIKE_OTHERS]


def plain_of(family: str, strategy: str, folder: Path) -> runs.Plain:
    """All weights, no clipping and a constant rate, so that the reference is a few lines."""
    constant = {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "max_grad_norm": None}
    changes = {"adapter.method": "none", "train": {"max_steps": 4, "global_batch_size": 3, **constant}}
    changes |= {"parallel": {"strategy": strategy, **STRATEGIES[strategy]}, "checkpoint.every_steps": 100}
    return runs.tiny_run(folder / family, folder / "rows.jsonl", folder, changes)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The runs of all families that are asked for, under all strategies, by two processes."""
    own = (item for item in request.session.items if item.path == request.path)
    params = (item.callspec.params for item in own if isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    families = sorted({each["family"] for each in params if "family" in each})
    folder = tmp_path_factory.mktemp("families")
    # Few enough that they come again: then the loss falls.
    tiny.write_chat_rows(folder, 14)
    for family in families:
        save = tiny.save_reader if family in READERS else tiny.save_model
        save(family, folder / family, tokenizer)
    run_all(
        [
            (plain_of(family, strategy, folder), folder / f"{family}-{strategy}")
            for family in families
            for strategy in strategies(family)
        ],
        world_size=2,
    )
    return folder


@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS, *HYBRIDS, *OF_IMAGES])
def test_what_people_use_most_works_from_plan_to_export(kind: str, tmp_path: Path) -> None:
    """As `make families` writes it for every type: loss, gradients, answers and the export are plain Transformers'."""
    attention.register()
    results = examine(kind, tmp_path)
    assert results.keys() == set(STEPS)
    assert not [result for result in results.values() if result.startswith("no:")], results
    assert results["rows"] == "packed"
    has_experts = kind in (*EXPERTS, "qwen3_next", "nemotron_h", "granitemoehybrid", "llama4")
    assert ("experts" in results["LoRA on"]) == has_experts


def test_a_type_that_computes_something_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention.register()
    monkeypatch.setattr("tools.families._plain_loss", lambda model, items: next(model.parameters()).sum())
    assert examine("llama", tmp_path)["trains"].startswith("no:")


@pytest.mark.nightly
def test_adapters_of_experts_learn_the_same_under_every_strategy(tmp_path: Path, tokenizer: Any) -> None:
    """Of one parameter for all experts, and of shared ones, which PEFT takes for parameters too."""
    tiny.write_chat_rows(tmp_path, 14)
    tiny.save_model("qwen2_moe", tmp_path / "qwen2_moe", tokenizer)
    cases = {
        strategy: runs.changed(plain_of("qwen2_moe", strategy, tmp_path), {"adapter.method": "lora"})
        for strategy in STRATEGIES
    }
    run_all([(plain, tmp_path / strategy) for strategy, plain in cases.items()], world_size=2)
    first = runs.adapter_weights(tmp_path / "ddp" / "checkpoint-000004")
    assert {"experts", "shared_expert"} <= {name for key in first for name in key.split(".")}
    for strategy in cases:
        runs.assert_same_curve(tmp_path / "ddp", tmp_path / strategy)
        other = runs.adapter_weights(tmp_path / strategy / "checkpoint-000004")
        assert runs.relative_difference(first, other) < 1e-4, strategy


def reference(family: str, folder: Path, steps: list[list[int]]) -> list[float]:
    """Loss per target of each step: plain Transformers with its own attention, one row at a time."""
    config = runs.config_of(plain_of(family, "ddp", folder))
    split = PreparedDataset(prepare_here(config)).splits(config.data, seed=config.run.seed).train
    kind = AutoModelForImageTextToText if family in READERS else AutoModelForCausalLM
    model = kind.from_pretrained(folder / family, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for rows in steps:
        optimizer.zero_grad()
        total, targets = torch.zeros(()), 0
        for row in rows:
            ids, mask = split.row(row)
            tokens, learned = torch.tensor(ids).long()[None], torch.tensor(mask).bool()[1:]
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits[learned], tokens[0, 1:][learned], reduction="sum")
            targets += int(learned.sum())
        (total / targets).backward()
        optimizer.step()
        losses.append(total.item() / targets)
    return losses


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in GATE else [pytest.mark.nightly]) for one in (*FAMILIES, *READERS)]
)
def test_a_family_learns_what_its_unpacked_reference_does(folder: Path, family: str) -> None:
    steps = runs.values(folder / f"{family}-ddp", "samples")
    assert max(len(rows) for rows in steps) > 3, "packs must hold several rows"
    expected = reference(family, folder, steps)
    assert expected[-1] < expected[0]
    for strategy in strategies(family):
        run_dir = folder / f"{family}-{strategy}"
        assert runs.values(run_dir, "samples") == steps
        assert runs.values(run_dir, "loss") == pytest.approx(expected, rel=1e-4), strategy
