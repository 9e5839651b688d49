"""An evaluation stands back where training wants the CPU that it is on."""

from __future__ import annotations

import os

from finray.runtime.evaluator import step_back


def test_a_process_that_evaluates_stands_back_once() -> None:
    before = os.nice(0)
    child = os.fork()
    if not child:
        step_back()
        step_back()
        os._exit(os.nice(0) - before)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == min(5, 19 - before)
    assert os.nice(0) == before, "and not its parent"
