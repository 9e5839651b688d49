"""Tasks that fail as real ones do: one whose rank runs out of a GPU's memory, one whose rank hangs in a step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from finray.data.sampling.collate import Batch
from finray.tasks.causal_lm import CausalLM

NO_MEMORY = f"{__name__}:NoMemoryLM"
SLEEPING = f"{__name__}:SleepingLM"
MARK = "FINRAY_TEST_MARK"
# As torch 2.13 says it.
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 KiB is "
    "free. Including non-PyTorch memory, this process has 78.8 GiB memory in use."
)


class NoMemoryLM(CausalLM):
    """A language model whose last rank finds no memory in its second step."""

    steps = 0

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Raise what torch raises."""
        self.steps += 1
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and self.steps > 2:
            raise torch.OutOfMemoryError(SAID)
        return super().loss_sum(batch)


class SleepingLM(CausalLM):
    """A language model whose rank 1 sleeps for ever in a step, once: the file named by the environment is the mark."""

    steps = 0

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sleep in the fourth forward pass of the first attempt."""
        self.steps += 1
        mark = Path(os.environ[MARK])
        if os.environ["RANK"] == "1" and self.steps == 4 and not mark.exists():
            mark.write_text(str(os.getpid()))
            asleep()
        return super().loss_sum(batch)


def asleep() -> None:
    """What the stack of the rank must show."""
    while True:
        time.sleep(1)
