"""The commands of `make quickstart` give the table that README.md shows: some 5 minutes on 2 cores."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.documents import ROOT

pytestmark = pytest.mark.nightly

README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPE = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nquickstart:")[2].partition("\n\n")[0]
NUMBER = r"([\d.]+)%? \[([\d.]+), ([\d.]+)\]"


def shown(row: str) -> tuple[list[float], list[float]]:
    """A row of README's table: base and tuned, each with its interval."""
    (line,) = re.findall(rf"^│ {row} .*$", README, re.MULTILINE)
    base, tuned = re.findall(NUMBER, line)
    return list(map(float, base)), list(map(float, tuned))


@pytest.mark.timeout(3600)
def test_the_table_of_the_readme_is_what_the_quickstart_gives(
    smollm2_dir: Path, ray_cluster: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "examples" / "quickstart")
    commands = re.findall(r"^\t\$\(BIN\)/finray (.+)$", RECIPE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["train", "evaluate", "report"]
    said = {}
    for line in commands:
        words = line.replace("$(MODEL)", str(smollm2_dir)).split()
        command = forks.Command(*words, env={"COLUMNS": "200"}, cwd=tmp_path)
        out, err = command.communicate(timeout=3000)
        assert command.returncode == 0, out + err
        said[words[0]] = out
    run_dir = tmp_path / "runs" / "quickstart"
    assert json.loads((run_dir / "summary.json").read_text())["summary"]["step"] == 50
    assert len((tmp_path / "examples/quickstart/train.jsonl").read_text().splitlines()) == 400
    assert (run_dir / "report.html").is_file()
    table = said["evaluate"]
    print(table)
    assert "60 rows; 95 % intervals" in table
    found = {}
    for row in ("exact match", "loss"):
        (shown_row,) = re.findall(rf"^│ {row} .*$", table, re.MULTILINE)
        assert shown_row.rstrip(" │").endswith("< 0.001")
        found[row] = [list(map(float, one)) for one in re.findall(NUMBER, shown_row)]
    base, tuned = shown("exact match")
    assert found["exact match"][0] == base
    # Within README's own interval: the last digits depend on the CPU.
    assert tuned[1] <= found["exact match"][1][0] <= tuned[2]
    base, tuned = shown("loss")
    assert found["loss"][0][0] == pytest.approx(base[0], rel=0.02)
    assert tuned[1] <= found["loss"][1][0] <= tuned[2]
    assert "tuned is better than base on exact match" in table
