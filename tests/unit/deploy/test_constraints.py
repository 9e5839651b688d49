"""The versions in constraints.txt fit together: pip must not search for others, which can take hours."""

from __future__ import annotations

import tomllib
from importlib.metadata import distributions

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.documents import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = {
    canonicalize_name(one.name): one
    for one in map(Requirement, (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
}
INSTALLED = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}


def test_every_pinned_version_runs_on_the_oldest_python() -> None:
    """pip knows no such version on an older Python, and tries all of what depends on it before it says so."""
    oldest = PYPROJECT["requires-python"].removeprefix(">=") + ".0"
    found = {name: INSTALLED[name].metadata["Requires-Python"] for name in PINNED if name in INSTALLED}
    assert len(found) > 100
    assert [name for name, own in found.items() if own and oldest not in SpecifierSet(own)] == []


@pytest.mark.parametrize("part", ["dependencies", *PYPROJECT["optional-dependencies"]])
def test_every_pinned_version_is_one_that_finray_asks_for(part: str) -> None:
    asked = PYPROJECT["dependencies"] if part == "dependencies" else PYPROJECT["optional-dependencies"][part]
    for one in map(Requirement, asked):
        pinned = PINNED.get(canonicalize_name(one.name))
        for version in [] if pinned is None else pinned.specifier:
            assert version.version in one.specifier, one.name
