"""What only rank 0 does, and what it says of all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.group import run_group
from tests.support.runs import Plain


class Seen:
    """A tracker that leaves a file with the name of the rank that started it."""

    def start(self, run: Any) -> None:
        (run.run_dir / f"tracker-of-{os.environ['RANK']}").touch()

    def log(self, record: Any) -> None: ...

    def finish(self) -> None: ...


def test_rank_0_alone_has_trackers_and_the_header_names_every_rank(
    tmp_path: Path, tiny_run: Callable[..., Plain]
) -> None:
    plain = tiny_run({"tracking.trackers": [f"{__name__}:Seen"], "train.max_steps": 2}, rows=12)
    run_group(plain, tmp_path / "run", world_size=2)
    assert [one.name for one in (tmp_path / "run").glob("tracker-of-*")] == ["tracker-of-0"]
    (start,) = (json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines())
    ranks = [one.partition(" on ")[0] for one in start["header"]["workers"]]
    assert ranks == [f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 NODE_RANK=0" for rank in range(2)]
