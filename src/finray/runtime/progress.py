"""Carries records from the workers to the driver's console, without a shared disk and without slowing a step.

``ray.train.report`` could carry them, but it is a barrier of all workers and takes up to a poll interval; a file would
need a shared disk. A worker does not wait for the mailbox. If it is lost, the console goes quiet, and training and
``metrics.jsonl`` continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from finray.records import Record

POLL_S = 0.5


class Mailbox:
    """A small actor that holds records until the driver takes them."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def put(self, record: Record) -> None:
        """Add a record."""
        self._records.append(record)

    def take(self) -> list[Record]:
        """All records since the last call."""
        records, self._records = self._records, []
        return records


def start_mailbox(ray: Any) -> Any:
    """The actor; it asks for no CPU, so it never competes with a worker."""
    return ray.remote(num_cpus=0)(Mailbox).remote()


class Listener:
    """Hands records to a function, in a thread, until closed.

    Args:
        ray: the connected Ray.
        mailbox: the actor.
        handle: called with each record.
    """

    def __init__(self, ray: Any, mailbox: Any, handle: Callable[[Record], None]) -> None:
        self._ray = ray
        self._mailbox = mailbox
        self._handle = handle
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="finray-listener", daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=10)
        self._drain()

    def _listen(self) -> None:
        while not self._stopped.wait(POLL_S):
            if not self._drain():
                return

    def _drain(self) -> bool:
        try:
            records = self._ray.get(self._mailbox.take.remote(), timeout=5)
        except self._ray.exceptions.RayError:
            # The console is a convenience; metrics.jsonl has every number.
            return False
        for record in records:
            self._handle(record)
        return True
