"""What `finray serve` asks of Ray for the process of the models, with a stand-in for Ray and for Ray Serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from finray.errors import ClusterError
from finray.evaluation import engines
from finray.models.artifacts import Artifact
from finray.runtime import serve as module
from finray.serving.models import Found, Settings


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
    found = Found("mine", Artifact(None, None, {}), is_classifier, ())  # type: ignore[arg-type]
    quiet: dict[str, Any] = {"notify": lambda line: None, "ready": lambda names: None}
    with pytest.raises(Asked):
        module._serve(stand_in, Settings("m", engine=engine), found, host="127.0.0.1", port=1, grace=1, **quiet)
    assert asked == {"num_cpus": 12, "num_gpus": expected}
