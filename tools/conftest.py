"""The tests of tools see nothing of the user's either."""

from __future__ import annotations

import os

from tests.support import stranger

HOME = stranger.settle(os.environ)


def pytest_unconfigure() -> None:
    """Remove what the session made."""
    if HOME is not None:
        stranger.remove(HOME)
