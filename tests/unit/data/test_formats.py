"""Rows of each format as examples; which format columns speak for; templates and converters of the user's own."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from finray.config.schema import DataConfig, SourceConfig
from finray.data.formats.convert import FormatChoice, converter_of
from finray.data.formats.examples import Chat, Completion, Labelled, Message, Text, detect
from finray.data.formats.labels import LabelRules
from finray.data.sources.pieces import read
from finray.data.sources.readers import Reading
from finray.data.sources.resolve import resolve
from finray.errors import ConfigError, DataError
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put


def examples(row: dict[str, Any], *, chat: bool = True, **choice: Any) -> list[Any]:
    """What a row becomes when it is the first of its source."""
    chosen = FormatChoice(**{"format": "auto", "field_mapping": {}, **choice})
    return converter_of(chosen.decide(row), has_chat_template=chat)(row)


def example(row: dict[str, Any], **choice: Any) -> Any:
    (found,) = examples(row, **choice)
    return found


def said(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def refused(row: dict[str, Any], **choice: Any) -> str:
    with pytest.raises(DataError) as caught:
        examples(row, **choice)
    return str(caught.value)


# --- Alpaca ---------------------------------------------------------------------------------------------------------

ALPACA = {"instruction": "name a river", "input": "in Peru", "output": "the Marañón"}


@pytest.mark.parametrize("given", ["", None])
def test_alpaca_without_input(given: str | None) -> None:
    row = {**ALPACA, "input": given}
    assert said(example(row))[0] == ("user", "name a river")
    assert example(row, chat=False).prompt == "### Instruction:\nname a river\n\n### Response:\n"


def test_optional_columns_are_text_or_numbers_and_a_missing_number_is_none() -> None:
    """Of a list or a record Python's own text was learned, and of a missing number `nan`."""
    assert said(example({**ALPACA, "input": 0}))[0] == ("user", "name a river\n0")
    nothing = {**ALPACA, "input": math.nan, "system": math.nan, "history": math.nan}
    assert said(example(nothing)) == said(example({**ALPACA, "input": None}))
    for column, value in (("input", ["in Peru"]), ("input", False), ("system", {"en": "be brief"})):
        assert f"`{column}` holds {type(value).__name__}, not text" in refused({**ALPACA, column: value})
    assert "`system` holds list" in refused({"conversations": SHAREGPT[:2], "system": ["be brief"]})
    assert "`output` is null" in refused({**ALPACA, "output": math.nan})


def test_alpaca_with_a_system_message_and_earlier_turns() -> None:
    row = {**ALPACA, "system": "be brief", "history": [["and one in Chad?", "the Chari"], ["one more", "the Logone"]]}
    assert said(example(row)) == [
        ("system", "be brief"),
        ("user", "and one in Chad?"),
        ("assistant", "the Chari"),
        ("user", "one more"),
        ("assistant", "the Logone"),
        ("user", "name a river\nin Peru"),
        ("assistant", "the Marañón"),
    ]
    assert said(example({**ALPACA, "system": None, "history": None})) == said(example(ALPACA))


def test_the_prompt_of_alpaca_with_a_system_message_and_earlier_turns() -> None:
    row = {**ALPACA, "history": [["a river?", "the Chari"]], "system": "be brief"}
    wanted = "be brief\n\n### Instruction:\na river?\n\n### Response:\nthe Chari\n\n"
    wanted += "### Instruction:\nname a river\n\n### Input:\nin Peru\n\n### Response:\n"
    assert example(row, chat=False) == Completion(wanted, "the Marañón")


def test_a_column_that_the_first_row_leaves_out_counts_in_the_others(preparing: Preparing, put: Write) -> None:
    source = put("rows.jsonl", lines([{"instruction": "one", "output": "two"}, {**ALPACA, "output": "yes"}]))
    assert "in Peru" in preparing.texts(source)[1]


# --- ShareGPT -------------------------------------------------------------------------------------------------------

TOOL = {"name": "depth", "description": "of a river", "parameters": {"type": "object", "properties": {}}}
SHAREGPT = [
    {"from": "human", "value": "how deep is it"},
    {"from": "gpt", "value": "I look it up."},
    {"from": "function_call", "value": '{"name": "depth", "arguments": {"river": "Ob"}}'},
    {"from": "observation", "value": "12 m"},
    {"from": "gpt", "value": "Twelve metres."},
]


def test_sharegpt_with_tools_as_json_text_calls_and_observations() -> None:
    chat = example({"conversations": SHAREGPT, "tools": json.dumps([TOOL]), "system": "be brief"})
    assert said(chat) == [
        ("system", "be brief"),
        ("user", "how deep is it"),
        ("assistant", "I look it up."),
        ("tool", "12 m"),
        ("assistant", "Twelve metres."),
    ]
    # The call joins the words before it, as templates want it.
    call = {"type": "function", "function": {"name": "depth", "arguments": {"river": "Ob"}}}
    assert chat.messages[2].extra == {"tool_calls": [call]}
    assert chat.tools == ({"type": "function", "function": TOOL},)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, "assistant") for name in ("gpt", "chatgpt", "model", "bot", "assistant")),
        *((name, "tool") for name in ("observation", "function_response", "tool_response", "tool")),
        *(("human", "user"), ("user", "user"), ("system", "system"), ("developer", "developer")),
        *(("function", "function"), ("ipython", "ipython")),
    ],
)
def test_the_role_of_a_turn_by_every_name_that_data_sets_use(name: str, role: str) -> None:
    assert said(example({"conversations": [{"from": name, "value": "a"}]})) == [(role, "a")]


@pytest.mark.parametrize("name", ["function_call", "tool_call"])
@pytest.mark.parametrize("arguments", ["arguments", "parameters"])
def test_a_call_as_text_or_as_a_record_by_either_name_of_its_arguments(name: str, arguments: str) -> None:
    call = {"name": "depth", arguments: {"river": "Ob"}}
    for value in (json.dumps(call), json.dumps([call])):
        (turn,) = example({"conversations": [{"from": name, "value": value}]}).messages
        function = {"name": "depth", "arguments": {"river": "Ob"}}
        assert turn == Message("assistant", "", extra={"tool_calls": [{"type": "function", "function": function}]})
    (turn,) = example({"messages": [{"role": "assistant", "content": "b", "tool_calls": [{"name": "x"}]}]}).messages
    assert turn.extra["tool_calls"][0]["function"] == {"name": "x", "arguments": {}}


@pytest.mark.parametrize(
    "second",
    [
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "b", "tool_calls": [{"name": "x"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "x"}], "train": False},
    ],
)
def test_answers_in_a_row_are_refused_unless_the_second_is_the_calls_of_the_first(second: dict[str, Any]) -> None:
    first = {"role": "assistant", "content": "a", "name": "n"}
    message = refused({"messages": [USER, first, second]})
    assert "messages[2]: two assistant turns in a row" in message
    joined = example(
        {"messages": [USER, first, {**second, "content": None, "tool_calls": [{"name": "x"}], "train": True}]}
    )
    assert (joined.messages[1].content, joined.messages[1].extra["name"]) == ("a", "n")
    assert [call["function"]["name"] for call in joined.messages[1].extra["tool_calls"]] == ["x"]


def test_what_else_of_a_message_templates_read_is_kept() -> None:
    kept = {"name": "n", "tool_call_id": "i", "reasoning_content": "r", "thinking": "t", "reasoning": "s"}
    (message,) = example({"messages": [{"role": "user", "content": "a", **kept, "more": "m"}]}).messages
    assert message.plain() == {"role": "user", "content": "a", **kept}
    assert example({"messages": [{**USER, "name": None}]}).messages[0].extra == {}


def test_several_calls_in_a_row_are_one_turn() -> None:
    chat = example({"conversations": [SHAREGPT[0], SHAREGPT[2], SHAREGPT[2], SHAREGPT[3]]})
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    assert len(chat.messages[1].extra["tool_calls"]) == 2


@pytest.mark.parametrize("nothing", [None, "", "[]", []])
def test_no_tools_are_none(nothing: Any) -> None:
    assert example({"conversations": SHAREGPT[:2], "tools": nothing}).tools == ()


@pytest.mark.parametrize(
    ("arguments", "is_object"),
    [(None, True), ("", True), ({}, True), ("{}", True), (5, False), ("5", False), (["Ob"], False), ("null", False)],
)
def test_the_arguments_of_a_call_are_an_object_or_nothing(arguments: Any, is_object: bool) -> None:
    call = {"function": {"name": "depth", "arguments": arguments}}
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    if is_object:
        function = {"name": "depth", "arguments": {}}
        assert example(row).messages[1].extra["tool_calls"] == [{"type": "function", "function": function}]
    else:
        assert "messages[1]: the `arguments` of a tool call must be an object" in refused(row)


# --- messages -------------------------------------------------------------------------------------------------------


def test_openai_tool_calls_with_arguments_as_json_text() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "depth", "arguments": '{"river": "Ob"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "how deep"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12 m", "tool_call_id": "call_1", "name": "depth"},
            {"role": "assistant", "content": "Twelve.", "reasoning_content": "it says so"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
    }
    asked, called, told, answered = example(row).messages
    assert asked == Message("user", "how deep")
    assert called.content == ""
    # Templates write arguments as JSON; text would be quoted twice.
    assert called.extra["tool_calls"][0]["function"]["arguments"] == {"river": "Ob"}
    assert called.extra["tool_calls"][0]["id"] == "call_1"
    assert told == Message("tool", "12 m", extra={"name": "depth", "tool_call_id": "call_1"})
    assert answered.extra == {"reasoning_content": "it says so"}
    # As OpenAI wrote it before there were several: one call, a field of the message.
    single = example({"messages": [USER, {"role": "assistant", "content": "b", "function_call": call["function"]}]})
    assert single.messages[1].content == "b"
    assert single.messages[1].extra["tool_calls"][0]["function"] == {"name": "depth", "arguments": {"river": "Ob"}}
    spoilt = json.loads(json.dumps(row).replace('\\"Ob\\"}', ""))
    assert "messages[1].arguments` is not JSON" in refused(spoilt)


def test_a_record_of_lists_is_a_list_of_records() -> None:
    """As `datasets` keeps a `Sequence` of structs."""
    row = {"messages": {"role": ["user", "assistant"], "content": ["a", "b"], "train": [None, False]}}
    assert example(row).messages == (Message("user", "a"), Message("assistant", "b", train=False))
    for odd in ({"role": ["user", "assistant"], "content": ["a"]}, {"role": "user", "content": "a"}, {}):
        assert "nested columns" in refused({"messages": odd})


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = example({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]})
    assert chat.messages[0].content == "one two"
    for part in ({"type": "text", "text": None}, {"type": "text"}):
        found = refused({"messages": [{"role": "user", "content": [parts[0], part]}]})
        assert f"messages[0] has no text: a part of `content` is {dict(sorted(part.items()))}" in found


def test_images_are_refused_and_not_left_out() -> None:
    turns = [{"role": "user", "content": "what is this?"}, {"role": "assistant", "content": "a cat"}]
    later = "finray trains on text only; training on images comes in a later version"
    for kind in ("image", "image_url", "video", "input_audio"):
        asked = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: "cat.png"}]}
        assert f"has a part of type `{kind}`: {later}" in refused({"messages": [asked, turns[1]]})
    for column in ("image", "images", "videos"):
        assert f"the column `{column}` holds something: {later}" in refused({"messages": turns, column: ["cat.png"]})
        assert f"`{column}`" in refused({"prompt": turns[:1], "completion": turns[1:], column: "cat.png"})
        assert said(example({"messages": turns, column: []})) == [("user", "what is this?"), ("assistant", "a cat")]


def test_messages_as_json_text() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert said(example({"messages": json.dumps(turns)})) == [("user", "a"), ("assistant", "b")]
    assert "`messages` is not JSON" in refused({"messages": "[{"})
    assert "holds str" in refused({"messages": "hello"})
    assert "`messages` is not JSON" in refused({"messages": "[" * 100_000})
    assert "`messages` is not JSON" in refused({"messages": "[" + "1" * 5000 + "]"})


def test_a_prompt_of_messages_is_not_learned() -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    chat = example({"prompt": [user, answer, user], "completion": [answer]})
    assert chat.prompt_messages == 3
    assert "where the prompt ends" in refused({"prompt": [user, answer], "completion": [answer]})


# --- which format, which columns ------------------------------------------------------------------------------------

TABLE = [
    (["messages", "tools", "id"], "messages (messages, tools); not read: id"),
    (["conversation", "system"], "sharegpt (conversations from conversation, system)"),
    (["conversations", "text"], "sharegpt (conversations); not read: text"),
    (["messages", "prompt", "completion"], "messages (messages); not read: prompt, completion"),
    (["prompt", "completion", "label"], "prompt_completion (prompt, completion); not read: label"),
    (["instruction", "input", "output", "text"], "alpaca (instruction, output, input); not read: text"),
    (["instruction", "response", "history"], "alpaca (instruction, output from response, history)"),
    (["input", "output"], "prompt_completion (prompt from input, completion from output)"),
    (["query", "response"], "alpaca (instruction from query, output from response)"),
    (["question", "answer"], "alpaca (instruction from question, output from answer)"),
    (["prompt", "answer"], "alpaca (instruction from prompt, output from answer)"),
    (["instruction", "context", "output"], "alpaca (instruction, output, input from context)"),
    (["label", "text"], "text (text); not read: label"),
    (["content"], "text (text from content)"),
]


@pytest.mark.parametrize(("columns", "wanted"), TABLE)
def test_the_format_that_columns_speak_for(columns: list[str], wanted: str) -> None:
    assert detect(columns, {}).describe() == wanted


def test_columns_that_fit_no_format_are_listed() -> None:
    assert "(columns: q, a)" in refused({"q": "", "a": ""})
    assert "do not match `alpaca` (columns: text)" in refused({"text": ""}, format="alpaca")
    assert len(refused({f"column {number}": 1 for number in range(5000)})) < 1500


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (("question", "answer"), "alpaca"),
        (("prompt", "response"), "alpaca"),
        (("query", "response"), "alpaca"),
        (("instruction", "response"), "alpaca"),
        (("input", "output"), "prompt_completion as chat turns"),
        (("prompt", "completion"), "prompt_completion as chat turns"),
    ],
)
def test_fields_are_mapped_by_any_name_of_the_table(fields: tuple[str, str], kind: str) -> None:
    row, mapping = {"Frage": "a", "Antwort": "b", "id": "1"}, dict(zip(fields, ("Frage", "Antwort"), strict=True))
    assert said(example(row, field_mapping=mapping)) == [("user", "a"), ("assistant", "b")]
    found = FormatChoice("auto", mapping).decide(row).describe(has_chat_template=True)
    assert found.startswith(f"{kind} (")
    assert "not read: id" in found


def test_other_names_of_the_table_are_mapped_too() -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert said(example({"c": turns}, field_mapping={"conversation": "c"})) == [("user", "a"), ("assistant", "b")]
    assert example({"c": "a"}, field_mapping={"content": "c"}) == Text("a")
    row = {"q": "a", "answer": "b", "c": "c"}
    assert said(example(row, field_mapping={"question": "q", "context": "c"}))[0] == ("user", "a\nc")
    assert "`content` is mapped to `a`, which is not a column" in refused(
        row, field_mapping={"question": "q", "query": "c", "content": "a"}
    )


PAIRS = [{"prompt": "a?", "completion": "b"}, {"input": "a?", "output": "b"}]


@pytest.mark.parametrize("row", PAIRS)
def test_a_prompt_and_its_completion_are_chat_turns_where_the_model_has_a_template(row: dict[str, str]) -> None:
    assert said(example(row)) == [("user", "a?"), ("assistant", "b")]
    plain = Completion("a?", "b")
    assert example(row, chat=False) == plain
    assert example(row, format="prompt_completion") == plain
    assert "as chat turns" not in FormatChoice("auto", {}).decide(row).describe()
    assert example(row, input_template=f"{{{next(iter(row))}}}", output_template="b") == plain


def test_the_fingerprint_of_formats_that_are_named_stays() -> None:
    named = FormatChoice("prompt_completion", {}).shaped_by()
    assert set(named) == {"format", "field_mapping", "input_template", "output_template", "converter"}
    assert FormatChoice("auto", {}).shaped_by() == {**named, "format": "auto", "pairs": "chat"}
    assert FormatChoice("alpaca", {}, system="s").shaped_by()["system"] == "s"


def test_a_source_of_a_mix_says_for_itself_what_it_says_and_the_rest_is_the_data_sections() -> None:
    fields: dict[str, Any] = {"format": "text", "field_mapping": {"text": "a"}, "system": "s"}
    fields |= {"input_template": "{a}", "output_template": "{b}"}
    other: dict[str, Any] = {"format": "alpaca", "field_mapping": {}, "system": ""}
    other |= {"input_template": "{c}", "output_template": "{d}"}
    data = DataConfig.model_construct(**{**DataConfig(source="x").model_dump(), **fields, "converter": "m:f"})
    whole = FormatChoice(**fields, converter="m:f")
    assert FormatChoice.of(data) == FormatChoice.of(data, SourceConfig(source="y")) == whole
    for name, value in other.items():
        source = SourceConfig.model_construct(**{**SourceConfig(source="y").model_dump(), name: value})
        assert FormatChoice.of(data, source) == FormatChoice(**{**fields, name: value}, converter="m:f")


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "choice"),
    [
        ({"messages": [USER, ANSWER]}, {}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {}),
        ({"instruction": "a", "output": "b"}, {}),
        ({"prompt": "a", "completion": "b"}, {}),
        ({"prompt": [USER], "completion": [ANSWER]}, {}),
    ],
)
def test_conversations_without_a_system_message_begin_with_that_of_the_config(
    row: dict[str, Any], choice: dict[str, Any]
) -> None:
    chat = example(row, system="Be brief.", **choice)
    assert said(chat) == [("system", "Be brief."), ("user", "a"), ("assistant", "b")]
    assert chat.prompt_messages == (2 if isinstance(row.get("prompt"), list) else 0)
    assert said(example(row, system=None)) == said(example(row, system="")) == said(chat)[1:]


def test_a_rows_own_system_message_stays() -> None:
    own = {"role": "system", "content": "own"}
    developer = {**own, "role": "developer"}
    assert said(example({"messages": [own, USER, ANSWER]}, system="default"))[0] == ("system", "own")
    assert said(example({"messages": [developer, USER, ANSWER]}, system="default"))[0] == ("developer", "own")
    assert said(example({"instruction": "a", "output": "b", "system": "own"}, system="default"))[0] == ("system", "own")
    assert example({"prompt": "a", "completion": "b"}, chat=False, system="default") == Completion("a", "b")
    alpaca = example({"instruction": "a", "output": "b"}, chat=False, system="Be brief.")
    assert alpaca.prompt.startswith("Be brief.")


def test_nested_columns_through_dots() -> None:
    row = {"data": {"question": "a", "answers": {"best": "b"}, "more": "c", "who": "be brief"}, "a.b": "dotted"}
    mapping = {"instruction": "data.question", "output": "data.answers.best"}
    assert said(example(row, field_mapping=mapping)) == [("user", "a"), ("assistant", "b")]
    # Columns that may be left out are reached in the same way.
    optional = {**mapping, "input": "data.more", "system": "data.who"}
    assert said(example(row, field_mapping=optional))[:2] == [("system", "be brief"), ("user", "a\nc")]
    assert said(example(row, field_mapping={**mapping, "input": "data.none"}))[0] == ("user", "a")
    assert example(row, field_mapping={"text": "a.b"}) == Text("dotted")
    assert "`data.nothing` is missing" in refused(row, field_mapping={**mapping, "output": "data.nothing"})
    assert "holds dict, not text" in refused(row, field_mapping={"text": "data"})
    for value in ("text", ["text"], None, 5):
        assert "`data.text` is missing" in refused({"data": value}, field_mapping={"text": "data.text"})


def test_a_label_is_a_name_or_a_whole_number() -> None:
    for label, expected in ((1, "1"), ("good", "good"), (True, "true")):
        assert example({"sentence": "a", "label": label}, format="labelled_text") == Labelled("a", expected)
    for missing in (math.nan, None):
        assert "`label` is null" in refused({"text": "a", "label": missing}, format="labelled_text")


def test_a_column_without_a_name_is_no_field() -> None:
    """What pandas writes for its index."""
    assert said(example({"": "0", "instruction": "a", "output": "b"})) == [("user", "a"), ("assistant", "b")]


def turned(value: Any) -> dict[str, Any]:
    return {"conversations": [SHAREGPT[0], {"from": "function_call", "value": value}]}


def filling(**row: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**row, "o": "x"}, {"input_template": "{a}", "output_template": "{o}"}


def mapped(row: dict[str, Any], **mapping: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return row, {"field_mapping": mapping}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        ({**ALPACA, "history": history}, {}, "`history` must be a list of [question, answer] pairs")
        for history in ("abc", 5, [["one"]], ["ab"], [["a", "b", "c"]], [["a", None]], [["a", 1]])
    ),
    ({"conversations": SHAREGPT[:2], "tools": "[{"}, {}, "`tools` is not JSON"),
    *(({"conversations": SHAREGPT[:2], "tools": odd}, {}, "list of functions") for odd in ('{"name": "x"}', 5)),
    # A call that is none is named with its turn.
    *((turned(odd), {}, "conversations[1]") for odd in ("depth(Ob)", None, "5", '{"arguments": {}}', '[{"name": 5}]')),
    ({"messages": [{"role": "user"}]}, {}, "messages[0] has no text"),
    ({"messages": [{"content": "x"}]}, {}, "messages[0] must be an object"),
    ({"messages": [{**USER, "train": "no"}]}, {}, "messages[0].train must be true or false"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, {}, "holds dict"),
    (*filling(a=None), "`a` is null"),
    (*filling(b=1), "`a` is missing"),
    (*filling(a=[1]), "`a` holds list, which is not text"),
    (*filling(a={"b": 1}), "`a` holds dict"),
    (*filling(a=b"caf\xc3\xa9"), "`a` holds bytes, which is not text"),
    # Mappings that come to nothing.
    (*mapped({"question": "a", "answer": "b"}, prompt="question", completion="answr"), "answr"),
    (*mapped({"instruction": "a", "output": "b", "context": "c"}, input="contxt"), "contxt"),
    (*mapped({"text": "a", "question": "b"}, prompt="question"), "prompt"),
]


@pytest.mark.parametrize(("row", "choice", "said"), REFUSED)
def test_a_row_that_is_none_of_its_format_is_refused_with_what_is_odd(
    row: dict[str, Any], choice: dict[str, Any], said: str
) -> None:
    assert said in refused(row, **choice)


# --- templates ------------------------------------------------------------------------------------------------------


def filled(row: dict[str, Any], template: str, **mapping: str) -> str:
    found = example(row, input_template=template, output_template="{out}", field_mapping={"out": "o", **mapping})
    assert isinstance(found, Completion)
    return found.prompt


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{a}", "one {b}"),
        ("{{a}} {a}", "{a} one {b}"),
        ('{{"k": "{a}"}}', '{"k": "one {b}"}'),
        ("Q:\\t{a}\\nA:\n", "Q:\tone {b}\nA:\n"),
        ("{n} {f} {t}", "3 0.5 True"),
        ("{a}{a}", "one {b}one {b}"),
        ("{ } {}", "{ } {}"),
        ("no column", "no column"),
        ("{my column} {d.q}", "c d"),
    ],
)
def test_templates(template: str, wanted: str) -> None:
    row = {"a": "one {b}", "n": 3, "f": 0.5, "t": True, "o": "x", "my column": "c", "d": {"q": "d"}}
    assert filled(row, template) == wanted


def test_braces_of_a_template_that_name_no_column_are_none_of_those_that_are_read() -> None:
    choice = FormatChoice("auto", {}, input_template="{{x}} {a}", output_template="{o}")
    assert choice.decide(["a", "o", "id"]).describe() == "template (a, o); not read: id"


@pytest.mark.parametrize(
    ("templates", "mapping", "said", "where"),
    [
        (("one", "two"), {}, "the templates use no column", "data.input_template"),
        (("{a}", "{o}"), {"a": "b", "c": "d"}, r"no template uses c \(they use: a, o\)", "data.field_mapping"),
    ],
)
def test_templates_and_mappings_that_come_to_nothing(
    templates: tuple[str, str], mapping: dict[str, str], said: str, where: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        FormatChoice("auto", mapping, *templates).decide(["a", "o"])
    assert caught.value.where == where


def test_a_named_format_wins_over_templates() -> None:
    row = {"text": "a", "o": "b"}
    assert example(row, format="text", input_template="{text}", output_template="{o}") == Text("a")
    named = example(row, format="template", input_template="{text}", output_template="{o}")
    assert named == Completion("a", "b")


def test_a_template_is_not_filled_twice() -> None:
    assert filled({"a": "{o}\\n", "o": "secret"}, "{a}") == "{o}\\n"


@pytest.mark.parametrize("name", ["passage (en)", "Answer/1", "Answer/1.text", "the question?"])
def test_a_column_whose_name_cannot_stand_in_a_template_is_refused_there_and_filled_by_another(name: str) -> None:
    row = {"passage (en)": "a", "Answer/1": {"text": "a"}, "b": "a", "o": "x"}
    mapping = {"the question?": "b"} if name == "the question?" else {}
    with pytest.raises(ConfigError, match="would stand in every row as it is") as caught:
        filled(row, f"{{b}} {{{name}}}", **mapping)
    assert "data.field_mapping" in str(caught.value.repair)
    column = mapping.get(name, name).replace("Answer/1", "Answer/1.text", name == "Answer/1")
    assert filled(row, "{b} {other}", other=column) == "a a"
    # Doubled braces are literal, and so are braces around what is no column.
    assert filled(row, f"{{b}} {{{{{name}}}}} {{passage (fr)}}") == f"a {{{name}}} {{passage (fr)}}"


@pytest.mark.parametrize("name", ["a:.2f", "a!r", "a[0]", "b.c:>9", "renamed:d"])
def test_a_format_of_python_in_a_template_is_refused(name: str) -> None:
    """It would stand in every row as it is."""
    row = {"a": 1.5, "b": {"c": 1}, "o": "x"}
    for before in ("", "{{{{"):
        with pytest.raises(ConfigError, match="would stand in every row as it is"):
            example(row, input_template=f"{before}{{{name}}}", output_template="{o}", field_mapping={"renamed": "a"})
    # Braces around other words are literal.
    assert filled(row, f"{{{{{name}}}}} {{x:1}} {{a}}") == f"{{{name}}} {{x:1}} 1.5"


# --- converters -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module of the user's with one function, whose body this is."""
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    (tmp_path / "code").mkdir()
    made = 0

    def write(body: str) -> str:
        nonlocal made
        made += 1
        name = f"own_converter_{tmp_path.name}_{made}".replace("-", "_")
        (tmp_path / "code" / f"{name}.py").write_text(f"def shape(row):\n    {body}\n", encoding="utf-8")
        importlib.invalidate_caches()
        return f"{name}:shape"

    return write


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return {'text': row['a']}", [Text("x")]),
        ("return None", []),
        ("return []", []),
        ("return [{'text': row['a']}, {'prompt': 'p', 'completion': row['a']}]", [Text("x"), Completion("p", "x")]),
        ("yield {'text': row['a']}\n    yield {'text': 'y'}", [Text("x"), Text("y")]),
        ("return {'text': row['a'], 'label': 3}", [Text("x")]),
        ("row['text'] = row.pop('a')\n    return row", [Text("x")]),
    ],
)
def test_converters(own: Callable[[str], str], body: str, wanted: list[Any]) -> None:
    row = {"a": "x"}
    assert examples(row, converter=own(body)) == wanted
    assert row == {"a": "x"}


def test_a_converter_gives_labelled_text_where_the_task_reads_labels(own: Callable[[str], str]) -> None:
    converter = own("return {'text': row['a'], 'label': 3}")
    assert examples({"a": "x"}, converter=converter, labels=LabelRules()) == [Labelled("x", "3")]


def test_every_row_of_a_mix_is_learned_although_a_converter_leaves_a_label_beside_the_text_of_some(
    preparing: Preparing, put: Write, own: Callable[[str], str]
) -> None:
    plain, labelled = put("t.jsonl", lines([{"text": "one"}])), put("l.jsonl", lines([{"text": "two", "label": 3}]))
    mix = [{"source": str(one)} for one in (plain, labelled)]
    train = preparing.dataset(mix=mix, converter=own("return row")).all_rows("train")
    assert train is not None
    assert preparing.said(train) == ["one", "two"]
    assert all(train.row(at)[1].any() for at in range(2))


@pytest.mark.parametrize("labelled_first", [False, True])
def test_sources_with_a_label_and_without_one_are_not_mixed(
    preparing: Preparing, put: Write, labelled_first: bool
) -> None:
    plain, labelled = put("t.jsonl", lines([{"text": "one"}])), put("l.jsonl", lines([{"text": "two", "label": 3}]))
    mix = [{"source": str(labelled), "format": "labelled_text"}, {"source": str(plain)}]
    error = preparing.refused(mix=mix if labelled_first else mix[::-1])
    assert "cannot mix rows with a label and rows without one" in error.message
    assert error.where in ("t.jsonl", "l.jsonl")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 5", "must return a row"),
        ("return ''", "must return a row"),
        ("return 'text'", "must return a row"),
        ("return [5]", "must return a row"),
        ("return row['b']", "the converter failed: KeyError: 'b'"),
        ("yield {'text': row['b']}", "the converter failed: KeyError: 'b'"),
        ("import sys; sys.exit()", "the converter failed: SystemExit"),
        ("yield exit(3)", "the converter failed: SystemExit: 3"),
        ("return {'foo': 1}", "the columns do not match a format (columns: foo)"),
        ("return {'text': None}", "`text` is null"),
        ("return {1: 'a'}", "whose keys are texts"),
    ],
)
def test_what_a_converter_may_not_do(own: Callable[[str], str], body: str, message: str) -> None:
    assert message in refused({"a": "x"}, converter=own(body))


def test_a_converter_that_fails_is_named_with_its_row(
    preparing: Preparing, put: Write, own: Callable[[str], str]
) -> None:
    source = put("rows.jsonl", lines([{"a": "one"}, {"a": "two"}, {"b": "three"}, {"a": ""}]))
    converter = own("return {'text': row['a']} if row['a'] != 'two' else None")
    error = preparing.refused(source, converter=converter)
    assert error.where == f"{source}:3"
    dataset = preparing.dataset(source, converter=converter, on_bad_row="drop")
    stats = dataset.manifest.splits["train"]
    assert (stats.source_rows, stats.left_out, stats.bad_rows) == (4, 1, 1)
    assert preparing.said(dataset.all_rows("train"))[0] == "one"


def test_a_converter_of_the_working_directory_comes_before_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("installed", "work"):
        (tmp_path / folder).mkdir()
        body = f"def shape(row):\n    return {{'text': '{folder}'}}\n"
        (tmp_path / folder / "shape_of_work.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    monkeypatch.chdir(tmp_path / "work")
    for _ in range(2):
        assert examples({"a": "x"}, converter="shape_of_work:shape") == [Text("work")]
    assert sys.path.count(str(tmp_path / "work")) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:shape", "cannot be imported"),
        ("json:no_such_function", "cannot be imported"),
        ("json", "package.module:function"),
        ("/home/me/shape_rows.py:shape", "write `shape_rows:shape`, and run finray in /home/me"),
        ("shape_rows.py:shape", "write `shape_rows:shape`$"),
        ("own/shape_rows:shape", "write `shape_rows:shape`, and run finray in own$"),
        ("json:__doc__", "is not a function"),
    ],
)
def test_a_converter_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        examples({}, converter=name)


def test_an_edited_converter_gives_another_data_set(
    preparing: Preparing, put: Write, own: Callable[[str], str]
) -> None:
    source = put("rows.jsonl", lines([{"a": "one two"}]))
    converter = own("return {'text': row['a']}")
    first = preparing.dataset(source, converter=converter)
    module = sys.modules[converter.partition(":")[0]]
    assert module.__file__ is not None
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("row['a']", "row['a'].upper()"))
    second = preparing.dataset(source, converter=converter)
    assert first.name != second.name
    assert preparing.said(second.all_rows("train")) == ["ONE TWO"]
    path.write_text("def ")
    with pytest.raises(ConfigError, match="cannot be imported"):
        preparing.dataset(source, converter=converter)


def test_a_converter_may_change_what_it_gets_although_its_batch_is_converted_twice(
    preparing: Preparing, put: Write, own: Callable[[str], str]
) -> None:
    """After a bad row, the rows beside it are converted again, one by one."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[dict[str, Any]] = [{"messages": said}] * 5
    rows[2] = {"messages": "none"}
    converter = own("row['messages'].insert(0, {'role': 'system', 'content': 'be brief'}); return row")
    dataset = preparing.dataset(put("rows.jsonl", lines(rows)), converter=converter, on_bad_row="drop")
    found = preparing.said(dataset.all_rows("train"))
    assert [one.count("be brief") for one in found] == [1] * 4


# --- text and source files ------------------------------------------------------------------------------------------

TEXT = "one\ntwo\n\n\nthree\r\n\r\n  four\n"


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [
        ("file", ["one\ntwo\n\n\nthree\n\n  four\n"]),
        ("paragraph", ["one\ntwo", "three", "  four"]),
        ("line", ["one", "two", "three", "  four"]),
    ],
)
def test_rows_of_text_files(put: Write, unit: Any, wanted: list[str]) -> None:
    source = resolve(str(put("a.txt", TEXT)), split="train")
    assert [row.value["text"] for row in read(source, Reading(text_rows=unit))] == wanted


def test_source_files_in_a_directory_are_rows_in_the_order_of_their_paths(preparing: Preparing, put: Write) -> None:
    for name in ("src/lib.rs", "src/deep/a.rs", "build.py", ".git/config.py", "picture.png", "b/empty.rs"):
        folder = put(name, "" if "empty" in name else f"code of {name}\n").parent
    folder = folder.parent
    rows = list(read(resolve(str(folder), split="train")))
    assert [row.value["path"] for row in rows] == ["build.py", "src/deep/a.rs", "src/lib.rs"]
    texts = preparing.texts(folder)
    assert texts == [f"code of {name}\n" for name in ("build.py", "src/deep/a.rs", "src/lib.rs")]


def test_compressed_lines_and_tabs(put: Write) -> None:
    rows = [{"text": "one\ttwo", "n": 1}, {"text": "three", "n": 2}]
    packed = put("rows.jsonl.gz", gzip.compress(lines(rows).encode()))
    assert [row.value for row in read(resolve(str(packed), split="train"))] == rows
    table = put("rows.tsv", 'text\tn\n"one\ttwo"\t1\nthree, or "four"\t2\n')
    found = [row.value for row in read(resolve(str(table), split="train"))]
    assert found == [{"text": "one\ttwo", "n": "1"}, {"text": 'three, or "four"', "n": "2"}]


@pytest.mark.parametrize("kind", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_files_and_streams(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "rows.arrow"
    table = pa.table({"text": [f"row {at}" for at in range(30)]})
    with kind(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    rows = list(read(resolve(str(path), split="train")))
    assert [(row.number, row.value["text"]) for row in rows] == [(at + 1, f"row {at}") for at in range(30)]


# --- what other systems write into rows -----------------------------------------------------------------------------

CHATTED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "name", ["train", "training", "trainable", "loss", "loss_mask", "loss_scale", "loss_weight", "weight"]
)
def test_flags_of_turns_under_the_names_of_other_systems(name: str) -> None:
    for value, learned in (
        (False, 0),
        (0, 0),
        (0.0, 0),
        ("false", 0),
        ("0", 0),
        (True, 1),
        (1.0, 1),
        ("1", 1),
        (None, 1),
    ):
        chat = example({"messages": [CHATTED[0], {**CHATTED[1], name: value}]})
        assert chat.messages[1].train is bool(learned), value
        assert not chat.messages[1].others
    for value in (0.5, 2, "half", [1]):
        assert f"messages[1].{name}" in refused({"messages": [CHATTED[0], {**CHATTED[1], name: value}]})


def test_flags_that_differ_or_may_mean_either_are_refused() -> None:
    assert "flags that differ: loss True, weight 0" in refused(
        {"messages": [CHATTED[0], {**CHATTED[1], "loss": True, "weight": 0}]}
    )
    for name in ("mask", "masked"):
        for value in (True, False, 0):
            assert f"messages[1].{name}" in refused({"messages": [CHATTED[0], {**CHATTED[1], name: value}]})


def parts(*flags: Any) -> list[dict[str, Any]]:
    texts = ("one ", "two ", "three")
    given = zip(texts, flags, strict=True)
    return [{"type": "text", "text": text, **({} if flag is None else flag)} for text, flag in given]


@pytest.mark.parametrize(
    ("flags", "train", "hidden"),
    [
        ((None, None, None), True, ()),
        (({"train": False}, None, {"train": True}), True, ((0, 4),)),
        (({"weight": 0}, {"loss": 0.0}, None), True, ((0, 8),)),
        ((None, {"loss_scale": 0}, None), True, ((4, 8),)),
        (({"train": False}, {"train": False}, {"train": False}), False, ()),
    ],
)
def test_flags_of_parts_of_a_content(flags: tuple[Any, ...], train: bool, hidden: tuple[Any, ...]) -> None:
    answer = example({"messages": [CHATTED[0], {"role": "assistant", "content": parts(*flags)}]}).messages[1]
    assert (answer.content, answer.train, answer.hidden) == ("one two three", train, hidden)


def test_axolotls_ranges_of_a_content_are_inclusive_and_what_none_covers_is_not_learned() -> None:
    def answer(*ranges: tuple[Any, Any, Any], **more: Any) -> dict[str, Any]:
        named = [{"begin_offset": low, "end_offset": high, "train": flag} for low, high, flag in ranges]
        return {"messages": [CHATTED[0], {"role": "assistant", "content": "0123456789", "train_detail": named, **more}]}

    assert example(answer((0, 3, False), (4, 9, True))).messages[1].hidden == ((0, 4),)
    assert example(answer((2, 3, True), (6, 6, True))).messages[1].hidden == ((0, 2), (4, 6), (7, 10))
    assert not example(answer((0, 9, False))).messages[1].train
    assert not example(answer((0, 9, True), train=False)).messages[1].train
    assert example(answer((0, 9, True))).messages[1].hidden == ()
    for ranges in [
        ((0, 10, True),),
        ((3, 2, True),),
        ((-1, 2, True),),
        ((0, 5, True), (5, 9, False)),
        ((0, "5", True),),
    ]:
        assert "train_detail" in refused(answer(*ranges))
    assert "none of its parts is" in refused(answer((0, 9, False), train=True))


def test_calls_of_one_turn_with_different_flags_say_what_to_do() -> None:
    turns = [SHAREGPT[0], {**SHAREGPT[2], "loss": False}, SHAREGPT[2], SHAREGPT[3]]
    assert "give both the same flag" in refused({"conversations": turns})


def test_system_and_tools_are_read_beside_every_kind_of_conversation() -> None:
    for columns in (
        {"messages": CHATTED},
        {"conversations": SHAREGPT[:2]},
        {"prompt": "a", "completion": "b"},
        {"prompt": CHATTED[:1], "completion": CHATTED[1:]},
        {"instruction": "a", "output": "b"},
    ):
        for system in ("system", "system_prompt", "system_message"):
            chat = example({**columns, system: "be brief", "functions": [TOOL]})
            assert said(chat)[0] == ("system", "be brief")
            assert chat.tools == ({"type": "function", "function": TOOL},)
            assert not chat.notes
        assert example({**columns, "chat_template_kwargs": '{"thinks": false}'}).arguments == {"thinks": False}
    # Of a prompt without a template nothing else is read, which is counted.
    plain = example({"prompt": "a", "completion": "b", "system": "s", "tools": [TOOL]}, chat=False)
    assert plain.notes == {"unread:system", "unread:tools"}
    own = example({"messages": [{"role": "system", "content": "inside"}, *CHATTED], "system": "outside"})
    assert (said(own)[0][1], own.notes) == ("inside", {"unread:system"})
    part = {"type": "text", "text": "a", "annotations": [], "cache_control": {"type": "ephemeral"}}
    parts = example({"messages": [{"role": "user", "content": [part]}, CHATTED[1]]})
    assert parts.notes == {"unread:messages[].content[].cache_control"}
    for value in ("[1]", {"messages": []}, 5):
        assert "chat_template_kwargs" in refused({"messages": CHATTED, "chat_template_kwargs": value})


def test_numbers_are_text_and_lists_are_not() -> None:
    for value, text in ((5, "5"), (0.5, "0.5"), (True, "true"), (0, "0")):
        found = example({"prompt": "a", "completion": value})
        assert (found.messages[1].content, found.notes) == (text, {"numbers_as_text"})
    for value in (["x"], {"text": "x"}, math.inf):
        message = refused({"prompt": "a", "completion": value})
        assert "not text" in message
        assert "repair: " in message
    assert "repair: " in refused({"text": 5})


def test_an_answer_that_is_not_wanted_is_counted() -> None:
    assert example({"prompt": "a", "completion": "b", "label": False}).notes == {"unwanted_answers"}
    for label in (True, None, "no", 0):
        assert not example({"prompt": "a", "completion": "b", "label": label}).notes
