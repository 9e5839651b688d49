"""A task: a function that runs in another process, perhaps on another machine.

python examples/ray_basics/task.py
"""

import os

import ray


@ray.remote
def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def main() -> None:
    # Joins the cluster at RAY_ADDRESS, or starts Ray on this machine.
    ray.init(log_to_driver=False)
    # `remote` returns immediately, with an object reference.
    promises = [square.remote(number) for number in range(8)]
    # `get` waits for the results, in the order of the references.
    results = ray.get(promises)
    print("squares:", [value for value, _ in results])
    print("in the driver's process:", any(process == os.getpid() for _, process in results))


if __name__ == "__main__":
    main()
