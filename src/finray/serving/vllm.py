"""The batch with vLLM: the same queue, requests and answers as with finray's own engine, on vLLM's kernels and cache.

vLLM's engine runs in this process, step by step, in the thread that owns the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from finray.evaluation.engines.sampling import NO_TOKEN
from finray.evaluation.engines.vllm import VLLMEngine
from finray.serving.batching import AnswerFinished, Queue, ServeJob, TextPiece, TokenLogprob, logprob_of


class VLLMBatcher(Queue):
    """The batch of vLLM.

    Args:
        engine: for a base model, with room for adapters.
        slots, max_queue: as for :class:`finray.serving.batching.Queue`.
    """

    def __init__(self, engine: VLLMEngine, *, slots: int, max_queue: int) -> None:
        super().__init__(slots=slots, max_queue=max_queue)
        self._engine = engine
        # Each row by its request id in vLLM, and the number of its tokens already reported.
        self._rows = dict[str, tuple[ServeJob, int]]()

    def work(self) -> None:
        """One step of vLLM, after adding new rows and removing cancelled ones."""
        gone = [name for name, (job, _) in self._rows.items() if job.is_dropped]
        with self._wake:
            self._working = [job for job in self._working if not (job.is_done or job.is_dropped)]
            room = max(0, self._count - len(self._working))
            coming = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
            self._working += coming
            jobs = list(self._working)
        try:
            self._end(gone)
            for job in coming:
                try:
                    self._rows[self._engine.add(job.prompt, self._settings(job), job.adapter)] = job, 0
                except Exception as error:
                    self.fail([job], error)
            for output in self._engine.step() if self._rows else ():
                self._report(output)
        except Exception as error:
            self.fail(jobs, error)
            self._end(list(self._rows))
        with self._wake:
            self._working = [job for job in self._working if not job.is_done]
            self._wake.notify_all()

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self._rows.pop(name, None)
        self._engine.abort(names)

    def _settings(self, job: ServeJob) -> dict[str, Any]:
        settings = self._engine.settings(replace(job.sampling, max_new_tokens=job.room), job.number, job.ends)
        return settings if job.top is None else {**settings, "logprobs": job.top}

    def _report(self, output: Any) -> None:
        """Report a step's new tokens of a row."""
        if output.request_id not in self._rows:
            return
        job, reported = self._rows[output.request_id]
        made = output.outputs[0]
        for at in range(reported, len(made.token_ids)):
            token = int(made.token_ids[at])
            self.written += 1
            if not 0 <= token < self._engine.vocabulary:
                token = NO_TOKEN
            elif job.top is not None:
                logprobs = made.logprobs[at]
                # vLLM chooses a token whatever its logits are; its probability shows that they were not finite.
                if any(math.isnan(logprob.logprob) for logprob in logprobs.values()):
                    token = NO_TOKEN
                else:
                    job.chosen.append(_logprob(token, logprobs, job.top))
            self.give_safely(job, token)
            if job.is_done:
                self._end([output.request_id])
                return
        if output.finished:
            # It has stopped at what finray does not take for an end.
            job.is_done = True
            job.stream.end(str(job.tokenizer.decode(job.output_ids, skip_special_tokens=True)))
            if job.pieces or job.chosen:
                job.on_event(TextPiece("".join(job.pieces), tuple(job.chosen)))
            job.on_event(AnswerFinished("length" if made.finish_reason == "length" else "stop", len(job.output_ids)))
            self._end([output.request_id])
            return
        self._rows[output.request_id] = job, len(made.token_ids)


def _logprob(token: int, by_token: dict[int, Any], top: int) -> TokenLogprob:
    """vLLM's log-probabilities at a position: of the chosen token, and of the most likely by rank."""
    ranked = sorted((logprob.rank, other, float(logprob.logprob)) for other, logprob in by_token.items())
    likeliest = tuple((other, logprob) for rank, other, logprob in ranked if rank <= top)
    return logprob_of(token, float(by_token[token].logprob), likeliest)
