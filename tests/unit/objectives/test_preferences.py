"""Losses on pairs, against their papers' formulas in float64, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from finray.config.load import build_config
from finray.config.preference import PreferenceConfig
from finray.data.sampling.collate import Batch, collate
from finray.data.sampling.groups import Groups
from finray.errors import ConfigError, DataError
from finray.objectives.kto import KTO
from finray.objectives.preferences import DPO, ORPO, PairObjective, SimPO

# Targets of rows: chosen and rejected of each of three pairs.
TOKENS = (4, 9, 7, 2, 1, 5)
SWAPPED = (1, 0, 3, 2, 5, 4)
BETA, EPSILON = 0.37, 0.21


def sigma(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# Of (log-probability, reference's, tokens) of chosen and rejected.
Side = tuple[float, float, int]


def ahead(chosen: Side, rejected: Side, *, each: bool = False) -> float:
    (c, cr, cn), (r, rr, rn) = chosen, rejected
    return (c - cr) / (cn if each else 1) - (r - rr) / (rn if each else 1)


def odds(side: Side) -> float:
    p = math.exp(side[0] / side[2])
    return p / (1 - p)


def smoothed(z: float) -> float:
    return -(1 - EPSILON) * math.log(sigma(z)) - EPSILON * math.log(sigma(-z))


Formula = Callable[[Side, Side], float]
CASES: list[tuple[type[PairObjective], dict[str, Any], Formula]] = [
    (DPO, {}, lambda c, r: -math.log(sigma(BETA * ahead(c, r)))),
    (DPO, {"label_smoothing": EPSILON}, lambda c, r: smoothed(BETA * ahead(c, r))),
    (DPO, {"length_normalized": True}, lambda c, r: -math.log(sigma(BETA * ahead(c, r, each=True)))),
    (DPO, {"chosen_weight": 0.7}, lambda c, r: -math.log(sigma(BETA * ahead(c, r))) - 0.7 * c[0] / c[2]),
    (DPO, {"loss": "ipo"}, lambda c, r: (ahead(c, r, each=True) - 1 / (2 * BETA)) ** 2),
    (DPO, {"loss": "hinge"}, lambda c, r: max(0.0, 1 - BETA * ahead(c, r))),
    (
        DPO,
        {"loss": "robust", "label_smoothing": EPSILON},
        lambda c, r: (
            (-(1 - EPSILON) * math.log(sigma(BETA * ahead(c, r))) + EPSILON * math.log(sigma(-BETA * ahead(c, r))))
            / (1 - 2 * EPSILON)
        ),
    ),
    (ORPO, {}, lambda c, r: -c[0] / c[2] - BETA * math.log(sigma(math.log(odds(c) / odds(r))))),
    (SimPO, {"gamma": 0.6}, lambda c, r: -math.log(sigma(BETA * (c[0] / c[2] - r[0] / r[2]) - 0.6))),
    (
        SimPO,
        {"gamma": 0.6, "label_smoothing": EPSILON, "chosen_weight": 0.7},
        lambda c, r: smoothed(BETA * (c[0] / c[2] - r[0] / r[2]) - 0.6) - 0.7 * c[0] / c[2],
    ),
]


def row_of(targets: int) -> Any:
    return np.arange(targets + 2, dtype=np.int32), np.array([0, 0] + [1] * targets, np.uint8)


def pairs() -> tuple[Batch, torch.Tensor]:
    """A batch, and log-probabilities of its targets."""
    draw = np.random.default_rng(4)
    reference = draw.uniform(-4, -0.1, sum(TOKENS)).astype(np.float32)
    batch = collate([row_of(count) for count in TOKENS], range(6), {"reference": reference})
    assert batch.targets_per_row == TOKENS
    return batch, torch.from_numpy(draw.uniform(-4, -0.1, sum(TOKENS)).astype(np.float32))


@pytest.mark.parametrize(("kind", "settings", "formula"), CASES)
def test_losses_metrics_and_gradients_are_those_of_the_formulas(
    kind: type[PairObjective], settings: dict[str, Any], formula: Formula
) -> None:
    batch, outputs = pairs()
    objective = kind(PreferenceConfig(**settings), BETA)

    def expected(values: torch.Tensor) -> list[tuple[float, Side, Side]]:
        sums = [of.double().split(list(TOKENS)) for of in (values, batch.values["reference"])]
        sides = [(float(now.sum()), float(then.sum()), count) for now, then, count in zip(*sums, TOKENS, strict=True)]
        each = zip(sides[::2], sides[1::2], strict=True)
        return [(formula(chosen, rejected), chosen, rejected) for chosen, rejected in each]

    sums, given = torch.zeros(6, dtype=torch.float64), outputs.clone().requires_grad_()
    loss = objective.loss_sum(given, batch, sums)
    assert loss.item() == pytest.approx(sum(one for one, _, _ in expected(outputs)), rel=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    for at in range(len(outputs)):
        moved = [outputs.double().index_add(0, torch.tensor([at]), torch.tensor([by]).double()) for by in (1e-4, -1e-4)]
        up, down = (sum(one for one, _, _ in expected(one)) for one in moved)
        assert float(given.grad[at]) == pytest.approx((up - down) / 2e-4, rel=1e-4, abs=1e-7)
    each = settings.get("length_normalized") or settings.get("loss") == "ipo" or kind is not DPO
    rewards = [
        [BETA * (side[0] - (side[1] if kind is DPO else 0)) / (side[2] if each else 1) for side in two]
        for _, *two in expected(outputs)
    ]
    margins = [chosen - rejected for chosen, rejected in rewards]
    found = objective.metrics([float(loss.detach()), objective.batch_weight(batch), *sums.tolist()])
    assert found["margin"] == pytest.approx(np.mean(margins), rel=1e-6)
    assert found["accuracy"] == pytest.approx(np.mean([one > 0 for one in margins]))
    assert found["rejected_reward"] == pytest.approx(np.mean([rejected for _, rejected in rewards]), rel=1e-6)
    assert found["chosen_logprob"] == pytest.approx(
        np.mean([chosen[0] for _, chosen, _ in expected(outputs)]), rel=1e-6
    )
    # The control: the answers change places.
    spans = [range(sum(TOKENS[:row]), sum(TOKENS[: row + 1])) for row in range(6)]
    order = [at for row in SWAPPED for at in spans[row]]
    reference = batch.values["reference"].numpy()[order]
    swapped = collate([row_of(TOKENS[row]) for row in SWAPPED], range(6), {"reference": reference})
    assert objective.loss_sum(outputs[order], swapped, sums).item() != pytest.approx(loss.item(), rel=1e-3)


def test_kto_is_the_formula_of_its_paper_and_its_point_has_no_gradient() -> None:
    batch, outputs = pairs()
    desirable, point = [True, False, False, True, False, True], 1.3
    values = {"reference": batch.values["reference"], "desirable": torch.tensor(desirable)}
    batch = replace(batch, values=values)
    objective = KTO(PreferenceConfig(beta=BETA, desirable_weight=1.7, undesirable_weight=0.6), 64)
    objective.known = {"kl": torch.tensor(4 * point), "answers": torch.tensor(4.0)}

    def expected(given: torch.Tensor, kl: float = point) -> float:
        moved = [float(row.sum()) for row in (given.double() - batch.values["reference"]).split(list(TOKENS))]
        each = [
            1.7 * (1 - sigma(BETA * (by - kl))) if good else 0.6 * (1 - sigma(BETA * (kl - by)))
            for by, good in zip(moved, desirable, strict=True)
        ]
        return sum(each)

    sums, given = torch.zeros(7, dtype=torch.float64), outputs.clone().requires_grad_()
    loss = objective.loss_sum(given, batch, sums)
    assert loss.item() == pytest.approx(expected(outputs), rel=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    for at in range(len(outputs)):
        moved = [outputs.double().index_add(0, torch.tensor([at]), torch.tensor([by]).double()) for by in (1e-4, -1e-4)]
        up, down = map(expected, moved)
        assert float(given.grad[at]) == pytest.approx((up - down) / 2e-4, rel=1e-4, abs=1e-7)
    found = objective.metrics([float(loss.detach()), objective.batch_weight(batch), *sums.tolist()])
    assert found["kl"] == pytest.approx(point, rel=1e-6)
    # Of answers of one side only their own means are known.
    lacking = found.keys() - objective.recorded([2.0, 0.0, 4, 3, 2.0, -8.0, 0.0], 4.0).keys()
    assert lacking == {"eval_loss", "margin", "undesirable_reward", "undesirable_logprob"}
    # A point below 0 is 0. The control: another point is another loss.
    objective.known = {"kl": torch.tensor(-3.0), "answers": torch.tensor(4.0)}
    assert objective.loss_sum(outputs, batch, sums).item() == pytest.approx(expected(outputs, 0.0), rel=1e-6)
    assert expected(outputs, 0.0) != pytest.approx(expected(outputs), rel=1e-3)


def test_a_pair_counts_as_one_and_what_is_none_is_named() -> None:
    split: Any = type("Split", (), {"groups": Groups(np.array([0, 2, 4])), "where": lambda self, row: f"rows:{row}"})()
    split.__class__.__len__ = lambda self: 4
    assert DPO(PreferenceConfig(), 0.1).weight(split).tolist() == [1, 0, 1, 0]
    split.groups = Groups(np.array([0, 2, 3]))
    with pytest.raises(DataError, match="rows:2: a row with another answer or none beside it is no pair"):
        DPO(PreferenceConfig(), 0.1).weight(split)


@pytest.mark.parametrize(
    ("objective", "preference", "message"),
    [
        ("orpo", {"gamma": 2}, r"preference\.gamma: has no effect with train\.objective orpo; simpo has it"),
        ("dpo", {"loss": "hinge", "label_smoothing": 0.2}, "has no effect with preference.loss hinge"),
        ("dpo", {"loss": "robust"}, "preference.label_smoothing: with 0, preference.loss robust is sigmoid"),
    ],
)
def test_a_setting_without_effect_is_refused(objective: str, preference: dict[str, Any], message: str) -> None:
    plain = {"model": {"name": "m"}, "data": {"source": "d"}, "train": {"objective": objective}}
    with pytest.raises(ConfigError, match=message):
        build_config({**plain, "preference": preference}, source="test")
