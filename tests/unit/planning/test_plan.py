"""`finray plan` without its printing: every problem at once, and what is known of memory and placement."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir, open_run
from finray.config.paths import with_absolute_paths
from finray.config.resolved import LabelSet
from finray.config.schema import Config
from finray.errors import ClusterError, DataError
from finray.planning import placement
from finray.planning import plan as planning
from finray.planning.memory import MARGIN
from finray.planning.plan import make_plan
from finray.planning.result import Plan
from finray.planning.sample_data import DataReport
from finray.records import RunSummary
from tests.support import runs, tiny

pytestmark = pytest.mark.long


def report_of(**fields: Any) -> DataReport:
    """What an examination of the data would say."""
    found = {
        "rows": 100,
        "tokens": 4000,
        "supervised": 1000,
        "packs": 80,
        "longest": 60,
        "lengths": [20, 40, 60],
        "seconds": 0.5,
    }
    return DataReport(**{**found, **fields})


Planner = Callable[..., Plan]


@pytest.fixture
def plan(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """A plan of a tiny run on a machine of four CPUs, 8 GiB and no GPU."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(planning, "local_gpus", lambda: [])
    monkeypatch.setattr(placement, "machine_cpus", lambda: 4)
    monkeypatch.setattr(placement, "machine_memory", lambda: 8 * 2**30)
    rows = tiny.write_chat_rows(tmp_path, 12)

    def make(
        report: DataReport | None = None,
        *,
        gpu: str | None = None,
        model: Path | None = None,
        ask: Callable[[Config], Any] = planning.no_cluster,
        fresh: bool = False,
        **sections: Any,
    ) -> Plan:
        plain = runs.tiny_run(model or tiny_model_dir, rows, tmp_path / "out", sections)
        return make_plan(
            runs.config_of(plain),
            gpu=gpu,
            examine=lambda config: report or report_of(),
            ask=ask,
            environ={},
            fresh=fresh,
        )

    return make


def texts(found: Plan) -> str:
    return "\n".join(f"{one.where}: {one.message} | {one.repair}" for one in found.problems)


def test_a_run_that_would_start(plan: Planner, tmp_path: Path) -> None:
    found = plan(train={"max_steps": None, "epochs": 3, "global_batch_size": 8})
    assert found.starts, texts(found)
    assert found.model is not None
    assert found.model.adapter == found.model.trainable > 0
    assert found.data is not None
    assert (found.data.steps, found.data.epochs, found.data.seen_tokens) == (30, 3.0, 12_000)
    assert found.placement is not None
    assert (found.placement.workers, found.placement.use_gpu) == (1, False)
    assert found.memory is not None
    assert found.memory.fits
    pair = plan(cluster={"num_workers": 2}).memory
    assert pair is not None
    assert pair.available == (found.memory.available or 0) // 2, "workers share the memory of a node"
    assert sum(found.memory.parts.values()) == found.memory.total
    assert not (tmp_path / "out").exists()
    assert json.loads(json.dumps(found.plain()))["starts"] is True


def test_problems_of_every_part_are_listed_at_once(plan: Planner, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file", encoding="utf-8")
    found = plan(
        report_of(problems=[DataError("a row is bad", where="rows.jsonl:3")]),
        run={"output_dir": str(tmp_path / "blocked" / "runs")},
        adapter={"target_modules": ["q_proj", "v_prj"]},
        cluster={"num_workers": 9},
    )
    listed = texts(found)
    assert not found.starts
    assert len(found.problems) == 4, listed
    assert "rows.jsonl:3: a row is bad" in listed
    assert "run.output_dir" in listed
    assert "`v_prj` (did you mean `v_proj`?)" in listed
    assert "`q_proj`" not in listed
    assert "enough for" in listed


def test_a_problem_that_two_checks_see_is_said_once(plan: Planner) -> None:
    """The names of the stored weights and those of the model's modules are asked, which differ."""
    (problem,) = plan(adapter={"modules_to_save": ["nope"]}).problems
    assert problem.where == "adapter.modules_to_save"
    assert "`nope`" in problem.message
    assert problem.repair is not None
    assert not {"0", "1"} & set(problem.repair.replace(":", ",").split(", ")), "numbers of layers are no names"
    # A list has names and endings of them, a regular expression matches whole names.
    assert plan(adapter={"target_modules": ["q_proj", "self_attn.v_proj", "lm_head"]}).starts
    assert plan(adapter={"target_modules": r".*\.(q_proj|v_proj)"}).starts
    assert "matches no module" in texts(plan(adapter={"target_modules": "q_proj"}))


def test_a_gpu_that_is_too_small_and_the_smallest_change(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"max_length": 4096, "packing": True}
    report = report_of(lengths=[4000] * 200, longest=4000, tokens=800_000)
    settings = {"precision": "fp32", "micro_batch_size": 64, "global_batch_size": 64}
    fits = plan(report, gpu="h200-141gb", data=large, train=settings)
    assert fits.starts, texts(fits)
    assert fits.memory is not None
    assert fits.placement is None
    monkeypatch.setitem(planning.__dict__, "gpu_named", lambda name: small(int(fits.memory.total * 0.7)))  # type: ignore[union-attr]
    found = plan(report, gpu="small", data=large, train=settings)
    assert found.memory is not None
    assert found.memory.fits is False
    assert found.memory.changes == ("train.micro_batch_size=32",)
    assert "train.micro_batch_size=32" in texts(found)
    changed = plan(report, gpu="small", data=large, train={**settings, "micro_batch_size": 32})
    assert changed.starts, texts(changed)


@pytest.mark.parametrize(
    ("settings", "offered"),
    [
        ({"adapter.method": "none"}, True),
        ({}, False),
        ({"adapter.method": "none", "train.optimizer": "adafactor"}, False),
        ({"adapter.method": "none", "train.precision": "bf16-true"}, False),
    ],
)
def test_bf16_weights_are_offered_where_full_training_does_not_fit(
    plan: Planner, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], offered: bool
) -> None:
    # Else it would choose more packs on the larger of the two GPUs.
    settings = {**settings, "train.micro_batch_size": 1}
    whole = plan(gpu="h200-141gb", **settings).memory
    assert whole is not None
    # A byte less than it needs.
    monkeypatch.setitem(planning.__dict__, "gpu_named", lambda name: small(int((whole.total - 1) / (1 - MARGIN))))
    (problem,) = plan(gpu="small", **settings).problems
    assert ("train.precision=bf16-true" in str(problem.repair)) == offered


def test_the_speed_on_a_gpu_is_its_share_of_the_data_sheet(plan: Planner) -> None:
    report = report_of(lengths=[60] * 200, longest=60, tokens=12_000)
    found = plan(report, gpu="h100-80gb", cluster={"num_workers": 2})
    assert found.speed is not None
    assert found.data is not None
    assert found.model is not None
    # Six operations a weight and token, four where it is frozen: the tiny model's attention and head add some.
    operations = 2 * 0.4 * 989e12 / (found.speed.tokens_per_s * found.speed.waiting)
    assert 4 * 0.5 * found.model.parameters < operations < 6 * 1.5 * found.model.parameters
    assert found.speed.seconds == pytest.approx(found.data.seen_tokens / found.speed.tokens_per_s)
    assert found.speed.step_seconds == pytest.approx(found.speed.seconds / found.data.steps)
    # Kernels of its two layers are launched in 14 ms, for the packs of a micro-batch.
    assert found.resolved is not None
    tokens = found.resolved.micro_batch_size * found.data.tokens / found.data.packs
    assert found.speed.tokens_per_s == pytest.approx(2 * tokens / (2 * 7e-3))
    # Of this machine's CPUs no rate is known.
    assert plan(report).speed is None


def small(memory: int) -> Any:
    from finray.planning.placement import Gpu

    return Gpu("small", memory)


def test_a_machine_with_too_little_memory_and_a_cluster_that_cannot_be_reached(
    plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "machine_memory", lambda: 2**30 + 200 * 2**20)
    found = plan()
    assert "a worker needs about" in texts(found)
    assert "the machine has 0.2 GiB for each" in texts(found)

    def refuse(config: Config) -> Any:
        raise ClusterError("Ray cannot be reached", where="cluster.address=10.0.0.1:1")

    assert "cluster.address=10.0.0.1:1" in texts(plan(cluster={"address": "10.0.0.1:1"}, ask=refuse))


def test_a_cluster_is_asked_for_its_nodes_and_gpus(plan: Planner) -> None:
    nodes = [{"CPU": 16.0, "GPU": 4.0, "memory": 2.0**36, "accelerator_type:H100": 1.0}] * 2
    found = plan(cluster={"address": "10.0.0.1:6379", "num_workers": 8}, ask=lambda config: nodes)
    assert found.starts, texts(found)
    assert found.placement is not None
    assert (found.placement.nodes, found.placement.gpus, found.placement.use_gpu) == (2, 8, True)
    assert found.memory is not None
    assert found.memory.device == "h100-80gb"
    assert any("must be shared by all of them" in one.message for one in found.warnings)
    unknown = plan(cluster={"address": "10.0.0.1:6379", "num_workers": 2}, ask=lambda config: nodes)
    nodes[:] = [{"CPU": 4.0, "GPU": 2.0}]
    unknown = plan(cluster={"address": "10.0.0.1:6379", "num_workers": 2}, ask=lambda config: nodes)
    assert unknown.memory is not None
    assert unknown.memory.fits is None
    assert any("--gpu" in one.message for one in unknown.warnings)


def test_a_model_that_does_not_exist_is_said_once(plan: Planner, tmp_path: Path) -> None:
    found = plan(model=tmp_path / "nothing" / "here")
    assert [one.message for one in found.problems].count("the model does not exist") == 1
    assert found.model is None
    assert found.memory is None
    assert found.data is not None


def test_a_configuration_of_another_model_than_the_files(plan: Planner, tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_dir, copy)
    whole = json.loads((copy / "config.json").read_text())
    for text, changes in (
        ("would be random: model.layers.2", {"num_hidden_layers": 4}),
        ("have a different shape in its files", {"vocab_size": 300}),
    ):
        (copy / "config.json").write_text(json.dumps(whole | changes))
        found = plan(model=copy)
        assert not found.starts
        assert text in texts(found)
    (copy / "config.json").write_text(json.dumps(whole | {"num_hidden_layers": 1}))
    found = plan(model=copy)
    assert found.starts
    assert any("a cut model is trained" in one.message for one in found.warnings)


def test_a_plan_of_little_data_names_the_step_and_epochs_that_finray_chooses(plan: Planner) -> None:
    left_open = {"max_steps": None, "global_batch_size": "auto"}
    found = plan(report_of(packs=5), train=left_open)
    assert found.data is not None
    assert found.resolved is not None
    assert (found.data.global_batch_size, found.data.steps, found.data.epochs) == (1, 15, 3.0)
    assert (found.resolved.global_batch_size, found.resolved.epochs) == (1, 3.0)
    assert any("train.global_batch_size=1 and train.epochs=3" in note for note in found.data.notes)
    assert not found.warnings
    # Of data that were read in part, nothing is known of their number.
    partly = plan(report_of(packs=5, complete=False), train=left_open)
    assert partly.data is not None
    assert partly.data.global_batch_size == 8
    fixed = plan(train={"max_steps": 7, "epochs": 3, "global_batch_size": 8}).data
    assert fixed is not None
    assert fixed.steps == 7
    assert any("train.max_steps=7" in note and "train.epochs=3" in note for note in fixed.notes)
    named = plan(report_of(packs=5), train={"max_steps": None, "epochs": 1, "global_batch_size": 8})
    assert "the run is a single step" in named.warnings[0].message
    assert named.warnings[0].repair


def test_memory_is_that_of_the_packs_that_little_data_gets(plan: Planner) -> None:
    """120 rows of 20, 40 and 60 tokens: in packs of 60 no forward pass has more, in packs of 512 one has 512."""
    report = report_of(lengths=[20, 40, 60] * 40, pack_length=60)
    short, full = (plan(one, data={"max_length": 512}) for one in (report, replace(report, pack_length=None)))
    assert short.memory is not None
    assert full.memory is not None
    assert short.memory.tokens == 60
    assert 500 <= full.memory.tokens <= 512
    assert short.memory.parts["activations"] < full.memory.parts["activations"]


def test_experts_that_no_bits_reach_are_named(plan: Planner, tmp_path: Path, tokenizer: Any) -> None:
    """Transformers keeps them in one tensor a layer, and quantization stores linear layers."""
    for family in ("llama", "qwen3_moe"):
        tiny.save_model(family, tmp_path / family, tokenizer)
    # 2 layers of 4 experts with three matrices of 64 x 64.
    joined = 2 * 4 * 3 * 64 * 64
    found = plan(model=tmp_path / "qwen3_moe", **{"model.quantization": "4bit"})
    assert found.model is not None
    share = joined / (found.model.parameters - found.model.adapter)
    assert any(f"{share:.0%} of the weights are experts" in warning.message for warning in found.warnings)
    plain, dense = plan(model=tmp_path / "qwen3_moe"), plan(model=tmp_path / "llama", **{"model.quantization": "4bit"})
    assert not [one for one in (*plain.warnings, *dense.warnings) if "are experts" in one.message]


OPTIONAL = ("bitsandbytes", "flash_attn", "liger_kernel", "deepspeed")


@pytest.mark.parametrize(
    "sections",
    [
        {"model.quantization": "4bit", "train.optimizer": "paged_adamw_8bit"},
        {"model.quantization": "auto"},
        {"model.attention": "flash_attention_2", "train.precision": "bf16"},
        {"train.liger": True},
        {"parallel": {"strategy": "deepspeed", "zero_stage": 3}, "adapter.method": "none"},
    ],
)
def test_packages_that_are_missing_here_are_no_problem_of_a_gpu_that_is_elsewhere(
    plan: Planner, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    found = plan(gpu="h100-80gb", **sections)
    assert found.starts, texts(found)
    assert found.memory is not None
    missing = [one for one in found.warnings if "must have it" in one.message]
    assert len(missing) == 1
    assert "pip install" in str(missing[0].repair)
    # On a cluster that is asked, or on this machine, `finray train` refuses.
    here = plan(
        gpu="h100-80gb", cluster={"address": "10.0.0.1:1"}, ask=lambda config: [{"CPU": 8.0, "GPU": 1.0}], **sections
    )
    assert "pip install" in texts(here)


# --- a run directory that holds a run already ------------------------------------------------------------------------

SUMMARY = RunSummary(10, 10, 9, 9, 1.0, 9.0, 1.0, 0.5, "eval_loss", 1.0)
LEFT_OPEN = {"max_steps": None, "epochs": None, "global_batch_size": "auto"}


@pytest.fixture
def begun(plan: Planner, tiny_model_dir: Path, tmp_path: Path) -> RunDir:
    """A run of :func:`plan` that chose steps of one pack, and was stopped at its fourth."""
    plain = runs.tiny_run(tiny_model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"train": LEFT_OPEN})
    plain["data"]["source"] = str(tiny.write_chat_rows(tmp_path, 12))
    with open_run(with_absolute_paths(runs.config_of(plain)), fresh=False, notify=print) as run:
        chosen = plan(report_of(packs=5), fresh=True, train=LEFT_OPEN).resolved
        assert chosen is not None
        run.keep_resolved(replace(chosen, global_batch_size=1, epochs=2.0))
    store = CheckpointStore(run.path)
    store.commit(scratch := store.begin(4), 4, store.fill(scratch, 4, lambda folder: None), metrics={})
    return run


def test_a_plan_of_a_run_that_is_there_refuses_what_training_refuses(plan: Planner, begun: RunDir) -> None:
    before = sorted(path.stat().st_mtime_ns for path in begun.path.parent.rglob("*"))
    wrong = {"train": {**LEFT_OPEN, "learning_rate": 1.0}}
    found = plan(report_of(packs=5), **wrong)
    assert found.starts is False
    assert "train.learning_rate: was 0.01, is now 1.0" in texts(found)
    assert "--fresh" in texts(found)
    assert plan(report_of(packs=5), fresh=True, **wrong).starts
    assert sorted(path.stat().st_mtime_ns for path in begun.path.parent.rglob("*")) == before


def test_a_plan_of_a_run_that_is_there_says_where_it_goes_on(plan: Planner, begun: RunDir) -> None:
    def shown(**sections: Any) -> str:
        console = Console(file=StringIO(), width=300)
        found = plan(report_of(packs=5), train=LEFT_OPEN, **sections)
        found.print(console)
        assert found.starts, texts(found)
        return console.file.getvalue()

    # With the two epochs that it chose when it began; more data would now make other steps.
    text = shown()
    assert "continues at step 4 of 10" in text
    assert "there is little data" not in text
    more = plan(report_of(packs=5), train=LEFT_OPEN, cluster={"num_workers": 2})
    assert [one.repair for one in more.warnings] == [
        "cluster.num_workers=1, or train.global_batch_size=2 or more in a run of another run.name"
    ]
    begun.finish({"chosen_step": 10, "summary": SUMMARY.json()})
    assert "is finished already" in shown()
    assert "continues at step 4 of 15" in shown(**{"train.epochs": 3})


def test_a_run_is_bound_to_what_it_chose_for_other_data_only_if_it_has_learned_from_them(
    plan: Planner, begun: RunDir
) -> None:
    chosen = begun.resolved()
    assert chosen is not None
    begun.keep_resolved(replace(chosen, pack_length=50, micro_batch_size=3))
    kept = plan(report_of(), train=LEFT_OPEN, gpu="h100-80gb")
    assert (kept.resolved and kept.resolved.micro_batch_size, kept.micro_batch) == (3, "the run began with it")
    longer = report_of(packs=500, longest=60)
    found = plan(longer, train=LEFT_OPEN)
    assert "data.source: the data have changed since the run began: a row has 60 tokens, and its packs at most 50" in (
        texts(found)
    )
    shutil.rmtree(begun.store().path_of(4))
    again, new = plan(longer, train=LEFT_OPEN), plan(longer, fresh=True, train=LEFT_OPEN)
    assert again.starts, texts(again)
    assert again.data == new.data
    assert new.data is not None
    assert new.data.global_batch_size > 1


def test_a_tracker_that_would_refuse_the_run_is_a_problem(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert "tracking.mlflow_uri: MLflow needs an address" in texts(plan(tracking={"trackers": ["mlflow"]}))
    # Another machine has an environment of its own.
    assert "MLflow" not in texts(plan(tracking={"trackers": ["mlflow"]}, gpu="A100-80GB"))


# --- classifiers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_classifier(
    classifier_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], Plan]:
    """A plan of a tiny classifier, with what is found in its data."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def make(changes: dict[str, Any], **options: Any) -> Plan:
        return make_plan(runs.config_of(classifier_run(changes)), environ={}, **options)

    return make


def test_a_classifiers_head_has_the_classes_of_its_data(
    plan: Planner, plan_classifier: Any, classifier_run: Callable[..., Any], tmp_path: Path
) -> None:
    """What is counted is what a run has: three classes, not the two of a configuration that says nothing."""
    found = plan_classifier({})
    header = runs.assemble_alone(classifier_run(), tmp_path / "run").header
    assert found.starts, texts(found)
    assert found.model is not None
    assert (found.model.parameters, found.model.trainable) == (header.parameters, header.trainable)
    assert found.model.labels == LabelSet("single_label", ("animal", "neither", "plant"))
    shown = StringIO()
    found.print(Console(file=shown, width=200))
    assert "3 outputs (single_label)" in shown.getvalue()
    assert "learned)" not in shown.getvalue()
    plan(train={"objective": "reward"}).print(Console(file=shown, width=200))
    assert "1 output (reward)" in shown.getvalue()
    five = plan_classifier({"classification.labels": ["animal", "neither", "plant", "four", "five"]})
    # A row of the head and its bias, for each class more: 64 wide.
    assert five.model is not None
    assert five.model.trainable - found.model.trainable == 2 * 65


def test_a_head_whose_classes_nobody_knows_is_not_checked(plan_classifier: Any) -> None:
    lost = report_of(problems=[DataError("couldn't reach the Hub", where="someone/reviews")])
    found = plan_classifier({}, examine=lambda config: lost, offline=True)
    assert found.starts is None
    assert [one.where for one in found.unchecked] == ["classification.labels", "data.source=someone/reviews"]
    assert "the head is sized for 2" in found.unchecked[0].message
    weighted = {"class_weights": None, "labels": ["animal", "neither", "plant"]}
    named = plan_classifier({"classification": weighted}, examine=lambda config: lost, offline=True)
    assert [one.where for one in named.unchecked] == ["data.source=someone/reviews"]
    assert named.model is not None
    assert named.model.labels is not None


@pytest.mark.parametrize("long", ["train", "eval"])
def test_rows_beyond_the_learned_positions_are_a_problem(plan_classifier: Any, tmp_path: Path, long: str) -> None:
    """The tiny BERT has 80 positions."""
    rows = tiny.write_labelled_rows(tmp_path, 44)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "the cat " * 60, "label": "animal"}) + "\n", encoding="utf-8")
    if long == "train":
        rows.write_text(rows.read_text() + other.read_text())
        other.write_text(rows.read_text().splitlines()[0] + "\n")
    data = {"source": str(rows), "eval_source": str(other), "max_length": 100}
    (problem,) = plan_classifier({"data": data}).problems
    assert (problem.message, problem.repair) == (
        "the longest row has 100 tokens, but the model has 80 positions",
        "data.max_length=80",
    )
    assert plan_classifier({"data": {**data, "max_length": 80}}).starts
