"""``finray evaluate``: one or several models on the same rows, with intervals, paired tests and one sentence."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from finray.checkpoint.copies import bring_back, local_copy, named_run
from finray.config.load import Overrides
from finray.config.objectives import REWARD
from finray.config.requests import EvaluationRequest
from finray.config.schema import ModelConfig
from finray.config.tasks import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from finray.evaluation import answers, classifiers, rewards
from finray.evaluation.engines.base import Engine
from finray.evaluation.estimates import Judged, compared_with, directions, evaluated, for_several, sentences
from finray.evaluation.harness import joined
from finray.evaluation.outcome import Comparison, ModelScores, write
from finray.evaluation.overlap import Words, overlap
from finray.evaluation.rows import Lazy
from finray.evaluation.subjects import Case, Progress
from finray.pretrained.tokenizers import load_tokenizer

# The judge of each task's models, and of an objective's where it has another: one file and one line each.
JUDGES: dict[str, Callable[[Case], Judged]] = {
    CAUSAL_LM.name: answers.judge,
    SEQUENCE_CLASSIFICATION.name: classifiers.judge,
    REWARD.name: rewards.judge,
}
_DEFAULTS = EvaluationRequest()
# Packages whose versions are recorded: these always, those of scores where a score or a task has imported them.
_PACKAGES = ("finray", "torch", "transformers", "peft")
_OF_SCORES = {"rouge_score": "rouge-score", "sacrebleu": "sacrebleu", "lm_eval": "lm-eval"}


def evaluate(
    model: str | Path,
    overrides: Overrides = (),
    request: EvaluationRequest = _DEFAULTS,
    *,
    progress: Progress = lambda what, done, *, total, rate="": None,
    spread: Callable[..., Engine] | None = None,
) -> Comparison:
    """Score a model, and compare it with others on the same rows.

    Rows are prepared as for training, so that a prompt has exactly the tokens of training up to the last answer.
    Results are saved as they are computed, and the same call continues from them.

    Args:
        model: a run, checkpoint, adapter or model directory, the URL of a run, or a Hub id.
        overrides: of the run's config, ``section.field=value``.
        request: the other arguments of :func:`finray.evaluate`.
        progress: called with the progress of each part.
        spread: creates an engine of several replicas; None uses one in this process.

    Raises:
        FinrayError: there are no rows, settings contradict each other, or files cannot be loaded or written.
    """
    named, model = model, local_copy(named_run(model))
    case = Case.of(model, overrides, request, tasks=JUDGES, progress=progress, spread=spread)
    judged = JUDGES.get(case.spec.objective, JUDGES[case.spec.name])(case)
    rows, seed, notes = case.rows, request.seed, case.notes
    models = [evaluated(judged, name, seed=seed) for name in judged.statistics]
    models, more = joined(models, judged.harness, seed=seed)
    compared = for_several([*compared_with(judged, seed=seed), *more])
    seen, held_out = None, list[ModelScores]()
    if rows is not None and rows.name == "train":
        notes.append("the model was trained on these rows: their scores measure memorization")
    elif rows is not None and rows.train is None:
        notes.append("the training data is unknown, so overlap with it was not checked")
    elif rows is not None:
        assert rows.train is not None
        tokenizer = load_tokenizer(ModelConfig(name=str(case.tuned.artifact.folder)))
        seen = overlap(rows.split, rows.numbers, rows.train, Words(tokenizer))
        if 0 < len(seen.rows) < len(rows):
            kept = np.array([index not in seen.rows for index in range(len(rows))])
            held_out = [evaluated(judged, name, seed=seed, kept=kept) for name in judged.statistics]
    comparison = Comparison(
        tuple(models),
        tuple(compared),
        sentences(models, compared, judged),
        0 if rows is None else len(rows),
        () if rows is None or judged.prediction is None else Lazy(len(rows), judged.prediction),
        case.folder,
        seen,
        tuple(held_out),
        _made_by(case, judged),
        tuple(dict.fromkeys(notes)),
        judged.classes,
        judged.confusion,
        tuple(case.rates),
        {name: way for name, way in directions(judged, case.tuned.name).items() if name in models[-1].scores},
    )
    write(comparison)
    if request.output is None:
        bring_back(named, model, comparison.folder)
    return comparison


def _made_by(case: Case, judged: Judged) -> dict[str, Any]:
    """The models, rows, settings and versions that the results depend on, as JSON types."""
    rows, data = case.rows, None
    if rows is not None:
        data = {
            "source": case.config.data.source,
            "split": rows.name,
            "fingerprint": rows.dataset.name,
            "content": rows.dataset.content,
            "rows": len(rows),
            "of": len(rows.split),
            "max_rows": case.config.evaluation.max_rows,
            "sample_seed": case.config.run.seed,
        }
    return {
        "model": case.tuned.identity,
        "baselines": {subject.name: subject.identity for subject in case.subjects[:-1]},
        "data": data,
        "dtype": str(case.dtype).removeprefix("torch."),
        **judged.made_by,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
            **{name: version(name) for module, name in _OF_SCORES.items() if module in sys.modules},
        },
    }
