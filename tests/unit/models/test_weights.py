"""Headers of weights: what they say, and files that are missing or cut off."""

from __future__ import annotations

import json
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from finray.errors import ModelError
from finray.pretrained.weights import stored_weights
from tests.support import damaged

INDEX = "model.safetensors.index.json"


def write(folder: Path, name: str = "model.safetensors") -> Path:
    tensors = {"layer.q_proj.weight": torch.zeros(4, 6, dtype=torch.bfloat16), "norm.weight": torch.zeros(3)}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder / name


def test_a_header_is_read(tmp_path: Path) -> None:
    file = write(tmp_path)
    stored = stored_weights(tmp_path)
    assert stored is not None
    assert stored.modules == ["layer.q_proj", "norm"]
    assert (stored.dtypes, stored.size) == (("BF16", "F32"), file.stat().st_size)


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
    with pytest.raises(ModelError, match=r"1 of 2 weight files .* model-2"):
        stored_weights(tmp_path)
    write(tmp_path, "model-2.safetensors")
    assert stored_weights(tmp_path) is not None


def test_no_weights_and_weights_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        stored_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert stored_weights(tmp_path) is None


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HEADERS = {
    "not JSON": header(b"{" * 64),
    "deep": header(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "shape is text": header(b'{"w":{"dtype":"F32","shape":"four","data_offsets":[0,4]}}') + bytes(4),
    "no shape": header(b'{"w":{"dtype":"F32","shape":null,"data_offsets":[0,4]}}') + bytes(4),
    "no offsets": header(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[]}}') + bytes(4),
    "dtypes": header(b'{"w":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    "not UTF-8": header(b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    "a list": header(b"[]"),
    "huge": struct.pack("<Q", 2**63) + b"{}",
    "empty": b"",
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: is damaged"):
        stored_weights(tmp_path)


INDEXES = {
    "a number": {"weight_map": {"a": 1}},
    "null": {"weight_map": {"a": None}},
    "a list of files": {"weight_map": {"a": ["model-1.safetensors"]}},
    "no map": {"weight_map": None},
    "a list": [],
    "nothing": {},
    "up": {"weight_map": {"a": "../model-1.safetensors"}},
    "absolute": {"weight_map": {"a": "/model-1.safetensors"}},
    "no name": {"weight_map": {"a": ""}},
}


@pytest.mark.parametrize("content", INDEXES.values(), ids=INDEXES.keys())
def test_an_index_that_is_none_or_points_elsewhere_is_named(tmp_path: Path, content: object) -> None:
    write(tmp_path, "model-1.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / INDEX).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json: (has invalid content|names a file outside)"):
        stored_weights(tmp_path / "model")


@given(st.data())
def test_a_flipped_bit_or_a_cut_in_the_header_is_named_or_read(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        file = write(Path(place))
        damaged.draw(file, data)
        with suppress(ModelError):
            stored_weights(Path(place))


def test_only_the_files_that_would_be_loaded_are_looked_at(tmp_path: Path) -> None:
    """An odd file beside the weights has nothing to say, and a manifest decides where there is one."""
    write(tmp_path)
    save_file({"stray": torch.zeros(1)}, tmp_path / "model2.safetensors")
    found = stored_weights(tmp_path)
    assert found is not None
    assert set(found.tensors) == {"layer.q_proj.weight", "norm.weight"}
    # A stray single file would be taken instead of the shards that an index names.
    write(tmp_path, "model-1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}), encoding="utf-8")
    found = stored_weights(tmp_path, files=[INDEX, "model-1.safetensors"])
    assert found is not None
    assert {tensor.file.name for tensor in found.tensors.values()} == {"model-1.safetensors"}
    with pytest.raises(ModelError, match="1 of 1 weight files"):
        stored_weights(tmp_path, files=[INDEX])
