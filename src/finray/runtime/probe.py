"""NodeFacts that `finray doctor` collects on one machine, or on a node of a cluster through an actor."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finray.hardware import missing_for_kernels
from finray.runtime import nodes

_SENT = 2**25
_LIMIT_S = 150.0
_NAME = ".finray-doctor-"
_QUESTIONS = ("NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """NodeFacts about a machine."""

    name: str  # of the machine
    versions: dict[str, str]  # of Python, Ray, torch, transformers and finray
    gpus: list[str] | None  # name and driver of each, from nvidia-smi; None if there is no nvidia-smi
    cuda: str | None  # CUDA version that torch was built for; None for a build without
    usable_gpus: int  # number of GPUs that torch can use
    torch_error: str | None  # why torch cannot be imported
    free_disk: dict[str, int]  # bytes, by directory
    # Sockets of this user's Ray that answer without the token, ``host:port (answer)``.
    open_sockets: list[str] = field(default_factory=list)
    load: float = 0.0  # programs that run or wait for a core, on average of the last minute
    cores: int = 1
    missing_for_kernels: str | None = None  # what it lacks for finray's own attention on a CPU


class Probe:
    """Examines the machine that it runs on."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None

    def facts(self, folders: list[str]) -> NodeFacts:
        """What this machine is, with the free space of ``folders``."""
        # Before what is started here.
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        # torch is queried in another process: Ray hides GPUs from one that holds none.
        script = (
            "import json, torch; print(json.dumps([torch.version.cuda, "
            "torch.cuda.device_count() if torch.cuda.is_available() else 0]))"
        )
        done = _run([sys.executable, "-c", script])
        cuda, usable = json.loads(done.stdout) if done is not None and not done.returncode else (None, 0)
        failed = None
        if done is None or done.returncode:
            failed = "it did not answer" if done is None else (done.stderr.strip().splitlines() or ["?"])[-1]
        smi = _run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
        gpus = None if smi is None or smi.returncode else smi.stdout.strip().splitlines()
        free = {}
        for folder in (*folders, tempfile.gettempdir(), "/dev/shm"):
            with suppress(OSError):
                free[folder] = shutil.disk_usage(folder).free
        versions, sockets = nodes.versions(), open_sockets(listening())
        facts = (socket.gethostname(), versions, gpus, cuda, int(usable), failed, free, sockets)
        return NodeFacts(*facts, load=load, cores=cores, missing_for_kernels=missing_for_kernels())

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def write(self, folder: str, name: str) -> str | None:
        """Write a small file; returns the error, if any."""
        from fsspec.core import url_to_fs

        try:
            system, path = url_to_fs(folder)
            system.makedirs(path, exist_ok=True)
            system.pipe_file(f"{path}/{_NAME}{name}", name.encode())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def read(self, folder: str, names: list[str]) -> list[str]:
        """Names of files that are missing or have other content."""
        from fsspec.core import url_to_fs

        missing = []
        for name in names:
            try:
                system, path = url_to_fs(folder)
                system.invalidate_cache()
                if system.cat_file(f"{path}/{_NAME}{name}") != name.encode():
                    missing.append(name)
            except Exception:
                missing.append(name)
        return missing

    def remove(self, folder: str, name: str) -> None:
        """Remove the file that :meth:`write` wrote."""
        from fsspec.core import url_to_fs

        with suppress(Exception):
            system, path = url_to_fs(folder)
            system.rm_file(f"{path}/{_NAME}{name}")

    def listen(self, host: str) -> int:
        """Receive data from one other node; returns the port."""
        self._listening = listening = socket.create_server((host, 0))
        listening.settimeout(_LIMIT_S)

        def take() -> None:
            with suppress(OSError), listening, listening.accept()[0] as connection:
                connection.settimeout(_LIMIT_S)
                left = _SENT
                while left and (got := len(connection.recv(2**20))):
                    left -= got
                connection.sendall(b"!")

        threading.Thread(target=take, daemon=True).start()
        return int(listening.getsockname()[1])

    def send(self, host: str, port: int) -> float:
        """Send data to another node; returns Gbit/s."""
        with socket.create_connection((host, port), timeout=_LIMIT_S) as connection:
            block = secrets.token_bytes(2**20)
            begun = time.perf_counter()
            for _ in range(_SENT // len(block)):
                connection.sendall(block)
            connection.recv(1)
            return _SENT * 8 / (time.perf_counter() - begun) / 1e9

    def free_port(self, host: str) -> int:
        """A port that is free at this moment."""
        with socket.create_server((host, 0)) as server:
            return int(server.getsockname()[1])

    def all_reduce(
        self, ranks: list[int], world_size: int, host: str, port: int, backend: str, address: str
    ) -> list[dict[str, Any]]:
        """Run ranks of an all-reduce on this machine; returns the output of each, or ``error``."""
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "finray.runtime.allreduce"]
                + [str(value) for value in (rank, world_size, host, port, backend, device, address)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
            for device, rank in enumerate(ranks)
        ]
        results = []
        deadline = time.monotonic() + _LIMIT_S
        for process in started:
            try:
                out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
                last = (err.strip().splitlines() or ["it said nothing"])[-1]
                results.append(json.loads(out) if process.returncode == 0 else {"error": last})
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                results.append({"error": f"no end within {_LIMIT_S:g} s"})
        return results


def _run(words: list[str]) -> subprocess.CompletedProcess[str] | None:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None


def listening() -> list[tuple[str, int]]:
    """Addresses at which processes of this user's Ray listen, except loopback."""
    import psutil

    addresses = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = " ".join(process.cmdline())
            if process.uids().real != os.getuid() or not ("/ray/" in words or words.startswith("ray::")):
                continue
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith(("127.", "::1")):
                    addresses.add((connection.laddr.ip, int(connection.laddr.port)))
    return sorted(addresses)


def open_sockets(addresses: list[tuple[str, int]]) -> list[str]:
    """Addresses that answer without a token: HTTP, or Ray's gRPC (its head process, a raylet)."""
    without_token = []
    for ip, port in addresses:
        host = "127.0.0.1" if ip in ("0.0.0.0", "::") else ip
        try:
            with urllib.request.urlopen(f"http://{nodes.joined(host, port)}/", timeout=5) as answer:
                without_token.append(f"{nodes.joined(ip, port)} (HTTP {answer.status})")
        except urllib.error.HTTPError as error:
            if error.code not in (401, 403):
                without_token.append(f"{nodes.joined(ip, port)} (HTTP {error.code})")
        except Exception:
            # It speaks another protocol.
            if (method := _answered(nodes.joined(host, port))) is not None:
                without_token.append(f"{nodes.joined(ip, port)} (gRPC {method})")
    return without_token


def _answered(address: str) -> str | None:
    """The first of several harmless Ray gRPC calls that is answered without a token."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        for method in _QUESTIONS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}", None, None)(b"", timeout=5)
            except grpc.RpcError:
                continue
            return method
    return None


def folder_of(storage: str) -> str:
    """The nearest existing parent directory, whose free space can be measured."""
    path = Path(storage).expanduser().absolute()
    return str(next((folder for folder in (path, *path.parents) if folder.is_dir()), path))
