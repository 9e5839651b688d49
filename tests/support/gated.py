"""A task that goes no further than a test lets it, so that what is done to a run happens at a known step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finray.config.schema import Config
from finray.data.sampling.collate import Batch, LabelledBatch
from finray.records import Note, Record, RunHeader, TrainRecord
from finray.runtime import driver
from finray.tasks.causal_lm import CausalLM
from finray.tasks.sequence_classification import SequenceClassification
from tests.support import runs
from tests.support.runs import PATIENCE_S, Plain, changed

TASK, CLASSIFIER = f"{__name__}:GatedLM", f"{__name__}:GatedClassifier"
_RUN_DIR = "GATED_RUN_DIR"


class GatedLM(CausalLM):
    """A causal language model whose steps begin once the file ``limit`` beside the run allows them."""

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Wait, then as always."""
        _wait()
        return super().loss_sum(batch)


class GatedClassifier(SequenceClassification):
    """A classifier whose steps begin likewise."""

    def loss_sum(self, batch: LabelledBatch) -> torch.Tensor:
        """Wait, then as always."""
        _wait()
        return super().loss_sum(batch)


def _wait() -> None:
    """Until as many steps are allowed as the next one needs."""
    folder = Path(os.environ[_RUN_DIR])
    while len(runs.values(folder, "step")) >= limit(folder.parent):
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


class Run(threading.Thread):
    """A training in a thread of this process.

    Attributes:
        said: what it said, in words.
        headers: of each start of the workers.
        steps: in the order in which they were recorded.
        error: that ended it; None where none did.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(daemon=True)
        self.said: list[str] = []
        self.headers: list[RunHeader] = []
        self.steps: list[int] = []
        self.error: BaseException | None = None
        self._config = config

    def run(self) -> None:
        """Train."""
        try:
            driver.train(self._config, handle=self._heard)
        except BaseException as error:
            self.error = error

    def _heard(self, record: Record) -> None:
        if isinstance(record, Note):
            self.said.append(record.message)
        elif isinstance(record, RunHeader):
            self.headers.append(record)
        elif isinstance(record, TrainRecord):
            self.steps.append(record.step)

    def until(self, what: Callable[[], object]) -> None:
        """Wait for something that happens while the run is at work."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.is_alive(), (self.error, self.said)
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def until_said(self, text: str) -> None:
        """Wait until something is said that has this in it."""
        self.until(lambda: any(text in one for one in self.said))

    def ended(self) -> BaseException | None:
        """Wait for the end; the error, if there was one."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), self.said
        return self.error
