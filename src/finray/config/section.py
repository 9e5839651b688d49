"""What all sections of a configuration have in common."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from finray.errors import SECTIONS

# Numbers that count something are bounded: one that is out of all reason is a slip, and found before memory is.
PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Ratio = Annotated[float, Field(ge=0.0, lt=1.0)]


def _held_out(value: float) -> float:
    if value == 1 or (value > 1 and not value.is_integer()):
        raise ValueError(f"is a share below 1, or a number of rows of 2 or more; got {value:g}")
    return value


HeldOut = Annotated[float, Field(ge=0.0), AfterValidator(_held_out)]


class Section(BaseModel):
    """A group of fields: frozen, unknown keys are errors, numbers must be finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        SECTIONS.add(cls.__name__)

    @field_validator("*", mode="before")
    @classmethod
    def _plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """To Python, booleans are numbers; and text may hold what no file name and no file can."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if kinds & {int, float} and bool not in kinds and any(isinstance(item, bool) for item in _inside(value)):
            raise ValueError(f"must be a number, got {str(value).lower()}")
        for item in _inside(value):
            if isinstance(item, str) and (odd := NO_TEXT.search(item)):
                raise ValueError(f"holds U+{ord(odd[0]):04X}, which is not a valid character")
        if info.field_name in _PATHS and isinstance(value, str) and value.startswith("~"):
            try:
                Path(value).expanduser()
            except RuntimeError:
                raise ValueError(f"there is no home directory `{value.split('/')[0]}`") from None
        is_path = info.field_name in _PATHS and isinstance(value, str) and "{%" not in value
        if is_path and (odd := _VARIABLE.search(value)):
            # Else there would be a directory of this name.
            raise ValueError(
                f"environment variables such as {odd[1]} are not expanded in a config; write it out, or give "
                f"the field on the command line, where the shell expands them"
            )
        return value


# Fields that may hold a local path.
_PATHS = frozenset(
    ("output_dir", "name", "chat_template", "start_from", "source", "eval_source", "dir", "local_dir", "reference")
) | {"deepspeed_config", "encoder"}
_VARIABLE = re.compile(r"(?:^|/)(\$(?:[A-Za-z_]\w*|\{\w+\}))")
NO_TEXT = re.compile("[\x00\ud800-\udfff]")


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    inside = typing.get_args(annotation)
    return {annotation}.union(*map(_kinds, inside)) if inside else {annotation}


def _inside(value: Any) -> Iterator[Any]:
    """A value, and what is in it where it is a list or a mapping."""
    yield value
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _inside(item)


def section_of(annotation: Any) -> type[Section] | None:
    """The section inside an annotation such as ``ProfileConfig | None`` or ``list[SourceConfig]``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, typing.get_args(annotation))), None)
