"""The rows of a run as `{"input", "output"}` JSON lines, for people and other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from finray.config.paths import local_dir_of
from finray.config.schema import Config
from finray.data.dataset.manifest import PartEntry
from finray.data.dataset.plan import PrepareSettings
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.dataset.source_rows import SourceRows
from finray.data.formats.examples import Chat, Completion, Example, Labelled, Preference, Unpaired
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from finray.pretrained.tokenizers import load_tokenizer

NAMES = {"train": "training.jsonl", "eval": "validation.jsonl", "test": "test.jsonl"}
READY = ".data_ready"


def export_rows(config: Config, location: str, folder: Path) -> dict[Path, int]:
    """Write the rows of each non-empty split; returns path to number of rows.

    A conversation's input is its prompt as a server renders it, up to the last answer; its output is that answer. Rows
    that are not in the prepared dataset are not exported. The files of an earlier export are replaced once all rows are
    written. Raises DataError: the source cannot be read, the files cannot be written, or they would replace others than
    those of an earlier export.
    """
    dataset = PreparedDataset(location, local_dir=local_dir_of(config))
    encoder = PrepareSettings.of(config).encoder(load_tokenizer(config.model))
    splits = dataset.splits(config.data, seed=config.run.seed)
    source = SourceRows(config, has_chat_template=encoder.has_chat_template)
    names = {split: name for split, name in NAMES.items() if getattr(splits, split) is not None}
    read = {Path(piece.file).resolve() for part in source.all_parts() for piece in part.pieces}
    for name in NAMES.values():
        if (folder / name).exists() and (not (folder / READY).exists() or (folder / name).resolve() in read):
            raise DataError(
                "the export would replace a file that is not from an earlier export, or that the rows are read from",
                where=str(folder / name),
                repair="give another directory",
            )
    scratch = {split: folder / f".{name}.{os.getpid()}" for split, name in names.items()}
    written: dict[Path, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, name in names.items():
            rows: PreparedSplit = getattr(splits, split)
            prepared_as = split if split in dataset.manifest.splits else "train"
            examples = _examples(source, prepared_as, dataset.manifest.splits[prepared_as].parts, rows)
            count = 0
            with scratch[split].open("w", encoding="utf-8") as stream:
                for example in examples:
                    count += 1
                    stream.write(json.dumps(_input_output(example, encoder), ensure_ascii=False) + "\n")
            written[folder / name] = count
        # Test rows of an earlier export may now be training rows.
        for name in (READY, *NAMES.values()):
            (folder / name).unlink(missing_ok=True)
        for split, name in names.items():
            os.replace(scratch[split], folder / name)
        (folder / READY).write_text("ready", encoding="utf-8")
    except OSError as error:
        raise DataError(f"the rows cannot be written: {error.strerror}", where=str(folder)) from None
    finally:
        for path in scratch.values():
            with suppress(OSError):
                path.unlink()
    return written


def _examples(source: SourceRows, prepared_as: str, entries: list[PartEntry], rows: PreparedSplit) -> Iterator[Example]:
    """The examples of the source rows of some prepared rows, each once."""
    before = 0
    for part, entry in zip(source.parts(prepared_as), entries, strict=True):
        inside = (rows.source_rows >= before) & (rows.source_rows < before + entry.source_rows)
        chosen = set((rows.source_rows[inside] - before).tolist())
        if chosen:
            for position, examples in enumerate(source.examples(part)):
                if position in chosen:
                    yield from examples
        before += entry.source_rows


def _input_output(example: Example, encoder: Tokenizer) -> dict[str, Any]:
    if isinstance(example, Completion):
        return {"input": example.prompt, "output": example.completion}
    if isinstance(example, Labelled):
        text = example.text if example.text_pair is None else [example.text, example.text_pair]
        return {"input": text, "output": example.label}
    if isinstance(example, Preference):
        chosen, rejected = (_input_output(answer, encoder) for answer in (example.chosen, example.rejected))
        return {"input": chosen["input"], "chosen": chosen["output"], "rejected": rejected["output"]}
    if isinstance(example, Unpaired):
        return {**_input_output(example.answer, encoder), "label": example.is_wanted}
    if not isinstance(example, Chat):
        return {"input": "", "output": example.text}
    last = max((index for index, message in enumerate(example.messages) if message.role == "assistant"), default=None)
    if not last:
        text = encoder.renderer.render(example.messages, example.tools, arguments=example.arguments)
        return {"input": text, "output": ""}
    prompt, answer = encoder.renderer.answer(example, last)
    # Training on these rows adds the beginning-of-sequence token again.
    return {"input": prompt.removeprefix(encoder.bos_text), "output": answer}
