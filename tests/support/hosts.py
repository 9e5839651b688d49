"""Hosts on one machine: each with an address, a `/tmp`, a `/dev/shm`, a name and processes of its own.

A host is one process, the init process of a PID namespace, which holds a network namespace and a mount namespace too.
All processes of a host end when that one ends, however it ends; what they had mounted and connected goes with them. The
init processes read a pipe of whoever made them and end with it, so that nothing is left behind by a kill either. This
machine's own network and mounts stay as they are.

The hosts hang on a bridge, which is in a network namespace of its own:

    this machine │ switch 10.77.0.1 (bridge, S3) ─┬─ h1 10.77.0.11
                 │                                ├─ h2 10.77.0.12
                 │                                └─ h3 10.77.0.13

Files are those of this machine, but for `/tmp`, `/dev/shm` and `/etc/hosts`; :attr:`Bed.shared` is a directory that all
hosts see, `/tmp/home` the home directory that each has to itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

from tests.support import s3

ROOT = Path(__file__).parents[2]
SWITCH = "10.77.0.1"
HOME = "/tmp/home"
# What a command says of a storage that was silent.
_SILENT = re.compile("error: (s3|https?)://.* gave no answer")
# What a host does not have from whoever made it.
_NOT_INHERITED = ("RAY_", "AWS_", "FINRAY_", "PYTEST_", "XDG_")
_NOT_INHERITED += ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")

# The init process of a host: it mounts what is the host's own, says so, reaps, and ends with its standard input. What
# is to be seen below the new /tmp (a checkout may lie there) is mounted from the old one, through an open directory.
_INIT = """
import os, select, signal, socket, subprocess, sys
name, size, *kept = sys.argv[1:]
socket.sethostname(name)
old = os.open("/tmp", os.O_RDONLY)
run = lambda *words: subprocess.run(words, check=True, pass_fds=[old])
run("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", "/tmp")
run("mount", "-t", "tmpfs", "-o", "size=4g,mode=1777", "tmpfs", "/dev/shm")
for path in kept:
    os.makedirs(path, exist_ok=True)
    inside = os.path.relpath(path, "/tmp")
    run("mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{old}/{inside}", path)
os.close(old)
os.makedirs("/tmp/home", mode=0o700)
with open("/tmp/home/.hosts", "w") as stream:
    # As Debian has it: a host's own name is no address that others reach.
    stream.write(f"127.0.0.1 localhost\\n127.0.1.1 {name}\\n")
    stream.writelines(f"10.77.0.{10 + n} h{n}\\n" for n in range(1, 60) if f"h{n}" != name)
run("mount", "--bind", "/tmp/home/.hosts", "/etc/hosts")
signal.signal(signal.SIGCHLD, lambda *_: None)
wake_read, wake_write = os.pipe()
os.set_blocking(wake_write, False)
signal.set_wakeup_fd(wake_write)
print("ready", flush=True)
while True:
    ready = select.select([0, wake_read], [], [])[0]
    if 0 in ready and not os.read(0, 4096):
        sys.exit()
    if wake_read in ready:
        os.read(wake_read, 4096)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
"""


def missing() -> str | None:
    """Why there can be no hosts on this machine; None where there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("ip", "unshare", "nsenter", "setpriv", "mount") if shutil.which(name) is None]
    if lacking:
        return f"there is no {', '.join(lacking)}: as root on Debian, INSTALL=1 .ci/hosts"
    words = "unshare --net --mount --pid --fork --mount-proc ip link add br0 type bridge"
    tried = subprocess.run(words.split(), capture_output=True, text=True)
    return f"no namespace can be made: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Host:
    """One host.

    Attributes:
        name: of the host, which other hosts know it by.
        ip: its address on the bridge.
        bed: where it stands.
        env: variables of its commands, beside those of this process.
        started: commands that were started on it, and may have ended.
    """

    name: str
    ip: str
    bed: Bed
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    _init: subprocess.Popen[str] | None = None
    pid: int = 0

    def boot(self) -> None:
        """Turn it on: no processes, an empty `/tmp`, the cable plugged in."""
        assert self._init is None, f"{self.name} is on"
        self._init, self.pid = _start_init(self.name, "4g", self.bed.kept)
        cable = f"c-{self.name}"
        self.bed.ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        self.bed.ip("link", "set", cable, "master", "br0", "up")
        for words in ("link set lo up", f"addr add {self.ip}/24 dev eth0", "link set eth0 up"):
            _ip(self.pid, *words.split())
        _ip(self.pid, "route", "add", "default", "via", SWITCH)

    @property
    def is_on(self) -> bool:
        return self._init is not None

    def kill(self) -> None:
        """Pull the power plug; every process of the host is gone when this returns."""
        if self._init is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._init.communicate()
        self._init = None
        for process in self.started:
            process.kill()
            process.wait()
        self.started.clear()
        # The kernel does so by itself, but only once nothing is left that the host's connections have still to send.
        with suppress(AssertionError):
            self.bed.ip("link", "delete", f"c-{self.name}")

    def cut(self) -> None:
        """Pull the network cable."""
        self.bed.ip("link", "set", f"c-{self.name}", "down")

    def heal(self) -> None:
        """Plug it in again."""
        self.bed.ip("link", "set", f"c-{self.name}", "up")

    def cut_from(self, others: Sequence[Host]) -> None:
        """Let nothing that it sends reach some hosts; the switch, and the S3 server there, it still reaches."""
        for one in others:
            _ip(self.pid, "route", "add", "blackhole", f"{one.ip}/32")

    def reach(self, others: Sequence[Host]) -> None:
        """Undo :meth:`cut_from`."""
        for one in others:
            _ip(self.pid, "route", "delete", "blackhole", f"{one.ip}/32")

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """Without a network within the block."""
        self.cut()
        try:
            yield
        finally:
            self.heal()

    def start(
        self,
        *words: object,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command on the host. It ends with the host; :meth:`signal` reaches it, and `Popen.kill` does too."""
        assert self._init is not None, f"{self.name} is off"
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts", "--ipc"]
        enter += ["--", "env", f"--chdir={cwd or HOME}", "setpriv", "--pdeathsig", "KILL", "--"]
        process = subprocess.Popen(
            [*enter, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=self.environment(env),
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """The variables of its commands."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        all_: dict[str, str | None] = {**inherited, "HOME": HOME, "PYTHONPATH": _pythonpath(), **self.bed.env}
        all_ |= {**self.env, **(changes or {})}
        return {name: value for name, value in all_.items() if value is not None}

    def run(
        self,
        *words: object,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 300,
    ) -> Done:
        """Run a command on the host to its end."""
        # Files and no pipes: what a command leaves running would keep a pipe open.
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            process = self.start(*words, env=env, cwd=cwd, stdout=out, stderr=err)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            out.seek(0)
            err.seek(0)
            texts = out.read(), err.read()
            if process.poll() is None:
                process.kill()
                raise AssertionError(f"{self.name}: {words} ran for more than {timeout:g} s\n{texts[0]}\n{texts[1]}")
            return Done(process.returncode, *texts)

    def check(self, *words: object, **options: Any) -> str:
        """The same of a command that must succeed; its standard output."""
        done = self.run(*words, **options)
        assert done.code == 0, f"{self.name}: {words} ended with {done.code}\n{done.out}\n{done.err}"
        return done.out

    def finray(self, *words: object, **options: Any) -> Done:
        """`finray ...` on the host, to its end."""
        return self.run(sys.executable, "-m", "finray", *words, **options)

    def start_finray(self, *words: object, **options: Any) -> subprocess.Popen[str]:
        """`finray ...` on the host."""
        return self.start(sys.executable, "-m", "finray", *words, **options)

    def signal(self, started: subprocess.Popen[str], signum: int) -> None:
        """Send a signal to a command that was started on the host. (Its parent, which enters, would not hand it on.)"""
        for child in psutil.Process(started.pid).children():
            child.send_signal(signum)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """What runs on the host, but for its init process, and has this in its command line; as seen from outside."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                is_here = _pid_space(process.pid) == _pid_space(self.pid) and process.pid != self.pid
                if is_here and process.status() != psutil.STATUS_ZOMBIE and name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def read(self, path: str) -> bytes:
        """A file as the host sees it."""
        return (Path(f"/proc/{self.pid}/root") / path.lstrip("/")).read_bytes()

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """A file that the host shall see."""
        file = Path(f"/proc/{self.pid}/root") / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode)
        file.write_bytes(content)
        file.chmod(mode)


class Command:
    """`finray ...` on a host, which is started again, twice at most, where the storage was silent.

    A command asks the storage once. When these hosts' machine stood still, so did the storage.

    Args:
        host: where it runs.
        words: of the command.
        log: a file for what it says.
        env: its own variables.
    """

    def __init__(self, host: Host, *words: object, log: Path, env: Mapping[str, str] | None = None) -> None:
        self._host, self._words, self._log, self._env = host, words, log, env
        self._earlier: list[str] = []
        self._start()

    def _start(self) -> None:
        with self._log.open("w") as log:
            self._process = self._host.start_finray(*self._words, env=self._env, stdout=log, stderr=log)

    def poll(self) -> int | None:
        """Its exit code, if it has ended and is not started again."""
        code = self._process.poll()
        if code and len(self._earlier) < 2 and _SILENT.search(said := self._said_last()):
            self._earlier.append(said)
            self._start()
            return None
        return code

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None where it has not ended in that time."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return code

    def until(self, true: Callable[[], Any], what: str, *, timeout: float = 300) -> Any:
        """Wait for something that comes while it runs."""

        def looked() -> Any:
            found = true()
            assert self.poll() is None, self.said()
            return found

        return wait_until(looked, what, timeout=timeout)

    def said(self) -> str:
        """What it has said at all its starts."""
        return "".join([*self._earlier, self._said_last()])

    def _said_last(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Bed:
    """Hosts, the switch between them, and what they share.

    Attributes:
        shared: a directory that every host sees under this path, and this process too.
        env: variables of all commands on all hosts.
        hosts: by name; `boot` of one that was killed turns it on again.
        switch: process id of the switch's init process.
        kept: directories below /tmp that the hosts see.
    """

    shared: Path
    switch: int
    kept: list[str]
    env: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)

    def host(self, env: Mapping[str, str] | None = None) -> Host:
        """One host more, turned on: h1, h2, and so on."""
        number = len(self.hosts) + 1
        host = Host(f"h{number}", f"10.77.0.{10 + number}", self, dict(env or {}))
        self.hosts[host.name] = host
        host.boot()
        return host

    def ip(self, *words: str) -> None:
        """`ip ...` at the switch."""
        _ip(self.switch, *words)

    def listen(self) -> socket.socket:
        """A socket of this process on which the hosts reach it, at the switch."""
        made: socket.socket = _in_network(self.switch, lambda: socket.create_server((SWITCH, 0), backlog=128))
        return made


@contextmanager
def bed(shared: Path) -> Iterator[Bed]:
    """The switch and, on it, hosts as they are asked for; all gone afterwards.

    Args:
        shared: an empty directory for what the hosts share.
    """
    kept = [str(one) for one in dict.fromkeys((ROOT, Path(sys.prefix).resolve(), shared)) if one.is_relative_to("/tmp")]
    switch, pid = _start_init("switch", "16m", [])
    made = Bed(shared, pid, kept)
    try:
        _ip(pid, "link", "set", "lo", "up")
        _ip(pid, "link", "add", "br0", "type", "bridge")
        _ip(pid, "addr", "add", f"{SWITCH}/24", "dev", "br0")
        _ip(pid, "link", "set", "br0", "up")
        yield made
    finally:
        for host in made.hosts.values():
            host.kill()
        os.kill(pid, signal.SIGKILL)
        switch.communicate()


@contextmanager
def s3_for(made: Bed, log: Path) -> Iterator[s3.Server]:
    """An S3 server that the hosts reach, with the variables that say so; this process reaches it too."""
    with ExitStack() as stack:
        here, there = stack.enter_context(s3.reserve()), stack.enter_context(made.listen())
        server = stack.enter_context(s3.serve(here, log, there))
        made.env |= s3.environment(there)
        yield server


def wait_until(true: Callable[[], Any], what: str, *, timeout: float = 120) -> Any:
    """Wait for a condition, whose value is returned."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.1)
    # Once more: this process may have stood still itself.
    if found := true():
        return found
    raise AssertionError(f"{what}: not within {timeout:g} s")


def _start_init(name: str, tmp_size: str, kept: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start a host's init process; it and its process id."""
    # --kill-child: the process that makes the namespaces stays as the parent, and must not leave them behind.
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*words, sys.executable, "-IS", "-c", _INIT, name, tmp_size, *kept],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise AssertionError(f"{name} did not start: {process.communicate()[1]}")
    (child,) = psutil.Process(process.pid).children()
    return process, child.pid


def _pid_space(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def _ip(pid: int, *words: str) -> None:
    done = subprocess.run(["nsenter", "--target", str(pid), "--net", "ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _in_network(pid: int, function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, whose network is that of a process."""
    import ctypes

    found: list[Any] = []

    def enter() -> None:
        try:
            with Path(f"/proc/{pid}/ns/net").open("rb") as space:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(space.fileno(), 0x40000000):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append((True, function()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    ((good, value),) = found
    if good:
        return value
    raise value


def _pythonpath() -> str:
    """This checkout, whichever one the environment has installed."""
    return os.pathsep.join([str(ROOT / "src"), str(ROOT)])
