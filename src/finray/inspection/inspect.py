"""What training will see: prepares the data of a config and measures it, without Ray, weights or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.config.paths import local_dir_of
from finray.config.schema import Config
from finray.config.trust import require_trusted
from finray.data.dataset.columns import ColumnFiles
from finray.data.dataset.manifest import PartEntry, SplitStats
from finray.data.dataset.plan import PrepareSettings, remarks_on_files
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.dataset.report import preference_remarks, reference_remark, unread_fields, without_rows
from finray.data.dataset.run_data import run_data
from finray.data.dataset.source_rows import SourceRows
from finray.data.formats.examples import Chat, Completion, Example, Label, Preference, Unpaired
from finray.data.tokenize.encode import Tokenizer
from finray.errors import DataError, FinrayError
from finray.inspection.checks import Check
from finray.inspection.labels import ClassBalance, class_balance, label_checks
from finray.inspection.measure import Inspector
from finray.inspection.prompt_parity import ServedPrompt, ServedRow, compare_prompts
from finray.inspection.result import Inspection
from finray.inspection.tokens import SpecialTokens, special_tokens
from finray.pretrained.tokenizers import generation_stops, load_tokenizer

# Rows that are compared with serving are read again from their source, from at most this many parts unless all are.
_PARTS_READ = 16
_ROWS_AFTER_A_REFUSAL = 200


def inspect(
    config: Config,
    *,
    examples: int = 3,
    chosen: Sequence[str] = (),
    compared: int | None = 1000,
) -> Inspection:
    """Prepare the data of a config, unless that is done already, and measure it.

    Args:
        config: the configuration.
        examples: number of rows shown token by token, spread over the training rows.
        chosen: rows shown instead: by index in the training rows, or by ``file:row`` of the source.
        compared: number of training rows that are compared with what a server renders; None for all.

    Returns:
        The inspection. If preparation refuses the data because training and serving differ, it holds the differences
        and the refusal, and no numbers.

    Raises:
        FinrayError: the data, the tokenizer or the storage has a problem.
    """
    require_trusted(config, "data", "model", "prepare", "train.objective")
    tokenizer = load_tokenizer(config.model)
    tokens = special_tokens(tokenizer, stops=generation_stops(config.model))
    encoder = PrepareSettings.of(config).encoder(tokenizer)
    try:
        location = prepare_here(config)
    except DataError as error:
        if error.overdue:
            # Each row would take as long again.
            raise
        return _refused(config, encoder, tokenizer, tokens, error)
    dataset = PreparedDataset(location, local_dir=local_dir_of(config))
    data = run_data(config, dataset)
    rows = data.splits
    splits = {
        name: split
        for name, split in (("train", rows.train), ("eval", rows.eval), ("test", rows.test))
        if split is not None and len(split)
    }
    counted = dataset.manifest.splits
    counters = {split: {**stats.counts(), "longest": stats.longest} for split, stats in counted.items()}
    formats = {stream.name: stream.format for stats in counted.values() for stream in stats.streams}
    same = len(set(formats.values())) == 1
    form = next(iter(formats.values())) if same else ", ".join(f"{name}: {form}" for name, form in formats.items())
    if config.data.format == "auto" and config.data.converter is None:
        form += ", detected"
    parity = compare_prompts(
        iter(())
        if dataset.label_set is not None
        else _served_rows(config, rows.train, counted["train"].parts, encoder, tokenizer, compared),
        of=len(rows.train),
        whole=config.data.train_on == "all",
        tokenizer=tokenizer,
        special=tokens.special,
    )
    cut_at = {name: stats.truncated_at for name, stats in counted.items()}
    classes: tuple[ClassBalance, ...] = ()
    labels: dict[str, list[Label]] = {}
    checks: tuple[Check, ...] = ()
    if dataset.label_set is not None:
        labels = {name: split.labels for name, split in splits.items()}
        classes = class_balance(dataset.label_set, labels)
        checks = label_checks(splits, labels, classes)
    places = {name: stats.places for name, stats in counted.items()}
    kind, plan = dataset.kind(), data.plan if data.joined is None else None
    desirable = {name: split.values("label") > 0 for name, split in splits.items()} if kind == "unpaired" else {}
    inspector = Inspector(
        config.data, splits, counters, tokenizer, tokens, plan, cut_at, labels, places, kind == "preference", desirable
    )
    checks += _references(dataset, rows.train) if kind == "preference" else ()
    checks += tuple(
        Check(name, "warning", text, count, len(rows.train.groups), where)
        for name, text, count, where in preference_remarks(rows, dataset.kind(), config)
    )
    return Inspection(
        config=config,
        format=form,
        prepared=location,
        splits=inspector.split_views(),
        duplicates=inspector.duplicates(),
        checks=(*_file_checks(config, counted), *checks, *inspector.checks(kind=dataset.kind())),
        parity=parity,
        examples=inspector.examples(examples, chosen),
        classes=classes,
    )


def _references(dataset: PreparedDataset, rows: PreparedSplit) -> tuple[Check, ...]:
    """How far references prefer the chosen answers, if a run has computed any; a single one is shown with the rows."""
    checks = []
    stored = ColumnFiles.stored(dataset.folder, dataset.manifest, rows.name, "reference")
    for column in stored:
        rows.columns["reference"] = column
        text, is_unknown = reference_remark(rows)
        checks.append(Check("Reference", "warning" if is_unknown else "note", text))
    if len(stored) > 1:
        del rows.columns["reference"]
    return tuple(checks)


def _file_checks(config: Config, counted: Mapping[str, SplitStats]) -> list[Check]:
    """What is odd about the files of the sources, and which of a directory are not read."""
    checks = [
        Check("Files", "warning" if line.startswith("warning: ") else "note", line.removeprefix("warning: "))
        for line in remarks_on_files(config)
    ]
    unread = ((name, text) for name, stats in counted.items() for text in unread_fields(stats))
    checks += [Check(f"Not read ({name})", "warning", text) for name, text in unread]
    empty = {name: stats for name, stats in counted.items() if stats.empty_files}
    return [*checks, *(Check(f"Files ({name})", "warning", without_rows(stats)) for name, stats in empty.items())]


def _refused(config: Config, encoder: Tokenizer, tokenizer: Any, tokens: SpecialTokens, error: DataError) -> Inspection:
    """The differences between training and serving for which preparation refused the data.
    Raises DataError: ``error``, which is about something else."""
    try:
        source = SourceRows(config, has_chat_template=encoder.has_chat_template)
        rows = list(islice(_refused_rows(source, encoder, tokenizer), _ROWS_AFTER_A_REFUSAL))
    except FinrayError:
        raise error from None
    parity = compare_prompts(rows, of=len(rows), whole=True, tokenizer=tokenizer, special=tokens.special)
    if not parity.differences:
        raise error
    form = source.parts("train")[0].row_format.describe(has_chat_template=encoder.has_chat_template)
    check = Check("Preparation", "problem", error.message, 0, 0, () if error.where is None else (error.where,))
    return Inspection(config, form, "none: the data was refused", (), (), (check,), parity, (), refusal=error)


def _served_rows(
    config: Config,
    rows: PreparedSplit,
    parts: Sequence[PartEntry],
    encoder: Tokenizer,
    tokenizer: Any,
    compared: int | None,
) -> Iterator[ServedRow]:
    """Training rows, evenly spread, with the prompts that a server is given for them."""
    source = SourceRows(config, has_chat_template=encoder.has_chat_template)
    starts = np.concatenate([[0], np.cumsum([part.source_rows for part in parts], dtype=np.int64)])
    part_of = np.searchsorted(starts, rows.source_rows, side="right") - 1
    wanted = np.arange(len(rows))
    if compared is not None and compared < len(rows):
        wanted = wanted[np.isin(part_of, _spread(np.unique(part_of), _PARTS_READ))]
        wanted = _spread(wanted, compared)
    for number in np.unique(part_of[wanted]).tolist():
        by_position: dict[int, list[int]] = {}
        for row in wanted[part_of[wanted] == number].tolist():
            by_position.setdefault(int(rows.source_rows[row] - starts[number]), []).append(row)
        for position, examples in enumerate(source.examples(source.parts("train")[number])):
            kept = by_position.get(position, [])
            # Learned whole, the examples of one source row cannot be told apart by where learning starts.
            if not kept or (config.data.train_on == "all" and len(examples) > 1):
                continue
            sides = [side for example in examples for side in _sides(example)]
            served = [_served_prompts(side, encoder, tokenizer) for side in sides]
            prompts = [prompt for shown, _ in served for prompt in shown]
            refusal = next((refusal for _, refusal in served if refusal), "")
            chats = (side for side in sides if isinstance(side, Chat))
            in_parts = any(message.hidden for chat in chats for message in chat.messages)
            for row in kept:
                yield ServedRow(rows.where(row), *rows.row(row), prompts, refusal, in_parts)


def _sides(example: Example) -> list[Example]:
    """The two answers of a pair, the answer of a label; any other example itself."""
    if isinstance(example, Unpaired):
        return [example.answer]
    return [example.chosen, example.rejected] if isinstance(example, Preference) else [example]


def _spread(values: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most so many of the values, evenly spread."""
    return values[np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).astype(np.int64))]


def _served_prompts(example: Example, encoder: Tokenizer, tokenizer: Any) -> tuple[list[ServedPrompt], str]:
    """The prompt of each answer as a server tokenizes it, and the first refusal of the chat template."""
    if isinstance(example, Completion):
        return [(0, tokenizer(example.prompt)["input_ids"])], ""
    if not isinstance(example, Chat):
        return [], ""
    prompts: list[ServedPrompt] = []
    refusal = ""
    for turn, message in enumerate(example.messages):
        if message.role == "assistant" and turn:
            try:
                before, arguments = example.messages[:turn], example.arguments
                text = encoder.renderer.render(before, example.tools, arguments=arguments, add_generation_prompt=True)
            except DataError as error:
                if error.overdue:
                    raise
                refusal = refusal or error.message
            else:
                prompts.append((turn, tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts, refusal


def _refused_rows(source: SourceRows, encoder: Tokenizer, tokenizer: Any) -> Iterator[ServedRow]:
    """Each answer of the first conversations, rendered with what precedes it."""
    parts = source.parts("train")
    rows = (row for part in parts for row in zip(source.places(part), source.examples(part), strict=True))
    # Not more, however few of them have an answer that the template renders.
    for where, examples in islice(rows, _ROWS_AFTER_A_REFUSAL):
        for example in (side for each in examples for side in _sides(each)):
            if not isinstance(example, Chat):
                continue
            for turn, prompt in _served_prompts(example, encoder, tokenizer)[0]:
                upto = example.messages[: turn + 1]
                text = encoder.renderer.render(upto, example.tools, arguments=example.arguments)
                ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
                yield ServedRow(where, ids, np.ones(len(ids), dtype=np.uint8), [(turn, prompt)])
