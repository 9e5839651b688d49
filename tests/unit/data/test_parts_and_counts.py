"""How sources are cut into parts, at the border of each limit; what is counted begins at nothing; what a shape of a
conversation is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.formats.examples import Chat
from finray.data.sources import hub, pieces
from finray.data.sources.pieces import plan_parts
from finray.data.sources.readers import Reading
from finray.data.sources.resolve import Source
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from tests.support import families
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
    # How many rows are before it is known of a file's beginning alone.
    assert [one.first for (one,) in plan_parts(Source("many", ("0.jsonl",)), Reading())] == [0, None]
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
