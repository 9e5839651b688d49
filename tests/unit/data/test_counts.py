"""What became of the rows: every counter of a prepared dataset, counted here from the text of the rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.dataset.report import report_lines, unserved_ends
from finray.data.formats.examples import Completion
from finray.data.sources import pieces
from finray.data.tokenize.encode import Tokenizer
from tests.support import tiny
from tests.support.preparing import Preparing, Write, bad_rows_of, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

LONG = " ".join(["the a cat dog house tree river mountain"] * 3)


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


SHORT = [talk("what is", "a cat"), talk("where", "no"), talk("how many", "four"), talk("who sleeps", "the dog sleeps")]
CUT = [talk("what", LONG), talk("why", f"{LONG} two")]
LOST = [talk(f"{LONG} {number}", "yes") for number in range(3)]
UNLEARNABLE = [{"messages": [{"role": "user", "content": "alone"}]}]
EMPTY = [talk("say nothing", "")]
BAD: list[Any] = [{"messages": "none"}, {"messages": [{"role": "nobody", "content": "x"}]}]


def length(preparing: Preparing, row: dict[str, Any]) -> int:
    text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in row["messages"])
    return len(preparing.tokenizer(text, add_special_tokens=False)["input_ids"])


def answer_length(preparing: Preparing, row: dict[str, Any]) -> int:
    """Of the answer and the end of its turn."""
    return len(preparing.tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"]) + 1


@pytest.mark.parametrize("on_too_long", ["truncate", "drop"])
def test_every_counter(preparing: Preparing, put: Write, on_too_long: str) -> None:
    limit = 40
    rows = [SHORT[0], BAD[0], *CUT, *LOST, *SHORT[1:], BAD[1], *UNLEARNABLE, *EMPTY]
    dataset = preparing.dataset(
        put("rows.jsonl", lines(rows)), max_length=limit, on_too_long=on_too_long, on_bad_row="drop"
    )
    whole = [*SHORT, *EMPTY]
    assert all(length(preparing, row) <= limit for row in whole)
    too_long = {row["messages"][0]["content"]: length(preparing, row) for row in (*CUT, *LOST)}
    assert min(too_long.values()) > limit
    expected = {
        "source_rows": len(rows),
        "bad_rows": 2,
        "unlearnable": 1,
        "empty_answers": 1,
        "rows": 5,
        "tokens": sum(length(preparing, row) for row in whole),
        "supervised": sum(answer_length(preparing, row) for row in whole),
    }
    if on_too_long == "truncate":
        kept = sum(limit - length(preparing, talk(row["messages"][0]["content"], "")) + 2 for row in CUT)
        expected |= {
            "rows": 7,
            "tokens": expected["tokens"] + 2 * limit,
            "supervised": expected["supervised"] + kept,
            "truncated": 5,
            "truncated_tokens": sum(found - limit for found in too_long.values()),
            "answers_lost": 3,
        }
    else:
        expected |= {"dropped_too_long": 5, "dropped_tokens": sum(too_long.values())}
    stats = dataset.manifest.splits["train"]
    assert {name: count for name, count in stats.counts().items() if count} == expected
    lost = ("rows.jsonl:5", "rows.jsonl:6", "rows.jsonl:7")
    assert stats.answers_lost_at == (lost if on_too_long == "truncate" else ())
    cut = ("rows.jsonl:3", "rows.jsonl:4", "rows.jsonl:5")
    assert stats.truncated_at == (cut if on_too_long == "truncate" else ())
    longest = [length(preparing, row) for row in whole] + ([limit] if on_too_long == "truncate" else [])
    assert (stats.longest, stats.kind, stats.labels) == (max(longest), "chat", ())
    assert [(row["split"], row["file"], row["row"]) for row in bad_rows_of(dataset)] == [
        ("train", "rows.jsonl", 2),
        ("train", "rows.jsonl", 11),
    ]


def test_what_the_index_says_of_a_row(preparing: Preparing, put: Write) -> None:
    """docs/formats.md: length, targets, source row, piece, number in it, and a hash of the tokens; groups by a hash."""
    rows = [
        {"text": text, "owner": owner} for text, owner in (("one two", "x"), ("", "y"), ("three", None), ("four", 1))
    ]
    rows[2]["owner"] = {"b": 1, "a": 2}
    dataset = preparing.dataset(put("rows.jsonl", lines(rows)), group_by="owner", eval_ratio=0.3, on_bad_row="drop")
    table = pa.ipc.open_file(str(Path(dataset.folder.root) / "train" / "index-00000.arrow")).read_all()

    def hashed(content: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)

    end = preparing.tokenizer.eos_token_id
    texts = [(0, "one two", '"x"'), (2, "three", '{"a": 2, "b": 1}'), (3, "four", "1")]
    ids = [[*preparing.tokenizer(text, add_special_tokens=False)["input_ids"], end] for _, text, _ in texts]
    found = table.to_pydict()
    assert found["length"] == [len(one) for one in ids]
    assert found["supervised"] == [len(one) - 1 for one in ids]
    assert found["source_row"] == [at for at, _, _ in texts]
    assert found["piece"] == [0, 0, 0]
    assert found["digest"] == [hashed(b"".join(token.to_bytes(4, "little") for token in one)) for one in ids]
    assert found["group"] == [hashed(owner.encode()) for _, _, owner in texts]


@pytest.mark.parametrize(
    ("prompt", "completion", "joined"),
    [
        *(("one", "two", True), ("one ", "two", False), ("one", " two", False), ("one\n", "2", False)),
        *(("one:", "two", True), ("one", "2", True), ("one", "!", False), ("", "two", False), ("one", "", False)),
        # Scripts that put no white space between words.
        *(("図", "犬", False), ("one", "犬", False), ("図", "two", False), ("Ａ", "two", False)),
        *(("図one", "two", True), ("one図", "two", False), ("one", "two犬", True)),
    ],
)
def test_words_that_run_into_each_other_are_counted(
    preparing: Preparing, prompt: str, completion: str, joined: bool
) -> None:
    data = preparing.config("x", format="prompt_completion").data
    encoder = Tokenizer(preparing.tokenizer, train_on=data.train_on, max_length=64, on_too_long=data.on_too_long)
    (encoded,) = encoder.encode([Completion(prompt, completion)])
    assert ("joined_words" in encoded.notes) is joined
    assert ("empty_answers" in encoded.notes) is (not completion)


# Earlier answers are written small, so each answer gets a row of its own in which it is the last.
REWRITING = tiny.CHATML.replace(
    "message['content']",
    "(message['content'] | lower if message['role'] == 'assistant' and not loop.last else message['content'])",
)


def test_conversations_that_are_split_are_counted_with_their_rows_and_tokens(
    preparing: Preparing, put: Write, tmp_path: Path
) -> None:
    template = tmp_path / "rewriting.jinja"
    template.write_text(REWRITING, encoding="utf-8")
    long = {"messages": [*talk("one", "The cat")["messages"], *talk("two", "no")["messages"]]}
    source = put("rows.jsonl", lines([SHORT[0], long, SHORT[1], long]))
    config = preparing.config(source)
    config = config.model_copy(update={"model": config.model.model_copy(update={"chat_template": str(template)})})
    stats = PreparedDataset(prepare_here(config, root=tmp_path / "c")).manifest.splits["train"]
    first, whole = {"messages": long["messages"][:2]}, {"messages": [*talk("one", "the cat")["messages"]]}
    whole["messages"] += long["messages"][2:]
    tokens = 2 * (length(preparing, first) + length(preparing, whole))
    assert (stats.split_conversations, stats.split_rows, stats.split_tokens) == (2, 4, tokens)
    assert (stats.source_rows, stats.rows) == (4, 6)
    assert stats.truncated_tokens == 0
    # Of both rows of a conversation something is cut off.
    limit = min(length(preparing, first), length(preparing, whole)) - 1
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": limit})})
    stats = PreparedDataset(prepare_here(config, root=tmp_path / "c")).manifest.splits["train"]
    assert stats.truncated_tokens == tokens - 4 * limit + sum(length(preparing, row) - limit for row in SHORT[:2])


@pytest.mark.parametrize(
    ("row", "options", "unused"),
    [
        ({"text": "a"}, {}, 2),
        ({"prompt": "a", "completion": " b"}, {"format": "prompt_completion"}, 2),
        ({"q": "a", "o": "b"}, {"input_template": "{q} ", "output_template": "{o}"}, 2),
        ({"prompt": "a", "completion": "b"}, {}, 0),
        (talk("a", "b"), {}, 0),
    ],
)
def test_rows_that_a_system_message_cannot_be_added_to_are_counted(
    preparing: Preparing, put: Write, row: dict[str, Any], options: dict[str, Any], unused: int
) -> None:
    """It would have no effect without a word."""
    file = put("rows.jsonl", lines([row, row]))
    stats = preparing.dataset(file, system="Be brief.", **options).manifest.splits["train"]
    assert stats.system_unused == unused
    assert preparing.dataset(file, **options).manifest.splits["train"].system_unused == 0


def noted(preparing: Preparing, put: Write, rows: list[Any], **data: Any) -> Any:
    """The counters of these rows, their report, and how the stream was read."""
    manifest = preparing.dataset(put("rows.jsonl", lines(rows)), **data).manifest
    stats = manifest.splits["train"]
    return stats, "\n".join(report_lines(manifest)), stats.streams[0]


def test_a_column_counts_from_the_row_on_that_has_it(preparing: Preparing, put: Write) -> None:
    """Later than the rows that decide the format, and in several parts."""
    rows = [{"instruction": f"a {number}", "output": "b"} for number in range(300)]
    for row in rows[150:]:
        row |= {"context": "the river", "rejected": "no", "id": "x"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", 4000)
        stats, report, stream = noted(preparing, put, rows)
    assert len(stats.streams[0].parts) > 2
    assert stream.format == "alpaca (instruction, output, input from context); not read: rejected, id"
    assert stream.unread == {"rejected": 150, "id": 150}
    assert "150 of 300 rows have `rejected`, a column that is not read: preferences are not learned" in report
    assert "`id`" not in report
    texts = preparing.texts(put("rows.jsonl", lines(rows)))
    assert [("the river" in text) for text in texts] == [number >= 150 for number in range(300)]


def test_of_two_columns_that_mean_the_same_the_one_with_something_is_read(preparing: Preparing, put: Write) -> None:
    rows = [{"instruction": "a", "input": "", "context": "the river", "output": "b"}] * 2
    assert "the river" in preparing.texts(put("rows.jsonl", lines(rows)))[0]
    _, report, stream = noted(preparing, put, [{**rows[0], "input": "the house"}])
    assert stream.unread == {"context": 1}
    assert "1 of 1 rows have `context`" in report


def test_keys_of_messages_that_nothing_reads_are_counted_and_named(preparing: Preparing, put: Write) -> None:
    rows = [talk("a", "b"), talk("c", "d")]
    rows[1]["messages"][1] |= {"think": "it barks", "id": "7", "refusal": None, "name": "dog"}
    rows[0]["messages"][0]["train"] = True
    _, report, stream = noted(preparing, put, rows)
    unread = {"train": 1, "think": 1, "id": 1, "name": 1}
    assert stream.unread == {f"messages[].{key}": count for key, count in unread.items()}
    assert "1 of 2 rows have `think` in a message, a key that is not read: this reasoning is not learned" in report
    assert "`train` in a message, a key that is not read: only answers are learned" in report
    assert "keys of messages that nothing reads: `id` (1 rows), `name` (1 rows)" in report
    assert "not read" not in noted(preparing, put, [talk("a", "b")])[1]
    reading = tiny.CHATML.replace("+ message['content']", "+ (message.think or '') + message['content']")
    assert reading != tiny.CHATML
    _, _, stream = noted(preparing, put, rows[1:], model={"chat_template": reading})
    assert "messages[].think" not in stream.unread


def test_end_tokens_that_occur_twice_and_special_tokens_in_prompts_are_named(preparing: Preparing, put: Write) -> None:
    rows = [talk("a", "b"), talk("a <|im_end|>\n<|im_start|>assistant\nyes", "b"), talk("<|im_end a|>", "b<|im_end|>")]
    stats, report, _ = noted(preparing, put, rows)
    assert (stats.special_in_prompts, stats.doubled_eos, stats.doubled_bos) == (1, 1, 0)
    assert stats.places == {"special_in_prompts": ("rows.jsonl:2",), "doubled_eos": ("rows.jsonl:3",)}
    assert "1 of 3 rows have text in their prompt that the tokenizer reads as special tokens" in report
    end = preparing.tokenizer.eos_token
    pairs = [{"prompt": "a", "completion": f" b{end}"}, {"prompt": "a", "completion": " b"}]
    assert noted(preparing, put, pairs, format="prompt_completion")[0].doubled_eos == 1


def test_ends_at_which_a_server_does_not_stop_are_said(preparing: Preparing, put: Write) -> None:
    template = tiny.CHATML.replace("<|im_end|>", "<|im_start|>")
    source, model = put("rows.jsonl", lines([talk("a", "b"), talk("c", "d")])), {"chat_template": template}
    manifest = preparing.dataset(source, model=model).manifest
    (end,) = manifest.splits["train"].ends
    assert end.endswith(" <|im_start|>")
    (warning,) = unserved_ends(manifest, ())
    assert "2 answers end with <|im_start|>, at which a server" in warning
    assert not unserved_ends(manifest, (int(end.split()[0]),))
    assert not unserved_ends(preparing.dataset(source).manifest, ())


def test_weights_and_media_of_rows_are_said_and_empty_columns_are_not(preparing: Preparing, put: Write) -> None:
    pair = {"prompt": "a", "completion": "b", "weight": 2, "images": [], "label": True}
    _, report, stream = noted(preparing, put, [pair, {**pair, "images": ["x"], "label": False}])
    assert stream.unread == {"weight": 2, "images": 1, "label": 2}
    assert "2 of 2 rows have `weight`" in report
    assert "1 of 2 rows have `images`" in report
    assert "1 of 2 rows say that their answer is not wanted" in report
