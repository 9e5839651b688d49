"""Limits of time and memory for code from outside, and of values in messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from finray import limits
from finray.errors import DataError
from finray.limits import arm, cut, shown, within


def _never_ending() -> None:
    while True:
        pass


def _stubborn() -> None:
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def _asleep() -> None:
    time.sleep(3600)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread looks often."""
    monkeypatch.setattr(limits, "_POLL_S", 0.01)
    monkeypatch.setattr(limits, "_AGAIN_S", 0.05)


def _late(function: Callable[[], Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught, within(0.05, lambda excess: DataError(f"over {excess}"), **options):
        function()
    return caught.value.message


@pytest.mark.parametrize("function", [_never_ending, _stubborn, _asleep])
def test_a_call_that_never_ends_is_ended_in_the_main_thread(function: Callable[[], None]) -> None:
    assert _late(function) == "over 0.05 seconds"


@pytest.mark.parametrize("function", [_never_ending, _stubborn])
def test_a_call_that_never_ends_is_ended_in_another_thread(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_late, function).result() == "over 0.05 seconds"
        # The thread is as good as before.
        assert pool.submit(sum, [1, 2]).result() == 3


def test_a_thread_that_hangs_in_c_is_left_behind_and_the_main_thread_is_told() -> None:
    arm()

    def hang() -> None:
        with within(0.05, lambda excess: DataError(f"over {excess}")):
            _asleep()

    threading.Thread(target=hang, daemon=True).start()
    with pytest.raises(DataError, match=r"over 0\.05 seconds"):
        threading.Event().wait(30)


def test_a_call_that_takes_too_much_memory_is_ended() -> None:
    def grow() -> None:
        held = []
        while True:
            held.append(b"x" * 1_000_000)
            time.sleep(0.002)

    with (
        pytest.raises(DataError, match=r"over 0\.0625 GiB of memory"),
        within(30, lambda excess: DataError(f"over {excess}"), memory=2**26),
    ):
        grow()


def test_what_ends_in_time_is_not_disturbed_and_its_own_errors_come_through() -> None:
    before = set(limits._WATCHED)
    for _ in range(1000):
        with within(30, lambda excess: DataError(excess)):
            pass
    with pytest.raises(KeyError), within(30, lambda excess: DataError(excess)):
        raise KeyError("mine")
    assert before == limits._WATCHED, "nothing may arrive later"


def test_a_value_in_a_message_is_cut_however_large_it_is() -> None:
    laughs: list[Any] = ["lol"]
    for _ in range(60):
        laughs = [laughs] * 9
    for value in (laughs, "x" * 10**7, 10**4000, {str(number): number for number in range(10**5)}):
        assert len(shown(value)) <= 200
    assert shown("short") == "'short'"
    assert cut("x" * 500).endswith("...")
