"""The rows of a run as `{"input", "output"}` JSON lines, for people and other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from finray.config.paths import local_dir_of
from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedDataset
from finray.data.dataset.source_rows import SourceRows
from finray.data.formats.examples import Chat, Completion, Example, Labelled
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError
from finray.pretrained.tokenizers import load_tokenizer

NAMES = {"train": "training.jsonl", "eval": "validation.jsonl", "test": "test.jsonl"}
READY = ".data_ready"


def export_rows(config: Config, location: str, folder: Path) -> dict[Path, int]:
    """Write the rows of each split that has any; returns path to number of rows.

    A conversation's input is its prompt as a server renders it, up to the last answer; its output is that answer. Rows
    that were left out of the prepared dataset are left out here.

    Raises:
        DataError: the source cannot be read, or the files cannot be written.
    """
    dataset = PreparedDataset(location, local_dir=local_dir_of(config))
    tokenizer = load_tokenizer(config.model)
    data = config.data
    encoder = Tokenizer(
        tokenizer,
        train_on=data.train_on,
        max_length=data.max_length,
        on_too_long=data.on_too_long,
        template_arguments=config.model.chat_template_arguments,
    )
    written: dict[Path, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (READY, *NAMES.values()):
            # Of an earlier export: its test rows may be trained on now.
            (folder / name).unlink(missing_ok=True)
        for split, rows in _rows(config, dataset, encoder):
            path = folder / NAMES[split]
            written[path] = _write(path, rows)
        (folder / READY).write_text("ready", encoding="utf-8")
    except OSError as error:
        raise DataError(f"the rows cannot be written: {error.strerror}", where=str(folder)) from None
    return written


def _write(path: Path, rows: Iterator[dict[str, str]]) -> int:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    with scratch.open("w", encoding="utf-8") as stream:
        for row in rows:
            _line(stream, row)
            count += 1
    os.replace(scratch, path)
    return count


def _line(stream: IO[str], row: dict[str, str]) -> None:
    stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def _rows(
    config: Config, dataset: PreparedDataset, encoder: Tokenizer
) -> Iterator[tuple[str, Iterator[dict[str, str]]]]:
    """Each split with its rows."""
    splits = dataset.splits(config.data, seed=config.run.seed)
    source = SourceRows(config, has_chat_template=encoder.has_chat_template)
    for name, split in (("train", splits.train), ("eval", splits.eval), ("test", splits.test)):
        if split is not None:
            prepared_as = name if name in dataset.manifest.splits else "train"
            yield name, _of_split(source, dataset, prepared_as, split.source_rows, encoder)


def _of_split(
    source: SourceRows, dataset: PreparedDataset, prepared_as: str, wanted: npt.NDArray[np.int64], encoder: Tokenizer
) -> Iterator[dict[str, str]]:
    entries = dataset.manifest.splits[prepared_as].parts
    before = 0
    for part, entry in zip(source.parts(prepared_as), entries, strict=True):
        chosen = set((wanted[(wanted >= before) & (wanted < before + entry.source_rows)] - before).tolist())
        if chosen:
            for position, examples in enumerate(source.examples(part)):
                if position in chosen:
                    yield from (_input_output(example, encoder) for example in examples)
        before += entry.source_rows


def _input_output(example: Example, encoder: Tokenizer) -> dict[str, str]:
    if isinstance(example, Completion):
        return {"input": example.prompt, "output": example.completion}
    if isinstance(example, Labelled):
        return {"input": example.text, "output": example.label}
    if not isinstance(example, Chat):
        return {"input": "", "output": example.text}
    last = max((index for index, one in enumerate(example.messages) if one.role == "assistant"), default=None)
    if not last:
        return {"input": encoder.renderer.render(example.messages, example.tools), "output": ""}
    prompt = encoder.renderer.render(example.messages[:last], example.tools, add_generation_prompt=True)
    whole = encoder.renderer.render(example.messages[: last + 1], example.tools)
    answer = example.messages[last].content or whole.removeprefix(prompt)
    # Whoever trains on these rows puts the beginning-of-sequence token there again.
    return {"input": prompt.removeprefix(encoder.bos_text), "output": answer}
