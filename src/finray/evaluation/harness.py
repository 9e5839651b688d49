"""Runs tasks of EleutherAI's lm-eval on an engine's model, with its adapter; results become scores of rows."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from finray.errors import ConfigError, FinrayError
from finray.evaluation.engines import Continuation, Engine, Sampling
from finray.evaluation.outcome import Compared, ModelScores, ScoreEstimate
from finray.evaluation.result_cache import ResultCache
from finray.evaluation.scores.base import FloatArray, SummedScore
from finray.evaluation.statistics import Interval, interval, paired, within
from finray.files import first_line, seal_of

_MOST_TOKENS = 256
# Metrics that are no share of the rows, though they may lie between 0 and 1.
_NO_SHARES = ("perplexity", "bits_per_byte", "mcc", "likelihood")
_TASK = re.compile(r"^task:\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TaskMetric:
    """A metric of a task: lm-eval's value, and the values of rows if it is their mean."""

    value: float
    error: float | None
    rows: FloatArray | None
    higher_is_better: bool | None = None


def require() -> None:
    """Check that lm-eval is installed. Raises ConfigError: with the command that installs it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "--harness needs lm-eval, which is not installed",
            where="--harness",
            repair="pip install lm-eval (or `pip install 'finray[harness]'`)",
        )


def run(
    engine: Engine,
    tasks: Sequence[str],
    *,
    adapter: bool,
    seed: int,
    cache: ResultCache,
    notify: Callable[[str], None] = lambda line: None,
) -> dict[str, TaskMetric]:
    """Metrics by ``task metric``.

    Args:
        engine: with the model.
        tasks: lm-eval task names, or task files.
        adapter: whether to apply the adapter.
        seed: for few-shot examples.
        cache: saves the answers and likelihoods that lm-eval asks for, by what was asked.
        notify: called with a message if prompts were too long.

    Raises:
        FinrayError: there is no such task, or its data is not available.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names, folders = [], []
    for task in tasks:
        path = Path(task).expanduser()
        named = _TASK.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        names.append(task if named is None else named[1])
        folders += [] if named is None else [str(path.parent)]
    try:
        with cache.writer(made_by={"name": engine.name, "version": engine.version}) as add:
            model = _model(engine, adapter, _Results(cache.values, add))
            report: Any = simple_evaluate(
                model,
                tasks=names,
                # Indexing lm-eval's own tasks, thousands of files, takes seconds.
                task_manager=TaskManager(include_path=folders or None, include_defaults=len(folders) < len(names)),
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                bootstrap_iters=0,
            )
    except (FinrayError, MemoryError):
        raise
    except Exception as error:
        # Task files are third-party, and their data is on the Hub: they can fail in any way.
        raise FinrayError(
            f"lm-eval failed: {type(error).__name__}: {first_line(error)}",
            where=f"--harness {','.join(tasks)}",
            repair="check the task names (`lm_eval ls tasks`) and the connection to the Hub",
        ) from None
    if too_long := model.too_long:
        prompts = "1 prompt of lm-eval was" if len(too_long) == 1 else f"{len(too_long):,} prompts of lm-eval were"
        notify(
            f"{prompts} too long and lost the beginning: with what follows, the longest has {max(too_long):,} tokens, "
            f"and the model reads {engine.max_length:,}"
        )
    metrics: dict[str, TaskMetric] = {}
    for task, results in report["results"].items():
        for key, value in results.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            samples = [sample for sample in report["samples"].get(task, ()) if sample["filter"] == chosen]
            rows = [sample.get(metric) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            rows_N1 = None
            if rows and all(isinstance(row, int | float | np.number) for row in rows):
                rows_N1 = np.array(rows, dtype=np.float64)[:, None]
                # Aggregations other than a mean have no values per row.
                rows_N1 = rows_N1 if np.isclose(rows_N1.mean(), value) else None
            spread = results.get(f"{metric}_stderr,{chosen}")
            label = f"{task} {metric}" if chosen == "none" else f"{task} {metric} ({chosen})"
            deviation = float(spread) if isinstance(spread, int | float) else None
            better = report.get("higher_is_better", {}).get(task, {}).get(metric)
            metrics[label] = TaskMetric(float(value), deviation, rows_N1, None if better is None else bool(better))
    return metrics


def joined(
    models: Sequence[ModelScores], metrics: dict[str, dict[str, TaskMetric]], *, seed: int
) -> tuple[list[ModelScores], list[Compared]]:
    """Models with the harness's scores added, and the comparison of the last with each other one."""
    mean, more = SummedScore().total, []
    with_them = []
    for model in models:
        scores = dict(model.scores)
        for name, metric in metrics.get(model.name, {}).items():
            is_share = 0 <= metric.value <= 1 and not any(part in name for part in _NO_SHARES)
            bounds = (0.0, 1.0) if is_share else (None, None)
            if metric.rows is not None:
                span = interval(metric.rows, mean, seed=seed, bounds=bounds)
            elif metric.error is not None:
                reach = 1.959964 * metric.error
                ends = within(metric.value - reach, metric.value + reach, metric.value, bounds)
                span = Interval(*ends, "lm-eval's standard error")
            else:
                span = Interval(None, None, "none: lm-eval returns a single number")
            scores[name] = ScoreEstimate(metric.value, span, is_share)
        with_them.append(replace(model, scores=scores))
    for other in models[:-1]:
        for name, metric in metrics.get(models[-1].name, {}).items():
            first = metrics[other.name][name].rows
            if metric.rows is not None and first is not None and len(first) == len(metric.rows):
                compared = paired(first, metric.rows, mean, seed=seed)
                more.append(Compared(name, other.name, len(first), compared))
    return with_them, more


def _generated(
    engine: Engine,
    adapter: bool,
    sampling: Sampling,
    numbers: Sequence[int],
    prompts: Sequence[list[int]],
    places: list[int],
) -> Iterator[tuple[int, str]]:
    """Answers to the prompts at some places; ``numbers`` are those of their requests."""
    rows = {numbers[place]: place for place in places}
    for answer in engine.generate([prompts[place] for place in places], sampling, rows=[*rows], adapter=adapter):
        yield rows[answer.row], answer.text


class _Results:
    """Results of requests by their content: known from before, or computed now, and saved by ``add``."""

    def __init__(self, results: dict[int, Any], add: Callable[[int, Any], None]) -> None:
        self._known, self._add = results, add
        self._asked: Counter[str] = Counter()

    def of(self, requests: Sequence[Any], compute: Callable[[list[int]], Iterator[tuple[int, Any]]]) -> list[Any]:
        """Their results in order; ``compute`` yields those of the places that are missing, as they finish."""
        keys = []
        for request in requests:
            content = seal_of({"asked": request})
            # A request that is repeated, such as another attempt, has a result of its own each time.
            keys.append(int(content[:15], 16) + self._asked[content])
            self._asked[content] += 1
        if missing := [place for place, key in enumerate(keys) if key not in self._known]:
            for place, result in compute(missing):
                self._add(keys[place], result)
        return [self._known[key] for key in keys]


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """How lm-eval wants answers of one request to be generated."""
    until = options.get("until") or []
    until = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    heat = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
    most = int(options.get("max_gen_toks", _MOST_TOKENS))
    return Sampling(most, heat, float(options.get("top_p", 1.0)), stop=until)


def _model(engine: Engine, adapter: bool, results: _Results) -> Any:
    """The engine as an lm-eval model."""
    from lm_eval.api.model import TemplateLM

    limit = engine.max_length or 2**20

    class EngineLM(TemplateLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            # Tokens of requests that were longer than the model reads.
            self.too_long: list[int] = []

        tokenizer = engine.tokenizer
        tokenizer_name = str(engine.tokenizer.name_or_path)

        @property
        def eot_token_id(self) -> int:
            return int(engine.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            bos = engine.tokenizer.bos_token_id
            return self.eot_token_id if bos is None else int(bos)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(engine.tokenizer(string, **special)["input_ids"])

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            apply = engine.tokenizer.apply_chat_template
            return str(apply(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt))

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            sizes = [len(context) + len(tokens) for _, context, tokens in requests]
            self.too_long += [size for size in sizes if size > limit]
            continuations = [
                # As lm-eval's own models do: truncate from the left.
                Continuation((context + tokens)[-limit:][: -len(tokens)] or [self.prefix_token_id], tokens)
                for _, context, tokens in requests
            ]

            def compute(places: list[int]) -> Iterator[tuple[int, Any]]:
                for likelihood in engine.log_likelihood([continuations[place] for place in places], adapter=adapter):
                    yield places[likelihood.row], [float(sum(likelihood.logprobs)), likelihood.is_greedy]

            asked = [[list(continuation.context), list(continuation.tokens)] for continuation in continuations]
            return [(value, is_greedy) for value, is_greedy in results.of(asked, compute)]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            sums = []
            for request in requests:
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                # A window has one token more than the model reads: the context at its start.
                windows = get_rolling_token_windows(ids, self.prefix_token_id, limit - 1, 1)
                parts = [(None, *make_disjoint_window(window)) for window in windows]
                sums.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
            return sums

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            texts = [""] * len(requests)
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(number)
            for numbers in groups.values():
                sampling = _sampling(requests[numbers[0]].args[1])
                most = sampling.max_new_tokens
                prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
                self.too_long += [len(prompt) + most for prompt in prompts if len(prompt) + most > limit]
                prompts = [prompt[-max(1, limit - most) :] for prompt in prompts]
                compute = partial(_generated, engine, adapter, sampling, numbers, prompts)
                answers = results.of([[prompt, asdict(sampling)] for prompt in prompts], compute)
                for number, text in zip(numbers, answers, strict=True):
                    texts[number] = text
            return texts

    return EngineLM()
