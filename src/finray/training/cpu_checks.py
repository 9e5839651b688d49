"""What a worker without a GPU cannot do, or would do for nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from finray.config.schema import Config
from finray.errors import ConfigError


def refusals_on_cpu(
    config: Config, *, has_program: Callable[[str], bool] = lambda name: shutil.which(name) is not None
) -> list[ConfigError]:
    """What a config asks for in vain when a worker has no GPU.

    Args:
        config: the run's.
        has_program: whether there is a program of that name.
    """
    found = []
    if config.train.activation_offload:
        found.append(
            ConfigError(
                "activations are in the memory of the CPU already",
                where="train.activation_offload",
                repair="leave it out, or set train.gradient_checkpointing to full",
            )
        )
    if config.parallel.cpu_offload and config.parallel.strategy == "fsdp":
        found.append(
            ConfigError(
                "weights and optimizer state are in the memory of the CPU already",
                where="parallel.cpu_offload",
                repair="leave it out",
            )
        )
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")
    if config.train.compile and not any(has_program(name) for name in compilers):
        found.append(
            ConfigError(
                "torch.compile needs a C++ compiler on a CPU, and there is none",
                where="train.compile",
                repair="install g++, or leave it out",
            )
        )
    return found
