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
