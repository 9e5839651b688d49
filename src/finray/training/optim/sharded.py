"""Muon (Jordan 2024) and Adafactor (Shazeer & Stern 2018) for weights that may be shards.

They compute the same as ``torch.optim.Muon`` and ``torch.optim.Adafactor`` (torch 2.13), which the tests verify.
Torch's have no ``found_inf``, so skipping an update would wait for the device, and they do not support FSDP2's shards.
"""

from __future__ import annotations

from typing import Any

import torch

from finray import compat
from finray.hardware import cpu_has_bf16
from finray.parallel.base import StatefulOptimizer
from finray.sharding import full_tensor, is_sharded, local_rows, rows_like, sum_over_shards

MOMENTUM = 0.95
# Coefficients of the quintic Newton-Schulz iteration, and the number of iterations; as in torch.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7
# Adafactor: beta2 is 1 - step ** DECAY; the relative step is never smaller than SMALLEST_SCALE times the rate.
DECAY = -0.8
SMALLEST_SCALE = 1e-3


class MuonAndAdamW(StatefulOptimizer, torch.optim.Optimizer):
    """Muon for groups marked ``use_muon``, fused AdamW for the others; one object with one state.

    Updates are scaled to the RMS of AdamW's (``match_rms_adamw``), so that one learning rate serves both.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._use_muon = {
            parameter for group in self.param_groups if group["use_muon"] for parameter in group["params"]
        }
        others = [group for group in self.param_groups if not group["use_muon"]]
        self._adam = torch.optim.AdamW(others, betas=betas, eps=eps, fused=True) if others else None
        if self._adam is not None:
            # AdamW's groups are the same dictionaries, so that both share the learning rate.
            self._adam.state = self.state

    def initial_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state before the first update."""
        if parameter in self._use_muon:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return super().initial_state(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None:
                    self._update(group, parameter)
        if self._adam is not None:
            compat.set_found_inf(self._adam, self.found_inf)
            self._adam.step()

    def _update(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter))
        local, start = local_rows(parameter)
        kept, _ = local_rows(state["momentum_buffer"])
        assert parameter.grad is not None
        gradient, _ = local_rows(parameter.grad)
        bad = None if self.found_inf is None else self.found_inf.to(local.device)
        if bad is not None:
            gradient = torch.where(bad > 0, kept, gradient)
        kept.lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(kept, MOMENTUM)
        # Every rank needs the whole matrix: it cannot be orthogonalised by rows.
        full = orthogonal(full_tensor(rows_like(update, parameter, tuple(parameter.shape))))
        full = full[start : start + len(local)]
        rate = 0.2 * max(parameter.shape) ** 0.5 * group["lr"]
        if bad is None:
            local.mul_(1 - group["lr"] * group["weight_decay"]).add_(full, alpha=-rate)
        else:
            good = 1 - bad
            local.mul_(1 - good * (group["lr"] * group["weight_decay"])).add_(full.float() * (good * -rate))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Approximately the nearest matrix with equal singular values: five Newton-Schulz iterations in bf16, as torch
    does; in fp32 on a CPU without bf16 instructions, which is 27 times as fast there."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float() if matrix.device.type == "cpu" and not cpu_has_bf16() else matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Adafactor(StatefulOptimizer, torch.optim.Optimizer):
    """Adafactor with relative steps of at most the learning rate, and no momentum.

    The second moment of a matrix is stored as the means of its rows and of its columns. Parameters with more dimensions
    are treated as stacks of matrices.
    """

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    def initial_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state before the first update."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        local, _ = local_rows(parameter)
        if parameter.ndim < 2:
            return {"step": step, "variance": torch.zeros_like(parameter)}
        shape = tuple(parameter.shape)
        row = rows_like(local.new_zeros((*local.shape[:-1], 1)), parameter, (*shape[:-1], 1))
        column = local.new_zeros((*local.shape[:-2], 1, local.shape[-1]))
        if parameter.ndim > 2:
            column = rows_like(column, parameter, (*shape[:-2], 1, shape[-1]))
        return {"step": step, "row_var": row, "col_var": column}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; two all-reduces if weights are shards."""
        assert closure is None
        updates = [
            _FactoredUpdate(self, group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        shared = [update for update in updates if is_sharded(update.parameter)]
        _sum_together(shared, [update.first_sums for update in shared])
        for update in updates:
            update.learn()
        _sum_together(shared, [update.second_sums for update in shared])
        for update in updates:
            update.apply()


class _FactoredUpdate:
    """The update of one parameter, in three parts; between them the ranks sum their contributions."""

    def __init__(self, optimizer: Adafactor, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self._group = group
        self._state = state = optimizer.state[parameter]
        if not state:
            state.update(optimizer.initial_state(parameter))
        self._own, _ = local_rows(parameter)
        assert parameter.grad is not None
        self._gradient, _ = local_rows(parameter.grad)
        self._elements = parameter.numel()
        self._good: float | torch.Tensor = 1.0
        if optimizer.found_inf is not None:
            bad = optimizer.found_inf.to(self._own.device)
            self._gradient = torch.where(bad > 0, torch.zeros_like(self._gradient), self._gradient)
            self._good = 1 - bad
        self._step = state["step"].add_(self._good)
        # Unchanged if the update is skipped (and at step 0 the power would not be finite).
        self._weight = self._step.clamp(min=1).pow(DECAY) * self._good
        # For a matrix also the squares of its columns and the sum of its rows.
        self.first_sums = [self._own.float().square().sum()]
        if parameter.ndim >= 2:
            row, _ = local_rows(state["row_var"])
            squares = torch.linalg.vector_norm(self._gradient, dim=-1, keepdim=True).square_()
            row.lerp_(squares.div_(self._gradient.shape[-1]), self._weight)
        if parameter.ndim == 2:
            self.first_sums += [torch.linalg.vector_norm(self._gradient, dim=0).square_(), row.sum()]
        self.second_sums: list[torch.Tensor] = []

    def learn(self) -> None:
        """Update the second moment, and compute the unscaled update."""
        smallest = torch.finfo(self._own.dtype).eps
        if self.parameter.ndim < 2:
            variance, _ = local_rows(self._state["variance"])
            variance.lerp_(self._gradient.square(), self._weight)
            estimate = variance.clone()
        else:
            row, _ = local_rows(self._state["row_var"])
            column, _ = local_rows(self._state["col_var"])
            if self.parameter.ndim == 2:
                squares, mean = self.first_sums[1][None], self.first_sums[2] / self.parameter.shape[0]
            else:
                squares = torch.linalg.vector_norm(self._gradient, dim=-2, keepdim=True).square_()
                mean = row.mean(dim=-2, keepdim=True)
            column.lerp_(squares / self.parameter.shape[-2], self._weight)
            estimate = (row @ column).div_(mean.clamp(min=smallest))
        self._update = estimate.clamp_(min=smallest**2).rsqrt_().mul_(self._gradient)
        self.second_sums = [self._update.square().sum()]

    def apply(self) -> None:
        """Update the weights."""
        rate = self._group["lr"]
        size = (self.first_sums[0] / self._elements).sqrt().clamp(min=SMALLEST_SCALE)
        relative = self._step.clamp(min=1).rsqrt().clamp(max=rate)
        clipped = (self.second_sums[0] / self._elements).sqrt().clamp(min=1.0)
        self._own.mul_(1 - self._good * (rate * self._group["weight_decay"]))
        self._own.sub_(self._update.mul_(size * relative / clipped * self._good))


def _sum_together(updates: list[_FactoredUpdate], sums: list[list[torch.Tensor]]) -> None:
    """Sum values of sharded parameters over the ranks, in place, in one all-reduce."""
    if not updates:
        return
    flat = torch.cat([part.reshape(-1) for sums_of_update in sums for part in sums_of_update])
    sum_over_shards(flat, updates[0].parameter)
    start = 0
    for sums_of_update in sums:
        for place, value in enumerate(sums_of_update):
            sums_of_update[place] = flat[start : start + value.numel()].view(value.shape)
            start += value.numel()
