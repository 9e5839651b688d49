"""The section `export`: where a run is published."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from finray.config.section import Section

# What the Hub allows in a name, without and with its owner.
_NAME = r"(?!.*(\.\.|--))[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"


def hub_id(value: str) -> str:
    """A name that a model may have on the Hub. Raises ValueError: not a Hub id."""
    if not all(re.fullmatch(_NAME, part) for part in value.split("/")) or value.count("/") > 1:
        raise ValueError(
            f"`{value}` is not a model name on the Hub: write OWNER/NAME, with letters, digits, `-`, `_` and `.`, "
            "but no `--` or `..`"
        )
    return value


class ExportConfig(Section):
    """What is pushed to the Hugging Face Hub, with the token from `HF_TOKEN` or `hf auth login`."""

    push_to_hub: str | None = Field(
        None,
        description="Model on the Hub, `OWNER/NAME`, to push the finished model to. It is created if it does not "
        "exist. Permission is checked before the training starts.",
    )
    push_every_checkpoint: bool = Field(
        False,
        description="Push each checkpoint, with its training state, to `last-checkpoint/` of that model, in the "
        "background. A failure is a warning and does not stop the training.",
    )
    merged: bool = Field(False, description="Push the adapter merged into its base, in bf16, instead of the adapter.")
    public: bool = Field(False, description="Make the model public. By default it is private.")
    base_model: str | None = Field(
        None, description="The base model's name on the Hub, `OWNER/NAME`, if `model.name` is a local directory."
    )

    @field_validator("push_to_hub", "base_model")
    @classmethod
    def _is_a_hub_id(cls, value: str | None) -> str | None:
        return None if value is None else hub_id(value)

    @model_validator(mode="after")
    def _has_effect(self) -> ExportConfig:
        if self.push_to_hub is None and self != type(self).model_construct():
            raise ValueError("export: set export.push_to_hub to OWNER/NAME; without it nothing is pushed")
        return self
