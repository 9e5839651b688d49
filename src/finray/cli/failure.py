"""The one place where an error of a command becomes a message: an error that the user can fix, or a bug in finray."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from finray import __version__
from finray.config.redact import redact_error, redact_text
from finray.errors import FinrayError, explained


def report(error: Exception, errors: Console) -> int:
    """Print the error of a command; returns the exit code.

    What the user can act on is one message. Anything else is a defect in finray: its traceback goes to a file, under a
    short reference that is the same wherever the same happens. ``FINRAY_VERBOSE`` shows the traceback of either.
    """
    explanation = explained(error)
    text = redact_error(error)
    if os.environ.get("FINRAY_VERBOSE") and not isinstance(error, FinrayError):
        errors.print(text, highlight=False, soft_wrap=True)
    if explanation is None:
        places = [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        reference = hashlib.sha256(" ".join([type(error).__name__, *places]).encode()).hexdigest()[:8]
        explanation = FinrayError(
            f"this is a bug in finray (reference {reference}): {type(error).__name__}: {redact_text(str(error))[:300]}",
            repair=f"please report it with {_kept(reference, text)}; FINRAY_VERBOSE=1 prints its content here",
        )
        explanation.exit_code = 1
    # Where nothing can be printed, the exit code still says what happened.
    with suppress(OSError, ValueError):
        errors.print(f"error: {explanation}", highlight=False, soft_wrap=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # Python would try again at its end, and exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return explanation.exit_code


def _kept(reference: str, text: str) -> str:
    """Where the traceback was written."""
    content = f"finray {__version__}, Python {sys.version}\n{redact_text(' '.join(sys.argv))}\n\n{text}"
    # As `Path.expanduser`, but without an error where there is no home.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    for folder in (cache / "finray" / "defects", Path(tempfile.gettempdir())):
        path = folder / f"finray-{reference}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8", errors="backslashreplace")
        except OSError:
            continue
        return str(path)
    return "the traceback"
