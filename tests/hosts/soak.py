"""Many kills of one run, beyond what CI has time for: ``python -m tests.hosts.soak --kills 50`` (root on Linux).

Prints what was killed, what was lost by it and how long it took, as a table for `tests/hosts/SOAK.md`; ends with an
error where the run is not the one that nobody disturbed, to the bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts import kills
from tests.support import forks, hosts, runs, tiny


def main() -> None:
    """Run a soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", nargs="*", default=[*kills.LOST_AT_MOST])
    parser.add_argument("--strategy", choices=kills.STRATEGIES, default="DDP")
    given = parser.parse_args()
    if (why := hosts.missing()) is not None:
        sys.exit(why)
    print(f"seed {given.seed}, {given.strategy}", flush=True)
    chance = random.Random(given.seed)
    kinds = [given.kinds[number % len(given.kinds)] for number in range(given.kills)]
    planned, steps = kills.plan(kinds, chance), kills.steps_for(len(kinds))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (shared := folder / "shared").mkdir()
        plain = runs.changed(kills.small_run(shared, tiny.train_tokenizer()), kills.STRATEGIES[given.strategy])
        with hosts.bed(shared) as bed, forks.server(shared):
            run = kills.victim(kills.RayHosts(bed, workers=3), plain, shared / "kills", {}, steps=steps)
            try:
                kills.disturb(run, planned, chance)
            finally:
                print(table(run.kills), flush=True)
        kills.require_same(run.run_dir, kills.undisturbed(plain, folder / "undisturbed", steps=steps))
    print(
        f"{len(run.kills)} kills in {time.monotonic() - began:.0f} s; {steps} steps, to the bits of an undisturbed run"
    )


def table(found: list[kills.Kill]) -> str:
    """What was lost, and how long it took, by kind."""
    lines = [
        "| killed | times | steps done twice, most | seconds until at work again, median | most |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(one.kind for one in found):
        own = [one for one in found if one.kind == kind]
        seconds = [one.seconds for one in own]
        most = max(one.lost for one in own)
        lines.append(f"| {kind} | {len(own)} | {most} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
