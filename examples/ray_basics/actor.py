"""An actor: an object with state that lives in its own process.

python examples/ray_basics/actor.py
"""

import ray


@ray.remote
class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def main() -> None:
    ray.init(log_to_driver=False)
    counter = Counter.remote()
    # Calls to one actor run one after the other, in the order in which they were made.
    promises = [counter.add.remote(amount) for amount in (1, 2, 3)]
    print("after each call:", ray.get(promises))
    # Another actor of the same class has its own state.
    other = Counter.remote()
    print("another one:", ray.get(other.add.remote(10)))


if __name__ == "__main__":
    main()
