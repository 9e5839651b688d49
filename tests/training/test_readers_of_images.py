"""A checkpoint that reads images is trained on text: its text tower learns, and all else is as it was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from finray.models.artifacts import read_artifact
from finray.models.export import export
from finray.models.saved_layout import SavedLayout
from finray.pretrained.weights import StoredWeights, stored_weights
from tests.support import runs, tiny

# Those of the gate; the others run at night.
GATE = ("mistral3", "llama4")
FAMILIES = [pytest.param(name, marks=[] if name in GATE else [pytest.mark.nightly]) for name in tiny.READERS]
# In names of tensors that are not of text.
OF_IMAGES = ("vision", "visual", "projector", "connector")


def picture(family: str) -> dict[str, torch.Tensor]:
    """An image of four tokens between words, as the model's processor would give it."""
    images = {"pixel_values": torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)}
    tokens = torch.tensor([[5, 6, 300, 300, 300, 300, 7, 8]])
    if family == "mistral3":
        images["image_sizes"] = torch.tensor([[28, 28]])
    elif family == "llama4":
        tokens = torch.tensor([[5, 6, 300, 7, 8]])
    elif family == "idefics3":
        images["pixel_values"] = images["pixel_values"][None]
        tokens = torch.tensor([[5, 6, 300, 7, 8]])
    elif family in ("qwen2_vl", "glm4v_moe"):
        # Four patches of two frames become one token.
        images = {"pixel_values": torch.linspace(-1, 1, 4 * 3 * 2 * 14 * 14).view(4, -1)}
        images["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        tokens = torch.tensor([[5, 6, 300, 7, 8]])
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == 300).long(), **images}


@torch.no_grad()
def answer(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits by plain Transformers; it refuses inputs that a model does not take."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(**inputs).logits
    return logits


def stored(folder: Path) -> StoredWeights:
    found = stored_weights(folder)
    assert found is not None
    return found


def changed(before: StoredWeights, after: StoredWeights) -> set[str]:
    """The tensors that differ; all have the same names and shapes."""
    assert {name: one.shape for name, one in after.tensors.items()} == {
        name: one.shape for name, one in before.tensors.items()
    }
    return {name for name in before.tensors if not torch.equal(before.read(name), after.read(name))}


@pytest.mark.parametrize("publishes", [True, False], ids=["published", "as earlier versions wrote them"])
def test_a_checkpoint_is_read_again_by_either_names(publishes: bool, tmp_path: Path) -> None:
    model = tiny.build_reader("mistral3")
    tensors = SavedLayout(model).tensors(publishes=publishes)
    assert ("language_model.model.norm.weight" in tensors) == publishes
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    other = tiny.build_reader("mistral3")
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    SavedLayout(other).load(tmp_path)
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in other.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_answers_about_images_as_before_and_only_its_text_part_learns(
    family: str, tmp_path: Path, tokenizer: Any
) -> None:
    base, rows = tmp_path / "base", tiny.write_chat_rows(tmp_path, 14)
    tiny.save_reader(family, base, tokenizer)
    inputs, published = picture(family), stored(base)
    if family not in ("qwen2_vl", "glm4v_moe"):
        del inputs["mm_token_type_ids"]
    assert any(part in name for name in published.tensors for part in OF_IMAGES)
    expected = answer(base, inputs)
    words_alone = answer(base, {"input_ids": torch.tensor([[5, 6, 7, 8]])})
    assert not torch.equal(expected[:, -1], words_alone[:, -1]), "the image must matter"

    def trained(name: str, **changes: Any) -> tuple[Path, Path]:
        """A checkpoint, and what is exported of it."""
        plain = runs.tiny_run(base, rows, tmp_path, {"train.max_steps": 2, "checkpoint.every_steps": 2, **changes})
        runs.run_alone(plain, tmp_path / name)
        folder = tmp_path / name / "checkpoint-000002"
        export(read_artifact(folder), tmp_path / f"{name}-out", merge=True, dtype="fp32")
        return folder, tmp_path / f"{name}-out"

    # The least that a rate can be.
    _, same = trained("still", **{"train.learning_rate": 1e-30})
    assert torch.equal(answer(same, inputs), expected)
    _, adapted = trained("lora")
    whole, written = trained("whole", **{"adapter.method": "none"})
    for folder in (same, adapted, written, whole):
        assert (folder / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    for folder in (adapted, written):
        learned = changed(published, stored(folder))
        assert learned, "the control: something is learned"
        assert not [name for name in learned if any(part in name for part in OF_IMAGES)]
        assert not torch.equal(answer(folder, inputs), expected)
    # The checkpoint itself loads as well, and where no matrix is split, it has the published names.
    assert torch.equal(answer(whole, inputs), answer(written, inputs))
    assert family in ("llama4", "glm4v_moe") or not changed(stored(whole), stored(written))
