"""Records of the machine."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from finray.records import TrainRecord
from finray.tracking.base import Trackers
from finray.tracking.system import Sampler, System
from tests.unit.tracking.test_trackers import record


def test_what_network_disk_and_processor_do_is_counted(tmp_path: Path, monkeypatch: Any) -> None:
    seconds = 10.0

    def network() -> Any:
        return SimpleNamespace(bytes_sent=2 * counted(), bytes_recv=3 * counted())

    def disk() -> Any:
        return SimpleNamespace(read_bytes=5 * counted(), write_bytes=7 * counted())

    def counted() -> int:
        # A thread of a run that another test has left may ask too.
        return 4096 if seconds > 10 else 0

    monkeypatch.setattr(psutil, "net_io_counters", network)
    monkeypatch.setattr(psutil, "disk_io_counters", disk)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 37.5)
    sampled = System(tmp_path, clock=lambda: seconds)
    seconds = 12.0
    found = sampled.sample()
    wanted = {"network_sent": 2, "network_received": 3, "disk_read": 5, "disk_written": 7}
    assert {name: found[f"{name}_bytes_per_s"] for name in wanted} == {
        name: factor * 4096 / 2 for name, factor in wanted.items()
    }
    assert found["cpu_percent"] == 37.5
    assert abs(found["rss_bytes"] / psutil.Process().memory_info().rss - 1) < 0.5
    assert all(0 <= found[name] <= 100 for name in ("memory_percent", "disk_percent"))
    assert "process_cpu_percent" in found


class Nvml:
    """NVIDIA's library on a machine with two GPUs, the second of which tells no power."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=90 + device)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(used=2**30)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        if device:
            raise self.NVMLError("not supported")
        return 250_500

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return 60


def test_gpus_are_told_each_with_what_it_says(tmp_path: Path) -> None:
    found = {name: value for name, value in System(tmp_path, nvml=Nvml()).sample().items() if name.startswith("gpu")}
    both = {
        f"gpu{index}_{name}": value for index in (0, 1) for name, value in (("memory_bytes", 2**30), ("celsius", 60))
    }
    assert found == {"gpu0_percent": 90, "gpu1_percent": 91, "gpu0_power_watts": 250.5, **both}


def test_samples_are_written_with_the_step_that_is_logged_next(tmp_path: Path) -> None:
    taken = threading.Semaphore(0)

    def sample() -> dict[str, float]:
        taken.release()
        return {"cpu_percent": 3.0}

    sampler = Sampler(sample, 0.01, now=lambda: 7.0)
    seen: list[Any] = []
    tracker = SimpleNamespace(start=seen.append, log=seen.append, finish=lambda: None)
    trackers = Trackers({"t": tracker}, {}, machine=sampler, warn=seen.append)
    for _ in range(4):
        assert taken.acquire(timeout=120)
    trackers.log(record(5))
    trackers.finish()
    sampler._thread.join(120)
    assert not sampler._thread.is_alive(), "it is stopped with the trackers"
    *machine, last = seen
    assert len(machine) >= 3
    assert {json["kind"]: json for json in (one.json() for one in machine)} == {
        "system": {"kind": "system", "step": 5, "cpu_percent": 3.0, "time": 7.0}
    }
    assert isinstance(last, TrainRecord)
