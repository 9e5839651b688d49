"""Headers of weights: what they say, and files that are missing or cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finray.errors import ModelError
from finray.pretrained.weights import INDEX, stored_weights


def write(folder: Path, name: str = "model.safetensors") -> Path:
    tensors = {"layer.q_proj.weight": torch.zeros(4, 6, dtype=torch.bfloat16), "norm.weight": torch.zeros(3)}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder / name


def test_a_header_is_read(tmp_path: Path) -> None:
    file = write(tmp_path)
    stored = stored_weights(tmp_path)
    assert stored is not None
    assert stored.modules == ["layer.q_proj", "norm"]
    assert (stored.elements, stored.dtypes, stored.size) == (27, ("BF16", "F32"), file.stat().st_size)


@pytest.mark.parametrize("keep", [4, 40, -1], ids=["no length", "half a header", "a byte less"])
def test_a_file_that_is_cut_off(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    with pytest.raises(ModelError, match="damaged"):
        stored_weights(tmp_path)
    file.write_bytes(whole)
    assert stored_weights(tmp_path) is not None


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "model-1.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"1 of 2 files .* model-2"):
        stored_weights(tmp_path)
    write(tmp_path, "model-2.safetensors")
    assert stored_weights(tmp_path) is not None


def test_no_weights_and_weights_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        stored_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert stored_weights(tmp_path) is None
