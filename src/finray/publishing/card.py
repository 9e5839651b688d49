"""The model card: base model, data, method, scores, how to load the model, and how to reproduce it.

All of it comes from files of the run. It contains nothing of this machine: paths are shortened to names, secrets
masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finray.config.objectives import objective_name
from finray.config.paths import is_template, is_url
from finray.config.preference import BETA, TAKEN
from finray.config.redact import NAMED_BY_DATA, redact
from finray.config.schema import Config
from finray.errors import FinrayError
from finray.evaluation.outcome import METRICS_FILE
from finray.evaluation.subjects import files_of
from finray.files import FileKind
from finray.models.artifacts import Artifact, task_of

_SCORES = FileKind(FinrayError, repair="run `finray evaluate` again, or delete it")
# Licence fields are copied as a whole.
_LICENCE = ("license", "license_name", "license_link")
# Paths and requested resources of a run are private.
_PRIVATE = (
    *("run.output_dir", "prepare.dir", "prepare.local_dir", "cluster.address", "cluster.env", "tracking.mlflow_uri"),
    "export",
)
# Fields that hold texts, and those that hold paths; in other fields a path is known by its form.
_TEXTS = (*NAMED_BY_DATA, "system", "input_template", "output_template", "new_tokens", "labels", "choices")
_PATHS = (
    *("name", "chat_template", "start_from", "reference", "source", "eval_source", "deepspeed_config", "encoder"),
    "local_dir",
)
_TAGS = {"causal_lm": "text-generation", "sequence_classification": "text-classification"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The content of a model card.

    Attributes:
        repo: name of the model.
        artifact: its weights.
        merged: whether the adapter was merged.
        base: public name of the base model; None if it has none.
        card: front matter of the base model's own card.
        config: of the run; None where there is no run.
        resolved: what the run decided, by name.
        workers: training workers of its last start; None if that is not known.
        summary: of the finished run; None if it is not finished.
        step: the checkpoint that is pushed.
        metrics: of the evaluation during training, at that step.
        scores: results of `finray evaluate` for these weights; None if there are none.
        version: of finray.
    """

    repo: str
    artifact: Artifact
    merged: bool
    base: str | None
    version: str
    card: Mapping[str, Any] = field(default_factory=dict)
    config: Config | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    summary: Mapping[str, Any] | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Any] | None = None


def scores_of(run: Path, weights: Path) -> dict[str, Any] | None:
    """Results of `finray evaluate` for these weights, not for earlier ones. Raises FinrayError: the file is damaged."""
    for folder in (run / "evaluation" / weights.name, run / "evaluation", weights / "evaluation"):
        if (folder / METRICS_FILE).is_file():
            plain = _SCORES.json(folder / METRICS_FILE, dict[str, Any], run)
            evaluated = (plain.get("made_by", {}).get("model") or {}).get("weights")
            if evaluated == files_of(str(weights)):
                return plain
    return None


def card(facts: ModelFacts) -> str:
    """The text of ``README.md``, front matter first."""
    sections = (_what, _scores, _data, _training, _loading, _licence, _again)
    parts = [f"# {facts.repo.rpartition('/')[2]}", *(section(facts) for section in sections)]
    front = yaml.safe_dump(_front(facts), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def _front(facts: ModelFacts) -> dict[str, Any]:
    whole = facts.merged or not facts.artifact.is_adapter
    front: dict[str, Any] = {"library_name": "transformers" if whole else "peft"}
    if (tag := _TAGS.get(task_of(facts.artifact.notes))) is not None:
        front["pipeline_tag"] = tag
    if facts.base is not None:
        front |= {"base_model": facts.base, "base_model_relation": "finetune" if whole else "adapter"}
    front |= {name: facts.card[name] for name in _LICENCE if facts.card.get(name)}
    if facts.card.get("language"):
        front["language"] = facts.card["language"]
    if datasets := [name for name in _sources(facts.config) if _is_hub_id(name)]:
        front["datasets"] = datasets
    method = None if facts.config is None else facts.config.adapter.method
    objective = None if facts.config is None else facts.config.train.objective
    front["tags"] = [
        "finray",
        *([method] if method not in (None, "none") else []),
        *([objective] if objective in TAKEN else []),
        *(["merged"] if facts.merged else []),
    ]
    if facts.scores is not None and (models := facts.scores["models"]):
        *_, scores = models.values()
        values = [
            {"type": score, "value": round(value["value"], 6), "name": score.replace("_", " ")}
            for score, value in scores.items()
            if isinstance(value, Mapping)
        ]
        made_of = (facts.scores["made_by"].get("data") or {}).get("source") or "held-out rows"
        rows = {"name": _short(str(made_of)), "type": str(made_of) if _is_hub_id(str(made_of)) else "custom"}
        task = {"type": _TAGS.get(task_of(facts.artifact.notes), "text-generation")}
        result = {"task": task, "dataset": rows, "metrics": values}
        front["model-index"] = [{"name": facts.repo.rpartition("/")[2], "results": [result]}]
    return front


def _what(facts: ModelFacts) -> str:
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else "a local model"
    config = facts.config
    if facts.merged and facts.artifact.is_adapter:
        kind = f"{base} with an adapter ({_method(config)}) merged into its weights"
    elif facts.artifact.is_adapter:
        kind = f"An adapter ({_method(config)}) for {base}, in PEFT's format"
    else:
        kind = f"{base}, all of whose weights were trained further"
    step = "" if facts.step is None else f" These are the weights after step {facts.step:,}"
    total = "" if facts.summary is None or not step else f" of {facts.summary['step']:,}"
    return f"{kind[0].upper()}{kind[1:]}. Fine-tuned with finray {facts.version}.{step}{total}{'.' if step else ''}"


def _method(config: Config | None) -> str:
    return "LoRA" if config is None else f"{config.adapter.method}, rank {config.adapter.rank}"


def _scores(facts: ModelFacts) -> str:
    if facts.scores is None:
        if not facts.metrics:
            return ""
        rows = [[name.replace("_", " "), f"{value:.4g}"] for name, value in facts.metrics.items()]
        return "## Evaluation\n\nOn held-out rows, in the training:\n\n" + _table(["metric", "value"], rows)
    scores = facts.scores
    models: dict[str, dict[str, Any]] = scores["models"]
    names = list(models)
    rows = [
        [score.replace("_", " "), *(_interval(models[name].get(score)) for name in names)]
        for score in models[names[-1]]
    ]
    short = {name: _short(name) for name in names}
    if len({*short.values()}) < len(names):
        short = {name: f"{_short(name)} ({number})" for number, name in enumerate(names, start=1)}
    lines = [
        f"## Evaluation\n\nOn {scores['rows']:,} rows, with 95 % intervals:\n",
        _table(["", *short.values()], rows),
    ]
    for sentence in scores.get("says") or ():
        for name in sorted(names, key=len, reverse=True):
            sentence = sentence.replace(name, short[name])
        lines.append(f"\n{sentence}")
    seen = scores.get("in_training_data")
    # Its `rows` are examples.
    if seen is not None and (count := seen["equal"] + seen["shares_13_words"]):
        lines.append(f"\n{count:,} of these rows are in the training data, whole or in part.")
    return "\n".join(lines)


def _interval(score: Any) -> str:
    if not isinstance(score, Mapping):
        return "" if score is None else f"{score:.4g}"
    ends = "" if score.get("low") is None else f" [{score['low']:.4g}, {score['high']:.4g}]"
    return f"{score['value']:.4g}{ends}"


def _data(facts: ModelFacts) -> str:
    if facts.config is None:
        return ""
    data = facts.config.data
    named = (
        f"[{source}](https://huggingface.co/datasets/{source})" if _is_hub_id(source) else f"`{_short(source)}`"
        for source in _sources(facts.config)
    )
    return f"## Data\n\nTrained on {', '.join(named)}, of which rows have at most {data.max_length:,} tokens."


def _training(facts: ModelFacts) -> str:
    config, resolved, done = facts.config, facts.resolved, facts.summary
    if config is None:
        return ""
    train, adapter = config.train, config.adapter
    rows = [["objective", _objective(config)]]
    rows += [["weights trained", "all" if adapter.method == "none" else _method(config)]]
    if adapter.method != "none":
        rows += [["alpha", f"{adapter.alpha:g}"], ["dropout", f"{adapter.dropout:g}"]]
        targets = adapter.target_modules
        rows += [["target modules", targets if isinstance(targets, str) else ", ".join(targets)]]
    rows += [
        [
            "learning rate",
            f"{train.learning_rate if isinstance(train.learning_rate, float) else resolved['learning_rate']:g}",
        ],
        ["schedule", train.schedule],
        ["optimizer", train.optimizer],
        ["weight decay", f"{train.weight_decay:g}"],
        ["batch size", str(resolved.get("global_batch_size", train.global_batch_size))],
        ["packing", str(resolved.get("packs", config.data.packing)).lower()],
        ["precision", str(resolved.get("precision", train.precision))],
        ["base stored in", f"{resolved['bits']} bits" if resolved.get("bits") else "full precision"],
        ["workers", f"{facts.workers or config.cluster.num_workers}, {resolved.get('strategy', 'ddp')}"],
        ["seed", str(config.run.seed)],
    ]
    if done is not None:
        rows += [["steps", f"{done['step']:,}"], ["tokens", f"{done['tokens']:,}"]]
        rows += [["training time", f"{done['train_seconds']:,.0f} s"]]
        if done.get("final_loss") is not None:
            rows += [["loss of the last step", f"{done['final_loss']:.4f}"]]
    return "## Training\n\n" + _table(["", ""], rows)


def _objective(config: Config) -> str:
    """What was learned, with beta and the other settings that are not the defaults."""
    name, section = objective_name(config), config.preference
    plain = section.model_dump(exclude_defaults=True) if name in TAKEN else {}
    if name in BETA:
        plain = {"beta": BETA[name]} | plain
    values = [
        f"{key.replace('_', ' ')} {_short(str(value)) if key == 'reference' else value}" for key, value in plain.items()
    ]
    return ", ".join([name, *values])


def _loading(facts: ModelFacts) -> str:
    notes, repo = facts.artifact.notes, facts.repo
    auto = notes.get("auto_class", "AutoModelForCausalLM")
    is_adapter = facts.artifact.is_adapter and not facts.merged
    lines = ["from peft import PeftModel"] if is_adapter else []
    lines += [f"from transformers import {auto}, AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{repo}")']
    if is_adapter:
        assert facts.artifact.base is not None
        options = f', revision="{facts.artifact.base.revision}"' if facts.artifact.base.revision else ""
        if notes.get("problem") is not None:
            options += f", num_labels={len(notes.get('labels') or ()) or 1}"
        lines += [f'base = {auto}.from_pretrained("{facts.base}"{options}, dtype="auto")']
        if notes.get("new_tokens"):
            lines += ["if len(tokenizer) > base.get_input_embeddings().weight.shape[0]:"]
            lines += ["    base.resize_token_embeddings(len(tokenizer))"]
        if facts.artifact.is_reward:
            # Without padding its head would read another token than the one it was trained at.
            lines += ["if base.config.pad_token_id is None:"]
            lines += ["    base.config.pad_token_id = tokenizer.pad_token_id"]
        lines += [f'model = PeftModel.from_pretrained(base, "{repo}")']
    else:
        lines += [f'model = {auto}.from_pretrained("{repo}", dtype="auto")']
    system = [{"role": "system", "content": notes["system"]}] if notes.get("system") else []
    arguments = "".join(f", {name}={value!r}" for name, value in (notes.get("chat_template_arguments") or {}).items())
    if facts.artifact.is_reward:
        turns = [*system, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "How may I help?"}]
        if notes.get("rows") == "chat":
            lines += ["", f"messages = {turns!r}"]
            # The reward is read at the end of the answer, which some templates follow by a line break.
            lines += [f"text = tokenizer.apply_chat_template(messages, tokenize=False{arguments}).rstrip()"]
            lines += ['inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")']
        else:
            lines += ["", 'text = "a prompt" + " and its answer" + tokenizer.eos_token']
            lines += ['inputs = tokenizer(text, return_tensors="pt")']
        lines += ["reward = model(**inputs).logits.item()"]
    elif notes.get("rows") == "chat":
        lines += [
            "",
            f"messages = {[*system, {'role': 'user', 'content': 'Hello'}]!r}",
            "inputs = tokenizer.apply_chat_template(",
            f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{arguments}',
            ")",
            "answer = model.generate(**inputs, max_new_tokens=64)",
            'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    elif notes.get("problem") is not None:
        lines += ["", 'logits = model(**tokenizer("a text", return_tensors="pt")).logits']
        if names := notes.get("labels"):
            lines += [f"names = {list(names)!r}"]
    return "## How to load it\n\n```python\n" + "\n".join(lines) + "\n```"


def _licence(facts: ModelFacts) -> str:
    if not facts.artifact.is_adapter and facts.base is None:
        return ""
    named = [str(facts.card[name]) for name in _LICENCE if facts.card.get(name)]
    if named:
        return f"## Licence\n\nThat of the base model, which goes for this one too: {', '.join(named)}."
    return "## Licence\n\nThat of the base model goes for this one too. Its card names none that could be read."


def _again(facts: ModelFacts) -> str:
    if facts.config is None:
        return ""
    plain = _shortened(redact(facts.config.model_dump(mode="json", exclude_defaults=True)))
    for path in _PRIVATE:
        section, _, name = path.partition(".")
        if not name:
            plain.pop(section, None)
        elif section in plain:
            plain[section].pop(name, None)
    kept = yaml.safe_dump({name: value for name, value in plain.items() if value}, sort_keys=False, allow_unicode=True)
    return (
        "## How to make it again\n\nWith this file, whose local paths are shortened to names, and `finray train "
        f"config.yaml`, with finray {facts.version}:\n\n```yaml\n{kept}```"
    )


def _shortened(value: Any, field: str = "") -> Any:
    """A value of a config whose paths and URLs are shortened; texts that contain one or look like one are not."""
    if isinstance(value, Mapping):
        return {key: _shortened(item, field if field in _TEXTS else key) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item, field) for item in value]
    if not isinstance(value, str) or field in _TEXTS or (field == "chat_template" and is_template(value)):
        return value
    # Only a path may hold white space.
    may_be = field in _PATHS or not any(character.isspace() for character in value)
    return _short(value) if may_be and (is_url(value) or value.startswith(("/", "~", "file://"))) else value


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sources(config: Config | None) -> list[str]:
    data = None if config is None else config.data
    sources = [] if data is None else [data.source, *(part.source for part in data.mix)]
    return list(dict.fromkeys(source for source in sources if source))


def _is_hub_id(name: str) -> bool:
    path = Path(name).expanduser()
    return not (is_url(name) or path.is_absolute() or path.exists() or name.startswith(".") or name.count("/") != 1)


def _short(name: str) -> str:
    """The last component of a path or URL."""
    return name if _is_hub_id(name) else name.rstrip("/").rpartition("/")[2].partition("?")[0]
