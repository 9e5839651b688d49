"""Sequence classification: losses are torch's, and a model comes back from what is saved of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from finray.config.resolved import LabelSet, Problem
from finray.config.schema import AdapterConfig, ModelConfig
from finray.data.sampling.collate import LabelledBatch, collate_labelled
from finray.models import attention, classifier
from finray.models.artifacts import load_artifact, load_as_trained, read_artifact
from finray.models.export import export
from finray.models.loading import build_model, load_model
from finray.models.quantized import QuantizedLinear
from finray.models.sharded import materialize
from finray.objectives.classification import ClassificationObjective
from finray.tasks.sequence_classification import SequenceClassification
from tests.support import tiny
from tests.support.adapted import save_classifier

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
NAMES = ("no", "maybe", "yes")
LENGTHS = (5, 9, 3, 7, 4, 8, 6)
WEIGHTS = (0.3, 2.0, 1.1)


class Split:
    """Rows of a prepared split."""

    def __init__(self, labels: list[Any]) -> None:
        draw = np.random.default_rng(3)
        self.labels = labels
        self.rows = [draw.integers(6, 380, length).astype(np.int32) for length in LENGTHS]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> tuple[Any, Any]:
        return self.rows[number], np.zeros(LENGTHS[number], np.uint8)


LABELS: dict[Problem, list[Any]] = {
    "single_label": ["yes", "no", "no", "maybe", "yes", "no", "maybe"],
    "multi_label": [("yes",), (), ("no", "yes"), ("maybe",), ("no",), ("no", "maybe", "yes"), ()],
    "regression": [0.5, -1.25, 3.0, 2.0, 0.0, 1.5, -0.75],
}


def task_of(problem: Problem, **options: Any) -> SequenceClassification:
    attention.register()
    names = () if problem == "regression" else NAMES
    model = tiny.build_classifier("bert", classes=len(names) or 1).eval()
    model.set_attn_implementation(attention.NAME)
    settings: dict[str, Any] = {"precision": "fp32", "attention_name": attention.NAME, "device": CPU}
    objective = ClassificationObjective(problem, names, **options, device=CPU)
    return SequenceClassification(model, **settings, objective=objective)


def loss_of(task: SequenceClassification, split: Split, rows: Sequence[int]) -> torch.Tensor:
    batch = task.collate(split, rows)  # type: ignore[arg-type]
    return task.objective.loss_sum(task.outputs(batch), batch, torch.zeros(0))


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        ("single_label", {}),
        ("single_label", {"class_weights": WEIGHTS}),
        ("single_label", {"class_weights": WEIGHTS, "label_smoothing": 0.15}),
        ("multi_label", {}),
        ("multi_label", {"class_weights": WEIGHTS}),
        ("regression", {}),
    ],
)
def test_the_loss_of_a_step_is_what_torch_calls_mean_however_it_is_cut(problem: Problem, options: Any) -> None:
    task, split = task_of(problem, **options), Split(LABELS[problem])
    weights = task.objective.weight(split)  # type: ignore[arg-type]
    parts = ([3], [0, 6, 2], [1, 4, 5])
    losses = [loss_of(task, split, rows).item() for rows in parts]
    with torch.no_grad():
        logits = torch.cat([task.model(input_ids=torch.from_numpy(row)[None].long(),
                                       segment_lengths=(len(row),)).logits for row in split.rows])  # fmt: skip
    weight = torch.tensor(options["class_weights"]) if "class_weights" in options else None
    if problem == "single_label":
        ids = torch.tensor([NAMES.index(one) for one in split.labels])
        smoothing = options.get("label_smoothing", 0.0)
        expected = F.cross_entropy(logits, ids, weight=weight, label_smoothing=smoothing)
    elif problem == "multi_label":
        ones = torch.tensor([[float(name in row) for name in NAMES] for row in split.labels])
        expected = F.binary_cross_entropy_with_logits(logits, ones, weight=weight)
    else:
        expected = F.mse_loss(logits[:, 0], torch.tensor(split.labels))
    assert sum(losses) / float(weights.sum()) == pytest.approx(expected.item(), rel=1e-5)
    # Negative control: a mean of means is another number.
    means = [loss / float(weights[rows].sum()) for loss, rows in zip(losses, parts, strict=True)]
    assert float(np.mean(means)) != pytest.approx(expected.item(), rel=1e-4)


def test_smoothing_of_several_classes_goes_half_way_to_both_sides() -> None:
    task, split = task_of("multi_label", label_smoothing=0.2), Split(LABELS["multi_label"])
    batch = task.collate(split, range(7))  # type: ignore[arg-type]
    with torch.no_grad():
        logits = task.logits_SC(batch)
    ones = torch.tensor([[0.9 if name in row else 0.1 for name in NAMES] for row in split.labels])
    expected = F.binary_cross_entropy_with_logits(logits, ones, reduction="sum") / 3
    torch.testing.assert_close(loss_of(task, split, range(7)).detach(), expected)


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_an_evaluation_counts_the_loss_by_weight(problem: Problem) -> None:
    weights = WEIGHTS if problem == "single_label" else ()
    task, split = task_of(problem, class_weights=weights), Split(LABELS[problem])
    sums = torch.zeros(task.objective.metric_count(7), dtype=torch.float64)
    with torch.no_grad():
        for rows in ([6, 0], [3], [1, 2, 4, 5]):
            batch = task.collate(split, rows)  # type: ignore[arg-type]
            task.objective.score(task.outputs(batch), batch, sums)
        whole = loss_of(task, split, range(7))
    found = task.objective.metrics(sums.tolist())
    assert found["eval_loss"] == pytest.approx(float(whole) / float(task.objective.weight(split).sum()), rel=1e-5)  # type: ignore[arg-type]
    assert ("pearson" in found, "accuracy" in found) == (problem == "regression", problem != "regression")


# --- built, saved and exported ----------------------------------------------------------------------------------------

BASES = {
    "bert": "AutoModel",
    "distilbert": "AutoModelForMaskedLM",
    "roberta": "AutoModelForMaskedLM",
    "modernbert": "AutoModelForMaskedLM",
    "llama": "AutoModelForCausalLM",
}
TARGETS = {"distilbert": ["q_lin", "v_lin"], "modernbert": ["Wqkv"], "llama": ["q_proj", "v_proj"]}


@pytest.fixture(params=sorted(BASES))
def base(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Any) -> tuple[str, ModelConfig]:
    """A body as it is published, without the head of a classifier and with no padding token where it is a decoder."""
    import transformers

    family = request.param
    kind, fields = (tiny.ENCODERS | tiny.FAMILIES)[family]
    config = transformers.AutoConfig.for_model(kind, **fields)
    if family == "llama":
        config.pad_token_id = None
    torch.manual_seed(4)
    made = getattr(transformers, BASES[family]).from_config(config, dtype=torch.float32)
    made.save_pretrained(str(tmp_path / "base"))
    tokenizer.save_pretrained(str(tmp_path / "base"))
    return family, ModelConfig(name=str(tmp_path / "base"), task="sequence_classification")


def built(
    base: tuple[str, ModelConfig], *, on_meta: bool = False, seed: int = 1, bits: int | None = None, **fields: Any
) -> Any:
    family, model = base
    adapter = AdapterConfig(**{"rank": 4, "target_modules": TARGETS.get(family, ["query", "value"]), **fields})
    options: dict[str, Any] = {"precision": "fp32", "attention_name": None, "bits": bits, "device": CPU}
    labels = LabelSet("single_label", NAMES)
    made = build_model(model, adapter, seed=seed, on_meta=on_meta, labels=labels, **options)
    if on_meta or bits:
        assert materialize(made, model, adapter, device=CPU, seed=seed) is False, "the whole model was read"
    return made.eval()


@pytest.mark.parametrize("method", ["lora", "none"])
def test_new_weights_follow_from_the_seed_and_no_rank_reads_the_whole_model_for_them(
    base: tuple[str, ModelConfig], method: str
) -> None:
    torch.manual_seed(8)
    first, sharded, other = (
        built(base, on_meta=meta, method=method, seed=seed) for meta, seed in ((0, 1), (1, 1), (0, 2))
    )
    weights, its, unlike = (dict(one.named_parameters()) for one in (first, sharded, other))
    assert weights.keys() == its.keys()
    for name, one in weights.items():
        assert torch.equal(one, its[name]), name
    head = [
        name
        for name in weights
        if name.endswith(("classifier.weight", "out_proj.weight", "score.weight", "default.weight"))
    ]
    assert head
    assert not all(torch.equal(weights[name], unlike[name]) for name in head)
    inner = first.get_base_model() if method == "lora" else first
    assert inner.config.id2label == dict(enumerate(NAMES))
    assert inner.config.problem_type == "single_label_classification"
    assert inner.config.pad_token_id is not None


def test_all_that_is_new_is_trained_beside_an_adapter(base: tuple[str, ModelConfig]) -> None:
    family, _ = base
    made = built(base)
    trained = {name for name, one in made.named_parameters() if one.requires_grad and ".lora_" not in name}
    modules = {name.partition(".modules_to_save.")[0].rpartition(".")[2] for name in trained}
    expected = {
        "llama": {"score"},
        "distilbert": {"pre_classifier", "classifier"},
        "modernbert": {"head", "classifier"},
    }
    assert modules == expected.get(family, {"classifier"})


def test_a_pooler_that_no_file_has_is_trained_and_saved(tmp_path: Path, tokenizer: Any) -> None:
    import transformers

    config = transformers.AutoConfig.for_model("bert", **tiny.ENCODERS["bert"][1])
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(str(tmp_path / "base"))
    tokenizer.save_pretrained(str(tmp_path / "base"))
    model = ModelConfig(name=str(tmp_path / "base"), task="sequence_classification")
    for meta in (False, True):
        made = built(("bert", model), on_meta=meta)
        trained = [name for name, one in made.named_parameters() if one.requires_grad and ".lora_" not in name]
        assert any("pooler.modules_to_save" in name for name in trained)
        assert any("classifier.modules_to_save" in name for name in trained)


def test_a_head_of_another_number_of_classes_is_replaced(tmp_path: Path, tokenizer: Any) -> None:
    tiny.build_classifier("bert", classes=5).save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    model = ModelConfig(name=str(tmp_path), task="sequence_classification")
    made = load_model(model, dtype=torch.float32, seed=3, labels=LabelSet("multi_label", NAMES))
    assert made.classifier.weight.shape == (3, 64)
    assert made.config.problem_type == "multi_label_classification"
    kept = load_model(model, dtype=torch.float32, labels=LabelSet("single_label", ("a", "b", "c", "d", "e")))
    assert torch.equal(kept.classifier.weight, tiny.build_classifier("bert", classes=5).classifier.weight)


def test_a_quantized_body_keeps_its_head(base: tuple[str, ModelConfig]) -> None:
    made = built(base, bits=8)
    packed = {name for name, one in made.named_modules() if isinstance(one, QuantizedLinear)}
    assert packed
    assert not any(word in name for name in packed for word in ("classifier", "score", ".head"))


def save(model: Any, folder: Path, config: ModelConfig, tokenizer: Any) -> None:
    save_classifier(model, folder, config, tokenizer, problem="single_label", labels=list(NAMES))


@pytest.mark.parametrize("how", ["merged", "adapter", "whole"])
def test_plain_transformers_and_peft_load_what_is_exported(
    base: tuple[str, ModelConfig], how: str, tokenizer: Any, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    _, model = base
    made = built(base, method="none" if how == "whole" else "lora")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in (one for one in made.parameters() if one.requires_grad):
            one.add_(torch.randn(one.shape, generator=draw), alpha=0.05)
    save(made, tmp_path / "run", model, tokenizer)
    tokens = torch.arange(6, 30)[None]
    expected = made(input_ids=tokens).logits.detach()
    found = read_artifact(tmp_path / "run")
    torch.testing.assert_close(load_artifact(found, dtype=torch.float32)(input_ids=tokens).logits, expected)
    export(found, tmp_path / "out", merge=how != "adapter", dtype="fp32")
    if how == "adapter":
        plain = AutoModelForSequenceClassification.from_pretrained(model.name, num_labels=3)
        plain.config.pad_token_id = made.config.pad_token_id
        loaded = PeftModel.from_pretrained(plain, str(tmp_path / "out")).eval()
    else:
        loaded = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out")).eval()
        assert loaded.config.id2label == dict(enumerate(NAMES))
        assert loaded.config.label2id == {name: number for number, name in enumerate(NAMES)}
        assert loaded.config.architectures == [type(loaded).__name__]
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_classifier_that_was_trained_on_a_quantized_body_is_loaded_as_it_was_trained(
    base: tuple[str, ModelConfig], bits: int, tokenizer: Any, tmp_path: Path
) -> None:
    made = built(base, bits=bits)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in (one for one in made.parameters() if one.requires_grad):
            one.add_(torch.randn(one.shape, generator=draw), alpha=0.05)
    save(made, tmp_path / "run", base[1], tokenizer)
    tokens = torch.arange(6, 30)[None]
    again = load_as_trained(read_artifact(tmp_path / "run"), bits=bits)
    assert torch.equal(again(input_ids=tokens).logits, made(input_ids=tokens).logits)
    packed = [
        {name for name, one in model.named_modules() if isinstance(one, QuantizedLinear)} for model in (made, again)
    ]
    assert packed[0] == packed[1] != set()


def test_what_a_configuration_is_told_can_be_read_back() -> None:
    from transformers import AutoConfig

    for labels in (LabelSet("single_label", NAMES), LabelSet("multi_label", NAMES), LabelSet("regression", ())):
        config = AutoConfig.for_model("bert", **classifier.head_options(labels))
        assert classifier.labels_in(config) == labels
    assert config.num_labels == 1
    assert classifier.labels_in(AutoConfig.for_model("bert")) is None


def test_batches_move_with_their_labels_and_types() -> None:
    batch = collate_labelled(
        [(np.arange(4, dtype=np.int32), np.array([0, 0, 1, 1], np.uint8))], [7], {"labels": np.array([2])}
    )
    moved = batch._each(lambda tensor: tensor.to("meta"))
    assert isinstance(moved, LabelledBatch)
    assert (moved.rows, moved.lengths) == ((7,), (4,))
    assert all(one.is_meta for one in (moved.tokens_1T, moved.token_types_1T, moved.labels_S, moved.cu_seqlens))
