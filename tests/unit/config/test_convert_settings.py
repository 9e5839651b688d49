"""`finray convert`: settings whose meaning depends on others, and what is lost of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.config.test_convert import AXOLOTL, LLAMA_FACTORY, converted, fields

SMALL = {"base_model": "m", "datasets": [{"path": "org/rows", "type": "alpaca"}]}


def lost(text: str, folder: Path, **options: Any) -> dict[str, str]:
    """The reasons, by key."""
    return {one.key.partition(":")[0]: one.why for one in converted(text, folder, **options).lost}


def test_a_secret_is_not_copied_into_the_config(tmp_path: Path) -> None:
    keys = ("hub_token", "hf_hub_token", "wandb_api_key", "swanlab_api_key")
    plain = SMALL | dict.fromkeys(keys, "s3cr3t")
    plain |= {"ray_init_kwargs": {"env": {"HF_TOKEN": "s3cr3t"}}, "debug": "hf_abcdefghijklmnop1234"}
    found = converted(yaml.safe_dump(plain), tmp_path)
    assert {"***" in one.key for one in found.lost if one.key.startswith((*keys, "ray_", "debug"))} == {True}
    assert "s3cr3t" not in found.text("theirs.yaml")
    assert "hf_abc" not in found.text("theirs.yaml")


@pytest.mark.parametrize(
    ("text", "changes", "pushes", "listed"),
    [
        (LLAMA_FACTORY, {"hub_model_id": "me/x"}, False, {"hub_model_id"}),
        (LLAMA_FACTORY, {"hub_model_id": "me/x", "push_to_hub": False}, False, {"hub_model_id"}),
        (LLAMA_FACTORY, {"hub_model_id": "me/x", "push_to_hub": True}, True, set()),
        (LLAMA_FACTORY, {"push_to_hub": True}, False, {"push_to_hub"}),
        (LLAMA_FACTORY, {"push_to_hub": False}, False, set()),
        # For Axolotl the name is enough.
        (AXOLOTL, {"hub_model_id": "me/x"}, True, set()),
    ],
)
def test_a_run_that_does_not_push_there_does_not_push_here(
    text: str, changes: dict[str, Any], pushes: bool, listed: set[str], tmp_path: Path
) -> None:
    text = yaml.safe_dump(yaml.safe_load(text) | changes)
    assert fields(text, tmp_path).get("export.push_to_hub") == ("me/x" if pushes else None)
    assert lost(text, tmp_path).keys() & {"hub_model_id", "push_to_hub"} == listed
