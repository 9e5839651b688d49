"""Rows written for other tools: the text of every kind of row, by hand, in the split that trains on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finray.data.dataset.export import export_rows
from finray.data.dataset.prepare import prepare_here
from finray.errors import DataError
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put


def exported(preparing: Preparing, folder: Path, source: Path, **data: Any) -> dict[str, list[dict[str, str]]]:
    config = preparing.config(source, **data)
    location = prepare_here(config, root=folder.parent / "prepared-for-export")
    written = export_rows(config, location, folder)
    found = {path.name: [json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in written}
    assert {path.name: count for path, count in written.items()} == {name: len(rows) for name, rows in found.items()}
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "née one"}, {"input": "", "output": "née one"}),
        ({"text": "one", "label": 3}, {"input": "one", "output": "3"}),
        ({"prompt": "2 + 2 = ", "completion": "4"}, {"input": "2 + 2 = ", "output": "4"}),
        (
            {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
            {
                "input": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
                "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
                "output": "d",
            },
        ),
    ],
)
def test_a_row_of_each_kind(
    preparing: Preparing, put: Write, tmp_path: Path, row: dict[str, Any], expected: dict[str, str]
) -> None:
    kinds = {"messages": "messages", "label": "labelled_text", "text": "text", "prompt": "prompt_completion"}
    data = {"format": next(kind for column, kind in kinds.items() if column in row)}
    found = exported(preparing, tmp_path / "out", put("rows.jsonl", lines([row])), **data)
    assert found == {"training.jsonl": [expected]}
    assert "née" not in json.dumps(expected) or "née" in (tmp_path / "out" / "training.jsonl").read_text("utf-8")
    assert (tmp_path / "out" / ".data_ready").read_text() == "ready"


USER_A = "<|im_start|>user\na<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("a")], {"input": USER_A, "output": ""}),
        ([user("a"), assistant("b"), user("c")], {"input": f"{USER_A}<|im_start|>assistant\n", "output": "b"}),
        ([user("a"), assistant("")], {"input": f"{USER_A}<|im_start|>assistant\n", "output": ""}),
        ([assistant("b")], {"input": "<|im_start|>assistant\nb<|im_end|>\n", "output": ""}),
    ],
)
def test_the_last_answer_of_a_conversation_is_its_output(
    preparing: Preparing, put: Write, tmp_path: Path, messages: list[Any], expected: dict[str, str]
) -> None:
    source = put("rows.jsonl", lines([{"messages": messages}]))
    assert exported(preparing, tmp_path / "out", source, train_on="all") == {"training.jsonl": [expected]}


@pytest.mark.parametrize(
    "answer",
    [assistant("so</think>d"), assistant("<think>\nso\n</think>\n\nd"), {**assistant("d"), "reasoning_content": "so"}],
)
def test_reasoning_is_in_the_output_once(
    preparing: Preparing, put: Write, tmp_path: Path, answer: dict[str, str]
) -> None:
    """After a prompt that opens it, with one closing tag, as it is learned."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    model = {"chat_template": str(put("template.jinja", template))}
    source = put("rows.jsonl", lines([{"messages": [user("a"), answer]}]))
    expected = {"input": f"{USER_A}<|im_start|>assistant\n<think>\n", "output": "so\n</think>\n\nd"}
    assert exported(preparing, tmp_path / "out", source, model=model) == {"training.jsonl": [expected]}


def test_every_row_is_in_the_file_of_its_split_and_bad_ones_in_none(
    preparing: Preparing, put: Write, tmp_path: Path
) -> None:
    rows: list[Any] = [{"text": f"row {number}"} for number in range(20)]
    rows[3] = {"text": 3}
    source = put("rows.jsonl", lines(rows))
    data: dict[str, Any] = {"eval_ratio": 0.2, "test_ratio": 0.1, "on_bad_row": "drop", "format": "text"}
    found = exported(preparing, tmp_path / "out", source, **data)
    splits = preparing.splits(source, **data)
    for name, split in (("training", splits.train), ("validation", splits.eval), ("test", splits.test)):
        assert [row["output"] for row in found[f"{name}.jsonl"]] == preparing.said(split)
    assert sum(map(len, found.values())) == 19


def test_splits_with_sources_of_their_own_and_several_files(preparing: Preparing, put: Write, tmp_path: Path) -> None:
    """Rows of a second file are counted after those of the first."""
    for number in range(3):
        put(f"train/{number}.jsonl", lines([{"text": f"{number}{letter}"} for letter in "abc"]))
    held_out = put("held.jsonl", lines([{"text": "held"}]))
    found = exported(preparing, tmp_path / "out", tmp_path / "source" / "train", eval_source=str(held_out))
    assert [row["output"] for row in found["training.jsonl"]] == [
        f"{number}{one}" for number in range(3) for one in "abc"
    ]
    assert [row["output"] for row in found["validation.jsonl"]] == ["held"]


def test_a_conversation_that_became_several_rows_is_written_once(
    preparing: Preparing, put: Write, tmp_path: Path
) -> None:
    source = put("rows.jsonl", lines([{"text": " ".join(["one two three"] * 60)}, {"text": "four"}]))
    data: dict[str, Any] = {"max_length": 16}
    assert len(preparing.splits(source, **data).train) > 5
    found = exported(preparing, tmp_path / "out", source, **data)
    assert [len(row["output"].split()) for row in found["training.jsonl"]] == [180, 1]


def test_files_of_an_earlier_export_are_gone(preparing: Preparing, put: Write, tmp_path: Path) -> None:
    """Its test rows may be trained on now."""
    rows = [{"text": f"row {number}"} for number in range(10)]
    source = put("rows.jsonl", lines(rows))
    exported(preparing, tmp_path / "out", source, test_ratio=0.2)
    assert (tmp_path / "out" / "test.jsonl").is_file()
    exported(preparing, tmp_path / "out", source)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".data_ready", "training.jsonl"]


def test_files_that_are_not_of_an_earlier_export_are_left_alone(
    preparing: Preparing, put: Write, tmp_path: Path
) -> None:
    """They may be the only copy of the data."""
    content = "".join(f'{{"text": "row {number}"}}\n' for number in range(10))
    own = put("own/training.jsonl", content)
    with pytest.raises(DataError, match="not from an earlier export") as caught:
        exported(preparing, own.parent, put("rows.jsonl", lines([{"text": "a"}])))
    assert caught.value.where == str(own)
    # Nor where the rows are read from it, even if an export wrote it.
    (own.parent / ".data_ready").write_text("ready")
    with pytest.raises(DataError, match="give another directory"):
        exported(preparing, own.parent, own.parent)
    assert own.read_text() == content
    assert sorted(path.name for path in own.parent.iterdir()) == [".data_ready", "training.jsonl"]


def test_an_export_that_fails_leaves_the_earlier_one(preparing: Preparing, put: Write, tmp_path: Path) -> None:
    source = put("rows.jsonl", lines([{"text": "a"}, {"text": "b"}]))
    before = exported(preparing, tmp_path / "out", source)
    config = preparing.config(source)
    location = prepare_here(config, root=tmp_path / "c")
    source.unlink()
    with pytest.raises(DataError):
        export_rows(config, location, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".data_ready", "training.jsonl"]
    rows = (tmp_path / "out" / "training.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == before["training.jsonl"]


def test_a_folder_that_cannot_be_written_is_named(preparing: Preparing, put: Write, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written") as caught:
        exported(preparing, tmp_path / "out", put("rows.jsonl", lines([{"text": "a"}])))
    assert caught.value.where == str(tmp_path / "out")
