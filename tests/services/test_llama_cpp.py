"""A tuned SmolLM2 as GGUF in llama.cpp: greedy answers beside those of Transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.evaluation.artifacts import export_model
from finray.publishing.gguf import export_gguf
from tests.support import runs

xllamacpp = pytest.importorskip("xllamacpp", reason="`make test-services` runs these in an environment of their own")

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
CONVERTER = Path(sys.prefix) / "converter" / "convert_hf_to_gguf.py"
LENGTH = 40
# Where the two best tokens lie closer in their logits, rounding to f16 may turn them; after that, texts differ.
UNDECIDED = 0.1
# A token, and its log-probability.
Answer = list[tuple[int, float]]


def messages(count: int) -> list[list[dict[str, str]]]:
    """Held-out rows of the quickstart without their answers, and what the model was not tuned for."""
    lines = (ROOT / "examples/quickstart/validation.jsonl").read_text().splitlines()
    held_out = [json.loads(line)["messages"][:-1] for line in lines[:count]]
    others = ("What is the capital of France?", "Write one sentence about a river.")
    return [*held_out, *([{"role": "user", "content": one}] for one in others)]


@dataclass(frozen=True)
class Tuned:
    """A checkpoint of the quickstart's training, prompts, and what plain Transformers answers in fp32."""

    checkpoint: Path
    tokenizer: Any
    prompts: list[list[int]]
    answers: list[Answer]
    # At each token of an answer: how much better it was than the second.
    margins: list[list[float]]


def greedy(model: Any, prompt: list[int]) -> tuple[Answer, list[float]]:
    done = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=LENGTH,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = done.sequences[0, len(prompt) :].tolist()
    logits = torch.stack(done.logits)[:, 0].float()
    chances = logits.log_softmax(-1)
    best = logits.topk(2).values
    return ([(token, float(chances[at, token])) for at, token in enumerate(tokens)], (best[:, 0] - best[:, 1]).tolist())


@pytest.fixture(scope="module")
def tuned(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tuned")
    own = {"adapter": {"rank": 16, "alpha": 32}, "data.max_length": 256, "train.max_steps": 8}
    own |= {"train.global_batch_size": 1, "train.learning_rate": 0.002, "checkpoint.every_steps": 8}
    source = ROOT / "examples/quickstart/train.jsonl"
    runs.run_alone(runs.tiny_run(smollm2_dir, source, folder / "out", own), folder / "run")
    checkpoint = folder / "run" / "checkpoint-000008"
    merged = export_model(checkpoint, folder / "merged", dtype="fp32").folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged).eval(), AutoTokenizer.from_pretrained(merged)
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in messages(4)]
    both = [greedy(model, prompt) for prompt in prompts]
    return Tuned(checkpoint, tokenizer, prompts, [answer for answer, _ in both], [margins for _, margins in both])


Ask = Callable[[list[int]], Answer]


@contextmanager
def llama_cpp(file: Path) -> Iterator[tuple[Any, Ask]]:
    """llama.cpp's server in this process, and what it answers to tokens."""
    options = xllamacpp.CommonParams()
    options.model.path = str(file)
    options.n_ctx, options.n_parallel, options.warmup = 1024, 1, False
    # Its threads wait for each other without sleeping, which takes very long on a busy machine.
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(options)

    def ask(prompt: list[int]) -> Answer:
        asked = {"prompt": prompt, "n_predict": LENGTH, "temperature": 0.0, "n_probs": 1, "cache_prompt": False}
        (found,) = server.handle_completions(asked)["choices"]
        return [(one["id"], one["logprob"]) for one in found["logprobs"]["content"]]

    yield server, ask


def in_common(left: Answer, right: Answer) -> int:
    """How many tokens are the same before the first that is not."""
    same = [one[0] == other[0] for one, other in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def without_end(answer: Answer, tokenizer: Any) -> Answer:
    return answer[:-1] if answer and answer[-1][0] == tokenizer.eos_token_id else answer


def test_f16_answers_as_transformers_does(tuned: Tuned, tmp_path: Path) -> None:
    done = export_gguf(tuned.checkpoint, tmp_path / "gguf", kind="f16", converter=CONVERTER)
    compared, whole = 0, 0
    with llama_cpp(done.file) as (server, ask):
        for asked, prompt, answer, margins in zip(
            messages(4), tuned.prompts, tuned.answers, tuned.margins, strict=True
        ):
            expected = without_end(answer, tuned.tokenizer)
            unsure = [at for at, margin in enumerate(margins) if margin < UNDECIDED]
            until = min([len(expected), *unsure])
            found = without_end(ask(prompt), tuned.tokenizer)
            assert [one for one, _ in found[:until]] == [one for one, _ in expected[:until]]
            for (_, left), (_, right) in zip(found[:until], expected[:until], strict=True):
                assert left == pytest.approx(right, abs=0.05)
            compared += until
            if unsure:
                continue
            whole += 1
            assert len(found) == len(expected)
            # With the template that is in the file.
            told = server.handle_chat_completions({"messages": asked, "max_tokens": LENGTH, "temperature": 0.0})
            text = tuned.tokenizer.decode([one for one, _ in expected])
            assert told["choices"][0]["message"]["content"].strip() == text.strip()
    print(f"f16: {compared} tokens compared, {whole} whole answers")
    assert compared >= 40
    assert whole >= 1


def test_q8_0_is_near(tuned: Tuned, tmp_path: Path) -> None:
    done = export_gguf(tuned.checkpoint, tmp_path / "gguf", kind="q8_0", converter=CONVERTER)
    same, tokens, apart = 0, 0, []
    with llama_cpp(done.file) as (_, ask):
        for prompt, answer in zip(tuned.prompts, tuned.answers, strict=True):
            expected, found = (without_end(one, tuned.tokenizer) for one in (answer, ask(prompt)))
            equal = in_common(expected, found)
            same, tokens = same + equal, tokens + len(expected)
            apart += [abs(left[1] - right[1]) for left, right in zip(expected[:equal], found[:equal], strict=True)]
    print(f"q8_0: {same} of {tokens} tokens before the first that differs; log-probabilities {max(apart):.3f} apart")
    print(f"mean {sum(apart) / len(apart):.4f}; logits on a short text {done.difference:.2e} of their spread apart")
    assert same >= tokens / 2
    assert sum(apart) / len(apart) < 0.1
    # It is another file than that of f16, and the measure sees it.
    assert sum(apart) / len(apart) > 1e-4
