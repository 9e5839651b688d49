"""Base against tuned model on held-out rows: the rows of the run, and losses by the model's own forward pass."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.tasks import CAUSAL_LM
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.sampling.splits import sample
from finray.errors import ConfigError, DataError
from finray.tasks.causal_lm import CausalLM
from finray.tracking.jsonl import read_records
from tests.support import runs, tiny
from tests.support.evaluated import evaluate

ROWS = 20


def trained(model: Path, output: Path, **sections: dict[str, Any]) -> Path:
    """A run of one step that holds some rows out."""
    rows = tiny.write_chat_rows(output, ROWS)
    changed = {
        "data": {"source": str(rows), "max_length": 64, "eval_ratio": 0.2},
        "train": {"max_steps": 1, "global_batch_size": 1, "precision": "fp32"},
        "evaluation": {"max_new_tokens": 2},
        **sections,
    }
    plain = runs.tiny_run(model, rows, output, changed)
    run = RunDir.of(runs.config_of(plain))
    runs.run_alone(plain, run.path)
    run.keep_config(runs.config_of(plain))
    return run.path


def evaluation_loss(run_dir: Path) -> float:
    """Of the last evaluation in the training."""
    records = read_records(run_dir / "metrics.jsonl")
    return float([record for record in records if record["kind"] == "eval"][-1]["eval_loss"])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    return trained(tiny_model_dir, tmp_path_factory.mktemp("run"))


class Smoothed(CausalLM):
    """Another loss, as in the guide to extending."""

    spec = replace(CAUSAL_LM, name="smoothed")

    def compute_loss(self, batch: Any) -> torch.Tensor:
        with self.packed.autocast():
            logits = self.packed.logits_KV(batch, batch.target_positions_K).float()
        return functional.cross_entropy(logits, batch.targets_K, reduction="sum", label_smoothing=0.2)


@pytest.mark.long
def test_a_task_of_ones_own_has_its_own_loss_in_evaluation_too(
    run_dir: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    path = trained(tiny_model_dir, tmp_path, **{"model.task": f"{__name__}:Smoothed"})
    found = evaluate(path)
    assert found.tuned.loss == pytest.approx(evaluation_loss(path), rel=1e-5)
    assert f"the loss is that of the task `{__name__}:Smoothed`" in found.notes
    # Control: the plain loss of the same base model is another.
    assert abs(found.base.loss - evaluate(run_dir).base.loss) > 0.01
    # What cannot know the task says so; here the exported model does.
    shutil.copytree(path / "checkpoint-000001", tmp_path / "alone")
    alone = evaluate(tmp_path / "alone", file=path.parent / "rows.jsonl", baselines=["none"], max_rows=2)
    assert any("cross-entropy of the answers' tokens: that of the task" in note for note in alone.notes)


def by_transformers(model: Path, rows: list[list[int]], *, adapter: Path | None = None) -> float:
    """Loss per target of rows of which all is learned but the first token."""
    found = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    if adapter is not None:
        found = PeftModel.from_pretrained(found, str(adapter))
    found.eval()
    total, targets = 0.0, 0
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            total += float(found(input_ids=ids, labels=ids).loss) * (len(row) - 1)
        targets += len(row) - 1
    return total / targets


@pytest.mark.long
@pytest.mark.parametrize("learned", ["text", "all"])
@pytest.mark.parametrize("method", ["lora", "none"])
def test_rows_without_prompts_have_the_losses_of_plain_transformers(
    tmp_path: Path, tiny_model_dir: Path, learned: str, method: str
) -> None:
    data: dict[str, Any] = {"max_length": 64, "eval_ratio": 0.3, "train_on": "all"}
    if learned == "text":
        (tmp_path / "texts.jsonl").write_text(
            "".join(
                json.dumps({"text": f"Row {number} has {'the same ' * (number % 5)}words."}) + "\n"
                for number in range(20)
            )
        )
        data = {"max_length": 64, "eval_ratio": 0.3, "source": str(tmp_path / "texts.jsonl")}
    else:
        data["source"] = str(tiny.write_chat_rows(tmp_path, ROWS))
    path = trained(tiny_model_dir, tmp_path, data=data, adapter={"method": method})
    found = evaluate(path, max_rows=5)
    config = saved_config(RunDir(path))
    dataset = PreparedDataset(prepare_here(config))
    held_out = dataset.splits(config.data, seed=config.run.seed).eval
    assert held_out is not None
    rows = [held_out.row(number)[0].tolist() for number in sample(len(held_out), 5, seed=config.run.seed)]
    assert len({len(row) for row in rows}) > 1
    checkpoint = path / "checkpoint-000001"
    assert found.rows == 5
    assert found.base.loss == pytest.approx(by_transformers(tiny_model_dir, rows), rel=1e-5)
    tuned = (tiny_model_dir, checkpoint) if method == "lora" else (checkpoint, None)
    assert found.tuned.loss == pytest.approx(by_transformers(tuned[0], rows, adapter=tuned[1]), rel=1e-5)
    assert found.tuned.loss != pytest.approx(found.base.loss, rel=1e-4)
    assert found.tuned.perplexity == pytest.approx(math.exp(found.tuned.loss))
    assert found.base.json().keys() == {"loss", "perplexity"}
    assert not (found.folder / "predictions.jsonl").exists()
    with pytest.raises(ConfigError, match="no answers to score"):
        evaluate(path, metrics=["rougeL"])


@pytest.mark.parametrize("change", [lambda rows: [*rows, rows[0]], lambda rows: rows[1:]])
def test_other_data_than_the_runs_is_refused(
    tmp_path: Path, tiny_model_dir: Path, change: Callable[[list[str]], list[str]]
) -> None:
    """Another source is another split by ratio: rows that were learned would be scored as if they were held out."""
    path = trained(tiny_model_dir, tmp_path)
    source = tmp_path / "rows.jsonl"
    before = source.read_text(encoding="utf-8")
    source.write_text("".join(change(before.splitlines(keepends=True))), encoding="utf-8")
    with pytest.raises(DataError, match="changed since the run") as caught:
        evaluate(path)
    assert str(source) in str(caught.value.where)
    source.write_text(before, encoding="utf-8")
    assert evaluate(path).rows > 0


def test_the_loss_of_a_model_that_cannot_be_packed(tmp_path: Path) -> None:
    """Attention sinks are unknown to finray's attention over packed rows; the model's own has them."""
    model = tmp_path / "model"
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Large sinks, which take much of the attention away.
            parameter.fill_(3.0) if name.endswith("sinks") else parameter.mul_(4.0)
    made.save_pretrained(str(model))
    tiny.train_tokenizer().save_pretrained(str(model))
    path = trained(model, tmp_path, adapter={"target_modules": ["q_proj", "v_proj"]})

    assert evaluate(path).tuned.loss == pytest.approx(evaluation_loss(path), rel=1e-5)
