"""Makes a training process keep freed memory instead of returning it to the system after every tensor.

glibc maps every large tensor afresh and unmaps it when it is freed; on some virtual machines touching the new pages
costs more than the arithmetic. ``GLIBC_TUNABLES`` can change that, but only before a process starts, and glibc before
2.39 passes only the first of several tunables to child processes. So it is set here, from within.
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


# The largest mmap threshold that glibc accepts.
_LARGE = 32 * 2**20
_MANY = 65_536


def keep_freed_memory(*, but_large: bool = False) -> bool:
    """Have malloc reuse freed memory: no separate mappings for large blocks, no trimming below 2 GiB.

    One arena serves all threads, because arenas of threads other than the first cannot hold large blocks, and Ray
    Train's training thread is not the first. Returns whether the C library accepted this; only glibc does.

    Args:
        but_large: return blocks of 32 MiB and more to the system. Large blocks that come and go leave holes that later
            ones do not fit into. With weights that are gathered and freed again, two workers would need as much memory
            as a single one; with weights in bf16, whose gradients pass through fp32, a run grew to twice what it uses.
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
