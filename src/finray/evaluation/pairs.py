"""Scores of pairs of answers: how much likelier a model finds the chosen one, and the rewards of the run's objective.

The first are of any model; so base, start and tuned can be compared. Rewards are those that training recorded.
"""

from __future__ import annotations

import torch

from finray.config.objectives import objective_name
from finray.config.resolved import Execution
from finray.config.schema import Config
from finray.evaluation.estimates import Mean
from finray.evaluation.scores.base import FloatArray, Score
from finray.objectives.preferences import DPO, ORPO, PairObjective, Pairs, SimPO

# By name, in the order of display.
SCORES: dict[str, Score] = {
    "preference_accuracy": Mean(is_share=True),
    "preference_accuracy_per_token": Mean(is_share=True),
    "preference_margin": Mean(),
    "chosen_logprob": Mean((None, 0.0), higher_is_better=None),
    "rejected_logprob": Mean((None, 0.0), higher_is_better=None),
    "reward_accuracy": Mean(is_share=True),
    "reward_margin": Mean(),
    "preference_loss": Mean(higher_is_better=False),
}
_OBJECTIVES: dict[str, type[PairObjective]] = {kind.spec.name: kind for kind in (DPO, ORPO, SimPO)}


def ahead(name: str, values_P2: FloatArray) -> dict[str, FloatArray]:
    """Accuracy and margin (P, 1) of a value that the chosen answer (first) is to have more of; equal ones are wrong."""
    margin_P1 = values_P2[:, :1] - values_P2[:, 1:]
    return {f"{name}_accuracy": (margin_P1 > 0).astype(float), f"{name}_margin": margin_P1}


def likelihoods(losses_P22: FloatArray) -> dict[str, FloatArray]:
    """By score, the statistics (P, 1) of a model.

    Args:
        losses_P22: summed loss in nats and number of tokens, of the chosen and the rejected answer.
    """
    logprobs_P2, tokens_P2 = -losses_P22[..., 0], losses_P22[..., 1]
    return {
        **ahead("preference", logprobs_P2),
        "preference_accuracy_per_token": ahead("", logprobs_P2 / tokens_P2)["_accuracy"],
        "chosen_logprob": logprobs_P2[:, :1],
        "rejected_logprob": logprobs_P2[:, 1:],
    }


def needs_reference(config: Config) -> bool | None:
    """Whether the rewards of a run's objective are relative to a reference; None if it has no rewards of pairs that
    are known here."""
    kind = _OBJECTIVES.get(objective_name(config))
    return None if kind is None else "reference" in kind.spec.columns


def rewards(
    config: Config, execution: Execution, losses_P22: FloatArray, reference_P22: FloatArray | None
) -> dict[str, FloatArray]:
    """By score, the statistics (P, 1) of a model, by the run's objective.

    Args:
        config: of the run, whose objective is one of pairs.
        execution: of the run.
        losses_P22: of the model, as of :func:`likelihoods`.
        reference_P22: of the reference; None if there is none.
    """
    objective = _OBJECTIVES[objective_name(config)].build(config, execution, device=torch.device("cpu"))
    logprobs_P2, tokens_P2 = -torch.from_numpy(losses_P22[..., 0]), torch.from_numpy(losses_P22[..., 1])
    before_P2 = logprobs_P2 if reference_P22 is None else -torch.from_numpy(reference_P22[..., 0])
    losses_P, rewards_P2 = objective.losses(Pairs(logprobs_P2, tokens_P2, logprobs_P2 - before_P2))
    return {**ahead("reward", rewards_P2.numpy()), "preference_loss": losses_P.numpy()[:, None]}
