"""What every section is."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A group of fields: frozen, with no unknown keys, and finite numbers only."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )
