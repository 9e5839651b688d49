"""A wrong key ends a command before anything is prepared; a service that is down is a warning."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finray.config.schema import TrackingConfig
from finray.errors import ConfigError
from finray.tracking.access import require_access
from tests.support import ports, runs

KEY = "0123456789abcdef0123"


class Answers(BaseHTTPRequestHandler):
    """W&B and MLflow, as far as a key goes; ``server.says`` is the answer to one that is right."""

    def do_POST(self) -> None:
        server: Any = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        server.asked.append((self.path, self.headers.get("Authorization")))
        right = "Basic " + base64.b64encode(f"{server.user}:{KEY}".encode()).decode()
        is_right = self.headers.get("Authorization") in (right, f"Bearer {KEY}")
        status = server.status or (200 if is_right else 401)
        content = json.dumps(server.says).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.asked, made.status, made.user, made.says = [], None, "api", {"data": {"viewer": {"id": "me"}}}
    made.url = f"http://127.0.0.1:{made.server_port}"
    monkeypatch.setenv("WANDB_BASE_URL", made.url)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


WANDB = TrackingConfig(trackers=["wandb"])


def test_wandbs_key_is_asked_for_and_tried(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a key"):
        require_access(WANDB)
    assert server.asked == []
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login user password {KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert require_access(WANDB) == []
    monkeypatch.setenv("WANDB_API_KEY", "another-key-that-is-wrong")
    with pytest.raises(ConfigError, match="refuses the key") as caught:
        require_access(WANDB)
    assert "another-key" not in str(caught.value)
    # The service knows no user of this key, and says so in its own way.
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.says = {"data": {"viewer": None}}
    with pytest.raises(ConfigError, match="refuses the key"):
        require_access(WANDB)
    assert [path for path, _ in server.asked] == ["/graphql"] * 3


def test_wandbs_files_need_no_key(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert require_access(TrackingConfig(trackers=["wandb"], wandb_mode="offline")) == []
    for mode in ("offline", "dryrun", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert require_access(WANDB) == []
    assert server.asked == []
    # The config's own mode wins.
    with pytest.raises(ConfigError, match="needs a key"):
        require_access(TrackingConfig(trackers=["wandb"], wandb_mode="online"))


def test_mlflows_password_is_asked_for_and_tried(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tracking = TrackingConfig(trackers=["mlflow"], mlflow_uri=server.url)
    server.user = "me"
    with pytest.raises(ConfigError, match="needs a key"):
        require_access(tracking)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-password")
    with pytest.raises(ConfigError, match="refuses the key") as caught:
        require_access(tracking)
    assert "wrong-password" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", KEY)
    assert require_access(tracking) == []
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name)
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text(
        f"[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password = {KEY}\n"
    )
    assert require_access(tracking) == []


@pytest.mark.parametrize(
    ("name", "user"), [("MLFLOW_TRACKING_TOKEN", None), ("MLFLOW_TRACKING_PASSWORD", "me"), ("WANDB_API_KEY", "api")]
)
def test_a_key_that_ends_in_a_newline_is_accepted(
    server: Any, monkeypatch: pytest.MonkeyPatch, name: str, user: str | None
) -> None:
    """A mounted secret often does."""
    server.user = user
    if user == "me":
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me\n")
    monkeypatch.setenv(name, f"{KEY}\n")
    tracking = TrackingConfig(trackers=["mlflow"], mlflow_uri=server.url)
    assert require_access(WANDB if name == "WANDB_API_KEY" else tracking) == []
    # The service's own client reads it from there, and would refuse it.
    assert os.environ[name] == KEY


def test_a_key_that_no_header_can_hold_is_not_in_the_warning(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "first-half\nsecond-half")
    (said,) = require_access(TrackingConfig(trackers=["mlflow"], mlflow_uri=server.url))
    assert "cannot be reached" in said
    assert "half" not in said


def test_mlflow_needs_an_address(server: Any) -> None:
    with pytest.raises(ConfigError, match="needs an address"):
        require_access(TrackingConfig(trackers=["mlflow"]))


def test_an_address_with_a_password_is_refused() -> None:
    with pytest.raises(ValueError, match="holds a password"):
        TrackingConfig(mlflow_uri="http://me:secret@host:5000")


@pytest.mark.parametrize("status", [500, 429, None])
def test_a_service_that_is_down_is_a_warning(server: Any, monkeypatch: pytest.MonkeyPatch, status: int | None) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.status = status
    url = server.url
    with ports.reserved() as port:
        if status is None:
            url = f"http://127.0.0.1:{port}"
            monkeypatch.setenv("WANDB_BASE_URL", url)
        found = require_access(TrackingConfig(trackers=["wandb", "mlflow"], mlflow_uri=url))
    assert [one.split(" cannot")[0] for one in found] == ["the tracker wandb", "the tracker mlflow"]


def test_a_wrong_key_ends_the_command_before_data_are_prepared(
    server: Any, monkeypatch: pytest.MonkeyPatch, tiny_run: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("finray.planning.checks.find_spec", lambda name: object())
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-wrong-token")
    plain = tiny_run({"tracking.trackers": ["mlflow"], "tracking.mlflow_uri": server.url}, rows=4)
    code, _, err = runs.finray("train", runs.write_config(plain, tmp_path / "config.yaml"))
    assert code == 2
    assert "refuses the key" in err
    assert "a-wrong-token" not in err
    assert not Path(plain["run"]["output_dir"]).exists()
