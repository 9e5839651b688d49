"""examples/notebook.ipynb runs from top to bottom in a kernel of its own, on the real small model, and shows what it
should: a plan, progress, a result, a table."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

pytestmark = pytest.mark.nightly

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
MODEL = "models--HuggingFaceTB--SmolLM2-135M-Instruct"


def test_the_notebook_is_kept_without_outputs_and_paths() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = nbformat.reads(text, as_version=4).cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")
    assert not re.search(r'["\s](/home|/work|/root|/tmp|/Users|[A-Z]:\\)', text)


@pytest.fixture(scope="module")
def cells(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells with what they put out."""
    folder = tmp_path_factory.mktemp("notebook")
    cached = folder / "hub" / MODEL
    (cached / "refs").mkdir(parents=True)
    (cached / "snapshots").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).symlink_to(smollm2_dir)
    shutil.copy(NOTEBOOK, folder)
    env = {**os.environ, "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    # Ray's workers have the environment that Ray was started in: the kernel starts one of its own.
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        env.pop(name, None)
    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
    # Somebody who knows Ray imports it: its core is then loaded before finray has said what Ray it starts.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import ray"))
    # Sockets in the file system: TCP would be open to everybody on this machine.
    kernel = Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}})
    try:
        place = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=500, resources=place, config=kernel).execute(env=env)
    finally:
        nbformat.write(notebook, folder / "executed.ipynb")
    return [cell for cell in notebook.cells if cell.cell_type == "code"][1:]


def shown(cell: Any) -> str:
    return "\n".join(
        output.get("text") or "\n".join(map(str, output.get("data", {}).values())) for output in cell.outputs
    )


def test_each_cell_shows_what_it_should(cells: list[Any]) -> None:
    assert "the run would start" in shown(cells[1])
    assert "<pre" in shown(cells[1])
    training = shown(cells[2])
    assert "12/12" in training
    assert "run finished" in training
    assert "Traceback" not in training
    bars = [output for output in cells[2].outputs if "training" in str(output) and "12/12" in str(output)]
    assert len(bars) == 1, "one bar that is updated, not one after another, without ipywidgets"
    assert "eval_loss" in shown(cells[3])
    assert "<table" in shown(cells[3])
    assert "12 losses were seen" in shown(cells[4])
    assert "rows; 95 % intervals" in shown(cells[5])
    # Before, it answers in a sentence.
    assert re.fullmatch(r"\w+", shown(cells[6]).strip())
    assert "PeftModel" in shown(cells[7])
    # Nobody is asked to install anything.
    assert [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"] == []
