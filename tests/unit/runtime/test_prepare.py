"""Ray tasks that help a preparation, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from finray.data.dataset.prepare import Preparation
from finray.runtime import prepare
from finray.runtime.prepare import Helpers


class Silent:
    """Stands for Ray: starts a task, of which nothing is heard."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, bool]] = []

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda *arguments: f"writes {arguments[-1]}")

    def wait(self, references: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        return [], references

    def cancel(self, reference: str, *, force: bool = False) -> None:
        self.cancelled.append((reference, force))


class Waiting:
    """Stands for a preparation that has handed out its last part."""

    config = SimpleNamespace(data=SimpleNamespace(converter=None), plain=dict)
    scratch, seconds_left, patience_s = "scratch", 0.0, -1.0

    def __init__(self) -> None:
        self.left, self.back = ["part 7"], list[str]()

    def wait(self, timeout: float, *, handle: Any) -> bool:
        return False

    def take(self) -> str | None:
        return self.left.pop() if self.left else None

    def take_back(self, part: str) -> None:
        self.back.append(part)

    def cancel(self) -> None: ...


def test_a_part_of_which_nothing_is_heard_is_written_here_and_its_process_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is stopped, or waits for a disk, does not end when it is asked to."""
    monkeypatch.setattr(prepare, "_is_worth_help", lambda preparation: True)
    monkeypatch.setattr(prepare, "_workers", lambda ray, config: 2)
    assert {"take", "take_back", "wait", "cancel"} <= set(dir(Preparation))
    ray, preparation = Silent(), Waiting()
    with Helpers(ray, preparation, env={}) as helpers:  # type: ignore[arg-type]
        assert not helpers.look(0)
        assert preparation.back == ["part 7"]
        assert ray.cancelled == [("writes part 7", True)]
        assert not helpers.look(0)
    assert preparation.back == ["part 7"]
    assert len(ray.cancelled) == 1
