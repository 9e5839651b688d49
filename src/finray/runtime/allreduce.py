"""One rank of a real all-reduce for `finray doctor`, in its own process, so that it can be killed if it hangs."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

_BYTES = {"gloo": 2**23, "nccl": 2**27}
_TIMES = 4


def main(rank: int, world_size: int, host: str, port: int, backend: str, device: int, address: str) -> None:
    """Join the other ranks, all-reduce a tensor of ones a few times, and print the result.

    Args:
        rank: of this process.
        world_size: number of processes.
        host, port: address at which rank 0 listens.
        backend: ``nccl`` or ``gloo``.
        device: of this machine, for NCCL.
        address: address of this machine.
    """
    from finray.runtime.worker import interface_of, listen, meet

    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = torch.device("cuda", device) if backend == "nccl" else torch.device("cpu")
    timeout = timedelta(seconds=60)
    # Only at this address: by default the store would listen on every interface, and it has no authentication.
    listening = listen(host, port) if rank == 0 else None
    store = meet((host, port), listening, world_size=world_size, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    tensor = torch.ones(_BYTES[backend] // 4, device=where)
    dist.all_reduce(tensor)
    good = bool((tensor == world_size).all())
    begun = time.perf_counter()
    for _ in range(_TIMES):
        dist.all_reduce(tensor)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    seconds = (time.perf_counter() - begun) / _TIMES
    # What a ring sends and gets: NCCL's "bus bandwidth".
    moved = 2 * (world_size - 1) / world_size * _BYTES[backend]
    sys.stdout.write(json.dumps({"good": good, "gbit_per_s": moved * 8 / seconds / 1e9}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    numbers = sys.argv[1:]
    main(int(numbers[0]), int(numbers[1]), numbers[2], int(numbers[3]), numbers[4], int(numbers[5]), numbers[6])
