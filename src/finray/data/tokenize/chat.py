"""Renders conversations, and finds the character spans that are trained on.

One rule decides what is trained on in an assistant message: everything after the prompt that a server would render
before it, up to the end-of-turn token. That prompt is rendered, and must be a prefix of the conversation; so training
continues exactly what is served, for any template, with or without generation markers.

Templates that rewrite history (Qwen 3 strips the reasoning of earlier turns) render an earlier answer differently from
how it was generated. Such an answer gets a separate row, in which it is the last turn.

A prompt may open a block of reasoning, which the answer then continues: ``reasoning.py`` has the forms of such answers.
Where no token ends a turn, the one that begins the next turn is learned if a server stops at it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finray import compat
from finray.data.formats.examples import Arguments, Chat, Message
from finray.data.formats.messages import FLAGS
from finray.data.tokenize.outline import Outlines
from finray.data.tokenize.reasoning import KEYS as REASONING
from finray.data.tokenize.reasoning import Tags, reasoning_of, without_reasoning
from finray.data.tokenize.tools import TOOL_FORMATS
from finray.errors import DataError, FinrayError
from finray.limits import TEMPLATE_S, cut, within

Span = tuple[int, int]

# Templates that print today's date would give different tokens tomorrow.
RENDER_DATE = (2024, 7, 26)
_DATE_CODES = ("%d", "%b", "%B", "%Y", "%m", "%y", "%a", "%A", "%j", "%H", "%M", "%S")
_MARKER = "\ue000{}\ue001"
# Other roles of a tool's results: OpenAI's before there were tools, and Llama's.
_RESULT_ROLES = ("function", "ipython")
_OF_TOOLS = frozenset(("tool", *_RESULT_ROLES))


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation, or the beginning of one, as text."""

    text: str  # what the template renders
    # Character spans to train on, in order, each from the end of the served prompt to the end of the end-of-turn token.
    spans: tuple[Span, ...]
    ends: tuple[bool, ...]  # for each span, whether an end-of-turn token closed it


# The rows of a conversation, and notes for the user: names of counters in the manifest.
Renderings = tuple[list[Rendered], frozenset[str]]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: a Transformers tokenizer.
        special_tokens: tokens that may end a turn, as text.
        stops: those at which a server ends an answer, whatever they mean to the template.
        arguments: variables given to the template.
        tool_format: format of tools if the template does not support them; see ``tools.py``.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: Iterable[str],
        stops: Iterable[str] = (),
        arguments: Mapping[str, Any] | None = None,
        tool_format: str = "plain",
    ) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, so conversations cannot be rendered",
                where="model.chat_template",
                repair="set model.chat_template to a Jinja file, or give rows with `prompt` and `completion`",
            )
        self._tokenizer = tokenizer
        # Longest first, because one special token may be the start or the end of another.
        self._special = tuple(sorted(filter(None, special_tokens), key=len, reverse=True))
        source = str(tokenizer.chat_template)
        self._dated = "strftime_now" in source
        self._renders_tools = re.search(r"\btools\b", source) is not None
        self._renders_calls = "tool_calls" in source
        self._words = frozenset(re.findall(r"\w+", source))
        self._tool_format = TOOL_FORMATS[tool_format]
        self._renders_role: dict[str, bool] = {}
        self._shapes: dict[Any, frozenset[int] | None] = {}
        self._compiled: dict[bool, Any] = {}
        self._outlines: Outlines | None = None
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(arguments or {})}
        self._any_special = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        self._stop = re.compile(rf"\s*(?:{'|'.join(map(re.escape, sorted(stops, key=len, reverse=True))) or '(?!)'})")
        self._openers: dict[bool, str] = {}
        self._tags_in_source = Tags.of(source)

    @cached_property
    def _tags(self) -> Tags | None:
        """The tags of reasoning: those in the template's source, or what it writes around reasoning in a field, beside
        an answer or a call."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        asked, marker = Message("user", "a"), _MARKER.format(0)
        for key in (name for name in REASONING if self._tags_in_source is None and name in self._words):
            for bare in (Message("assistant", "b"), Message("assistant", "", extra={"tool_calls": [call]})):
                try:
                    plain, thinking = (
                        self._apply(self._with_calls(Chat((asked, replace(bare, extra={**bare.extra, **more}))))[0])
                        for more in ({}, {key: marker})
                    )
                    prompt = self._apply(Chat((asked,)), add_generation_prompt=True)
                except DataError as error:
                    if error.overdue:
                        raise
                    continue
                if (tags := Tags.between(prompt, plain, thinking, marker)) is not None:
                    return tags
        return self._tags_in_source

    def render(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...] = (),
        *,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text; ``arguments`` are its own variables for the template.
        Raises DataError: the template refuses the conversation."""
        chat, _, _ = self._within_the_template(Chat(messages, tools, arguments=arguments or {}))
        chat, _ = self._with_calls(chat)
        return self._apply(chat, add_generation_prompt=add_generation_prompt)

    def answer(self, chat: Chat, index: int) -> tuple[str, str]:
        """The prompt that a server renders before an answer, and the answer up to its end-of-turn token, as they are
        learned. Raises DataError: the template refuses the conversation."""
        chat, _, places = self._within_the_template(chat)
        chat, index = self._with_calls(chat)[0], places[index]
        prompt = self._prompt(chat, index)
        text = self._upto(chat, index, prompt, self._apply(chat))
        if not text.startswith(prompt):
            return prompt, chat.messages[index].content
        return prompt, text[len(prompt) : self._closing(text, len(prompt))]

    def ends_turn(self, text: str) -> bool:
        """Whether a rendered conversation ends with an end-of-turn token, ignoring white space."""
        return bool(self._special) and text.rstrip().endswith(self._special)

    def whole(self, chat: Chat) -> Renderings:
        """The conversation as one text that is trained on as a whole, except for messages with ``train: false``.
        Raises DataError: the template refuses the conversation, or such a message cannot be located reliably."""
        chat, notes, _ = self._within_the_template(chat)
        chat, text = self._complete(chat, notes)
        # Their turns may be learned here, which `train: true` says of a turn that is no answer.
        notes -= {f"unread:messages[].{name}" for name in FLAGS}
        self._check_all_is_rendered(chat, text, notes)
        last = len(chat.messages) - 1
        if last and chat.messages[last].role == "assistant" and chat.messages[last].train:
            if self._tags is not None and self._tags.are_in(chat.messages[last]):
                text = self._upto(chat, last, self._prompt(chat, last), text)
                _note_read(chat.messages[last], text, notes)
            if not self.ends_turn(text) and (opener := self._opener(chat.messages[last])):
                text = text.rstrip() + opener
        forbidden = [
            span
            for index, message in enumerate(chat.messages)
            if not message.train or message.hidden
            for span in self._not_learned(message, index, self._turn(chat, index, text), text)
        ]
        borders = [0, *(border for span in forbidden for border in span), len(text)]
        spans = [span for span in zip(borders[::2], borders[1::2], strict=True) if span[0] < span[1]]
        ends = tuple(self.ends_turn(text[:stop]) for _, stop in spans)
        return [Rendered(text, tuple(spans), ends)], frozenset(notes)

    def _turn(self, chat: Chat, index: int, text: str) -> Span:
        """The span of a message, including the template's text around it."""
        if chat.messages[index].role == "assistant":
            answer = self._find(chat, index, text)
            if answer is not None:
                return answer[0]
        else:
            before = self._apply(chat, index) if index else ""
            upto = self._apply(chat, index + 1)
            has_content = _is_rendered(chat.messages[index].content, upto[len(before) :])
            if upto.startswith(before) and text.startswith(upto) and has_content:
                return len(before), len(upto)
        raise DataError(
            f"the position of messages[{index}] in the rendered conversation is ambiguous",
            where="model.chat_template",
            repair="remove its `train: false`, or set data.train_on to assistant",
        )

    def rows(self, chat: Chat, learned: Collection[int]) -> Renderings:
        """The conversation as rows, with the spans of the assistant messages in ``learned``.
        Raises DataError: the template refuses the conversation, or renders an answer that does not continue the
        prompt that a server would render."""
        chat, notes, places = self._within_the_template(chat)
        chat, text = self._complete(chat, notes)
        self._check_all_is_rendered(chat, text, notes)
        together: list[tuple[Span, bool]] = []
        apart: list[Rendered] = []
        answers = sorted(places[place] for place in learned)
        is_last_learned = answers[-1:] == [len(chat.messages) - 1]
        if is_last_learned and self._tags is not None and self._tags.are_in(chat.messages[-1]):
            # If that changes what precedes the last answer, earlier ones get rows of their own.
            text = self._upto(chat, answers[-1], self._prompt(chat, answers[-1]), text)
        for index in answers:
            message, row_text, answer = chat.messages[index], text, self._find(chat, index, text)
            if answer is not None:
                row_text, answer = self._closed(chat, index, text, answer)
                text = row_text
                together += self._learned(message, index, answer, text)
            else:
                # A separate row: the conversation up to the answer, of which only the answer is trained on.
                prompt = self._prompt(chat, index)
                row_text = self._upto(chat, index, prompt, text)
                answer = self._span(prompt, row_text, row_text)
                if answer is None:
                    has_system = chat.messages[0].role == "system"
                    raise _mismatch(prompt, row_text, has_system=has_system, tags=self._tags)
                row_text, answer = self._closed(chat, index, row_text, answer)
                parts = self._learned(message, index, answer, row_text)
                apart.append(Rendered(row_text, tuple(span for span, _ in parts), tuple(ended for _, ended in parts)))
                notes.add("split_conversations")
            if message.hidden:
                notes.add("partly_learned")
            if not answer[1] and row_text[answer[0][1] :].strip():
                notes.add("open_answers")
            self._check_answer(message, row_text[: answer[0][0]], row_text[slice(*answer[0])], notes)
        whole = Rendered(text, tuple(span for span, _ in together), tuple(ended for _, ended in together))
        return [*([whole] if together or not apart else []), *apart], frozenset(notes)

    # --- spans ------------------------------------------------------------------------------------------------------

    def _find(self, chat: Chat, index: int, text: str) -> tuple[Span, bool] | None:
        """The span of an answer in the conversation; None if it is rendered differently there than as the last turn."""
        prompt = self._prompt(chat, index)
        if not text.startswith(prompt):
            return None
        return self._span(prompt, self._upto(chat, index, prompt, text), text)

    def _prompt(self, chat: Chat, index: int) -> str:
        if index == 0:
            raise DataError(
                "the conversation begins with an assistant turn, so there is no prompt before it",
                repair="remove the turn, or set `train: false` on it",
            )
        return self._apply(chat, index, add_generation_prompt=True)

    def _learned(self, message: Message, index: int, answer: tuple[Span, bool], text: str) -> list[tuple[Span, bool]]:
        """The span of an answer, or what is left of it where parts of its content are not learned."""
        (start, stop), ended = answer
        if not message.hidden:
            return [answer]
        hidden = self._not_learned(message, index, (start, stop), text)
        borders = [start, *(border for span in hidden for border in span), stop]
        spans = [span for span in zip(borders[::2], borders[1::2], strict=True) if span[0] < span[1]]
        return [(span, ended and span[1] == stop) for span in spans]

    def _not_learned(self, message: Message, index: int, turn: Span, text: str) -> list[Span]:
        """The spans of a turn that are not learned. What the template writes before and after the content belongs to
        the content's beginning and end, and a single space to the word that follows.
        Raises DataError: the content cannot be located in the turn."""
        if not message.train:
            return [turn]
        content = message.content
        words = content.strip()
        at = text.find(words, *turn)
        if at < 0 or text.find(words, at + 1, turn[1]) >= 0:
            raise DataError(
                f"the parts of messages[{index}] that are not to be learned cannot be located: the chat template "
                f"{'changes its content' if at < 0 else 'writes its content more than once'}",
                where="model.chat_template",
                repair="give the whole turn one flag, or write what is not learned as an earlier turn",
            )
        first = at - content.index(words)
        lead, trail = content.index(words), content.index(words) + len(words)
        spans: list[Span] = []
        for low, high in message.hidden:
            start = turn[0] if low <= lead else first + low
            stop = turn[1] if high >= trail else first + high
            before = spans[-1][1] if spans else turn[0]
            start -= start > before and low > lead and text[start - 1] == " "
            stop -= stop > start + 1 and high < trail and text[stop - 1] == " "
            spans.append((start, stop))
        return spans

    def _span(self, prompt: str, last: str, text: str) -> tuple[Span, bool] | None:
        """From the end of the prompt to the end of the turn.

        Args:
            prompt: the prompt that a server would render.
            last: the conversation up to the answer.
            text: the whole conversation; what follows the turn may differ from how ``last`` ends.
        """
        if not last.startswith(prompt):
            return None
        closing = self._closing(last, len(prompt))
        first = self._any_special.search(last, closing)
        stop = first.end() if first is not None else closing
        if last is not text and last[:stop] != text[:stop]:
            return None
        if first is None:
            # Nothing ends the turn, unless a server stops at what begins the next one.
            first = self._stop.match(text, stop)
            stop = first.end() if first is not None else stop
        return (len(prompt), stop), first is not None

    def _closing(self, text: str, start: int) -> int:
        """Start of the special tokens and white space at the end of a text."""
        stop = len(text)
        while True:
            bare = stop
            while bare > start and text[bare - 1].isspace():
                bare -= 1
            if not self._special or not text.endswith(self._special, start, bare):
                # Trailing white space belongs to the answer only if a token follows it.
                return bare
            stop = bare - len(next(token for token in self._special if text.endswith(token, start, bare)))

    def _upto(self, chat: Chat, index: int, prompt: str, text: str) -> str:
        """The conversation up to an answer, of which ``prompt`` is served, and ``text`` is all.

        The answer is as it was given; or, if its reasoning is not rendered so, in the first form in which it is,
        between one pair of tags; or, if the template leaves reasoning out and the prompt opens it, written after the
        prompt.
        """
        is_last = index == len(chat.messages) - 1
        given = text if is_last else self._apply(chat, index + 1)
        message, tags = chat.messages[index], self._tags
        if tags is None or message.hidden:
            return given
        said = tags.said(message, prompt)
        if said is None or tags.hold(said, prompt, given):
            return given

        def rendered(form: Message) -> str:
            try:
                return self._apply(replace(chat, messages=(*chat.messages[:index], form)))
            except DataError as error:
                if error.overdue:
                    raise
                return ""

        for form in tags.forms(message, said, self._words):
            if tags.hold(said, prompt, shown := rendered(form)):
                return shown
        if not tags.are_open(prompt) and tags.opening in given[len(prompt) :]:
            return given
        bare = replace(without_reasoning(message), content=_MARKER.format(0), is_null=False)
        before, _, after = rendered(bare).partition(_MARKER.format(0))
        continued = tags.continued(said, prompt, before)
        return given if continued is None else continued + after

    def _closed(self, chat: Chat, index: int, text: str, answer: tuple[Span, bool]) -> tuple[str, tuple[Span, bool]]:
        """The row of an answer that is its last, and the answer's span, both with the token that begins the next turn:
        where no other ends it, and a server stops there."""
        (start, stop), ended = answer
        if ended or text[stop:].strip() or not (opener := self._opener(chat.messages[index])):
            return text, answer
        text = text[:stop] + opener
        return text, ((start, len(text)), True)

    def _opener(self, answer: Message) -> str:
        """What the template writes between an answer and the next turn, up to a token at which a server stops; empty if
        there is none. It is found by markers in the place of both contents."""
        has_calls = bool(answer.extra.get("tool_calls"))
        if has_calls not in self._openers:
            asked, following = _MARKER.format(0), _MARKER.format(1)
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
            result = Message("tool", following, extra={"name": "f", "tool_call_id": "call00000"})
            turns = (
                Message("user", "a"),
                Message("assistant", asked, extra={"tool_calls": [call]} if has_calls else {}),
                result if has_calls else Message("user", following),
            )
            try:
                shown = self._apply(self._with_calls(Chat(turns))[0])
            except DataError as error:
                if error.overdue:
                    raise
                shown = ""
            between = shown.partition(asked)[2].partition(following)[0]
            # After calls, which stand between the two as well, the last one.
            found = list(self._stop.finditer(between)) if has_calls else [self._stop.match(between)]
            self._openers[has_calls] = found[-1][0] if found and found[-1] is not None else ""
        return self._openers[has_calls]

    # --- rendering --------------------------------------------------------------------------------------------------

    def _apply(
        self,
        chat: Chat,
        count: int | None = None,
        *,
        add_generation_prompt: bool = False,
        unread: set[tuple[int, str]] | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            chat: the conversation.
            count: number of its messages to render; None for all.
            add_generation_prompt: as in serving.
            unread: loses the fields of messages that the template reads, by index and name.
        """
        messages, tools = chat.messages[:count], chat.tools
        key, contents = None, [message.content for message in messages]
        if not tools and not any(message.extra or message.others for message in messages):
            key = (add_generation_prompt, *[message.role for message in messages])
            if chat.arguments:
                key = (*key, json.dumps(chat.arguments, sort_keys=True, default=str))
            if self._outlines is not None and (filled := self._outlines.fill(key, contents)) is not None:
                return filled
        plain = [message.whole() for message in messages]
        offered = [dict(tool) for tool in tools] or None

        def render(template: Any, contents: Sequence[Any]) -> Any:
            templated = [{**message, "content": content} for message, content in zip(plain, contents, strict=True)]
            if unread:
                templated = [_Watched(message, index, unread) for index, message in enumerate(templated)]
            return template.render(
                messages=templated,
                tools=offered,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **chat.arguments},
            )

        with guarded("the conversation", repair="check the order and names of the roles"):
            template = self._compiled.get(bool(tools))
            if template is None:
                # Compiled like Transformers does; its own lookup of the template costs as much as a rendering.
                source = self._tokenizer.get_chat_template(None, [{}] if tools else None)
                source = _dated(source) if self._dated else source
                template = self._compiled[bool(tools)] = compat.compile_chat_template(source)
                if not tools:
                    self._outlines = Outlines(template, source)
            null = [None if item.is_null else item.content for item in messages]
            text = str(render(template, contents if key is not None else null))
        if key is not None and self._outlines is not None:
            # A separate time limit: the row's is for rendering.
            with suppress(DataError), guarded("the conversation", repair=""):
                self._outlines.learn(key, contents, text, render)
        return text

    def _within_the_template(self, chat: Chat) -> tuple[Chat, set[str], list[int]]:
        """The conversation without what the template does not support (tools and their calls become text), notes, and
        the new index of each message.
        """
        if not chat.tools and not any(item.extra or item.others or item.role in _OF_TOOLS for item in chat.messages):
            return chat, set(), list(range(len(chat.messages)))
        messages: list[Message] = []
        places: list[int] = []
        # A field that the template does not name cannot change its text.
        notes = {f"unread:messages[].{key}" for item in chat.messages for key in item.others if key not in self._words}
        if any(item.others for item in chat.messages):
            others = ({key: item.others[key] for key in item.others if key in self._words} for item in chat.messages)
            chat = replace(chat, messages=tuple(map(_with_others, chat.messages, others)))
        how, tools, turns = self._tool_format, chat.tools, [self._known_role(item) for item in chat.messages]
        for before, message in zip((None, *turns), turns, strict=False):
            if message.role == "tool" and how.result_role is not None and not self._renders_calls:
                text = how.result(message.content)
                if before is not None and before.role == "tool" and how.result_role == "user":
                    # Consecutive results share a turn: user turns must alternate with answers.
                    earlier = messages.pop()
                    learned = earlier.train and message.train
                    message = replace(earlier, content=f"{earlier.content}\n{text}", train=learned)
                else:
                    message = Message(how.result_role, text, train=message.train)
            elif "tool_calls" in message.extra and not self._renders_calls:
                notes.add("tools_as_text")
                extra = dict(message.extra)
                if calls := extra.pop("tool_calls"):
                    texts = [how.call(call["function"]) for call in calls]
                    content = "\n".join([*([message.content] if message.content else []), *texts])
                    message = replace(message, content=content, extra=extra, is_null=False)
            places.append(len(messages))
            messages.append(message)
        if tools and not self._renders_tools:
            notes.add("tools_as_text")
            # In the system message, or before the first turn.
            offer, system = how.offer(tools), messages[0].content
            follows = messages[0].role == "system" and not how.leads
            joined = f"{system}\n\n{offer}" if follows else f"{offer}\n\n{system}"
            messages[0], tools = replace(messages[0], content=joined), ()
        return replace(chat, messages=tuple(messages), tools=tools), notes, places

    def _complete(self, chat: Chat, notes: set[str]) -> tuple[Chat, str]:
        """The conversation with its calls as the template renders them, and as text; notes get what is left out.
        Raises DataError: the template refuses the conversation, or an answer consists of calls that it leaves out."""
        chat, lost = self._with_calls(chat)
        for index, missing in lost.items():
            if missing == 1.0 and not chat.messages[index].content.strip():
                raise DataError(
                    f"the chat template leaves out the tool calls of messages[{index}], which has nothing else",
                    where="model.chat_template",
                    repair="use a template that renders `tool_calls`",
                )
            notes.add("calls_left_out")
        # Ids are for matching calls with results, which most templates do by order; so is a result's `name`.
        unread = {
            (index, key)
            for index, message in enumerate(chat.messages)
            for key in (*message.extra, *message.others)
            if key not in ("tool_calls", "tool_call_id") and not (key == "name" and message.role in _OF_TOOLS)
        }
        text = self._apply(chat, unread=unread)
        notes |= {f"unread:messages[].{key}" for _, key in unread}
        return chat, text

    def _with_calls(self, chat: Chat) -> tuple[Chat, dict[int, float]]:
        """The conversation with tool calls in a form that the template renders, and which share of the calls of a
        message it leaves out in any form.

        Content beside calls may be null or empty, and arguments an object or JSON text: templates differ. The first
        form counts in which a marker in the place of each name, key and text of the calls appears in the rendering.
        """
        with_calls = [index for index, item in enumerate(chat.messages) if item.extra.get("tool_calls")]
        if not with_calls:
            return chat, {}
        best: tuple[int, Chat, dict[int, float]] | None = None
        for form in _forms(chat):
            marked, markers = _marked(form)
            try:
                shown = self._apply(marked)
                if "None" in shown and any(item.is_null for item in form.messages):
                    # A template that writes null as a word means an empty content.
                    empty = replace(marked, messages=tuple(replace(item, is_null=False) for item in marked.messages))
                    with suppress(DataError):
                        if shown.count("None") > self._apply(empty).count("None"):
                            continue
            except DataError as error:
                if error.overdue:
                    raise
                continue
            missing = {index: sum(item not in shown for item in some) for index, some in markers.items()}
            lost = {index: count / len(markers[index]) for index, count in missing.items() if count}
            if best is None or sum(missing.values()) < best[0]:
                best = sum(missing.values()), form, lost
            if not lost:
                break
        if best is not None:
            return best[1], best[2]
        # Markers are refused, such as names of unknown functions: the first form that is not.
        for form in _forms(chat):
            with suppress(DataError):
                self._apply(form)
                return form, {}
        return chat, {}

    def _known_role(self, message: Message) -> Message:
        """The message; the result of a tool by its usual role if the template does not render the one that it has."""
        role = message.role
        if role not in _RESULT_ROLES:
            return message
        if role not in self._renders_role:
            try:
                shown = self._apply(Chat((Message("user", ""), Message(role, _MARKER.format(0)))))
            except DataError:
                shown = ""
            self._renders_role[role] = _MARKER.format(0) in shown
        return message if self._renders_role[role] else replace(message, role="tool")

    def _check_all_is_rendered(self, chat: Chat, text: str, notes: set[str]) -> None:
        """Check that every message except the answers is in the text.

        A message's content may also occur elsewhere, so it proves nothing; a marker in its place does. So each shape of
        a conversation is rendered once with markers; contents are checked only if the template rejects markers.
        """
        shape: tuple[Any, ...] = (
            tuple((item.role, "tool_calls" in item.extra, item.is_null) for item in chat.messages),
            bool(chat.tools),
        )
        if chat.arguments:
            shape = (*shape, json.dumps(chat.arguments, sort_keys=True, default=str))
        if shape not in self._shapes:
            marked = tuple(
                item if item.is_null else replace(item, content=_MARKER.format(index))
                for index, item in enumerate(chat.messages)
            )
            try:
                shown = self._apply(replace(chat, messages=marked))
                self._shapes[shape] = frozenset(at for at in range(len(marked)) if _MARKER.format(at) in shown)
            except DataError:
                self._shapes[shape] = None
        rendered = self._shapes[shape]
        for index, message in enumerate(chat.messages):
            is_rendered = _is_rendered(message.content, text) if rendered is None else index in rendered
            if message.role == "assistant" or not message.content.strip() or is_rendered:
                continue
            if message.role not in ("system", "developer"):
                raise DataError(
                    f"the chat template leaves out messages[{index}] (role `{message.role}`)",
                    where="model.chat_template",
                    repair="use a role that the template supports, or another template",
                )
            notes.add("system_ignored")

    def _check_answer(self, message: Message, prompt: str, learned: str, notes: set[str]) -> None:
        said = None if self._tags is None else self._tags.said(message, prompt)
        parts = (message.content, reasoning_of(message)) if said is None else (said.rest, said.reasoning)
        if self._tags is not None:
            learned = self._tags.whole(prompt, learned)
            if not self._tags.are_paired(learned):
                notes.add("unpaired_tags")
            _note_read(message, learned, notes)
        if not message.content.strip() and "tool_calls" not in message.extra:
            notes.add("empty_answers")
        squeezed = ""
        for part in parts:
            if not _is_rendered(part, learned):
                squeezed = squeezed or "".join(learned.split())
                if "".join(part.split()) not in squeezed:
                    notes.add("answers_rewritten")


def _forms(chat: Chat) -> Iterator[Chat]:
    """The conversation in each form that a template may want of tool calls, as it was given first."""

    def as_text(message: Message) -> Message:
        calls = message.extra.get("tool_calls")
        if not calls:
            return message
        texts = [{**call["function"], "arguments": Arguments.text(call["function"]["arguments"])} for call in calls]
        written = [{**call, "function": function} for call, function in zip(calls, texts, strict=True)]
        return replace(message, extra={**message.extra, "tool_calls": written})

    def null(message: Message, is_null: bool) -> Message:
        has_calls = bool(message.extra.get("tool_calls")) and not message.content
        return replace(message, is_null=is_null) if has_calls else message

    given = chat.messages
    every = [given]
    for is_null in (False, True):
        other = tuple(null(item, is_null) for item in given)
        if any(item.is_null != before.is_null for item, before in zip(other, given, strict=True)):
            every.append(other)
    for messages in (*every, *(tuple(map(as_text, messages)) for messages in every)):
        yield replace(chat, messages=messages)


def _marked(chat: Chat) -> tuple[Chat, dict[int, list[str]]]:
    """The conversation with markers in the place of the names, keys and texts of tool calls; the markers by message."""
    markers: dict[int, list[str]] = {}

    def mark(value: Any, marks: list[str]) -> Any:
        if isinstance(value, Mapping):
            return {mark(str(key), marks): mark(item, marks) for key, item in value.items()}
        if isinstance(value, list):
            return [mark(item, marks) for item in value]
        if not isinstance(value, str):
            return value
        marks.append(_MARKER.format(f"{len(markers)}-{len(marks)}"))
        return marks[-1]

    messages = []
    for index, message in enumerate(chat.messages):
        if calls := message.extra.get("tool_calls"):
            marks = markers[index] = []
            written = []
            for call in calls:
                name, arguments = mark(call["function"]["name"], marks), call["function"]["arguments"]
                is_text = isinstance(arguments, str)
                marked = mark(json.loads(arguments) if is_text else arguments, marks)
                function = {
                    "name": name,
                    "arguments": json.dumps(marked, ensure_ascii=False) if is_text else marked,
                }
                written.append({**call, "function": function})
            message = replace(message, extra={**message.extra, "tool_calls": written})
        messages.append(message)
    return replace(chat, messages=tuple(messages)), markers


def _with_others(message: Message, others: Mapping[str, Any]) -> Message:
    return replace(message, others=others) if len(others) < len(message.others) else message


class _Watched(dict[str, Any]):
    """A message for a template, which notes the fields that the template reads."""

    def __init__(self, message: Mapping[str, Any], index: int, unread: set[tuple[int, str]]) -> None:
        super().__init__(message)
        self._index, self._unread = index, unread

    def _read(self, *names: Any) -> None:
        self._unread.difference_update((self._index, name) for name in names)

    def __getitem__(self, name: str) -> Any:
        self._read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._read(*super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self._read(*super().keys())
        return super().items()

    def values(self) -> Any:
        self._read(*super().keys())
        return super().values()


@contextmanager
def guarded(what: str, *, repair: str) -> Iterator[None]:
    """Runs a chat template with limits of time and memory; it may fail in any way.

    Args:
        what: what is rendered.
        repair: for a refusal by the template itself.

    Raises:
        DataError: it fails, or takes too long.
    """
    from jinja2.exceptions import TemplateSyntaxError

    try:
        with within(
            TEMPLATE_S,
            lambda excess: DataError(
                f"the chat template used more than {excess} on {what}",
                where="model.chat_template",
                repair="look for an endless loop, or set model.chat_template to another template",
            ),
        ):
            yield
    except FinrayError:
        raise
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template has a syntax error: {cut(str(error.message))} (line {error.lineno})",
            where="model.chat_template",
            repair="fix it, or set model.chat_template to another template",
        ) from None
    except RecursionError:
        raise DataError(
            "the chat template recurses without end",
            where="model.chat_template",
            repair="fix it, or set model.chat_template to another template",
        ) from None
    except Exception as error:
        # Besides its own errors a template raises Python's, for example when it adds null to text.
        raise DataError(
            f"the chat template refuses {what}: {cut(str(error)) or type(error).__name__}",
            where="model.chat_template",
            repair=repair,
        ) from None


def _note_read(message: Message, learned: str, notes: set[str]) -> None:
    """Take back that a message's reasoning is not read, where it is learned all the same."""
    if (reasoning := reasoning_of(message)) and "".join(reasoning.split()) in "".join(learned.split()):
        notes -= {f"unread:messages[].{name}" for name in REASONING if message.extra.get(name) == reasoning}


def _is_rendered(content: str, text: str) -> bool:
    """Whether a message's content is in the rendering, verbatim or as JSON text."""
    content = content.strip()
    return not content or content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _dated(template: str) -> str:
    """A template for which today is the date of rendering: a macro shadows the function of that name."""
    day = datetime.date(*RENDER_DATE)
    filters = "".join(f" | replace('{code}', '{day.strftime(code)}')" for code in _DATE_CODES)
    return f"{{%- macro strftime_now(pattern) -%}}{{{{ pattern{filters} }}}}{{%- endmacro -%}}{template}"


def _mismatch(prompt: str, text: str, *, has_system: bool, tags: Tags | None) -> DataError:
    """The error that shows what is served and what is trained on, from their first difference."""
    same = next((at for at, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1]), len(text))
    wants_reasoning = tags is not None and tags.are_open(prompt)
    return DataError(
        f"training and serving differ: the prompt that a server renders continues with {prompt[same : same + 40]!r}, "
        f"the conversation with {text[same : same + 40]!r}",
        where="model.chat_template",
        repair="set model.chat_template_arguments so that both agree (such as `enable_thinking: false`), or "
        "model.chat_template to a template whose generation prompt is the start of its answers"
        + (", or remove the system message, which this template may not support" if has_system else "")
        + (", or give the answer's reasoning, as `reasoning_content` or before one closing tag" * wants_reasoning),
    )
