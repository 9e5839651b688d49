"""A task: a function that runs in another process, perhaps on another machine.

python examples/ray_basics/task.py
"""

import os

import ray


@ray.remote
def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def main() -> None:
    # Joins the cluster that RAY_ADDRESS names, or starts a Ray on this machine.
    ray.init(log_to_driver=False)
    # `remote` returns at once, with a promise of the result.
    promises = [square.remote(number) for number in range(8)]
    # `get` waits for results, in the order of the promises.
    results = ray.get(promises)
    print("squares:", [value for value, _ in results])
    print("in the driver's process:", any(process == os.getpid() for _, process in results))


if __name__ == "__main__":
    main()
