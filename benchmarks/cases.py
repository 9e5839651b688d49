"""The table of cases, by group; a group's module is imported when it is asked for, since a GPU's machine has less."""

from __future__ import annotations

import importlib

from case import Case

# Group to the heading of its section in RESULTS.md and the modules that hold its cases.
GROUPS = {
    "cpu": ("LoRA on a CPU: finray and its peers", ("cpu",)),
    "scaling": ("LoRA on a CPU: finray and its peers", ("cpu",)),
    "start": ("Start-up", ("start", "prepare")),
    "prepare": ("Preparing data", ("prepare",)),
    "memory": ("Peak memory: the estimate of finray plan", ("memory",)),
    "checkpoints": ("Checkpoints behind the training", ("start",)),
    "gpu": ("One GPU: finray's training step, and Trainer", ("gpu",)),
    "against": ("Another checkout", ("start",)),
}


def cases(group: str) -> list[Case]:
    """The cases of a group."""
    modules = [importlib.import_module(name) for name in GROUPS[group][1]]
    return [case for module in modules for case in module.CASES if case.group == group]
