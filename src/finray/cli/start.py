"""The entry point of the command: handles signals first, then imports the rest, which takes a second."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

# As in finray.runtime.signals, which takes too long to import first.
_MESSAGES = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP, because its terminal was closed",
}
_EXIT_CODES = tuple(128 + signum for signum in _MESSAGES)


def main() -> None:
    """Run the command; a signal before :func:`finray.cli.main.main` answers for them ends it with one line."""
    for signum in _MESSAGES:
        # `nohup` has SIGHUP ignored.
        if signal.getsignal(signum) is not signal.SIG_IGN or signum != signal.SIGHUP:
            signal.signal(signum, _end)
    from finray.runtime.preload import collect_seldom

    collect_seldom()
    from finray.cli.main import main as run

    try:
        run()
    except SystemExit as stop:
        if stop.code in _EXIT_CODES:
            # Everything is closed. A Ray whose start was interrupted would now and then crash in its destructors.
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(int(stop.code))
        raise


def _end(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    with suppress(OSError):
        os.write(2, f"{_MESSAGES[signal.Signals(signum)]}\n".encode())
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
