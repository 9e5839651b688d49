"""Renders conversations without running the chat template each time.

For given roles, a template writes always the same text around the content of the messages. So a rendering is traced
once: the template gets proxy objects in place of the contents. Where it writes them becomes a slot of an
:class:`Outline`, tests of them (`'</think>' in content`) are recorded with the answer, and anything else ends the
tracing. For a conversation with the same roles whose contents give the same answers, the template would take the same
branches, so its text is the filled outline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

# Per kind of conversation (outlines differ by the answers of tests), and number of kinds.
_MOST_OUTLINES = 4
_MOST_KEYS = 4096


class Untraceable(Exception):
    """The template does something with a message's content that an outline cannot represent."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a message's content, after methods of ``str`` with constant arguments."""

    index: int
    methods: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def of(self, contents: Sequence[str]) -> str:
        text = contents[self.index]
        for name, arguments in self.methods:
            text = getattr(text, name)(*arguments)
        return text


_Part = str | _Slot
# A test: slot, method of `str`, its arguments, and the answer.
_Question = tuple[_Slot, str, tuple[Any, ...], bool]


@dataclass(frozen=True, slots=True)
class Outline:
    """A rendered conversation with slots for the contents of its messages, and the tests that they must satisfy."""

    parts: tuple[_Part, ...]
    questions: tuple[_Question, ...]

    def fill(self, contents: Sequence[str]) -> str | None:
        """The conversation with these contents; None if the template has to be rendered again."""
        for slot, name, arguments, answer in self.questions:
            if getattr(slot.of(contents), name)(*arguments) is not answer:
                return None
        return "".join([part if type(part) is str else part.of(contents) for part in self.parts])  # type: ignore[union-attr]


class Outlines:
    """Outlines of one template's renderings, traced when a kind of conversation occurs again."""

    def __init__(self, template: Any, source: str) -> None:
        self._template, self._source = template, source
        self._traced: Any = None
        # By the roles, and other inputs of the template.
        self._known: dict[Any, list[Outline | None]] = {}

    def fill(self, key: Any, contents: Sequence[str]) -> str | None:
        """A conversation as the template would render it; None if there is no outline for it."""
        for outline in self._known.get(key, ()):
            if outline is not None and (text := outline.fill(contents)) is not None:
                return text
        return None

    def learn(self, key: Any, contents: Sequence[str], text: str, render: Callable[[Any, list[Any]], Any]) -> None:
        """Trace a new rendering, unless it is the first of its kind or earlier outlines were of little use.

        Args:
            key: every input except the contents.
            contents: the contents of the messages.
            text: the template's rendering.
            render: renders with a given template, and these objects as contents.
        """
        outlines = self._known.get(key)
        if outlines is None:
            if len(self._known) == _MOST_KEYS:
                self._known.clear()
            self._known[key] = []
        elif len(outlines) < _MOST_OUTLINES:
            outlines.append(None)
            # Tracing may fail in any way: then the template is rendered as usual.
            with suppress(Exception):
                self._traced = self._traced or _traced(self._template, self._source)
                questions: list[_Question] = []
                words = [_Text((_Slot(index),), contents, questions) for index in range(len(contents))]
                outline = Outline(_joined([_shown(render(self._traced, words))]), tuple(questions))
                if outline.fill(contents) == text:
                    outlines[-1] = outline


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Untraceable


class _Text:
    """The content of messages, alone or with text around it, while a rendering is traced.

    It is not a `str`, so that any unsupported use fails, in Jinja as in C, instead of reading the text unnoticed.
    """

    __slots__ = ("_contents", "_parts", "_questions")

    def __init__(self, parts: tuple[_Part, ...], contents: Sequence[str], questions: list[_Question]) -> None:
        self._parts, self._contents, self._questions = parts, contents, questions

    def _slot(self) -> _Slot:
        part = self._parts[0]
        if len(self._parts) > 1 or isinstance(part, str):
            raise Untraceable
        return part

    def _ask(self, name: str, *arguments: Any) -> bool:
        if not all(isinstance(argument, str) for argument in arguments):
            raise Untraceable
        slot = self._slot()
        answer = bool(getattr(slot.of(self._contents), name)(*arguments))
        self._questions.append((slot, name, arguments, answer))
        return answer

    def _change(self, name: str, *arguments: Any) -> _Text:
        if not all(isinstance(argument, str) for argument in arguments):
            raise Untraceable
        slot = self._slot()
        return self._with(_Slot(slot.index, (*slot.methods, (name, arguments))))

    def _with(self, *parts: _Part) -> _Text:
        return _Text(parts, self._contents, self._questions)

    def __add__(self, other: Any) -> _Text:
        return self._with(*_joined([self, other]))

    def __radd__(self, other: Any) -> _Text:
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

    def strip(self, *letters: Any) -> _Text:
        return self._change("strip", *letters)

    def lstrip(self, *letters: Any) -> _Text:
        return self._change("lstrip", *letters)

    def rstrip(self, *letters: Any) -> _Text:
        return self._change("rstrip", *letters)

    def replace(self, old: Any, new: Any) -> _Text:
        return self._change("replace", old, new)

    # If these raise a Python error, Jinja would continue without.
    __str__ = __repr__ = __format__ = __hash__ = __getattr__ = __getitem__ = __iter__ = __len__ = _refuse
    __int__ = __float__ = __index__ = __html__ = _refuse


class _Shown(str):
    """Content leaving an expression, where Jinja converts everything to `str`."""

    words: _Text

    def __str__(self) -> str:
        return self


def _shown(value: Any) -> Any:
    if isinstance(value, _Text):
        shown = _Shown()
        shown.words = value
        return shown
    return value


def _joined(values: Iterable[Any]) -> tuple[_Part, ...]:
    """Text and contents as parts, with adjacent text merged."""
    parts: list[_Part] = []
    for value in values:
        words = value.words if isinstance(value, _Shown) else value
        if not isinstance(words, str | _Text):
            raise Untraceable
        for part in (words,) if isinstance(words, str) else words._parts:
            if parts and isinstance(part, str) and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
    return tuple(parts)


def _concat(values: Iterable[Any]) -> Any:
    parts = [_shown(value) for value in values]
    words = [part.words for part in parts if isinstance(part, _Shown)]
    return words[0]._with(*_joined(parts)) if words else "".join(parts)


# They have the same answer for any text.
_OF_TYPES = frozenset(
    ("boolean", "defined", "iterable", "mapping", "none", "number", "sequence", "string", "undefined")
)


def _traced(template: Any, source: str) -> Any:
    """The template for traced contents; its filters may see containers of them, but the contents only here."""
    from jinja2.runtime import Macro

    environment = template.environment.overlay(finalize=_shown)

    def guard(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            if any(isinstance(value, _Text) for value in (*arguments, *named.values())):
                return original(*arguments, **named)
            return function(*arguments, **named)

        return guarded

    def test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return guard(function, (lambda value: function("text")) if name in _OF_TYPES else _refuse)

    filters = {"trim": _Text.strip, "string": lambda value: value}
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
