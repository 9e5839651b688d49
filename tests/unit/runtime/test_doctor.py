"""What `finray doctor` makes of what it is told, and what it tells of this machine."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.runtime import doctor, probe
from finray.runtime.doctor import ClusterFinding
from tests.support import runs

pytestmark = pytest.mark.long

GIB = 2**30
BUSY = "other programs keep this machine busy: its load is 6.3 on 4 cores, where 4 threads wait for each other, "
BUSY += "and may get less done than one"
NO_COMPILER = "torch's, because there is no C compiler: training in bf16 takes a tenth more time"


def facts(**changed: object) -> probe.NodeFacts:
    known: dict[str, object] = {
        "name": "m1",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "gpus": ["NVIDIA H100, 570.1", "NVIDIA H100, 570.1"],
        "cuda": "12.8",
        "usable_gpus": 2,
        "torch_error": None,
        "free_disk": {"/runs": 400 * GIB, "/dev/shm": 60 * GIB},
        "open_sockets": [],
    }
    return probe.NodeFacts(**{**known, **changed})  # type: ignore[arg-type]


def bad(found: list[ClusterFinding]) -> list[tuple[str, str, str]]:
    assert all(one.repair for one in found if one.level != "good")
    return [(one.level, one.what, one.text) for one in found if one.level != "good"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"gpus": None, "usable_gpus": 0}, []),
        # A machine that trains on GPUs, one with a core to spare, and one without.
        ({"load": 40.0, "cores": 4}, []),
        ({"gpus": None, "usable_gpus": 0, "load": 3.9, "cores": 4}, []),
        ({"gpus": None, "usable_gpus": 0, "load": 6.26, "cores": 4}, [("warning", "load", BUSY)]),
        # Without the instructions a compiler would not help.
        ({"gpus": None, "usable_gpus": 0, "missing_for_kernels": "CPU"}, []),
        ({"gpus": None, "usable_gpus": 0, "missing_for_kernels": "compiler"}, [("warning", "attention", NO_COMPILER)]),
        ({"usable_gpus": 0}, [("problem", "GPUs", "torch (CUDA 12.8) can use 0 of 2: NVIDIA H100, 570.1")]),
        ({"cuda": None, "usable_gpus": 0}, [("problem", "GPUs", "2 GPUs, but torch is built without CUDA")]),
        ({"torch_error": "no libcudart"}, [("problem", "torch", "cannot be imported: no libcudart")]),
        (
            {"free_disk": {"/runs": 2 * GIB, "/dev/shm": GIB // 16}},
            [("warning", "free disk", "2.0 GiB in /runs"), ("warning", "free disk", "0.1 GiB in /dev/shm")],
        ),
        (
            {"open_sockets": ["0.0.0.0:8265 (HTTP 200)"]},
            [("problem", "open ports", "0.0.0.0:8265 (HTTP 200) answers without a token")],
        ),
    ],
)
def test_a_machine_is_judged_by_its_facts(changed: dict[str, object], said: list[tuple[str, str, str]]) -> None:
    assert bad(doctor.judged(facts(**changed))) == said


def test_clocks_are_judged_by_the_shortest_round_trip() -> None:
    # An answer that took long says little of the clock; the second says all.
    good = {"m1": [(100.0, 108.0, 110.0), (200.0, 200.01, 200.02)], "m2": [(300.0, 304.0, 308.0)]}
    assert bad(doctor.judged_clocks(good)) == []
    late = {**good, "m3": [(400.0, 393.01, 400.02)]}
    (found,) = [one for one in doctor.judged_clocks(late) if one.level != "good"]
    assert (found.node, found.text) == ("m3", "-7.0 s from this machine's")


def test_links_storage_and_sums_are_judged() -> None:
    links = {("m1", "m2"): 11.0, ("m2", "m1"): 0.94}
    assert bad(doctor.judged_bandwidth(links)) == [("warning", "bandwidth", "0.9 Gbit/s to m1, 10 are recommended")]
    assert bad(doctor.judged_storage("/runs", {"m1": None, "m2": None}, {"m1": [], "m2": []})) == []
    found = doctor.judged_storage("/runs", {"m1": None, "m2": "read-only"}, {"m1": ["m2"], "m2": ["m1", "m2"]})
    assert [(one.node, one.text) for one in found] == [
        ("m2", "/runs cannot be written: read-only"),
        ("m2", "does not see in /runs what m1 wrote"),
    ]
    ranks = [{"good": True, "gbit_per_s": 3.0}, {"good": True, "gbit_per_s": 3.2}]
    assert doctor.judged_reduce("gloo", ranks).text == "2 ranks, 3.1 Gbit/s"
    assert doctor.judged_reduce("gloo", [*ranks, {"error": "refused"}]).text == "1 of 3 ranks failed: refused"
    assert doctor.judged_reduce("nccl", [{"good": False, "gbit_per_s": 3.0}]).level == "problem"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([0, 0], {"gloo": [[0], [1]]}),
        ([2, 0], {"gloo": [[0], [1]]}),
        # Workers with GPUs use Gloo as well, for what is in CPU memory.
        ([2, 1], {"nccl": [[0, 1], [2]], "gloo": [[0], [1]]}),
        ([4], {"nccl": [[0, 1, 2, 3]]}),
        ([1], {"gloo": [[0, 1]]}),
    ],
)
def test_what_gpus_and_cpus_reduce(gpus: list[int], expected: dict[str, list[list[int]]]) -> None:
    asked: dict[str, list[list[int]]] = {}

    def call(method: str, arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        if method == "free_port":
            return dict.fromkeys(arguments, 7)
        for ranks, _, _, port, backend, _ in arguments.values():
            assert port == 7
            asked.setdefault(backend, []).append(ranks)
        return {name: [{"good": True, "gbit_per_s": 1.0}] * len(one[0]) for name, one in arguments.items()}

    names = [f"h{number}" for number in range(len(gpus))]
    facts: Any = {name: SimpleNamespace(usable_gpus=count) for name, count in zip(names, gpus, strict=True)}
    found = doctor._reduce(names, facts, dict.fromkeys(names, "10.0.0.1"), call)
    assert asked == expected
    assert [one.what for one in found] == [f"all-reduce ({backend})" for backend in expected]
    differ = doctor.judged_versions({"m1": {"torch": "2.13.0"}, "m2": {"torch": "2.12.0"}})
    assert [(one.node, one.text) for one in differ] == [("m2", "torch 2.12.0 (the head has 2.13.0)")]


def test_a_server_that_asks_for_no_token_is_found() -> None:
    class Answers(BaseHTTPRequestHandler):
        code = 200

        def do_GET(self) -> None:
            self.send_response(self.code)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = ("127.0.0.1", server.server_port)
        assert probe.open_sockets([here]) == [f"127.0.0.1:{server.server_port} (HTTP 200)"]
        Answers.code = 401
        assert probe.open_sockets([here]) == []
        server.shutdown()


def test_a_head_that_asks_for_no_token_is_found() -> None:
    """Its dashboard may be on loopback, and whoever reaches the head runs code on all nodes all the same."""
    import grpc

    asks = [False]

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        if asks[0]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return b""

    server = grpc.server(ThreadPoolExecutor(2))
    methods = {"GetAllNodeInfo": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        method = "NodeInfoGcsService/GetAllNodeInfo"
        assert probe.open_sockets([("127.0.0.1", port)]) == [f"127.0.0.1:{port} (gRPC {method})"]
        asks[0] = True
        assert probe.open_sockets([("127.0.0.1", port)]) == []
    finally:
        server.stop(None)


def test_this_machine_is_looked_at_and_a_report_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted_secret_0123456789")
    # Other tests have a Ray on this machine.
    monkeypatch.setattr(probe, "listening", lambda: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    defects = tmp_path / "cache" / "finray" / "defects"
    defects.mkdir(parents=True)
    (defects / "finray-0.txt").write_text("boom\nit was hf_planted_secret_0123456789\n")
    report = tmp_path / "report.md"
    code, out, err = runs.finray("doctor", "--storage", tmp_path / "runs", "--report", report, "--json")
    found = json.loads(out)
    assert code == 0, (found["findings"], err)
    assert found["fit"]
    assert {"versions", "GPUs", "free disk", "open ports", "storage", "all-reduce (gloo)"} <= {
        one["what"] for one in found["findings"]
    }
    assert "2 ranks" in next(one["text"] for one in found["findings"] if one["what"].startswith("all-reduce"))
    assert [*(tmp_path / "runs").iterdir()] == []
    text = report.read_text()
    assert "boom" in text
    assert "hf_planted" not in text
    # The negative control: storage that cannot be written is a problem, and the exit code says so.
    (tmp_path / "file").write_text("")
    assert probe.Probe().write(str(tmp_path / "file" / "runs"), "mark") is not None
    problem = doctor.Diagnosis(["m1"], doctor.judged_storage("/runs", {"m1": "read-only"}, {"m1": ["m1"]}))
    monkeypatch.setattr(doctor, "machine", lambda storage: problem)
    code, out, _ = runs.finray("doctor")
    assert code == 2
    assert "X  storage: m1: /runs cannot be written: read-only" in out
