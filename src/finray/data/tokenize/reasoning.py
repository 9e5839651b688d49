"""Reasoning of an answer: in a field of its own, between tags in the content, or before a closing tag alone, as models
write it whose prompt has opened the tag."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from finray.data.formats.examples import Message

# Fields of a message that hold its reasoning.
KEYS = ("reasoning_content", "thinking", "reasoning")
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

    @classmethod
    def of(cls, source: str) -> Tags | None:
        """The pair in a template's source, or that of a single tag in it; None if it has none."""
        every = [cls(f"{begin}{name}{end}", f"{begin}/{name}{end}") for begin, name, end in _TAG.findall(source)]
        pairs = [tags for tags in every if tags.opening in source and tags.closing in source]
        # In brackets alone stands also an index, as in `message[reasoning]`.
        return next(iter([*pairs, *(tags for tags in every if tags.opening.startswith("<"))]), None)

    def are_in(self, message: Message) -> bool:
        """Whether an answer has one of the tags, or reasoning in a field."""
        return self.opening in message.content or self.closing in message.content or bool(reasoning_of(message))

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
        return None

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
        written = self._written(said, "\n")
        yield replace(bare, content=f"{self.opening}\n{written}", is_null=False)

    def continued(self, said: Said, prompt: str, before: str) -> str | None:
        """A prompt that has opened the tags, with the answer.

        Args:
            said: the answer.
            prompt: what is served.
            before: what the template writes before an answer without reasoning. If that is no beginning of the prompt,
                tags aside, there is no saying how the answer continues: None.
        """
        start = prompt.rstrip().removesuffix(self.opening)
        between = before[len(start) :].replace(self.opening, "").replace(self.closing, "")
        if not before.startswith(start) or between.strip():
            return None
        return prompt + self._written(said, "\n" if prompt.endswith("\n") else "")

    def _written(self, said: Said, line: str) -> str:
        return f"{said.reasoning.strip()}{line}{self.closing}{line * 2}{said.rest.lstrip()}"


def reasoning_of(message: Message) -> str:
    """The reasoning in a field of its own; empty if there is none."""
    return next((str(message.extra[name]) for name in KEYS if message.extra.get(name)), "")


def without_reasoning(message: Message) -> Message:
    """The message without such a field."""
    return replace(message, extra={name: value for name, value in message.extra.items() if name not in KEYS})


def _squeezed(text: str) -> str:
    return "".join(text.split())
