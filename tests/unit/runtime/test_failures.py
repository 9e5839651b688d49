"""A bug is told from bad luck by failing twice in the same way without progress."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DataUnavailable,
    FinrayError,
    ModelError,
    StorageError,
    TrainingError,
    from_dict,
)
from finray.runtime.failures import (
    LOADING,
    Failure,
    bytes_missing,
    check,
    describe,
    explain,
    first_of,
    forget,
    is_final,
    known,
    last_line,
    lost_process,
    of_first_step,
    out_of_memory,
    record,
)
from tests.support.small_disk import files_of_at_most

ALL = (CheckpointError, ConfigError, DataError, DataUnavailable, ModelError, StorageError, TrainingError)
SAME = [Failure("a", 4, "ValueError: no"), Failure("b", 4, "ValueError: no")]


def test_two_attempts_without_progress_are_enough_and_the_first_error_is_told() -> None:
    assert first_of(SAME, 4) == SAME[0]
    assert first_of([SAME[0], Failure("b", 4, "KeyError: x")], 4) == SAME[0]
    # What the others say when one is gone is a cause only where nothing else is said.
    lost = [Failure(attempt, 4, "RuntimeError: Connection closed by peer") for attempt in "ab"]
    assert first_of([lost[0], *SAME], 4) == SAME[0]
    assert first_of(lost, 4) == lost[0]


@pytest.mark.parametrize(
    "failures",
    [
        [],
        SAME[:1],
        # Two ranks of one attempt are one failure.
        [SAME[0], SAME[0]],
        # There was progress in between.
        [SAME[0], Failure("b", 6, "ValueError: no")],
        # A machine may have been lost.
        [SAME[0], Failure("b", 4, "ConnectionError: lost")],
    ],
)
def test_anything_else_is_worth_another_try(failures: list[Failure]) -> None:
    assert first_of(failures, 4) is None


def test_failures_are_kept_between_attempts_until_a_person_starts_the_run_again(tmp_path: Path) -> None:
    check(known(tmp_path, "now"), 4, tmp_path)
    for failure in SAME:
        record(tmp_path, replace(failure, start="now"))
    found = known(tmp_path, "now")
    check(found, 5, tmp_path)
    with pytest.raises(TrainingError, match="2 times from step 4; the first error, of rank 0: ValueError: no"):
        check(found, 4, tmp_path)
    # Of an earlier command, on a machine that the driver does not reach.
    assert known(tmp_path, "later") == []
    forget(tmp_path)
    assert known(tmp_path, "now") == []


def test_a_full_disk_does_not_hide_a_failure(tmp_path: Path) -> None:
    with files_of_at_most(10):
        record(tmp_path, replace(SAME[0], start="now"))
    # Half a line is there, and read by nobody.
    assert (tmp_path / "failures.jsonl").stat().st_size == 10
    assert known(tmp_path, "now") == []


def test_the_rank_that_failed_is_told_and_not_one_that_heard_of_it(tmp_path: Path) -> None:
    ranks = {0: RuntimeError("OtherRankFailed: rank 1 failed: OSError: x"), 1: RuntimeError("OSError: x")}
    error: Any = SimpleNamespace(worker_failures=ranks)
    assert explain(error, tmp_path).message == "the workers failed: OSError: x"


def test_failures_that_lie_on_several_machines_count_together_and_once(tmp_path: Path) -> None:
    later = Failure("b", 4, "KeyError: x", rank=1, host="h2", start="now", time=20.0)
    first = Failure("a", 4, "ValueError: no", host="h1", start="now", time=10.0, printed="loading\nstep 4")
    with pytest.raises(TrainingError, match="of rank 0 on h1: ValueError: no") as caught:
        check([later, first], 4, tmp_path)
    assert caught.value.problems == ("last output of rank 0:", "loading", "step 4")
    # Negative control: on a shared disk every rank reads the same one.
    check([first, replace(first), first], 4, tmp_path)


# As Ray 2.60 writes them, shortened.
NO_MEMORY = """2 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 192.0.2.2, ID: eef1f) was 22.20GB used / 23.54GB limit (0.943076)
OOM kill reason: Memory usage 3403661312B exceeded threshold of 758295040B
Selected to kill: (Task: job ID=01000000, task name=g, pid=30741, actual memory used=0.15GB)
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
25184\t16.77\tpython -m other
28010\t0.36\tpython -m tests.mutants map
30741\t0.15\tray::g
30742\t0.14\tray::h
Refer to the documentation on how to address the out of memory issue: https://docs.example.org"""
ENDED = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: 0f7e
\tpid: 4711
\tnamespace: b5
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: (1) ..."""
NODE = ENDED.rpartition("\n")[0] + "\nThe actor died because its node has died. Node Id: 17."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            NO_MEMORY,
            "node 192.0.2.2 ran out of memory (22.20 of 23.54 GB used), and Ray killed processes of the run; the "
            "largest are python -m other (pid 25184, 16.77 GB), python -m tests.mutants map (pid 28010, 0.36 GB), "
            "ray::g (pid 30741, 0.15 GB)",
        ),
        (ENDED, "a worker's process (pid 4711 on 192.0.2.2) ended without an error message"),
        (NODE, "a machine of the cluster was lost"),
    ],
)
def test_a_process_that_ray_lost_is_told_in_one_sentence(text: str, message: str) -> None:
    found = lost_process(text)
    assert found is not None
    assert found[0].startswith(message)
    assert "the same command continues" in found[1]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (NO_MEMORY.replace("22.20GB used", "22.80GB used"), (22.80 - 0.95 * 23.54) * 2**30),
        # Others may have freed memory since.
        (NO_MEMORY, 1),
        (NODE, 0),
    ],
)
def test_what_a_node_lacks_is_what_was_used_above_the_share_at_which_ray_kills(text: str, missing: float) -> None:
    lost = lost_process(text)
    assert lost is not None
    assert bytes_missing(lost[0]) == pytest.approx(missing, abs=1)
    # An exception is no lost process, and named by its last line.
    text = "Traceback (most recent call last):\n  File x\n\nValueError: no\n"
    assert (lost_process(text), last_line(text), last_line("")) == (None, "ValueError: no", "")


@pytest.mark.parametrize(
    "content", [b"\xff\n", b"[]\n", b"null\n", b'{"attempt": 1}\n', b'{"attempt": "a", "from_step"', None]
)
def test_a_damaged_file_costs_no_attempt(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "failures.jsonl"
    file.mkdir() if content is None else file.write_bytes(content)
    assert known(tmp_path, "") == []
    if content is not None:
        for attempt in "ab":
            record(tmp_path, Failure(attempt, 3, "ValueError: x"))
        if content.endswith(b"\n"):
            with pytest.raises(TrainingError, match="2 times"):
                check(known(tmp_path, ""), 3, tmp_path)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


GPU = OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free."
)
CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")


@pytest.mark.parametrize(
    ("error", "told", "missing"),
    [
        (GPU, "rank 3 ran out of memory after step 7: it asked for 2.50 GiB more, and 512.00 MiB were free", 2 * 2**30),
        (CPU, "rank 3 ran out of memory after step 7: it asked for 4096 bytes more", 4096),
        (RuntimeError("Tried to allocate 2 GiB of luck"), None, 0),
        (OutOfMemoryError("no"), None, 0),
    ],
)
def test_memory_that_is_lacking_is_told_with_how_much_was_asked_for(
    error: Exception, told: str | None, missing: int
) -> None:
    memory = out_of_memory(error, "rank 3", 7)
    assert (None if memory is None else memory.message) == told
    assert bytes_missing(told or "") == missing


def test_before_the_first_step_only_storage_without_an_answer_is_tried_again() -> None:
    # As one rank tells the others.
    def again(step: int) -> list[type[FinrayError]]:
        return [kind for kind in ALL if not is_final(from_dict(kind("message").to_dict()), step)]

    assert again(LOADING) == [DataUnavailable, StorageError]
    assert again(0) == again(7) == [ConfigError, DataError, DataUnavailable, ModelError, StorageError]


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        (ValueError("dropout probability has to be between 0 and 1, but got 2.0"), True),
        (TypeError("unsupported"), True),
        (KeyError("labels"), True),
        # Of devices, of the system, of networks (also where a library derives from Python's errors), of other ranks.
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (OSError("Input/output error"), False),
        (json.JSONDecodeError("no JSON", "", 0), False),
        (ValueError("Connection reset by peer"), False),
    ],
)
def test_a_first_step_that_fails_in_code_is_not_tried_again(error: Exception, repeats: bool, tmp_path: Path) -> None:
    failure = Failure("a", 4, describe(error), rank=1, traceback="line 3")
    found = of_first_step(error, failure, tmp_path)
    assert (found is not None) is repeats
    if found is not None:
        assert "the first step after step 4 failed on rank 1" in found.message
        assert found.problems == ("line 3",)
