"""The section `export`: what of a run is published, and where."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from finray.config.section import Section

# What the Hub allows in a name, without and with its owner.
_NAME = r"(?!.*(\.\.|--))[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"


def hub_id(value: str) -> str:
    """A name that a model may have on the Hub.

    Raises:
        ValueError: it is none.
    """
    if not all(re.fullmatch(_NAME, part) for part in value.split("/")) or value.count("/") > 1:
        raise ValueError(
            f"`{value}` is no name of a model on the Hub: OWNER/NAME, each of letters, digits, `-`, `_` and `.`, and "
            "neither `--` nor `..`"
        )
    return value


class ExportConfig(Section):
    """What is published of the run. The token is read from `HF_TOKEN`, or from where `hf auth login` keeps it."""

    push_to_hub: str | None = Field(
        None,
        description="Model on the Hub, `OWNER/NAME`, to which the finished model is pushed. It is made if it is not "
        "there. Whether that is allowed is asked before the training starts.",
    )
    push_every_checkpoint: bool = Field(
        False,
        description="Push each checkpoint, with its training state, to `last-checkpoint/` of that model, in the "
        "background. A failure is said and does not stop the training.",
    )
    merged: bool = Field(False, description="Push the adapter merged into its base, in bf16, instead of the adapter.")
    public: bool = Field(False, description="Make the model public. Else it is private.")
    base_model: str | None = Field(
        None, description="The base model's name on the Hub, `OWNER/NAME`, where `model.name` is a local directory."
    )

    @field_validator("push_to_hub", "base_model")
    @classmethod
    def _is_a_hub_id(cls, value: str | None) -> str | None:
        return None if value is None else hub_id(value)

    @model_validator(mode="after")
    def _has_effect(self) -> ExportConfig:
        if self.push_to_hub is None and self != type(self).model_construct():
            raise ValueError("export: nothing is pushed without export.push_to_hub; set it to OWNER/NAME")
        return self
