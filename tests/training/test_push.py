"""`finray push` to a Hub over HTTP: what gets there, what is refused before anything is sent, what is tried again."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants, snapshot_download
from tokenizers.processors import TemplateProcessing

from finray.checkpoint.rundir import RunDir, open_run
from finray.config.adapter_files import WEIGHTS
from finray.errors import ConfigError, FinrayError, HubError
from finray.evaluation.artifacts import find_artifact
from finray.evaluation.labels import TextClassifier
from finray.publishing.background import CheckpointPusher
from finray.publishing.hub import LONGEST_WAIT, TRIES, Hub
from finray.publishing.push import Pushed, push
from finray.publishing.restore import pull
from tests.support import evaluated, ports, runs, tiny
from tests.support import hub as hubs
from tests.support.runs import Plain, changed

BASE = "acme/tiny-llama"


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = evaluated.train(tiny_model_dir, tmp_path_factory.mktemp("push"), **{"data.system": "Be brief."})
    evaluated.evaluate(run)
    return run


@pytest.fixture
def slept() -> list[float]:
    """What finray has waited between two tries."""
    return []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> Iterator[hubs.Hub]:
    with hubs.serve() as found:
        hubs.use(found, tmp_path / "home", monkeypatch)
        base = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir()}
        base["README.md"] = b"---\nlicense: other\nlicense_name: acme-1\nlicense_link: LICENSE\n---\nA base.\n"
        found.repos[BASE] = hubs.Repo(False, base)
        yield found


@pytest.fixture
def pushed_as(slept: list[float]) -> Any:
    """Pushes, and sleeps nowhere."""

    def wait(seconds: float) -> bool:
        slept.append(seconds)
        return False

    def do(path: Path, **options: Any) -> Pushed:
        return push(path, **{"base": BASE, "login": lambda: Hub.login(wait=wait), **options})

    return do


def block(card: str, kind: str) -> str:
    return re.findall(rf"^```{kind}\n(.*?)^```", card, re.MULTILINE | re.DOTALL)[0]


def test_an_adapter_is_private_and_loads_as_its_card_says(
    trained: Path, hub: hubs.Hub, pushed_as: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    done = pushed_as(trained, to="ada/poems")
    repo = hub.repos["ada/poems"]
    assert repo.private
    assert (done.url, done.commit, done.private) == (f"{hub.url}/ada/poems", repo.sha, True)
    assert repo.files[WEIGHTS] == (trained / "final" / WEIGHTS).read_bytes()
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "finray.json", "README.md"} <= set(
        repo.files
    )
    assert not any(name.startswith("training_state") or name == "manifest.json" for name in repo.files)
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    # The lines of the card, as somebody else would run them.
    names: dict[str, Any] = {}
    exec(block(repo.files["README.md"].decode(), "python"), names)  # noqa: S102
    assert capsys.readouterr().out.strip()
    loaded = {name: one for name, one in names["model"].named_parameters() if "lora" in name}
    stored = runs.adapter_weights(trained / "final")
    assert len(loaded) == len(stored) > 0
    for name, one in loaded.items():
        assert torch.equal(one.detach().float(), stored[name.replace(".default", "")]), name


@pytest.mark.parametrize("merged", [False, True])
def test_a_classifier_loads_as_its_card_says(
    merged: bool, hub: hubs.Hub, pushed_as: Any, classifier_run: Callable[..., Any], tmp_path: Path
) -> None:
    from finray.models.artifacts import load_artifact

    plain = classifier_run({"train.max_steps": 2, "train.learning_rate": 0.05})
    runs.run_alone(plain, tmp_path / "run")
    checkpoint, base = tmp_path / "run" / "checkpoint-000002", Path(plain["model"]["name"])
    hub.repos["acme/tiny-bert"] = hubs.Repo(False, {path.name: path.read_bytes() for path in base.iterdir()})
    pushed_as(checkpoint, to="ada/kinds", base="acme/tiny-bert", merged=merged, dtype="fp32")
    names: dict[str, Any] = {}
    # Another encoder's random head is not that of the base: the adapter brings its own.
    exec(block(hub.repos["ada/kinds"].files["README.md"].decode(), "python"), names)  # noqa: S102
    assert names["names"] == ["animal", "neither", "plant"]
    tuned = load_artifact(find_artifact(checkpoint), dtype=torch.float32).eval()
    encoded = names["tokenizer"]("a text", return_tensors="pt")
    with torch.no_grad():
        expected, found = tuned(**encoded).logits, names["model"].eval()(**encoded).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rows", ["chat", "completion"])
def test_a_reward_model_scores_as_its_card_says(
    rows: str, merged: bool, hub: hubs.Hub, pushed_as: Any, tiny_run: Callable[..., Plain], tmp_path: Path
) -> None:
    """Its base has no padding, which finray takes the end token for; texts begin with a token of their own, or a
    conversation as an argument of the template says."""
    tokenizer, base = tiny.train_tokenizer(), tmp_path / "base"
    tokenizer.pad_token, tokenizer.bos_token = None, "<|im_start|>"
    begins = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begins
    tokenizer.chat_template = "{{ tone }}" + tiny.CHATML if rows == "chat" else None
    tiny.save_model("llama", base, tokenizer, pad_token_id=None, eos_token_id=tokenizer.eos_token_id)
    texts = [{"prompt": f"what is {at}", "chosen": f" it is {at}", "rejected": " no" * (at % 3 + 1)} for at in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    own: Plain = {"data.source": str(tmp_path / "pairs.jsonl"), "train.max_steps": 3}
    own |= {"model.chat_template_arguments": {"tone": "loud "} if rows == "chat" else {}}
    runs.run_alone(tiny_run({**own, "train.objective": "reward", "adapter.rank": 4}, model=base), tmp_path / "run")
    hub.repos[BASE].files = {path.name: path.read_bytes() for path in base.iterdir()}
    pushed_as(tmp_path / "run" / "checkpoint-000003", to="ada/rm", merged=merged, dtype="fp32")
    names: dict[str, Any] = {}
    exec(block(hub.repos["ada/rm"].files["README.md"].decode(), "python"), names)  # noqa: S102
    judge = TextClassifier(find_artifact(tmp_path / "run" / "checkpoint-000003"), dtype=torch.float32)
    asked = ("Hello", "How may I help?") if rows == "chat" else ("a prompt", " and its answer")
    scored = judge.classify([judge.row(asked)])
    assert names["reward"] == pytest.approx(scored.predictions[0].label, abs=1e-5)


def test_a_merged_model_loads_in_plain_transformers(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    from transformers import AutoModelForCausalLM

    from finray.models.artifacts import load_artifact

    # The name had the adapter before, which Transformers would load.
    pushed_as(trained, to="ada/whole")
    done = pushed_as(trained, to="ada/whole", merged=True, dtype="fp32")
    assert done.merged
    files = hub.repos["ada/whole"].files
    assert {"model.safetensors", "config.json"} <= set(files)
    assert not {"adapter_config.json", WEIGHTS} & set(files)
    model = AutoModelForCausalLM.from_pretrained(snapshot_download("ada/whole"))
    tokens = torch.arange(5, 25)[None]
    tuned = load_artifact(find_artifact(trained), dtype=torch.float32)
    with torch.no_grad():
        expected, found = tuned(input_ids=tokens).logits, model(input_ids=tokens).logits
    assert float((expected - found).abs().max()) < 1e-4 * float(expected.std())
    # Nothing of a model's size is left.
    assert not list(trained.glob(".push-*"))


def test_files_of_an_earlier_model_that_would_be_loaded_with_the_new_one_are_removed(hub: hubs.Hub) -> None:
    user = Hub(hub.token, endpoint=hub.url, wait=lambda seconds: False)
    loaded = ["chat_template.jinja", "added_tokens.json", "additional_chat_templates/tools.jinja", "tokenizer.model"]
    loaded += ["vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json", "generation_config.json"]
    loaded += ["adapter_config.json", WEIGHTS, "model-q8_0.gguf", "Modelfile", "preprocessor_config.json"]
    kept = ["README.md", "LICENSE", "LICENSE.txt", "NOTICE", "training.log", "mine/tokenizer.json"]
    kept += ["last-checkpoint/tokenizer.json", "last-checkpoint/chat_template.jinja"]
    same, text = ["finray.json", "tokenizer.json"], b"---\nlicense: mit\n---\n"
    user.push(user.check("ada/poems"), dict.fromkeys((*loaded, *kept, *same), text), message="One")
    new = dict.fromkeys((*same, "model.safetensors", "config.json"), b"new")
    user.push(user.check("ada/poems"), new, message="Two")
    expected = {".gitattributes": b"", **dict.fromkeys(kept, text), **new}
    assert hub.repos["ada/poems"].files == expected


def test_the_card_says_what_was_trained_on_what_and_how_well(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    pushed_as(trained, to="ada/poems")
    text = hub.repos["ada/poems"].files["README.md"].decode()
    data = ModelCard(text).data
    assert (data.base_model, data.license, data.license_name) == (BASE, "other", "acme-1")
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    scores = json.loads((trained / "evaluation" / "metrics.json").read_text())["models"]["tuned"]
    found = {one.metric_type: one.metric_value for one in data.eval_results}
    assert found["loss"] == pytest.approx(scores["loss"]["value"], abs=1e-6)
    interval = f"{scores['loss']['value']:.4g} [{scores['loss']['low']:.4g}, {scores['loss']['high']:.4g}]"
    assert interval in text
    for name, value in {"learning rate": "0.05", "weights trained": "lora, rank 4", "alpha": "8", "seed": "5"}.items():
        assert f"| {name} | {value} |" in text
    assert "Trained on `rows.jsonl`" in text
    assert f"[{BASE}](https://huggingface.co/{BASE})" in text
    assert "goes for this one too: other, acme-1, LICENSE" in text
    # To make it again: the file is a config, and nothing of this machine is in it.
    config = runs.yaml.safe_load(block(text, "yaml"))
    assert config["data"]["source"] == "rows.jsonl"
    assert runs.config_of(config).train.learning_rate == 0.05
    assert str(trained.parent.parent) not in text
    assert "output_dir" not in text
    assert b"/tmp" not in b"".join(one for name, one in hub.repos["ada/poems"].files.items() if name.endswith("json"))


def test_scores_of_other_weights_are_not_in_the_card(
    trained: Path, hub: hubs.Hub, pushed_as: Any, tmp_path: Path
) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "final" / WEIGHTS).touch()
    pushed_as(copy, to="ada/poems")
    assert "95 % intervals" not in hub.repos["ada/poems"].files["README.md"].decode()


def test_a_second_push_sends_nothing_and_commits_nothing(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    first = pushed_as(trained, to="ada/poems")
    sent, commits = hub.sent, list(hub.repos["ada/poems"].commits)
    assert pushed_as(trained, to="ada/poems").commit == first.commit
    assert (hub.sent, hub.repos["ada/poems"].commits) == (sent, commits)


# --- refused before anything is merged or sent ----------------------------------------------------------------------


def refused(pushed_as: Any, hub: hubs.Hub, path: Path, **options: Any) -> FinrayError:
    with pytest.raises(FinrayError) as found:
        pushed_as(path, **options)
    assert hub.sent == 0
    assert hub.count("POST", "commit|create") == 0
    assert hub.token not in str(found.value)
    assert found.value.repair
    return found.value


def test_no_token(trained: Path, hub: hubs.Hub, pushed_as: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    error = refused(pushed_as, hub, trained, to="ada/poems")
    assert "needs a token" in error.message
    assert "hf auth login" in str(error.repair)
    # That of `hf auth login` is taken.
    token = Path(constants.HF_TOKEN_PATH)
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text(hub.token)
    assert pushed_as(trained, to="ada/poems").repo == "ada/poems"


def unknown(hub: hubs.Hub) -> None:
    hub.token = "hf_AnotherTokenOfNobody000000000000"


def reading(hub: hubs.Hub) -> None:
    hub.role = "read"


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (unknown, {"merged": True}, "rejects the token (401)"),
        (reading, {}, "has read access only"),
        # Nobody else has its base.
        (None, {"base": None}, "--merged"),
        *((None, {"to": name}, "OWNER/NAME") for name in ("a/b/c", "ada/-poems", "ada/po--ems", "ada/po ems")),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(
    trained: Path, hub: hubs.Hub, pushed_as: Any, change: Any, options: dict[str, Any], said: str
) -> None:
    if change is not None:
        change(hub)
    error = str(refused(pushed_as, hub, trained, **{"to": "ada/poems", **options}))
    assert said in error
    assert hubs.TOKEN not in error


@pytest.mark.parametrize("orgs", [{}, {"acme": "read"}])
def test_a_name_of_somebody_else(trained: Path, hub: hubs.Hub, pushed_as: Any, orgs: dict[str, str]) -> None:
    hub.orgs = orgs
    error = refused(pushed_as, hub, trained, to="acme/poems")
    assert "the name belongs to" in error.message
    assert error.where == f"{hub.url}/acme/poems"
    hub.orgs = {"acme": "write"}
    assert pushed_as(trained, to="acme/poems").repo == "acme/poems"


def test_a_name_that_has_another_model(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    hub.repos["ada/poems"] = hubs.Repo(True, {"model.safetensors": b"weights"})
    assert "a model that was not pushed by finray" in refused(pushed_as, hub, trained, to="ada/poems").message
    assert hub.repos["ada/poems"].files == {"model.safetensors": b"weights"}
    # One that was made by hand, and holds no model yet, is taken.
    hub.repos["ada/poems"] = hubs.Repo(True, {".gitattributes": b"", "README.md": b"mine"})
    assert pushed_as(trained, to="ada/poems").private


def test_a_public_model_is_pushed_to_only_where_that_is_said(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    hub.repos["ada/poems"] = hubs.Repo(False)
    assert "public" in refused(pushed_as, hub, trained, to="ada/poems").message
    assert not pushed_as(trained, to="ada/poems", public=True).private
    # Negative control of private by default: made public where asked.
    assert not pushed_as(trained, to="ada/other", public=True).private
    assert not hub.repos["ada/other"].private


def test_offline(trained: Path, hub: hubs.Hub, pushed_as: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in str(refused(pushed_as, hub, trained, to="ada/poems").repair)


# --- tried again ----------------------------------------------------------------------------------------------------

# Each request that a push needs.
REQUESTS = [
    ("GET", "whoami"),
    ("GET", "/api/models/ada/poems"),
    ("POST", "repos/create"),
    ("POST", "validate-yaml"),
    ("POST", "preupload"),
    ("POST", "objects/batch"),
    ("PUT", "^/lfs/"),
    ("POST", "commit"),
]


# Each with one kind of failure, and the commit with all.
@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [(*request, ("429", "500", "broken")[number % 3]) for number, request in enumerate(REQUESTS)]
    + [("POST", "commit", kind) for kind in ("429", "broken")],
)
def test_what_passes_is_tried_again(
    trained: Path, hub: hubs.Hub, pushed_as: Any, slept: list[float], method: str, path: str, kind: str
) -> None:
    options: dict[str, Any] = {"429": {"status": 429, "headers": {"Retry-After": "7"}}, "500": {"status": 500}}.get(
        kind, {}
    )
    hub.fail(method, path, times=2, **options)
    pushed_as(trained, to="ada/poems")
    repo = hub.repos["ada/poems"]
    assert repo.files[WEIGHTS] == (trained / "final" / WEIGHTS).read_bytes()
    assert len(repo.commits) == 2, "made, and pushed once"
    if kind == "429" and slept:
        assert min(slept) == 7


def test_a_commit_whose_answer_was_lost_is_not_made_twice(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    hub.fail("POST", "commit", done=True)
    done = pushed_as(trained, to="ada/poems")
    assert hub.repos["ada/poems"].commits == ["first", hub.repos["ada/poems"].commits[1]]
    assert done.commit == hub.repos["ada/poems"].sha


def test_a_conflict_with_another_commit_is_tried_again(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    hub.fail("POST", "commit", status=412, said="A commit has happened since. Please refresh and try again.")
    assert pushed_as(trained, to="ada/poems").commit == hub.repos["ada/poems"].sha


def test_a_hub_that_stays_down_is_an_error_with_its_url_and_then_the_same_command_goes_on(
    trained: Path, hub: hubs.Hub, pushed_as: Any, slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    fault = hub.fail("POST", "commit", times=10**6, status=503, said="back soon", headers={"Retry-After": "86400"})
    with pytest.raises(HubError) as found:
        pushed_as(trained, to="ada/poems")
    assert f"refuses with 503, {TRIES} times: back soon" in found.value.message
    assert found.value.where == f"{hub.url}/api/models/ada/poems/commit/main"
    assert "the same command continues" in str(found.value.repair)
    assert slept == [LONGEST_WAIT] * (TRIES - 1), "no server makes it wait for a day"
    assert hub.repos["ada/poems"].commits == ["first"]
    fault.times, sent = 0, hub.sent
    pushed_as(trained, to="ada/poems")
    assert hub.sent == sent, "the weights are there already"
    assert len(hub.repos["ada/poems"].commits) == 2


def test_what_another_try_cannot_mend_is_not_tried_again(trained: Path, hub: hubs.Hub, pushed_as: Any) -> None:
    hub.fail("POST", "commit", times=10**6, status=403, said=f"{hub.token} may not write to ada/poems")
    with pytest.raises(HubError, match=r"has no permission for this \(403\)") as found:
        pushed_as(trained, to="ada/poems")
    assert hub.count("POST", "commit") == 1
    assert hub.token not in str(found.value)


def test_neither_token_nor_signed_url_is_said(
    trained: Path, hub: hubs.Hub, pushed_as: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.fail("PUT", "^/lfs/", times=10**6, status=500)
    with pytest.raises(HubError) as found:
        pushed_as(trained, to="ada/poems")
    assert str(found.value.where).startswith(f"{hub.url}/lfs/")
    said = str(found.value) + caplog.text + "".join(capfd.readouterr())
    assert hubs.SIGNATURE not in said
    assert hub.token not in said
    # The negative control: the client itself would have said it.
    from huggingface_hub import HfApi

    with pytest.raises(RuntimeError, match=r"model\.safetensors"):
        HfApi(endpoint=hub.url).upload_file(
            repo_id="ada/poems", path_or_fileobj=b"weights", path_in_repo="model.safetensors"
        )
    assert hubs.SIGNATURE in caplog.text + "".join(capfd.readouterr())


@pytest.fixture
def xet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go by way of Xet, as they do wherever `hf_xet` is installed; its own tries are few here."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")


def test_weights_go_by_xet(trained: Path, hub: hubs.Hub, pushed_as: Any, xet: None) -> None:
    pushed_as(trained, to="ada/poems")
    assert hub.xorbs
    assert hub.count("PUT", "^/lfs/") == 0
    assert hub.repos["ada/poems"].files[WEIGHTS] == (trained / "final" / WEIGHTS).read_bytes()
    # And no chunk of them is sent a second time.
    sent = hub.sent
    pushed_as(trained, to="ada/again")
    assert hub.sent == sent
    assert hub.repos["ada/again"].files[WEIGHTS] == (trained / "final" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/cas/v1/xorbs/", {}),
        ("/cas/v1/xorbs/", {"done": True}),
        ("/cas/v1/xorbs/", {"status": 429, "headers": {"Retry-After": "1"}}),
        ("/cas/v1/shards", {"status": 500}),
        ("/commit/", {"status": 409}),
    ],
)
def test_what_breaks_off_half_way_to_xet_is_tried_again(
    hub: hubs.Hub, xet: None, path: str, fault: dict[str, Any]
) -> None:
    hub.fail("POST", path, **fault)
    # Numbers are compressed byte by byte of four, zeros as they are.
    numbers = struct.pack("<40000f", *(random.Random(repr(fault)).gauss(0, 1) for _ in range(40_000)))
    files = {"a.safetensors": numbers, "b.safetensors": bytes(10**5)}
    user = Hub(hub.token, endpoint=hub.url, wait=lambda seconds: False)
    user.push(user.check("ada/poems"), files, message="Model")
    assert not any(one.times for one in hub.faults)
    assert hub.repos["ada/poems"].commits == ["first", "Model"]
    assert {name: hub.repos["ada/poems"].files[name] for name in files} == files


def with_alpha(folder: Path) -> None:
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 2 * settings["lora_alpha"]}))


def with_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + "{# other #}")


def with_tokenizer(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 77}))


@pytest.mark.parametrize("change", [with_alpha, with_template, with_tokenizer, lambda folder: None])
def test_what_was_merged_from_other_files_is_not_pushed(
    trained: Path, hub: hubs.Hub, pushed_as: Any, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    adapter = Path(shutil.copytree(trained / "final", tmp_path / "a" / "adapter"))
    (adapter / "manifest.json").unlink()
    fault = hub.fail("PUT", "^/lfs/", times=10**6, status=500)
    with pytest.raises(HubError):
        pushed_as(adapter, to="ada/whole", merged=True, dtype="fp32")
    fault.times = 0
    change(adapter)
    told: list[str] = []
    pushed_as(adapter, to="ada/whole", merged=True, dtype="fp32", notify=told.append)
    # Control: without a change it is that of the earlier push.
    assert any("merging" in one for one in told) == (change.__name__ != "<lambda>")
    assert not list(adapter.parent.glob(".push-*"))
    files = hub.repos["ada/whole"].files
    assert (b"{# other #}" in files["chat_template.jinja"]) == (change is with_template)


def test_a_push_that_is_killed_is_finished_by_the_same_command(trained: Path, hub: hubs.Hub, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    words = ("push", str(trained), "--to", "ada/whole", "--base", BASE, "--merged")
    go = threading.Event()
    # It asks for its commit, and is killed before there is one.
    hub.fail("POST", "/commit/", hold=go, status=503)
    process = runs.start_cli(*words, env=hubs.environment(hub, tmp_path / "other"))
    try:
        until(lambda: hub.count("POST", "/commit/") or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        assert hub.token.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.kill()
        go.set()
        said = "".join(process.communicate(timeout=120))
    assert "merging the adapter" in said
    assert hub.token not in said
    assert hub.repos["ada/whole"].commits == ["first"]
    sent = hub.sent
    assert sent > 0
    code, out, err = runs.finray(*words)
    assert code == 0, out + err
    assert "merging the adapter" not in out + err
    assert hub.sent == sent
    assert len(hub.repos["ada/whole"].commits) == 2
    AutoModelForCausalLM.from_pretrained(snapshot_download("ada/whole"))
    assert not list(trained.glob(".push-*"))


def test_ctrl_c_says_that_what_arrived_is_not_sent_again(
    trained: Path, hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("push", str(trained), "--to", "ada/poems", "--base", BASE)
    for before, said in (
        ("check", "interrupted; the same command starts over"),
        ("push", "interrupted; files that arrived are not sent again; the same command continues"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Hub, before, lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
            code, _, err = runs.finray(*words)
        assert (code, err.splitlines()[-1]) == (130, f"{said}: finray {' '.join(words)}")
    assert "ada/poems" not in hub.repos


def test_the_command(trained: Path, hub: hubs.Hub) -> None:
    code, out, err = runs.finray("push", trained, "--to", "ada/poems", "--base", BASE)
    assert code == 0, out + err
    assert f"to {hub.url}/ada/poems (private), commit {hub.repos['ada/poems'].sha[:12]}" in out
    code, out, err = runs.finray("push", trained, "--to", "acme/poems", "--base", BASE, "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "HubError"
    assert "Traceback" not in err


# --- checkpoints in the background ----------------------------------------------------------------------------------


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Told(list[tuple[str, int]]):
    def __call__(self, message: str, step: int) -> None:
        self.append((message, step))


def pusher(hub: hubs.Hub, warn: Told, name: str = "ada/poems") -> CheckpointPusher:
    target = Hub(hub.token, endpoint=hub.url).check(name)
    return CheckpointPusher(lambda wait: Hub(hub.token, endpoint=hub.url, wait=wait), target, base=BASE, warn=warn)


def test_each_checkpoint_replaces_the_one_before_and_can_be_gone_on_from(
    trained: Path, hub: hubs.Hub, tmp_path: Path
) -> None:
    from finray.checkpoint import manifest

    warn = Told()
    copies = [
        shutil.copytree(trained / f"checkpoint-00000{step}", tmp_path / f"checkpoint-00000{step}") for step in (1, 2)
    ]
    (copies[0] / "extra.json").write_text("{}")
    for copy in copies:
        one = pusher(hub, warn)
        one.offer(copy)
        # Retention deletes it while it is being pushed.
        shutil.rmtree(copy)
        pushed = f"Checkpoint of step {copy.name[-1]}"
        until(lambda wanted=pushed: wanted in hub.repos.get("ada/poems", hubs.Repo(True)).commits)
        one.close(wait_s=120)
    assert not warn
    assert not list(tmp_path.glob(".tmp-push-*"))
    snapshot = Path(snapshot_download("ada/poems")) / "last-checkpoint"
    content = manifest.verify(snapshot)
    assert content["step"] == 2
    assert (snapshot / "training_state" / "state.json").is_file()
    assert not (snapshot / "extra.json").exists()
    assert (snapshot / WEIGHTS).read_bytes() == (trained / "checkpoint-000002" / WEIGHTS).read_bytes()
    # And the finished model goes beside it.
    push(trained, to="ada/poems", base=BASE)
    assert {"README.md", WEIGHTS, f"last-checkpoint/{WEIGHTS}"} <= set(hub.repos["ada/poems"].files)


def test_a_run_that_is_lost_is_pulled_and_goes_on_to_the_same_bits(
    tiny_run: Callable[..., Plain], dropout_model: Path, hub: hubs.Hub, tmp_path: Path
) -> None:
    """On another machine, from what a session has pushed before its end."""
    plain = tiny_run({"train.max_steps": 4, "adapter.dropout": 0.2, "checkpoint.every_steps": 2}, model=dropout_model)
    whole, run = tmp_path / "whole", RunDir.of(runs.config_of(plain))
    runs.run_alone(plain, whole)
    runs.run_alone(plain, run.path)
    shutil.rmtree(run.path / "checkpoint-000004")
    run.keep_config(runs.config_of(plain))
    run.keep_resolved(runs.resolved_of(runs.config_of(plain)))
    one = pusher(hub, Told())
    one.offer(run.path / "checkpoint-000002")
    until(lambda: "ada/poems" in hub.repos)
    one.close(wait_s=120)
    kept = {name: (run.path / name).read_bytes() for name in ("config.yaml", "resolved.json", "run_id")}
    with pytest.raises(ConfigError, match="the directory exists"):
        pull("ada/poems", output=run.path)
    shutil.rmtree(run.path)
    done = pull("ada/poems", output=run.path)
    assert (done.run, done.step, done.url) == (run.path, 2, f"{hub.url}/ada/poems")
    assert {name: (run.path / name).read_bytes() for name in kept} == kept
    # `finray train` with the same config takes it for the same run, and any other one for another.
    with open_run(runs.config_of(plain), fresh=False, notify=lambda text: None):
        pass
    with (
        pytest.raises(ConfigError, match="learning_rate"),
        open_run(runs.config_of(changed(plain, {"train.learning_rate": 0.5})), fresh=False, notify=lambda text: None),
    ):
        pass
    runs.run_alone(plain, run.path)
    last = "checkpoint-000004"
    assert runs.values(run.path, "loss") == runs.values(whole, "loss")[2:]
    assert (run.path / last / WEIGHTS).read_bytes() == (whole / last / WEIGHTS).read_bytes()


@pytest.mark.parametrize(("status", "path"), [(401, ""), (404, ""), (503, ""), (503, "/tree/"), (None, "")])
def test_a_hub_that_fails_pulls_no_older_checkpoint_from_the_cache(
    trained: Path, hub: hubs.Hub, slept: list[float], tmp_path: Path, status: int | None, path: str
) -> None:
    """The machine pulled step 1, and step 2 was pushed since."""

    def again(name: str, **options: Any) -> int:
        def wait(seconds: float) -> bool:
            slept.append(seconds)
            return False

        return pull("ada/poems", output=tmp_path / name, login=lambda: Hub.login(wait=wait, **options)).step

    for step in (1, 2):
        one = pusher(hub, Told())
        one.offer(trained / f"checkpoint-00000{step}")
        until(lambda wanted=f"Checkpoint of step {step}": wanted in hub.repos.get("ada/poems", hubs.Repo(True)).commits)
        one.close(wait_s=120)
        if step == 1:
            assert again("first") == 1
    with ports.reserved() as port:
        closed = {"endpoint": f"http://127.0.0.1:{port}"} if status is None else {}
        faults = [hub.fail(method, path, times=10**6, status=status or 503) for method in ("GET", "HEAD")]
        with pytest.raises(HubError) as found:
            again("second", **closed)
    assert str(status or "does not answer") in found.value.message
    assert len(slept) == (0 if status in (401, 404) else TRIES - 1)
    assert not (tmp_path / "second").exists()
    for fault in faults:
        fault.times = 0
    assert again("second") == 2


def test_what_is_no_whole_checkpoint_of_a_run_is_not_pulled(
    trained: Path, hub: hubs.Hub, pushed_as: Any, tmp_path: Path
) -> None:
    pushed_as(trained, to="ada/model")
    with pytest.raises(HubError, match="there is no checkpoint of a run"):
        pull("ada/model", output=tmp_path / "run")
    with pytest.raises(HubError, match="404"):
        pull("ada/nothing", output=tmp_path / "run")
    one = pusher(hub, Told())
    one.offer(shutil.copytree(trained, tmp_path / "copy") / "checkpoint-000002")
    until(lambda: "ada/poems" in hub.repos)
    one.close(wait_s=120)
    files = hub.repos["ada/poems"].files
    files["last-checkpoint/config.json"] = files[f"last-checkpoint/{WEIGHTS}"] = b"cut"
    with pytest.raises(HubError, match="damaged"):
        pull("ada/poems", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def poems(trained: Path, hub: hubs.Hub) -> dict[str, bytes]:
    """The files of a repository with a checkpoint."""
    one = pusher(hub, Told())
    one.offer(trained / "checkpoint-000002")
    until(lambda: "ada/poems" in hub.repos)
    one.close(wait_s=120)
    return hub.repos["ada/poems"].files


@pytest.mark.parametrize("etag", ["{0}/stolen", "../../../stolen", "..", "a\\b", "x" * 300])
def test_a_version_of_a_file_that_is_a_path_is_not_written_to(
    etag: str, poems: dict[str, bytes], hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's client names a file of its cache after it, and an absolute path wins."""
    monkeypatch.setattr(hubs, "_oid", lambda path, content: etag.format(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HubError, match="would become the name of a file here"):
        pull("ada/poems", output=tmp_path / "run")
    made = {path.name for path in set(tmp_path.rglob("*")) - set(before)}
    assert not made & {"stolen", "run"}


def test_a_full_disk_leaves_nothing_of_a_pull_and_says_so_once(
    poems: dict[str, bytes], hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, target: Any, size: int) -> None:
        target.write(source.read(10))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(HubError, match="cannot be written: no space left on device") as found:
            pull("ada/poems", output=tmp_path / "runs" / "run")
    assert found.value.where == str(tmp_path / "runs" / "run")
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_the_manifest_of_a_pulled_checkpoint_does_not_list_is_not_brought_along(
    poems: dict[str, bytes], hub: hubs.Hub, tmp_path: Path
) -> None:
    poems["last-checkpoint/evil.py"] = b"print()"
    run = pull("ada/poems", output=tmp_path / "run").run
    assert not list(run.rglob("*.py"))
    assert not [path for path in run.rglob("*") if path.is_symlink()]


def test_nobody_waits_for_a_hub_that_hangs_and_what_waits_is_superseded(
    trained: Path, hub: hubs.Hub, tmp_path: Path
) -> None:
    warn, go = Told(), threading.Event()
    hub.fail("PUT", "^/lfs/", hold=go)
    one = pusher(hub, warn)
    sources = enumerate((1, 2, 2), 1)
    copies = [
        shutil.copytree(trained / f"checkpoint-{of:06d}", tmp_path / f"checkpoint-{as_:06d}") for as_, of in sources
    ]
    one.offer(copies[0])
    until(lambda: hub.count("PUT", "^/lfs/"))
    for copy in copies[1:]:
        one.offer(copy)
    assert "ada/poems" in hub.repos
    assert len(hub.repos["ada/poems"].commits) == 1, "the first still hangs"
    go.set()
    until(lambda: warn or len(hub.repos["ada/poems"].commits) == 3)
    one.close(wait_s=120)
    assert hub.repos["ada/poems"].commits[1:] == ["Checkpoint of step 1", "Checkpoint of step 3"]
    assert not warn


def test_a_failure_in_the_background_is_said_and_the_next_checkpoint_is_tried(
    trained: Path, hub: hubs.Hub, tmp_path: Path
) -> None:
    warn = Told()
    one = pusher(hub, warn)
    fault = hub.fail("POST", "repos/create", times=10**6, status=403, said="not you")
    one.offer(trained / "checkpoint-000001")
    until(lambda: warn)
    assert warn[0][1] == 1
    assert "the checkpoint of step 1 is not pushed: the token has no permission for this (403): not you" in warn[0][0]
    fault.times = 0
    one.offer(trained / "checkpoint-000002")
    until(lambda: hub.repos.get("ada/poems", hubs.Repo(True)).commits[1:])
    one.close(wait_s=120)
    assert len(warn) == 1
