"""System metrics of rank 0's machine: CPU, memory, network, disk, and GPUs if NVIDIA's library is installed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from finray.records import SystemRecord

# Maximum number of samples waiting for the next logged step; beyond it, the oldest are dropped.
_WAITING = 1000


class System:
    """Samples system metrics.

    Args:
        folder: on the disk whose free space is reported.
        clock: seconds, monotonic.
        nvml: NVIDIA's library, initialized; None if there is none.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic, nvml: Any | None = None) -> None:
        self._folder, self._clock, self._nvml = folder, clock, nvml
        self._process = psutil.Process()
        self._process.cpu_percent()
        psutil.cpu_percent()
        self._before = self._clock(), self._counters()

    def sample(self) -> dict[str, float]:
        """Numbers by name: percent, bytes, and bytes a second since the previous sample."""
        now, counters = self._clock(), self._counters()
        then, before = self._before
        self._before = now, counters
        passed = max(now - then, 1e-9)
        memory = psutil.virtual_memory()
        sample = {
            "cpu_percent": psutil.cpu_percent(),
            "process_cpu_percent": self._process.cpu_percent(),
            "rss_bytes": self._process.memory_info().rss,
            "memory_percent": memory.percent,
            "disk_percent": psutil.disk_usage(str(self._folder)).percent,
            **{f"{name}_per_s": round((counters[name] - before[name]) / passed, 1) for name in counters},
        }
        return sample | ({} if self._nvml is None else _gpus(self._nvml))

    @staticmethod
    def _counters() -> dict[str, int]:
        # Containers may have neither.
        network, disk = psutil.net_io_counters(), psutil.disk_io_counters()
        return {
            "network_sent_bytes": network.bytes_sent if network else 0,
            "network_received_bytes": network.bytes_recv if network else 0,
            "disk_read_bytes": disk.read_bytes if disk else 0,
            "disk_written_bytes": disk.write_bytes if disk else 0,
        }


def find_nvml() -> Any | None:
    """NVIDIA's library, initialized; None if it, a driver or a GPU is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except Exception:
        # Its own errors, and those of an incomplete driver.
        return None


_READERS: dict[str, Callable[[Any, Any], float]] = {
    "percent": lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
    "memory_bytes": lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used,
    "power_watts": lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
    "celsius": lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
}


def _gpus(nvml: Any) -> dict[str, float]:
    """All GPUs of the machine: utilization, memory, power and temperature, as far as the GPU reports them."""
    metrics: dict[str, float] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        for name, read in _READERS.items():
            try:
                metrics[f"gpu{index}_{name}"] = read(nvml, device)
            except nvml.NVMLError:
                # A MIG slice has no utilization, and some have no power.
                continue
    return metrics


class Sampler:
    """Samples in a thread; the writer of records takes the samples from here.

    Args:
        sample: returns the numbers.
        every_s: interval between samples.
        now: the time, in seconds since 1970.
    """

    def __init__(
        self, sample: Callable[[], dict[str, float]], every_s: float, *, now: Callable[[], float] = time.time
    ) -> None:
        self._sample, self._every_s, self._now = sample, every_s, now
        self._taken: deque[tuple[float, dict[str, float]]] = deque(maxlen=_WAITING)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="finray-system", daemon=True)
        self._thread.start()

    def take(self, step: int) -> list[SystemRecord]:
        """The samples since the last call, as records of a step."""
        return [SystemRecord(step, *self._taken.popleft()) for _ in range(len(self._taken))]

    def stop(self) -> None:
        """Stop sampling."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._taken.append((round(self._now(), 3), self._sample()))
            except Exception:
                # A missing system metric is not worth a message.
                continue
