"""How finray's processes import libraries without spending time on what nobody uses.

Every process of a Ray that we start imports this module; a training worker then imports its libraries while others
prepare. Ray imports what ``RAY_preload_python_modules`` names once a process has connected; see
:mod:`finray.runtime.cluster`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from finray.files import opened

if TYPE_CHECKING:
    from finray.config.schema import Config

PRELOAD = "FINRAY_PRELOAD"


def needed(config: Config) -> list[str]:
    """The modules that take a training worker long to import."""
    from finray.config.tasks import SPECS

    modules = ["ray.train.torch", "finray.training.assemble"]
    if config.model.task in SPECS:
        modules.append(f"finray.tasks.{config.model.task}")
    if config.adapter.method != "none":
        modules.append("peft")
    with contextlib.suppress(OSError, ValueError, KeyError):
        with opened(Path(config.model.name) / "config.json") as stream:
            kind = json.loads(stream.read(2**20))["model_type"]
        modules.append(f"transformers.models.{kind}.modeling_{kind}")
    return modules


def collect_seldom() -> None:
    """Have Python look for garbage less often, in processes of finray alone: commands, and tasks that prepare data.

    Libraries that are imported, and rows that are prepared, create hundreds of thousands of objects that are in use or
    free themselves. To look through them again and again takes a sixth of the time to a first answer, and a tenth of
    preparing. Not for training workers: garbage may hold tensors.
    """
    # Python's own values are 700, 10, 10.
    gc.set_threshold(2_000, 20, 100)


def import_all(modules: Iterable[str]) -> None:
    """Import modules, without what nobody uses: garbage collection, which would take a quarter of the time to find that
    everything is in use, and PEFT's import of bitsandbytes. A broken library is reported where it is used."""
    from finray.compat import read_models_once, without_bitsandbytes

    was_on = gc.isenabled()
    gc.disable()
    with contextlib.suppress(Exception):
        read_models_once()
    for name in modules:
        around = without_bitsandbytes() if name == "peft" else contextlib.nullcontext()
        with contextlib.suppress(Exception), around:
            importlib.import_module(name)
    # What is there now stays: later collections need not look at it.
    gc.freeze()
    if was_on:
        gc.enable()


if os.environ.get(PRELOAD):
    import_all(os.environ[PRELOAD].split(","))
