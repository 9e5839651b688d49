"""A task that goes no further than a test lets it, so that what is done to a run happens at a known step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from finray.data.sampling.collate import Batch, LabelledBatch
from finray.tasks.causal_lm import CausalLM
from finray.tasks.sequence_classification import SequenceClassification
from tests.support import runs
from tests.support.runs import Plain, changed

TASK, CLASSIFIER = f"{__name__}:GatedLM", f"{__name__}:GatedClassifier"
_RUN_DIR = "GATED_RUN_DIR"


class GatedLM(CausalLM):
    """A causal language model whose steps begin once the file ``limit`` beside the run allows them, and whose saves
    end once there is no file ``hold``. The pass of a reference needs a step to be allowed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        save, self.layout.save_settings = self.layout.save_settings, self._save  # type: ignore[method-assign]
        self._saved = save

    def _save(self, folder: Path) -> None:
        output = Path(os.environ[_RUN_DIR]).parent
        while (output / "hold").exists():
            (output / "saves").touch()
            time.sleep(0.02)
        self._saved(folder)

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Wait, then as always."""
        _wait()
        return super().outputs(batch)


class GatedClassifier(SequenceClassification):
    """A classifier whose steps begin likewise."""

    def outputs(self, batch: LabelledBatch) -> torch.Tensor:
        """Wait, then as always."""
        _wait()
        return super().outputs(batch)


def _wait() -> None:
    """Until as many steps are allowed as the next one needs."""
    folder = Path(os.environ[_RUN_DIR])
    while len(runs.values(folder, "step")) >= limit(folder.parent):
        (folder.parent / "waits").write_text(str(os.getpid()))
        time.sleep(0.02)


def limit(output: Path) -> int:
    """The last step that is allowed to begin."""
    path = output / "limit"
    return int(path.read_text() or 0) if path.exists() else 10**9


def gated(plain: Plain, output: Path, *changes: dict[str, Any]) -> Plain:
    """The config of a run in a directory, whose steps :func:`allow` lets begin."""
    own = {"model.task": TASK, "run.output_dir": str(output), "cluster.env": {_RUN_DIR: str(output / "run")}}
    return changed(plain, own, *changes)


def allow(output: Path, step: int) -> None:
    """Let the steps up to this one begin."""
    output.mkdir(exist_ok=True, parents=True)
    scratch = output / "limit.new"
    scratch.write_text(str(step))
    scratch.replace(output / "limit")
