"""Settings that do not work, or have no effect, on a worker without a GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from finray.config.schema import Config
from finray.errors import ConfigError


def refusals_on_cpu(
    config: Config, *, has_program: Callable[[str], bool] = lambda name: shutil.which(name) is not None
) -> list[ConfigError]:
    """Errors for settings that a worker without a GPU cannot satisfy."""
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")
    checks = [
        (
            config.train.activation_offload,
            "train.activation_offload",
            "activations are already in CPU memory",
            "leave it out, or set train.gradient_checkpointing to full",
        ),
        (
            config.parallel.cpu_offload and config.parallel.strategy == "fsdp",
            "parallel.cpu_offload",
            "weights and optimizer state are already in CPU memory",
            "leave it out",
        ),
        (
            config.train.compile and not any(has_program(name) for name in compilers),
            "train.compile",
            "torch.compile needs a C++ compiler on a CPU, and none is installed",
            "install g++, or leave it out",
        ),
    ]
    return [ConfigError(message, where=where, repair=repair) for applies, where, message, repair in checks if applies]
