"""The same work in one process and in tasks, and how long each takes.

python examples/ray_basics/serial_and_parallel.py
"""

import time

import ray

ROUNDS, PIECES = 400_000, 4


def work(seed: int) -> int:
    """Keep a CPU busy: a generator of pseudo-random numbers."""
    value = seed
    for _ in range(ROUNDS):
        value = (value * 1_103_515_245 + 12_345) % 2**31
    return value


def main() -> None:
    start = time.perf_counter()
    ray.init(log_to_driver=False)
    print(f"to start or join Ray:       {time.perf_counter() - start:6.2f} s")
    task = ray.remote(work)
    pieces = range(PIECES)

    start = time.perf_counter()
    alone = [work(seed) for seed in pieces]
    print(f"{PIECES} pieces, one by one:      {time.perf_counter() - start:6.2f} s")

    for name in ("first time", "second time"):
        start = time.perf_counter()
        together = ray.get([task.remote(seed) for seed in pieces])
        print(f"{PIECES} tasks, the {name + ':':12s}  {time.perf_counter() - start:6.2f} s")

    print("CPUs of the cluster:       ", int(ray.cluster_resources()["CPU"]))
    print("the same results:          ", alone == together)


if __name__ == "__main__":
    main()
