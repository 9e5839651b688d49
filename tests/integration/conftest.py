"""A browser for the tests that open pages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Skips where this machine has none; in CI that is a failure."""
    try:
        with chromium() as running:
            yield running
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
