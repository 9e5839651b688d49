"""Writes down which lines of finray are run: by this process, its threads, and the processes that it starts.

`sys.settrace` and a file that is only appended to: a child that is killed has written all the same, and lines of a
child belong to the test that runs now. A copy of this file named `sitecustomize.py` starts with every interpreter.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

TARGET = "FINRAY_LINES"
_seen: set[tuple[CodeType, int]] = set()
_kept: dict[CodeType, Callable[..., Any] | None] = {}
# Lines of a function that were not seen yet: where there are none, its frames are not traced, which is quicker.
_left: dict[CodeType, int] = {}


def _anew() -> None:
    _seen.clear()
    _left.clear()


def start(file: str) -> Callable[[], None]:
    """Trace from now on; what is returned makes lines that were seen count as new."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def local(frame: FrameType, event: str, value: Any) -> Any:
        key = (frame.f_code, frame.f_lineno)
        if key not in _seen:
            _seen.add(key)
            code = frame.f_code
            if code not in _left:
                _left[code] = len({line for _, _, line in code.co_lines() if line} - {code.co_firstlineno})
            _left[code] -= frame.f_lineno != code.co_firstlineno
            os.write(handle, f"{frame.f_code.co_filename}:{frame.f_lineno}\n".encode())
        return local

    def called(frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        try:
            return None if _left.get(code) == 0 else _kept[code]
        except KeyError:
            _kept[code] = local if "/finray/" in code.co_filename else None
            return _kept[code]

    sys.settrace(called)
    threading.settrace(called)
    os.register_at_fork(after_in_child=_anew)
    return _anew


if __name__ == "sitecustomize" and os.environ.get(TARGET):
    start(os.environ[TARGET])
