"""Reasoning of an answer: in a field of its own, between tags in the content, or before a closing tag alone, as models
write it whose prompt has opened the tag."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from finray.data.formats.examples import Message

# Fields of a message that hold its reasoning.
KEYS = ("reasoning_content", "thinking", "reasoning")
# How most data writes reasoning in a content, whatever the model's own tags are.
_USUAL = ("<think>", "</think>")
# As in `<think>`, `</seed:think>`, `<reasoning>` and `[/THINK]`.
_TAG = re.compile(r"(<|\[)/?([\w:]*(?:think|thought|reason)[\w:]*)(>|\])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: its reasoning, and what it says after that."""

    reasoning: str
    rest: str


@dataclass(frozen=True, slots=True)
class Tags:
    """The pair of tags between which a chat template writes reasoning."""

    opening: str
    closing: str
    # White space around the reasoning, and after the closing tag.
    inside: str = "\n"
    after: str = "\n\n"

    @classmethod
    def of(cls, source: str) -> Tags | None:
        """The pair in a template's source, or that of a single tag in it; None if it has none."""
        every = [cls(f"{begin}{name}{end}", f"{begin}/{name}{end}") for begin, name, end in _TAG.findall(source)]
        pairs = [tags for tags in every if tags.opening in source and tags.closing in source]
        # In brackets alone stands also an index, as in `message[reasoning]`.
        return next(iter([*pairs, *(tags for tags in every if tags.opening.startswith("<"))]), None)

    @classmethod
    def between(cls, prompt: str, bare: str, whole: str, reasoning: str) -> Tags | None:
        """The pair that a template writes around reasoning in a field, such as gpt-oss's channels.

        Args:
            prompt: what is served.
            bare: the prompt with an answer without reasoning.
            whole: the same with reasoning.
            reasoning: a marker in its place.
        """
        before, _, rest = whole.partition(reasoning)
        if not (whole.startswith(prompt) and bare.startswith(prompt)):
            return None
        ends = zip(reversed(bare[len(prompt) :]), reversed(rest), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        opening, closing = before[len(prompt) :], rest[: len(rest) - same]
        inside = closing[: len(closing) - len(closing.lstrip())]
        after = closing[len(closing.rstrip()) :]
        return cls(opening.strip(), closing.strip(), inside, after) if opening.strip() and closing.strip() else None

    def are_in(self, message: Message) -> bool:
        """Whether an answer has one of the tags, or reasoning in a field."""
        tags = (self.opening, self.closing, *_USUAL)
        return any(tag in message.content for tag in tags) or bool(reasoning_of(message))

    def are_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside the tags, so that an answer begins there."""
        return prompt.rstrip().endswith(self.opening)

    def are_paired(self, text: str) -> bool:
        """Whether a text has one pair of tags or none."""
        counts = text.count(self.opening), text.count(self.closing)
        return counts in ((0, 0), (1, 1)) and text.find(self.opening) <= text.find(self.closing)

    def said(self, message: Message, prompt: str) -> Said | None:
        """The parts of an answer; None if it has no reasoning, or tags that do not pair after that prompt."""
        content, field = message.content, reasoning_of(message)
        opens, closes = content.count(self.opening), content.count(self.closing)
        if field:
            return Said(field, content) if opens == closes == 0 else None
        starts = opens == 1 and content.lstrip().startswith(self.opening)
        if closes == 1 and (starts or (not opens and self.are_open(prompt))):
            reasoning, _, rest = content.partition(self.closing)
            return Said(reasoning.replace(self.opening, ""), rest)
        if not (opens or closes) and (self.opening, self.closing) != _USUAL:
            return Tags(*_USUAL).said(message, self._usual(prompt))
        return None

    def _usual(self, prompt: str) -> str:
        """A prompt in which most data's tag is open if this pair's is."""
        return _USUAL[0] if self.are_open(prompt) else ""

    def hold(self, said: Said, prompt: str, text: str) -> bool:
        """Whether a text continues the prompt with an answer and its reasoning, between one pair of tags."""
        if not text.startswith(prompt):
            return False
        answer = self.whole(prompt, text[len(prompt) :])
        before, _, rest = answer.partition(self.closing)
        reasoning = before.partition(self.opening)[2]
        return (
            answer.count(self.opening) == answer.count(self.closing) == 1
            and _squeezed(reasoning) == _squeezed(said.reasoning)
            and _squeezed(said.rest) in _squeezed(rest)
        )

    def whole(self, prompt: str, answer: str) -> str:
        """An answer with the tag that its prompt has opened."""
        return self.opening + answer if self.are_open(prompt) else answer

    def forms(self, message: Message, said: Said, names: Collection[str]) -> Iterator[Message]:
        """The answer with its reasoning in each field that the template names, and in the content."""
        bare = without_reasoning(message)
        for name in KEYS:
            if name in names:
                yield replace(bare, content=said.rest.lstrip("\n"), extra={**bare.extra, name: said.reasoning})
        yield replace(bare, content=f"{self.opening}{self.inside}{self._written(said, self.inside)}", is_null=False)

    def continued(self, said: Said, prompt: str, before: str) -> str | None:
        """A prompt with the answer, where the template leaves reasoning out.

        Args:
            said: the answer.
            prompt: what is served.
            before: what the template writes before an answer without reasoning. If the prompt, tags aside, does not
                begin with that, or has closed the tags, there is no saying how the answer continues: None.
        """
        start = prompt.rstrip().removesuffix(self.opening)
        between = before[len(start) :].replace(self.opening, "").replace(self.closing, "")
        if not before.startswith(start) or between.strip() or prompt.rstrip().endswith(self.closing):
            return None
        if self.are_open(prompt):
            return prompt + self._written(said, self.inside if prompt.endswith("\n") else "")
        return f"{prompt}{self.opening}{self.inside}{self._written(said, self.inside)}"

    def _written(self, said: Said, inside: str) -> str:
        after = self.after if inside else ""
        return f"{said.reasoning.strip()}{inside}{self.closing}{after}{said.rest.lstrip()}"


def reasoning_of(message: Message) -> str:
    """The reasoning in a field of its own; empty if there is none."""
    return next((str(message.extra[name]) for name in KEYS if message.extra.get(name)), "")


def without_reasoning(message: Message) -> Message:
    """The message without such a field."""
    return replace(message, extra={name: value for name, value in message.extra.items() if name not in KEYS})


def _squeezed(text: str) -> str:
    return "".join(text.split())
