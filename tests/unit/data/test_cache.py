"""What is known of prepared datasets in a directory or behind a URL, and which of them are removed."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from finray.data.dataset import cache
from finray.data.dataset.cache import CachedDataset, damaged, entries, prune
from finray.data.storage import Folder
from finray.errors import DataError

DAY = 86400.0
WHOLE, OTHER, UNFINISHED = "a" * 24, "b" * 24, f".partial-{'c' * 24}"


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Two prepared datasets whose manifests are damaged, one that was never finished, and what is none."""
    found = str(tmp_path / "prepared") if request.param == "local" else f"memory://{uuid.uuid4()}/prepared"
    for name in (f"{WHOLE}/manifest.json", f"{OTHER}/manifest.json", f"{UNFINISHED}/train/0.arrow"):
        Folder(found).write(name, b"none")
    Folder(found).write(f"{WHOLE}/train/0.arrow", b"12345")
    for name in ("notes.txt", f"{'d' * 23}/manifest.json", f"{'e' * 25}/manifest.json", "f" * 24):
        Folder(found).write(name, b"mine")
    return found


def names(root: str) -> set[str]:
    return {name.split("/")[0] for name, _ in Folder(root).files() if not name.startswith(".locks")}


MINE = {"notes.txt", "d" * 23, "e" * 25, "f" * 24}


def test_what_there_is_has_a_name_a_size_and_whether_it_is_whole(root: str) -> None:
    found = entries(f"{root}/")
    assert [(one.name, one.is_whole, one.size, one.sources) for one in found] == [
        (UNFINISHED, False, 4, ""),
        (WHOLE, True, 9, "damaged"),
        (OTHER, True, 4, "damaged"),
    ]
    assert {(one.rows, one.tokens) for one in found} == {(0, 0)}
    for one in found:
        assert one.used is None if "://" in root else one.used is not None and 0 <= one.used < 3600
    assert damaged(root, WHOLE) == [f"{root}/{WHOLE}/manifest.json"]


def test_by_itself_only_what_was_never_finished_is_removed(root: str) -> None:
    assert prune(root) == [(UNFINISHED, 4)]
    assert names(root) == {WHOLE, OTHER, *MINE}
    assert prune(root) == []


@pytest.mark.parametrize("how", [{"everything": True}, {"damaged_ones": True}])
def test_everything_and_what_is_damaged_are_removed_and_nothing_else(root: str, how: dict[str, bool]) -> None:
    assert sorted(prune(root, **how)) == [(UNFINISHED, 4), (WHOLE, 9), (OTHER, 4)]
    assert names(root) == MINE


def test_a_dataset_goes_when_it_is_older_than_the_days_that_are_given(tmp_path: Path) -> None:
    for name, age in ((WHOLE, 2.01), (OTHER, 1.99)):
        Folder(tmp_path).write(f"{name}/manifest.json", b"none")
        at = time.time() - age * DAY
        os.utime(tmp_path / name / "manifest.json", (at, at))
    assert prune(str(tmp_path), older_than_days=3) == []
    assert prune(str(tmp_path), older_than_days=2) == [(WHOLE, 4)]
    assert prune(str(tmp_path), older_than_days=1) == [(OTHER, 4)]


def test_behind_a_url_nothing_is_known_of_the_age_and_nothing_goes_by_it(root: str) -> None:
    if "://" in root:
        assert prune(root, older_than_days=0) == [(UNFINISHED, 4)]


def test_where_there_is_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        entries(str(tmp_path / "none"))


def test_a_dataset_is_moved_aside_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder(tmp_path).write(f"{WHOLE}/manifest.json", b"none")
    monkeypatch.setattr(cache.Folder, "delete", lambda self: None)
    assert prune(str(tmp_path), everything=True) == [(WHOLE, 4)]
    # A manifest that is there while data is removed would speak of what is gone.
    assert [one.name for one in tmp_path.iterdir() if one.is_dir() and one.name != ".locks"] == [f".partial-{WHOLE}"]
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("used", "said"),
    [
        *((None, ""), (0.0, "just now"), (119.0, "just now"), (120.0, "2 minutes ago"), (7199.0, "120 minutes ago")),
        *((7200.0, "2 hours ago"), (2 * DAY - 1, "48 hours ago"), (2 * DAY, "2 days ago"), (40 * DAY, "40 days ago")),
    ],
)
def test_an_age_is_said_in_the_largest_unit_of_which_there_are_two(used: float | None, said: str) -> None:
    assert CachedDataset(WHOLE, True, 1, used).age == said
