"""The line of a run's header that says what is trained how."""

from __future__ import annotations

from typing import Any

import pytest

from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.training.outputs import method_of

LORA = {"method": "rslora", "rank": 4, "alpha": 3, "target_modules": ["q_proj", "o_proj"]}


@pytest.mark.parametrize(
    ("adapter", "bits", "said"),
    [
        (LORA, 4, "rslora of rank 4, alpha 3, on q_proj, o_proj, base in 4 bits; adafactor, linear from 0.003; fsdp"),
        ({"method": "none"}, None, "all weights; adafactor, linear from 0.003; fsdp"),
    ],
)
def test_the_header_names_adapter_optimizer_rate_and_strategy(adapter: Any, bits: int | None, said: str) -> None:
    train = {"optimizer": "adafactor", "schedule": "linear", "learning_rate": 3e-3}
    config = build_config(
        {"model": {"name": "m"}, "data": {"source": "d"}, "adapter": adapter, "train": train}, source="test"
    )
    resolved = Resolved("bf16", bits, "finray_packed", packs=True, strategy="fsdp", use_gpu=False, learning_rate=3e-3)  # type: ignore[arg-type]
    assert method_of(config, resolved) == said
