"""An objective from outside with a column that a pass over the data computes: by any number of workers, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.data.dataset import columns
from finray.errors import DataError
from finray.training import passes
from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain, changed

LEASHED = {"train.objective": "tests.support.leashed:Leashed"}
FULL = {"adapter.method": "none", "train.learning_rate": 0.002}
IN_STEP = {"preference.reference_in_step": True}
HELD_OUT = {"data.eval_ratio": 0.2, "evaluation.every_steps": 4}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_run: Callable[..., Plain]) -> Path:
    """Each run with prepared data of its own, so that each makes the column."""
    folder = tmp_path_factory.mktemp("runs")
    plain = tiny_run({**HELD_OUT, "adapter.dropout": 0.1})
    kinds: dict[str, dict[str, Any]] = {"sft": {}, "loose": {"train.objective": "tests.support.leashed:Loose"}}
    kinds |= {"lora": LEASHED, "full": {**LEASHED, **FULL}}
    kinds |= {f"lora-{name}": {**LEASHED, "parallel.strategy": name} for name in ("ddp", "fsdp")}
    kinds |= {"full-fsdp": {**LEASHED, **FULL, "parallel.strategy": "fsdp"}}
    # The head is gathered for its logits, and again for their gradients.
    kinds |= {"full-zero3": {**LEASHED, **FULL, "parallel": {"strategy": "deepspeed", "zero_stage": 3}}}
    # The reference in the step: without the adapter, with a frozen copy of the one that was continued, a second model.
    continued = {"adapter": {"start_from": str(folder / "lora" / "checkpoint-000008"), "dropout": 0.0}}
    kinds |= {"continued": {**LEASHED, **continued}, "continued-fsdp-step": {**LEASHED, **continued, **IN_STEP}}
    kinds |= {f"{name}-step": {**kinds[name], **IN_STEP} for name in ("lora-fsdp", "full-fsdp", "full-zero3")}
    # One by name is loaded before the model, and sharded like it.
    named = {"preference.reference": plain["model"]["name"]}
    kinds |= {"full-zero3-named": {**kinds["full-zero3"], **named}}
    made = {
        name: changed(plain, changes, {"prepare.dir": str(folder / f"data-{name}")}) for name, changes in kinds.items()
    }
    for name in ("sft", "loose", "lora", "full", "continued"):
        runs.run_alone(made[name], folder / name)
    run_all([(made[name], folder / name) for name in kinds if "-" in name], world_size=2)
    return folder


TWO = ["lora-ddp", "lora-fsdp", "full-fsdp", "full-zero3", "lora-fsdp-step", "full-fsdp-step", "full-zero3-step"]


@pytest.mark.parametrize("name", [*TWO, "continued-fsdp-step", "full-zero3-named"])
def test_two_workers_make_the_column_and_the_curve_of_one(done: Path, name: str) -> None:
    one = name.split("-")[0]
    runs.assert_same_curve(done / name, done / one)
    drift = runs.values(done / one, "drift")
    assert drift[0] < 1e-5 < 1e-3 < drift[-1]
    assert runs.values(done / name, "drift")[1:] == pytest.approx(drift[1:], rel=1e-3)
    (record,) = [record for record in runs.records(done / name, "eval") if record["step"] == 8]
    assert record["drift"] == pytest.approx(runs.records(done / one, "eval")[-1]["drift"], rel=1e-3)


def test_without_its_leash_it_is_sft_and_with_it_something_else(done: Path) -> None:
    losses = {name: runs.values(done / name, "loss") for name in ("sft", "loose", "lora")}
    # Two workers share the packs of its only file of a split, and compute what one does: names have the digests.
    places = (done / f"data-{name}" for name in ("lora", "lora-ddp"))
    one, two = ([file.relative_to(place) for file in sorted(place.rglob("columns/*/part-*"))] for place in places)
    assert len(one) == 1
    assert one == two
    assert losses["loose"] == pytest.approx(losses["sft"], rel=1e-5)
    assert losses["lora"][0] == pytest.approx(losses["sft"][0], rel=1e-5)
    assert losses["lora"][-1] != pytest.approx(losses["sft"][-1], rel=1e-3)


def test_a_killed_pass_continues_and_what_is_there_is_checked_and_used_again(
    tmp_path: Path, tiny_run: Callable[..., Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "ROWS", 8)
    plain = tiny_run({**LEASHED, **HELD_OUT, "prepare.dir": str(tmp_path / "data")})
    compute, written = passes._compute, list[int]()

    def dying(column: str, files: Any, parts: list[int], *others: Any) -> None:
        written.extend(parts)
        if len(written) == 3:
            raise OSError("killed")
        compute(column, files, parts, *others)

    with monkeypatch.context() as patch:
        patch.setattr(passes, "_compute", dying)
        with pytest.raises(OSError, match="killed"):
            runs.assemble_alone(plain, tmp_path / "a")
        files = {
            file: file.stat().st_mtime_ns
            for file in (tmp_path / "data").rglob("part-*.arrow")
            if "columns" in str(file)
        }
        assert len(files) == 2
        runs.run_alone(plain, tmp_path / "a")
        assert written == [0, 1, 2, 2, 3]
        # Another run from the same model computes nothing, nor does one with other rows held out.
        runs.run_alone(changed(plain, {"data.eval_ratio": 0.3, "adapter.rank": 2}), tmp_path / "b")
        assert written == [0, 1, 2, 2, 3]
    assert files == {file: file.stat().st_mtime_ns for file in files}
    # PiSSA's first values round otherwise, so its base is another.
    runs.run_alone(changed(plain, {"adapter.method": "pissa"}), tmp_path / "c")
    folders = {file.parent for file in (tmp_path / "data").rglob("made_by.json")}
    assert len(folders) == 2
    runs.flip(next(iter(files)))
    with pytest.raises(DataError, match="was changed after it was written"):
        runs.assemble_alone(plain, tmp_path / "d")
