"""Names in a config that stand for code: of finray, of an installed package, or of your own.

A name is looked up in finray's table, then among the entry points of installed packages (in a group of the table's
name), and else it is written ``package.module:Name``; the working directory is searched too. docs/guide/extending.md
shows one of each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from finray.config.names import not_yet
from finray.errors import ConfigError, did_you_mean
from finray.limits import cut

# What can be extended: group of entry points, and finray's own by name. A new one is a file and a line here.
TABLES: dict[str, dict[str, str]] = {
    "finray.tasks": {
        "causal_lm": "finray.tasks.causal_lm:CausalLM",
        "sequence_classification": "finray.tasks.sequence_classification:SequenceClassification",
    },
    "finray.objectives": {
        "sft": "finray.objectives.sft:SFT",
        "classification": "finray.objectives.classification:ClassificationObjective",
        "dpo": "finray.objectives.preferences:DPO",
        "orpo": "finray.objectives.preferences:ORPO",
        "simpo": "finray.objectives.preferences:SimPO",
        "reward": "finray.objectives.reward:Reward",
        "kto": "finray.objectives.kto:KTO",
    },
    "finray.strategies": {
        "ddp": "finray.parallel.ddp:DDPStrategy",
        "fsdp": "finray.parallel.fsdp:FSDPStrategy",
        "deepspeed": "finray.parallel.deepspeed.strategy:DeepSpeedStrategy",
    },
    "finray.adapter_methods": {
        "lora": "finray.models.adapter_methods:LORA",
        "rslora": "finray.models.adapter_methods:RSLORA",
        "dora": "finray.models.adapter_methods:DORA",
        "pissa": "finray.models.adapter_methods:PISSA",
    },
    "finray.trackers": {
        "tensorboard": "finray.tracking.tensorboard:TensorBoardTracker",
        "wandb": "finray.tracking.wandb:WandbService",
        "mlflow": "finray.tracking.mlflow:MlflowService",
    },
    "finray.engines": {
        "transformers": "finray.evaluation.engines.transformers:TransformersEngine",
        "vllm": "finray.evaluation.engines.vllm:VLLMEngine",
    },
    "finray.metrics": {
        "exact_match": "finray.evaluation.scores.match:ExactMatch",
        "normalised_match": "finray.evaluation.scores.match:NormalisedMatch",
        "numeric_answer": "finray.evaluation.scores.match:NumericAnswer",
        "multiple_choice": "finray.evaluation.scores.match:MultipleChoice",
        "multiple_choice_by_length": "finray.evaluation.scores.match:MultipleChoiceByLength",
        "json_valid": "finray.evaluation.scores.fields:JSONValid",
        "json_f1": "finray.evaluation.scores.fields:JSONFields",
        "rouge1": "finray.evaluation.scores.ngrams:Rouge",
        "rouge2": "finray.evaluation.scores.ngrams:Rouge2",
        "rougeL": "finray.evaluation.scores.ngrams:RougeL",
        "rougeLsum": "finray.evaluation.scores.ngrams:RougeLsum",
        "bleu": "finray.evaluation.scores.ngrams:BLEU",
        "chrf": "finray.evaluation.scores.ngrams:ChrF",
        "bertscore": "finray.evaluation.scores.bertscore:BERTScore",
        "bertscore_precision": "finray.evaluation.scores.bertscore:BERTScorePrecision",
        "bertscore_recall": "finray.evaluation.scores.bertscore:BERTScoreRecall",
        "pass_at_k": "finray.evaluation.scores.code:PassAtK",
    },
}


def load_named(group: str, name: str, *, where: str) -> Any:
    """The object that a name in a config stands for.

    Args:
        group: of :data:`TABLES`.
        name: in the table, of an entry point, or ``package.module:Name``.
        where: dotted config path, for the error.

    Raises:
        ConfigError: there is no such thing, or importing it fails.
    """
    table = TABLES[group]
    if name not in table and ":" not in name:
        # It reads a file of every installed package.
        table = {**{point.name: point.value for point in entry_points(group=group)}, **table}
    path = table.get(name, name)
    if ":" not in path:
        raise ConfigError(
            _unknown(name, table), where=where, repair="use one of these, or your own package.module:Name"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    value = imported(
        path, where=where, repair="write package.module:Name, and run finray where that module can be imported"
    )
    if group != "finray.adapter_methods" and not callable(value):
        kind = type(value).__name__
        raise ConfigError(f"`{path}` is a {kind}, not a class or a function", where=where, repair="name one of these")
    return value


def imported(path: str, *, where: str, repair: str) -> Any:
    """The object that ``package.module:Name`` names. The module is third-party code, and may do anything when
    imported.
    Raises ConfigError: there is no such thing, or importing it fails."""
    module_name, _, attribute = path.partition(":")
    try:
        if not module_name or not attribute:
            raise ImportError("write package.module:Name")
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise ConfigError(f"`{path}` cannot be imported: {kind}{cut(str(error))}", where=where, repair=repair) from None


def named(group: str, *others: str) -> Callable[[str], str]:
    """A validator of a field that names an extension, or one of the ``others``, which stand for no code.

    Nothing is imported, so that loading a config stays quick.
    """

    def check(value: str) -> str:
        if value in others or value in TABLES[group] or ":" in value:
            return value
        installed = [point.name for point in entry_points(group=group)]
        if value not in installed:
            raise ValueError(_unknown(value, [*TABLES[group], *others, *installed]))
        return value

    return check


def _unknown(name: str, names: Iterable[str]) -> str:
    names = [*names]
    near = did_you_mean(name.lower(), names) if name.lower() in names else ""
    method = "" if near else not_yet(name)
    hint = f" ({method})" if method else near or did_you_mean(name, names)
    return f"unknown name `{name}`{hint}; known names are {', '.join(names)}, or your own as package.module:Name"
