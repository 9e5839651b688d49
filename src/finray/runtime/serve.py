"""``finray serve``: a server of :mod:`finray.serving` as a deployment of Ray Serve, on a Ray of its own."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError, ConfigError, FinrayError, explained, from_dict
from finray.runtime import cluster, signals
from finray.serving.models import Settings, find

_APP = "finray"
_POLL_S = 2.0
# Beyond the grace, for the way to the replica and back.
_SLACK_S = 15.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    grace: float,
    tell: Callable[[str], None],
    ready: Callable[[list[str]], None],
) -> None:
    """Answer requests until a signal comes; answers that have begun then have ``grace`` seconds to come to their end.

    Args:
        settings: what is served, and how.
        host: address to listen at.
        port: of TCP.
        grace: seconds.
        tell: is told in one line what a user should know.
        ready: is told the names of the models when they answer.

    Raises:
        FinrayError: something is missing, in use, or does not go together: said before weights are read, where it can
            be; or Ray has failed.
        Interrupted: by the signal.
    """
    require_packages()
    if settings.key_env is not None and not os.environ.get(settings.key_env):
        raise ConfigError(
            f"the environment has no variable {settings.key_env}",
            where="--api-key-env",
            repair=f"export {settings.key_env}=... with the key that clients are to send",
        )
    require_port(host, port)
    find(settings)
    if os.environ.pop("RAY_ADDRESS", None) is not None:
        tell("RAY_ADDRESS is not read: a server has a Ray of its own, on this machine")
    with cluster.connected(ClusterConfig()) as ray:
        _serve(ray, settings, host=host, port=port, grace=grace, tell=tell, ready=ready)


def _serve(
    ray: Any,
    settings: Settings,
    *,
    host: str,
    port: int,
    grace: float,
    tell: Callable[[str], None],
    ready: Callable[[list[str]], None],
) -> None:
    quiet = logging.ERROR if not os.environ.get("FINRAY_VERBOSE") else logging.INFO
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(quiet)
    logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        ray_serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=logs)
        resources = ray.cluster_resources()
        deployment = ray_serve.deployment(
            name="models",
            # Who waits, waits in finray's queue, whose end is a 429.
            max_ongoing_requests=100_000,
            graceful_shutdown_timeout_s=5,
            health_check_timeout_s=120,
            ray_actor_options={
                "num_cpus": max(1, int(resources.get("CPU", 1))),
                "num_gpus": min(1, int(resources.get("GPU", 0))),
            },
            logging_config=logs,
        )
        application = deployment(ray_serve.ingress()(Replica)).bind(settings)
        handle = ray_serve.run(application, name=_APP, route_prefix="/")
        signals.take_back()
        state = handle.state.remote().result()
        if state["error"] is not None:
            raise from_dict(state["error"])
        for line in state["told"]:
            tell(line)
        ready(state["names"])
        try:
            while True:
                time.sleep(_POLL_S)
                found = ray_serve.status().applications[_APP]
                if found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    why = found.message.strip().splitlines() or ["no reason is given"]
                    raise ClusterError(f"the model no longer answers: {why[-1][:300]}", repair="start the server again")
        except signals.Interrupted:
            tell(f"stopping: answers that have begun have {grace:g} s to come to their end; a second signal ends them")
            try:
                is_done = handle.drain.remote(grace).result(timeout_s=grace + _SLACK_S)
            except TimeoutError:
                is_done = False
            if not is_done:
                tell("some answers did not come to their end in that time")
            raise
    except FinrayError:
        raise
    except (ray.exceptions.RayError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ClusterError(
            f"Ray Serve cannot go on: {lines[-1][:300] if lines else type(error).__name__}",
            repair="FINRAY_VERBOSE=1 shows what its processes print",
        ) from None
    finally:
        # Its processes end with their Ray.
        signals.take_back()


class Replica:
    """The process that holds the models.

    What cannot be loaded is kept and told: Ray Serve would try again and again.

    Args:
        settings: what is served, and how.
    """

    def __init__(self, settings: Settings) -> None:
        self._server: Any = None
        self._told, self._error = list[str](), None
        try:
            from finray.serving.server import Server

            self._server = Server(settings, self._told.append)
        except Exception as error:
            known = explained(error)
            if known is None:
                raise
            self._error = known.to_dict()

    def __serve_build_asgi_app__(self) -> Any:
        """The web application; Ray Serve asks for it under this name."""
        from starlette.applications import Starlette

        return Starlette() if self._server is None else self._server.app()

    async def state(self) -> dict[str, Any]:
        """Whether it answers: names of the models, what a user should know, and the error if there is one."""
        names = [] if self._server is None else self._server.names()
        return {"names": names, "told": self._told, "error": self._error}

    async def drain(self, grace: float) -> bool:
        """See :meth:`finray.serving.server.Server.drain`."""
        return bool(await self._server.drain(grace))


def require_packages() -> None:
    """See that Ray Serve can be imported.

    Raises:
        ConfigError: its packages are missing.
    """
    missing = [name for name in ("starlette", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Ray Serve needs packages that are not installed: {', '.join(missing)}",
            where="finray serve",
            repair="pip install 'finray[serve]'",
        )


def require_port(host: str, port: int) -> None:
    """See that the address is free, before a model is loaded for it.

    Raises:
        ConfigError: it cannot be listened at.
    """
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ConfigError(
            "another process listens there" if in_use else f"cannot be listened at: {error.strerror or error}",
            where=f"--host {host} --port {port}",
            repair="take another port with --port" if in_use else "take an address of this machine",
        ) from None
