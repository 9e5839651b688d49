"""Preparing small sources in this process, and reading back what became of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.config.load import build_config
from finray.config.schema import Config
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import BAD_ROWS, PreparedDataset, PreparedSplit, Splits
from finray.errors import DataError


class Preparing:
    """Prepares data for one model; each preparation begins from nothing.

    Args:
        model: directory of a model with its tokenizer.
        tokenizer: of the model.
        folder: for prepared datasets.
    """

    def __init__(self, model: Path, tokenizer: Any, folder: Path) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._folder = folder
        self._count = 0

    def config(self, source: Path | str | None = None, **sections: Any) -> Config:
        """A config; ``data`` fields stand for themselves, other sections are dictionaries."""
        named = {
            name: sections.pop(name) for name in ("run", "prepare", "cluster", "classification") if name in sections
        }
        model = {"name": str(self.model), **sections.pop("model", {})}
        data = {"max_length": 64, **({} if source is None else {"source": str(source)}), **sections}
        plain: dict[str, Any] = {"model": model, "data": data}
        return build_config({**plain, **named}, source="test")

    def dataset(self, source: Path | str | None = None, **sections: Any) -> PreparedDataset:
        self._count += 1
        return PreparedDataset(prepare_here(self.config(source, **sections), root=self._folder / str(self._count)))

    def splits(self, source: Path | str | None = None, **sections: Any) -> Splits:
        config = self.config(source, **sections)
        return self.dataset(source, **sections).splits(config.data, seed=config.run.seed)

    def texts(self, source: Path | str | None = None, **sections: Any) -> list[str]:
        """The rows to train on, as text, without the end of sequence."""
        return self.said(self.splits(source, **sections).train)

    def said(self, split: PreparedSplit | None) -> list[str]:
        assert split is not None
        end = self.tokenizer.eos_token
        return [self.tokenizer.decode(split.row(at)[0]).removesuffix(end) for at in range(len(split))]

    def refused(self, source: Path | str | None = None, **sections: Any) -> DataError:
        """The error of a preparation that must fail."""
        with pytest.raises(DataError) as caught:
            self.dataset(source, **sections)
        return caught.value


def ids(split: PreparedSplit | None) -> list[tuple[list[int], list[int]]]:
    """Token ids and mask of every row."""
    assert split is not None
    return [tuple(part.tolist() for part in split.row(at)) for at in range(len(split))]  # type: ignore[misc]


def bad_rows_of(dataset: PreparedDataset) -> list[dict[str, Any]]:
    content = dataset.folder.read(BAD_ROWS)
    return [] if content is None else [json.loads(line) for line in content.decode("utf-8").splitlines()]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def preparing(tiny_model_dir: Path, tokenizer: Any, tmp_path: Path) -> Preparing:
    return Preparing(tiny_model_dir, tokenizer, tmp_path / "prepared")


Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def put(tmp_path: Path) -> Write:
    """Write a file below the test's own directory."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return path

    return write
