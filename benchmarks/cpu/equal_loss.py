"""Whether finray and TRL do the same: their losses over the same steps."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from statistics import mean

from cpu.plan import BATCH, FINRAY, TRL, Plan
from finray.planning.placement import ALLOCATOR
from harness.processes import environment, run_script
from harness.report import say
from harness.rows import as_text_rows, write_rows

FIRST_LOSS_TOLERANCE = 1e-3
MEAN_LOSS_TOLERANCE = 0.02


@dataclass(frozen=True)
class EqualLoss:
    """The losses of both sides over the same steps."""

    ours: list[float]
    theirs: list[float]
    targets: tuple[int, int]

    @property
    def first_difference(self) -> float:
        """Of the first step, before any update."""
        return abs(self.ours[0] - self.theirs[0])

    @property
    def mean_difference(self) -> float:
        """Of the mean over the steps, relative."""
        return abs(mean(self.ours) / mean(self.theirs) - 1)

    @property
    def largest_difference(self) -> float:
        """Of any step."""
        return max(abs(ours - theirs) for ours, theirs in zip(self.ours, self.theirs, strict=True))

    @property
    def holds(self) -> bool:
        """Whether both sides did the same."""
        return (
            self.targets[0] == self.targets[1]
            and self.first_difference <= FIRST_LOSS_TOLERANCE
            and self.mean_difference <= MEAN_LOSS_TOLERANCE
        )


def measure_equal_loss(plan: Plan) -> EqualLoss:
    """Both sides in fp32 over the same rows in the same steps, from the same adapter."""
    shuffled = random.Random(plan.seed).sample(plan.rows, len(plan.rows))
    rows = write_rows(plan.folder / "rows_equal.jsonl", as_text_rows(shuffled[: plan.equal_steps * BATCH]))
    start = plan.folder / "start"
    options = [*plan.common, "--rows", str(rows), "--precision", "fp32", "--sequential", "--seed", str(plan.seed)]
    options += ["--steps", str(plan.equal_steps), "--warmup-steps", "1"]
    env = environment(threads=plan.threads, allocator=ALLOCATOR)
    trl_options = [*options, "--mode", "best", "--padding", "padded", "--save-start", str(start)]
    theirs = run_script(plan.peer_python, TRL, trl_options, env=env)
    ours = run_script(sys.executable, FINRAY, [*options, "--no-packing", "--start", str(start)], env=env)
    equal = EqualLoss(ours["losses"], theirs["losses"], (ours["supervised_tokens"], theirs["supervised_tokens"]))
    say(f"equal loss: finray {ours['losses']}, TRL {theirs['losses']}")
    return equal


def show_equal_loss(equal: EqualLoss) -> str:
    """What was compared, and how it came out."""
    verdict = "Equal" if equal.holds else "**Not equal**"
    return (
        f"{verdict}: fp32, {len(equal.ours)} steps of {BATCH} rows, unpacked, the same rows in the same steps, the "
        f"same first adapter. First loss {equal.ours[0]:.6f} and {equal.theirs[0]:.6f} (apart by "
        f"{equal.first_difference:.1e}, at most {FIRST_LOSS_TOLERANCE:.0e} allowed), mean loss {mean(equal.ours):.5f} "
        f"and {mean(equal.theirs):.5f} (apart by {equal.mean_difference:.1e} of it, at most {MEAN_LOSS_TOLERANCE:.0e} "
        f"allowed), largest difference of a step {equal.largest_difference:.1e}. Targets from the second step on: "
        f"{equal.targets[0]} and {equal.targets[1]}. The rows are prompt and completion as plain text here: in chat "
        "rows, which the other measurements use, TRL also learns the newline after the end-of-turn token, finray does "
        "not, and the losses of a step are then means over other targets."
    )
