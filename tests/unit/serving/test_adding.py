"""Adapters that requests add: only from named places, within a time, and while all others are answered."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from finray.errors import ModelError
from finray.serving import models
from finray.serving.adding import named_place
from finray.serving.errors import ApiError
from finray.serving.models import Models, ServeSettings, find
from finray.serving.server import ApiServer
from tests.support import served

HERE = "http://127.0.0.1:8000"
ASK = {"model": "base", "prompt": "the cat", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """`base`, the adapter `in/one` in the named place, and `out` beside it."""
    top = served.save_adapters(tmp_path_factory.mktemp("served"), tokenizer, ("one",))
    (top / "in").mkdir()
    (top / "one").rename(top / "in" / "one")
    served.save_adapter(top / "base", top / "out", tokenizer, **served.TARGETS["one"])
    return top


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    settings = ServeSettings(str(folder / "base"), dtype="fp32", adapters_from=(str(folder / "in"),), max_adapters=2)
    with TestClient(ApiServer(settings, lambda line: None).app(), base_url=HERE) as client:
        yield client


def add(client: TestClient, path: Any, name: str = "new") -> tuple[int, str]:
    answer = client.post("/v1/adapters", json={"name": name, "path": str(path)})
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]


def copied(folder: Path, name: str, **settings: Any) -> Path:
    """A copy of the adapter in the named place, whose files are links to those of the first."""
    (made := folder / "in" / name).mkdir()
    for file in (folder / "in" / "one").iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    known = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps({**known, **settings}))
    return made


def test_by_default_requests_change_nothing(folder: Path) -> None:
    app = ApiServer(ServeSettings(str(folder / "base"), dtype="fp32"), lambda line: None).app()
    with TestClient(app, base_url=HERE) as client:
        status, said = add(client, folder / "in" / "one")
        assert (status, "only if `finray serve --adapters-from DIR` allows it" in said) == (403, True)
        assert client.delete("/v1/adapters/base").status_code == 403


OUTSIDE = ["{top}/out", "{top}/in/../out", "{top}/in/link", "{top}/in", "{top}", "{top}/inside", "/etc/passwd"]
OUTSIDE += ["/proc/self/cwd", "no/such", "org/model", "~/x", "~nobody2/x", "", "a\0b", "a\nb", "x" * 300]
OUTSIDE += ["http://127.0.0.1:1/x", "s3://bucket/run", "file:///etc", "file://{top}/in/one", "x" * 500_000]


@pytest.mark.parametrize("path", [*OUTSIDE, "/" * 5000, "{top}/in/" + "x/" * 2000])
def test_a_path_outside_of_the_named_places_is_refused_at_once(client: TestClient, folder: Path, path: str) -> None:
    if not (link := folder / "in" / "link").is_symlink():
        link.symlink_to(folder / "out")
    status, said = add(client, path.format(top=folder))
    # The named directory itself holds no adapter.
    assert status in ((400,) if path == "{top}/in" else (400, 403)), said
    assert str(folder) not in said
    assert client.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(
    ("path", "is_inside"),
    [
        ("s3://bucket/runs/one", True),
        ("s3://bucket/runs/one/final/", True),
        *((path, False) for path in ("s3://bucket/runs", "s3://bucket/runs2/one", "s3://other/runs/one")),
        *((f"s3://bucket/runs/{rest}", False) for rest in ("../x", "a/../../x", "a//b", "a?b", "a#b", "%2e%2e/x", ".")),
        ("s3://bucket/runs/a@b", False),
    ],
)
def test_a_url_must_be_below_a_named_one(path: str, is_inside: bool) -> None:
    with nullcontext() if is_inside else pytest.raises(ApiError, match="not in a directory from which adapters"):
        assert named_place(path, ["/tmp", "s3://bucket/runs/"]) == path.rstrip("/")


@pytest.mark.parametrize("odd", ["link", "fifo", "folder"])
def test_links_out_of_the_place_and_special_files_are_refused(client: TestClient, folder: Path, odd: str) -> None:
    made = copied(folder, f"odd-{odd}")
    weights = made / "adapter_model.safetensors"
    weights.unlink()
    if odd == "link":
        weights.symlink_to(folder / "out" / weights.name)
    elif odd == "fifo":
        os.mkfifo(weights)
    else:
        (made / "final").symlink_to(folder / "out")
    status, said = add(client, made)
    assert (status, "is no file of this directory" in said) == (400, True), said


def test_a_link_within_the_place_is_followed(client: TestClient, folder: Path) -> None:
    made = copied(folder, "linked")
    weights = made / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(folder / "in" / "one" / weights.name)
    (folder / "in" / "latest").symlink_to(made)
    assert add(client, folder / "in" / "latest") == (200, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one * math.nan, "is not finite"),
        (lambda one: one.double() * 1e300, "is not finite"),
        (lambda one: torch.where(one == one.max(), math.inf, one), "is not finite"),
        (lambda one: one.to(torch.int8), "no floating-point numbers"),
        (lambda one: one > 0, "no floating-point numbers"),
        (lambda one: one.half(), ""),
        (lambda one: one.bfloat16(), ""),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused_by_their_tensor(
    client: TestClient, folder: Path, tmp_path: Path, change: Any, said: str
) -> None:
    made = copied(folder, tmp_path.name)
    tensors = load_file(made / "adapter_model.safetensors")
    name = sorted(tensors)[-1]
    save_file({**tensors, name: change(tensors[name]).contiguous()}, made / "adapter_model.safetensors")
    status, message = add(client, made)
    assert status == (400 if said else 200), message
    assert said in message
    assert not said or name in message


@pytest.mark.parametrize("settings", [{"lora_alpha": math.inf}, {"lora_alpha": math.nan}, {"lora_alpha": 10**400}])
def test_a_scaling_that_is_not_finite_is_refused(
    client: TestClient, folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    status, message = add(client, copied(folder, tmp_path.name, **settings))
    assert status == 400, message


def test_a_model_whose_weights_are_not_finite_does_not_start(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = ServeSettings(str(tmp_path / "base"), dtype="fp32")
    with pytest.raises(ModelError, match=r"the weights model\.layers\.1\.mlp\.down_proj\.weight are not finite"):
        Models(settings, find(settings), lambda line: None)


def test_there_are_no_more_adapters_than_were_allowed(client: TestClient, folder: Path) -> None:
    for name in ("a", "b"):
        assert add(client, folder / "in" / "one", name)[0] == 200
    status, said = add(client, folder / "in" / "one", "c")
    assert (status, "as many as --max-adapters allows" in said) == (409, True)
    assert client.delete("/v1/adapters/a").status_code == 200
    assert add(client, folder / "in" / "one", "c")[0] == 200


def test_one_that_never_loads_is_given_up_and_in_nobodys_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that does not answer: its thread hangs, and what it loads later is not added."""
    hangs, begun, real = threading.Event(), threading.Semaphore(0), models.find_adapter

    def find_adapter(path: str, **options: Any) -> Any:
        begun.release()
        assert hangs.wait(60)
        return real(path, **options)

    settings = ServeSettings(str(folder / "base"), dtype="fp32", adapters_from=(str(folder / "in"),), load_s=3600)
    server = ApiServer(settings, lambda line: None)
    with TestClient(server.app(), base_url=HERE) as client, ThreadPoolExecutor(8) as clients:
        with monkeypatch.context() as patch:
            patch.setattr(models, "find_adapter", find_adapter)
            first = clients.submit(add, client, folder / "in" / "one", "late")
            assert begun.acquire(timeout=60)
            # Others are told at once, and prompts are made.
            refused = [clients.submit(add, client, folder / "in" / "one", f"x{at}") for at in range(6)]
            assert {one.result()[0] for one in refused} == {429}
            assert client.post("/v1/completions", json=ASK).status_code == 200
            server._loader._seconds = 0.01
            hangs.set()
            assert first.result() == (200, "")
            # From here on nobody waits for what hangs.
            hangs.clear()
            for at in range(4):
                status, said = add(client, folder / "in" / "one", f"y{at}")
                assert (status, "was not loaded within 0.01 s" in said) == (400, True)
            assert add(client, folder / "in" / "one", "z")[0] == 429
            assert client.delete("/v1/adapters/late").status_code == 200
            assert client.post("/v1/completions", json=ASK).status_code == 200
            hangs.set()
            for thread in server._loader._hanging:
                thread.join(60)
        server._loader._seconds = 60
        assert [one["id"] for one in client.get("/v1/adapters").json()["data"]] == []
        assert add(client, folder / "in" / "one", "y0") == (200, "")
