"""What Ray runs to start a worker in tests: has the process of :mod:`tests.support.forks` fork one. Imports little."""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as _server:
    _server.connect(os.environ["FINRAY_TESTS_FORK"])
    socket.send_fds(_server, [b"r"], [1, 2])
    _server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())  # noqa: PTH109 - pathlib takes longer
