"""AdamW on bf16 weights without an fp32 copy, with stochastic rounding.

A bf16 number has 8 significant bits, so rounding to nearest loses an update of less than 1/512 of a weight, and at
small learning rates most are. With stochastic rounding, which preserves the mean, small updates add up (Gupta et al.
2015). The second moment is rounded in the same way: a step changes it by a thousandth. The first moment changes by a
tenth, and is rounded to nearest.

The random bits are a hash of (seed, update, parameter, element): the same after a restart, on any number of ranks, and
on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from finray.data.sampling.order import derive_key
from finray.parallel.base import StatefulOptimizer, StateReader
from finray.sharding import local_rows

# Elements per chunk: fp32 copies of a whole embedding table would take as much memory as this saves. On a CPU a chunk
# stays in cache; a GPU needs large kernels.
CHUNK = {"cpu": 2**17, "cuda": 2**23}
_MASK = 0xFFFFFFFF


class RoundedAdamW(StatefulOptimizer, torch.optim.Optimizer):
    """AdamW whose weights and moments have the dtype of the weights; bf16 is rounded stochastically.

    Args:
        groups: parameter groups; parameters may be shards.
        names: of the parameters.
        seed: for the rounding.
        lr, betas, eps: as for Adam.
    """

    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        names: Mapping[torch.nn.Parameter, str],
        seed: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._names = names
        self._seed = seed
        self._updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None
        having_gradients = (
            (group, one) for group in self.param_groups for one in group["params"] if one.grad is not None
        )
        for group, parameter in having_gradients:
            state = self.state[parameter]
            if not state:
                state.update(self.initial_state(parameter))
            local, row = local_rows(parameter)
            good: float | torch.Tensor = 1.0
            if self.found_inf is not None:
                good = 1 - self.found_inf.to(local.device)
            state["step"].add_(good)
            if not local.numel():
                continue
            parts = [local, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
            flat = [local_rows(part)[0].view(-1) for part in parts]
            # Index of the first element in the whole parameter.
            first = row * (local.numel() // len(local)) if local.ndim else 0
            key = derive_key(self._seed, self._updates, self._names[parameter])
            for start in range(0, local.numel(), CHUNK[local.device.type]):
                weight, gradient, *moments = (one[start : start + CHUNK[local.device.type]] for one in flat)
                random = random_bits(key, first + start, len(weight), local.device)
                _update_some(weight, gradient, moments, random, group, state["step"], good)
        self._updates += 1

    def load_state_of(self, parameter: torch.nn.Parameter, name: str, kinds: set[str], reader: StateReader) -> None:
        """Load the state from :meth:`state_of`, and continue its update count."""
        super().load_state_of(parameter, name, kinds, reader)
        self._updates = int(reader.read(f"{name}/step"))


def _update_some(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: list[torch.Tensor],
    random: torch.Tensor,
    group: dict[str, Any],
    step: torch.Tensor,
    good: float | torch.Tensor,
) -> None:
    """Loshchilov & Hutter's algorithm 2 in fp32; if ``good`` is zero, nothing changes."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    gradient = gradient.float()
    if isinstance(good, torch.Tensor):
        gradient = torch.where(good > 0, gradient, torch.zeros_like(gradient))
    first = moments[0].float()
    first.add_((gradient - first).mul_((1 - beta1) * good))
    second = moments[1].float()
    second.add_(gradient.square_().sub_(second).mul_((1 - beta2) * good))
    count = step.clamp(min=1)
    change = second / (1 - beta2**count)
    change = first.div(change.sqrt_().add_(group["eps"])).mul_(good * rate / (1 - beta1**count))
    result = weight.float().mul_(1 - good * (rate * group["weight_decay"])).sub_(change)
    moments[0].copy_(first)
    moments[1].copy_(rounded(second, random >> 16) if moments[1].dtype == torch.bfloat16 else second)
    weight.copy_(rounded(result, random) if weight.dtype == torch.bfloat16 else result)


def rounded(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round fp32 values in place to one of the two nearest bf16 numbers, using the lower 16 bits of ``random`` (int32).

    The lower 16 bits of an fp32 value are its distance from the bf16 number below. Adding 16 random bits carries into
    the upper half with a probability proportional to that distance.
    """
    values.view(torch.int32).add_(random & 0xFFFF).bitwise_and_(-0x10000)
    return values


def random_bits(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """32 random bits (int32) for each element from ``start`` on: a hash of the key and the element's index."""
    # int32 throughout, which wraps around.
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(key + start))
    return _mixed(_mixed(bits).bitwise_xor_(_signed(key >> 32)))


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Wellons' hash `lowbias32`, in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97), (15, 1)):
        # Clear the copies of the sign bit that an arithmetic shift moves in.
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            bits.mul_(_signed(factor))
    return bits


def _signed(number: int) -> int:
    """The lower 32 bits as an int32."""
    return ((number & _MASK) ^ 0x80000000) - 0x80000000
