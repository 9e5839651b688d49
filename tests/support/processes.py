"""Groups of processes that start quickly: forked from one that has imported what takes long, and done nothing else."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# DeepSpeed would otherwise look for an accelerator when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Compilers in processes of their own take longer to start than these few kernels to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# All that a small run imports, or each process of each group takes three seconds of a core to import it.
PRELOADED = ["deepspeed", "pandas", "peft", "torch.distributed.fsdp", "torch._inductor.compile_fx"]
PRELOADED += ["transformers.models.llama.modeling_llama", "finray.training.assemble", "finray.planning.resolve"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*PRELOADED, "tests.support.runs", "tests.support.tiny"])


def start(function: Callable[..., None], arguments: tuple[Any, ...], *, processes: int, device: str = "") -> None:
    """Call ``function(rank, *arguments)`` in each process, and wait for all; an exception in one is raised here."""
    # CUDA cannot be used in a process that was forked from one that has looked for GPUs, as some libraries do.
    on_gpu = "cuda" in (device, os.environ.get("FINRAY_TEST_DEVICE"))
    mp.start_processes(  # type: ignore[no-untyped-call]
        function, arguments, nprocs=processes, start_method="spawn" if on_gpu else "forkserver"
    )
