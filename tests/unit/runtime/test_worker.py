"""Where the workers of a run meet."""

from __future__ import annotations

from datetime import timedelta

import psutil
import pytest

from finray.runtime.heartbeat import beat_pause
from finray.runtime.worker import interface_of, listen, meet

TIMEOUT = timedelta(seconds=30)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_workers_store_listens_where_it_is_told_to_and_nowhere_else(host: str) -> None:
    listening = listen(host)
    address = listening.getsockname()[:2]
    store = meet(address, listening, world_size=1, timeout=TIMEOUT)
    meet(address, None, world_size=1, timeout=TIMEOUT).set("key", "value")
    assert store.get("key") == b"value"
    listens = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [one.ip for one in listens if one.port == address[1]] == [host]


def test_many_ranks_say_no_more_to_the_driver_than_eight() -> None:
    heard = {count: count / beat_pause(300.0, count) for count in (2, 8, 32)}
    assert heard[8] == heard[32]
    assert heard[2] < heard[8]
    # However many: five times before one is missed.
    assert beat_pause(300.0, 1024) == 60.0
    assert beat_pause(6.0, 1024) == 1.2


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    # Of nobody: documentation only.
    assert interface_of("192.0.2.1") is None
