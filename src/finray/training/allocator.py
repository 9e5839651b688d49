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
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_LARGEST_INT = 2**31 - 1


# The largest that glibc takes for the size from which on a block is mapped for itself.
_LARGE = 32 * 2**20
_MANY = 65_536


def keep_freed_memory(*, but_large: bool = False) -> bool:
    """Have malloc reuse what is freed: no mappings of their own for large blocks, no trimming below 2 GiB.

    One arena serves all threads, because the arenas of threads other than the first cannot hold large blocks, and Ray
    Train's training thread is not the first. Returns whether the C library took it; others than glibc do not.

    Args:
        but_large: blocks of 32 MiB and more go back to the system. Weights that are gathered and freed again leave
            holes that later ones do not fit into: with two workers as much memory as one needs alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mapping = ((_M_MMAP_MAX, _MANY), (_M_MMAP_THRESHOLD, _LARGE)) if but_large else ((_M_MMAP_MAX, 0),)
    settings = ((_M_ARENA_MAX, 1), *mapping, (_M_TRIM_THRESHOLD, _LARGEST_INT))
    return all(mallopt(name, value) == 1 for name, value in settings)
