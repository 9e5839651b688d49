"""A file that is there is replaced as a whole, or appended to, by ``finray.files``: after a full disk or a kill, what
was there before is still there. Whoever writes in another way is named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from finray.files import replace_all
from tests.support.small_disk import files_of_at_most
from tests.support.source import FILES, calls

WRITERS = {"write_text", "write_bytes", "truncate", "ftruncate", "touch"}
_FILLED = "a directory that this process has made, and that counts once it is whole"
_NAMED = "a file that the user names, which may be a device"
ALLOWED = {
    "checkpoint/manifest.py:write": _FILLED,
    "checkpoint/objects.py:get": "a new file, which then takes the place of another",
    "checkpoint/rundir.py:check_output": "a new file, which is removed",
    "cli/config.py:init": _NAMED,
    "cli/doctor.py:doctor": _NAMED,
    "cli/failure.py:_kept": "a report of a defect, new each time",
    "cli/show.py:written": _NAMED,
    "data/dataset/export.py:export_rows": _FILLED,
    "data/sources/memory.py:write_rows": "a new file, which then takes the place of another",
    "data/storage.py:write": "a new file, which then takes the place of another",
    "evaluation/result_cache.py:writer": "cuts off a line that a kill left unfinished",
    "evaluation/scores/checking.py:_unshare": "/proc",
    "files.py:replacing": "the place itself",
    "models/export.py:_write_json": _FILLED,
    "models/export.py:export": _FILLED,
    "publishing/background.py:_files": _FILLED,
    "publishing/gguf.py:export_gguf": _FILLED,
    "publishing/restore.py:pull": _FILLED,
    "reporting/page.py:write": _NAMED,
    "results.py:write": _NAMED,
    "runtime/jobs.py:submit": _FILLED,
    "runtime/nodes.py:_run_node": "the log of a node that starts",
    "training/checkpointing.py:write": _FILLED,
    "training/memory.py:write": _FILLED,
    "training/outputs.py:save": _FILLED,
}


def writers(source: str) -> Iterator[tuple[str, str]]:
    """Function and call, of each call that writes a file anew or in place."""
    for function, call in calls(source):
        name = ast.unparse(call.func).rpartition(".")[2]
        given = (*call.args, *(key.value for key in call.keywords if key.arg == "mode"))
        words = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        # Not "a": what is there stays.
        anew = any(word and set(word) <= set("rwxbt+a") and set(word) & set("wx+") for word in words)
        if name in WRITERS or (name == "open" and anew):
            yield function, name


def test_what_is_there_is_replaced_as_a_whole() -> None:
    found = {f"{file}:{function}" for file, source in FILES.items() for function, _ in writers(source)}
    assert sorted(found - ALLOWED.keys()) == []
    # No permission outlives its reason.
    assert sorted(ALLOWED.keys() - found) == []


@pytest.mark.parametrize(
    "call",
    ["p.write_bytes(b)", "p.write_text(b)", "open(p, 'w')", "p.open('r+b')", "p.open(mode='wb')", "s.truncate(0)"],
)
def test_the_rule_can_see(call: str) -> None:
    assert len(list(writers(f"def f(p, b, s):\n    {call}"))) == 1


def test_the_rule_lets_readers_and_the_one_place_be() -> None:
    source = "def f(p):\n    p.open('rb')\n    open(p)\n    p.open('ab')\n    replace_bytes(p, b'')"
    assert list(writers(source)) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        path.write_bytes(b"old")
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large") as caught:
        replace_all({first: b"new", second: b"x" * 100_000})
    assert caught.value.filename == str(second)
    assert (first.read_bytes(), second.read_bytes()) == (b"old", b"old")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    # Control: written in place, it would have been cut off.
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        second.write_bytes(b"x" * 100_000)
    assert second.stat().st_size == 4096
