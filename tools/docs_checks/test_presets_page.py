"""Every preset is accepted by a plan that asks no Hub, on the GPUs that it names first, as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.presets_page import GPUS, page, plan_preset

from finray.config.load import preset_names, read_preset
from finray.planning.result import Plan


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    folder = tmp_path_factory.mktemp("plans")
    return {name: plan_preset(name, output_dir=folder) for name in preset_names()}


def test_the_page_is_what_the_plans_say(plans: dict[str, Plan]) -> None:
    path = Path(__file__).parents[2] / "docs" / "guide" / "presets.md"
    assert path.read_text(encoding="utf-8") == page(plans), (
        "HF_HUB_OFFLINE=1 python -m tools.presets_page > docs/guide/presets.md"
    )


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_accepted_offline(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    assert plan.problems == ()
    assert plan.starts is None
    assert plan.memory is not None
    assert plan.memory.fits
    assert {one.where for one in plan.unchecked} >= {f"model.name={read_preset(name)['model']['name']}"}
    assert any("bundled with finray" in one.message for one in plan.warnings)


def test_a_preset_is_refused_for_a_gpu_that_is_too_small() -> None:
    """Negative control of the memory that is accepted."""
    plan = plan_preset("llama3-70b-fsdp", output_dir=Path("runs"), gpu="t4-16gb")
    assert plan.problems
    assert GPUS["llama3-70b-fsdp"] == "h100-80gb"
