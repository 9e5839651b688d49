"""Sentences, tables and lists of the pages are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finray.checkpoint import manifest
from finray.config.load import build_config, preset_names, read_preset
from finray.data.dataset import plan
from finray.errors import ConfigError
from finray.planning.checks import check_extras
from finray.records import EvalRecord, TrainRecord
from finray.tracking.system import System

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def test_the_page_of_presets_names_the_packages_that_they_need() -> None:
    page = " ".join((GUIDE / "presets.md").read_text(encoding="utf-8").split())
    promise = page[page.index("With `--offline`") : page.index("is listed as `not checked`")]
    assert "`--gpu`" in promise
    for name in preset_names():
        config = build_config(read_preset(name), source=name)
        try:
            check_extras(config, installed=lambda package: False)
        except ConfigError as error:
            extras = str(error.repair).partition("[")[2].partition("]")[0].split(",")
            assert f"{' and '.join(f'`{extra}`' for extra in extras)} for `{name}`" in promise
        else:
            assert f"`{name}`" not in promise


@pytest.mark.parametrize(
    "word",
    [
        *("ray job submit", "W&B", "BERTScore", "samples per second", "--batch_size", "Docker", "last-checkpoint/"),
        *("one GPU per worker", "`data.packing: false`", "RUN_NAME", "RESULT_MODEL_ID", "generate-jobspec.sh", "vLLM"),
        *("classification", "finray chat", "NFS", "KubeRay"),
    ],
)
def test_what_other_systems_have_is_named_where_one_comes_from_them(word: str) -> None:
    assert word in (GUIDE / "coming-from.md").read_text(encoding="utf-8")


def test_every_field_of_the_metrics_is_specified() -> None:
    page = (GUIDE.parent / "formats.md").read_text(encoding="utf-8")
    specified = page[page.index("### metrics.jsonl") :]
    evaluated = EvalRecord(1, {"eval_loss": 1.0, "perplexity": 2.7}, 1, 1.0).json()
    system = System(GUIDE).sample()
    for name in (*TrainRecord.__dataclass_fields__, *evaluated, *system, "time"):
        assert f"`{name}`" in specified, name
    assert "A note has `kind`" in specified


def test_the_versions_of_formats_are_those_that_are_written() -> None:
    page = (GUIDE.parent / "formats.md").read_text(encoding="utf-8")
    checkpoints, _, prepared = page.partition("## Prepared datasets")
    assert prepared, "the page has another heading"
    assert re.findall(r'"format_version": (\d+)', checkpoints) == [str(manifest.FORMAT_VERSION)]
    assert re.findall(r"`format_version` \| (\d+)", prepared) == [str(plan.FORMAT_VERSION)]


def test_every_page_of_the_guide_is_in_the_table_of_pages() -> None:
    listed = set(re.findall(r"\]\(guide/([a-z-]+\.md)\)", (GUIDE.parent / "index.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in GUIDE.glob("*.md")}


def test_the_quickstart_ends_with_a_report_and_every_picture_of_the_pages_is_there() -> None:
    root = GUIDE.parents[1]
    recipe = (root / "Makefile").read_text(encoding="utf-8").partition("\nquickstart:")[2].partition("\n\n")[0]
    assert re.findall(r"^\t\$\(BIN\)/(finray \w+)", recipe, re.MULTILINE)[-1] == "finray report"
    shown = {}
    for page in (root / "README.md", *GUIDE.parent.rglob("*.md")):
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            shown[page.name, name] = (page.parent / name).read_bytes()
    assert all(content.startswith(b"\x89PNG") for content in shown.values())
    assert ("README.md", "docs/guide/images/report.png") in shown
