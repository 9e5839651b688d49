"""A first run: a file of 100 rows and a model, and nothing else that would have been chosen."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.support import runs

pytestmark = pytest.mark.nightly

COLOURS = ("red", "green", "blue", "black", "white", "grey", "brown", "pink", "gold", "silver")
THINGS = ("door", "boat", "coat", "cart", "bowl", "lamp", "roof", "gate", "sail", "wall")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Sentences of one form, each once, which no model would expect and any model can learn."""
    path = tmp_path / "hundred.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([f"{thing} / {colour} / paint it {colour}"] for thing in THINGS for colour in COLOURS)
    return path


def test_a_hundred_rows_and_the_defaults_make_a_model_that_beats_its_base(
    table: Path, smollm2_dir: Path, tmp_path: Path, ray_cluster: str
) -> None:
    output = tmp_path / "runs"
    # The rows that are held out, and the place, are the only other settings.
    given = [f"model.name={smollm2_dir}", f"data.source={table}", "data.eval_ratio=0.1", f"run.output_dir={output}"]
    config = tmp_path / "finray.yaml"
    config.write_text("{}\n")
    code, out, err = runs.finray("train", str(config), *given)
    assert code == 0, out + err
    # Full packs would be one.
    chosen = re.search(r"finray chose train.global_batch_size=1, with packs of (\d+) tokens, and train.epochs=3", out)
    assert chosen is not None
    assert 20 < int(chosen[1]) < 100
    (steps,) = map(int, re.findall(r"(\d+) steps, 3 epochs", out))
    assert 48 <= steps <= 60
    base, *_, tuned = runs.records(output / "run", "eval")
    assert (base["step"], tuned["step"]) == (0, steps)
    assert tuned["eval_loss"] < base["eval_loss"] - 1.0
    assert f"step 0/{steps}  eval loss {base['eval_loss']:.4f}" in out
