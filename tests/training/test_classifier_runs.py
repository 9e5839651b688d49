"""Training a classifier (one process, no Ray): against a plain loop, resumed to the bit, packed or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch.nn import functional as F

from finray.config.resolved import Packing
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from tests.support import runs
from tests.support.runs import Plain, changed

NO_DROPOUT = {"adapter.method": "none", "train": {"learning_rate": 0.002, "max_grad_norm": None}}


@pytest.fixture(scope="module")
def plain(classifier_run: Callable[..., Plain]) -> Plain:
    return classifier_run({"adapter.dropout": 0.2, "train.micro_batch_size": 2})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, plain: Plain) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    runs.run_alone(plain, run_dir)
    return run_dir


KINDS: dict[str, Plain] = {
    "8bit": {"model.quantization": "8bit"},
    "4bit": {"model.quantization": "4bit"},
    "dora": {"adapter.method": "dora"},
    "pissa": {"adapter.method": "pissa"},
    "4bit dora": {"model.quantization": "4bit", "adapter.method": "dora"},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bert", "8bit"), ("bert", "dora"), ("llama", "4bit"), ("llama", "pissa"), ("llama", "4bit dora")],
)
def test_every_adapter_and_base_is_trained_continued_and_exported(
    family: str, kind: str, classifier_run: Callable[..., Plain], tmp_path: Path
) -> None:
    """The head is trained in full precision beside a packed base; what is exported is whole, in plain Transformers."""
    from transformers import AutoModelForSequenceClassification

    from finray.evaluation.artifacts import export_model, find_artifact
    from finray.models.artifacts import load_artifact

    plain = classifier_run({"adapter.dropout": 0.0 if kind == "pissa" else 0.2, **KINDS[kind]}, family=family)
    whole, again = tmp_path / "whole", tmp_path / "again"
    runs.run_alone(plain, whole)
    runs.cut(whole, again)
    assert runs.run_alone(plain, again).header.step == 4
    assert runs.trace(again) == runs.trace(whole)
    checkpoint = Path("checkpoint-000008")
    name = checkpoint / "adapter_model.safetensors"
    assert (again / name).read_bytes() == (whole / name).read_bytes()
    # Another base, or another adapter, is another curve.
    usual = {"model.quantization": "none", "adapter.method": "lora"}
    runs.run_alone(changed(plain, usual), tmp_path / "usual")
    assert runs.values(tmp_path / "usual", "loss") != runs.values(whole, "loss")
    exported = export_model(whole / checkpoint, tmp_path / "exported", dtype="fp32").folder
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert model.config.id2label == {0: "animal", 1: "neither", 2: "plant"}
    tuned = load_artifact(find_artifact(whole / checkpoint), dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, tuned(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_without_its_head_is_not_continued_as_if_it_had_one(
    undisturbed: Path, plain: Plain, tmp_path: Path
) -> None:
    """Negative control of those above: other weights of the head are another curve."""
    from safetensors.torch import load_file, save_file

    from tests.support.checkpoints import reseal

    run_dir = runs.cut(undisturbed, tmp_path / "run")
    checkpoint = run_dir / "checkpoint-000004"
    file = checkpoint / "adapter_model.safetensors"
    tensors = load_file(file)
    heads = [name for name in tensors if "classifier" in name]
    assert sorted(name.rpartition("classifier")[2] for name in heads) == [".bias", ".weight"]
    save_file({name: one * (name not in heads) for name, one in tensors.items()}, file, metadata={"format": "pt"})
    reseal(checkpoint)
    runs.run_alone(plain, run_dir)
    assert runs.values(run_dir, "loss")[4:] != runs.values(undisturbed, "loss")[4:]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert", "llama", "qwen2"])
def test_a_run_in_full_is_a_plain_loop_over_padded_batches(
    family: str, classifier_run: Callable[..., Plain], tmp_path: Path
) -> None:
    """Plain Transformers with an attention mask, torch's AdamW and torch's weighted mean; dropout is off in both."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    changes = {**NO_DROPOUT, "train.micro_batch_size": 3, "data.eval_ratio": 0.25, "evaluation.every_steps": 4}
    settings = classifier_run(changes, family=family)
    folder = Path(settings["model"]["name"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    still = {name: 0.0 for name in config if "dropout" in name and config[name] is not None}
    (folder / "config.json").write_text(json.dumps(config | still), encoding="utf-8")
    assembled = runs.assemble_alone(settings, tmp_path / "ours")
    model = AutoModelForSequenceClassification.from_pretrained(str(folder), num_labels=3, attn_implementation="eager")
    named = dict(assembled.loop.task.model.named_parameters())
    assert named.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(named[name])
    assembled.loop.run()
    assembled.loop.trackers.finish()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    rows = [json.loads(line) for line in Path(settings["data"]["source"]).read_text(encoding="utf-8").splitlines()]
    split, labels = assembled.loop.source.split, ["animal", "neither", "plant"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.0)
    model.train()
    for step, record in enumerate(runs.records(tmp_path / "ours")):
        own = [rows[int(split.source_rows[row])] for row in record["samples"]]
        inputs = tokenizer([row["text"] for row in own], padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        logits = model(**inputs).logits
        weight, targets = torch.tensor([2.0, 1.0, 0.5]), torch.tensor([labels.index(row["label"]) for row in own])
        loss = F.cross_entropy(logits, targets, weight=weight, label_smoothing=0.1)
        assert record["loss"] == pytest.approx(loss.item(), rel=2e-4), step
        loss.backward()
        optimizer.param_groups[0]["lr"] = record["lr"]
        optimizer.step()
        optimizer.zero_grad()
    evaluations = runs.records(tmp_path / "ours", "eval")
    assert [record["step"] for record in evaluations] == [4, 8]
    assert {"eval_loss", "accuracy", "f1_macro", "matthews_corrcoef", "recall_plant"} <= evaluations[-1].keys()
    # After the last step the plain model is the same: its matrix is scikit-learn's.
    settled = runs.config_of(settings)
    held = PreparedDataset(prepare_here(settled)).splits(settled.data, seed=settled.run.seed).eval
    assert held is not None
    own = [rows[at] for at in held.source_rows.tolist()]
    inputs = tokenizer([row["text"] for row in own], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        said = model.eval()(**inputs).logits.argmax(-1).tolist()
    matrix = confusion_matrix([labels.index(row["label"]) for row in own], said, labels=[0, 1, 2])
    assert evaluations[-1]["confusion"] == matrix.tolist()


def test_packs_and_rows_alone_learn_the_same(
    classifier_run: Callable[..., Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step over all rows: as packs, as rows, and as batches of one length for a model that cannot be packed."""
    settings = classifier_run(
        {
            **NO_DROPOUT,
            "train.max_steps": None,
            "train.epochs": 1,
            "train.global_batch_size": 44,
            "train.micro_batch_size": 44,
        }
    )
    folder = Path(settings["model"]["name"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config | still), encoding="utf-8")
    runs.run_alone(settings, tmp_path / "rows")
    packs = changed(settings, {"data.packing": True})
    assembled = runs.run_alone(packs, tmp_path / "packs")
    assert len(assembled.loop.source.plan) < 44
    monkeypatch.setattr(runs, "packing_of", lambda model: Packing(False, "bert", "the test says so"))
    apart = runs.assemble_alone(settings, tmp_path / "apart")
    assert len(apart.loop.source.at(0).micro_batches) > 3
    apart.loop.run()
    apart.loop.trackers.finish()
    first: dict[str, Any] = runs.records(tmp_path / "rows")[0]
    for name in ("packs", "apart"):
        other = runs.records(tmp_path / name)[0]
        assert sorted(other["samples"]) == sorted(first["samples"])
        assert (other["loss"], other["grad_norm"]) == pytest.approx((first["loss"], first["grad_norm"]), rel=1e-5)
