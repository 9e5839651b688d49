"""Conversations that cannot be learned from with certainty are refused, and what a template leaves out is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from finray.data.formats.examples import Chat, Message
from finray.data.formats.messages import messages_of
from finray.data.tokenize.chat import ChatRenderer
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from tests.support import families
from tests.support.talk import TOOLS, assistant, calling, learned_runs, mask_of, result, system, user
from tests.support.written_out import WRITTEN, Tools, joined

WITH_SYSTEM = sorted(name for name, written in WRITTEN.items() if written.system)


def encode(
    name: str,
    *messages: Message,
    tools: Tools = (),
    train_on: str = "assistant",
    tool_format: str = "plain",
    stops: Sequence[str] = (),
    **arguments: Any,
) -> Any:
    """What becomes of a conversation: rows and notes. ``stops`` are tokens of the model's generation settings."""
    tokenizer = Tokenizer(
        families.tokenizer(name),
        train_on=train_on,  # type: ignore[arg-type]
        max_length=4096,
        on_too_long="error",
        template_arguments=arguments or None,
        tool_format=tool_format,
        stops=families.tokenizer(name).convert_tokens_to_ids(list(stops)),
    )
    (encoded,) = tokenizer.encode([Chat(tuple(messages), tuple(tools))])
    return encoded


def learned_texts(name: str, encoded: Any) -> list[str]:
    """Text of every learned run, of all rows."""
    tokenizer = families.tokenizer(name)
    return [tokenizer.decode([row.ids[at] for at in run]) for row in encoded.rows for run in learned_runs(mask_of(row))]


def with_template(monkeypatch: pytest.MonkeyPatch, name: str, template: str) -> None:
    """The family's tokenizer with another template, for one test."""
    monkeypatch.setattr(families.tokenizer(name), "chat_template", template)


TURN = (user("what"), assistant("a dog"))


def test_a_generation_prompt_that_opens_reasoning_is_refused() -> None:
    with pytest.raises(DataError, match="training and serving differ") as caught:
        encode("deepseek-r1", *TURN)
    assert "<think>" in str(caught.value)
    assert "a dog" in str(caught.value)
    assert "reasoning_content" in str(caught.value.repair)


# Templates whose generation prompt opens reasoning: DeepSeek's, which leaves reasoning out; Qwen 3's of the thinking
# models, the same with Seed's tags, and one that knows an opening tag only; and one that writes answers as they are.
_QWEN_3 = families.template("qwen-3")
_THINKING = (
    _QWEN_3[: _QWEN_3.index("{%- if add_generation_prompt")]
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
_VERBATIM = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
OPENING = {
    "deepseek-r1": families.template("deepseek-r1"),
    "qwen-3": _THINKING,
    "qwen-3, seed": _THINKING.replace("think>", "seed:think>"),
    "qwen-3, opening tag": _THINKING.replace("elif '</think>' in content", "elif '<think>' in content"),
    "qwen-3, verbatim": f"{_VERBATIM}<think>\n{{% endif %}}",
    "qwen-3, brackets": f"{_VERBATIM}[THINK]\n{{% endif %}}{{# until [/THINK] #}}",
}
OTHER_TAGS = {"qwen-3, seed": "<seed:think>", "qwen-3, brackets": "[THINK]"}
THOUGHT = "it barks\nat the house"


def check_continued(form: str) -> None:
    """Reasoning in each form, as the last answer and as an earlier one, continues what plain Transformers renders."""
    name, opening = form.split(",")[0], OTHER_TAGS.get(form, "<think>")
    closing = opening[0] + "/" + opening[1:]
    tokenizer = families.tokenizer(name)
    served = tokenizer.apply_chat_template([{"role": "user", "content": "what"}], add_generation_prompt=True)
    served = list(served["input_ids"])
    assert tokenizer.decode(served).endswith(f"{opening}\n")
    written, end = f"{THOUGHT}\n{closing}\n\na dog", tokenizer.eos_token
    for answer in (
        assistant("a dog", reasoning_content=THOUGHT),
        assistant("a dog", thinking=THOUGHT),
        assistant(f"{opening}\n{written}"),
        assistant(written),
    ):
        encoded = encode(name, user("what"), answer)
        assert [row.ids[: len(served)] for row in encoded.rows] == [served]
        assert learned_texts(name, encoded) == [written + end]
        assert not encoded.notes
        later = encode(name, user("what"), answer, user("why"), assistant("no", reasoning_content="so"))
        assert sorted(learned_texts(name, later)) == sorted([written + end, f"so\n{closing}\n\nno{end}"])
        assert later.notes <= {"split_conversations"}


@pytest.mark.parametrize("form", OPENING)
def test_an_answer_continues_the_reasoning_that_its_prompt_opens(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    with_template(monkeypatch, form.split(",")[0], OPENING[form])
    check_continued(form)


@pytest.mark.parametrize("form", ["deepseek-r1", "qwen-3, opening tag", "qwen-3, verbatim"])
def test_reasoning_that_is_taken_as_it_was_given_is_seen(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """As before there were forms: `</think>` twice, or an error."""
    with_template(monkeypatch, form.split(",")[0], OPENING[form])
    monkeypatch.setattr(ChatRenderer, "_upto", lambda self, chat, index, prompt, text: self._apply(chat, index + 1))
    with pytest.raises((AssertionError, DataError)):
        check_continued(form)


@pytest.mark.parametrize(
    ("form", "content", "is_odd"),
    [
        ("qwen-3", "<think>\nit bar", True),
        ("qwen-3", "a dog", False),
        ("qwen-3, verbatim", "<think>\n<think>\nit barks\n</think>\n\na dog", True),
        ("qwen-3, brackets", "[THINK]\nit bar", True),
        ("qwen-3, brackets", "[THINK]\n[/THINK]\n\na dog", False),
        ("deepseek-r1", "<think>\nit bar", True),
    ],
)
def test_tags_that_do_not_pair_are_counted(
    monkeypatch: pytest.MonkeyPatch, form: str, content: str, is_odd: bool
) -> None:
    name = form.split(",")[0]
    with_template(monkeypatch, name, OPENING[form])
    assert encode(name, user("what"), assistant(content)).notes == ({"unpaired_tags"} if is_odd else set())


def test_a_closing_tag_where_nothing_is_open() -> None:
    """Qwen 3 itself writes the other one; SmolLM3 does not."""
    bare = assistant("it barks</think>a dog")
    assert learned_texts("qwen-3", encode("qwen-3", user("what"), bare)) == [
        "<think>\nit barks\n</think>\n\na dog<|im_end|>"
    ]
    assert encode("smollm3", user("what"), bare).notes == {"unpaired_tags"}
    assert not encode("smollm3", user("what"), assistant("<think>it barks</think>a dog")).notes


# Reasoning between other marks, found by where a field of a message is written: gpt-oss's channels; Gemma 4's, which
# stand beside calls only, and are taken out of a content; and brackets, where data has the tags that most models have.
_ASKED = "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_PROMPT = "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
_FINAL = "<|channel|>final<|message|>{{ m.content }}"
_CHANNELS = (
    f"{_ASKED}{{% else %}}<|im_start|>assistant{{% if loop.last and m.thinking %}}<|channel|>analysis<|message|>"
    f"{{{{ m.thinking }}}}<|im_end|><|im_start|>assistant{{% endif %}}{_FINAL}{_PROMPT}"
)
_BESIDE_CALLS = (
    f"{_ASKED}{{% else %}}<|im_start|>assistant{{% if m.tool_calls and m.reasoning %}}<|channel>thought\n"
    "{{ m.reasoning }}\n<channel|>{% endif %}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    f"{{{{ call.function.arguments | tojson }}}}{{% endfor %}}{{{{ m.content.split('<channel|>')[-1] }}}}{_PROMPT}"
)
MARKS = {
    "channels": (
        _CHANNELS,
        "<|channel|>analysis<|message|>it barks<|im_end|><|im_start|>assistant<|channel|>final<|message|>a dog",
    ),
    "beside calls": (_BESIDE_CALLS, "<|channel>thought\nit barks\n<channel|>a dog"),
    "brackets": (f"{_VERBATIM}{{% endif %}}{{# [THINK] [/THINK] #}}", "[THINK]\nit barks\n[/THINK]\n\na dog"),
}


@pytest.mark.parametrize("form", MARKS)
def test_reasoning_stands_between_the_marks_of_its_template(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    template, written = MARKS[form]
    with_template(monkeypatch, "chatml", template)
    for answer in (
        assistant("a dog", reasoning_content="it barks"),
        assistant("a dog", reasoning="it barks"),
        assistant("<think>it barks</think>a dog"),
    ):
        encoded = encode("chatml", user("what"), answer)
        assert (learned_texts("chatml", encoded), encoded.notes) == ([f"{written}<|im_end|>"], set())
    plain = encode("chatml", user("what"), assistant("a dog"))
    assert learned_texts("chatml", plain)[0] == f"{'<|channel|>final<|message|>' * (form == 'channels')}a dog<|im_end|>"
    # The control: without such a search, it is not learned, or with tags that the model does not have.
    monkeypatch.setattr(ChatRenderer, "_tags", None)
    for answer in (assistant("a dog", reasoning_content="it barks"), assistant("<think>it barks</think>a dog")):
        assert learned_texts("chatml", encode("chatml", user("what"), answer)) != [f"{written}<|im_end|>"]


# Templates in which the token that begins the next turn ends an answer

GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
EMPTY = "\n<think></think>\n"


def test_the_token_that_begins_the_next_turn_is_learned_where_a_server_stops_at_it() -> None:
    turns = (*TURN, user("how deep"), calling("blue"), result("nine"), assistant("four"))
    call = f"{EMPTY}<tool_call>depth\n<arg_key>river</arg_key>\n<arg_value>blue</arg_value>\n</tool_call>"
    encoded = encode("glm-4.5", *turns, stops=GLM_STOPS)
    said = [f"{EMPTY}a dog<|user|>", f"{call}<|observation|>", f"{EMPTY}four<|user|>"]
    assert learned_texts("glm-4.5", encoded) == said
    assert not encoded.notes
    tokenizer, (row,) = families.tokenizer("glm-4.5"), encoded.rows
    told = [message.whole() for message in turns]
    assert tokenizer.decode(row.ids) == tokenizer.apply_chat_template(told, tokenize=False) + "<|user|>"
    for count in (2, 4):
        shorter = encode("glm-4.5", *turns[:count], stops=GLM_STOPS)
        assert learned_texts("glm-4.5", shorter) == said[: count // 2]
    assert encode("glm-4.5", *turns, stops=GLM_STOPS, train_on="all").rows[0].ids == row.ids
    # An earlier answer, in a row of its own, because the template leaves its reasoning out later.
    thought = encode("glm-4.5", user("what"), assistant("a dog", reasoning_content="r"), *turns[2:], stops=GLM_STOPS)
    assert learned_texts("glm-4.5", thought)[-1] == "\n<think>r</think>\na dog<|user|>"


def test_a_token_at_which_no_server_stops_is_not_learned() -> None:
    turns = (*TURN, user("why"), assistant("no"))
    for stops in ((), ("<|observation|>",)):
        encoded = encode("glm-4.5", *turns, stops=stops)
        assert learned_texts("glm-4.5", encoded) == [f"{EMPTY}a dog", f"{EMPTY}no<|endoftext|>"]
        assert encoded.notes == {"open_answers"}
    # A token of its own ends a turn: nothing is learned behind it.
    encoded = encode("chatml", *turns, stops=("<|im_start|>", "<|im_end|>"))
    assert learned_texts("chatml", encoded) == ["a dog<|im_end|>", "no<|im_end|>"]


def test_a_conversation_without_the_system_message_that_is_served_is_refused() -> None:
    """Mistral v0.3 renders it only when a question comes last: in serving, and never in training."""
    with pytest.raises(DataError, match="training and serving differ") as caught:
        encode("mistral-v0.3", system("be small"), *TURN)
    assert "be small" in str(caught.value)


def test_thinking_that_is_switched_off_in_serving() -> None:
    """Then the empty think block belongs to the prompt."""
    encoded = encode("qwen-3", *TURN, enable_thinking=False)
    assert learned_texts("qwen-3", encoded) == ["a dog<|im_end|>"]
    encoded = encode("qwen-3", *TURN, user("why"), assistant("no"), enable_thinking=False)
    assert sorted(learned_texts("qwen-3", encoded)) == ["a dog<|im_end|>", "no<|im_end|>"]
    assert len(encoded.rows) == 2
    with pytest.raises(DataError, match="training and serving differ") as caught:
        encode("qwen-3", user("what"), assistant("a dog", reasoning_content="it barks"), enable_thinking=False)
    assert "it barks" in str(caught.value)


SYSTEM_IGNORED = (
    "{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_ignores_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "system_ignored" not in encode("chatml", system("be small"), *TURN).notes
    with_template(monkeypatch, "chatml", SYSTEM_IGNORED)
    assert encode("chatml", system("be small"), *TURN).notes == {"system_ignored"}
    # Its words also stand in the answer.
    assert encode("chatml", system("a dog"), *TURN).notes == {"system_ignored"}
    assert not encode("chatml", *TURN).notes


def test_where_a_template_takes_no_markers_the_words_themselves_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% for m in messages %}{% if m.content and m.content[0] > '~' %}{{ raise_exception('no') }}{% endif %}"
    with_template(monkeypatch, "chatml", f"{refusing}{{% endfor %}}{SYSTEM_IGNORED}")
    assert encode("chatml", system("be small"), *TURN).notes == {"system_ignored"}
    assert not encode("chatml", system("a dog"), *TURN).notes
    assert not encode("chatml", *TURN).notes
    with_template(monkeypatch, "chatml", f"{refusing}{{% endfor %}}{SYSTEM_IGNORED.replace('system', 'tool')}")
    with pytest.raises(DataError, match=r"leaves out messages\[2\]"):
        encode("chatml", *TURN, result("nine"), assistant("four"))
    assert not encode("chatml", *TURN, result(" \n"), assistant("four")).notes


@pytest.mark.parametrize("name", WITH_SYSTEM)
def test_a_system_message_that_is_rendered_is_not_called_ignored(name: str) -> None:
    for said in ("be small", " be\n\n{small} \n"):
        assert "system_ignored" not in encode(name, system(said), *TURN).notes


def test_orders_in_a_system_message_are_not_called_ignored() -> None:
    """SmolLM3 reads `/no_think` and takes it out."""
    assert "system_ignored" not in encode("smollm3", system("be small /no_think"), *TURN).notes


def test_a_role_that_the_template_leaves_out_is_refused() -> None:
    # Also where its words stand elsewhere.
    for said in ("about nine", "four"):
        with pytest.raises(DataError, match=r"leaves out messages\[2\]"):
            encode("zephyr", user("how deep"), calling("blue"), result(said), assistant("four metres"))


def test_a_template_that_refuses_an_order_of_roles_is_quoted() -> None:
    for name in ("gemma-3", "mistral-v0.3", "mistral-small"):
        with pytest.raises(DataError, match="roles must alternate"):
            encode(name, user("what"), user("why"), assistant("no"))


def test_a_conversation_that_begins_with_an_answer() -> None:
    with pytest.raises(DataError, match="begins with an assistant turn"):
        encode("chatml", assistant("hello"), *TURN)
    assert learned_texts("chatml", encode("chatml", assistant("hello", train=False), *TURN)) == ["a dog<|im_end|>"]


# Tools in templates that know nothing of them


CALL = '<tool_call>\n{"name": "depth", "arguments": {"river": "blue"}}\n</tool_call>'


@pytest.mark.parametrize("name", ["chatml", "chatml-markers", "llama-3", "smollm2", "smollm3"])
def test_calls_become_text(name: str) -> None:
    eos = families.FAMILIES[name].eos
    turns = (user("how deep"), calling("blue"), result("nine"), assistant("four"))
    encoded = encode(name, *turns, tools=TOOLS)
    assert "tools_as_text" in encoded.notes
    assert learned_texts(name, encoded) == [CALL + eos, "four" + eos]
    text = families.tokenizer(name).decode(encoded.rows[0].ids)
    assert all(tool["function"]["name"] in text for tool in TOOLS)
    said = learned_texts(name, encode(name, user("how deep"), calling("blue", content="I look")))
    assert said == [f"I look\n{CALL}{eos}"]


def test_tools_become_a_line_each_in_the_systems_message_or_before_the_first_turn() -> None:
    tools = [{"type": "function", "function": {"name": "größe"}}, {"type": "function", "function": {"name": "b"}}]
    lines = '{"type": "function", "function": {"name": "größe"}}\n{"type": "function", "function": {"name": "b"}}'
    decode = families.tokenizer("chatml").decode
    text = decode(encode("chatml", user("what"), assistant("a dog"), tools=tools).rows[0].ids)
    assert f"user\n{lines}\n\nwhat<|im_end|>" in text
    told = Message("system", "Be brief.")
    text = decode(encode("chatml", told, user("what"), assistant("a dog"), tools=tools).rows[0].ids)
    assert f"system\nBe brief.\n\n{lines}<|im_end|>" in text
    assert "user\nwhat<|im_end|>" in text


# As the template of Qwen 2.5 writes them.
HERMES = """\
<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "depth"}}
{"type": "function", "function": {"name": "b"}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
how deep<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "depth", "arguments": {"river": "blue"}}
</tool_call>
<tool_call>
{"name": "depth", "arguments": {"river": "green"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
nine
</tool_response>
<tool_response>
four
</tool_response><|im_end|>
<|im_start|>assistant
a dog<|im_end|>
"""
# As Meta writes them for Llama 3.1.
LLAMA3 = """\
<|im_start|>system
You have access to the following functions. To call a function, please respond with JSON for a function call. \
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. \
Do not use variables.

{
    "type": "function",
    "function": {
        "name": "depth"
    }
}

{
    "type": "function",
    "function": {
        "name": "b"
    }
}

Be brief.<|im_end|>
<|im_start|>user
how deep<|im_end|>
<|im_start|>assistant
{"name": "depth", "parameters": {"river": "blue"}}
{"name": "depth", "parameters": {"river": "green"}}<|im_end|>
<|im_start|>ipython
nine<|im_end|>
<|im_start|>ipython
four<|im_end|>
<|im_start|>assistant
a dog<|im_end|>
"""
OFFERED = [{"type": "function", "function": {"name": name}} for name in ("depth", "b")]
ASKED = (system("Be brief."), user("how deep"), calling("blue", "green"), result("nine"), result("four"))


@pytest.mark.parametrize(("tool_format", "text"), [("hermes", HERMES), ("llama3", LLAMA3)])
def test_tools_are_written_as_a_server_of_that_format_writes_them(tool_format: str, text: str) -> None:
    encoded = encode("chatml", *ASKED, assistant("a dog"), tools=OFFERED, tool_format=tool_format)
    assert families.tokenizer("chatml").decode(encoded.rows[0].ids) == text
    first, last = learned_texts("chatml", encoded)
    assert first == text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0] + "<|im_end|>"
    assert last == "a dog<|im_end|>"
    assert "tools_as_text" in encoded.notes
    whole = encode("chatml", *ASKED, assistant("a dog"), tools=OFFERED, tool_format=tool_format, train_on="all")
    assert whole.rows[0].ids == encoded.rows[0].ids
    # Only the last answer, after turns that were joined.
    final = encode(
        "chatml", *ASKED, assistant("a dog"), tools=OFFERED, tool_format=tool_format, train_on="last_assistant"
    )
    assert learned_texts("chatml", final) == [last]


@pytest.mark.parametrize("left_out", [0, 1])
def test_results_that_share_a_turn_are_not_learned_if_the_data_excludes_one_of_them(left_out: int) -> None:
    results = [replace(result(text), train=at != left_out) for at, text in enumerate(("nine", "four"))]
    turns = (user("how deep"), calling("blue", "green"), *results, assistant("a dog"))
    encoded = encode("chatml", *turns, tool_format="hermes", train_on="all")
    learned = "".join(learned_texts("chatml", encoded))
    assert "nine" not in learned
    assert "four" not in learned
    assert "a dog" in learned


@pytest.mark.parametrize("name", ["qwen-2.5", "llama-3.1"])
@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
def test_a_template_that_knows_tools_writes_them_itself(name: str, tool_format: str) -> None:
    turns = (user("how deep"), calling("blue"), result("nine"), assistant("a dog"))
    plain = encode(name, *turns, tools=OFFERED)
    assert encode(name, *turns, tools=OFFERED, tool_format=tool_format).rows[0].ids == plain.rows[0].ids


def test_what_a_template_leaves_out_of_an_answer_is_counted() -> None:
    """Llama 3.1 drops text beside a call; templates that know no reasoning drop that."""
    assert encode("llama-3.1", user("how deep"), calling("blue", content="I look")).notes
    assert encode("chatml", user("what"), assistant("a dog", reasoning_content="it barks")).notes


def test_calls_that_a_template_refuses() -> None:
    with pytest.raises(DataError, match="only one tool call"):
        encode("llama-3.1", user("how deep"), calling("blue", "green"))
    short = assistant("", tool_calls=[{"id": "x", "type": "function", "function": {"name": "time", "arguments": {}}}])
    with pytest.raises(DataError, match="nine characters"):
        encode("mistral-v0.3", user("how deep"), short)


# Everything but messages that forbid it


def test_all_but_a_question_that_forbids_it() -> None:
    turns = (user("what"), assistant("a dog"), user("why", train=False), assistant("no"))
    for name in ("chatml", "llama-3", "qwen-2.5", "zephyr", "phi-4"):
        (row,) = encode(name, *turns, train_on="all").rows
        tokenizer = families.tokenizer(name)
        hidden = tokenizer.decode([token for token, learned in zip(row.ids, mask_of(row), strict=True) if not learned])
        before, upto = WRITTEN[name].segments(turns[:2], ()), WRITTEN[name].segments(turns[:3], ())
        assert hidden == joined(upto)[len(joined(before)) :]


def test_all_but_a_system_message_that_is_folded_into_the_question() -> None:
    """Rendered alone it is nothing, so where it lies is not known; it must not be learned all the same."""
    hidden = Message("system", "be small", train=False)
    with pytest.raises(DataError, match="is ambiguous"):
        encode("gemma-3", hidden, *TURN, train_on="all")


def test_a_template_that_prints_the_date_prints_one_and_the_same_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 26th of July 2024, a Friday and day 208 of its year; else tomorrow's tokens would be others."""
    form = "%d.%m.%Y %y %b %B %a %A %j %H:%M:%S"
    dated = f"{{{{ '<|im_start|>system\n' + strftime_now('{form}') + '<|im_end|>\n' }}}}"
    with_template(monkeypatch, "chatml", dated + families.tokenizer("chatml").chat_template)
    encoded = encode("chatml", *TURN)
    text = families.tokenizer("chatml").decode(encoded.rows[0].ids)
    assert text.startswith("<|im_start|>system\n26.07.2024 24 Jul July Fri Friday 208 00:00:00<|im_end|>\n")
    assert learned_texts("chatml", encoded) == ["a dog<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "role", "is_known"),
    [
        ("qwen-2.5", "function", False),
        ("qwen-3", "function", False),
        ("qwen-3", "ipython", False),
        ("llama-3.1", "ipython", True),
        ("chatml", "function", True),
    ],
)
def test_a_result_by_another_role_is_a_tools_unless_the_template_has_that_role(
    name: str, role: str, is_known: bool
) -> None:
    """OpenAI's `function` was an error with Qwen's templates, which leave it out."""

    def text(by: str) -> str:
        there = Message(by, "nine metres", extra={"name": "depth"})
        encoded = encode(name, user("how deep"), calling("long"), there, assistant("nine"), tools=TOOLS)
        return families.tokenizer(name).decode(encoded.rows[0].ids)

    assert "nine metres" in text(role)
    assert (text(role) == text("tool")) is (not is_known or name == "llama-3.1")


# --- calls ----------------------------------------------------------------------------------------------------------

HEAD = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{% if CONDITION -%}"
TAIL = (
    "{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = "{%- for c in m.tool_calls -%}CALL {{ c.function.name + ' ' + ARGUMENTS }}{%- endfor -%}"
AS_JSON, AS_TEXT = "(c.function.arguments | tojson)", "c.function.arguments"


def written(condition: str, arguments: str = AS_JSON, calls: str = CALLS) -> str:
    return HEAD.replace("CONDITION", condition) + calls.replace("ARGUMENTS", arguments) + TAIL


def conversation(content: Any, arguments: Any, **more: Any) -> Chat:
    call = {"id": "call00000", "type": "function", "function": {"name": "depth", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "depth?"},
        {"role": "assistant", "content": content, "tool_calls": [call], **more},
        {"role": "tool", "content": "9", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "nine"},
    ]
    return Chat(messages_of(turns, "messages"))


@pytest.mark.parametrize("arguments", [{"river": "Ob"}, '{"river":"Ob"}'])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("condition", ["m.content is none", "m.tool_calls and not m.content", "m.tool_calls"])
def test_calls_are_rendered_in_the_form_that_a_template_wants(
    monkeypatch: pytest.MonkeyPatch, condition: str, as_text: bool, content: Any, arguments: Any
) -> None:
    with_template(monkeypatch, "chatml", written(condition, AS_TEXT if as_text else AS_JSON))
    chat = conversation(content, arguments)
    encoded = encode("chatml", *chat.messages)
    # Text stays as it was given.
    shown = arguments if as_text and isinstance(arguments, str) else '{"river": "Ob"}'
    assert learned_texts("chatml", encoded) == [f"CALL depth {shown}<|im_end|>", "nine<|im_end|>"]
    assert not encoded.notes


def test_a_template_that_writes_null_as_a_word_gets_an_empty_content(monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(monkeypatch, "chatml", written("m.tool_calls", calls=f"{{{{ m.content }}}}{CALLS}"))
    encoded = encode("chatml", *conversation(None, {"river": "Ob"}).messages)
    assert learned_texts("chatml", encoded)[0] == 'CALL depth {"river": "Ob"}<|im_end|>'


def test_calls_that_a_template_leaves_out_are_refused_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(monkeypatch, "chatml", written("m.content is none and m.tool_calls and false"))
    with pytest.raises(DataError, match=r"leaves out the tool calls of messages\[1\]"):
        encode("chatml", *conversation(None, {"river": "Ob"}).messages)
    assert encode("chatml", *conversation("depth Ob", {"river": "Ob"}).messages).notes == {"calls_left_out"}
    with_template(monkeypatch, "chatml", written("m.tool_calls", "'(no arguments)'"))
    assert encode("chatml", *conversation(None, {"river": "Ob"}).messages).notes == {"calls_left_out"}
    assert not encode("chatml", *conversation(None, {}).messages).notes


# --- parts of an answer, and variables of a row ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "llama-3", "gemma-3", "phi-3", "zephyr"])
def test_only_the_parts_of_an_answer_are_learned_that_the_row_says(name: str) -> None:
    said = "a bad dog. a good dog. the end."
    first = Message("assistant", said, hidden=((0, 11),))
    ends = [text.split("the end.")[1] for text in learned_texts(name, encode(name, user("a"), assistant(said)))]
    assert learned_texts(name, encode(name, user("a"), first)) == [f" a good dog. the end.{ends[0]}"]
    both = replace(first, hidden=((0, 11), (23, 31)))
    assert learned_texts(name, encode(name, user("a"), both, user("b"), assistant("no")))[0].strip() == "a good dog."
    assert encode(name, user("a"), first).notes == {"partly_learned"}
    middle = replace(first, hidden=((11, 23),))
    assert learned_texts(name, encode(name, user("a"), middle)) == ["a bad dog.", f" the end.{ends[0]}"]


def test_parts_are_left_out_of_a_conversation_that_is_learned_as_a_whole() -> None:
    hidden = Message("assistant", "a bad dog. a cat", hidden=((0, 11),))
    texts = learned_texts("chatml", encode("chatml", user("a"), hidden, train_on="all"))
    assert texts == ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", " a cat<|im_end|>\n"]


def test_parts_that_cannot_be_located_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = Message("assistant", "a dog and a cat", hidden=((0, 5),))
    for expression in ("m.content | upper", "m.content ~ ' ' ~ m.content"):
        with_template(monkeypatch, "chatml", written("false").replace("{{ m.content }}", f"{{{{ {expression} }}}}"))
        with pytest.raises(DataError, match="cannot be located"):
            encode("chatml", user("a"), hidden)


def test_a_row_has_its_own_variables_of_the_template() -> None:
    """As the same variables for all rows; and a row without any is rendered as before, also after one with some."""
    tokenizer = Tokenizer(families.tokenizer("qwen-3"), train_on="assistant", max_length=4096, on_too_long="error")
    rows = [Chat(TURN, arguments=own) for own in ({"enable_thinking": False}, {}, {"enable_thinking": False}, {})]
    found = [encoded.rows[0].ids for encoded in tokenizer.encode(rows * 3)]
    off, on = (encode("qwen-3", *TURN, **more).rows[0].ids for more in ({"enable_thinking": False}, {}))
    assert found == [off, on] * 6
    masks = [mask_of(encoded.rows[0]) for encoded in tokenizer.encode(rows[:2])]
    assert masks[0] != masks[1]
