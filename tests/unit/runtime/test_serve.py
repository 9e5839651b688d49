"""What `finray serve` asks of Ray, and how it ends, with a stand-in for Ray and for Ray Serve."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import ClusterError, ModelError
from finray.evaluation import engines
from finray.models.artifacts import Artifact
from finray.runtime import serve as module
from finray.runtime.signals import Interrupted
from finray.serving.models import ServePlan, ServeSettings


@pytest.mark.parametrize(
    ("engine", "has_vllm", "is_classifier", "gpus", "expected"),
    [
        ("vllm", True, False, 4, 4),
        ("auto", True, False, 4, 4),
        ("auto", False, False, 4, 1),
        ("transformers", True, False, 4, 1),
        ("auto", True, True, 4, 1),
        ("vllm", True, False, 1, 1),
        ("auto", True, False, 0, 0),
        ("transformers", False, False, 0, 0),
    ],
)
def test_vllm_gets_all_gpus_of_the_machine_and_another_engine_one(
    monkeypatch: pytest.MonkeyPatch, engine: str, has_vllm: bool, is_classifier: bool, gpus: int, expected: int
) -> None:
    import ray.serve

    class Asked(ClusterError):
        pass

    asked: dict[str, Any] = {}

    def deployment(**options: Any) -> Any:
        asked.update(options["ray_actor_options"])
        raise Asked("nothing is started in this test")

    monkeypatch.setattr(engines, "find_spec", lambda name: name if has_vllm else None)
    monkeypatch.setattr(ray.serve, "start", lambda **_: None)
    monkeypatch.setattr(ray.serve, "deployment", deployment)
    resources = {"CPU": 12.0, "memory": 1e9} | ({"GPU": float(gpus)} if gpus else {})
    stand_in = SimpleNamespace(cluster_resources=lambda: resources, exceptions=ray.exceptions)
    found = ServePlan("mine", Artifact(None, None, {}), is_classifier, ())  # type: ignore[arg-type]
    quiet: dict[str, Any] = {"notify": lambda line: None, "ready": lambda names: None}
    with pytest.raises(Asked):
        module._serve(stand_in, ServeSettings("m", engine=engine), found, host="127.0.0.1", port=1, grace=1, **quiet)
    assert asked == {"num_cpus": 12, "num_gpus": expected}


@pytest.mark.parametrize(
    ("replicas", "drained"),
    [
        # It answers requests already, although the command waits for Ray Serve to say so.
        ({"RUNNING": 1}, [7.0]),
        # It still loads the model.
        ({"STARTING": 1}, []),
        (None, []),
    ],
)
def test_a_signal_during_the_start_lets_answers_end_where_there_may_be_any(
    monkeypatch: pytest.MonkeyPatch, replicas: dict[str, int] | None, drained: list[float]
) -> None:
    import ray.serve

    def interrupted(*_: Any, **__: Any) -> Any:
        raise Interrupted(signal.SIGTERM)

    found: list[float] = []
    drain = SimpleNamespace(remote=lambda grace: SimpleNamespace(result=lambda timeout_s: found.append(grace) is None))
    deployments = {"models": SimpleNamespace(replica_states=replicas)}
    applications = {} if replicas is None else {"finray": SimpleNamespace(deployments=deployments)}
    monkeypatch.setattr(ray.serve, "start", lambda **_: None)
    monkeypatch.setattr(ray.serve, "ingress", lambda: lambda kind: kind)
    bound = SimpleNamespace(bind=lambda settings: None)
    monkeypatch.setattr(ray.serve, "deployment", lambda **_: lambda kind: bound)
    monkeypatch.setattr(ray.serve, "run", interrupted)
    monkeypatch.setattr(ray.serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: SimpleNamespace(drain=drain))
    stand_in = SimpleNamespace(cluster_resources=lambda: {"CPU": 1.0}, exceptions=ray.exceptions)
    lines: list[str] = []
    options: dict[str, Any] = {"notify": lines.append, "ready": pytest.fail}
    model = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        module._serve(stand_in, ServeSettings("m"), model, host="127.0.0.1", port=1, grace=7.0, **options)
    assert found == drained
    assert ["stopping: running answers have 7 s" in line for line in lines] == [True] * len(drained)


@pytest.mark.parametrize("kind", ["TimeoutError", "RayActorError", "ReplicaUnavailableError"])
def test_a_replica_that_is_lost_while_answers_end_does_not_make_a_stop_an_error(kind: str) -> None:
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import ReplicaUnavailableError

    errors = (TimeoutError(), RayActorError(), ReplicaUnavailableError("x"))

    def fail(timeout_s: float) -> None:
        raise next(error for error in errors if type(error).__name__ == kind)

    drain = SimpleNamespace(remote=lambda grace: SimpleNamespace(result=fail))
    found = SimpleNamespace(deployments={"models": SimpleNamespace(replica_states={"RUNNING": 1})})
    stand_in = SimpleNamespace(
        status=lambda: SimpleNamespace(applications={"finray": found}),
        get_app_handle=lambda name: SimpleNamespace(drain=drain),
    )
    lines: list[str] = []
    module._drain(stand_in, 7.0, lines.append)
    assert lines[1:] == ["some answers did not finish in that time"]


def test_an_error_of_ray_serve_is_one_of_finrays_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.serve
    from ray.serve.exceptions import ReplicaUnavailableError

    def fail(**_: Any) -> None:
        raise ReplicaUnavailableError("x")

    monkeypatch.setattr(ray.serve, "start", fail)
    found = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]
    options: dict[str, Any] = {"notify": lambda line: None, "ready": pytest.fail}
    with pytest.raises(ClusterError, match="Ray Serve failed: Replica x is no longer available"):
        module._serve(ray, ServeSettings("m"), found, host="127.0.0.1", port=1, grace=7.0, **options)


def stand_in_serve(monkeypatch: pytest.MonkeyPatch, *, state: dict[str, Any], signals: int) -> Any:
    """Ray Serve with a replica in this state, and a command that then gets so many signals."""
    import ray.serve

    left = [signals]

    def interrupted(*_: Any) -> Any:
        raise Interrupted(signal.SIGINT)

    def drained(timeout_s: float) -> bool:
        left[0] -= 1
        if left[0]:
            raise Interrupted(signal.SIGINT)
        return True

    handle = SimpleNamespace(state=SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda: state)))
    running = SimpleNamespace(deployments={"models": SimpleNamespace(replica_states={"RUNNING": 1})})
    drain = SimpleNamespace(remote=lambda grace: SimpleNamespace(result=drained))
    monkeypatch.setattr(ray.serve, "start", lambda **_: None)
    monkeypatch.setattr(ray.serve, "ingress", lambda: lambda kind: kind)
    monkeypatch.setattr(ray.serve, "deployment", lambda **_: lambda kind: SimpleNamespace(bind=lambda settings: None))
    monkeypatch.setattr(ray.serve, "run", lambda *_, **__: handle)
    monkeypatch.setattr(ray.serve, "status", lambda: SimpleNamespace(applications={"finray": running}))
    monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: SimpleNamespace(drain=drain))
    monkeypatch.setattr(module.time, "sleep", interrupted)
    return SimpleNamespace(cluster_resources=lambda: {"CPU": 1.0}, exceptions=ray.exceptions)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_that_was_stopped_on_purpose_has_done_what_it_should(
    monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    state = {"names": ["mine"], "notes": [], "error": None}
    stand_in = stand_in_serve(monkeypatch, state=state, signals=signals)
    lines: list[str] = []
    found = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]
    options: dict[str, Any] = {"notify": lines.append, "ready": lambda names: lines.append(f"serving {names[0]}")}
    module._serve(stand_in, ServeSettings("m"), found, host="127.0.0.1", port=1, grace=7.0, **options)
    assert (lines[0], lines[-1], len(lines)) == ("serving mine", "stopped", 3)


@pytest.mark.parametrize("error", [KeyError("gate_up_proj"), AttributeError("no `weight`"), RuntimeError("a\nb")])
def test_the_reason_why_a_model_cannot_be_loaded_is_said_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("finray.serving.server.ApiServer.__init__", fail)
    state = asyncio.run(module.Replica(ServeSettings("runs/mine")).state())
    assert "Traceback" in capsys.readouterr().err, "FINRAY_VERBOSE shows it"
    stand_in = stand_in_serve(monkeypatch, state=state, signals=0)
    found = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]
    options: dict[str, Any] = {"notify": lambda line: None, "ready": pytest.fail}
    with pytest.raises(ModelError) as caught:
        module._serve(stand_in, ServeSettings("runs/mine"), found, host="127.0.0.1", port=1, grace=7.0, **options)
    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert caught.value.message == f"the model cannot be loaded, for a reason that finray does not know: {reason}"
    assert caught.value.where == "runs/mine"


@pytest.mark.parametrize("message", ["failed to start 3 times in a row. Error:\nActorDiedError()", "busy"])
def test_a_model_whose_process_is_killed_while_it_loads_is_told_from_other_failures(
    monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """Ray Serve itself says that it failed to update the deployments."""
    import ray.serve

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Deploying application finray failed: Failed to update the deployments ['models'].")

    stand_in = stand_in_serve(monkeypatch, state={}, signals=0)
    lost = SimpleNamespace(deployments={"models": SimpleNamespace(message=message)})
    monkeypatch.setattr(ray.serve, "run", fail)
    monkeypatch.setattr(ray.serve, "status", lambda: SimpleNamespace(applications={"finray": lost}))
    found = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]
    options: dict[str, Any] = {"notify": lambda line: None, "ready": pytest.fail}
    with pytest.raises(ClusterError) as caught:
        module._serve(stand_in, ServeSettings("runs/mine"), found, host="127.0.0.1", port=1, grace=7.0, **options)
    died = "the process that loads the model has ended each time before it answered; nothing says why"
    assert caught.value.message.startswith(died if "Died" in message else "Ray Serve failed: Deploying application")
