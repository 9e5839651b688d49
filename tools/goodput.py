"""Goodput of a run with failures, as formulas; the tables are in `docs/guide/scaling.md`.

Failures are random, at a constant rate; a checkpoint is taken after every `interval` seconds of training and pauses it
for `cost` seconds; after a failure, `restart` seconds pass before training continues from the last checkpoint. Then (J.
T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22, 2006) the fraction of the time in which the run makes progress is

    interval / (mtbf * exp(restart / mtbf) * (exp((interval + cost) / mtbf) - 1))

and the best interval is approximately sqrt(2 * cost * mtbf) (J. W. Young, "A first order approximation to the optimum
checkpoint interval", Communications of the ACM 17, 1974). `tools/docs_checks/test_goodput.py` simulates runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, sqrt

# Mean time between failures of one GPU, in hours: 419 unexpected interruptions of 16,384 GPUs in 54 days ("The Llama 3
# Herd of Models", 2024, section 3.3.4).
GPU_HOURS = 16384 * 54 * 24 / 419
# The assumptions of the tables: full fine-tuning of a 70B model, moments in fp32, on 1,024 GPUs in 128 machines.
GPUS = 1024
STATE = 16 * 70.6e9
STORAGE, HOST, NETWORK = 25e9, 5e9, 50e9
STEP_S = 10.0
# Seconds from the loss of a machine until workers load. A cluster of `finray cluster up` gives up a machine that does
# not answer after at most 16 s (`finray.runtime.nodes.HEALTH_ENV`).
BEFORE_LOAD = {"detect": 16.0, "teardown": 5.0, "Ray": 10.0, "workers": 40.0}
HOURS = (round(GPU_HOURS / GPUS), 10, 1)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where checkpoints are kept.

    Attributes:
        name: for the table.
        cost: seconds that training waits for a checkpoint: the copy to host memory.
        behind: seconds after that until the checkpoint is usable.
        load: seconds to load it.
        interval: seconds of training between two checkpoints; None for the best interval.
    """

    name: str
    cost: float
    behind: float
    load: float
    interval: float | None = None

    @property
    def restart(self) -> float:
        """Seconds from a failure to the end of the first step."""
        return sum(BEFORE_LOAD.values()) + self.load + STEP_S

    def at(self, mtbf: float) -> tuple[float, float]:
        """The interval, and the fraction of the time in which the run makes progress."""
        interval = max(self.interval or best_interval(self.cost, mtbf), self.behind)
        # Steps computed while the newest checkpoint was being written are lost, too.
        return interval, goodput(interval, self.cost, self.restart + self.behind, mtbf)


def best_interval(cost: float, mtbf: float) -> float:
    """Young's formula: the seconds of training between two checkpoints that maximize goodput."""
    return sqrt(2 * cost * mtbf)


def goodput(interval: float, cost: float, restart: float, mtbf: float) -> float:
    """Daly's formula: the fraction of the time in which the run makes progress; all arguments in seconds."""
    return interval / (mtbf * exp(restart / mtbf) * (exp((interval + cost) / mtbf) - 1))


def keepings() -> list[Keeping]:
    """The ways of keeping checkpoints that are compared."""
    # A barrier, and the copy of a GPU's shard.
    cost = 0.5 + STATE / GPUS / HOST
    stored = Keeping("stored every hour", cost, STATE / STORAGE, STATE / STORAGE, 3600.0)
    # A machine's shards are sent to its neighbour, and come back from there.
    moved = STATE / GPUS * 8 / NETWORK
    memory = Keeping("in memory at the best interval", cost, moved, moved)
    return [stored, replace(stored, name="stored at the best interval", interval=None), memory]


def tables() -> str:
    """The tables, as Markdown."""
    kept = keepings()
    lines = ["| phase of a restart, s | from storage | from memory |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {seconds:.0f} | {seconds:.0f} |" for name, seconds in BEFORE_LOAD.items()]
    lines += [f"| load | {kept[0].load:.0f} | {kept[-1].load:.1f} |", f"| first step | {STEP_S:.0f} | {STEP_S:.0f} |"]
    lines += [f"| together | {kept[0].restart:.0f} | {kept[-1].restart:.0f} |", ""]
    lines += [f"| a failure every | {' | '.join(one.name for one in kept)} |", "| ---: |" + " ---: |" * len(kept)]
    for hours in HOURS:
        cells = []
        for one in kept:
            interval, share = one.at(hours * 3600.0)
            found = f" ({interval / 60:.0f} min)" if one.interval is None else ""
            cells.append(f"{share:.1%}{found}")
        lines.append(f"| {hours} h | {' | '.join(cells)} |")
    return "\n".join(lines)
