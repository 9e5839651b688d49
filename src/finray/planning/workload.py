"""The largest micro-batch of a run, told from row lengths: what a memory estimate is made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from finray.data.sampling.order import permutation
from finray.data.sampling.packing import one_row_each, plan_packs
from finray.planning.setup import Workload

# Micro-batches that are looked at; more add little to the largest of them.
_MOST = 4096


def largest_workload(
    lengths: Sequence[int],
    *,
    max_length: int,
    packing: bool,
    micro_batch_size: int,
    learned: float,
    micro_batches: int,
    accumulates: bool,
    weigh: Callable[[tuple[int, ...]], float],
) -> Workload:
    """Form micro-batches as training does, in an order of their own, and take the heaviest.

    Args:
        lengths: tokens of the rows, or of a sample of them; longer ones are cut at ``max_length``.
        max_length: most tokens in a row and in a pack.
        packing: whether rows share packs.
        micro_batch_size: packs (or rows) in a micro-batch.
        learned: share of the tokens that are targets.
        micro_batches: how many of them a worker meets in the run.
        accumulates: whether it meets several in a step.
        weigh: bytes that rows of these lengths keep.

    Returns:
        The workload. Where no lengths are known, full rows are taken.
    """
    rows = [min(length, max_length) for length in lengths] or [max_length]
    plan = (plan_packs if packing else one_row_each)(rows, max_length)
    order = permutation(len(plan), "largest-workload").tolist()
    if not lengths:
        order = order * micro_batch_size
    found = []
    for start in range(0, min(len(order), _MOST * micro_batch_size), micro_batch_size):
        packs = order[start : start + micro_batch_size]
        found.append(tuple(rows[row] for pack in packs for row in plan.pack(pack)))
    heaviest = max(found, key=weigh)
    tokens = sum(heaviest)
    met = max(1, micro_batches)
    return Workload(
        rows=heaviest,
        # Never more than there are; the first token of a row is no target.
        targets=max(1, min(tokens - len(heaviest), round(learned * tokens))),
        accumulates=accumulates,
        token_counts=min(met, len({sum(batch) for batch in found})),
        row_lengths=min(met * max(len(batch) for batch in found), len(set(rows))),
    )
