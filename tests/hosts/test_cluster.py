"""`finray cluster` on three hosts: up, join, status, a training over all of them, every socket, down."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from finray.checkpoint import CheckpointStore
from finray.runtime import nodes
from finray.tracking.starts import read_starts
from tests.hosts import kills
from tests.support import gated, hosts, runs, tiny

TOKEN = "/tmp/home/.ray/auth_token"
# What a small node needs; the rest is as a user has it.
SMALL = ("--", "--num-cpus=1", "--object-store-memory=100000000")
UP = ("cluster", "up", *SMALL)
# What `finray cluster` says where a machine has too much else to do for Ray.
BUSY = re.compile("Ray did not start|Ray cannot be reached|the head of the Ray cluster does not answer")


@pytest.fixture(scope="module")
def cluster(bed: hosts.Bed) -> Iterator[list[hosts.Host]]:
    """Three hosts of one cluster; the first is its head."""
    made = [bed.host() for _ in range(3)]
    bystander = made[0].start("sleep", "4005")
    done = patiently(made[0], *UP)
    assert done.code == 0, done.out + done.err
    assert f"finray cluster join {made[0].ip}:6379" in done.out
    for one in made[1:]:
        one.write(TOKEN, made[0].read(TOKEN), mode=0o600)
        done = patiently(one, "cluster", "join", made[0].ip, *SMALL)
        assert done.code == 0, done.out + done.err
    yield made
    assert bystander.poll() is None


def patiently(host: hosts.Host, *words: object, env: dict[str, str] | None = None) -> hosts.Done:
    """`finray ...` on a host; again, three times at most, where the machine was too busy for Ray."""
    for _ in range(4):
        done = host.finray(*words, env=env)
        if done.code == 0 or not BUSY.search(done.out + done.err):
            break
    return done


def status(host: hosts.Host) -> dict[str, Any]:
    done = patiently(host, "cluster", "status", "--json")
    assert done.code == 0, done.out + done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def commands(of: Iterable[hosts.Host]) -> list[str]:
    """The command lines of what runs on hosts."""
    found = []
    for one in (one for host in of for one in host.processes()):
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(one.cmdline()))
    return found


def test_the_token_is_made_and_is_the_users_alone(cluster: list[hosts.Host]) -> None:
    assert cluster[0].check("stat", "--format=%a", TOKEN) == "600\n"
    token = cluster[0].read(TOKEN).decode()
    assert len(token) == 64
    assert not [one for one in commands(cluster) if token in one]
    for host in cluster:
        assert token not in host.check("cat", "/tmp/finray-cluster-0/ray.log", "/tmp/finray-cluster-0/node.json")


def test_the_status_says_what_the_nodes_are(cluster: list[hosts.Host]) -> None:
    found = status(cluster[1])
    assert [node["name"] for node in found["nodes"]] == ["h1", "h2", "h3"]
    assert [node["ip"] for node in found["nodes"]] == [host.ip for host in cluster]
    assert [node["is_head"] for node in found["nodes"]] == [True, False, False]
    assert [node["total"]["CPU"] for node in found["nodes"]] == [1, 1, 1]
    assert len({json.dumps(node["versions"]) for node in found["nodes"]}) == 1
    assert found["complaints"] == []
    done = cluster[2].finray("cluster", "status")
    assert "3 nodes with 3 CPUs, 0 GPUs at 10.77.0.11:6379" in done.out
    again = cluster[0].finray(*UP)
    assert again.code == 2
    assert "this machine is already the head of a cluster" in again.out + again.err


# docs/guide/cluster.md has them.
NAMED = {*range(6379, 6385), *range(11000, 12000)}
PROBE = """
import json, sys, urllib.error, urllib.request
import grpc
GRPC = {6379: "NodeInfoGcsService/GetAllNodeInfo", 6380: "NodeManagerService/GetNodeStats"}
GRPC |= {6381: "ObjectManagerService/Pull", 6382: "ReporterService/GetTraceback"}
found = []
for ip, port, tokens in json.loads(sys.argv[1]):
    for token in tokens:
        said = {} if token is None else {"authorization": f"Bearer {token}"}
        if port in (6383, 6384):
            try:
                request = urllib.request.Request(f"http://{ip}:{port}/", headers=said)
                answer = urllib.request.urlopen(request, timeout=30)
                found.append([ip, port, token, str(answer.status)])
            except urllib.error.HTTPError as error:
                found.append([ip, port, token, str(error.code)])
            except OSError:
                found.append([ip, port, token, "no answer"])
            continue
        method = GRPC.get(port, "CoreWorkerService/GetCoreWorkerStats" if 11000 <= port <= 11999 else "nothing")
        with grpc.insecure_channel(f"{ip}:{port}") as channel:
            call = channel.unary_unary(f"/ray.rpc.{method}", None, None)
            try:
                call(b"", metadata=list(said.items()), timeout=30)
                found.append([ip, port, token, "answered"])
            except grpc.RpcError as error:
                found.append([ip, port, token, error.code().name])
print(json.dumps(found))
"""


def open_to_all(host: hosts.Host) -> dict[int, str]:
    """The ports on which a host listens, but for loopback, and the command of whoever does so."""
    found = {}
    for line in host.check("ss", "-Hltnp").splitlines():
        address, _, port = line.split()[3].rpartition(":")
        if not address.startswith("127."):
            named = re.search(r"pid=(\d+)", line)
            # A process may have ended since.
            with suppress(FileNotFoundError, ProcessLookupError):
                command = host.read(f"/proc/{named[1]}/cmdline") if named else b""
                found[int(port)] = command.replace(b"\0", b" ").decode()
    return found


def require_refused(cluster: list[hosts.Host], ports: dict[str, set[int]]) -> None:
    """See that ports, by host, refuse whoever has no token or another one."""
    right = cluster[0].read(TOKEN).decode()
    asked: list[Any] = [[host.ip, port, [None, "0" * 64]] for host in cluster for port in sorted(ports[host.name])]
    # The negative control: with the token, the same questions are answered.
    asked += [[cluster[0].ip, port, [right]] for port in (6379, 6380, 6384)]
    answers = json.loads(cluster[1].check(sys.executable, "-c", PROBE, json.dumps(asked)))
    refused, silent = {"401", "403", "UNAUTHENTICATED"}, {"UNAVAILABLE", "no answer"}
    assert [one for one in answers if one[2] == right and one[3] in {*refused, "no answer"}] == []
    # A worker of Ray's may have ended meanwhile: then nobody listens there any more.
    listening = {(host.ip, port) for host in cluster for port in open_to_all(host)}
    bad = [one for one in answers if one[2] != right and one[3] not in refused]
    assert [one for one in bad if one[3] not in silent or (one[0], one[1]) in listening] == []


def test_every_socket_is_on_loopback_or_refuses_without_the_token(cluster: list[hosts.Host]) -> None:
    ports = {host.name: set(open_to_all(host)) for host in cluster}
    for name, found in ports.items():
        assert found <= NAMED, f"{name} listens where nobody said"
        assert found >= {6380, 6381, 6382, 6383, 6384}
    require_refused(cluster, ports)


def test_the_doctor_asks_all_nodes(cluster: list[hosts.Host], bed: hosts.Bed) -> None:
    done = cluster[1].finray("doctor", "--cluster", "--storage", bed.shared / "runs", "--json", timeout=500)
    found = json.loads(done.out)
    assert sorted(found["machines"]) == ["h1", "h2", "h3"]
    assert [one for one in found["findings"] if one["level"] == "problem"] == []
    assert done.code == 0
    said = {(one["what"], one["node"]) for one in found["findings"]}
    assert {("bandwidth", "h1"), ("bandwidth", "h2"), ("bandwidth", "h3"), ("clocks", ""), ("storage", "")} <= said
    assert "3 ranks" in next(one["text"] for one in found["findings"] if one["what"] == "all-reduce (gloo)")
    assert [*(bed.shared / "runs").iterdir()] == []


def test_the_doctor_names_the_nodes_whose_storage_is_not_that_of_the_others(cluster: list[hosts.Host]) -> None:
    """The same name on every host, and a disk of its own on each."""
    done = cluster[1].finray("doctor", "--cluster", "--storage", "/tmp/not-shared", "--json", timeout=500)
    assert done.code == 2, done.out + done.err
    found = [one for one in json.loads(done.out)["findings"] if one["level"] == "problem"]
    assert [(one["what"], one["node"]) for one in found] == [("storage", name) for name in ("h1", "h2", "h3")]
    assert all("does not see in /tmp/not-shared what" in one["text"] for one in found)
    assert "h1" not in found[0]["text"]
    assert "h2, h3 wrote" in found[0]["text"]


def test_a_run_opens_nothing_but_torchs_sockets_and_the_one_of_its_records(
    cluster: list[hosts.Host], bed: hosts.Bed, tokenizer: object
) -> None:
    """torch's cannot ask for a token. The one of the records does: tests/unit/runtime/test_progress.py."""
    head, output = cluster[0], bed.shared / "open"
    tiny.save_model("llama", bed.shared / "open-model", tokenizer)
    own: runs.Plain = {"cluster.address": f"{head.ip}:6379", "cluster.num_workers": 3, "train.max_steps": 2}
    plain = runs.tiny_run(bed.shared / "open-model", tiny.write_chat_rows(bed.shared, 24), output, own)
    config = runs.write_config(gated.gated(plain, output), bed.shared / "open.yaml")
    gated.allow(output, 1)
    training = head.start_finray("train", config, cwd=hosts.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    hosts.wait_until(lambda: training.poll() is not None or runs.values(output / "run", "step"), "a step", timeout=300)
    assert training.poll() is None
    found = {host.name: open_to_all(host) for host in cluster}
    others = {name: [who for port, who in ports.items() if port not in NAMED] for name, ports in found.items()}
    require_refused(cluster, {name: NAMED & set(ports) for name, ports in found.items()})
    gated.allow(output, 2)
    assert training.wait(300) == 0
    print(others)
    assert [one for one in others["h1"] if "RayTrainWorker" not in one and "finray train" not in one] == []
    assert [one for name in ("h2", "h3") for one in others[name] if "RayTrainWorker" not in one] == []
    assert any("RayTrainWorker" in one for ports in others.values() for one in ports)


def test_a_run_has_a_checkpoint_of_the_time_when_a_machine_goes(
    cluster: list[hosts.Host], bed: hosts.Bed, tokenizer: object
) -> None:
    """Two workers of three: the third host takes the place of the second, which goes."""
    head, output = cluster[0], bed.shared / "going"
    tiny.save_model("llama", bed.shared / "going-model", tokenizer)
    own: runs.Plain = {"cluster.address": f"{head.ip}:6379", "cluster.num_workers": 2, "train.max_steps": 9}
    own["checkpoint.every_steps"] = 100
    plain = runs.tiny_run(bed.shared / "going-model", tiny.write_chat_rows(bed.shared, 24), output, own)
    config, run_dir = runs.write_config(gated.gated(plain, output), bed.shared / "going.yaml"), output / "run"
    gated.allow(output, 3)
    with (bed.shared / "going.log").open("w") as stream:
        training = head.start_finray("train", config, cwd=hosts.ROOT, stdout=stream, stderr=stream)

    def said() -> str:
        return (bed.shared / "going.log").read_text()

    hosts.wait_until(
        lambda: len(runs.values(run_dir, "step")) == 3 or training.poll() is not None, "steps", timeout=300
    )
    assert training.poll() is None, said()
    goes = next(one for one in cluster[1:] if one.name in {who["host"] for who in runs.read_workers(run_dir)})
    down = goes.start_finray("cluster", "down", "--within", 60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    hosts.wait_until(lambda: f"{goes.name} is about to be removed" in said(), "the run hears of it")
    # A step that has begun does not hear of it, the next one does.
    gated.allow(output, 5)
    hosts.wait_until(lambda: CheckpointStore(run_dir).steps() in ([4], [5]), "a checkpoint is saved")
    (saved,) = CheckpointStore(run_dir).steps()
    told, _ = down.communicate(timeout=kills.PATIENCE_S)
    assert "the runs that use this machine have 60 s to save a checkpoint" in told
    assert down.returncode == 0
    assert not goes.processes("ray.scripts")
    gated.allow(output, 9)
    assert training.wait(300) == 0, said()
    assert [one.header.step for one in read_starts(run_dir)] == [0, saved]
    assert goes.name not in {one["host"] for one in runs.read_workers(run_dir)}
    done = patiently(goes, "cluster", "join", head.ip, *SMALL)
    assert done.code == 0, done.out + done.err


TASK = """
import socket
from finray.tasks.causal_lm import CausalLM

class Told(CausalLM):
    def outputs(self, batch):
        print(f"the task is on {socket.gethostname()}", flush=True)
        return super().outputs(batch)
"""


def test_a_submitted_run_has_its_code_on_all_machines(
    cluster: list[hosts.Host], bed: hosts.Bed, tiny_model_dir: Path, tokenizer: object
) -> None:
    """It lies on the head alone, where the command is given."""
    tiny.save_model("llama", bed.shared / "submitted" / "model", tokenizer)
    rows = tiny.write_chat_rows(bed.shared / "submitted", 24)
    changes = {"train.max_steps": 2, "cluster.num_workers": 3, "model.task": "mine.task:Told"}
    plain = runs.tiny_run(bed.shared / "submitted" / "model", rows, bed.shared / "submitted", changes)
    runs.write_config(plain, bed.shared / "submitted" / "run.yaml")
    cluster[0].write("/tmp/home/code/mine/task.py", TASK.encode())
    done = cluster[0].finray("submit", bed.shared / "submitted" / "run.yaml", "--code", "code", timeout=500)
    assert done.code == 0, done.out + done.err
    run_dir = bed.shared / "submitted" / "run"
    # Each rank is where the run says that it is.
    workers = runs.read_workers(run_dir)
    assert {one["host"] for one in workers} == {host.name for host in cluster}
    for one in workers:
        said = (run_dir / "logs" / f"rank-{one['rank']:05d}.log").read_text().splitlines()
        assert f"the task is on {one['host']}" in said


def test_replicas_on_three_machines_answer_as_one_does(
    cluster: list[hosts.Host], bed: hosts.Bed, tokenizer: object
) -> None:
    head, told = cluster[0], []
    tiny.save_model("llama", bed.shared / "evaluated", tokenizer)
    rows = bed.shared / "asked.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"the cat {word}", "completion": "x"}) + "\n" for word in tiny.WORDS))
    # One CPU on each machine: three replicas have no place but on all three.
    for name, replicas in (("one", 1), ("three", 3)):
        own = ("--engine", "transformers", "--batch-size", 2, "--max-new-tokens", 4, "--output", bed.shared / name)
        # In bf16 a sum in another order may choose another token.
        own = (*own, "train.precision=fp32")
        words = (bed.shared / "evaluated", f"cluster.address={head.ip}:6379", "--file", rows, "--replicas", replicas)
        done = head.finray("evaluate", *words, *own)
        assert done.code == 0, done.out + done.err
        lines = (bed.shared / name / "predictions.jsonl").read_text().splitlines()
        told.append([(one["row"], one["prompt"], *one["answers"].values()) for one in map(json.loads, lines)])
    assert told[0] == told[1]
    assert len({answer for *_, answer in told[0]}) > 1


def test_down_ends_what_was_started_here_and_nothing_else(cluster: list[hosts.Host]) -> None:
    h1, _, h3 = cluster
    # Somebody else's process looks like Ray's.
    other = h3.start("bash", "-c", "exec -a raylet sleep 4006")
    assert h3.processes("/raylet")
    done = h3.finray("cluster", "down")
    assert done.code == 0, done.out + done.err
    assert commands([h3]) == ["raylet 4006"]
    assert other.poll() is None
    assert h3.finray("cluster", "down").out == "no cluster started by `finray cluster` runs on this machine\n"
    lost = hosts.wait_until(lambda: (found := status(h1))["lost"] and found, "the head knows")
    assert [node["name"] for node in lost["nodes"]] == ["h1", "h2"]
    assert any("h3 (10.77.0.13) is lost or has left" in one for one in lost["complaints"])


def test_a_node_that_cannot_join_says_why(cluster: list[hosts.Host]) -> None:
    h1, _, h3 = cluster
    h3.finray("cluster", "down")
    assert not h3.processes("ray.scripts")
    joined = ("cluster", "join", h1.ip, *SMALL)
    # Another torch: found by its metadata, as pip finds it.
    h3.write("/tmp/home/other/torch-1.0.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    path = f"/tmp/home/other:{hosts._pythonpath()}"
    done = h3.finray(*joined, env={"PYTHONPATH": path})
    assert done.code == 2
    assert "torch 1.0.0 (the head has 2." in done.out + done.err
    assert "install the head's versions here" in done.out + done.err
    token = h3.read(TOKEN)
    h3.write(TOKEN, b"0" * 64, mode=0o600)
    done = h3.finray(*joined)
    assert done.code == 2
    assert "the one that was sent is wrong" in done.out + done.err
    h3.write(TOKEN, token, mode=0o600)
    done = h3.finray("cluster", "join", "10.77.0.99")
    assert done.code == 2
    assert "no answer at 10.77.0.99:6379" in done.out + done.err
    # And one that joins with other versions all the same is complained of.
    done = patiently(h3, "cluster", "join", h1.ip, "--any-version", *SMALL, env={"PYTHONPATH": path})
    assert done.code == 0, done.out + done.err
    assert "h3 has torch 1.0.0" in " ".join(status(h1)["complaints"])


def test_a_node_that_does_not_answer_is_given_up_sooner_than_by_ray(cluster: list[hosts.Host], bed: hosts.Bed) -> None:
    (h1, _, h3), notes = cluster, bed.shared / "nodes"

    def noted(change: str) -> bool:
        return notes.exists() and f"{h3.ip} {change}" in notes.read_text()

    watching = h1.start(sys.executable, "-c", kills.NOTES, f"{h1.ip}:6379", notes)
    hosts.wait_until(lambda: noted("listed"), "it is listed")
    with h3.partitioned():
        began = time.monotonic()
        hosts.wait_until(lambda: noted("lost"), "it is given up", timeout=kills.PATIENCE_S)
        seconds = time.monotonic() - began
    watching.kill()
    print(f"given up after {seconds:.1f} s: 15 s on an idle machine, and 65 s by Ray's own values")
    assert any(nodes.HEALTH_ENV.items() <= one.environ().items() for one in h1.processes("gcs_server"))


def test_no_process_is_left_when_all_are_down(cluster: list[hosts.Host]) -> None:
    for host in reversed(cluster):
        done = host.finray("cluster", "down")
        assert done.code == 0, done.out + done.err
    # A part of Ray's dashboard looks once a second whether its parent is there.
    hosts.wait_until(lambda: {*commands(cluster)} <= {"raylet 4006", "sleep 4005"}, "what Ray started has ended")
    assert "sleep 4005" in commands(cluster)
