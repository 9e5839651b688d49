"""How many examples Hypothesis tries: few in the gate, many at night."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """A quarter of ``count`` in the gate, but at least 10; four times as many with ``FINRAY_TEST_NIGHTLY=1``."""
    if os.environ.get("FINRAY_TEST_NIGHTLY") == "1":
        return 4 * count
    return max(count // 4, min(count, 10))
