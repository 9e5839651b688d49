"""Memory of a training process: kept, and not given back to the system after every tensor.

glibc maps every large tensor afresh and unmaps it when it is freed; touching the new pages costs more than the
arithmetic on some virtual machines. ``GLIBC_TUNABLES`` can say otherwise, but only before a process starts, and glibc
before 2.39 hands a process's children nothing but the first of several tunables. So it is said here, from within.
"""

from __future__ import annotations

import ctypes
import sys

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have malloc reuse what is freed: no mappings of their own for large blocks, no trimming below 2 GiB.

    One arena serves all threads, because the arenas of threads other than the first cannot hold large blocks, and Ray
    Train's training thread is not the first. Returns whether the C library took it; others than glibc do not.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST_INT))
    return all(mallopt(name, value) == 1 for name, value in settings)
