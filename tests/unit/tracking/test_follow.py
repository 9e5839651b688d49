"""A service gets every record once: when it is down, when it hangs, and when either side is killed."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finray.errors import ConfigError, TrainingError
from finray.tracking.follow import BATCH, Cursor, Cursors, Followed, Sending, Service, ServiceFollower
from finray.tracking.wandb import as_far_as

# Far more than anything here takes; nothing waits for it where all is well.
LIMIT_S = 120.0


class Recording(Service):
    """A service in memory. ``fails`` says what happens to the n-th call of ``send``, from 0."""

    def __init__(self, fails: Callable[[int], Exception | None] = lambda call: None, where: str = "here") -> None:
        self.fails, self.address = fails, where
        self.got: list[tuple[str, int]] = []
        self.calls = 0
        self.opened: list[Cursor | None] = []
        self.closed: list[bool] = []
        self.totals: list[dict[str, float]] = []
        self.arrived = threading.Condition()

    def where(self, run: Followed) -> str:
        return self.address

    def open(self, run: Followed, known: Cursor | None) -> Cursor:
        self.opened.append(known)
        return known or Cursor(self.address, f"its-{run.run_id}")

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        call, self.calls = self.calls, self.calls + 1
        with self.arrived:
            self.arrived.notify_all()
            if (error := self.fails(call)) is not None:
                raise error
            self.got += [(one["kind"], one["step"]) for one in records]

    def close(self, *, complete: bool, totals: Mapping[str, float]) -> None:
        self.closed.append(complete)
        self.totals.append(dict(totals))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(condition, LIMIT_S)


def followed(folder: Path) -> Followed:
    return Followed("id", folder, {"run": {"name": "r"}, "tracking": {}})


def write(folder: Path, *records: tuple[str, int], mode: str = "a") -> None:
    with (folder / "metrics.jsonl").open(mode) as stream:
        for kind, step in records:
            record = {"kind": kind, "step": step, "loss": 1 / (step + 1), "supervised": step, "time": 1000.0 + step}
            stream.write(json.dumps(record) + "\n")


def train(*steps: int) -> list[tuple[str, int]]:
    return [("train", step) for step in steps]


@contextmanager
def following(service: Service, folder: Path, **options: Any) -> Iterator[ServiceFollower]:
    follower = ServiceFollower(
        Sending("svc", service, followed(folder)), **{"every_s": 0.01, "most_s": 0.05, **options}
    )
    try:
        yield follower
    finally:
        follower.end(complete=False, patience_s=LIMIT_S)
        follower.join()


def test_a_run_that_grows_is_sent_as_it_grows_and_to_its_end(tmp_path: Path) -> None:
    service = Recording()
    write(tmp_path, *train(1, 2))
    with following(service, tmp_path) as follower:
        service.wait_for(lambda: len(service.got) == 2)
        write(tmp_path, ("eval", 2), ("note", 2), ("train", 3))
        follower.end(complete=True, patience_s=LIMIT_S)
        follower.join()
        assert follower.warning() is None
    assert service.got == [*train(1, 2), ("eval", 2), ("train", 3)]
    assert service.closed == [True]
    # Its steps have as many targets as their number.
    mean = (1 * 1 / 2 + 2 * 1 / 3 + 3 * 1 / 4) / (1 + 2 + 3)
    assert service.totals == [{"train/mean_loss": pytest.approx(mean)}]


def test_steps_that_a_resume_does_again_are_not_sent_again(tmp_path: Path) -> None:
    first, second = Recording(), Recording()
    write(tmp_path, *train(1, 2), ("eval", 2), *train(3, 4), ("eval", 4))
    with following(first, tmp_path):
        pass
    # From step 2: what came after it is dropped from the file, and done again.
    write(tmp_path, *train(1, 2), ("eval", 2), *train(3, 4), ("eval", 4), *train(5), mode="w")
    with following(second, tmp_path):
        pass
    assert second.got == train(5)
    # It is the same run there.
    assert second.opened[0] is not None
    assert second.opened[0].run == "its-id"


def test_a_key_is_masked_where_the_error_that_quotes_it_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", key := "eyJ" * 200)
    service = Recording(lambda call: ValueError(f"Invalid header: {key}") if call == 0 else None)
    write(tmp_path, *train(1))
    with following(service, tmp_path) as follower:
        service.wait_for(lambda: len(service.got) == 1)
        said = follower.warning()
    assert said is not None
    assert "ValueError: Invalid header: ***" in said
    assert "eyJ" not in said


def test_a_service_that_was_down_gets_what_it_missed_and_is_named_once(tmp_path: Path) -> None:
    service = Recording(lambda call: ConnectionError("nobody listens") if call < 4 else None)
    write(tmp_path, *train(1))
    with following(service, tmp_path) as follower:
        service.wait_for(lambda: service.calls > 2)
        write(tmp_path, *train(2, 3))
        service.wait_for(lambda: len(service.got) == 3)
        said = follower.warning()
        assert said is not None
        assert "the tracker svc cannot be reached: ConnectionError: nobody listens" in said
        assert f"finray sync {tmp_path}" in said
        assert follower.warning() is None
    assert service.got == train(1, 2, 3)


def test_a_full_disk_is_not_called_a_service_that_cannot_be_reached_and_nothing_is_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, tries, keep = Recording(), list[int](), Cursors.keep

    def full_at_first(cursors: Cursors, cursor: Cursor) -> None:
        tries.append(cursor.train)
        if 1 < len(tries) < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(cursors, cursor)

    monkeypatch.setattr(Cursors, "keep", full_at_first)
    write(tmp_path, *train(1, 2))
    with following(service, tmp_path) as follower:
        service.wait_for(lambda: len(service.got) == 2)
        follower.end(complete=False, patience_s=LIMIT_S)
        follower.join()
        said = follower.warning() or ""
    assert f"cannot be written down in {tmp_path / 'sent-svc.json'}: no space left on device" in said
    assert "cannot be reached" not in said
    assert (service.got, tries) == (train(1, 2), [0, 2, 2, 2])
    (cursor,) = Cursors(tmp_path, "svc").all()
    assert cursor.train == 2


def test_one_that_refuses_for_good_is_not_asked_again(tmp_path: Path) -> None:
    service = Recording(lambda call: ConfigError("there is no such project"))
    write(tmp_path, *train(1))
    with following(service, tmp_path) as follower:
        follower.end(complete=True, patience_s=LIMIT_S)
        follower.join()
        assert "there is no such project" in (follower.warning() or "")
    assert service.calls == 1


def test_one_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    answer = threading.Event()

    class Hanging(Recording):
        def send(self, records: Sequence[Mapping[str, Any]]) -> None:
            super().send(records)
            answer.wait(LIMIT_S)

    service = Hanging()
    write(tmp_path, *train(1))
    follower = ServiceFollower(Sending("svc", service, followed(tmp_path)), every_s=0.01)
    try:
        service.wait_for(lambda: service.calls > 0)
        follower.end(complete=True, patience_s=0.2)
        # The thread is at work for as long as the service likes; nobody waits for it.
        follower.join()
        assert not service.closed
        assert "did not accept the last records in time" in (follower.warning() or "")
    finally:
        answer.set()


def test_two_processes_do_not_send_one_run_at_a_time(tmp_path: Path) -> None:
    write(tmp_path, *train(1))
    sending = Sending("svc", Recording(), followed(tmp_path))
    with sending.lock().acquire(timeout=0):
        other = Recording()
        with following(other, tmp_path) as follower:
            follower.end(complete=False, patience_s=LIMIT_S)
            follower.join()
            assert "is already being sent this run by another process" in (follower.warning() or "")
        assert other.got == []


def test_each_address_has_a_cursor_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, *train(1))
    for where in ("here", "there", "here"):
        service = Recording(where=where)
        Sending("svc", service, followed(tmp_path)).catch_up()
    assert service.got == []
    assert sorted(one.where for one in Cursors(tmp_path, "svc").all()) == ["here", "there"]


def test_a_cursor_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path, *train(1))
    Cursors(tmp_path, "svc").path.write_text('[{"where": 3}]')
    with pytest.raises(TrainingError) as caught:
        Sending("svc", Recording(), followed(tmp_path)).catch_up()
    assert "delete the file" in str(caught.value)


@given(
    records=st.lists(st.tuples(st.sampled_from(["train", "eval", "note"]), st.integers(0, 400)), max_size=4 * BATCH),
    kills=st.lists(st.integers(0, 5), max_size=4),
)
def test_wherever_the_service_fails_each_record_is_sent_once_and_in_order(
    records: list[tuple[str, int]], kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    steps = iter(range(1, 1000))
    # Steps of the training grow; evaluations have one record for a step, in any order.
    written = [("train", next(steps)) if kind == "train" else (kind, step) for kind, step in dict.fromkeys(records)]
    write(folder, *written)
    wanted = [one for one in written if one[0] != "note"]
    got: list[tuple[str, int]] = []
    for kill in [*kills, None]:
        service = Recording(lambda call, kill=kill: None if kill is None or call < kill else KeyError("killed"))
        with suppress(KeyError):
            Sending("svc", service, followed(folder)).catch_up()
        got += service.got
    # The cursor is written after each batch, so a kill between two loses and repeats nothing.
    assert got == wanted


def test_wandb_is_sent_what_it_lacks_and_not_what_the_cursor_says() -> None:
    known = Cursor("w", "r", train=9, evaluated=[0, 8, 4], system=99.0)
    # Its process was killed with rows that it had not handed over.
    assert as_far_as(known, 7, 8, 50.0) == Cursor("w", "r", 7, [0, 8], 50.0)
    assert as_far_as(known, None, None, None) == Cursor("w", "r")
    # The cursor is an older one.
    assert as_far_as(known, 12, 10, 120.0) == Cursor("w", "r", 12, [0, 8, 4, 10], 120.0)
