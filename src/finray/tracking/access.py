"""Checks within seconds whether the trackers accept the keys, before anything is prepared."""

from __future__ import annotations

import base64
import configparser
import http.client
import json
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from finray.config.environment import trim_secrets
from finray.config.redact import redact_text
from finray.config.schema import TrackingConfig
from finray.errors import ConfigError, FinrayError
from finray.tracking import mlflow, wandb

# Timeout of a request to a service, in seconds.
TIMEOUT_S = 10.0


def require_access(tracking: TrackingConfig) -> list[str]:
    """Ask each service of a config once; returns warnings, because a service may be down for a while.

    White space around keys is taken off in the environment, where the clients of the services read them. Raises
    ConfigError: a key or an address is missing or wrong.
    """
    trim_secrets()
    warnings = []
    for name in tracking.trackers:
        if name in _CHECKS:
            try:
                _CHECKS[name](tracking)
            except FinrayError:
                raise
            except ImportError:
                # That its package is missing is said elsewhere, with what to install.
                continue
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                warnings.append(
                    f"the tracker {name} cannot be reached ({redact_text(str(reason))}); metrics.jsonl has every "
                    f"record; missing ones are sent when it answers"
                )
    return warnings


def _wandb(tracking: TrackingConfig) -> None:
    if wandb.mode_of(tracking.model_dump()) != "online":
        return
    where = "tracking.trackers: wandb"
    offline = "tracking.wandb_mode=offline needs no key"
    address = wandb.address()
    # `wandb login` writes one of these.
    key = os.environ.get(wandb.KEY) or _in_netrc(urlsplit(address).hostname or "") or _in_netrc("api.wandb.ai")
    if not key:
        if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return
        raise ConfigError(
            "Weights & Biases needs a key", where=where, repair=f"run `wandb login`, or set {wandb.KEY}; {offline}"
        )
    query = json.dumps({"query": "query Viewer { viewer { id } }"}).encode()
    headers = {"Content-Type": "application/json", **_basic("api", key)}
    answer = _post(f"{address}/graphql", query, headers)
    if answer is None or (isinstance(answer, dict) and (answer.get("data") or {}).get("viewer", "?") is None):
        raise ConfigError(
            f"{address} refuses the key",
            where=where,
            repair=f"run `wandb login --relogin`, or correct {wandb.KEY}; {offline}",
        )


def _mlflow(tracking: TrackingConfig) -> None:
    address = mlflow.address_of(tracking.model_dump())
    if not address.startswith(("http://", "https://")):
        # A directory, a database, or a service whose client has its own credentials.
        return
    user, password, token = (_of_mlflow(name) for name in ("username", "password", "token"))
    headers = _basic(user, password) if user and password else {"Authorization": f"Bearer {token}"} if token else {}
    query = json.dumps({"max_results": 1}).encode()
    url = f"{address.rstrip('/')}/api/2.0/mlflow/experiments/search"
    if _post(url, query, {"Content-Type": "application/json", **headers}) is None:
        raise ConfigError(
            f"{redact_text(address)} {'refuses the key' if headers else 'needs a key'}",
            where="tracking.trackers: mlflow",
            repair="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )


_CHECKS: Mapping[str, Callable[[TrackingConfig], None]] = {"wandb": _wandb, "mlflow": _mlflow}


def _post(url: str, content: bytes, headers: dict[str, str]) -> object:
    """The JSON answer to a POST; None if the key is refused."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return None
        raise
    except http.client.HTTPException as error:
        raise OSError(f"the server does not answer as expected: {error}") from None
    except ValueError as error:
        # Its text may quote the key: no header can hold every text.
        raise OSError(f"the key cannot be sent, or the answer is not JSON: {type(error).__name__}") from None


def _basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _in_netrc(host: str) -> str | None:
    """The password for a host in the user's netrc, where `wandb login` puts the key."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entry = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return entry[2] if entry else None


def _of_mlflow(name: str) -> str | None:
    """A credential, looked up as MLflow does: in the environment, else in its file."""
    files = configparser.ConfigParser(interpolation=None)
    try:
        files.read(Path("~/.mlflow/credentials").expanduser())
    except (OSError, ValueError, configparser.Error):
        return os.environ.get(f"MLFLOW_TRACKING_{name.upper()}")
    value = files.get("mlflow", f"mlflow_tracking_{name}", fallback=None)
    return os.environ.get(f"MLFLOW_TRACKING_{name.upper()}") or value
