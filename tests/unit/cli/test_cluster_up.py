"""What `finray cluster up` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finray.cli.cluster import app
from finray.runtime import nodes


@pytest.mark.parametrize(
    ("host", "options", "said"),
    [
        ("127.0.0.1", (), "http://127.0.0.1:8265,"),
        ("0.0.0.0", (), "http://10.0.0.7:8265,"),
        ("127.0.0.1", ("--", "--dashboard-port=8300"), "http://127.0.0.1:8300,"),
        ("127.0.0.1", ("--", "--dashboard-port", "8301", "--num-cpus", "2"), "http://127.0.0.1:8301,"),
    ],
)
def test_the_dashboard_and_the_file_with_its_token_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, options: tuple[str, ...], said: str
) -> None:
    token = tmp_path / "auth_token"
    token.write_text("its-content", encoding="utf-8")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    found = nodes.Running("10.0.0.7:6379", "10.0.0.7", is_head=True, processes=[], log="")
    monkeypatch.setattr(nodes, "up", lambda **_: (found, True))
    output = CliRunner().invoke(app, ["up", "--dashboard-host", host, *options]).output
    assert said in output
    assert str(token) in output.replace("\n", "")
    assert "its-content" not in output
    told = json.loads(CliRunner().invoke(app, ["up", "--json", "--dashboard-host", host, *options]).output)
    assert (told["auth_file"], told["auth_file_made"]) == (str(token), True)
