"""The base class of every section of the configuration."""

from __future__ import annotations

import typing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A group of fields: frozen, unknown keys are errors, numbers must be finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


def section_of(annotation: Any) -> type[Section] | None:
    """The section inside an annotation such as ``ProfileConfig | None`` or ``list[SourceConfig]``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, typing.get_args(annotation))), None)
