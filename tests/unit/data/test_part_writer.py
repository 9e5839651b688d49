"""One part of a prepared dataset: what is taken from an earlier preparation, and where a writer stops early."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finray.data.dataset import parts
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import Part, PrepareSettings, plan, plan_streams
from finray.data.formats.examples import Labelled, Text
from finray.data.storage import Folder
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

ROWS = [{"text": "the cat"}, {"text": "a dog sleeps"}]


def planned(preparing: Preparing, source: Path, folder: Path, **data: Any) -> tuple[PartWriter, list[Part]]:
    """A writer into a folder, and the parts that it is to write."""
    settings = PrepareSettings.of(preparing.config(source, **data))
    writer = PartWriter(settings, settings.encoder(preparing.tokenizer), Folder(folder))
    return writer, plan(settings, plan_streams(settings))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flipped(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGE: dict[str, Callable[[Path], object]] = {"gone": Path.unlink, "cut": cut, "flipped": flipped}


def test_a_part_that_is_there_whole_is_not_written_again(preparing: Preparing, put: Write, tmp_path: Path) -> None:
    writer, (part,) = planned(preparing, put("rows.jsonl", lines(ROWS)), tmp_path / "p")
    found = writer.write(part)
    assert (found.rows, found.source_rows, found.passed) == (2, 2, (2,))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "p").rglob("*")}
    assert writer.write(part) == found
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "p").rglob("*")} == before


def test_rows_that_belong_together_are_read_back_so_with_their_values_and_never_torn(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pairs(self: Tokenizer, texts: Any, encodings: Any) -> Any:
        for number, one in enumerate(rows_of(self, texts, encodings)):
            (first,) = one.rows
            spans = () if number == 1 else ((1, 2),)
            # The second has a number; the one after the first text has nothing to learn, so the pair is left out.
            other = replace(first, ids=first.ids[:2], spans=spans, values={"margin": number - 0.5})
            yield replace(one, rows=[replace(first, values={"margin": number + 0.5}), other], together=True)

    rows_of = Tokenizer.rows
    monkeypatch.setattr(Tokenizer, "rows", pairs)
    rows = [{"text": f"cat {number} " + "sleeps " * number} for number in range(9)]
    dataset = preparing.dataset(put("rows.jsonl", lines(rows)), format="text")
    (split,) = (dataset.all_rows("train"),)
    assert split is not None
    assert dataset.manifest.splits["train"].unlearnable == 1, "of the pair"
    assert split.groups.starts.tolist() == list(range(0, 17, 2))
    assert split.source_rows.tolist() == [row for row in range(9) if row != 1 for _ in range(2)]
    assert split.values("margin").tolist() == [row + by for row in range(9) if row != 1 for by in (0.5, -0.5)]
    assert split.take(np.array([4, 5, 0, 1])).values("margin").tolist() == [3.5, 2.5, 0.5, -0.5]
    for torn in ([0], [1], [1, 0], [0, 1, 3], [0, 2]):
        with pytest.raises(ValueError, match="others were not"):
            split.take(np.array(torn))
    # Splits, samples and mixes take them whole: `take` would refuse others.
    config = preparing.config(put("rows.jsonl", lines(rows)), format="text", eval_ratio=0.3)
    held_out = dataset.splits(config.data, seed=3).eval
    assert held_out is not None
    assert (len(held_out), len(held_out.groups)) == (4, 2)
    assert len(split.sample(3, seed=1)) == 6
    mix = [{"source": str(put("rows.jsonl", lines(rows))), "count": 11}]
    mixed = dataset.splits(preparing.config(mix=mix, format="text").data, seed=3).train
    assert (len(mixed), len(mixed.groups)) == (22, 11)
    with pytest.raises(DataError, match="no values `reward`"):
        split.values("reward")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["tokens-00000.arrow", "index-00000.arrow"])
def test_a_part_with_a_damaged_file_is_written_again(
    preparing: Preparing, put: Write, tmp_path: Path, name: str, damage: str
) -> None:
    writer, (part,) = planned(preparing, put("rows.jsonl", lines(ROWS)), tmp_path / "p")
    found = writer.write(part)
    file = tmp_path / "p" / "train" / name
    whole = file.read_bytes()
    DAMAGE[damage](file)
    assert writer.write(part) == found
    assert file.read_bytes() == whole


def test_a_note_of_other_rows_or_that_cannot_be_read_is_written_again(
    preparing: Preparing, put: Write, tmp_path: Path
) -> None:
    writer, (part,) = planned(preparing, put("rows.jsonl", lines(ROWS)), tmp_path / "p")
    found = writer.write(part)
    (note,) = (file for file in (tmp_path / "p").rglob("*.json") if file.is_file())
    said = json.loads(note.read_text())
    for wrong in ({**said, "rows": 99, "pieces": []}, {}):
        note.write_text(json.dumps(wrong))
        assert writer.write(part) == found
        assert json.loads(note.read_text()) == said


def test_a_writer_that_has_enough_leaves_out_what_it_did_not_reach(
    preparing: Preparing, put: Write, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        source = put(f"many/{name}.jsonl", lines([{"text": "the cat"}] * 300)).parent
    writer, (part,) = planned(preparing, source, tmp_path / "p")
    asked: list[int] = []

    def enough() -> bool:
        asked.append(1)
        return True

    found = writer.write(part, enough=enough)
    # It asks once it has written 256 rows, and when it has read the next 256.
    assert (found.rows, len(asked)) == (256, 1)
    assert [Path(piece.file).name for piece in found.pieces] == ["a.jsonl", "b.jsonl"]
    assert found.passed == (300, 212)
    other, _ = planned(preparing, source, tmp_path / "q")
    whole = other.write(part, enough=lambda: False)
    assert (whole.rows, whole.passed) == (900, (300, 300, 300))


def test_a_row_that_takes_too_long_ends_the_part_where_other_bad_rows_are_dropped(
    preparing: Preparing, put: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put("rows.jsonl", lines([{"text": text} for text in ("one", "bad", "slow", "more")]))
    writer, (part,) = planned(preparing, source, tmp_path / "p", on_bad_row="drop")
    seen: list[str] = []

    def convert(row: dict[str, Any]) -> list[Any]:
        seen.append(row["text"])
        if row["text"] in ("bad", "slow"):
            error = DataError(f"is {row['text']}", where="data.converter", repair="look for a loop")
            error.overdue = row["text"] == "slow"
            raise error
        return []

    monkeypatch.setattr(parts, "converter_of", lambda *_, **__: convert)
    with pytest.raises(DataError) as caught:
        writer.write(part)
    found = caught.value
    assert (found.message, found.repair, found.overdue) == ("is slow (data.converter)", "look for a loop", True)
    assert str(found.where).endswith("rows.jsonl:3")
    assert seen == ["one", "bad", "one", "bad", "slow"], "the next row would take as long"


@pytest.mark.parametrize("later", ['{"text": 1}', "not JSON"])
def test_the_first_bad_row_is_named_although_a_later_one_was_met_before(
    preparing: Preparing, put: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    monkeypatch.setattr(parts, "_ROWS_AT_A_TIME", 2)
    rows = ['{"text": "one"}', '{"text": null}', '{"text": "two"}', later, '{"text": "three"}', ""]
    source = put("rows.jsonl", rows[0])
    writer, (part,) = planned(preparing, source, tmp_path / "p")
    # Planning reads the first rows, too.
    source.write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        writer.write(part)
    assert str(caught.value.where).endswith("rows.jsonl:2")
    dropping, _ = planned(preparing, source, tmp_path / "q", on_bad_row="drop")
    found = dropping.write(part)
    assert found.rows == 3
    assert [row.number for row in found.bad] == [2, 4]


def test_a_thread_that_tokenizes_does_not_meet_the_truncation_of_another_text(preparing: Preparing) -> None:
    encoder = Tokenizer(preparing.tokenizer, train_on="all", max_length=4, on_too_long="truncate")
    own, texts = encoder._tokenizer, encoder.texts([Text("the cat " * 9)])

    with ThreadPoolExecutor(1) as thread:
        begun = list[Future[Any]]()

        def truncating(*given: Any, **options: Any) -> Any:
            found = own(*given, **options)
            begun.append(thread.submit(encoder.tokenize, texts))
            # As long as truncation is set, it waits.
            assert not wait(begun, timeout=0.2).done
            return found

        encoder._tokenizer = truncating
        (found,) = encoder.encode([Labelled("the cat sleeps", "a", "a dog sleeps")])
        assert len(found.rows[0].ids) == 4
        ((whole,), _) = begun[0].result()
    assert len(whole.ids) > 9
