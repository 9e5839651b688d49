"""Conversations rendered without running the chat template, where that is certain to give the same text.

A template is run once for every sequence of roles, with contents that cannot be looked into: they may be written,
joined and stripped, and anything else that is done to them (a comparison, a search, a length) is noticed. Where nothing
is, the text of every conversation with these roles has the same fixed parts, and contents stand between them as they
are. Templates that are written with what would hide such a look (macros, blocks that are assigned, most filters) are
always run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finray.data.formats.examples import Message

# Contents with quotes, an angle bracket, a backslash and both cases: whatever changes text changes these.
_MARK = '\ue000{}"a\\B<&\ue001'
_FILTERS = frozenset({"trim", "tojson", "default", "string", "length", "selectattr", "rejectattr"})
_TESTS = frozenset("string defined undefined none mapping iterable number boolean true false equalto eq ne".split())  # noqa: SIM905
_METHODS = frozenset({"strip", "lstrip", "rstrip", "get", "items"})
_FUNCTIONS = frozenset({"raise_exception", "namespace", "strftime_now", "range"})
# What may be done to a text that must not be looked into.
_FREE = frozenset(
    [
        "__new__",
        "__init__",
        "__class__",
        "__getattribute__",
        "__str__",
        "__add__",
        "__radd__",
        "strip",
        "lstrip",
        "rstrip",
        "__init_subclass__",
        "__subclasshook__",
        "__doc__",
        "__setattr__",
        "__delattr__",
        "__sizeof__",
        "__reduce__",
        "__reduce_ex__",
        "__dir__",
    ]
)


class _Looked(Exception):
    """A template looked into a content."""


class _Opaque(str):
    """Text that may be written and joined; any other use raises."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> _Opaque:
        return _Opaque(str.__add__(self, other))

    def __radd__(self, other: str) -> _Opaque:
        return _Opaque(str.__add__(other, self))

    def strip(self, chars: str | None = None) -> _Opaque:
        if chars is not None:
            raise _Looked
        return self

    lstrip = rstrip = strip


def _refuse(*_: Any, **__: Any) -> Any:
    raise _Looked


for _name in dir(str):
    if _name not in _FREE:
        setattr(_Opaque, _name, _refuse)


class Outlines:
    """The fixed parts of rendered conversations, by their roles.

    Args:
        compiled: the chat template.
        source: its text.
        variables: given to it beside the messages.
    """

    def __init__(self, compiled: Any, source: str, variables: dict[str, Any]) -> None:
        self._compiled = compiled
        self._variables = variables
        self._found: dict[tuple[bool, tuple[str, ...]], tuple[str | int, ...] | None] = {}
        self._usable = _hides_nothing(compiled.environment.parse(source))

    def fill(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str | None:
        """The rendered conversation; None where the template has to be run."""
        if not self._usable:
            return None
        for message in messages:
            content = message.content
            # Stripping is not noticed, so there must be nothing to strip.
            if message.extra or not content or content[0].isspace() or content[-1].isspace():
                return None
        key = (add_generation_prompt, tuple([message.role for message in messages]))
        if key not in self._found:
            self._found[key] = self._outline(key[1], add_generation_prompt)
        outline = self._found[key]
        if outline is None:
            return None
        return "".join([part if isinstance(part, str) else messages[part].content for part in outline])

    def _outline(self, roles: tuple[str, ...], add_generation_prompt: bool) -> tuple[str | int, ...] | None:
        from jinja2.exceptions import TemplateError

        marks = [_MARK.format(index) for index in range(len(roles))]
        messages = [{"role": role, "content": _Opaque(mark)} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (_Looked, TemplateError, TypeError, KeyError, ValueError):
            return None
        parts: list[str | int] = [str(text)]
        for index, mark in enumerate(marks):
            parts = [piece for part in parts for piece in _split(part, mark, index)]
        # A mark that was changed leaves a trace of itself.
        if any(isinstance(part, str) and ("\ue000" in part or "\ue001" in part) for part in parts):
            return None
        return tuple(part for part in parts if part != "")


def _split(part: str | int, mark: str, index: int) -> list[str | int]:
    if isinstance(part, int):
        return [part]
    pieces: list[str | int] = []
    for number, piece in enumerate(part.split(mark)):
        pieces += [index, piece] if number else [piece]
    return pieces


def _hides_nothing(tree: Any) -> bool:
    """Whether a template is written with nothing but what an opaque content survives, or notices."""
    from jinja2 import nodes

    written = {id(child) for output in tree.find_all(nodes.Output) for child in output.nodes}
    for node in tree.find_all(nodes.Node):
        if isinstance(node, nodes.AssignBlock | nodes.FilterBlock | nodes.CallBlock | nodes.Include | nodes.Import):
            return False
        if isinstance(node, nodes.Macro) and node.name not in _FUNCTIONS:
            return False
        if isinstance(node, nodes.Filter) and node.name not in _FILTERS and not _is_in_our_macro(node):
            return False
        if isinstance(node, nodes.Test) and node.name not in _TESTS:
            return False
        # `~` and `%` make ordinary text, which may be looked into unnoticed unless it is written at once.
        if isinstance(node, nodes.Concat) and id(node) not in written:
            return False
        if isinstance(node, nodes.Mod) and not isinstance(node.right, nodes.Const):
            return False
        if isinstance(node, nodes.Call) and not _is_harmless(node):
            return False
        if isinstance(node, nodes.Compare) and not all(_is_noticed(node.expr, operand) for operand in node.ops):
            return False
    return True


def _is_in_our_macro(node: Any) -> bool:
    """Whether a filter is one of the macro that finray itself puts before templates with a date, on its argument."""
    from jinja2 import nodes

    inner = node
    while isinstance(inner, nodes.Filter) and inner.name == "replace":
        inner = inner.node
    return isinstance(inner, nodes.Name) and inner.name == "pattern"


def _is_harmless(call: Any) -> bool:
    from jinja2 import nodes

    if isinstance(call.node, nodes.Name):
        return call.node.name in _FUNCTIONS
    return isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS


def _is_noticed(left: Any, operand: Any) -> bool:
    """Whether a comparison with a content would be noticed: a content on the left of `in` a text would not."""
    from jinja2 import nodes

    if operand.op not in ("in", "notin"):
        return True
    return isinstance(left, nodes.Const) or isinstance(operand.expr, nodes.List | nodes.Tuple)
