"""Prompts from arguments, files and standard input, and the tokens that a model is given."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.config.schema import DataConfig
from finray.data.formats.convert import FormatChoice, converter_of, prompt_form
from finray.data.formats.examples import Chat, Completion
from finray.data.formats.messages import tools_of
from finray.data.tokenize.encode import Tokenizer as Tokens
from finray.errors import DataError, ModelError
from finray.evaluation.prompts import Prompt, given_prompts, prompt_ids, read_prompts, read_tools
from tests.support import families, tiny
from tests.support.talk import assistant, calling, result, user

BRIEF = {"role": "system", "content": "Be brief."}


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \n two é\nthree", encoding="utf-8")
    return path


def test_arguments_come_first_then_the_files_lines_and_other_lines_where_there_is_neither(text_file: Path) -> None:
    found = read_prompts(["zero"], text_file, system=None)
    assert found == [Prompt("zero"), Prompt("one"), Prompt(" two é"), Prompt("three")]
    assert read_prompts([], None, system=None, lines=["a\n", "\n", "b"]) == [Prompt("a"), Prompt("b")]
    assert read_prompts(["x"], None, system=None, lines=["a\n"]) == [Prompt("x")]
    assert read_prompts([], text_file, system=None, lines=["a\n"])[0] == Prompt("one")


def test_a_line_of_a_file_ends_where_one_of_standard_input_does(tmp_path: Path) -> None:
    """Not at what `str.splitlines` takes for an end as well."""
    content = "a\u2028b\u2029c\r\nd\x85e\rf\x0cg\x0bh\n\ni\x1cj\x1dk\x1el".encode()
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    found = read_prompts([], file, system=None)
    assert [one.text for one in found] == ["a\u2028b\u2029c", "d\x85e", "f\x0cg\x0bh", "i\x1cj\x1dk\x1el"]
    with io.TextIOWrapper(io.BytesIO(content), encoding="utf-8") as standard_input:
        assert read_prompts([], None, system=None, lines=standard_input) == found


def test_a_system_message_makes_every_text_a_conversation(text_file: Path, tmp_path: Path) -> None:
    found = read_prompts(["zero"], text_file, system="Be brief.")
    assert found[0] == Prompt(messages=(BRIEF, asked("zero")))
    assert found[-1] == Prompt(messages=(BRIEF, asked("three")))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "four"}\n')
    assert read_prompts([], rows, system="Be brief.") == [Prompt(messages=(BRIEF, asked("four")))]


def test_rows_keep_their_tools_and_a_system_message_begins_those_that_have_none(tmp_path: Path) -> None:
    own = {"role": "system", "content": "Be long."}
    tool = {"type": "function", "function": {"name": "depth", "parameters": {}}}
    rows = [
        {"messages": [asked("a")]},
        {"messages": [own, asked("a")]},
        {"prompt": "b", "tools": [tool]},
        {"messages": [asked("c")], "tools": [tool]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_prompts([], path, system="Be brief.")
    texts = [[one["content"] for one in prompt.messages] for prompt in found]
    assert texts == [["Be brief.", "a"], ["Be long.", "a"], ["Be brief.", "b"], ["Be brief.", "c"]]
    assert [len(prompt.tools) for prompt in found] == [0, 0, 1, 1]
    assert read_prompts([], path, system=None)[2].tools == found[2].tools
    others = tools_of([{"name": "width", "parameters": {}}])
    given = read_prompts(["d"], path, system=None, tools=others)
    assert [prompt.tools for prompt in given] == [others, others, others, found[2].tools, found[3].tools]
    assert found[2].tools != others


@pytest.mark.parametrize("name", ["rows.jsonl", "ROWS.JSONL", "rows.json"])
def test_rows_are_prompts_or_conversations_up_to_the_last_question(tmp_path: Path, name: str) -> None:
    answered = [asked("a"), {"role": "assistant", "content": "b"}, asked("c")]
    rows = [
        {"messages": [*answered, {"role": "assistant", "content": "d"}, {"role": "assistant", "content": "e"}]},
        {"prompt": "f", "other": 1},
        {"messages": answered},
    ]
    path = tmp_path / name
    text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    expected = [Prompt(messages=tuple(answered)), Prompt("f"), Prompt(messages=tuple(answered))]
    assert read_prompts(["x"], path, system=None) == [Prompt("x"), *expected]


Q, HIDDEN = "What is 1 + 1?", "SECRET"
SECTIONS = f"### Instruction:\n{Q}\n\n### Response:\n"
WITH_INPUT = f"### Instruction:\n{Q}\n\n### Input:\nmore\n\n### Response:\n"
ONE = Prompt(messages=(asked(Q),))


def answered(*contents: str, role: str = "assistant") -> list[dict[str, Any]]:
    return [asked(Q), *({"role": role, "content": content} for content in contents)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        *(({"messages": answered(HIDDEN, role=role)}, ONE) for role in ("assistant", "model", "gpt", "bot")),
        ({"messages": answered(HIDDEN, HIDDEN, role="model")}, ONE),
        ({"messages": [{"from": "human", "value": Q}, {"from": "gpt", "value": HIDDEN}]}, ONE),
        (
            {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": HIDDEN}], "system": "S"},
            Prompt(messages=({"role": "system", "content": "S"}, asked(Q))),
        ),
        # As CSV holds it, and as `datasets` does.
        ({"messages": json.dumps(answered(HIDDEN))}, ONE),
        ({"messages": {"role": ["user", "assistant"], "content": [Q, HIDDEN]}}, ONE),
        ({"messages": [asked(Q), {"role": "assistant", "content": None}]}, ONE),
        ({"messages": [asked(Q), {"from": "function_call", "value": '{"name": "SECRET"}'}]}, ONE),
        ({"prompt": [asked(Q)], "completion": [{"role": "assistant", "content": HIDDEN}]}, ONE),
        ({"prompt": Q, "completion": HIDDEN}, Prompt(Q)),
        ({"prompt": Q, "completion": None}, Prompt(Q)),
        ({"input": Q, "output": HIDDEN}, Prompt(Q)),
        ({"prompt": Q, "chosen": HIDDEN, "rejected": HIDDEN}, Prompt(Q)),
        ({"prompt": "[1, 2]", "completion": HIDDEN}, Prompt("[1, 2]")),
        # A model without a chat template is asked as in its training.
        ({"prompt": Q, "response": HIDDEN, "id": 5}, Prompt(Q, plain=SECTIONS)),
        ({"question": Q, "answer": HIDDEN}, Prompt(Q, plain=SECTIONS)),
        ({"question": Q}, Prompt(Q, plain=SECTIONS)),
        ({"instruction": Q, "input": "more", "output": HIDDEN}, Prompt(f"{Q}\nmore", plain=WITH_INPUT)),
    ],
)
def test_the_answer_of_a_row_is_never_in_its_prompt(tmp_path: Path, row: dict[str, Any], expected: Prompt) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read_prompts([], path, system=None) == [expected]
    assert given_prompts(row, None) == [expected]


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "json"])
def test_a_table_is_read_as_rows_and_what_is_left_out_is_said_once(tmp_path: Path, kind: str) -> None:
    rows = [{"question": Q, "answer": HIDDEN, "id": 1}, {"question": "And, 2?", "answer": HIDDEN, "id": 2}]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    said: list[str] = []
    found = read_prompts([], path, system=None, notify=said.append)
    assert [one.text for one in found] == [Q, "And, 2?"]
    assert said == [
        f"rows.{kind}: the answers in 2 rows are left out; the model does not see them",
        f"rows.{kind}: columns that are not read: id",
    ]


def test_a_table_without_a_prompt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("one,two\n1,2\n")
    with pytest.raises(DataError, match=r"neither `prompt` nor `messages` \(columns: one, two\)") as caught:
        read_prompts([], tmp_path / "rows.csv", system=None)
    assert "save plain prompts as .txt" in str(caught.value.repair)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": answered("a")[1:]}))
    with pytest.raises(DataError, match="`messages` holds answers only"):
        read_prompts([], tmp_path / "rows.jsonl", system=None)


def test_a_program_gives_texts_conversations_or_rows() -> None:
    a, b = Prompt(messages=(asked("a"),)), Prompt(messages=(asked("b"),))
    for given, expected in (
        ("a", [Prompt("a")]),
        (["a", [asked("b")]], [Prompt("a"), b]),
        # One conversation is one prompt, not one for each of its messages.
        ([asked("a")], [a]),
        ([[asked("a")], [asked("b")]], [a, b]),
        ({"prompt": "a"}, [Prompt("a")]),
        ([{"messages": [asked("a")]}, {"prompt": "b"}], [a, Prompt("b")]),
        ((), []),
    ):
        assert given_prompts(given, None) == expected
    brief = {"role": "system", "content": "Be brief."}
    assert given_prompts([asked("a")], "Be brief.") == [Prompt(messages=(brief, asked("a")))]
    assert given_prompts(["a", {"prompt": "b"}], "Be brief.") == [
        Prompt(messages=(brief, asked("a"))),
        Prompt(messages=(brief, asked("b"))),
    ]
    for wrong in ([1], [{"text": "a"}], [[{"role": "user"}]]):
        with pytest.raises(DataError, match=r"^prompts:1: "):
            given_prompts(wrong, None)
    # A text beside a message is a prompt by itself, and so is none of a conversation.
    with pytest.raises(DataError, match=r"^prompts:2: "):
        given_prompts(["b", asked("a")], None)


def test_what_is_no_prompt_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist") as caught:
        read_prompts(["x"], tmp_path / "none.txt", system=None)
    assert "none.txt" in str(caught.value.where)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"text": "b", "messages": "c"}\n')
    with pytest.raises(DataError, match=r"columns: text, messages") as caught:
        read_prompts([], rows, system=None)
    assert str(caught.value.where).endswith("rows.jsonl:2")
    rows.write_text('{"messages": [{"role": "user", "content": "a"}], "tools": 5}\n')
    with pytest.raises(DataError, match="`tools` must be a list") as caught:
        read_prompts([], rows, system=None)
    assert str(caught.value.where).endswith("rows.jsonl:1")
    with pytest.raises(DataError, match="there is no prompt"):
        read_prompts([], None, system=None, lines=["\n"])
    (tmp_path / "p.txt").write_bytes(b"\xff\xfeh")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        read_prompts([], tmp_path / "p.txt", system=None)
    for row in ('{"prompt": "b\\u0000"}', '{"messages": [{"role": "user", "content": "b\\u0000"}]}'):
        rows.write_text('{"prompt": "a"}\n' + row + "\n")
        with pytest.raises(DataError, match=r"prompt 2 holds U\+0000"):
            read_prompts([], rows, system=None)


# --- tokens ---------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Its tokens are characters; text on its own begins with a special token."""

    def __init__(self, template: str | None = tiny.CHATML) -> None:
        self.chat_template = template
        self._tokenizer = tiny.train_tokenizer()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[str]]:
        return {"input_ids": [*(["BOS"] if add_special_tokens else []), *text]}

    def apply_chat_template(self, messages: list[Any], **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **options)


def test_text_is_a_users_turn_up_to_where_the_answer_begins() -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(Tokenizer(), Prompt("hi"), raw=False) == list(expected)
    messages = (BRIEF, asked("hi"))
    assert prompt_ids(Tokenizer(), Prompt(messages=messages), raw=False) == list(
        f"<|im_start|>system\nBe brief.<|im_end|>\n{expected}"
    )


def test_the_system_message_of_the_training_is_the_default() -> None:
    question = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    trained = "<|im_start|>system\nAs trained.<|im_end|>\n"
    kept = {"raw": False, "system": "As trained."}
    assert prompt_ids(Tokenizer(), Prompt("hi"), **kept) == list(trained + question)
    assert prompt_ids(Tokenizer(), Prompt(messages=(asked("hi"),)), **kept) == list(trained + question)
    own = prompt_ids(Tokenizer(), Prompt(messages=(BRIEF, asked("hi"))), **kept)
    assert own == list(f"<|im_start|>system\nBe brief.<|im_end|>\n{question}")
    assert prompt_ids(Tokenizer(), Prompt.of("hi", "Be brief."), **kept) == own
    # An empty one is none.
    assert prompt_ids(Tokenizer(), Prompt.of("hi", ""), **kept) == list(question)
    assert prompt_ids(Tokenizer(), Prompt("hi"), raw=True, system="As trained.") == ["BOS", "h", "i"]


def test_a_developers_message_is_one_of_the_system() -> None:
    own = {"role": "developer", "content": "Be long."}
    expected = list(f"<|im_start|>developer\nBe long.<|im_end|>\n{turn('hi')}<|im_start|>assistant\n")
    assert prompt_ids(Tokenizer(), Prompt(messages=(own, asked("hi"))), raw=False, system="As trained.") == expected
    (given,) = given_prompts([own, asked("hi")], "Be brief.")
    assert given == Prompt(messages=(own, asked("hi")))


def turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def test_raw_text_is_tokenized_as_it_is_and_a_conversation_is_not() -> None:
    assert prompt_ids(Tokenizer(), Prompt("hi"), raw=True) == ["BOS", "h", "i"]
    assert prompt_ids(Tokenizer(None), Prompt("hi"), raw=True) == ["BOS", "h", "i"]
    with pytest.raises(DataError, match="prompt is empty"):
        prompt_ids(tiny.train_tokenizer(), Prompt(text=""), raw=True)
    conversation = Prompt(messages=(asked("hi"),))
    assert prompt_ids(Tokenizer(), conversation, raw=True) == prompt_ids(Tokenizer(), conversation, raw=False)


def test_a_model_without_a_chat_template_has_no_conversations_and_no_tools() -> None:
    tools = Prompt("hi", tools=tools_of([DEPTH]))
    for prompt, raw in ((Prompt("hi"), False), (Prompt(messages=(asked("hi"),)), True), (tools, True)):
        with pytest.raises(ModelError, match="no chat template"):
            prompt_ids(Tokenizer(None), prompt, raw=raw)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty list of messages"),
        ([5], "messages[0] must be an object"),
        ([{"role": "user"}], "`content` is null"),
        ([{"role": "assistant", "content": "x"}], "`messages` holds answers only"),
    ],
)
def test_a_conversation_that_is_none_is_one_error(messages: list[Any], said: str, write_rows: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_prompts([], write_rows([{"messages": messages}]), system=None)
    assert said in caught.value.message
    assert caught.value.repair


@pytest.mark.parametrize("read", [given_prompts, lambda given, system: read_prompts(given, None, system=system)])
@pytest.mark.parametrize(("second", "system", "number"), [("b\ud800", None, 2), ("b", "c\ud800", 1)])
def test_half_a_surrogate_pair_is_no_prompt(read: Any, second: str, system: str | None, number: int) -> None:
    with pytest.raises(DataError, match=rf"prompt {number} holds U\+D800") as caught:
        read(["a", second], system)
    assert caught.value.repair
    with pytest.raises(DataError, match=r"prompt 1 holds U\+D83D"):
        given_prompts([asked("a\ud83d b")], None)


# --- tools ----------------------------------------------------------------------------------------------------------

DEPTH = {"name": "depth", "parameters": {"type": "object", "properties": {"river": {"type": "string"}}}}


def trained_prompt(name: str, tool_format: str, turns: Any, tools: Any) -> list[int]:
    """What is before the last answer in training."""
    options: dict[str, Any] = {"train_on": "last_assistant", "max_length": 4096, "on_too_long": "error"}
    trained = Tokens(families.tokenizer(name), tool_format=tool_format, **options)
    (encoded,) = trained.encode([Chat((*turns, assistant("a dog")), tools)])
    return list(encoded.rows[0].ids[: encoded.rows[0].spans[0][0]])


@pytest.mark.parametrize(
    ("name", "tool_format"),
    [("chatml", "plain"), ("chatml", "hermes"), ("chatml", "llama3"), ("qwen-2.5", "plain"), ("llama-3.1", "plain")],
)
@pytest.mark.parametrize("has_turns", [False, True], ids=["a question", "a result of a tool"])
def test_a_prompt_with_tools_is_that_of_a_row_in_training(
    tmp_path: Path, name: str, tool_format: str, has_turns: bool
) -> None:
    turns = (user("how deep"), *((calling("blue"), result("nine")) if has_turns else ()))
    expected = trained_prompt(name, tool_format, turns, tools_of([DEPTH]))
    # Tools for all prompts, and tools of a row.
    file, rows = tmp_path / "tools.json", tmp_path / "rows.jsonl"
    file.write_text(json.dumps([DEPTH]))
    plain = [message.plain() for message in (*turns, assistant("a dog"))]
    rows.write_text(json.dumps({"messages": plain, "tools": [DEPTH]}) + "\n" + json.dumps({"messages": plain}) + "\n")
    given = read_prompts([] if has_turns else ["how deep"], rows, system=None, tools=read_tools(file))
    for prompt in given:
        found = prompt_ids(families.tokenizer(name), prompt, raw=False, tool_format=tool_format)
        assert found == expected
    assert len(given) == 3 - has_turns


@pytest.mark.parametrize("more", [(calling("blue"),), (calling("blue"), result("nine"))], ids=["a call", "its result"])
@pytest.mark.parametrize("tool_format", ["plain", "hermes"])
def test_calls_in_a_conversation_are_those_of_training_where_no_tool_is_named(more: Any, tool_format: str) -> None:
    turns = (user("how deep"), *more, user("and wide"))
    prompt = Prompt(messages=tuple(message.plain() for message in turns))
    found = prompt_ids(families.tokenizer("chatml"), prompt, raw=False, tool_format=tool_format)
    assert found == trained_prompt("chatml", tool_format, turns, ())


def test_what_a_template_refuses_is_an_error_of_the_prompt() -> None:
    tokenizer = copy.deepcopy(families.tokenizer("chatml"))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate") as caught:
        prompt_ids(tokenizer, Prompt("how deep"), raw=False)
    assert "order and names of the roles" in str(caught.value.repair)


@pytest.mark.parametrize("tools", [(), tools_of([DEPTH])])
def test_variables_of_a_row_come_before_those_of_the_run(tmp_path: Path, tools: Any) -> None:
    tokenizer = copy.deepcopy(families.tokenizer("chatml"))
    tokenizer.chat_template = "{{ mood | default('none') }} " + tokenizer.chat_template
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chat_template_kwargs": {"mood": "calm"}}\n{"prompt": "a"}\n')
    for arguments, moods in (({"mood": "wild"}, ["calm", "wild"]), (None, ["calm", "none"])):
        found = [
            tokenizer.decode(prompt_ids(tokenizer, prompt, raw=False, arguments=arguments))
            for prompt in read_prompts([], rows, system=None, tools=tools)
        ]
        assert [text.split()[0].partition("<")[0] for text in found] == moods


def test_a_text_is_put_into_the_form_of_the_rows_in_training() -> None:
    tokenizer = families.tokenizer("chatml")

    def text(prompt: str, form: str | None) -> str:
        return str(tokenizer.decode(prompt_ids(tokenizer, Prompt(prompt), raw=True, form=form)))

    row = {"instruction": "how deep", "output": "nine"}
    (trained,) = converter_of(FormatChoice("auto", {}).decide(row), has_chat_template=False)(row)
    assert isinstance(trained, Completion)
    form = prompt_form(DataConfig(source="x"), ["alpaca (instruction, output)"])
    assert form is not None
    assert text("how deep", form) == trained.prompt
    # A prompt that has the form already stays, and so does every prompt where there are several columns.
    assert text(trained.prompt, form) == trained.prompt
    assert text("how deep", "Q: {question}\\nC: {context}\\nA:") == "how deep"
    assert text("how deep", "Q: {question}\\nA:") == "Q: how deep\nA:"
    assert text("how {deep}", "{question}") == "how {deep}"
    system = prompt_form(DataConfig(source="x", system="be {brief}"), ["alpaca (instruction, output)"])
    assert text("how deep", system) == f"be {{brief}}\n\n{trained.prompt}"


@pytest.mark.parametrize("content", ["{", "5", '["depth"]', '{"name": "depth"}'])
def test_tools_that_are_none_are_one_message(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(content)
    with pytest.raises(DataError, match="tools") as caught:
        read_tools(file)
    assert (caught.value.where, "JSON list" in str(caught.value.repair)) == (str(file), True)
