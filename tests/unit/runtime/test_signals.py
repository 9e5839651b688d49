"""Which signal ends what, and when."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from finray.runtime import signals
from finray.runtime.signals import Interrupted


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_raised_with_its_exit_code_and_the_handlers_are_put_back(signum: int, code: int) -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before = handlers()
    # Each command of a process counts anew.
    for _ in range(4):
        with pytest.raises(Interrupted) as caught, signals.owned(), signals.owned():
            os.kill(os.getpid(), signum)
        assert caught.value.exit_code == code
        assert handlers() == before


def test_another_thread_owns_nothing() -> None:
    def owned_there() -> object:
        with signals.owned():
            signals.take_back()
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(owned_there).result() == signal.getsignal(signal.SIGTERM)


def test_the_first_signal_waits_where_it_is_deferred_and_the_second_does_not() -> None:
    with signals.owned(), signals.deferred() as pending:
        os.kill(os.getpid(), signal.SIGTERM)
        assert pending.signum == signal.SIGTERM
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert caught.value.exit_code == 130


def test_what_a_library_set_is_taken_back_only_where_signals_are_owned() -> None:
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with signals.owned():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signals.take_back()
            with pytest.raises(Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.take_back()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, mine)


def test_a_process_that_hangs_on_its_way_out_ends_at_the_third() -> None:
    script = """
import os, signal, time
from finray.runtime import signals
with signals.owned():
    for _ in range(9):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            print("caught", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (143, ["caught", "caught"]), done.stderr


def test_a_signal_waits_until_what_sets_handlers_of_its_own_has_ended() -> None:
    begun = []

    def start() -> None:
        with signals.owned(), signals.held():
            # As Ray's core does in C++.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            begun.append(True)

    with pytest.raises(Interrupted) as caught:
        start()
    assert (caught.value.exit_code, begun) == (143, [True])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.parametrize(
    ("signum", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "ended by SIGTERM")]
)
@pytest.mark.parametrize("module", ["typer", "pydantic", "finray.config.schema"])
def test_a_signal_while_the_command_is_imported_is_one_line(signum: str, code: int, said: str, module: str) -> None:
    script = f"""
import os, signal, sys

class Signalled:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signum})

sys.meta_path.insert(0, Signalled())
from finray.cli.start import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script, "version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said + "\n")


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.owned():
            signals.take_back()
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_is_no_error_of_what_is_written_after_that() -> None:
    """The checkpoint is saved, and the command ends by itself; processes that it started before live on."""
    script = """
import os, signal, subprocess, sys, time
from finray.runtime import signals
with signals.owned(), signals.deferred() as pending:
    with signals.without_hangup():
        child = subprocess.Popen(["sleep", "600"])
    print("ready", flush=True)
    while pending.signum is None:
        time.sleep(0.01)
    print("saving a checkpoint", flush=True)
    alive = child.poll() is None
    child.kill()
    open(sys.argv[1], "w").write(f"{pending.signum} {alive}")
"""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        pid, terminal = pty.fork()
        if not pid:
            os.execv(sys.executable, [sys.executable, "-c", script, str(said)])
        while b"ready" not in os.read(terminal, 1000):
            pass
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert said.read_text() == f"{int(signal.SIGHUP)} True"
