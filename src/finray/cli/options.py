"""Commands whose options are the fields of a request."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from finray.config.requests import Option


def takes(request: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that is called with a ``request`` of this class: the options of its fields stand where that does."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        options = {option.name: option for option in _options(request)}

        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in options}
            # An option that may be repeated, and is not given, is an empty list.
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
            function(request=request(**{name: value for name, value in values.items() if value != ()}), **arguments)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            parameters += options.values() if parameter.name == "request" else [parameter]
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return run

    return decorate


def _options(request: type[Any]) -> list[inspect.Parameter]:
    """A parameter for each field; those of base classes, which many commands have, come last."""
    hints = get_type_hints(request, include_extras=True)
    defaults = {field.name: field.default for field in fields(request)}
    names = dict.fromkeys(name for kind in request.__mro__ for name in vars(kind).get("__annotations__", ()))
    parameters = []
    for name in names:
        option = next((part for part in getattr(hints[name], "__metadata__", ()) if isinstance(part, Option)), None)
        if option is None:
            # Set by programs only.
            continue
        kind = _read_as(hints[name].__origin__, option)
        # A switch that is off needs no `--no-` beside it.
        flags = option.flags or ((f"--{name.replace('_', '-')}",) if kind is bool else ())
        declared = typer.Option(*flags, help=option.help, min=option.min, max=option.max, callback=option.parse)
        annotation: Any = Annotated[kind, declared]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        )
    return parameters


def _read_as(kind: Any, option: Option) -> Any:
    """What the command line reads for a field of this type, where the API takes more than one."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if Path in kinds:
        return Path | None
    if any(get_origin(part) in (Sequence, tuple) for part in kinds):
        return list[str] | None if option.parse is None else str | None
    return kind
