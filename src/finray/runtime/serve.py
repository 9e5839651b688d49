"""``finray serve``: a server of :mod:`finray.serving` as a deployment of Ray Serve, on a Ray of its own."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from finray.config.redact import redact_error
from finray.config.schema import ClusterConfig
from finray.errors import ClusterError, ConfigError, FinrayError, ModelError, explained, from_dict
from finray.evaluation.engines import joins_gpus
from finray.files import first_line
from finray.runtime import cluster, signals
from finray.serving.models import ServePlan, ServeSettings, api_key, find

_APP = "finray"
_POLL_S = 2.0
# Added to the grace period for the way to the replica and back.
_SLACK_S = 15.0


def serve(
    settings: ServeSettings,
    *,
    host: str,
    port: int,
    grace: float,
    notify: Callable[[str], None],
    ready: Callable[[list[str]], None],
) -> None:
    """Serve requests until a signal arrives; running answers then have ``grace`` seconds to finish.

    Args:
        settings: what to serve, and how.
        host: address to listen at.
        port: of TCP.
        grace: seconds.
        notify: called with messages for the user, one line each.
        ready: called with the names of the models when they answer requests.

    Raises:
        FinrayError: something is missing, in use, or contradictory (reported before weights are read, where possible),
            or Ray has failed.
        Interrupted: by a signal before it answers.
    """
    require_packages()
    if settings.key_env is not None:
        api_key(settings.key_env)
    require_port(host, port)
    plan = find(settings)
    if os.environ.pop("RAY_ADDRESS", None) is not None:
        notify("RAY_ADDRESS is ignored: the server starts its own Ray on this machine")
    with cluster.connected(ClusterConfig()) as ray:
        _serve(ray, settings, plan, host=host, port=port, grace=grace, notify=notify, ready=ready)


def _serve(
    ray: Any,
    settings: ServeSettings,
    plan: ServePlan,
    *,
    host: str,
    port: int,
    grace: float,
    notify: Callable[[str], None],
    ready: Callable[[list[str]], None],
) -> None:
    quiet = logging.ERROR if not os.environ.get("FINRAY_VERBOSE") else logging.INFO
    from ray import serve as ray_serve
    from ray.serve.config import HTTPOptions
    from ray.serve.exceptions import RayServeException
    from ray.serve.schema import LoggingConfig

    for name in ("ray.serve", "ray"):
        logging.getLogger(name).setLevel(quiet)
    logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        ray_serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=logs)
        # Of this machine: Ray is finray's own.
        resources = ray.cluster_resources()
        deployment = ray_serve.deployment(
            name="models",
            # Requests wait in finray's own queue, which answers 429 when it is full.
            max_ongoing_requests=100_000,
            graceful_shutdown_timeout_s=5,
            health_check_timeout_s=120,
            ray_actor_options=actor_options(resources, settings.engine, plan),
            logging_config=logs,
        )
        application = deployment(ray_serve.ingress()(Replica)).bind(settings)
        is_ready = False
        try:
            handle = ray_serve.run(application, name=_APP, route_prefix="/")
            signals.take_back()
            state = handle.state.remote().result()
            if state["error"] is not None:
                raise from_dict(state["error"])
            for line in state["notes"]:
                notify(line)
            is_ready = True
            ready(state["names"])
            while True:
                time.sleep(_POLL_S)
                status = ray_serve.status().applications[_APP]
                if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    why = status.message.strip().splitlines() or ["no reason was given"]
                    raise ClusterError(f"the model no longer answers: {why[-1][:300]}", repair="start the server again")
        except signals.Interrupted:
            # Of a server that answers, the first signal is its regular end, and the second one hastens it.
            try:
                _drain(ray_serve, grace, notify)
            except signals.Interrupted:
                if not is_ready:
                    raise
            if not is_ready:
                raise
            notify("stopped")
    except FinrayError:
        raise
    except (ray.exceptions.RayError, RayServeException, RuntimeError) as error:
        if _has_died(ray_serve):
            raise ClusterError(
                "the process that loads the model has ended each time before it answered; nothing says why",
                where=settings.model,
                repair="it may have run out of memory: see the system's log, or try a smaller model or --dtype bf16",
            ) from None
        # Some of Ray Serve's have no text but this.
        lines = [line.strip() for line in str(getattr(error, "message", error)).splitlines() if line.strip()]
        raise ClusterError(
            f"Ray Serve failed: {lines[-1][:300] if lines else type(error).__name__}",
            repair="FINRAY_VERBOSE=1 shows what its processes print",
        ) from None
    finally:
        # Ray's processes end with their Ray.
        signals.take_back()


def _has_died(ray_serve: Any) -> bool:
    """Whether processes of the model were lost while they started. Ray Serve's own error does not say so."""
    with suppress(Exception):
        deployments = ray_serve.status().applications[_APP].deployments.values()
        return any("died" in deployment.message.lower() for deployment in deployments)
    return False


def _drain(ray_serve: Any, grace: float, notify: Callable[[str], None]) -> None:
    """Let running answers end. The model may answer some time before :func:`ray.serve.run` has returned."""
    application = ray_serve.status().applications.get(_APP)
    deployments = () if application is None else application.deployments.values()
    if not any(deployment.replica_states.get("RUNNING") for deployment in deployments):
        return
    notify(f"stopping: running answers have {grace:g} s to finish; a second signal stops them")
    try:
        is_done = ray_serve.get_app_handle(_APP).drain.remote(grace).result(timeout_s=grace + _SLACK_S)
    except Exception:
        # There was no time left, or the replica was lost: the stop is one all the same.
        is_done = False
    if not is_done:
        notify("some answers did not finish in that time")


def actor_options(resources: Mapping[str, float], engine: str, plan: ServePlan) -> dict[str, int]:
    """The process of the models gets all CPUs of the machine, and one GPU; with vLLM, which joins them, all GPUs.

    Args:
        resources: of the machine, by Ray's names.
        engine: as in the settings.
        plan: what is served; vLLM runs no classifier.
    """
    gpus = int(resources.get("GPU", 0))
    joins = joins_gpus(engine) and not plan.is_classifier
    return {"num_cpus": max(1, int(resources.get("CPU", 1))), "num_gpus": gpus if joins else min(1, gpus)}


class Replica:
    """The process that holds the models.

    A failure to load is stored and reported: Ray Serve would retry forever.

    Args:
        settings: what to serve, and how.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._server: Any = None
        self._notes, self._error = list[str](), None
        try:
            from finray.serving.server import ApiServer

            self._server = ApiServer(settings, self._notes.append)
        except Exception as error:
            reason = explained(error)
            if reason is None:
                # Raised here, it would be Ray Serve's, which says less of it.
                sys.stderr.write(redact_error(error))
                reason = ModelError(
                    "the model cannot be loaded, for a reason that finray does not know: "
                    f"{type(error).__name__}: {first_line(error)[:300]}",
                    where=settings.model,
                    repair="FINRAY_VERBOSE=1 shows where it failed; please report that",
                )
            self._error = reason.to_dict()

    def __serve_build_asgi_app__(self) -> Any:
        """The web application; Ray Serve asks for it under this name."""
        from starlette.applications import Starlette

        return Starlette() if self._server is None else self._server.app()

    async def state(self) -> dict[str, Any]:
        """Its readiness: names of the models, messages for the user, and the error if there is one."""
        names = [] if self._server is None else self._server.names()
        return {"names": names, "notes": self._notes, "error": self._error}

    async def drain(self, grace: float) -> bool:
        """See :meth:`finray.serving.server.ApiServer.drain`."""
        return self._server is None or bool(await self._server.drain(grace))


def require_packages() -> None:
    """Check that Ray Serve can be imported. Raises ConfigError: its packages are missing."""
    missing = [name for name in ("starlette", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Ray Serve needs packages that are not installed: {', '.join(missing)}",
            where="finray serve",
            repair="pip install 'finray[serve]'",
        )


def require_port(host: str, port: int) -> None:
    """Check that the address is free, before a model is loaded. Raises ConfigError: the address cannot be bound."""
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
    except (OSError, UnicodeError) as error:
        # A label of more than 63 characters is a UnicodeError of the codec `idna`.
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = (isinstance(error, OSError) and error.strerror) or "this is no address"
        raise ConfigError(
            "the address is already in use" if in_use else f"cannot listen there: {reason}",
            where=f"--host {host} --port {port}",
            repair="choose another port with --port" if in_use else "use an address of this machine",
        ) from None
