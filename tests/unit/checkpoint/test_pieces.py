"""Tensors in pieces: whatever rows ranks wrote, any rows are read back, and rows that are missing are named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from finray.checkpoint.pieces import PieceReader, TensorPiece, file_name, write_pieces
from finray.errors import CheckpointError
from tests.support.examples import examples


def write_all(folder: Path, ranks: list[list[TensorPiece]], stem: str = "optimizer") -> list[str]:
    names = [file_name(stem, rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    for name, pieces in zip(names, ranks, strict=True):
        write_pieces(folder / name, pieces)
    return names


def cuts_of(draw: Any, size: int, count: int) -> list[tuple[int, int]]:
    places = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    return list(pairwise([0, *places, size]))


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_any_rows_are_read_back_from_any_pieces(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One tensor in whole rows, one in runs of elements that end within a row, and a number, over one to four ranks."""
    draw = data.draw
    folder = tmp_path_factory.mktemp("pieces")
    rows, width, world_size = (
        draw(st.integers(1, 9)),
        draw(st.sampled_from([(), (3,), (2, 2)])),
        draw(st.integers(1, 4)),
    )
    by_rows = torch.arange(float(rows * torch.Size(width).numel())).reshape(rows, *width)
    flat = (by_rows + 1000).to(torch.bfloat16)
    number = torch.tensor(7.5)
    ranks: list[list[TensorPiece]] = [[] for _ in range(world_size)]
    for rank, (start, stop) in enumerate(cuts_of(draw, rows, world_size)):
        ranks[rank].append(TensorPiece("rows", by_rows[start:stop], start, tuple(by_rows.shape)))
    for rank, (start, stop) in enumerate(cuts_of(draw, flat.numel(), world_size)):
        ranks[rank].append(TensorPiece("flat", flat.flatten()[start:stop], start, tuple(flat.shape), flat=True))
    ranks[draw(st.integers(0, world_size - 1))].append(TensorPiece("number", number, 0, ()))
    reader = PieceReader(folder, "optimizer", reversed(write_all(folder, ranks)))
    assert reader.shapes == {"rows": tuple(by_rows.shape), "flat": tuple(flat.shape), "number": ()}
    start, stop = sorted((draw(st.integers(0, rows)), draw(st.integers(0, rows))))
    for name, whole in (("rows", by_rows), ("flat", flat), ("number", number)):
        assert torch.equal(reader.read(name), whole)
        assert reader.read(name).dtype == whole.dtype
        if whole.ndim:
            assert torch.equal(reader.read(name, start, stop).to(whole.dtype), whole[start:stop])
            assert torch.equal(reader.read(name, start), whole[start:])


def test_what_a_file_holds_is_in_its_header(tmp_path: Path) -> None:
    """The format of runs that exist: docs/formats.md."""
    transposed = torch.arange(6.0).reshape(2, 3).T
    write_pieces(
        tmp_path / "a.safetensors",
        [TensorPiece("w", transposed, 4, (9, 2)), TensorPiece("b", torch.ones(5), 3, (2, 6), flat=True)],
    )
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["rows"]) == {
            "b": {"start": 3, "shape": [2, 6], "flat": True},
            "w": {"start": 4, "shape": [9, 2]},
        }
        assert file.get_tensor("w").tolist() == transposed.tolist()


@pytest.mark.parametrize(
    ("held", "said"),
    [([(0, 3), (5, 9)], "rows 3 to 9 of w"), ([(1, 9)], "rows 0 to 9 of w"), ([(0, 8)], "rows 8 to 9 of w")],
)
def test_rows_that_no_file_holds_are_an_error_unless_they_are_not_asked_for(
    tmp_path: Path, held: list[tuple[int, int]], said: str
) -> None:
    whole = torch.arange(18.0).reshape(9, 2)
    names = write_all(tmp_path, [[TensorPiece("w", whole[start:stop], start, (9, 2))] for start, stop in held])
    reader = PieceReader(tmp_path, "optimizer", names)
    with pytest.raises(CheckpointError, match=said):
        reader.read("w")
    start, stop = held[-1]
    assert torch.equal(reader.read("w", start, stop), whole[start:stop])


def test_rows_that_two_files_hold_are_read_once(tmp_path: Path) -> None:
    whole = torch.arange(18.0).reshape(9, 2)
    names = write_all(tmp_path, [[TensorPiece("w", whole[:6], 0, (9, 2))], [TensorPiece("w", whole[4:], 4, (9, 2))]])
    assert torch.equal(PieceReader(tmp_path, "optimizer", names).read("w"), whole)


def test_a_tensor_that_is_not_there_and_a_folder_without_files_are_errors(tmp_path: Path) -> None:
    names = write_all(tmp_path, [[TensorPiece("w", torch.ones(2), 0, (2,))]])
    with pytest.raises(CheckpointError, match="no tensor v"):
        PieceReader(tmp_path, "optimizer", names).read("v")
    for stem, listed in (("other", names), ("optimizer", [])):
        with pytest.raises(CheckpointError, match=f"no {stem} state") as caught:
            PieceReader(tmp_path, stem, listed)
        assert caught.value.where == str(tmp_path)


def test_files_that_are_not_listed_are_not_looked_at(tmp_path: Path) -> None:
    names = write_all(tmp_path, [[TensorPiece("w", torch.ones(2), 0, (2,))]])
    (tmp_path / "optimizer-00002-of-00002.safetensors").write_bytes(b"left by somebody")
    write_pieces(tmp_path / "optimizer-x.safetensors", [TensorPiece("v", torch.ones(2), 0, (2,))])
    reader = PieceReader(tmp_path, "optimizer", [*names, "optimizer-x.safetensors"])
    assert list(reader.shapes) == ["w"]


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    [name] = write_all(tmp_path, [[TensorPiece("w", torch.ones(20), 0, (20,))]])
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError) as caught:
        PieceReader(tmp_path, "optimizer", [name])
    assert str(path) in str(caught.value)
