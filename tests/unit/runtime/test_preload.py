"""What a training worker imports before it is told what to do."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from finray.config.load import build_config
from finray.runtime.preload import needed

SCRIPT = """
import gc, sys
from transformers.utils import import_utils
from finray.runtime.preload import import_all
read, fetch = [], import_utils.fetch__all__
import_utils.fetch__all__ = lambda content: (read.append(1), fetch(content))[1]
{first}
import_all(["peft", "no.such.module", "colorsys"])
from peft.import_utils import is_bnb_available
print(["bitsandbytes" in sys.modules, "colorsys" in sys.modules, gc.isenabled(), is_bnb_available(),
       gc.get_freeze_count() > 100_000, len(read) > 1_000])
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "has_bitsandbytes"), [("", False), ("import peft", True)])
def test_peft_is_imported_without_bitsandbytes_and_finds_it_afterwards(first: str, has_bitsandbytes: bool) -> None:
    """It takes as long as the rest of PEFT, which by itself does import it. A module that is missing is left to whoever
    needs it, and garbage is collected again. Transformers does not read the files of its models a second time."""
    script = SCRIPT.format(first=first)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.splitlines()[-1] == str([has_bitsandbytes, True, True, True, True, has_bitsandbytes])


@pytest.mark.parametrize(
    ("task", "method", "expected"),
    [
        ("causal_lm", "lora", ["finray.tasks.causal_lm", "peft", "transformers.models.llama.modeling_llama"]),
        ("sequence_classification", "none", ["finray.tasks.sequence_classification"]),
    ],
)
def test_what_a_worker_needs_follows_from_the_config(
    task: str, method: str, expected: list[str], tmp_path: Path
) -> None:
    if method == "lora":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    config = build_config(
        {
            "model": {"name": str(tmp_path), "task": task},
            "adapter": {"method": method},
            "data": {"source": "rows.jsonl"},
        },
        source="test",
    )
    found = needed(config)
    assert found == ["ray.train.torch", "finray.training.assemble", *expected]
    for name in found[1:]:
        importlib.import_module(name)
