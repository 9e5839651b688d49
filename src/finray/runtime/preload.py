"""Imported by every process of a Ray that we start; a training worker imports its libraries while others prepare.

Ray imports what ``RAY_preload_python_modules`` names once a process has connected; see :mod:`finray.runtime.cluster`.
"""

from __future__ import annotations

import contextlib
import importlib
import os

PRELOAD = "FINRAY_PRELOAD"

for _module in filter(None, os.environ.get(PRELOAD, "").split(",")):
    # A broken library is reported where it is used.
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
