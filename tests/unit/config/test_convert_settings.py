"""`finray convert`: settings whose meaning depends on others, and what is lost of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.unit.config.test_convert import converted

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
