"""What `finray serve` asks of Ray, what it makes of Ray Serve's states, and why a model is not there. Servers that
answer and stop are in tests/integration/test_serve.py."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import ModelError, from_dict
from finray.evaluation import engines
from finray.models.artifacts import Artifact
from finray.runtime import serve as module
from finray.runtime.signals import Interrupted
from finray.serving.models import ServePlan, ServeSettings

FOUND = ServePlan("mine", Artifact(None, None, {}), False, ())  # type: ignore[arg-type]


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
    monkeypatch.setattr(engines, "find_spec", lambda name: name if has_vllm else None)
    resources = {"CPU": 12.0, "memory": 1e9, **({"GPU": float(gpus)} if gpus else {})}
    found = module.actor_options(resources, engine, replace(FOUND, is_classifier=is_classifier))
    assert found == {"num_cpus": 12, "num_gpus": expected}


class RayServe:
    """Stands for Ray Serve with one replica in this state, whose running answers end in this way."""

    def __init__(self, state: str | None, *, message: str = "", end: BaseException | None = None) -> None:
        self.graces: list[float] = []
        self.end = end
        models = SimpleNamespace(replica_states={state: 1}, message=message)
        self.applications = {} if state is None else {"finray": SimpleNamespace(deployments={"models": models})}

    def status(self) -> RayServe:
        return self

    def get_app_handle(self, name: str) -> Any:
        return SimpleNamespace(drain=SimpleNamespace(remote=self.drain))

    def drain(self, grace: float) -> Any:
        def result(timeout_s: float) -> bool:
            if self.end is not None:
                raise self.end
            return True

        self.graces.append(grace)
        return SimpleNamespace(result=result)


@pytest.mark.parametrize(("state", "graces"), [("RUNNING", [7.0]), ("STARTING", []), (None, [])])
def test_a_stop_lets_answers_end_where_there_may_be_any(state: str | None, graces: list[float]) -> None:
    """Also while the command waits for Ray Serve to say that a model is ready: it answers already."""
    module._drain(stand_in := RayServe(state), 7.0, lambda line: None)
    assert stand_in.graces == graces


@pytest.mark.parametrize("kind", ["TimeoutError", "RayActorError", "ReplicaUnavailableError"])
def test_a_replica_that_is_lost_while_answers_end_does_not_make_a_stop_an_error(kind: str) -> None:
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import ReplicaUnavailableError

    errors = (TimeoutError(), RayActorError(), ReplicaUnavailableError("x"))
    error, lines = next(error for error in errors if type(error).__name__ == kind), list[str]()
    module._drain(RayServe("RUNNING", end=error), 7.0, lines.append)
    assert lines[1:] == ["some answers did not finish in that time"]
    # A second signal is not swallowed.
    with pytest.raises(Interrupted):
        module._drain(RayServe("RUNNING", end=Interrupted(signal.SIGINT)), 7.0, lines.append)


@pytest.mark.parametrize("error", [KeyError("gate_up_proj"), AttributeError("no `weight`"), RuntimeError("a\nb")])
def test_the_reason_why_a_model_cannot_be_loaded_is_said_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("finray.serving.server.ApiServer.__init__", fail)
    state = asyncio.run(module.Replica(ServeSettings("runs/mine")).state())
    assert "Traceback" in capsys.readouterr().err, "FINRAY_VERBOSE shows it"
    reason = from_dict(state["error"])
    assert isinstance(reason, ModelError)
    assert reason.message.endswith(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert reason.where == "runs/mine"


def test_a_model_whose_process_is_killed_while_it_loads_is_told_from_other_failures() -> None:
    """Ray Serve itself says that it failed to update the deployments."""
    died = "failed to start 3 times in a row. Error:\nActorDiedError()"
    assert module._has_died(RayServe("STARTING", message=died))
    assert not module._has_died(RayServe("STARTING", message="busy"))
    assert not module._has_died(RayServe(None))
