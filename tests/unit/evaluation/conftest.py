"""Runs to evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import evaluated
from tests.support.evaluated import Train


@pytest.fixture(scope="module")
def train(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """See :func:`tests.support.evaluated.train`."""

    def build(**changes: Any) -> Path:
        return evaluated.train(tiny_model_dir, tmp_path_factory.mktemp("run"), **changes)

    return build


@pytest.fixture(scope="module")
def run_dir(train: Train) -> Path:
    return train()
