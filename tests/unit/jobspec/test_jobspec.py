"""`finray jobspec`: what it writes is what Kubernetes, Compose, Slurm's shell and Ray read, for every preset."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import compose_spec
import jsonschema
import kubernetes_validate
import pytest
import yaml

from finray.config.load import build_config, load_config, preset_names, read_preset
from finray.config.schema import Config
from finray.errors import ConfigError
from finray.jobspec.hosts import STOPPED, compose, ray_cluster, slurm
from finray.jobspec.kubernetes import rayjob
from finray.jobspec.replicas import replicas
from finray.jobspec.spec import DATASETS, MODELS, Machines, limit_notes, make_spec, overrides_for
from tests.support.runs import finray

pytestmark = pytest.mark.long

KUBERNETES = "1.31"
HOSTS = Machines(hosts=tuple("abcdefgh"), user="me")
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
RAYJOB = Path(__file__).parents[2] / "data" / "schemas" / "ray.io_rayjobs.yaml.xz"


def preset(name: str, **changes: Any) -> Config:
    return build_config(read_preset(name), source=name, overrides=[f"{key}={value}" for key, value in changes.items()])


def small(**changes: Any) -> Config:
    plain: dict[str, Any] = {"model": {"name": "org/model"}, "data": {"source": "org/rows"}}
    for path, value in changes.items():
        section, _, name = path.partition("__")
        plain.setdefault(section, {})[name] = value
    return build_config(plain, source="test")


def check_rayjob(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the RayJob.

    Raises:
        jsonschema.ValidationError, AssertionError: they are none.
    """
    config, job = yaml.safe_load_all(text)
    kubernetes_validate.validate(config, KUBERNETES, strict=True)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    rayjob_validator().validate(job)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    return config, job


@cache
def rayjob_validator() -> jsonschema.Draft202012Validator:
    """`jsonschema.validate` would check the schema itself again each time, which takes seconds."""
    versions = yaml.load(lzma.decompress(RAYJOB.read_bytes()), Loader=yaml.CSafeLoader)["spec"]["versions"]
    schema = closed(next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def closed(schema: Any) -> Any:
    """A schema in which unknown fields are errors, as `kubectl` with strict validation has it."""
    if isinstance(schema, dict):
        found = {name: closed(value) for name, value in schema.items()}
        if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
            found.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
        return found | ({"type": ["integer", "string"]} if schema.get("x-kubernetes-int-or-string") else {})
    return [closed(one) for one in schema] if isinstance(schema, list) else schema


def check_script(text: str, folder: Path) -> None:
    """See that bash and shellcheck accept a script.

    Raises:
        AssertionError: they do not.
    """
    path = folder / "job.sbatch"
    path.write_text(text)
    for command in (["bash", "-n", str(path)], [str(SHELLCHECK), "--severity=style", str(path)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", preset_names())
def test_the_specifications_of_a_preset_are_valid(name: str, tmp_path: Path) -> None:
    config = preset(name)
    spec = make_spec(config, HOSTS)
    wanted = build_config(yaml.safe_load(spec.config_text), source=name)
    manifest, job = check_rayjob(rayjob(spec))
    assert build_config(yaml.safe_load(manifest["data"]["config.yaml"]), source=name) == wanted
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits.get("nvidia.com/gpu", 0)) * workers["maxReplicas"]
    assert gpus == (config.cluster.num_workers if config.cluster.use_gpu is True else 0)

    text = compose(spec)
    # An error in the config would be there again after every start. compose_spec 0.2 does not know the number, which
    # Compose's specification has.
    assert yaml.safe_load(text)["services"]["job"]["restart"] == "on-failure:3"
    services = compose_spec.PyCompose.from_yaml(text.replace("restart: on-failure:3", "restart: on-failure"))
    assert sorted(services.service_names()) == ["head", "job", "worker"]

    script = slurm(spec)
    check_script(script, tmp_path)
    embedded = script.partition("<<'FINRAY_CONFIG'\n")[2].partition("FINRAY_CONFIG\n")[0]
    assert build_config(yaml.safe_load(embedded), source=name) == wanted

    # Ray reads its environment when it is imported, so a test that needs no Ray does not import it.
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load(ray_cluster(spec)), schema)

    (tmp_path / "job.yaml").write_text(replicas(spec))
    assert load_config(tmp_path / "job.yaml").plain() == wanted.plain()
    # It names workers once: twice the replicas are twice the workers.
    plain = yaml.safe_load(replicas(spec))
    assert "num_workers" not in plain.get("cluster", {})
    assert (
        plain["replicas"] * plain["resources"].get("gpu", {}).get("accelerator_count", 1) == wanted.cluster.num_workers
    )
    plain["replicas"] *= 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(plain))
    assert load_config(tmp_path / "job.yaml").cluster.num_workers == 2 * wanted.cluster.num_workers


def test_what_is_no_specification_is_seen(tmp_path: Path) -> None:
    """The negative control of each check."""
    spec = make_spec(small(), HOSTS)
    with pytest.raises(Exception, match="livenessProb"):
        check_rayjob(rayjob(spec).replace("livenessProbe", "livenessProb"))
    with pytest.raises(jsonschema.ValidationError, match="backoffLimits"):
        check_rayjob(rayjob(spec).replace("backoffLimit", "backoffLimits"))
    with pytest.raises(ValueError, match="shm_sizes"):
        compose_spec.PyCompose.from_yaml(compose(spec).replace(":3", "").replace("shm_size", "shm_sizes"))
    with pytest.raises(AssertionError, match="SC"):
        check_script(slurm(spec).replace('"$SLURM_JOB_NODELIST"', "$SLURM_JOB_NODELIST"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({"cluster__use_gpu": False}, {"gpus_per_node": 4}, "cluster.use_gpu: false"),
        ({"cluster__use_gpu": True}, {"gpus_per_node": 8}, "1 worker of parallel.strategy ddp use 1"),
        ({"cluster__use_gpu": True, "cluster__num_workers": 8}, {"gpus_per_node": 2, "nodes": 2}, "8 workers use 8"),
        ({"cluster__num_workers": 4, "cluster__cpus_per_worker": 8}, {"cpus_per_node": 16}, "need 32 CPUs"),
        # Whole shares lie on each GPU: two of 0.4, and one of 0.6.
        *(
            (
                {"cluster__use_gpu": True, "cluster__gpus_per_worker": share, "cluster__num_workers": workers},
                {"nodes": 1, "gpus_per_node": gpus},
                f"set cluster.num_workers to {repaired}",
            )
            for share, workers, gpus, repaired in ((0.5, 8, 2, 4), (0.6, 8, 3, 3), (0.5, 2, 2, 4), (0.4, 2, 3, 6))
        ),
        ({}, {"secrets": ("hf_abcdefghijklmnopqrstuv",)}, "not the secret itself"),
        ({}, {"secrets": ("HF_TOKEN=x",)}, "not the secret itself"),
        ({}, {"nodes": 1, "max_nodes": 3}, "3 nodes would not all be used"),
        ({"cluster__use_gpu": True, "cluster__num_workers": 2}, {"nodes": 4}, "4 machines would not all be used"),
        ({"cluster__num_workers": 8}, {"nodes": 4, "min_nodes": 2}, "8 workers need at least 4 machines"),
        (
            {"cluster__use_gpu": True, "cluster__num_workers": {"min": 4, "max": 8}},
            {"gpus_per_node": 2, "min_nodes": 1},
            "4 workers need at least 2 machines",
        ),
    ],
)
def test_machines_that_the_run_cannot_use_are_refused(
    changes: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(small(**changes), Machines(**asked))
    assert said in str(caught.value)
    assert caught.value.repair
    assert "abcdefghij" not in str(caught.value)


def test_gpus_are_shared_out_over_machines() -> None:
    config = small(cluster__use_gpu=True, cluster__num_workers=16, parallel__strategy="fsdp")
    for asked, expected in [({}, (2, 8)), ({"nodes": 4}, (4, 4)), ({"gpus_per_node": 4}, (4, 4))]:
        spec = make_spec(config, Machines(**asked))
        assert (spec.nodes, spec.gpus_per_node) == expected
    # Alike on all of them, with some left over; two shares of 0.4 lie on a GPU, and one of 0.6.
    for changes, asked, expected in [
        ({"cluster__num_workers": 12}, {}, (2, 6)),
        ({"cluster__num_workers": 11}, {}, (2, 6)),
        ({"cluster__num_workers": {"min": 1, "max": 9}}, {}, (2, 5)),
        ({"cluster__num_workers": 3}, {"nodes": 2}, (2, 2)),
        ({"cluster__num_workers": 3, "cluster__gpus_per_worker": 0.6}, {}, (1, 3)),
        ({"cluster__num_workers": 3, "cluster__gpus_per_worker": 0.6}, {"gpus_per_node": 3}, (1, 3)),
        ({"cluster__num_workers": 5, "cluster__gpus_per_worker": 0.4}, {}, (1, 3)),
    ]:
        spec = make_spec(small(cluster__use_gpu=True, **changes), Machines(**asked))
        assert (spec.nodes, spec.gpus_per_node) == expected, changes
    assert "#SBATCH --gpus-per-node=a100:8" in slurm(make_spec(config, Machines(gpu_type="a100")))
    # As few machines as have room for the fewest workers; the last one has GPUs left over.
    fewest = {"min": 4, "max": 8}, {"min": 4, "max": 5}
    for changes, asked in [
        ({"cluster__num_workers": 8}, {"nodes": 4, "min_nodes": 4}),
        ({"cluster__use_gpu": True, "cluster__num_workers": fewest[0]}, {"gpus_per_node": 2, "min_nodes": 2}),
        (
            {"cluster__use_gpu": True, "cluster__num_workers": fewest[1], "cluster__gpus_per_worker": 0.4},
            {"nodes": 2, "min_nodes": 1},
        ),
    ]:
        assert make_spec(small(**changes), Machines(**asked)).min_nodes == asked["min_nodes"]


@pytest.mark.parametrize(
    ("run", "job"), [("2026-01-llama", "run-2026-01-llama"), ("LLaMA_3", "llama-3"), ("7" * 60, "run-" + "7" * 36)]
)
def test_the_name_of_a_job_begins_with_a_letter(run: str, job: str) -> None:
    """KubeRay makes a Service of it."""
    assert make_spec(small(run__name=run), Machines()).name == job


def test_workers_that_come_and_go_have_bounds_of_machines() -> None:
    config = small(cluster__use_gpu=True, cluster__num_workers={"min": 2, "max": 8})
    spec = make_spec(config, Machines(gpus_per_node=2))
    assert (spec.min_nodes, spec.nodes) == (1, 4)
    cluster = check_rayjob(rayjob(spec))[1]["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert (group["minReplicas"], group["maxReplicas"]) == (1, 4)
    assert "#SBATCH --nodes=1-4" in slurm(spec)
    with pytest.raises(ConfigError, match="Kueue"):
        rayjob(make_spec(config, Machines(gpus_per_node=2, queue="team")))
    halves = small(cluster__use_gpu=True, cluster__num_workers=4, cluster__gpus_per_worker=0.5)
    assert make_spec(halves, Machines()).gpus_per_node == 2


@pytest.mark.parametrize(("seconds", "grace"), [(20, 120), (600, 660)])
def test_schedulers_leave_the_time_that_a_checkpoint_may_take(seconds: int, grace: int) -> None:
    spec = make_spec(small(checkpoint__grace_seconds=seconds), Machines())
    assert f"#SBATCH --signal=B:TERM@{grace}\n" in slurm(spec)
    services = yaml.safe_load(compose(spec))["services"]
    assert {one["stop_grace_period"] for one in services.values()} == {f"{grace}s"}


def test_a_queue_a_limit_and_storage_are_said_where_they_belong() -> None:
    machines = Machines(queue="team", hours=2, storage="s3://bucket/runs", claim=None, secrets=("HF_TOKEN", "WANDB"))
    spec = make_spec(small(), machines)
    config, job = check_rayjob(rayjob(spec))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert (job["spec"]["suspend"], job["spec"]["activeDeadlineSeconds"]) == (True, 7200)
    assert yaml.safe_load(config["data"]["config.yaml"])["run"]["output_dir"] == "s3://bucket/runs"
    pod = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert [one["name"] for one in pod["volumes"]] == ["config", "shm"]
    names = [one["name"] for one in pod["containers"][0]["env"] if "valueFrom" in one]
    assert names == ["HF_TOKEN", "WANDB"]
    script = slurm(spec)
    assert "#SBATCH --partition=team" in script
    assert "#SBATCH --time=02:00:00" in script


@pytest.mark.parametrize(("code", "requeued"), [(STOPPED, True), (0, False), (2, False)])
def test_the_slurm_script_hands_on_the_signal_and_queues_a_stopped_run_again(
    code: int, requeued: bool, tmp_path: Path
) -> None:
    """With commands in the place of Slurm's, Ray's and finray's that write down how they are called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    calls = tmp_path / "calls"
    calls.touch()
    (tmp_path / "tokens").touch()
    note = f'echo "$(basename "$0") $*" >> {calls}'
    wait = f"trap 'echo stopped >> {calls}; exit {code}' TERM\nif [ {code} = {STOPPED} ]; then kill -TERM $PPID; "
    wait += "for _ in $(seq 600); do sleep 0.1; done; fi"
    scripts = {
        "scontrol": f"{note}\nif [ $1 = show ]; then printf 'n1\\nn2\\n'; fi",
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
        "ray": f'{note}\nif [ "$1" = start ]; then echo "$RAY_AUTH_TOKEN" >> {tmp_path}/tokens; fi',
        # Both nodes have started before the run does anything.
        "finray": f"{note}\nuntil [ $(wc -l < {tmp_path}/tokens) = 2 ]; do sleep 0.05; done\n{wait}\nexit {code}",
    }
    for name, text in scripts.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(slurm(make_spec(small(), Machines(shared=str(tmp_path), nodes=2))))
    env = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "TMPDIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "4",
    }
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=120)
    said = calls.read_text()
    assert done.returncode == code, done.stdout + done.stderr
    assert f"finray train {tmp_path}/finray-7/run.yaml" in said
    assert "--address=n1:20007" in said
    assert ("scontrol requeue 7" in said) is requeued
    # Both have one token, and it is on no command line.
    one, other = (tmp_path / "tokens").read_text().split()
    assert one == other
    assert len(one) == 64
    assert one not in said


def test_a_limit_that_is_shorter_than_the_way_to_a_checkpoint_is_warned_of() -> None:
    steps = small(checkpoint__every_steps=100).checkpoint
    (said,) = limit_notes(steps, 1, 60.0)
    assert said.startswith("warning: ")
    for part in ("60 min", "100 min between checkpoints", "100 steps of 60.0 s", "checkpoint.every_steps to 55"):
        assert part in said
    assert "ask for more time" in limit_notes(steps, 0.09, 60.0)[0]
    # With the five minutes until the first step, 55 of a minute each are the most that fit into an hour.
    assert limit_notes(small(checkpoint__every_steps=55).checkpoint, 1, 60.0) == []
    assert limit_notes(small(checkpoint__every_steps=56).checkpoint, 1, 60.0) != []


def test_a_limit_that_cannot_be_compared_is_said_of_one_that_was_given() -> None:
    steps, epochs = small().checkpoint, small(checkpoint__every_epochs=1).checkpoint
    assert "the time of a step is unknown" in limit_notes(steps, 1, None)[0]
    # Who gives no limit has not thought of one.
    assert limit_notes(steps, 1, None, is_given=False) == []
    assert limit_notes(steps, None, None) == []
    for each in (None, 1.0):
        assert "unknown with checkpoint.every_epochs" in limit_notes(epochs, 1, each)[0]


def test_the_command_warns_of_a_short_limit_by_the_speed_of_a_gpu(tmp_path: Path) -> None:
    words = ("jobspec", "llama3-70b-fsdp", "--to", "slurm", "--hours", "0.25", "-o", tmp_path / "job.sbatch")
    code, out, err = finray(*words, "--gpu", "h100-80gb")
    assert code == 0, out + err
    assert "warning: the time limit of 15 min is shorter than the" in err
    code, _, err = finray(*words, "--step-seconds", "1", "--force")
    assert code == 0
    assert "warning" not in err
    assert "not compared" not in err


def test_a_model_and_a_data_set_are_enough() -> None:
    code, out, err = finray("jobspec", "--model", "llama3", "--dataset", "alpaca", "--to", "slurm")
    assert code == 0, err
    # Who gives no limit has not thought of one.
    assert "the time limit was not compared" not in err
    assert "#SBATCH --job-name=llama3-alpaca" in out
    assert "name: meta-llama/Llama-3.1-8B-Instruct" in out
    assert "source: yahma/alpaca-cleaned" in out
    for model, name in MODELS.items():
        assert overrides_for(model, None)[0] == name
        assert name in preset_names()
    for dataset in DATASETS:
        load_config("llama3-8b-lora", overrides_for(None, dataset)[1])
    code, _, err = finray("jobspec", "--model", "lama3")
    assert code == 2
    assert "did you mean `llama3`?" in err
    code, _, err = finray("jobspec", "llama3-8b-lora", "--to", "rayjobs")
    assert code == 2
    assert "slurm" in err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("runs", "/mnt/team/runs"),
        ("./runs/", "/mnt/team/runs"),
        ("/mnt/team/mine", "/mnt/team/mine"),
        ("file:///mnt/team/mine", "/mnt/team/mine"),
        ("s3://bucket/runs", "s3://bucket/runs"),
    ],
)
def test_runs_of_a_job_are_on_the_shared_directory_or_behind_a_url(given: str, expected: str) -> None:
    for takes_files in (True, False):
        spec = make_spec(small(run__output_dir=given), Machines(shared="/mnt/team/"), takes_files=takes_files)
        assert yaml.safe_load(spec.config_text)["run"]["output_dir"] == expected
        assert not [note for note in spec.notes if "output_dir" in note]


@pytest.mark.parametrize("given", ["/home/me/runs", "~/runs", "file:///home/me/runs", "/sharedstuff", "../runs"])
def test_runs_that_would_stay_in_a_container_are_refused_and_named_where_hosts_have_the_directory(given: str) -> None:
    config = small(run__output_dir=given)
    with pytest.raises(ConfigError, match="stay in the container") as caught:
        make_spec(config, Machines(), takes_files=True)
    assert caught.value.where == f"run.output_dir={given}"
    assert "/shared" in str(caught.value.repair)
    # Storage takes their place.
    storage = Machines(storage="s3://bucket/runs", claim=None)
    assert make_spec(config, storage, takes_files=True).output_dir == "s3://bucket/runs"
    # On Slurm, the hosts may share it by themselves.
    spec = make_spec(config, Machines())
    assert spec.output_dir == {"file:///home/me/runs": "/home/me/runs", "../runs": "/runs"}.get(given, given)
    assert [note for note in spec.notes if note.startswith(f"run.output_dir {spec.output_dir} is not in /shared")]


def test_what_lies_beside_the_shared_directory_is_not_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, beside = tmp_path / "shared", tmp_path / "sharedstuff"
    for folder in (shared, beside):
        folder.mkdir()
        for name in ("a.csv", "large.csv"):
            (folder / name).write_text("text\nx\n" * (1 if name == "a.csv" else 2**16))
    machines = Machines(shared=str(shared))

    def of(folder: Path, name: str) -> Config:
        return small(data__source=str(folder / name), model__name=str(folder / "model"), cluster__use_gpu=False)

    assert make_spec(of(shared, "a.csv"), machines, takes_files=True).files == {}
    assert make_spec(of(shared, "a.csv"), machines, takes_files=True).notes == ()
    assert make_spec(of(beside, "a.csv"), machines, takes_files=True).files == {"0-a.csv": "text\nx\n"}
    notes = make_spec(of(beside, "large.csv"), machines, takes_files=True).notes
    assert [note.partition(" is a")[0] for note in notes] == [
        f"data.source {beside}/large.csv",
        f"model.name {beside}/model",
    ]


def test_what_a_job_needs_besides_its_config_is_named() -> None:
    """Its file holds the config alone."""
    here = make_spec(small(data__source="data/train.jsonl", model__name="./model"), Machines()).notes
    assert [note.split()[0] for note in here] == ["data.source", "model.name", "no"], "no GPU is requested"
    assert len(make_spec(small(cluster__use_gpu=False), Machines()).notes) == 0
    assert len(make_spec(small(), Machines(gpus_per_node=1)).notes) == 0
    fields = {
        "parallel": {"strategy": "deepspeed", "deepspeed_config": "zero.json"},
        "model": {"name": "org/m", "chat_template": "chat.jinja"},
        "adapter": {"start_from": "runs/before/final"},
        "data": {"source": "org/d", "converter": "mine:rows", "eval_ratio": 0.1},
        "evaluation": {"metrics": ["mine:score", "exact_match"], "generate_rows": 2},
        "run": {"name": "r"},
        "cluster": {"use_gpu": False},
    }
    notes = make_spec(build_config(fields, source="x"), Machines()).notes
    wanted = ("parallel.deepspeed_config zero.json", "model.chat_template chat.jinja", "adapter.start_from runs/before")
    for start in (*wanted, "data.converter mine:rows is your own code", "evaluation.metrics mine:score is your own"):
        assert [note for note in notes if note.startswith(start)], (start, notes)
    assert len(notes) == 5
    shared = {**fields, "parallel": {"strategy": "deepspeed", "deepspeed_config": "/shared/zero.json"}}
    assert len(make_spec(build_config(shared, source="x"), Machines()).notes) == 4


def test_small_files_of_a_config_come_with_a_job_of_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {
        "my rows.jsonl": '{"prompt": "$1 for ${x}", "completion": "2  "}\n' * 3,
        "mine.py": "def score(answers, references):\n    return 0.0\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("large.jsonl").write_text("x" * 2**18)
    Path("private.jsonl").write_text('{"prompt": "hf_abcdefghijklmnopqrstuv"}')
    fields = {
        "model": {"name": "org/m"},
        "data": {"mix": [{"source": "my rows.jsonl"}, {"source": "private.jsonl"}], "eval_source": "large.jsonl"},
        "evaluation": {"metrics": ["mine:score", "other.part:score"], "generate_rows": 2},
        "run": {"name": "r"},
        "cluster": {"use_gpu": False},
    }
    spec = make_spec(build_config(fields, source="x"), Machines(), takes_files=True)
    assert sorted(spec.files.values()) == sorted(texts.values())
    wanted = build_config(yaml.safe_load(spec.config_text), source="x").plain()
    moved = wanted["data"]["mix"][0]["source"]
    assert spec.files[moved.removeprefix("/etc/finray/")] == texts["my rows.jsonl"]
    # What cannot come, or must not, is named as before.
    for start in (
        "data.source private.jsonl is a",
        "data.source large.jsonl is a",
        "evaluation.metrics other.part:score",
    ):
        assert [note for note in spec.notes if note.startswith(start)], (start, spec.notes)
    assert len(spec.notes) == 2 + 3

    manifest, job = check_rayjob(rayjob(spec))
    assert {name: text for name, text in manifest["data"].items() if name != "config.yaml"} == spec.files
    assert build_config(yaml.safe_load(manifest["data"]["config.yaml"]), source="x").plain() == wanted
    for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "PYTHONPATH", "value": "/etc/finray"} in container["env"]

    text = compose(spec)
    compose_spec.PyCompose.from_yaml(text.replace("restart: on-failure:3", "restart: on-failure"))
    plain = yaml.safe_load(text)
    for service in plain["services"].values():
        assert service["environment"]["PYTHONPATH"] == "/etc/finray"
        contents = {one["target"]: plain["configs"][one["source"]]["content"] for one in service["configs"]}
        for name, content in spec.files.items():
            assert contents[f"/etc/finray/{name}"].replace("$$", "$") == content
            assert "$" not in contents[f"/etc/finray/{name}"].replace("$$", "")
    # A job that has nothing but its config is as it was.
    assert make_spec(build_config(fields, source="x"), Machines()).files == {}


@pytest.mark.parametrize("mark", ["\r\n", "\r", "\x85", "\u2028", "\u2029", "\ufeff", "\x0b", "\U0001f600", "\t"])
def test_files_and_texts_of_a_job_are_those_of_this_machine_byte_for_byte(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of YAML take several characters for the end of a line, and each reader others."""
    monkeypatch.chdir(tmp_path)
    text = f"a\n  b{mark}c\n\n {mark}{mark}x{mark}"
    Path("rows.txt").write_bytes(text.encode())
    fields = {
        "model": {"name": "org/m", "chat_template": f"{{{{ messages }}}}{text}"},
        "data": {"source": "rows.txt", "input_template": text, "output_template": "x"},
    }
    spec = make_spec(build_config(fields, source="x"), Machines(), takes_files=True)
    manifest, _ = yaml.safe_load_all(rayjob(spec))
    assert manifest["data"]["0-rows.txt"].encode() == Path("rows.txt").read_bytes()
    plain = yaml.safe_load(compose(spec))
    contents = [one["content"].replace("$$", "$") for one in plain["configs"].values()]
    assert text in contents
    for written in (manifest["data"]["config.yaml"], contents[0], replicas(spec)):
        config = yaml.safe_load(written)
        assert config["model"]["chat_template"] == fields["model"]["chat_template"]
        assert config["data"]["input_template"] == text
    # YAML 1.1 ends a line there, and 1.2 does not.
    assert not set("\r\x85\u2028\u2029") & set(rayjob(spec) + compose(spec) + spec.config_text)


def test_a_chat_template_and_deepspeeds_json_are_in_the_config_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    template = "{% for m in messages %}\n  $1 {{ m }} \n{% endfor %}\n"
    Path("chat.jinja").write_text(template)
    Path("zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    fields = ("model.chat_template=chat.jinja", "parallel.strategy=deepspeed", "parallel.deepspeed_config=zero.json")
    code, out, err = finray("jobspec", "smollm2-lora", *fields, "--to", "slurm")
    assert (code, "must be at this path" in err) == (0, False), out + err
    Path("job.yaml").write_text(out.partition("<<'FINRAY_CONFIG'\n")[2].partition("FINRAY_CONFIG\n")[0])
    config = load_config(Path("job.yaml"))
    assert config.model.chat_template == template
    assert config.parallel.deepspeed_config == {"zero_optimization": {"stage": 3}}


def test_a_run_that_ends_with_an_exit_code_of_its_own_is_queued_again_by_it() -> None:
    def tests(**changes: Any) -> str:
        script = slurm(make_spec(preset("smollm2-lora", **changes), Machines()))
        return next(line for line in script.splitlines() if "-eq" in line and "code" in line)

    assert f"-eq {STOPPED} " in tests()
    assert "-eq 75 " in tests(**{"cluster.requeue_exit_code": 75})


# What none of them can be: a line, a word, a variable or a comment of its own, or a flag of another program.
EVIL = (
    *("a\ntouch /tmp/x", "a\rb", "a\x1bb", "a\x85b", "a\u2028b", "a\0b", "a b", "a;touch x", "a$(touch x)", "a\tb"),
    *(
        "a`touch x`",
        "$HOME",
        "--help",
        "-v",
        "a'b",
        'a"b',
        "a#b c",
        "",
        " ",
        "a\\b",
        "a&b",
        "a|b",
        "{{ a }}",
        "x" * 2000,
    ),
)
TEXTS = ("image", "gpu_type", "queue", "claim", "shared", "storage", "user", "secret")


def words(command: str) -> list[str]:
    """What a shell makes of it."""
    found = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    return found.stdout.split("\0")[:-1]


def texts_of(field: str, text: str) -> Machines:
    values: Any = (text, *"bcdefgh") if field == "hosts" else text
    return Machines(**{"hosts": tuple("abcdefgh"), field: values})


@pytest.mark.parametrize("field", [*TEXTS, "hosts"])
def test_an_option_cannot_become_a_line_or_a_word_of_its_own(field: str) -> None:
    for text in EVIL:
        with pytest.raises(ConfigError, match="cannot stand in a job specification") as caught:
            make_spec(small(), texts_of(field, text))
        assert caught.value.where == f"--{field.removesuffix('s').replace('_', '-')}"
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["/s; touch x", "/a 'b' \"c\"", "/a&b|c", "/a #b", "/{{ a }}", "/é\u00a0x", "/*?[x]~", "/-v"]
)
def test_a_directory_of_any_name_is_one_word_in_every_form(text: str, tmp_path: Path) -> None:
    machines = Machines(hosts=tuple("abcdefgh"), shared=text)
    spec = make_spec(small(), machines)
    (option,) = (
        one
        for one in yaml.safe_load(ray_cluster(spec))["docker"]["run_options"]
        if one.strip("'").startswith("--volume=/")
    )
    # As Ray joins them, and as a shell reads them.
    assert words(option) == [f"--volume={text}:{text}"]
    services = yaml.safe_load(compose(spec))["services"]
    assert services["job"]["volumes"] == [f"{text}:{text}"]
    _, job = check_rayjob(rayjob(spec))
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}["shared"] == text
    check_script(slurm(spec), tmp_path)
    # Neither comments nor the rest has another line because of it.
    for form in (compose, ray_cluster, slurm, replicas, rayjob):
        plain = form(make_spec(small(), Machines(hosts=tuple("abcdefgh"))))
        if form is not slurm or "HF_HOME" not in plain:
            assert abs(len(form(spec).splitlines()) - len(plain.splitlines())) <= 4


@pytest.mark.parametrize("hours", ["inf", "nan", "1e400", "-1", "0", "1e12", "-inf", "soon"])
@pytest.mark.parametrize("form", ["slurm", "rayjob"])
def test_a_limit_that_is_none_is_refused(form: str, hours: str) -> None:
    code, out, err = finray("jobspec", "smollm2-lora", "--to", form, f"--hours={hours}")
    assert (code, out) == (2, "")
    assert "hours" in err
    assert "bug" not in err
    for given in (float("inf"), float("nan"), -1.0, 0.0, 1e12):
        with pytest.raises(ConfigError, match="no time limit"):
            make_spec(small(), Machines(hours=given))
