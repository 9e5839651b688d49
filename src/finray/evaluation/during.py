"""Answers to held-out prompts during training, and their scores; ``runtime`` passes it to the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch

from finray import compat
from finray.config.evaluation import ScoringConfig
from finray.config.schema import Config
from finray.config.tasks import metric_name
from finray.data.dataset.prepared import PreparedSplit
from finray.errors import DataError, TrainingError
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.rows import prompt_and_answer
from finray.evaluation.scores.base import Answered, blaming, score_named
from finray.models import attention
from finray.models.loading import DTYPES
from finray.models.towers import text_model
from finray.parallel.base import Strategy, on_all_ranks
from finray.pretrained.tokenizers import load_tokenizer
from finray.training.evaluator import OnProgress
from finray.training.task import Task


class TrainingAnswers:
    """Metrics of greedy answers at an evaluation, in the precision of training; see
    :class:`finray.training.evaluator.AnswerMetrics`."""

    def __init__(self, config: Config, precision: str) -> None:
        self._config = config
        self._precision = precision

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._config.model)

    def __call__(
        self, task: Task, split: PreparedSplit, strategy: Strategy, on_progress: OnProgress = lambda share: None
    ) -> dict[str, float]:
        """The metrics in ``evaluation.metrics`` by name; each rank answers every ``world_size``-th prompt.

        Rows without a prompt are left out; of a pair, the chosen answer is the reference. Raises FinrayError: on every
        rank: no row has a prompt, a prompt has no answer, or a metric fails.
        """
        firsts = split.groups.starts[:-1].tolist()
        pairs = [pair for row in firsts if (pair := prompt_and_answer(*split.row(row)))[0]]
        if not pairs:
            raise DataError(
                "no held-out row has a prompt to answer",
                where="evaluation.generate_rows",
                repair="leave it out, or hold out rows with prompts and answers",
            )
        prompts = [prompt for prompt, _ in pairs[strategy.rank :: strategy.world_size]]
        by_rank = strategy.all_gather_object(
            on_all_ranks(strategy, lambda: self._answer(task.model, prompts, on_progress))
        )
        # Prompts are dealt out one by one; put the answers back in order.
        answers = [by_rank[row % strategy.world_size][row // strategy.world_size] for row in range(len(pairs))]
        first = strategy.rank == 0
        scores = on_all_ranks(strategy, lambda: self._scores(answers, [right for _, right in pairs]) if first else {})
        metrics: dict[str, float] = strategy.broadcast_object(scores)
        return metrics

    def _answer(self, model: Any, prompts: Sequence[Sequence[int]], on_progress: OnProgress) -> list[str]:
        settings = self._config.evaluation
        texts = [""] * len(prompts)
        device = model.device
        amp = torch.autocast(device.type, dtype=DTYPES[self._precision]) if self._precision != "fp32" else nullcontext()
        with _attending_by_itself(model), amp:
            # The engine needs finray's attention, if the model has another.
            engine = TransformersEngine.of(model, self._tokenizer, batch_size=settings.batch_size)
            try:
                sampling = Sampling(max_new_tokens=settings.max_new_tokens)
                for done, answer in enumerate(engine.generate(prompts, sampling)):
                    texts[answer.row] = answer.text
                    on_progress((done + 1) / len(prompts))
            finally:
                engine.close()
        return texts

    def _scores(self, answers: list[str], references: list[list[int]]) -> dict[str, float]:
        expected = [str(self._tokenizer.decode(reference, skip_special_tokens=True)) for reference in references]
        rows = [Answered((answer,), right) for answer, right in zip(answers, expected, strict=True)]
        metrics = {}
        for name in self._config.evaluation.metrics:
            with blaming(name, TrainingError):
                score = score_named(name, self._config.evaluation.scoring or ScoringConfig())
                metrics[metric_name(name)] = float(score.value(rows))
        return metrics


@contextmanager
def _attending_by_itself(model: Any) -> Iterator[None]:
    """Temporarily give a model Transformers' attention: ours for packed rows ignores padding."""
    inner = text_model(model)
    usual = compat.attention_implementation(inner)
    if usual != attention.NAME:
        yield
        return
    try:
        inner.set_attn_implementation("sdpa")
    except ValueError:
        inner.set_attn_implementation("eager")
    try:
        yield
    finally:
        inner.set_attn_implementation(usual)
