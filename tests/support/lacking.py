"""Tasks of which one rank fails as in real ones: it runs out of memory, hangs, raises an error, or computes NaN."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from finray.data.sampling.collate import Batch
from finray.errors import DataUnavailable
from finray.runtime import worker
from finray.tasks.causal_lm import CausalLM

NO_MEMORY = f"{__name__}:NoMemoryLM"
SLEEPING = f"{__name__}:SleepingLM"
SLOW = f"{__name__}:SlowLM"
FAILING = f"{__name__}:FailingLM"
BROKEN = f"{__name__}:BrokenLM"
SILENT = f"{__name__}:SilentLM"
POISONED = f"{__name__}:PoisonedLM"
POISONED_PASS = 6
MARK = "FINRAY_TEST_MARK"
# As torch 2.13 says it.
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 KiB is "
    "free. Including non-PyTorch memory, this process has 78.8 GiB memory in use."
)


class NoMemoryLM(CausalLM):
    """A language model whose last rank finds no memory in its second step."""

    steps = 0

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Raise what torch raises."""
        self.steps += 1
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and self.steps > 2:
            raise torch.OutOfMemoryError(SAID)
        return super().outputs(batch)


class SilentLM(CausalLM):
    """A language model whose last rank finds no storage when it is made, once: the file named by the environment is the
    mark."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        mark = Path(os.environ[MARK])
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and not mark.exists():
            mark.touch()
            raise DataUnavailable("the server gave no answer within 10 s", where="http://storage")
        super().__init__(*arguments, **options)


class SleepingLM(CausalLM):
    """A language model whose rank 1 sleeps for ever in a step, once: the file named by the environment is the mark."""

    steps = 0

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Sleep in the fourth forward pass of the first attempt."""
        self.steps += 1
        mark = Path(os.environ[MARK])
        if os.environ["RANK"] == "1" and self.steps == 4 and not mark.exists():
            mark.write_text(str(os.getpid()))
            asleep()
        return super().outputs(batch)


class SlowLM(CausalLM):
    """A language model whose rank 1 takes half a second longer in each forward pass, and eight times as long at least:
    others may be slow as well, on a busy machine."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """As on a machine with other work."""
        began = time.monotonic()
        loss = super().outputs(batch)
        if os.environ["RANK"] == "1":
            time.sleep(max(0.5, 7 * (time.monotonic() - began)))
        return loss


def asleep() -> None:
    """What the stack of the rank must show."""
    while True:
        time.sleep(1)


def hanging_worker(payload: dict[str, Any]) -> Any:
    """As a worker that hangs while it imports packages: for ever, once, before its first report."""
    mark = Path(os.environ[MARK])
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        asleep()
    return worker.train_worker(payload)


class FailingLM(CausalLM):
    """A language model whose rank 1 fails in its third forward pass, in every attempt."""

    passes = 0

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Raise what no restart helps against."""
        self.passes += 1
        if os.environ["RANK"] == "1" and self.passes == 3:
            print("looking up row 7")
            raise LookupError("row 7 has no label")
        return super().outputs(batch)


class BrokenLM(CausalLM):
    """A language model whose forward pass always raises."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Look up a row that is not there."""
        return super().outputs(batch) + torch.zeros(3)[3]


class PoisonedLM(CausalLM):
    """A language model whose loss is NaN on rank 1 in one forward pass. Before each pass, a rank adds a digest of the
    trained weights to a file of its own, in the directory that the environment names."""

    passes = 0

    def outputs(self, batch: Batch) -> torch.Tensor:
        """Note the weights, and multiply by NaN."""
        self.passes += 1
        rank = os.environ["RANK"]
        trained = [one.detach().numpy().tobytes() for one in self.trainable().values()]
        (folder := Path(os.environ[MARK])).mkdir(exist_ok=True)
        with (folder / f"weights-{rank}").open("a") as stream:
            stream.write(f"{hashlib.sha256(b''.join(trained)).hexdigest()}\n")
        loss = super().outputs(batch)
        return loss * float("nan") if rank == "1" and self.passes == POISONED_PASS else loss
