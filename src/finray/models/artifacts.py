"""Finds and loads an adapter or a full model in a run, checkpoint or model directory."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from finray.config import trust
from finray.config.adapter_files import NOTES, SETTINGS, WEIGHTS, Notes, read_notes, read_settings
from finray.config.load import read_yaml
from finray.config.objectives import OBJECTIVES, REWARD
from finray.config.resolved import LabelSet
from finray.config.schema import AdapterConfig, ModelConfig
from finray.config.tasks import CAUSAL_LM, SEQUENCE_CLASSIFICATION, SPECS
from finray.errors import ModelError
from finray.files import FileKind, first_line
from finray.models import classifier
from finray.models.adapters import load_adapter
from finray.models.fused_lora import fuse
from finray.models.loading import build_model, load_model
from finray.models.saved_layout import without_adapter
from finray.models.sharded import materialize
from finray.pretrained.weights import stored_weights

_logger = logging.getLogger(__name__)
_CONFIGS = FileKind(ModelError, repair="download the model again", links=True)
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A directory with trained weights.

    Attributes:
        folder: the directory.
        base: for an adapter, the model it belongs to; None for a whole model.
        notes: finray's metadata next to the weights (kind of the training ``rows``), if any.
        began_as: for a whole model that a run began from, its section: revision and new tokens.
    """

    folder: Path
    base: ModelConfig | None
    notes: Notes
    began_as: ModelConfig | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are an adapter."""
        return self.base is not None

    @property
    def is_reward(self) -> bool:
        """Whether its one output is how good an answer is."""
        return getattr(OBJECTIVES.get(self.notes.get("objective", "")), "is_reward", False)

    @property
    def is_strangers(self) -> bool:
        """Whether nothing is known of the rows that it was trained on, as of a model that was not made by finray."""
        return "rows" not in self.notes

    @property
    def model(self) -> ModelConfig:
        """The model to load first: the adapter's base, or the whole model."""
        return self.base or self.began_as or ModelConfig(name=str(self.folder), task=task_of(self.notes))

    @property
    def tokenizer(self) -> ModelConfig:
        """Where its tokenizer is."""
        return self.began_as or ModelConfig(name=str(self.folder))

    @property
    def labels(self) -> LabelSet | None:
        """The label set of a classifier's adapter; None for a whole model, whose configuration has it."""
        if not self.is_adapter or self.notes.get("problem") is None:
            return None
        return LabelSet(self.notes["problem"], tuple(self.notes.get("labels") or ()))


def task_of(notes: Notes) -> str:
    """The task whose class loads the weights: if one of finray's loads the same class, a user's task is not
    imported."""
    auto_class = notes.get("auto_class", CAUSAL_LM.auto_class)
    return next((spec.name for spec in SPECS.values() if spec.auto_class == auto_class), notes.get("task", ""))


def checked_notes(folder: Path, name: str) -> Notes:
    """finray's notes in a directory, of a model that is loaded by this name; empty where there are none.
    Raises ModelError: they are damaged, or of a task that is not there."""
    notes = read_notes(folder)
    if ":" in (task := task_of(notes)) and not _is_trusted(folder, name, task):
        raise ModelError(
            f"the model names code of its own, the task `{task}`, which would be imported here",
            where=str(folder / NOTES),
            repair="look at that code; --trust-run (in Python trust_run=True) accepts it",
        )
    try:
        ModelConfig(name=name, task=task_of(notes), new_tokens=notes.get("new_tokens", []))
    except ValidationError as error:
        raise ModelError(
            f"the task or the new tokens are none of finray's: {error.errors()[0]['msg']}",
            where=str(folder / NOTES),
            repair="take the file from where the adapter or model was made, or install the package of its task",
        ) from None
    return notes


def notes_of_stranger(folder: Path) -> Notes:
    """What the notes would say of a model from elsewhere, by its configuration: that it is a classifier, and with one
    output that is said to be nothing else a reward model. Raises ModelError: the file is damaged."""
    config = _CONFIGS.json(folder / "config.json", dict[str, Any])
    if not any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return {}
    names, notes = config.get("id2label"), Notes(auto_class=SEQUENCE_CLASSIFICATION.auto_class)
    outputs = len(names) if isinstance(names, dict) else config.get("num_labels")
    return {**notes, "objective": REWARD.name} if outputs == 1 and config.get("problem_type") is None else notes


def _is_trusted(folder: Path, name: str, task: str) -> bool:
    """Whether a run that this user has started has such models, or the user has accepted this one."""
    if trust.is_accepted(folder / NOTES):
        return True
    if name in trust.accepted():
        trust.accept(folder / NOTES)
        _logger.warning("trusted, of %s: task: %s", name, task)
        return True
    run = folder.parent
    if not trust.is_trusted(run):
        return False
    return (read_yaml(run / "config.yaml", run).get("model") or {}).get("task") == task


def read_artifact(folder: Path, *, base: str | None = None) -> Artifact:
    """Identify the weights in a directory.

    Args:
        folder: the directory.
        base: overrides the base model that an adapter names.

    Raises:
        ModelError: there are no weights, or what lies beside them is damaged.
    """
    notes = checked_notes(folder, str(folder))
    if (folder / SETTINGS).exists():
        settings = read_settings(folder)
        name, revision = settings.base_model_name_or_path, settings.revision
        if "base_model" in notes:
            name, revision = notes["base_model"], notes.get("revision")
        if base is not None:
            name, revision = base, None
        if not name:
            raise ModelError(
                "the adapter does not name its base model", where=str(folder / SETTINGS), repair="give it with --base"
            )
        words = list(notes.get("new_tokens") or [])
        return Artifact(folder, ModelConfig(name=name, revision=revision, task=task_of(notes), new_tokens=words), notes)
    if (folder / "config.json").is_file():
        if base is not None:
            raise ModelError(
                "it is a full model, which has no base model", where=str(folder), repair="leave out --base"
            )
        return Artifact(folder, None, notes or notes_of_stranger(folder))
    raise ModelError(
        "the directory holds neither an adapter nor a model",
        where=str(folder),
        repair="give a run, checkpoint or model directory",
    )


def require_fit(artifact: Artifact) -> None:
    """Check by names and shapes that an adapter fits its base model; no weights are read.
    Raises ModelError: it belongs to another model."""
    if artifact.base is None or not (artifact.folder / WEIGHTS).exists():
        return
    stored = stored_weights(artifact.folder, Path(WEIGHTS).stem)
    base = load_model(artifact.model, dtype=torch.float32, on_meta=True, labels=artifact.labels)
    # Some modules have none, under this name.
    weights = {name: getattr(module, "weight", None) for name, module in base.named_modules()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if weight is not None}
    layers = {_DIGITS.sub("#", name) for name in shapes}
    for name, tensor in {} if stored is None else stored.tensors.items():
        layer, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if part[:1] not in ("A", "B") or len(tensor.shape) != 2:
            continue
        size, odd = tensor.shape[1 if part[0] == "A" else 0], ""
        if len(shape := shapes.get(layer, ())) == 2 and size not in shape:
            odd = (
                f"{layer} is {shape[0]} x {shape[1]} there, and has {size} {'in' if part[0] == 'A' else 'out'}puts here"
            )
        elif layer not in shapes and _DIGITS.sub("#", layer) in layers:
            # Unknown names are ignored: PEFT accepts older ones.
            odd = f"there is no {layer}"
        if odd:
            named = read_settings(artifact.folder).base_model_name_or_path
            raise ModelError(
                f"the adapter does not fit the model {artifact.base.name}: {odd}",
                where=str(artifact.folder),
                repair="give the base model it was trained on with --base" + (f"; it names {named}" if named else ""),
            )


def load_artifact(artifact: Artifact, *, dtype: torch.dtype) -> Any:
    """The trained model, ready for inference; an adapter is not merged.
    Raises ModelError: it cannot be loaded, or the adapter belongs to another base model; checked before weights are
    loaded."""
    require_fit(artifact)
    model = load_model(artifact.model, dtype=dtype, labels=artifact.labels)
    if not artifact.is_adapter:
        if new := classifier.new_weights(model):
            raise ModelError(
                f"weights of the trained head are missing from its files, or have another shape there: {new[0]}",
                where=str(artifact.folder),
                repair="copy the files again, all of the `.safetensors` and `config.json`",
            )
        return model.eval()
    model = load_adapter(model, artifact.folder)
    # In bf16, PEFT's forward pass rounds the base's product before it adds the adapter's: an evaluation had a loss of
    # 1.295, training 1.194, and fp32 gives 1.182.
    fuse(model)
    return model


def require_finite(model: Any, where: str) -> None:
    """Check that no weight of a loaded model is NaN or infinite, as after a training that has diverged.

    Args:
        model: whose parameters are looked at; those of one byte per element are left out.
        where: it was loaded from.

    Raises:
        ModelError: a weight is not finite; the message names its tensor.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.element_size() > 1 and not is_finite(weight):
            raise ModelError(
                f"the weights {name} are not finite (NaN or infinite)",
                where=where,
                repair="take an earlier checkpoint: the training may have diverged; or copy the files again",
            )


def is_finite(weight: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # Both ends are NaN if any value is. Unlike a mask, they take no memory.
    return not weight.numel() or all(bool(end.isfinite()) for end in torch.aminmax(weight.detach()))


def merge_adapter(model: Any) -> Any:
    """The Transformers model with the weights of its adapter added.

    Embedding and head may share their weight, while only one of them has an adapter: then they no longer do. Raises
    ModelError: PEFT cannot merge it (`lora_bias` on a layer without a bias; weights that are not finite).
    """
    from peft.tuners.lora.layer import LoraLayer

    inner = without_adapter(model)
    for layer in [module.get_base_layer() for module in model.modules() if isinstance(module, LoraLayer)]:
        if "weight" not in layer._parameters:
            # Experts: their matrices have other names, and are shared with nothing.
            continue
        # The layers of PEFT show their base's weight as their own.
        owners = [module for module in model.modules() if module._parameters.get("weight") is layer.weight]
        if len(owners) > 1:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            for config in (inner.config, inner.config.get_text_config()):
                config.tie_word_embeddings = False
    try:
        return model.merge_and_unload(safe_merge=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ModelError(
            f"PEFT cannot merge the adapter: {first_line(error)}",
            repair="use it unmerged: leave out --merge, or export it with --adapter",
        ) from None


def load_as_trained(artifact: Artifact, *, bits: int) -> Any:
    """An adapter on its base model quantized as in training (fp32 arithmetic), for comparison."""
    assert artifact.base is not None
    saved = read_settings(artifact.folder).modules_to_save or []
    if artifact.labels is not None:
        # PEFT notes the names of all heads that a classifier may have, and adds them again by itself.
        saved = [name for name in saved if name not in ("classifier", "score")]
    adapter = AdapterConfig(start_from=str(artifact.folder), modules_to_save=saved)
    device = torch.device("cpu")
    model = build_model(
        artifact.base,
        adapter,
        precision="fp32",
        attention_name=None,
        bits=bits,
        seed=0,
        device=device,
        labels=artifact.labels,
    )
    materialize(model, artifact.base, adapter, device=device, seed=0)
    return model.eval()
