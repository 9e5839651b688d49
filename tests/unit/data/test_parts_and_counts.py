"""How sources are cut into parts, at the border of each limit; what is counted begins at nothing; what a shape of a
conversation is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.dataset import prepare
from finray.data.dataset.manifest import RowCounts
from finray.data.formats.convert import column
from finray.data.formats.examples import Chat
from finray.data.sources import hub, pieces
from finray.data.sources.pieces import plan_parts
from finray.data.sources.readers import ByteRange, Reading
from finray.data.sources.resolve import Source, resolve
from finray.data.tokenize.encode import Encoded, Tokenizer, _Job
from finray.errors import DataError
from tests.support import families, tiny
from tests.support.preparing import Preparing
from tests.support.preparing import preparing as preparing
from tests.support.talk import TOOLS, assistant, calling, result, user
from tests.unit.data.test_chat_rules import with_template

MIB = 2**20


def ranges(monkeypatch: pytest.MonkeyPatch, *sizes: int, suffix: str = "jsonl") -> list[list[tuple[int, int | None]]]:
    """The start and stop of every piece of files of these sizes, by part."""
    files = tuple(f"{at}.{suffix}" for at in range(len(sizes)))
    monkeypatch.setattr(pieces, "size", dict(zip(files, sizes, strict=True)).__getitem__)
    return [[(one.start, one.stop) for one in part] for part in plan_parts(Source("many", files), Reading())]


def test_a_file_is_cut_every_four_mib_and_small_ones_share_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    each = 4 * MIB
    assert ranges(monkeypatch, each) == [[(0, None)]]
    assert ranges(monkeypatch, each + 1) == [[(0, each)], [(each, None)]]
    assert ranges(monkeypatch, 2 * each) == [[(0, each)], [(each, None)]]
    # A part takes as much as it has room for, to the byte.
    assert [len(part) for part in ranges(monkeypatch, 3 * MIB, MIB, 1)] == [2, 1]
    assert [len(part) for part in ranges(monkeypatch, 3 * MIB, MIB + 1, 1)] == [1, 2]
    assert [len(part) for part in ranges(monkeypatch, MIB, MIB, MIB, MIB, MIB)] == [4, 1]
    # What is compressed cannot be read from the middle.
    assert ranges(monkeypatch, 3 * each, suffix="jsonl.gz") == [[(0, None)]]


def test_there_are_at_most_4096_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ranges(monkeypatch, 4096 * 4 * MIB)) == 4096
    assert len(ranges(monkeypatch, 4096 * 4 * MIB + 1)) == 2049


@pytest.mark.parametrize(("rows", "parts"), [(8192, 1), (8193, 2), (8192 * 4096, 4096), (8192 * 4096 + 1, 2049)])
def test_a_data_set_of_the_hub_is_cut_every_8192_rows(monkeypatch: pytest.MonkeyPatch, rows: int, parts: int) -> None:
    monkeypatch.setattr(hub, "load", lambda source: range(rows))
    found = plan_parts(Source("hub", ()), Reading())
    assert len(found) == parts
    ((first,), *_, (last,)) = [*found, *found]
    assert (first.start, first.first, last.stop) == (0, 0, rows)
    assert {one.stop - one.start for (one,) in found[:-1]} <= {8192 if rows <= 8192 * 4096 else 16384}


@pytest.mark.parametrize("less", [0, 1])
def test_row_groups_make_a_piece_as_soon_as_they_are_large_enough(tmp_path: Path, less: int) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": list(range(70))}), file, row_group_size=10, use_dictionary=False, compression=None)
    about = pq.ParquetFile(file).metadata
    two = about.row_group(0).total_byte_size + about.row_group(1).total_byte_size
    found = [(one.start, one.stop, one.first, weight) for one, weight in pieces._row_groups(str(file), two + less)]
    wanted = [(0, 2), (2, 4), (4, 6), (6, 7)] if not less else [(0, 3), (3, 6), (6, 7)]
    each = two // 2
    assert found == [(start, stop, 10 * start, each * (stop - start)) for start, stop in wanted]


def test_nothing_is_counted_where_nothing_was_dropped_or_cut() -> None:
    assert Encoded([]) == Encoded([], frozenset(), dropped=0, dropped_tokens=0, truncated_tokens=0, answers_lost=0)
    assert ByteRange("a", "lines") == ByteRange("a", "lines", start=0, stop=None, first=0, keep=None)
    # A part without rows has the counts that it begins with.
    assert set(RowCounts().counts().values()) == {0}
    assert len(RowCounts().counts()) == 29


@pytest.mark.parametrize("row", [{"data": "text"}, {"data": ["text"]}, {"data": None}, {"data": 5}])
def test_a_dot_into_what_has_no_columns_is_a_column_that_is_missing(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"`data\.text` is missing"):
        column(row, "data.text")
    with pytest.raises(DataError, match=r"`data\.text\.more` is missing"):
        column({"data": {"text": row["data"]}}, "data.text.more")


# A result is shown only where the call is.
ONLY_WITH_CALLS = (
    "{% set calls = messages | selectattr('tool_calls', 'defined') | list %}{% for m in messages %}"
    "{% if m['role'] != 'tool' or calls %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['tool_calls'] is defined %}{{ m['tool_calls'] | tojson }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_a_template_shows_is_asked_again_of_a_conversation_without_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_template(monkeypatch, "chatml", ONLY_WITH_CALLS)
    tokenizer = Tokenizer(families.tokenizer("chatml"), train_on="assistant", max_length=4096, on_too_long="error")
    said = (user("what"), calling("Elbe"), result("five metres"), assistant("five"))
    tokenizer.encode([Chat(said, TOOLS)])
    with pytest.raises(DataError, match=r"leaves out messages\[2\]"):
        tokenizer.encode([Chat((said[0], assistant("so"), *said[2:]), TOOLS)])


def test_a_note_wakes_whoever_waits_for_the_data(
    preparing: Preparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that it would be shown when the data is prepared, which is too late."""
    monkeypatch.setattr(prepare, "_PATIENCE_S", 0.05)
    config = preparing.config(tiny.write_chat_rows(tmp_path, 3))
    name = prepare.plan_preparation(config, root=str(tmp_path / "c")).name
    told = threading.Event()
    with prepare.locked(str(tmp_path / "c"), name):
        preparation = prepare.start_preparation(config, root=tmp_path / "c")
        waiting = threading.Thread(target=preparation.wait, kwargs={"handle": lambda record: told.set()})
        waiting.start()
        assert told.wait(30)
    waiting.join(60)
    assert preparation.result()


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_preparation_that_is_cancelled_while_it_is_planned_has_no_part_for_a_helper(
    cancelled: bool, preparing: Preparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_plan, may_write, planned = threading.Event(), threading.Event(), threading.Event()
    real_plan, real_load = prepare.plan, prepare.load_tokenizer

    def plan(*arguments: Any) -> Any:
        assert may_plan.wait(30)
        return real_plan(*arguments)

    def load_tokenizer(*arguments: Any) -> Any:
        planned.set()
        assert may_write.wait(30)
        return real_load(*arguments)

    monkeypatch.setattr(prepare, "plan", plan)
    monkeypatch.setattr(prepare, "load_tokenizer", load_tokenizer)
    preparation = prepare.start_preparation(preparing.config(tiny.write_chat_rows(tmp_path, 3)), root=tmp_path / "c")
    if cancelled:
        preparation.cancel()
    may_plan.set()
    assert planned.wait(30)
    part = preparation.take()
    assert (part is None) is cancelled
    if part is not None:
        preparation.take_back(part)
    may_write.set()
    if cancelled:
        with pytest.raises(prepare._Cancelled):
            preparation.result()
    else:
        assert preparation.result()


@pytest.mark.parametrize("at", [0, 8])
def test_an_answer_without_text_at_either_end_is_nothing_to_learn(at: int) -> None:
    tokenizer = Tokenizer(families.tokenizer("chatml"), train_on="assistant", max_length=4096, on_too_long="error")
    ids = families.tokenizer("chatml")("what dog", add_special_tokens=False)["input_ids"]
    jobs = [_Job("what dog", ((at, at),)), _Job("what dog", ((0, 8),))]
    assert tokenizer._spans_by_width(jobs, [ids, ids]) == [[], [(0, len(ids))]]


def test_a_colon_after_a_directory_names_what_is_inside_and_after_another_name_what_is_on_the_hub(
    tmp_path: Path,
) -> None:
    (tmp_path / "more").mkdir()
    for name in ("more/a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "one"}\n')
    assert resolve(f"{tmp_path}:more", split="train").files == (str(tmp_path / "more" / "a.jsonl"),)
    assert resolve(f"{tmp_path}:b.jsonl", split="train").files == (str(tmp_path / "b.jsonl"),)
    found = resolve("org/words:more", split="train")
    assert (found.files, found.data_dir) == ((), "more")
