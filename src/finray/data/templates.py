"""Rendered conversations and the character spans in them that are learned.

Where a message's text lies in the rendered string is found by rendering the conversation a second time with a unique
marker in place of every message, and proving that markers replaced by messages give the real rendering back. A
template for which that does not hold (one that rewrites messages) is refused, never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from finray.data.formats import Message
from finray.errors import DataError

Span = tuple[int, int]

_MARKER = "\ue000{}\ue001"
_MARKER_PATTERN = re.compile("\ue000(\\d+)\ue001")


class ChatTokenizer(Protocol):
    """The part of a Transformers tokenizer that rendering needs."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any:
        """Render a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: what the template renders.
        spans: character spans to be learned, in order, each from the first character of an assistant message to the
            end of its end-of-turn token.
        ends: for each span, whether an end-of-turn token closed it.
    """

    text: str
    spans: tuple[Span, ...]
    ends: tuple[bool, ...]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: a Transformers tokenizer.
        special_tokens: tokens that may end a turn, as text.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer, special_tokens: Iterable[str]) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, so conversations cannot be rendered",
                where="model.chat_template",
                repair="set model.chat_template to a Jinja file, or give rows with `prompt` and `completion`",
            )
        self._tokenizer = tokenizer
        self._special = tuple(special_tokens)
        ordered = sorted(self._special, key=len, reverse=True)
        self._end_of_turn = re.compile(r"\s*(?:" + "|".join(map(re.escape, ordered)) + ")") if ordered else None

    def render(self, messages: tuple[Message, ...], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text.

        Raises:
            DataError: the template refuses the conversation.
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return self._apply(plain, add_generation_prompt=add_generation_prompt)

    def ends_turn(self, text: str) -> bool:
        """Whether a rendered conversation ends with a token that ends a turn, white space aside."""
        return text.rstrip().endswith(self._special)

    def render_with_spans(self, messages: tuple[Message, ...], *, learned: Callable[[int], bool]) -> Rendered:
        """The conversation as text, with the spans of the messages that ``learned(index)`` selects.

        Raises:
            DataError: the template changes messages, so that spans cannot be derived with certainty.
        """
        text = self.render(messages)
        marked = self._apply(
            [{"role": message.role, "content": _MARKER.format(index)} for index, message in enumerate(messages)]
        )
        for clean in (str, str.strip):
            contents = [clean(message.content) for message in messages]
            pieces = _substitute(marked, contents)
            if pieces is not None and pieces.text == text:
                return self._spans(text, pieces.found, learned)
        raise DataError(
            "the chat template rewrites messages, so which tokens to learn cannot be derived with certainty",
            where="model.chat_template",
            repair="set model.chat_template to a Jinja file that renders every message as it is",
        )

    def _apply(self, plain: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses the conversation: {error}",
                where="model.chat_template",
                repair="check the order and names of the roles",
            ) from None
        return str(text)

    def _spans(self, text: str, found: dict[int, Span], learned: Callable[[int], bool]) -> Rendered:
        spans, ends = [], []
        for index, (start, stop) in sorted(found.items(), key=lambda item: item[1]):
            if not learned(index):
                continue
            limit = min((span[0] for span in found.values() if span[0] >= stop), default=len(text))
            match = self._end_of_turn.match(text, stop, limit) if self._end_of_turn else None
            spans.append((start, match.end() if match else stop))
            ends.append(match is not None)
        return Rendered(text, tuple(spans), tuple(ends))


@dataclass(frozen=True, slots=True)
class _Substituted:
    text: str
    found: dict[int, Span]


def _substitute(marked: str, contents: list[str]) -> _Substituted | None:
    """Replace markers by contents; None when a message was left out or rendered twice."""
    parts: list[str] = []
    found: dict[int, Span] = {}
    length = position = 0
    for match in _MARKER_PATTERN.finditer(marked):
        index = int(match.group(1))
        if index in found or index >= len(contents):
            return None
        literal = marked[position : match.start()]
        found[index] = (length + len(literal), length + len(literal) + len(contents[index]))
        parts += [literal, contents[index]]
        length = found[index][1]
        position = match.end()
    if len(found) != len(contents):
        return None
    parts.append(marked[position:])
    return _Substituted("".join(parts), found)
