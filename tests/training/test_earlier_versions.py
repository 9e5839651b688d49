"""Files that earlier versions of finray wrote are read, or refused with a line that says what to do.

``tests/data/written`` has what each left, byte for byte; ``write.py`` there has written it. Two of them are of formats
that are not read any more.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from finray.checkpoint import manifest
from finray.checkpoint.rundir import RunDir, earlier_of, saved_config
from finray.checkpoint.store import CheckpointStore
from finray.config.load import load_config
from finray.config.paths import with_absolute_paths
from finray.data.dataset import plan
from finray.data.dataset.prepared import PreparedDataset
from finray.errors import CheckpointError, DataError
from tests.support import runs

WRITTEN = Path(__file__).parents[1] / "data" / "written"
# Where they were written: it stands in their configs.
WRITTEN_AT = "/tmp/finray-written"
VERSIONS = sorted(path.name for path in WRITTEN.iterdir() if (path / "runs").is_dir())
# Checkpoints and prepared data of format version 1.
REFUSED = ["2026-11-21-noon"]
READ = [name for name in VERSIONS if name not in REFUSED]
STEP = 2


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a version left, with the inputs beside it, as the working directory."""
    shutil.copytree(WRITTEN / request.param / "runs", tmp_path / "runs")
    for one in ("rows.jsonl", "train.yaml"):
        shutil.copy(WRITTEN / one, tmp_path)
    shutil.copytree(WRITTEN / "model", tmp_path / "model")
    config = tmp_path / "runs" / "run" / "config.yaml"
    config.write_text(config.read_text().replace(WRITTEN_AT, str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared_in(folder: Path) -> Path:
    (found,) = (path.parent for path in (folder / "runs" / ".prepared").glob("*/manifest.json"))
    return found


def test_there_are_files_of_each_format_version_and_of_this_version() -> None:
    """A format version that is raised leaves files of the one before here."""
    files = [json.loads(path.read_text()) for path in WRITTEN.glob("*/runs/run/final/manifest.json")]
    assert {one["format_version"] for one in files} == set(range(1, manifest.FORMAT_VERSION + 1))
    files = [json.loads(path.read_text()) for path in WRITTEN.glob("*/runs/.prepared/*/manifest.json")]
    assert {one["shaped_by"]["format_version"] for one in files} == set(range(1, plan.FORMAT_VERSION + 1))


@pytest.mark.parametrize("folder", VERSIONS, indirect=True)
def test_the_config_of_an_earlier_version_is_that_of_the_same_run(folder: Path) -> None:
    config = load_config(folder / "train.yaml")
    saved = saved_config(RunDir(folder / "runs" / "run"))
    assert saved.train.learning_rate == config.train.learning_rate == 0.01
    # It raises where the directory held another run.
    earlier = earlier_of(with_absolute_paths(config))
    assert earlier is not None
    assert (earlier.step, earlier.is_finished) == (STEP, True)


@pytest.mark.parametrize("folder", READ, indirect=True)
def test_prepared_rows_are_those_that_were_written(folder: Path) -> None:
    dataset = PreparedDataset(prepared_in(folder))
    dataset.verify()
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    rows = dataset.all_rows("train")
    assert rows is not None
    sources = [json.loads(line)["messages"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(sources)
    for number, turns in enumerate(sources):
        tokens, mask = rows.row(number)
        whole = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == whole
        learned = tokenizer.decode(tokens[mask.astype(bool)].tolist(), skip_special_tokens=False)
        assert learned == turns[1]["content"] + "<|im_end|>"


@pytest.mark.parametrize("folder", READ, indirect=True)
def test_a_run_goes_on_from_the_checkpoint_as_it_went_on_then(folder: Path) -> None:
    """Rows of each step and what was learned, but for what another processor rounds otherwise."""
    run_dir = folder / "runs" / "run"
    wanted, learned = runs.records(run_dir), runs.adapter_weights(run_dir / "final")
    # Two steps move the weights far enough for a difference to be seen.
    assert runs.relative_difference(learned, runs.adapter_weights(run_dir / f"checkpoint-{STEP:06d}")) > 0.05
    runs.reopen(run_dir, step=STEP)
    runs.run_alone(load_config(folder / "train.yaml").plain(), run_dir)
    found = runs.records(run_dir)
    assert [one["step"] for one in found] == [1, 2, 3, 4]
    for one, was in zip(found, wanted, strict=True):
        for key in ("samples", "samples_digest", "epoch", "tokens", "supervised", "lr"):
            assert one[key] == was[key], key
        assert one["loss"] == pytest.approx(was["loss"], rel=1e-4)
    assert runs.relative_difference(learned, runs.adapter_weights(run_dir / "checkpoint-000004")) < 0.005


@pytest.mark.parametrize("folder", REFUSED, indirect=True)
def test_a_checkpoint_of_another_format_is_refused_with_its_version(folder: Path) -> None:
    store = CheckpointStore(folder / "runs" / "run")
    with pytest.raises(CheckpointError) as refused:
        store.latest()
    assert str(refused.value).splitlines() == [
        f"{store.path_of(STEP) / 'manifest.json'}: has format version 1; this finray reads {manifest.FORMAT_VERSION}",
        "  repair: use the version of finray that wrote it, or start over with --fresh",
    ]
    assert (folder / "runs" / "run" / "checkpoint-000002").is_dir()


@pytest.mark.parametrize("folder", REFUSED, indirect=True)
@pytest.mark.parametrize("model", ["runs/run", "runs/run/checkpoint-000002"])
def test_a_model_of_another_format_is_refused_with_what_helps(folder: Path, model: str) -> None:
    code, out, err = runs.finray("generate", model, "hello")
    assert code == 2
    assert "has format version 1" in out + err
    assert "repair: use the version of finray that wrote it" in " ".join((out + err).split())


@pytest.mark.parametrize("folder", REFUSED, indirect=True)
def test_prepared_data_of_another_format_are_refused_with_their_version(folder: Path) -> None:
    place = prepared_in(folder)
    with pytest.raises(DataError) as refused:
        PreparedDataset(place)
    assert str(refused.value).splitlines() == [
        f"{place / 'manifest.json'}: has format version 1; this finray reads {plan.FORMAT_VERSION}",
        f"  repair: delete {place} and run the command again",
    ]


@pytest.mark.parametrize("folder", VERSIONS, indirect=True)
def test_a_finished_run_of_an_earlier_version_is_reported(folder: Path) -> None:
    code, out, err = runs.finray("report", "runs/run", "--output", folder / "report.html")
    assert code == 0, out + err
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize("folder", READ, indirect=True)
def test_the_model_of_an_earlier_version_answers_with_a_base_that_was_moved(folder: Path) -> None:
    code, out, err = runs.finray("generate", "runs/run", "house tree", "--base", "model", "--max-new-tokens", 4)
    assert code == 0, out + err
