"""Fixtures of the tests on several hosts: `make test-hosts`. :mod:`tests.support.hosts` says what a host is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import hosts, s3


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skip where this machine cannot have hosts; in CI that is a failure."""
    if (why := hosts.missing()) is not None:
        assert os.environ.get("CI") != "true", f"CI must run these tests: {why}"
        pytest.skip(why)


@pytest.fixture(scope="module")
def bed(can_have_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Bed]:
    """A switch, on which hosts are put by `bed.host()`; for all tests of a file."""
    with hosts.bed(tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture(scope="module")
def hosts_s3(bed: hosts.Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    """An S3 server that all hosts of the file reach, under the variables that they have then."""
    with hosts.s3_for(bed, tmp_path_factory.mktemp("s3") / "requests.log") as server:
        yield server
