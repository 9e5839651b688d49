"""Conversations rendered without running the chat template again.

What a template makes of a conversation with given roles is, but for the words of the messages, always the same text. A
rendering is traced once: the template gets objects in place of the words. What it writes of them it writes into an
:class:`Outline`, what it asks of them (`'</think>' in content`) is kept with the answer, and anything else ends the
tracing. A conversation with the same roles whose words give the same answers would take the template the same way, so
its text is the outline, filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

# Of one kind of conversation, which may differ by what its words are asked, and kinds.
_MOST_OUTLINES = 4
_MOST_KEYS = 4096


class Untraceable(Exception):
    """The template does something with a message's words that an outline cannot say."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the words of a message go, after methods of ``str`` with constant arguments."""

    index: int
    methods: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def of(self, contents: Sequence[str]) -> str:
        text = contents[self.index]
        for name, arguments in self.methods:
            text = getattr(text, name)(*arguments)
        return text


_Part = str | _Slot
# A slot, the method of `str` that it was asked with, its arguments, and the answer.
_Asked = tuple[_Slot, str, tuple[Any, ...], bool]


@dataclass(frozen=True, slots=True)
class Outline:
    """A rendered conversation with slots for the words of its messages, and what must hold for the words."""

    parts: tuple[_Part, ...]
    asked: tuple[_Asked, ...]

    def fill(self, contents: Sequence[str]) -> str | None:
        """The conversation with these words; None where the template would be asked anew."""
        for slot, name, arguments, answer in self.asked:
            if getattr(slot.of(contents), name)(*arguments) is not answer:
                return None
        return "".join([part if type(part) is str else part.of(contents) for part in self.parts])  # type: ignore[union-attr]


class Outlines:
    """Outlines of one template's renderings, traced where a conversation is like one before it.

    Args:
        template: as it is compiled.
        source: its text.
    """

    def __init__(self, template: Any, source: str) -> None:
        self._template, self._source = template, source
        self._traced: Any = None
        # By the roles, and what else the template is given.
        self._known: dict[Any, list[Outline | None]] = {}

    def fill(self, key: Any, contents: Sequence[str]) -> str | None:
        """A conversation as the template would render it; None where that is not known."""
        for outline in self._known.get(key, ()):
            if outline is not None and (text := outline.fill(contents)) is not None:
                return text
        return None

    def learn(self, key: Any, contents: Sequence[str], text: str, render: Callable[[Any, list[Any]], Any]) -> None:
        """Trace a rendering that was not known, unless it is the first of its kind or the others came to little.

        Args:
            key: whatever decides it but the words.
            contents: the words.
            text: what the template makes of them.
            render: renders with a template, and with these objects as the words.
        """
        known = self._known.get(key)
        if known is None:
            if len(self._known) == _MOST_KEYS:
                self._known.clear()
            self._known[key] = []
        elif len(known) < _MOST_OUTLINES:
            known.append(None)
            # Whatever ends the tracing: the template is asked as if there had been none.
            with suppress(Exception):
                self._traced = self._traced or _traced(self._template, self._source)
                asked: list[_Asked] = []
                words = [_Words((_Slot(index),), contents, asked) for index in range(len(contents))]
                outline = Outline(_joined([_shown(render(self._traced, words))]), tuple(asked))
                if outline.fill(contents) == text:
                    known[-1] = outline


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Untraceable


class _Words:
    """Words of messages, alone or with other text around them, while a rendering is traced.

    No `str`, so that whatever is not foreseen here fails, in Jinja as in C, instead of looking at letters unseen.
    """

    __slots__ = ("_asked", "_contents", "_parts")

    def __init__(self, parts: tuple[_Part, ...], contents: Sequence[str], asked: list[_Asked]) -> None:
        self._parts, self._contents, self._asked = parts, contents, asked

    def _slot(self) -> _Slot:
        part = self._parts[0]
        if len(self._parts) > 1 or isinstance(part, str):
            raise Untraceable
        return part

    def _ask(self, name: str, *arguments: Any) -> bool:
        if not all(isinstance(one, str) for one in arguments):
            raise Untraceable
        slot = self._slot()
        answer = bool(getattr(slot.of(self._contents), name)(*arguments))
        self._asked.append((slot, name, arguments, answer))
        return answer

    def _change(self, name: str, *arguments: Any) -> _Words:
        if not all(isinstance(one, str) for one in arguments):
            raise Untraceable
        slot = self._slot()
        return self._with(_Slot(slot.index, (*slot.methods, (name, arguments))))

    def _with(self, *parts: _Part) -> _Words:
        return _Words(parts, self._contents, self._asked)

    def __add__(self, other: Any) -> _Words:
        return self._with(*_joined([self, other]))

    def __radd__(self, other: Any) -> _Words:
        return self._with(*_joined([other, self]))

    def __bool__(self) -> bool:
        return any(isinstance(part, str) for part in self._parts) or self._ask("__ne__", "")

    def __eq__(self, other: object) -> bool:
        return self._ask("__eq__", other)

    def __contains__(self, other: Any) -> bool:
        return self._ask("__contains__", other)

    def startswith(self, start: Any) -> bool:
        return self._ask("startswith", start)

    def endswith(self, end: Any) -> bool:
        return self._ask("endswith", end)

    def strip(self, *letters: Any) -> _Words:
        return self._change("strip", *letters)

    def lstrip(self, *letters: Any) -> _Words:
        return self._change("lstrip", *letters)

    def rstrip(self, *letters: Any) -> _Words:
        return self._change("rstrip", *letters)

    def replace(self, old: Any, new: Any) -> _Words:
        return self._change("replace", old, new)

    # Where these fail with an error of Python's, Jinja goes on without.
    __str__ = __repr__ = __format__ = __hash__ = __getattr__ = __getitem__ = __iter__ = __len__ = _refuse
    __int__ = __float__ = __index__ = __html__ = _refuse


class _Shown(str):
    """Words on their way out of an expression, where Jinja makes everything a `str`."""

    words: _Words

    def __str__(self) -> str:
        return self


def _shown(value: Any) -> Any:
    if isinstance(value, _Words):
        shown = _Shown()
        shown.words = value
        return shown
    return value


def _joined(values: Iterable[Any]) -> tuple[_Part, ...]:
    """Text and words as parts, no two of them text."""
    parts: list[_Part] = []
    for value in values:
        words = value.words if isinstance(value, _Shown) else value
        if not isinstance(words, str | _Words):
            raise Untraceable
        for part in (words,) if isinstance(words, str) else words._parts:
            if parts and isinstance(part, str) and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
    return tuple(parts)


def _concat(values: Iterable[Any]) -> Any:
    found = [_shown(value) for value in values]
    words = [one.words for one in found if isinstance(one, _Shown)]
    return words[0]._with(*_joined(found)) if words else "".join(found)


# Of any text they say the same.
_OF_TYPES = frozenset(
    ("boolean", "defined", "iterable", "mapping", "none", "number", "sequence", "string", "undefined")
)


def _traced(template: Any, source: str) -> Any:
    """The template for words that are traced; what it calls may see containers of them, but them only here."""
    from jinja2.runtime import Macro

    environment = template.environment.overlay(finalize=_shown)

    def guard(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            if any(isinstance(one, _Words) for one in (*arguments, *named.values())):
                return own(*arguments, **named)
            return function(*arguments, **named)

        return guarded

    def test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return guard(function, (lambda value: function("text")) if name in _OF_TYPES else _refuse)

    filters = {"trim": _Words.strip, "string": lambda value: value}
    for name in ("default", "d"):
        filters[name] = environment.filters[name]
    environment.concat = _concat
    environment.tests = {name: test(name, function) for name, function in environment.tests.items()}
    environment.filters = {
        name: guard(function, filters.get(name, _refuse)) for name, function in environment.filters.items()
    }
    environment.getitem = guard(environment.getitem, lambda value, key: _refuse())
    call, is_harmless = environment.call, (environment.globals.get("namespace"),)

    def guarded_call(context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        harmless = isinstance(function, Macro) or function in is_harmless
        return (call if harmless else guard(call, _refuse))(context, function, *arguments, **named)

    environment.call = guarded_call
    return environment.from_string(source)
