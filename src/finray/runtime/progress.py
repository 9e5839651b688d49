"""Sends records from the workers to the driver's console; sends what depends on the data, and requests to stop, back.

It is a socket of the driver's, because an actor that buffers records is one more process to start, and
``ray.train.report`` is a barrier of all workers. No step waits for the driver: while it is unreachable, the console is
quiet, and training and ``metrics.jsonl`` continue. A broken connection is re-established.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

from finray.config.redact import redact_text
from finray.config.resolved import PreparedRun
from finray.errors import TrainingError
from finray.files import typed
from finray.records import Beat, EvalRecord, Note, Record, RunHeader, TrainRecord

_logger = logging.getLogger(__name__)
_KINDS = {kind.__name__: kind for kind in (Note, RunHeader, TrainRecord, EvalRecord, Beat)}
# What workers send.
Heard = Record | Beat
_PATIENCE_S = 5.0
_AGAIN_S = 1.0
# How long a worker may take to introduce itself after it has connected, how long one that ends tries to deliver its
# last records, and how long the driver reads what has arrived from workers that have ended. On a busy machine a thread
# may wait for seconds until it runs.
_INTRODUCE_S, _DELIVER_S, _DRAIN_S = 60.0, 30.0, 60.0
_WAITS, _RESIZES, _PROGRESS, _EVALUATES = "waits", "resizes", "progress", "evaluates"
# The last line of a rank that ends normally.
_BYE = "bye"
# Requests from the driver to the workers, one per line: save a checkpoint and end; save one and continue; save one and
# end so that another number of workers continues.
STOP, SAVE, RESIZE = "stop", "save", "resize"
_REQUEST_BYTES = 100


@dataclass(frozen=True, slots=True)
class Address:
    """Where the driver listens, and the line with which a worker introduces itself."""

    host: str
    port: int
    token: str


class Listener:
    """Passes the workers' records to a function, in threads, until closed.

    Args:
        host: address at which the workers reach this machine.
        handle: called with each record, by one thread at a time.
        resize: called with the number of workers that there is room for, when that has grown.
        progress: the step that the workers last started from.
        is_evaluating: whether an asynchronous evaluation is running.
    """

    def __init__(
        self,
        host: str,
        handle: Callable[[Heard], None],
        resize: Callable[[int], None] = lambda count: None,
        progress: Callable[[], int] = lambda: -1,
        is_evaluating: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._server.settimeout(_PATIENCE_S)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_hex(16))
        self._handle = handle
        self._resize, self._progress, self._is_evaluating = resize, progress, is_evaluating
        self._one_at_a_time = threading.Lock()
        self._stopping = False
        self._prepared: Future[PreparedRun] = Future()
        self._workers: list[socket.socket] = []
        self._workers_change = threading.Lock()
        self._readers: list[tuple[threading.Thread, socket.socket]] = []
        self._acceptor = threading.Thread(target=self._accept, name="finray-listener", daemon=True)
        # The acceptor ends when the first is closed; by then it has accepted every earlier connection.
        self._open, self._closed = socket.socketpair()

    def __enter__(self) -> Listener:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Nobody waits any more for data that were never prepared.
        self._prepared.cancel()
        self._open.close()
        self._acceptor.join()
        # The workers have ended, and their connections with them; a lost machine does not close its connection.
        self._join(_PATIENCE_S)
        for _reader, connection in self._readers:
            # What has arrived is still read.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        self._join(_DRAIN_S)

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for reader, _ in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    @property
    def is_prepared(self) -> bool:
        """Whether :meth:`set_prepared` was called."""
        return self._prepared.done()

    def set_prepared(self, prepared: PreparedRun) -> None:
        """Answer workers that call :func:`wait_for_data`, now and later."""
        self._prepared.set_result(prepared)

    @property
    def has_workers(self) -> bool:
        """Whether a worker is connected."""
        with self._workers_change:
            return bool(self._workers)

    def stop(self) -> None:
        """Ask all workers, also those that connect later, to save a checkpoint and end."""
        self._stopping = True
        self.ask(STOP)

    def ask(self, request: str) -> None:
        """Send the connected workers one of ``STOP``, ``SAVE``, ``RESIZE``."""
        with self._workers_change:
            for worker in self._workers:
                with suppress(OSError):
                    worker.sendall(f"{request}\n".encode())

    @contextmanager
    def _listening(self, worker: socket.socket) -> Iterator[None]:
        with self._workers_change:
            self._workers.append(worker)
            if self._stopping:
                worker.sendall(f"{STOP}\n".encode())
        try:
            yield
        finally:
            with self._workers_change:
                self._workers.remove(worker)

    def _accept(self) -> None:
        with self._server, self._closed, selectors.DefaultSelector() as selector:
            for end in (self._server, self._closed):
                selector.register(end, selectors.EVENT_READ)
            while self._server in [key.fileobj for key, _ in selector.select()]:
                try:
                    connection, _ = self._server.accept()
                except OSError:
                    # The peer closed before the accept.
                    continue
                reader = threading.Thread(target=self._read, args=(connection,), daemon=True)
                reader.start()
                self._readers.append((reader, connection))

    def _read(self, connection: socket.socket) -> None:
        last: Beat | None = None
        end = "lost"
        try:
            with connection, connection.makefile(encoding="utf-8") as lines:
                connection.settimeout(_INTRODUCE_S)
                token, _, asks = lines.readline(100).strip().partition(" ")
                if not secrets.compare_digest(token.encode(), self.address.token.encode()):
                    return
                connection.settimeout(None)
                if asks.startswith(_RESIZES):
                    self._resize(int(asks.removeprefix(_RESIZES)))
                    connection.sendall(b"heard\n")
                    return
                if asks in (_PROGRESS, _EVALUATES):
                    answer = self._progress() if asks == _PROGRESS else int(self._is_evaluating())
                    connection.sendall(f"{answer}\n".encode())
                    return
                if asks:
                    connection.sendall(f"{json.dumps(asdict(self._prepared.result()))}\n".encode())
                    return
                with self._listening(connection):
                    for line in lines:
                        if line.strip() == _BYE:
                            end = "gone"
                            return
                        plain = json.loads(line)
                        record = _KINDS[plain.pop("record")](**plain)
                        last = record if isinstance(record, Beat) else last
                        self._hand_over(record)
        except (OSError, ValueError, CancelledError):
            # Half a line of a killed worker, or a line of another program.
            return
        finally:
            if last is not None:
                self._hand_over(replace(last, phase=end))

    def _hand_over(self, record: Heard) -> None:
        # A record that cannot be shown (a closed console, for example) must not stop the driver from receiving others.
        with self._one_at_a_time:
            try:
                self._handle(record)
            except Exception as error:
                why = redact_text(str(error))
                _logger.warning("a record of the workers could not be shown: %s: %s", type(error).__name__, why)


def wait_for_data(address: Address) -> PreparedRun:
    """Wait until the driver has prepared the data and decided what depends on them.
    Raises TrainingError: the driver cannot be reached, or has ended."""
    try:
        return typed(json.loads(_answer(address, _WAITS, timeout_s=None)), PreparedRun)
    except (OSError, ValueError):
        raise TrainingError(
            "the driver ended before the data were prepared", repair="run the same command again"
        ) from None


def resize_to(address: Address, count: int) -> bool:
    """Tell the driver that there is room for this many workers; returns whether it received that."""
    try:
        return bool(_answer(address, f"{_RESIZES} {count}"))
    except (OSError, ValueError):
        return False


def progress_of(address: Address) -> int:
    """The step that the workers last started from, according to the driver; -1 if it cannot be asked."""
    try:
        return int(_answer(address, _PROGRESS))
    except (OSError, ValueError):
        return -1


def is_evaluating(address: Address) -> bool:
    """Whether an asynchronous evaluation is running, according to the driver; False if it cannot be asked."""
    try:
        return bool(int(_answer(address, _EVALUATES)))
    except (OSError, ValueError):
        return False


def is_gone(address: Address) -> bool:
    """Whether the driver's process has ended, asked on its machine. One that is busy or stopped has not."""
    try:
        socket.create_connection((address.host, address.port), _PATIENCE_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _answer(address: Address, question: str, *, timeout_s: float | None = _PATIENCE_S) -> str:
    """The driver's answer, one line; empty if it ends the connection."""
    with socket.create_connection((address.host, address.port), _PATIENCE_S) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(f"{address.token} {question}\n".encode())
        with connection.makefile(encoding="utf-8") as lines:
            return lines.readline()


class Sender:
    """Sends records to the driver, in a thread that the first record starts; receives the driver's requests.

    A rank that sends nothing receives nothing.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._records: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._has_given_up = threading.Event()

    @property
    def is_closed(self) -> bool:
        """Whether sending has ended."""
        return self._closed.is_set()

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until it is closed, or the timeout is over."""
        self._closed.wait(timeout_s)

    def has_request(self) -> bool:
        """Whether the driver has sent a request that was not taken yet."""
        return not self._requests.empty()

    def take_request(self) -> str:
        """The driver's request, once; the empty string if there is none. ``STOP`` comes first."""
        requests = []
        with suppress(queue.Empty):
            while True:
                requests.append(self._requests.get_nowait())
        return STOP if STOP in requests else requests[-1] if requests else ""

    def put(self, record: Heard) -> None:
        """Send a record; returns at once."""
        self._records.put(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="finray-sender", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Deliver pending records; gives up after a timeout, or when the driver's process has ended."""
        self._closed.set()
        self._records.put(None)
        if self._thread is not None:
            self._thread.join(_DELIVER_S)
            self._has_given_up.set()

    def _send(self) -> None:
        line = ""
        while True:
            try:
                with socket.create_connection((self._address.host, self._address.port), _PATIENCE_S) as connection:
                    connection.settimeout(None)
                    connection.sendall(f"{self._address.token}\n".encode())
                    threading.Thread(target=self._receive, args=(connection,), daemon=True).start()
                    while True:
                        if not line:
                            record = self._records.get()
                            named = {} if record is None else {"record": type(record).__name__, **asdict(record)}
                            line = json.dumps(named) if named else _BYE
                        connection.sendall(f"{line}\n".encode())
                        if line == _BYE:
                            break
                        line = ""
                    # Closing alone would wait for the receiving thread.
                    connection.shutdown(socket.SHUT_RDWR)
                    return
            except OSError as error:
                is_over = isinstance(error, ConnectionRefusedError) or line == _BYE
                if self._closed.wait(_AGAIN_S) and (is_over or self._has_given_up.wait(_AGAIN_S)):
                    return

    def _receive(self, connection: socket.socket) -> None:
        with suppress(OSError), connection.makefile("rb") as lines:
            while line := lines.readline(_REQUEST_BYTES):
                self._requests.put(line.decode().strip())
        # Data sent into a connection that the peer has closed is lost silently.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
