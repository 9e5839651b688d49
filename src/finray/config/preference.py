"""The section ``preference``: what the objectives that learn from pairs or labelled answers have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from finray.config.section import Section

# Default of ``preference.beta`` by objective.
BETA = {"dpo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
# Losses of ``dpo`` without ``label_smoothing``.
UNSMOOTHED = ("ipo", "hinge")
# Which of the fields an objective takes.
_REFERENCE = frozenset({"reference", "reference_in_step"})
TAKEN = {
    "dpo": frozenset({"beta", "loss", "label_smoothing", "length_normalized", "chosen_weight"}) | _REFERENCE,
    "kto": frozenset({"beta", "desirable_weight", "undesirable_weight"}) | _REFERENCE,
    "orpo": frozenset({"beta"}),
    "simpo": frozenset({"beta", "label_smoothing", "gamma", "chosen_weight"}),
    "reward": frozenset({"margins", "centering"}),
}


class PreferenceConfig(Section):
    """Learning from pairs of answers (`train.objective` `dpo`, `orpo`, `simpo`, `reward`), or single ones (`kto`)."""

    beta: float | None = Field(
        None,
        gt=0,
        description="`dpo` and `kto`: how close the model stays to the reference; more is closer. `orpo`: weight of "
        "the odds ratio. `simpo`: scale of the difference. null is 0.1, for `simpo` 2.",
    )
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = Field(
        "sigmoid",
        description="`dpo`: `sigmoid` is DPO itself; `ipo` stops at a margin, on log-probabilities per token; `hinge` "
        "as in SLiC; `robust` is unbiased where a share `label_smoothing` of the pairs is swapped.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        validate_default=True,
        description="`dpo` with `sigmoid` or `robust`, and `simpo`: share of the pairs that are taken to be swapped.",
    )
    length_normalized: bool = Field(
        False, description="`dpo`: compare log-probabilities per token, so that longer answers gain nothing."
    )
    gamma: float = Field(1.0, ge=0, description="`simpo`: the margin by which the chosen answer is to be ahead.")
    chosen_weight: float = Field(
        0.0,
        ge=0,
        description="`dpo` and `simpo`: weight of the chosen answer's own loss per token, which keeps its probability "
        "from falling. `orpo` has it with weight 1.",
    )
    margins: bool = Field(
        False,
        description="`reward`: the chosen answer is to be ahead by the pair's own margin, from a column `margin` or "
        "the difference of two scores.",
    )
    centering: float = Field(
        0.0,
        ge=0,
        description="`reward`: weight of the square of a pair's summed rewards, which keeps rewards around 0; 0.01 is "
        "usual.",
    )
    desirable_weight: float = Field(1.0, ge=0, description="`kto`: weight of the loss of a desirable answer.")
    undesirable_weight: float = Field(1.0, ge=0, description="`kto`: weight of the loss of an undesirable answer.")
    reference: str = Field(
        "start",
        min_length=1,
        description="`dpo` and `kto`: the model that answers are compared with. `start` is what the run begins from; "
        "`base` is that without the adapter of `adapter.start_from`; or name another model, with the same tokens: a "
        "directory, a Hub id, an adapter or a finished run.",
    )
    reference_in_step: bool = Field(
        False,
        description="`dpo` and `kto`: compute the reference in every step, instead of once before training. It needs "
        "no pass and no files, costs a forward pass per step, and, unless the reference is this model under an "
        "adapter, the memory of a second model.",
    )

    @field_validator("label_smoothing")
    @classmethod
    def _smooths_loss(cls, value: float, info: ValidationInfo) -> float:
        if value and (loss := info.data.get("loss")) in UNSMOOTHED:
            raise ValueError(f"has no effect with preference.loss {loss}; sigmoid or robust has it")
        if not value and info.data.get("loss") == "robust":
            raise ValueError("with 0, preference.loss robust is sigmoid; give the share of the pairs that are swapped")
        return value

    @property
    def names_model(self) -> bool:
        """Whether the reference is another model than the run's, by its name."""
        return self.reference not in ("start", "base")

    @field_validator("reference")
    @classmethod
    def _names_a_model(cls, value: str) -> str:
        if value == "in_step":
            raise ValueError("this names a model (start, base or another); write reference_in_step: true beside it")
        return value
