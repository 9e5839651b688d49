"""Freed memory is kept by the C library: in a process of its own, because the setting lasts."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import torch
from finray.training.allocator import keep_freed_memory

if sys.argv[1] != "leave":
    assert keep_freed_memory(but_large=sys.argv[1] == "large")
faults = []

def work():
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(64 * 2**20, dtype=torch.uint8).fill_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

# Not in the first thread, as under Ray Train.
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(sum(faults[15:]))
"""


def faults(how: str) -> int:
    """Pages touched for the first time by five tensors of 64 MiB, after fifteen to warm up."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_large_tensors_are_not_mapped_afresh() -> None:
    assert faults("keep") < 100 < faults("leave")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_large_tensors_go_back_where_weights_are_gathered_and_freed() -> None:
    assert faults("large") > 100
