"""Freed memory is kept by the C library: in a process of its own, because the setting lasts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from finray.training.allocator import keep_freed_memory

pytestmark = pytest.mark.long

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


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_large_tensors_are_not_mapped_afresh() -> None:
    assert faults("keep") < 100 < faults("leave")


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc is told")
def test_large_tensors_go_back_where_weights_are_gathered_and_freed() -> None:
    assert faults("large") > 100


class Library:
    """A C library that writes down what it is told; it refuses `refuses`."""

    def __init__(self, refuses: int | None = None) -> None:
        self.told: list[tuple[int, int]] = []
        self.refuses = refuses

    def mallopt(self, name: int, value: int) -> int:
        self.told.append((name, value))
        return int(name != self.refuses)


@pytest.mark.parametrize(
    ("but_large", "told"),
    [
        # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h, and the largest int.
        (False, [(-8, 1), (-4, 0), (-1, 2_147_483_647)]),
        # With M_MMAP_THRESHOLD: 32 MiB is the largest that glibc takes.
        (True, [(-8, 1), (-4, 65_536), (-3, 33_554_432), (-1, 2_147_483_647)]),
    ],
)
def test_malloc_is_told_what_its_header_names(
    but_large: bool, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    assert keep_freed_memory(but_large=but_large)
    assert library.told == told


def test_a_library_that_refuses_or_knows_no_mallopt_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: Library(refuses=-4))
    assert not keep_freed_memory()
    for broken in (object(), OSError()):
        monkeypatch.setattr(
            "ctypes.CDLL", lambda name, broken=broken: broken if type(broken) is object else fail(broken)
        )
        assert not keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    assert not keep_freed_memory()


def fail(error: object) -> object:
    raise OSError(str(error))
