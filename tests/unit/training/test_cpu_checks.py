"""What a worker without a GPU refuses."""

from __future__ import annotations

from typing import Any

import pytest

from finray.training.cpu_checks import refusals_on_cpu
from tests.support.runs import config_of

PLAIN: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"train": {"activation_offload": True}}, "train.activation_offload"),
        ({"parallel": {"strategy": "fsdp", "cpu_offload": True}}, "parallel.cpu_offload"),
        ({"train": {"compile": True}}, "train.compile"),
    ],
)
def test_what_has_no_use_on_a_cpu_is_refused_by_name(sections: dict[str, Any], where: str) -> None:
    found = refusals_on_cpu(config_of({**PLAIN, **sections}), has_program=lambda name: False)
    assert [error.where for error in found] == [where]
    assert all(error.repair for error in found)


def test_what_has_one_is_not() -> None:
    # DeepSpeed's optimizer on the CPU is a way of its own there, and a compiler makes compiling possible.
    sections = {"train": {"compile": True}, "parallel": {"strategy": "deepspeed", "cpu_offload": True}}
    assert refusals_on_cpu(config_of({**PLAIN, **sections}), has_program=lambda name: name == "clang++") == []
    assert refusals_on_cpu(config_of(PLAIN), has_program=lambda name: False) == []


@pytest.mark.parametrize(
    ("environment", "installed", "is_refused"),
    [
        (None, "g++", False),
        (None, "clang++", False),
        (None, "c++", False),
        (None, "my-compiler", True),
        ("my-compiler", "my-compiler", False),
        ("my-compiler", "g++", False),
        ("my-compiler", "other", True),
    ],
)
def test_any_compiler_that_torch_would_find_makes_compiling_possible(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, installed: str, is_refused: bool
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if environment is not None:
        monkeypatch.setenv("CXX", environment)
    settings = config_of({**PLAIN, "train": {"compile": True}})
    found = refusals_on_cpu(settings, has_program=lambda name: name == installed)
    assert [error.where for error in found] == (["train.compile"] if is_refused else [])
