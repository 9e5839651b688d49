"""The hosts that the other tests stand on are what they say, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import hosts, s3

# Bounded by the attempts, and not by how fast this machine is.
REACHES = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
SERVES = "import socket, time; s = socket.create_server(('', 7001)); print('ready', flush=True); time.sleep(3600)"


@pytest.fixture(scope="module")
def three(bed: hosts.Bed) -> list[hosts.Host]:
    return [bed.host() for _ in range(3)]


def reaches(one: hosts.Host, address: str, port: int = 7001) -> bool:
    return one.run(sys.executable, "-c", REACHES, address, port).code == 0


def test_hosts_have_an_address_a_name_and_files_of_their_own(three: list[hosts.Host], bed: hosts.Bed) -> None:
    h1, h2, _ = three
    assert h1.check("hostname").strip() == "h1"
    h1.check("touch", "/tmp/of-h1", "/dev/shm/of-h1", bed.shared / "of-all")
    assert h2.check("ls", "/tmp", "/dev/shm").count("of-h1") == 0
    assert h2.check("ls", bed.shared).split() == ["of-all"]
    assert not Path("/tmp/of-h1").exists()
    assert not Path("/dev/shm/of-h1").exists()
    h1.write("/tmp/home/.ray/secret", b"x", mode=0o600)
    assert h1.check("stat", "--format=%a", "/tmp/home/.ray/secret") == "600\n"
    assert h1.read("/tmp/home/.ray/secret") == b"x"
    # A process sees those of its host alone; its init process is the first.
    seen = h1.check(sys.executable, "-c", "import psutil; print(sorted(psutil.pids())[0], len(psutil.pids()))")
    assert seen.split()[0] == "1"
    assert int(seen.split()[1]) < 8


def test_the_network_of_a_host_can_be_cut_and_healed(three: list[hosts.Host]) -> None:
    h1, h2, h3 = three
    server = h2.start(sys.executable, "-c", SERVES)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    hosts.wait_until(lambda: reaches(h1, "h2") and reaches(h3, h2.ip), "they reach each other")
    with h2.partitioned():
        assert not reaches(h1, h2.ip)
        assert not reaches(h3, h2.ip)
        hosts.wait_until(lambda: reaches(h2, "127.0.0.1"), "it reaches itself")
    hosts.wait_until(lambda: reaches(h1, h2.ip), "the cable is in again")
    h2.kill()
    assert server.poll() is not None
    assert not h2.is_on
    assert not reaches(h1, h2.ip)
    h2.boot()
    assert h2.check("hostname").strip() == "h2"
    assert not reaches(h1, h2.ip)


def test_a_host_that_is_killed_ends_whole(three: list[hosts.Host]) -> None:
    h3 = three[2]
    h3.check("setsid", "--fork", "sleep", "4001")
    waiting = h3.start("sleep", "4002")
    left = hosts.wait_until(lambda: len(found := h3.processes("sleep 400")) > 1 and found, "they run")
    h3.kill()
    assert not any(process.is_running() for process in left)
    assert waiting.poll() is not None
    h3.boot()
    # The negative control: what is told apart by its host is seen while it runs.
    h3.check("setsid", "--fork", "sleep", "4003")
    assert hosts.wait_until(lambda: h3.processes("sleep 4003"), "it runs")


SENDS = """
import os, socket, sys, time
s = socket.create_connection(("h1", 7002))
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
s.sendall(b"x")
print("sent", flush=True)
time.sleep(3600)
"""


def test_a_host_that_had_something_to_send_can_be_turned_on_again(three: list[hosts.Host], bed: hosts.Bed) -> None:
    """The kernel keeps its connections, and with them its network, for a minute or two."""
    h1, h2, _ = three
    server = h1.start(sys.executable, "-c", SERVES.replace("7001", "7002"))
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    client = h2.start(sys.executable, "-c", SENDS, bed.shared / "cut")
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    h1.cut()
    (bed.shared / "cut").touch()
    assert client.stdout.readline() == "sent\n"
    h2.kill()
    h2.boot()
    h1.heal()
    hosts.wait_until(lambda: reaches(h2, h1.ip, 7002), "it is connected")


def test_all_hosts_reach_one_s3_server(three: list[hosts.Host], hosts_s3: s3.Server) -> None:
    bucket = hosts_s3.bucket()
    write = f"import fsspec; fsspec.filesystem('s3').pipe('{bucket.url('a/b')}', b'x' * 9)"
    three[0].check(sys.executable, "-c", write)
    assert bucket.content() == {"a/b": b"x" * 9}
    read = f"import fsspec; print(fsspec.filesystem('s3').cat('{bucket.url('a/b')}').decode())"
    assert three[1].check(sys.executable, "-c", read) == "x" * 9 + "\n"


KILLED = """
import sys, time
from pathlib import Path
from tests.support import hosts
with hosts.bed(Path(sys.argv[1])) as bed:
    host = bed.host()
    host.check("setsid", "--fork", "sleep", "4004")
    print(bed.switch, host.pid, *(one.pid for one in host.processes("sleep 4004")), flush=True)
    time.sleep(3600)
"""


def test_nothing_is_left_when_whoever_made_the_hosts_is_killed(can_have_hosts: None, tmp_path: Path) -> None:
    before = interfaces()
    env = {**os.environ, "PYTHONPATH": hosts._pythonpath()}
    maker = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    assert maker.stdout is not None
    made = [psutil.Process(int(word)) for word in maker.stdout.readline().split()]
    assert len(made) == 3
    assert all(process.is_running() for process in made)
    maker.kill()
    maker.wait()
    hosts.wait_until(lambda: not any(process.is_running() for process in made), "all are gone")
    assert interfaces() == before


def interfaces() -> set[str]:
    return {one.name for one in Path("/sys/class/net").iterdir()}
