"""The work of one model: losses, answers and likelihoods of choices, each saved as it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from finray.errors import DataError
from finray.evaluation.engines import Continuation, Engine, Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.outcome import Rate
from finray.evaluation.result_cache import ResultCache
from finray.evaluation.rows import EvaluationRows
from finray.evaluation.scores.base import Answered, FloatArray
from finray.evaluation.subjects import Case, Subject
from finray.files import seal_of
from finray.tasks.causal_lm import CausalLM

# Rows passed to an engine (or to each replica) at a time: its memory does not grow with the number of rows.
_ROWS = 512


@dataclass(slots=True)
class Work:
    """The results of one model, saved as they are computed."""

    subject: Subject
    rows: EvaluationRows
    case: Case
    sampling: Sampling
    open: Callable[[], Engine]
    # A user's task, whose loss is taken.
    task: type[CausalLM] | None = None
    # The engines that computed all of it, now or in an earlier call.
    made_by: list[dict[str, str]] = field(default_factory=list)

    def losses(self, following: int = 0) -> FloatArray:
        """Summed loss in nats and number of tokens of each row's answers (N, 2); of as many ``following`` rows too,
        after each (N * (1 + following), 2)."""
        rows, task = self.rows, self.task
        of_task = {} if task is None else {"task": self.case.config.model.task}
        cache = ResultCache(self.case.folder, "losses", {**self._cache_key(), **of_task})
        whole = self.subject.turns
        numbers = [number + place for number in rows.numbers for place in range(1 + following)]
        with self._computing("loss", cache, numbers) as (parts, save):
            for part in parts:
                if task is not None:
                    engine = self.open()
                    assert isinstance(engine, TransformersEngine)
                    each = engine.sums_of(task, rows.split, part, adapter=self.subject.adapter)
                    for number, sums in zip(part, each, strict=True):
                        save(number, sums, tokens=len(rows.split.row(number)[0]))
                    continue
                pairs = [self._continuation(number, whole) for number in part]
                engine = self.open()
                likelihoods = engine.log_likelihood([row for row, _ in pairs], adapter=self.subject.adapter)
                for likelihood in likelihoods:
                    learned = np.array(pairs[likelihood.row][1])
                    nats = -np.array(likelihood.logprobs)[learned]
                    save(part[likelihood.row], [float(nats.sum()), int(learned.sum())], tokens=len(learned))
        return np.array([cache.values[number] for number in numbers], dtype=np.float64)

    def answered(
        self,
        needs: Collection[str],
        attempts: int,
        choices: dict[int, list[str]],
        columns: dict[int, dict[str, Any]],
        tokenizer: Any,
    ) -> list[Answered]:
        """The rows, with what scores need."""
        likelihoods = self.likelihoods(choices, tokenizer) if choices else []
        answers = self.answers(attempts) if "answers" in needs else []
        return [
            Answered(
                answers[index] if answers else (),
                tokenizer.decode(self.rows.reference(index), skip_special_tokens=True),
                columns.get(index, {}),
                *(likelihoods[index] if choices else ()),
            )
            for index in range(len(self.rows))
        ]

    def answers(self, attempts: int) -> list[tuple[str, ...]]:
        """Texts for each row."""
        rows = self.rows
        # What is not set is left out: answers of earlier versions, which did not have it, are still known.
        sampling = {name: value for name, value in asdict(self.sampling).items() if value is not None}
        # Several answers are numbered by how many each row has.
        several = {"attempts": attempts} if attempts > 1 else {}
        cache = ResultCache(self.case.folder, "answers", {**self._cache_key(), "sampling": sampling, **several})
        place = {number: index for index, number in enumerate(rows.numbers)}
        wanted = [number * attempts + attempt for number in rows.numbers for attempt in range(attempts)]
        with self._computing("answers", cache, wanted) as (parts, save):
            for part in parts:
                prompts = [rows.prompt(place[number // attempts]) for number in part]
                engine = self.open()
                for answer in engine.generate(prompts, self.sampling, rows=part, adapter=self.subject.adapter):
                    save(answer.row, {"text": answer.text, "finish": answer.finish}, tokens=len(answer.tokens) + 1)
        limit = self.sampling.max_new_tokens
        if cut := sum(cache.values[number]["finish"] == "length" for number in wanted):
            self.case.notes.append(
                f"{self.subject.name}: {cut} of {len(wanted)} answers were cut off, after --max-new-tokens={limit} or "
                "at the model's length"
            )
        texts = (cache.values[number]["text"] for number in wanted)
        return [tuple(next(texts) for _ in range(attempts)) for _ in rows.numbers]

    def likelihoods(
        self, choices: dict[int, list[str]], tokenizer: Any
    ) -> list[tuple[tuple[float, ...], tuple[int, ...], int]]:
        """Log-likelihoods of the choices of each row, their bytes, and which is right."""
        rows = self.rows
        right_choices = []
        for index in range(len(rows)):
            reference = tokenizer.decode(rows.reference(index), skip_special_tokens=True).strip()
            if reference not in choices[index]:
                raise DataError(
                    f"the answer `{reference[:60]}` is not one of the choices {', '.join(choices[index])}",
                    where=rows.split.where(rows.numbers[index]),
                    repair="the answer must be one of them",
                )
            right_choices.append(choices[index].index(reference))
        cache = ResultCache(
            self.case.folder, "choices", {**self._cache_key(), "choices": seal_of({"all": list(choices.items())})}
        )
        place = {number: index for index, number in enumerate(rows.numbers)}
        with self._computing("choices", cache, list(rows.numbers)) as (parts, save):
            for part in parts:
                owner, continuations = [], []
                for number in part:
                    prompt = rows.prompt(place[number])
                    # As answers begin in training: a space between plain words belongs to the answer's first token.
                    space = " " if tokenizer.decode(rows.reference(place[number]))[:1] == " " else ""
                    for choice in choices[place[number]]:
                        ids = tokenizer(space + choice, add_special_tokens=False)["input_ids"]
                        owner.append(number)
                        continuations.append(Continuation(prompt, ids))
                engine = self.open()
                waiting: dict[int, dict[int, list[float]]] = {}
                for likelihood in engine.log_likelihood(continuations, adapter=self.subject.adapter):
                    number = owner[likelihood.row]
                    logprobs = waiting.setdefault(number, {})
                    logprobs[likelihood.row] = list(likelihood.logprobs)
                    if len(logprobs) == len(choices[place[number]]):
                        sums = [float(sum(logprobs[row])) for row in sorted(logprobs)]
                        save(number, sums, tokens=sum(map(len, logprobs.values())))
        return [
            (tuple(cache.values[number]), tuple(len(text.encode()) for text in choices[index]), right_choices[index])
            for index, number in enumerate(rows.numbers)
        ]

    def _cache_key(self) -> dict[str, Any]:
        computed = {"engine": self.case.request.engine, "dtype": str(self.case.dtype)}
        return {"model": self.subject.identity, "rows": self.rows.fingerprint, **computed}

    def _continuation(self, number: int, whole: bool) -> tuple[Continuation, list[bool]]:
        """A row from its first trained token to the last one, or to its end (``whole``), and a mask of the trained."""
        ids, mask = self.rows.split.row(number)
        learned = np.flatnonzero(mask[1:]) + 1
        first, stop = int(learned[0]), len(ids) if whole else int(learned[-1]) + 1
        return Continuation(ids[:first].tolist(), ids[first:stop].tolist()), mask[first:stop].astype(bool).tolist()

    @contextmanager
    def _computing(self, what: str, cache: ResultCache, numbers: list[int]) -> Iterator[Any]:
        """The remaining rows in parts, and a function that saves a result and reports the rate."""
        left = [number for number in numbers if number not in cache.values]
        part_name = f"{self.subject.name} {what}"
        if not left:
            self.case.progress(part_name, len(numbers), total=len(numbers), rate="kept from before")
            self.made_by += cache.made_by
            yield [], None
            return
        engine = self.open()
        began, computed = time.perf_counter(), Rate(self.subject.name, what, 0, 0, 0.0)
        with cache.writer(made_by={"name": engine.name, "version": engine.version}) as add:

            def save(number: int, value: Any, *, tokens: int) -> None:
                nonlocal computed
                add(number, value)
                rows, tokens, seconds = computed.rows + 1, computed.tokens + tokens, time.perf_counter() - began
                computed = Rate(self.subject.name, what, rows, tokens, seconds)
                done = len(numbers) - len(left) + rows
                self.case.progress(part_name, done, total=len(numbers), rate=computed.text())

            size = _ROWS * self.case.request.replicas
            yield [left[at : at + size] for at in range(0, len(left), size)], save
        self.case.rates.append(computed)
        self.made_by += cache.made_by
