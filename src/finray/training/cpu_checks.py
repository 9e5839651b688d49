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
    """What a config asks for in vain when a worker has no GPU."""
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")
    checks = [
        (
            config.train.activation_offload,
            "train.activation_offload",
            "activations are in the memory of the CPU already",
            "leave it out, or set train.gradient_checkpointing to full",
        ),
        (
            config.parallel.cpu_offload and config.parallel.strategy == "fsdp",
            "parallel.cpu_offload",
            "weights and optimizer state are in the memory of the CPU already",
            "leave it out",
        ),
        (
            config.train.compile and not any(has_program(name) for name in compilers),
            "train.compile",
            "torch.compile needs a C++ compiler on a CPU, and there is none",
            "install g++, or leave it out",
        ),
    ]
    return [ConfigError(what, where=where, repair=repair) for applies, where, what, repair in checks if applies]
