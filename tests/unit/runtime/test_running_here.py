"""A Ray head on this machine that nobody has named."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from finray.runtime.cluster import running_here


def test_only_a_head_that_listens_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert running_here() is None
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file.write_text(address, encoding="utf-8")
        assert running_here() == address
    assert running_here() is None
    file.write_text("no address", encoding="utf-8")
    assert running_here() is None
