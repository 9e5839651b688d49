"""Labels of texts: a classifier with its tokenizer, for `finray generate` and `finray serve`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console

from finray.checkpoint.copies import local_copy, named_run
from finray.checkpoint.rundir import CONFIG_FILE, FINAL, RunDir, saved_config
from finray.config.adapter_files import read_notes
from finray.config.resolved import REWARD
from finray.config.schema import NO_TEXT, ModelConfig
from finray.config.tasks import SPECS
from finray.data.formats.examples import Chat, Completion, Message, detect
from finray.data.formats.messages import messages_of
from finray.data.formats.preferences import unpaired_of
from finray.data.sampling.collate import Row
from finray.data.sources.pieces import read_file
from finray.data.sources.resolve import TABLES
from finray.data.storage import file_suffix
from finray.data.tokenize.encode import Tokenizer
from finray.errors import ConfigError, DataError, FinrayError, ModelError
from finray.evaluation.artifacts import inference_device, inference_dtype
from finray.evaluation.classify import Classification, Classified, classify
from finray.evaluation.engines.sampling import Sampling, not_finite
from finray.evaluation.prompts import Prompt, read_prompts
from finray.files import FileKind
from finray.models.artifacts import Artifact, load_artifact, require_finite, task_of
from finray.models.packing_cache import packing_of
from finray.models.saved_layout import without_adapter
from finray.pretrained.tokenizers import generation_stops, load_tokenizer
from finray.results import RowsResult

_CONFIGS = FileKind(ModelError, repair="download the model again", links=True)
# Classes that are shown of each text, the most likely first.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Pair(Prompt):
    """Two texts for a classifier: the second one is ``pair``."""

    pair: str = ""


@dataclass(frozen=True, slots=True)
class TextLabels(RowsResult, Sequence[Any]):
    """Labels of texts: a sequence of classes, tuples of classes, or numbers."""

    AS_IS: ClassVar[tuple[str, ...]] = ("labels",)

    texts: tuple[tuple[str, ...], ...]  # the texts, one or two each
    names: tuple[str, ...]  # of the classes
    predictions: tuple[Classification, ...]  # the labels and the probabilities of the classes

    def __getitem__(self, index: Any) -> Any:
        chosen = self.predictions[index]
        return chosen.label if isinstance(chosen, Classification) else tuple(part.label for part in chosen)

    def __len__(self) -> int:
        return len(self.predictions)

    def rows(self) -> list[dict[str, Any]]:
        """One row per text: the text, or two, its label, and the probabilities by class."""
        rows = []
        for texts, prediction in zip(self.texts, self.predictions, strict=True):
            row: dict[str, Any] = dict(zip(("text", "text_pair"), texts, strict=False))
            row["label"] = list(prediction.label) if isinstance(prediction.label, tuple) else prediction.label
            if prediction.probabilities:
                row["probabilities"] = dict(zip(self.names, prediction.probabilities, strict=True))
            rows.append(row)
        return rows

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"labels": self.rows()}

    def lines(self) -> list[str]:
        """For each text its label and the most likely classes; the text follows where there are several."""
        lines = []
        for row in self.rows():
            label = row["label"] if isinstance(row["label"], list) else [row["label"]]
            text = ", ".join(f"{value:.4g}" if isinstance(value, float) else value for value in label) or "none"
            shares = sorted(row.get("probabilities", {}).items(), key=lambda pair: -pair[1])[:_SHOWN]
            if shares:
                text += f" ({', '.join(f'{name} {100 * share:.1f} %' for name, share in shares)})"
            texts = " | ".join(row[name] for name in ("text", "text_pair") if name in row)
            lines.append(f"{text}: {texts}" if len(self) > 1 else text)
        return lines

    def print(self, console: Console) -> None:
        """A line per text."""
        for line in self.lines():
            console.print(line, highlight=False, soft_wrap=True)


class TextClassifier:
    """A classifier that reads texts.

    Args:
        artifact: its weights.
        dtype: of weights and arithmetic; None for the default for inference on this machine.
        max_length: maximum tokens of a text; None for the model's limit.

    Raises:
        FinrayError: it cannot be loaded.
    """

    def __init__(self, artifact: Artifact, *, dtype: torch.dtype | None = None, max_length: int | None = None) -> None:
        device = inference_device()
        packing = packing_of(artifact.model)
        self._packs, self._labels = packing.is_told, artifact.labels
        self._model = load_artifact(artifact, dtype=dtype or inference_dtype(None, device)).to(device)
        require_finite(self._model, str(artifact.folder))
        self._tokenizer, notes = load_tokenizer(ModelConfig(name=str(artifact.folder))), artifact.notes
        self.is_reward, self._system = artifact.is_reward, notes.get("system")
        self._is_chat = notes.get("rows", "chat" if self._tokenizer.chat_template else "text") == "chat"
        if self.is_reward:
            # A model from elsewhere may not say that its output is a number.
            self._labels = REWARD
            self._artifact, self._encoder = artifact, answer_encoder(artifact, self._tokenizer)
        inner = without_adapter(self._model)
        named = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        # RoBERTa's positions begin after the padding index: its table holds fewer than it says.
        self.max_length: int | None = min(
            (most for most in (max_length, named, packing.positions) if most), default=None
        )

    @cached_property
    def _ending(self) -> tuple[int, ...]:
        return ending(self._artifact, self._artifact.tokenizer)

    def row(self, texts: Sequence[str]) -> Row:
        """Token ids and token types of a text, or of a pair; of a reward model, a prompt and its answer,
        unless it is from elsewhere and has no chat template: then they are what its tokenizer makes of a pair.
        Raises DataError: the chat template refuses them."""
        if self.is_reward and len(texts) == 2 and (self._is_chat or not self._artifact.is_strangers):
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            return self.conversation(turns) if self._is_chat else self._answered(Completion(texts[0], texts[1]))
        encoded = self._tokenizer(*texts)
        ids = encoded["input_ids"]
        return np.asarray(ids), np.asarray(encoded.get("token_type_ids") or [0] * len(ids))

    def conversation(self, turns: Sequence[Any]) -> Row:
        """Token ids of a conversation up to the end of its last answer, with those that a reward model was trained on.
        Raises DataError: it ends without an answer, or the model was not trained on conversations."""
        if not (self.is_reward and self._is_chat):
            raise DataError("the model was not trained on conversations", repair="give texts")
        messages = messages_of(turns, "messages")
        if self._system and messages[0].role not in ("system", "developer"):
            messages = (Message("system", self._system), *messages)
        return self._answered(Chat(messages))

    def _answered(self, example: Chat | Completion) -> Row:
        (encoded,) = self._encoder.encode([unpaired_of(example, True)])
        ids = np.asarray([*encoded.rows[0].ids, *self._ending])
        return ids, np.zeros_like(ids)

    def classify(self, rows: Sequence[Row]) -> Classified:
        """Labels of rows. Raises ModelError: the logits of one are not finite."""
        odd = list[int]()

        def note(row: int, logits: list[float]) -> None:
            if not all(map(math.isfinite, logits)):
                odd.append(row)

        classified = classify(self._model, rows, packs=self._packs, labels=self._labels, save=note)
        if odd:
            raise not_finite(f"text {min(odd) + 1} has no label")
        return classified


def answer_encoder(artifact: Artifact, tokenizer: Any) -> Tokenizer:
    """Turns prompts with an answer into the tokens that a reward model reads."""
    return Tokenizer(
        tokenizer,
        train_on="completion",
        max_length=2**31,
        on_too_long="drop",
        template_arguments=artifact.notes.get("chat_template_arguments"),
        tool_format=artifact.notes.get("tool_format", "plain"),
        stops=generation_stops(artifact.model),
    )


def ending(artifact: Artifact, section: ModelConfig) -> tuple[int, ...]:
    """Tokens that a reward model from elsewhere reads after those of the last answer, such as a line break: others
    render the whole conversation, and finray's models are trained up to the end of the answer.

    Args:
        artifact: the model.
        section: where its tokenizer is.

    Raises:
        DataError: its chat template does not say how it reads an answer.
    """
    if not artifact.is_strangers:
        return ()
    tokenizer, why = (
        load_tokenizer(section),
        "has no chat template, so nothing says how it reads a prompt and its answer",
    )
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (encoded,) = answer_encoder(artifact, tokenizer).encode(
            [unpaired_of(Chat(messages_of(turns, "messages")), True)]
        )
        text, ids = tokenizer.apply_chat_template(turns, tokenize=False), encoded.rows[0].ids
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        if whole[: len(ids)] == ids:
            return tuple(whole[len(ids) :])
        why = "has a chat template that does not close an answer with a token of its own"
    repair = "put the template that it was trained with beside it, as chat_template.jinja; `/v1/classify` of `finray "
    repair += "serve` scores texts as they are"
    raise DataError(f"the reward model {why}", where=str(artifact.folder), repair=repair)


def classifies(artifact: Artifact) -> bool:
    """Whether a model gives labels, not answers. Raises ModelError: its configuration is damaged."""
    task, file, named = artifact.model.task, artifact.folder / "config.json", list[str]()
    if file.is_file():
        named = [str(name) for name in _CONFIGS.json(file, dict[str, Any]).get("architectures") or ()]
    return (task in SPECS and SPECS[task].adds_head) or any("Classif" in name for name in named)


def is_classifier(model: str | Path) -> bool:
    """Whether a run or a local directory is that of a classifier, by the files beside its weights, which are not
    verified."""
    folder = Path(local_copy(named_run(model))).expanduser()
    for place in (folder, folder / FINAL, *sorted(folder.glob("checkpoint-*"))):
        with suppress(FinrayError, OSError):
            notes = read_notes(place)
            if (notes or (place / "config.json").is_file()) and classifies(
                Artifact(place, ModelConfig(name="-", task=task_of(notes)) if notes else None, notes)
            ):
                return True
    return False


def read_texts(
    model: str | Path, words: Iterable[str], file: Path | None, *, lines: Iterable[str] = ()
) -> list[Prompt]:
    """Texts for a classifier: words, a file of texts (one per line), or rows with the columns of its training.

    Args:
        model: the run or directory of the classifier, whose config may map columns.
        words: texts.
        file: more of them.
        lines: read if there is nothing else.

    Raises:
        DataError: the file cannot be read, or a row has no text.
    """
    if file is None or not file.is_file() or file_suffix(str(file)) not in TABLES:
        return read_prompts(list(words), file, system=None, lines=lines)
    mapping: dict[str, str] = {}
    folder = Path(local_copy(named_run(model))).expanduser()
    if (folder / CONFIG_FILE).is_file():
        with suppress(FinrayError):
            mapping = dict(saved_config(RunDir(folder)).data.field_mapping)
    prompts: list[Prompt] = [Prompt(text) for text in words]
    for row in read_file(file):
        try:
            # Rows to be labelled need no label.
            names = dict.fromkeys([*row.value, *({"label": "label"} | mapping).values()])
            columns = detect(names, mapping, "labelled_text")
            texts = [row.value.get(columns.columns[name]) for name in ("text", "text_pair") if name in columns.columns]
            if not all(isinstance(text, str) for text in texts) or not any(texts):
                raise DataError("the row has no text")
        except DataError as error:
            repair = error.repair or 'write {"text": "..."}, with "text_pair" for a second text'
            raise DataError(error.message, where=row.where, repair=repair) from None
        first, *second = map(str, texts)
        prompts.append(Pair(first, pair=second[0]) if second else Prompt(first))
    return prompts


def label_texts(artifact: Artifact, prompts: Sequence[Prompt], sampling: Sampling, **options: bool) -> TextLabels:
    """Labels of texts.

    Args:
        artifact: the classifier.
        prompts: the texts.
        sampling: which must be the default, as nothing is sampled.
        options: of answers, by name, each with whether it was given.

    Raises:
        FinrayError: the model cannot be loaded, a prompt is none for a classifier, or an option is for answers only.
    """
    usual = Sampling()
    given = [field.name for field in fields(Sampling) if getattr(sampling, field.name) != getattr(usual, field.name)]
    if wrong := [*given, *(name for name, is_given in options.items() if is_given)]:
        raise ConfigError(
            "a classifier gives labels; it does not write answers",
            where=f"--{wrong[0].replace('_', '-')}",
            repair="leave it out",
        )
    if not prompts:
        raise DataError("there is no text", repair='`finray generate RUN "a text"`, or --file')
    texts = [(prompt.text, prompt.pair) if isinstance(prompt, Pair) else (prompt.text,) for prompt in prompts]
    for number, prompt in enumerate(prompts, start=1):
        if prompt.messages or prompt.tools or not prompt.text:
            raise DataError(
                f"prompt {number} is a conversation, or empty; a classifier labels texts",
                where=str(artifact.folder),
                repair='give texts, without --system and --tools, or rows with "text"',
            )
        if (odd := NO_TEXT.search("".join(texts[number - 1]))) is not None:
            what = f"text {number} holds U+{ord(odd[0]):04X}, which is not a valid character"
            raise DataError(what, repair="remove that character")
    model = TextClassifier(artifact)
    rows = [model.row(text) for text in texts]
    for number, (ids, _) in enumerate(rows, start=1):
        if model.max_length is not None and len(ids) > model.max_length:
            raise DataError(
                f"text {number} has {len(ids):,} tokens; the model reads at most {model.max_length:,}",
                repair="shorten it",
            )
    classified = model.classify(rows)
    return TextLabels(tuple(texts), tuple(classified.labels.names), classified.predictions)
