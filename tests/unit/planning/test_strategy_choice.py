"""What `parallel.strategy: auto` comes to."""

from __future__ import annotations

import pytest

from finray.planning.strategy_choice import GIB, Needs, choose_strategy

NEEDS = Needs(replicated=40 * GIB, sharded=20 * GIB, checkpointed=10 * GIB)


@pytest.mark.parametrize(
    ("workers", "available", "before", "strategy", "said"),
    [
        (1, 1, None, "ddp", "one worker"),
        (4, 40, None, "ddp", "need about 40.0 GiB"),
        (4, 39, None, "fsdp", "shares need 20.0 GiB"),
        (4, 15, None, "fsdp", "10.0 GiB with train.gradient_checkpointing"),
        (4, 5, None, "fsdp", "too much as well"),
        (4, None, None, "fsdp", "not known"),
        # A run that goes on keeps its strategy while that fits.
        (4, 40, "fsdp", "fsdp", "the run began with it"),
        (4, 40, "ddp", "ddp", "need about 40.0 GiB"),
        (4, 39, "ddp", "fsdp", "would need"),
        (4, None, "ddp", "ddp", "the run began with it"),
        # One that DeepSpeed shared before is chosen anew.
        (4, 40, "deepspeed", "ddp", "need about"),
    ],
)
def test_choices(workers: int, available: int | None, before: str | None, strategy: str, said: str) -> None:
    has = None if available is None else available * GIB
    found = choose_strategy(NEEDS, workers=workers, available=has, before=before)
    assert found.strategy == strategy
    assert said in found.reason
