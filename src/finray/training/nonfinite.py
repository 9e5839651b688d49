"""Handles steps with a loss or gradient norm that is inf or NaN, on the device, so that no step waits for it.

Once a number is not finite, all later updates are skipped. The error is raised where the loop reads numbers from the
device anyway: at a record, an evaluation, a checkpoint. No weight has changed since the step that it names, and the
last checkpoint is good.

With fp16, overflowing gradients are no error. The loss is multiplied by a scale; if gradients overflow, the update is
skipped and the scale halved, and it is doubled again after many updates without overflow. The norm is that of the
summed gradients, so all ranks skip the same updates; schedule and data continue, so the data of step *s* do not depend
on what was skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from finray.errors import TrainingError
from finray.parallel.base import Strategy
from finray.training.state import TrainState

FIRST_SCALE = 2.0**16
# Updates without overflow after which the scale is doubled.
GROWTH_STEPS = 2000
# The scale is 2**-4 then, so the cause is something else.
MOST_SKIPPED = 20


class NonFiniteGuard:
    """Checks loss and gradient norm after their all-reduce, so that all ranks decide alike.

    Args:
        state: the training state, from which the loss scale is restored.
        device: of this rank.
        scaled: whether the loss is scaled (fp16).
    """

    def __init__(self, state: TrainState, device: torch.device, *, scaled: bool) -> None:
        self._device = device
        self._scaled = scaled
        # The flag; then step, loss and norm of the step that set it.
        self._bad = torch.zeros((), dtype=torch.float32, device=device)
        self._seen = torch.zeros(3, dtype=torch.float64, device=device)
        scale = FIRST_SCALE if state.loss_scale is None else state.loss_scale
        self._scale = torch.full((), scale, dtype=torch.float32, device=device)
        counts = (state.good_steps, state.skipped, state.skipped_in_row)
        self._good, self._skipped, self._in_row = (
            torch.full((), count, dtype=torch.int64, device=device) for count in counts
        )
        self._rows: dict[int, tuple[int, ...]] = {}

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss * self._scale if self._scaled else loss

    @torch.no_grad()
    def unscale(self, strategy: Strategy, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Divide summed gradients by the scale, wherever the strategy stores them."""
        if self._scaled:
            strategy.unscale_gradients(parameters, self._scale)

    @torch.no_grad()
    def observe(self, step: int, loss: torch.Tensor, norm: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        """``found_inf`` of the update: an fp32 scalar on the device, one if it must change nothing.

        ``step`` counts from one, ``loss`` is the mean over the global batch (fp64), ``norm`` that before clipping, and
        ``rows`` those of the whole step, for the message.
        """
        self._rows[step] = rows
        norm = norm.detach().double()
        overflow = ~torch.isfinite(norm)
        fatal = ~torch.isfinite(loss)
        if self._scaled:
            overflow = overflow & ~fatal
            self._in_row = torch.where(overflow, self._in_row + 1, torch.zeros_like(self._in_row))
            fatal = fatal | (self._in_row >= MOST_SKIPPED)
        else:
            fatal = fatal | overflow
        first = fatal & (self._bad == 0)
        now = torch.stack([torch.full_like(norm, step), loss, norm])
        self._seen = torch.where(first, now, self._seen)
        self._bad = torch.maximum(self._bad, fatal.float())
        if not self._scaled:
            return self._bad
        self._skipped = self._skipped + overflow
        grown = self._good + 1 >= GROWTH_STEPS
        change = torch.where(overflow, 0.5, torch.where(grown, 2.0, 1.0))
        self._scale = self._scale * change
        self._good = torch.where(overflow | grown, torch.zeros_like(self._good), self._good + 1)
        return torch.maximum(self._bad, overflow.float())

    def raise_if_bad(self, state: TrainState) -> None:
        """Read the observations from the device, and store the loss scale in the state.
        Raises TrainingError: a step had a loss or gradient norm that is not finite; the same on every rank."""
        counts = torch.stack([self._good, self._skipped, self._in_row]).double()
        observed = torch.cat([self._bad[None].double(), self._seen, self._scale[None].double(), counts]).tolist()
        bad, step, loss, norm, scale, *whole = observed
        if not bad:
            self._rows.clear()
            if self._scaled:
                state.loss_scale = scale
                state.good_steps, state.skipped, state.skipped_in_row = (round(count) for count in whole)
            return
        rows = self._rows.get(int(step), ())
        if self._scaled and math.isfinite(loss):
            raise TrainingError(
                f"the gradients of {MOST_SKIPPED} steps in a row overflowed in fp16, the last at step {step:.0f}; "
                f"those steps were skipped",
                where="train.precision",
                repair="set train.precision to bf16 or fp32, or look at the data; the last checkpoint is good",
            )
        problem = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        hint = "set train.precision to bf16 or fp32, " if self._scaled else ""
        raise TrainingError(
            f"{problem} at step {step:.0f}; no weight was changed",
            where=f"prepared rows {', '.join(map(str, rows[:16]))}" + (", ..." if len(rows) > 16 else ""),
            repair=f"{hint}lower train.learning_rate, lengthen the warm-up, or look at these rows; the last checkpoint "
            "is good",
        )
