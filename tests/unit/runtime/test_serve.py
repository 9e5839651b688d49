"""What `finray serve` asks of Ray, and how it ends, with a stand-in for Ray and for Ray Serve."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from finray.errors import ClusterError, ModelError
from finray.evaluation import engines
from finray.models.artifacts import Artifact
from finray.runtime import serve as module
from finray.runtime.signals import Interrupted
from finray.serving.models import ServePlan, ServeSettings

FOUND = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]


class Serve:
    """Stands for Ray and Ray Serve, with one replica in this state.

    Attributes:
        asked: resources of the replica.
        drained: seconds that running answers were given.
        signals: how many come while they are.
        lines: what the command said.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, state: dict[str, Any] | None = None) -> None:
        import ray
        import ray.serve

        self.asked: dict[str, Any] = {}
        self.drained: list[float] = []
        self.signals = 1
        self.lines: list[str] = []
        self.replicas: dict[str, int] | None = {"RUNNING": 1}
        self.message = ""
        self.resources = {"CPU": 12.0, "memory": 1e9}
        self.exceptions = ray.exceptions
        handle = SimpleNamespace(state=SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda: state)))
        monkeypatch.setattr(ray.serve, "start", lambda **_: None)
        monkeypatch.setattr(ray.serve, "ingress", lambda: lambda kind: kind)
        monkeypatch.setattr(ray.serve, "deployment", self.deployment)
        monkeypatch.setattr(ray.serve, "run", lambda *_, **__: handle)
        monkeypatch.setattr(ray.serve, "status", self.status)
        drain = SimpleNamespace(remote=self.drain)
        monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: SimpleNamespace(drain=drain))
        monkeypatch.setattr(module.time, "sleep", Mock(side_effect=Interrupted(signal.SIGINT)))

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def deployment(self, **options: Any) -> Any:
        self.asked.update(options["ray_actor_options"])
        return lambda kind: SimpleNamespace(bind=lambda settings: None)

    def status(self) -> Any:
        models = SimpleNamespace(replica_states=self.replicas, message=self.message)
        running = {} if self.replicas is None else {"finray": SimpleNamespace(deployments={"models": models})}
        return SimpleNamespace(applications=running)

    def drain(self, grace: float) -> Any:
        def result(timeout_s: float) -> bool:
            self.signals -= 1
            if self.signals:
                raise Interrupted(signal.SIGINT)
            return True

        self.drained.append(grace)
        return SimpleNamespace(result=result)

    def serve(self, settings: ServeSettings = ServeSettings("m"), found: ServePlan = FOUND) -> None:  # noqa: B008
        module._serve(
            self,
            settings,
            found,
            host="127.0.0.1",
            port=1,
            grace=7.0,
            notify=self.lines.append,
            ready=lambda names: self.lines.append(f"serving {names[0]}"),
        )


def failing(error: Exception | Interrupted) -> Any:
    return Mock(side_effect=error)


@pytest.mark.parametrize(
    ("engine", "has_vllm", "is_classifier", "gpus", "expected"),
    [
        ("vllm", True, False, 4, 4),
        ("auto", True, False, 4, 4),
        ("auto", False, False, 4, 1),
        ("transformers", True, False, 4, 1),
        ("auto", True, True, 4, 1),
        ("auto", True, False, 0, 0),
    ],
)
def test_vllm_gets_all_gpus_of_the_machine_and_another_engine_one(
    monkeypatch: pytest.MonkeyPatch, engine: str, has_vllm: bool, is_classifier: bool, gpus: int, expected: int
) -> None:
    stand_in = Serve(monkeypatch, state={"names": ["mine"], "notes": [], "error": None})
    stand_in.resources |= {"GPU": float(gpus)} if gpus else {}
    monkeypatch.setattr(engines, "find_spec", lambda name: name if has_vllm else None)
    stand_in.serve(ServeSettings("m", engine=engine), replace(FOUND, is_classifier=is_classifier))
    assert stand_in.asked == {"num_cpus": 12, "num_gpus": expected}


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
    stand_in = Serve(monkeypatch)
    stand_in.replicas = replicas
    monkeypatch.setattr("ray.serve.run", failing(Interrupted(signal.SIGTERM)))
    with pytest.raises(Interrupted):
        stand_in.serve()
    assert stand_in.drained == drained


@pytest.mark.parametrize("kind", ["TimeoutError", "RayActorError", "ReplicaUnavailableError"])
def test_a_replica_that_is_lost_while_answers_end_does_not_make_a_stop_an_error(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import ReplicaUnavailableError

    errors = (TimeoutError(), RayActorError(), ReplicaUnavailableError("x"))
    error = next(error for error in errors if type(error).__name__ == kind)
    stand_in = Serve(monkeypatch)
    monkeypatch.setattr(stand_in, "drain", lambda grace: SimpleNamespace(result=failing(error)))
    drain = SimpleNamespace(remote=lambda grace: stand_in.drain(grace))
    monkeypatch.setattr(ray.serve, "get_app_handle", lambda name: SimpleNamespace(drain=drain))
    module._drain(ray.serve, 7.0, stand_in.lines.append)
    assert stand_in.lines[1:] == ["some answers did not finish in that time"]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_that_was_stopped_on_purpose_has_done_what_it_should(
    monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    stand_in = Serve(monkeypatch, state={"names": ["mine"], "notes": [], "error": None})
    stand_in.signals = signals
    stand_in.serve()
    assert (stand_in.lines[0], stand_in.lines[-1], len(stand_in.lines)) == ("serving mine", "stopped", 3)


@pytest.mark.parametrize("error", [KeyError("gate_up_proj"), AttributeError("no `weight`"), RuntimeError("a\nb")])
def test_the_reason_why_a_model_cannot_be_loaded_is_said_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("finray.serving.server.ApiServer.__init__", fail)
    state = asyncio.run(module.Replica(ServeSettings("runs/mine")).state())
    assert "Traceback" in capsys.readouterr().err, "FINRAY_VERBOSE shows it"
    with pytest.raises(ModelError) as caught:
        Serve(monkeypatch, state=state).serve(ServeSettings("runs/mine"))
    assert caught.value.message.endswith(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert caught.value.where == "runs/mine"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("failed to start 3 times in a row. Error:\nActorDiedError()", "the process that loads the model has ended"),
        ("busy", "Ray Serve failed: Deploying application"),
    ],
)
def test_a_model_whose_process_is_killed_while_it_loads_is_told_from_other_failures(
    monkeypatch: pytest.MonkeyPatch, message: str, told: str
) -> None:
    """Ray Serve itself says that it failed to update the deployments."""
    stand_in = Serve(monkeypatch)
    stand_in.message = message
    monkeypatch.setattr("ray.serve.run", failing(RuntimeError("Deploying application finray failed")))
    with pytest.raises(ClusterError, match=told):
        stand_in.serve()
