"""Masks on the chat templates of real families, against spans that were worked out by hand.

What a conversation looks like, and which of its characters are an answer, comes from `tests/support/written_out.py`:
string concatenation from each family's documented format. :func:`check` compares finray's rows with that, character by
character and token by token, and with what a server would be given. That the check sees a wrong mask is tested too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finray.data.formats.examples import Chat, Completion, Message
from finray.data.tokenize.chat import ChatRenderer
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from tests.support import families
from tests.support.examples import examples
from tests.support.talk import TOOLS, assistant, calling, learned_runs, mask_of, result, rows_of, system, user
from tests.support.written_out import WRITTEN, Segment, Tools, joined

pytestmark = pytest.mark.long

NAMES = sorted(WRITTEN)
TRAIN_ON = ("completion", "assistant", "last_assistant", "all")

# What is expected


def wanted_answers(chat: Chat, train_on: str) -> set[int]:
    answers = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
    if train_on == "last_assistant":
        answers = answers[-1:]
    if train_on == "completion":
        answers = [index for index in answers if index >= chat.prompt_messages]
    return {index for index in answers if chat.messages[index].train}


def expected_rows(name: str, chat: Chat, train_on: str) -> list[list[Segment]]:
    """The rows, as segments whose owner is None where nothing is learned."""
    written = WRITTEN[name]
    wanted = wanted_answers(chat, train_on)
    whole = written.segments(chat.messages, chat.tools)
    if train_on == "all":
        forbidden = {index for index, message in enumerate(chat.messages) if not message.train}
        return [[(text, None if owner in forbidden else 0) for text, owner in whole]]
    apart = wanted & written.apart(chat.messages, chat.tools)
    rows = [(whole, wanted - apart)] if wanted - apart else []
    rows += [(written.segments(chat.messages[: index + 1], chat.tools), {index}) for index in sorted(apart)]
    return [[(text, owner if owner in learned else None) for text, owner in segments] for segments, learned in rows]


def learned_spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Character spans of learned segments, those that touch as one."""
    spans: list[tuple[int, int]] = []
    at = 0
    for text, owner in segments:
        if owner is not None and text:
            if spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + len(text))
            else:
                spans.append((at, at + len(text)))
        at += len(text)
    return spans


# What finray makes of it, compared


def check(
    name: str, messages: Sequence[Message], tools: Tools = (), *, train_on: str = "assistant", prompt_messages: int = 0
) -> None:
    """Everything that must hold for a conversation.

    Raises:
        AssertionError: something does not.
    """
    tokenizer = families.tokenizer(name)
    chat = Chat(tuple(messages), tuple(tools), prompt_messages)
    encoder = Tokenizer(tokenizer, train_on=train_on, max_length=100_000, on_too_long="error")  # type: ignore[arg-type]
    written = WRITTEN[name].segments(chat.messages, chat.tools)
    assert encoder.renderer.render(chat.messages, chat.tools) == joined(written)
    forbidden = {index for index, message in enumerate(messages) if not message.train}
    if train_on == "all" and forbidden & WRITTEN[name].apart(chat.messages, chat.tools):
        with pytest.raises(DataError, match="is ambiguous"):
            encoder.encode([chat])
        return
    expected = expected_rows(name, chat, train_on)
    rows = rows_of(encoder, chat)
    if not expected:
        assert not any(row.supervised for row in rows)
        return
    assert len(rows) == len(expected)
    for row, segments in zip(rows, expected, strict=True):
        check_tokens(name, row.ids, mask_of(row), segments)
        if train_on != "all":
            check_served(name, encoder, chat, row.ids, mask_of(row), segments)


def check_tokens(name: str, ids: list[int], mask: list[int], segments: Sequence[Segment]) -> None:
    """Ids are those of the text, and the mask is what the characters say."""
    tokenizer = families.tokenizer(name)
    text = joined(segments)
    spans = learned_spans(segments)
    assert len(ids) == len(mask)
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    if ids == encoded.ids:
        joins = any(start < begin < stop for begin, _ in spans for start, stop in encoded.offsets)
        assert WRITTEN[name].swallows or not joins, "a token joins a prompt with its answer"
        assert mask == [int(any(begin <= start < end for begin, end in spans)) for start, _ in encoded.offsets]
    assert blank(name, tokenizer.decode(ids)) == blank(name, tokenizer.decode(encoded.ids))
    runs = [tokenizer.decode([ids[at] for at in run]) for run in learned_runs(mask)]
    plain = [tokenizer.decode(tokenizer.encode(text[begin:end], add_special_tokens=False)) for begin, end in spans]
    assert [blank(name, run) for run in runs] == [blank(name, answer) for answer in plain]


def check_served(
    name: str, encoder: Tokenizer, chat: Chat, ids: list[int], mask: list[int], segments: Sequence[Segment]
) -> None:
    """Before each learned answer stands, token by token, what a server is given to answer."""
    tokenizer = families.tokenizer(name)
    whole = tokenizer.encode(joined(segments), add_special_tokens=False)
    starts = [run[0] for run in learned_runs(mask)]
    owners = [(at, owner) for at, (_, owner) in enumerate(segments) if owner is not None]
    assert len(owners) == len(starts)
    for (at, owner), start in zip(owners, starts, strict=True):
        history = chat.messages[:owner]
        prompt = joined(segments[:at])
        assert WRITTEN[name].opening in prompt
        assert encoder.renderer.render(history, chat.tools, add_generation_prompt=True) == prompt
        served = tokenizer.encode(prompt, add_special_tokens=False)
        if ids == whole or start == starts[0]:
            assert ids[:start] == served
        else:
            # An earlier answer was cut off from its prompt inside a token, and that token is in the history.
            assert blank(name, tokenizer.decode(ids[:start])) == blank(name, tokenizer.decode(served))


def blank(name: str, text: str) -> str:
    """Without the white space that a family's special tokens swallow, where they do."""
    if not WRITTEN[name].swallows:
        return text
    return re.sub(r"\s*(<\|\w+\|>)\s*", r"\1", text).strip()


# Conversations of every shape


def with_system(name: str, *messages: Message) -> tuple[Message, ...]:
    return ((system("be small\nand kind"),) if WRITTEN[name].system else ()) + messages


@pytest.mark.parametrize("name", NAMES)
def test_several_turns(name: str) -> None:
    turns = (user("what"), assistant("a dog"), user("a dog"), assistant("a cat"), user("why"), assistant("no"))
    for train_on in TRAIN_ON:
        for messages in (turns, with_system(name, *turns)):
            check(name, messages, train_on=train_on)
            check(name, messages, train_on=train_on, prompt_messages=len(messages) - 3)
        # An answer may forbid learning.
        forbidden = [user("what"), assistant("a dog", train=False), user("why"), assistant("no")]
        check(name, forbidden, train_on=train_on)


@pytest.mark.parametrize("name", NAMES)
def test_white_space_around_messages_and_special_tokens_in_a_question(name: str) -> None:
    """A server renders such a question just the same; the answer is still all that is learned."""
    check(name, [user("  what \n"), assistant("a dog  \n"), user(" why"), assistant("no\t")])
    check(name, [user("  what \n"), assistant("  a dog  \n")])
    eos, opening = families.FAMILIES[name].eos, WRITTEN[name].opening
    check(name, [user(f"one{eos}\n{opening}two{eos}"), assistant("three"), user("why"), assistant("no")])


def test_a_conversation_that_ends_with_a_question() -> None:
    check("chatml", [user("what"), assistant("a dog"), user("why")])
    check("llama-3", [user("what"), assistant("a dog"), user("why")])


# Tools

WITH_TOOLS = [name for name in NAMES if WRITTEN[name].tools]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_and_their_results(name: str) -> None:
    turns = [user("how deep"), calling("blue"), result("4"), assistant("four metres")]
    for train_on in TRAIN_ON:
        check(name, turns, TOOLS, train_on=train_on)
        check(name, turns, train_on=train_on)
        check(name, with_system(name, *turns), TOOLS, train_on=train_on)
    if name != "llama-3.1":
        both = [user("how deep"), calling("blue", "green"), result("4"), result("5", 1), assistant("four and five")]
        check(name, both, TOOLS)


@pytest.mark.parametrize("name", ["qwen-2.5", "qwen-3"])
def test_text_beside_a_call(name: str) -> None:
    turns = [user("how deep"), calling("blue", content="I look"), result("4"), assistant("four")]
    check(name, turns, TOOLS)


def test_a_result_that_the_template_writes_as_json() -> None:
    """Llama 3.1 quotes results, so that their text is not found in the rendering as it was."""
    check("llama-3.1", [user("how deep"), calling("blue"), result('{"metres": 4}\n'), assistant("four")], TOOLS)


# Reasoning


def test_reasoning_is_learned_with_its_answer() -> None:
    check("qwen-3", [user("what"), assistant("a dog", reasoning_content="it barks")])
    check("qwen-3", [user("what"), assistant("<think>\nit barks\n</think>\n\na dog")])


@pytest.mark.parametrize("train_on", TRAIN_ON[:3])
def test_earlier_reasoning_is_learned_in_rows_of_its_own(train_on: str) -> None:
    turns = [
        user("what"),
        assistant("a dog", reasoning_content="it barks"),
        user("why"),
        assistant("no", reasoning_content="two\nlines"),
        user("when"),
        assistant("<think>\nten\n</think>\n\ntoday"),
    ]
    check("qwen-3", turns, train_on=train_on)
    check("qwen-3", with_system("qwen-3", *turns), train_on=train_on)
    check("qwen-3", turns[:4], train_on=train_on)


def test_reasoning_between_calls() -> None:
    turns = [
        user("how deep"),
        assistant("", reasoning_content="look", **calling("blue").extra),
        result("4"),
        calling("green"),
        result("5"),
        assistant("four", reasoning_content="seen"),
    ]
    check("qwen-3", turns, TOOLS)
    check("qwen-3", [*turns, user("why"), assistant("no")], TOOLS)


def test_reasoning_modes_of_smollm3() -> None:
    for said in ("be small /no_think", "/no_think", "/think be kind"):
        check("smollm3", [system(said), user("what"), assistant("a dog"), user("why"), assistant("no")])


# Random conversations

_TEXT = st.one_of(
    st.text(alphabet="abc dé\n\t☃{}<|%'\"\u0301\U0001f40e", max_size=14),
    st.text(max_size=8),
    st.sampled_from(["{{ x }}", "{% if %}", "<|", "\n\n", " \n", "<think>", "{0}", "\\n", "  ", "\u2028", "the river"]),
)
_TURNS = st.lists(st.tuples(_TEXT, _TEXT, st.booleans()), min_size=1, max_size=3)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=_TURNS, first=st.none() | _TEXT, train_on=st.sampled_from(TRAIN_ON), prompt=st.integers(0, 4))
def test_random_conversations(
    name: str, turns: list[tuple[str, str, bool]], first: str | None, train_on: str, prompt: int
) -> None:
    messages = [] if first is None or not WRITTEN[name].system else [system(first)]
    for question, answer, train in turns:
        messages += [user(question), assistant(answer, train=train)]
    check(name, messages, train_on=train_on, prompt_messages=min(prompt, len(messages) - 1))


_EXCHANGE = st.tuples(_TEXT, st.lists(st.tuples(_TEXT, st.text(max_size=6)), max_size=2), _TEXT, st.booleans())
_REASONING = st.none() | st.sampled_from(["", "it barks", "\nit\n\nbarks\n", " ", "☃ {}"])


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    exchanges=st.lists(_EXCHANGE, min_size=1, max_size=3),
    reasoning=st.lists(_REASONING, min_size=12, max_size=12),
    tools=st.sampled_from([(), TOOLS[1:], TOOLS]),
    train_on=st.sampled_from(TRAIN_ON),
)
def test_random_conversations_with_tools(
    name: str, exchanges: list[Any], reasoning: list[str | None], tools: Tools, train_on: str
) -> None:
    """Questions, each with up to two calls and their results before the answer; Qwen 3 reasons before some."""
    thoughts = iter(reasoning)

    def thought() -> dict[str, str]:
        said = next(thoughts)
        return {"reasoning_content": said} if said is not None and name == "qwen-3" else {}

    messages: list[Message] = []
    for question, steps, answer, train in exchanges:
        messages.append(user(question))
        for river, found in steps:
            messages += [assistant("", train=train, **calling(river).extra, **thought()), result(found)]
        messages.append(assistant(answer, **thought()))
    check(name, messages, tools, train_on=train_on)


# Borders inside tokens


def test_a_line_break_that_could_join_the_prompt() -> None:
    """Qwen's tokenizer has a token for two line breaks: one would be the prompt's, one the answer's."""
    name = "qwen-2.5"
    tokenizer = families.tokenizer(name)
    joins = [tokenizer.decode([token]) for token in tokenizer.encode("assistant\n\nyes", add_special_tokens=False)]
    assert "\n\n" in joins
    check(name, [user("what"), assistant("\nyes")])
    check(name, [user("what"), assistant("\nyes"), user("why"), assistant("\n\nno")])


def test_a_line_break_that_must_not_be_learned() -> None:
    """The same token, where everything is learned but the answer: no part of that may be."""
    forbidden = (user("what"), assistant("\nyes", train=False), user("why"), assistant("no"))
    check("qwen-2.5", forbidden, train_on="all")


def test_a_prompt_that_is_tokenized_otherwise_alone() -> None:
    """GPT-2's way to cut words: two line breaks are one token at the end of a prompt, and two before a word."""
    name = "smollm2"
    tokenizer = families.tokenizer(name)
    encoder = Tokenizer(tokenizer, train_on="completion", max_length=512, on_too_long="error")
    (row,) = rows_of(encoder, Completion("the question:\n\n", "water"))
    served = tokenizer.encode("the question:\n\n")
    assert row.ids[: len(served)] == served
    assert mask_of(row) == [0] * len(served) + [1] * (len(row.ids) - len(served))


def test_an_answer_that_holds_the_token_which_ends_it() -> None:
    check("chatml", [user("what"), assistant("a<|im_end|>b"), user("why"), assistant("no<|im_end|>yes")])


# The checks see what they are there for


def off_by(start: int, stop: int) -> Any:
    """The span rule, with both ends moved."""
    real = ChatRenderer._span

    def moved(self: ChatRenderer, prompt: str, last: str, text: str) -> Any:
        found = real(self, prompt, last, text)
        return found and ((found[0][0] + start, found[0][1] + stop), found[1])

    return moved


def without_end(self: ChatRenderer, prompt: str, last: str, text: str) -> Any:
    """The answer without the token that ends its turn."""
    stop = self._closing(last, len(prompt))
    return ((len(prompt), stop), True) if last[:stop] == text[:stop] else None


def also_where_rewritten(self: ChatRenderer, chat: Chat, index: int, text: str) -> Any:
    """Whatever follows the prompt in the whole conversation, without asking how the answer was generated."""
    prompt = self._prompt(chat, index)
    eos = self._tokenizer.eos_token
    return ((len(prompt), text.index(eos, len(prompt)) + len(eos)), True) if text.startswith(prompt) else None


def without_generation_prompt(self: ChatRenderer, chat: Chat, index: int) -> str:
    return self._apply(chat, index)


def answers_of(chat: Chat) -> list[int]:
    return [index for index, message in enumerate(chat.messages) if message.role == "assistant"]


TURNS = (user("what is in the house"), assistant("a dog"), user("is the dog small"), assistant("no"))
FORBIDDEN = (TURNS[0], assistant("a dog", train=False), *TURNS[2:])
THOUGHT = (user("a"), assistant("b", reasoning_content="r"), user("c"), assistant("d", reasoning_content="s"))
# What is changed, into what, and a check that must see it.
MUTATIONS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "the end of a turn is left out": (ChatRenderer, "_span", without_end, {}),
    "learning starts one character late": (ChatRenderer, "_span", off_by(1, 0), {}),
    "the end of the prompt is learned": (ChatRenderer, "_span", off_by(-20, 0), {}),
    "learning goes on behind the end of a turn": (ChatRenderer, "_span", off_by(0, 15), {}),
    "the header of an answer is learned": (ChatRenderer, "_prompt", without_generation_prompt, {}),
    "the first answer is the last": (
        Tokenizer,
        "_learned",
        lambda self, chat, train_on: answers_of(chat)[:1],
        {"train_on": "last_assistant"},
    ),
    "answers in the prompt are learned": (
        Tokenizer,
        "_learned",
        lambda self, chat, train_on: answers_of(chat),
        {"train_on": "completion", "prompt_messages": 2},
    ),
    "train: false is not heeded": (
        Tokenizer,
        "_learned",
        lambda self, chat, train_on: answers_of(chat),
        {"messages": FORBIDDEN},
    ),
    "one answer is forgotten": (Tokenizer, "_learned", lambda self, chat, train_on: answers_of(chat)[1:], {}),
}
# These have no generation prompt, so an answer has no header.
HARMLESS = {"the header of an answer is learned": {"mistral-v0.3", "mistral-small"}}


# Each mistake in a third of the families, and each family with a third of the mistakes.
@pytest.mark.parametrize(
    ("mutation", "name"),
    [(mutation, name) for at, mutation in enumerate(sorted(MUTATIONS)) for name in NAMES[at % 3 :: 3]],
)
def test_a_wrong_mask_is_seen(mutation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, changed, options = MUTATIONS[mutation]
    call = {"messages": TURNS, **options}
    check(name, **call)
    if name in HARMLESS.get(mutation, ()):
        return
    monkeypatch.setattr(owner, attribute, changed)
    # Where special tokens swallow white space, a border that lies wrong may also be one that finray refuses.
    with pytest.raises((AssertionError, DataError) if WRITTEN[name].swallows else AssertionError):
        check(name, **call)


def test_learning_a_rewritten_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    check("qwen-3", THOUGHT)
    monkeypatch.setattr(ChatRenderer, "_find", also_where_rewritten)
    check("qwen-2.5", TURNS)
    with pytest.raises(AssertionError):
        check("qwen-3", THOUGHT)
    with pytest.raises(AssertionError):
        check("qwen-3", TURNS)


def test_a_token_across_a_border_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = (user("what"), assistant("\nyes"))
    check("qwen-2.5", turn)

    def whole(encoding: Any, job: Any, special: Any) -> list[tuple[int, int]]:
        return [(encoding.char_to_token(start), encoding.char_to_token(stop)) for start, stop in job.spans]

    monkeypatch.setattr("finray.data.tokenize.encode._token_spans", whole)
    check("qwen-2.5", TURNS)
    with pytest.raises(AssertionError):
        check("qwen-2.5", turn)


def test_a_mask_that_is_one_token_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from finray.data.tokenize import encode as tokenize

    real = tokenize._token_spans
    for early, late in ((1, 0), (0, -1), (-1, 0), (0, 1)):
        monkeypatch.setattr(
            tokenize,
            "_token_spans",
            lambda *given: [(a + early, b + late) for a, b in real(*given)],  # noqa: B023
        )
        for name in NAMES:
            with pytest.raises(AssertionError):
                check(name, TURNS[:2])
