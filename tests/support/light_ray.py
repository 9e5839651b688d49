"""A node of Ray with less beside it: what `ray start` calls first where `RAY_START_HOOK` names it. Imports little."""

from __future__ import annotations

import os
from typing import Any

from tests.support import forks


def light(parameters: Any, head: bool) -> None:
    """Leave out what follows its logs, what a dashboard would ask, and a server for Ray clients.

    A node waits for these as it starts, on a busy machine for longer than Ray gives it.
    """
    from ray._private import node, ray_constants, utils

    def start_nothing(self: Any, **_: Any) -> None:
        self._webui_url = ""

    if forks.SOCKET in os.environ:
        ray_constants.SETUP_WORKER_FILENAME = forks.SCRIPT
    parameters.ray_client_server_port = None
    utils.get_dashboard_dependency_error = lambda: ImportError("not needed")
    for name in ("monitor", "log_monitor", "api_server"):
        setattr(node.Node, f"start_{name}", start_nothing)


def with_jobs(parameters: Any, head: bool) -> None:
    """Of the dashboard's ten processes, those that serve jobs and find their nodes; no server for Ray clients."""
    from ray._private import services

    start = services.start_ray_process

    def start_less(command: list[str], kind: str, *arguments: Any, **options: Any) -> Any:
        more = ["--modules-to-load=JobHead,NodeHead"] if kind == "dashboard" else []
        return start([*command, *more], kind, *arguments, **options)

    services.start_ray_process = start_less
    parameters.ray_client_server_port = None
