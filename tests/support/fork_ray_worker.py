"""What Ray runs to start a worker in tests: has the process of :mod:`tests.support.forks` fork one. Imports little."""

import json
import os
import socket
import sys

# On a host of tests.support.hosts the worker is to be on this host: the namespaces of this process say which one.
_SPACES = [f"/proc/self/ns/{name}" for name in ("net", "mnt", "uts", "ipc", "pid")]
_on_hosts = [os.open(path, os.O_RDONLY) for path in _SPACES if "FINRAY_TESTS_FORK_ON_HOSTS" in os.environ]
with socket.socket(socket.AF_UNIX) as _server:
    _server.connect(os.environ["FINRAY_TESTS_FORK"])
    socket.send_fds(_server, [b"r"], [1, 2, *_on_hosts])
    _server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())  # noqa: PTH109 - pathlib takes longer
