"""Tells a bug from bad luck: a run that fails twice from the same step is not restarted.

Ray restarts workers that die, which is right for a lost machine and useless for a bug in a model or in the code. The
file is in the run directory, because workers on any machine write it; without a shared disk each machine has its own,
and the ranks exchange them. Only failures of the same ``finray train`` count, and no storage that did not answer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finray.checkpoint.copies import FAILURES
from finray.config.redact import redact_error, redact_text
from finray.config.resolved import Resolved
from finray.config.schema import Config
from finray.errors import CheckpointError, DataUnavailable, FinrayError, StorageError, TrainingError
from finray.files import Appending, loads, opened, typed
from finray.runtime.logs import tail

if TYPE_CHECKING:
    from finray.planning.placement import Placement

TRIES = 2
# Directory of the workers' logs, in the run directory.
LOGS = "logs"
_TRACEBACK_LINES = 6
# Stands for the step in failures before it was known.
LOADING = -1


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended an attempt: the step it had resumed from, the error's type and first line, the rank and
    its machine, and the end of the traceback."""

    attempt: str
    from_step: int
    error: str
    rank: int = 0
    host: str = ""
    traceback: str = ""
    start: str = ""  # identifies the ``finray train`` that the attempt belongs to
    time: float = 0.0  # seconds since the epoch
    printed: str = ""  # the last lines of the rank's log


def log_name(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank-{rank:05d}.log"


def describe(error: BaseException) -> str:
    """Type and first line of an exception, with secrets masked."""
    lines = redact_text(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_NO_MEMORY = re.compile(r"(?:Memory on|on) the node \(IP: ([^,)]+).*?was ([\d.]+)GB(?: used)? / ([\d.]+)GB")
_LARGEST = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_ENDED = re.compile(r"\n\tpid: (\d+).*?\n\tip: (\S+)", re.DOTALL)


def lost_process(text: str) -> tuple[str, str] | None:
    """What happened to a process that Ray lost, and the repair; None if Ray's message is about something else.

    Ray's messages (2.60) are long, and end with advice on Ray.
    """
    again = "the same command continues from the last checkpoint"
    if "low on memory" in text:
        where = _NO_MEMORY.search(text)
        used = "out of memory"
        if where is not None:
            used = f"node {where[1]} ran out of memory ({where[2]} of {where[3]} GB used)"
        matches = _LARGEST.findall(text)[:3]
        largest = [f"{command[:60].strip()} (pid {pid}, {size} GB)" for pid, size, command in matches]
        most = f"; the largest are {', '.join(largest)}" if largest else ""
        repair = f"stop other programs that use memory there, or check with `finray plan` what the run needs; {again}"
        return f"{used}, and Ray killed processes of the run{most}", repair
    if "node has died" in text or "node was terminated" in text:
        return "a machine of the cluster was lost", f"check that it is back, or that other machines have room; {again}"
    if "worker process has died" in text or "worker died unexpectedly" in text:
        who = _ENDED.search(text)
        which = f" (pid {who[1]} on {who[2]})" if who else ""
        return (
            f"a worker's process{which} ended without an error message: it was killed (by the kernel for lack of "
            f"memory, or by a user), or a library crashed",
            f"check the kernel log (`dmesg`) of that machine; {again}",
        )
    return None


class WouldRepeat(TrainingError):
    """A worker failed in a way in which the next attempt would fail, too."""


class OutOfMemory(WouldRepeat):
    """A worker asked for more memory than there is; a retry with the same settings would hit it again."""


# Python's errors for code that is wrong, or for values that it does not take. Other machines and other times do not
# change them, unlike errors of the system, of networks and of devices.
_OF_CODE = (ValueError, TypeError, KeyError, AttributeError, NameError, NotImplementedError, AssertionError)


def of_first_step(error: BaseException, failure: Failure, run_dir: Path) -> WouldRepeat | None:
    """The error for a first step of an attempt that failed in the model's code, or in the user's: the same step would
    fail again. None for any other error, and for those that other libraries derive from these."""
    if type(error) not in _OF_CODE or _COLLATERAL.search(failure.error):
        return None
    return WouldRepeat(
        f"the first step after step {failure.from_step} failed on rank {failure.rank}: {failure.error}",
        where=str(run_dir),
        repair="fix the cause (a setting, a value in the model's `config.json`, or code of your own), then run the "
        "same command again",
        problems=tuple(failure.traceback.splitlines()),
    )


_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(GiB|MiB|KiB|bytes)")
_FREE = re.compile(r"of which ([\d.]+) (GiB|MiB|KiB|bytes) is free")
# Ray's RAY_memory_usage_threshold.
_NODE_FULL = 0.95
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def out_of_memory(error: BaseException, who: str, step: int) -> OutOfMemory | None:
    """Converts an error of torch's allocators: who asked for how much. None for any other error."""
    text = str(error)
    requested = _REQUESTED.search(text)
    if requested is None or not (type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text):
        return None
    free = _FREE.search(text)
    has = f", and {free[1]} {free[2]} were free" if free else ""
    return OutOfMemory(
        f"{who} ran out of memory after step {step}: it asked for {requested[1]} {requested[2]} more{has}",
        repair="`finray plan` shows what needs it",
    )


def bytes_missing(message: str) -> int:
    """How many bytes were missing, parsed from a message of :func:`out_of_memory`, or of :func:`lost_process` about a
    node without memory; 0 for any other message."""
    if asked := re.search(r"asked for ([\d.]+) (\w+) more(?:, and ([\d.]+) (\w+) were free)?", message):
        free = float(asked[3]) * _UNITS[asked[4]] if asked[3] else 0.0
        return max(1, round(float(asked[1]) * _UNITS[asked[2]] - free))
    if node := re.search(r"ran out of memory \(([\d.]+) of ([\d.]+) GB used\), and Ray killed", message):
        # Ray kills before a node is full. It writes GB and means GiB.
        used, limit = (float(size) * 2**30 for size in node.groups())
        return max(1, round(used - _NODE_FULL * limit))
    return 0


def end_of(error: BaseException) -> str:
    """The end of an exception's traceback, in lines."""
    text = redact_error(error)
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])


def last_line(text: str) -> str:
    """The last line of an error's text, which names the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def record(run_dir: Path, failure: Failure) -> None:
    """Record a failure of any rank, if that can be written: a full disk must not hide the failure itself."""
    file = Appending(run_dir / FAILURES)
    with contextlib.suppress(OSError):
        file.append(json.dumps(asdict(failure)).encode() + b"\n")
    file.close()


def forget(run_dir: Path) -> None:
    """Reset the count: the user has started the run again."""
    (run_dir / FAILURES).unlink(missing_ok=True)


# What the other ranks report when one is gone: not a cause.
_COLLATERAL = re.compile(
    r"connection (closed|reset|refused)|ConnectionError|broken pipe|gloo|nccl|socket", re.IGNORECASE
)


def first_of(failures: list[Failure], from_step: int) -> Failure | None:
    """The first error, if ``TRIES`` different attempts ended at this very step; else None.

    Attempts that only lost a killed rank do not count, unless they end in the same way.
    """
    here = [failure for failure in failures if failure.from_step == from_step]
    causes = [failure for failure in here if not _COLLATERAL.search(failure.error)]
    if len({failure.attempt for failure in causes}) >= TRIES:
        return causes[0]
    for failure in here:
        if len({other.attempt for other in here if other.error == failure.error}) >= TRIES:
            return failure
    return None


def is_final(error: FinrayError, from_step: int) -> bool:
    """Whether another attempt would fail in the same way: before the first step all but storage that does not answer,
    after it what training itself refuses."""
    if isinstance(error, StorageError | DataUnavailable):
        return False
    return from_step == LOADING or isinstance(error, TrainingError | CheckpointError)


def known(run_dir: Path, start: str) -> list[Failure]:
    """The failures of a ``finray train`` in this machine's run directory."""
    content = b""
    # Ignore a broken file: it saves attempts, and must not cost any.
    with contextlib.suppress(OSError), opened(run_dir / FAILURES, run_dir) as stream:
        content = stream.read()
    failures = []
    for line in content.splitlines():
        # A killed worker may have left half a line.
        with contextlib.suppress(ValueError):
            failures.append(typed(loads(line), Failure))
    return [failure for failure in failures if failure.start == start]


def check(failures: Iterable[Failure], from_step: int, run_dir: Path) -> None:
    """Refuse an attempt that would only fail like those before it.

    Args:
        failures: of this ``finray train``, from all machines, possibly with duplicates.
        from_step: step from which the attempt continues.
        run_dir: the run directory.

    Raises:
        TrainingError: quotes the error of the earlier attempts.
    """
    first = first_of(sorted(dict.fromkeys(failures), key=lambda failure: failure.time), from_step)
    if first is not None:
        since = f"from step {from_step}" if from_step != LOADING else "before the first step"
        printed = first.printed.splitlines()
        raise TrainingError(
            f"the workers failed {TRIES} times {since}; the first error, of rank {first.rank}"
            f"{' on ' + first.host if first.host else ''}: {first.error}",
            where=str(run_dir),
            repair=f"{LOGS}/{log_name(first.rank)} in the run directory has its output; fix the cause, then run "
            "the same command again",
            problems=(
                *first.traceback.splitlines(),
                *([f"last output of rank {first.rank}:", *printed] if printed else ()),
            ),
        )


# --- the error that the driver raises --------------------------------------------------------------------------------


def explain(error: Exception, run_dir: Path) -> FinrayError:
    """The cause of a failed run: finray's own error if there is one, else the first worker's."""
    by_rank = dict(getattr(error, "worker_failures", {})) or {0: error}
    # Those that only report that another rank has failed come last.
    worker_failures = sorted(by_rank.values(), key=lambda error: "OtherRankFailed" in str(error))
    for failure in worker_failures:
        for cause in (failure, getattr(failure, "_original_exception", None), failure.__cause__):
            if isinstance(cause, FinrayError):
                return cause
    for rank, failure in by_rank.items():
        # The other ranks only report that one is gone.
        if (lost := lost_process(str(failure))) is not None:
            last = tuple(tail(run_dir / LOGS / log_name(rank)))
            output = (f"last output of rank {rank}:", *last) if last else ()
            return TrainingError(lost[0], where=str(run_dir), repair=lost[1], problems=output)
    return TrainingError(
        f"the workers failed: {last_line(str(worker_failures[0])) or type(worker_failures[0]).__name__}",
        where=str(run_dir),
        repair="FINRAY_VERBOSE=1 shows the workers' output; the same command continues from the last checkpoint",
    )


def with_relief(reason: FinrayError, config: Config, resolved: Resolved, placement: Placement) -> FinrayError:
    """An error for lack of memory with the smallest change that would free as much as was missing; any other error as
    it is."""
    from finray.planning.memory import relief
    from finray.planning.placement import device_of

    # What a machine of the cluster lacks is what workers have asked for only where they compute on its CPUs.
    asked = isinstance(reason, OutOfMemory) or not placement.use_gpu
    missing = bytes_missing(reason.message)
    changes: tuple[str, ...] = ()
    if asked and missing:
        with contextlib.suppress(Exception):
            changes = relief(config, resolved, device_of(placement), workers=placement.num_workers, less=missing)
    if not changes:
        return reason
    smaller = f"the smallest change that should make it fit: {' '.join(changes)}; `finray plan` shows what needs memory"
    if isinstance(reason, OutOfMemory):
        return OutOfMemory(reason.message, where=changes[0].partition("=")[0], repair=smaller)
    return TrainingError(
        reason.message, where=reason.where, repair=f"{reason.repair}; {smaller}", problems=reason.problems
    )
