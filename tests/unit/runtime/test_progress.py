"""Records come from the workers to the driver as they were, and neither waits for the other."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from finray.config.resolved import PreparedRun, Resolved
from finray.errors import StorageError, TrainingError
from finray.records import Beat, EvalRecord, Note, Record, RunHeader, TrainRecord
from finray.runtime import progress
from finray.runtime.progress import STOP, Listener, Sender, wait_for_data


def filled(kind: type) -> Record:
    return kind(**{field.name: number for number, field in enumerate(fields(kind))})  # type: ignore[no-any-return]


RECORDS = [
    Note("a line\nand another"),
    Note("look", 3, "warning"),
    filled(RunHeader),
    filled(TrainRecord),
    replace(filled(TrainRecord), loss=float("inf"), samples=None),
    EvalRecord(3, {"eval_loss": 0.1}, 2, 0.5, [[3, 1], [0, 2]]),
]


def test_records_of_every_kind_arrive_unchanged_and_in_order() -> None:
    heard: list[Record] = []
    with Listener("127.0.0.1", heard.append) as listener:
        for part in (RECORDS[:3], RECORDS[3:]):
            # The second stands for a worker that was started again.
            sender = Sender(listener.address)
            for record in part:
                sender.put(record)
            sender.close()
            while len(heard) < len(part):
                time.sleep(0.01)
    assert heard == RECORDS


PREPARED = PreparedRun(
    "s3://data/é", Resolved("bf16", 4, None, True, "fsdp", use_gpu=True, liger=True, global_batch_size=7, epochs=2.5)
)


def test_workers_that_ask_wait_until_the_data_are_prepared_and_those_after_it_do_not() -> None:
    with Listener("127.0.0.1", lambda record: None) as listener, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait_for_data, listener.address) for _ in range(2)]
        assert not wait(waiting, timeout=0.3).done
        listener.set_prepared(PREPARED)
        assert [one.result(10) for one in waiting] == [PREPARED, PREPARED]
        assert wait_for_data(listener.address) == PREPARED
        with pytest.raises(TrainingError):
            wait_for_data(replace(listener.address, token="another"))


def test_a_worker_that_waits_hears_that_the_driver_has_given_up() -> None:
    with ThreadPoolExecutor(1) as pool:
        with Listener("127.0.0.1", lambda record: None) as listener:
            waiting = pool.submit(wait_for_data, listener.address)
            assert not wait([waiting], timeout=0.3).done
        with pytest.raises(TrainingError, match="before the data were prepared"):
            waiting.result(10)
    with pytest.raises(TrainingError, match="before the data were prepared"):
        wait_for_data(listener.address)


def test_a_connection_without_the_token_is_not_heard() -> None:
    heard: list[Record] = []
    with Listener("127.0.0.1", heard.append) as listener:
        sender = Sender(replace(listener.address, token="another"))
        sender.put(Note("false"))
        sender.close()
        with socket.create_connection((listener.address.host, listener.address.port)) as silent:
            silent.sendall(json.dumps({"record": "Note", "message": "false"}).encode())
        sender = Sender(listener.address)
        sender.put(Note("true"))
        sender.close()
    assert heard == [Note("true")]


def test_a_sender_goes_on_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    # If it waited for somebody, the test would not end.
    monkeypatch.setattr("finray.runtime.progress._DELIVER_S", 10_000.0)
    with Listener("127.0.0.1", lambda record: None) as listener:
        pass
    sender = Sender(listener.address)
    for _ in range(1000):
        sender.put(Note("lost"))
    sender.close()


def until(what: Callable[[], object]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


BEAT = Beat("a", 1, "h", 7, "n", 3)


def test_a_connection_that_breaks_is_made_again_and_wishes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AGAIN_S", 0.01)
    heard: list[object] = []
    with Listener("127.0.0.1", heard.append) as listener:
        sender = Sender(listener.address)
        sender.put(BEAT)
        until(lambda: listener.has_workers and BEAT in heard)
        for one in list(listener._workers):
            one.shutdown(socket.SHUT_RDWR)
        until(lambda: replace(BEAT, phase="lost") in heard)
        later = replace(BEAT, step=4)
        until(lambda: sender.put(later) or later in heard)  # type: ignore[func-returns-value]
        listener.stop()
        assert wish_of(sender) == STOP
        sender.close()
    # It ended in order.
    assert heard[-1] == replace(later, phase="gone")


@pytest.mark.parametrize("patience_s", [0.05, 60.0])
def test_a_worker_that_runs_late_and_ends_at_once_loses_no_record(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the thread that sends may wait for seconds between its connection and its first line: the
    driver waits for it, and where it has given up meanwhile, the worker connects again."""
    monkeypatch.setattr(progress, "_INTRODUCE_S", patience_s)
    monkeypatch.setattr(progress, "_AGAIN_S", 0.01)
    connect, late = socket.create_connection, iter([0.5])

    def connect_late(*arguments: Any) -> socket.socket:
        connection = connect(*arguments)
        time.sleep(next(late, 0))
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_late)
    heard: list[Record] = []
    with Listener("127.0.0.1", heard.append) as listener:
        sender = Sender(listener.address)
        for record in RECORDS:
            sender.put(record)
        sender.close()
    assert heard == RECORDS


def test_what_has_arrived_is_read_after_the_workers_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is slow; and one connection is that of a lost machine, which did not close it."""
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.05)
    heard: list[Record] = []

    def handle(record: Record) -> None:
        time.sleep(0.05)
        heard.append(record)

    with Listener("127.0.0.1", handle) as listener:
        lost = socket.create_connection((listener.address.host, listener.address.port))
        lost.sendall(f"{listener.address.token}\n".encode())
        sender = Sender(listener.address)
        for record in RECORDS:
            sender.put(record)
        sender.close()
    assert heard == RECORDS
    lost.close()


def test_a_process_that_was_killed_is_lost_and_one_that_ends_in_order_is_gone() -> None:
    heard: list[object] = []
    with Listener("127.0.0.1", heard.append) as listener:
        killed = socket.create_connection((listener.address.host, listener.address.port))
        line = json.dumps({"record": "Beat", **asdict(BEAT)})
        killed.sendall(f"{listener.address.token}\n{line}\n".encode())
        until(lambda: heard)
        killed.close()
    assert heard == [BEAT, replace(BEAT, phase="lost")]


def test_a_record_that_cannot_be_shown_takes_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[object] = []

    def handle(record: object) -> None:
        heard.append(record)
        if record == Note("first"):
            raise StorageError("the storage failed")

    with Listener("127.0.0.1", handle) as listener:
        sender = Sender(listener.address)
        sender.put(Note("first"))
        sender.put(Note("second"))
        until(lambda: len(heard) == 2)
        listener.stop()
        assert wish_of(sender) == STOP
        sender.close()
    assert "could not be shown: StorageError: the storage failed" in caplog.text


def wish_of(sender: Sender) -> str:
    """What a sender is asked for, once it is."""
    deadline = time.monotonic() + 60
    while not sender.has_request():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return sender.take_request()


def test_a_wish_to_stop_reaches_the_workers_that_are_connected_and_those_that_come_later() -> None:
    with Listener("127.0.0.1", lambda record: None) as listener:
        first, later, silent = Sender(listener.address), Sender(listener.address), Sender(listener.address)
        first.put(Note("here"))
        listener.stop()
        later.put(Note("here"))
        assert wish_of(first) == wish_of(later) == STOP
        assert not silent.has_request()
        first.close()
        later.close()
