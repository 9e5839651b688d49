"""Sentences of the guide that were not so once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import manifest
from finray.checkpoint.rundir import RunDir
from finray.config.load import build_config, preset_names, read_preset
from finray.config.schema import Config
from finray.data.dataset import plan
from finray.errors import ConfigError, ModelError
from finray.planning.checks import check_extras, check_targets
from finray.planning.placement import worker_environment
from finray.records import EvalRecord, RunSummary, TrainRecord
from finray.results import PlainConsole
from finray.runtime.driver import TrainResult
from finray.tracking.system import System

GUIDE = Path(__file__).parents[3] / "docs" / "guide"


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


def test_the_allocator_setting_of_a_preset_reaches_its_workers() -> None:
    config = build_config(read_preset("bloomz-zero3"), source="preset")
    for environ in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}):
        env = worker_environment(config.cluster, threads=1, environ=environ)
        found = {value for name, value in env.items() if name.endswith("ALLOC_CONF")}
        assert found == {config.cluster.env["PYTORCH_ALLOC_CONF"]}


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


def test_patterns_of_modules_separated_by_commas_are_told_how_lists_are_written() -> None:
    plain: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}}
    config: Config = build_config({**plain, "adapter": {"target_modules": r"q_proj,.*\.v_proj"}}, source="x")
    with pytest.raises(ModelError) as caught:
        check_targets(config, ["model.layers.0.q_proj", "model.layers.0.v_proj"])
    assert r"[q_proj, .*\.v_proj]" in str(caught.value.repair)


def test_a_name_that_is_no_directory_gets_one_that_is() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"model": {"name": "m"}, "data": {"source": "d"}, "run": {"name": "run #1"}}, source="x")
    assert "(such as `run-1`)" in caught.value.problems[0]


@pytest.mark.parametrize(("step", "said"), [(1, "at the first step"), (21, "at step 21, the first of this start")])
def test_the_summary_says_of_which_step_its_first_loss_is(
    step: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = dict.fromkeys(
        ("start_ray", "prepare", "start_workers", "load", "train", "evaluate", "checkpoint", "total", "data_wait"), 0.0
    )
    summary = RunSummary(30, 30, 1, 1, 1.0, 1.0, 2.5, 1.5, "eval_loss", None, phases, (1,), first_step=step)
    assert RunSummary.from_json(summary.json()) == summary
    old = {name: value for name, value in summary.json().items() if name != "first_step"}
    assert RunSummary.from_json(old).first_step == 1
    RunDir(tmp_path).keep_config(build_config({"model": {"name": "m"}, "data": {"source": "d"}}, source="x"))
    TrainResult(tmp_path, Path("f"), 30, summary).print(PlainConsole(width=200))
    assert f"2.5000 {said}, 1.5000 at the last" in capsys.readouterr().out


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
