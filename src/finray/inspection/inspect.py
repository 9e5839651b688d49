"""What training will see: prepares the data of a config and measures it, with no Ray, no weights and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finray.config.schema import Config, ModelConfig
from finray.data.dataset.plan import Part, Settings, plan, plan_streams
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit
from finray.data.formats.convert import converter_of
from finray.data.formats.examples import Chat, Completion, Example
from finray.data.sources.pieces import read_piece, row_number
from finray.data.sources.readers import BadRow, Piece
from finray.errors import DataError, FinrayError
from finray.inspection.measure import Header, Inspection, Inspector
from finray.inspection.prompt_parity import Prompt, Served, check_serving, served_prompts
from finray.inspection.token_checks import Check
from finray.inspection.token_views import SpecialTokens, special_tokens
from finray.pretrained.tokenizers import load_tokenizer

IntArray = npt.NDArray[np.int64]

# Rows that are compared with serving are read again from their source; so many parts of it at most, unless all are.
_PARTS_READ = 16
_ROWS_AFTER_A_REFUSAL = 200


def inspect(
    config: Config, *, examples: int = 3, chosen: Sequence[str] = (), compared: int | None = 1000
) -> Inspection:
    """Prepare the data of a config, unless that is done, and measure it.

    Args:
        config: the configuration.
        examples: rows shown token by token, spread over the training rows.
        chosen: rows shown instead: by index in the training rows, or by ``file:row`` of the source.
        compared: training rows that are compared with what a server renders; None for all.

    Returns:
        The inspection. Where the data is refused because training and serving differ, it holds the differences and the
        refusal, and no numbers.

    Raises:
        FinrayError: the data, the tokenizer or the storage is not right.
    """
    tokenizer = load_tokenizer(config.model)
    tokens = special_tokens(tokenizer, stops=generation_stops(config.model))
    try:
        location = prepare_here(config)
    except DataError as error:
        refused = _refused(config, tokenizer, tokens, error)
        if refused is None:
            raise
        return refused
    local_dir = config.prepare.local_dir
    dataset = PreparedDataset(location, local_dir=None if local_dir is None else Path(local_dir).expanduser())
    found = dataset.splits(config.data, seed=config.run.seed)
    splits = {
        name: split
        for name, split in (("train", found.train), ("eval", found.eval), ("test", found.test))
        if split is not None and len(split)
    }
    counted = dataset.manifest["splits"]
    counters = {
        split: {name: value for name, value in counts.items() if isinstance(value, int)}
        for split, counts in counted.items()
    }
    formats = [(stream["name"], stream["format"]) for counts in counted.values() for stream in counts["streams"]]
    header = _header(config, _format(config, formats), kind=dataset.kind(), prepared=location)
    source = _Reader(config, tokenizer)
    serving = check_serving(
        _served(source, found.train, dataset.manifest, compared),
        of=len(found.train),
        whole=config.data.train_on == "all",
        tokenizer=tokenizer,
        special=tokens.special,
    )
    return Inspector(header, splits, counters, tokenizer, tokens).inspect(serving, examples=examples, chosen=chosen)


def generation_stops(model: ModelConfig) -> tuple[int, ...]:
    """Tokens at which a server ends an answer, from the model's generation settings; none where it has no such file."""
    from transformers import GenerationConfig

    path = Path(model.name).expanduser()
    try:
        settings = GenerationConfig.from_pretrained(str(path) if path.exists() else model.name, revision=model.revision)
    except (OSError, ValueError):
        return ()
    stops = settings.eos_token_id
    if stops is None:
        return ()
    return tuple(stops) if isinstance(stops, list) else (int(stops),)


def _header(config: Config, formats: str, *, kind: str, prepared: str) -> Header:
    data = config.data
    sources = [data.source] if data.source is not None else [one.source for one in data.mix]
    return Header(
        model=config.model.name,
        sources=", ".join([*sources, *([data.eval_source] if data.eval_source is not None else [])]),
        format=formats,
        learned=data.train_on,
        max_length=data.max_length,
        packing=data.packing,
        kind=kind,
        prepared=prepared,
    )


def _format(config: Config, formats: list[tuple[str, str]]) -> str:
    detected = " (detected)" if config.data.format == "auto" and config.data.converter is None else ""
    if len({found for _, found in formats}) == 1:
        return f"{formats[0][1]}{detected}"
    return ", ".join(f"{name}: {found}" for name, found in formats) + detected


# --- what a server is given -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row is: its position in the part, the piece, and its number in the piece."""

    position: int
    piece: Piece
    number: int


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads source rows again, as examples and as the prompts that a server is given."""

    config: Config
    tokenizer: Any

    def examples(self, part: Part, settings: Settings) -> Iterator[tuple[_Place, list[Example]]]:
        """The examples of each row of a part that can be used."""
        convert = converter_of(part.row_format, has_chat_template=bool(self.tokenizer.chat_template))
        position = 0
        for piece in part.pieces:
            for item in read_piece(piece, part.stream.source, settings.reading):
                if not isinstance(item.value, BadRow):
                    with suppress(DataError):
                        yield _Place(position, piece, item.number), convert(item.value)
                position += 1

    def prompts(self, settings: Settings) -> Callable[[Example], tuple[tuple[Prompt, ...], str]]:
        """A function from an example to the prompts of its answers, and why the template refused if it did."""
        encoder = settings.encoder(self.tokenizer)

        def of(example: Example) -> tuple[tuple[Prompt, ...], str]:
            if isinstance(example, Completion):
                return (Prompt(0, tuple(self.tokenizer(example.prompt)["input_ids"])),), ""
            if not isinstance(example, Chat):
                return (), ""
            turns = [at for at, one in enumerate(example.messages) if one.role == "assistant" and at]
            return served_prompts(
                turns,
                lambda turn: encoder.renderer.render(
                    example.messages[:turn], example.tools, add_generation_prompt=True
                ),
                self.tokenizer,
            )

        return of


def _served(source: _Reader, rows: PreparedSplit, manifest: dict[str, Any], compared: int | None) -> Iterator[Served]:
    """Training rows with the prompts that a server is given for them."""
    settings = Settings.of(source.config)
    streams = [stream for stream in plan_streams(source.config.data) if stream.split == "train"]
    parts = plan(settings, streams)
    entries = [part for stream in manifest["splits"]["train"]["streams"] for part in stream["parts"]]
    starts = np.concatenate([[0], np.cumsum([entry["source_rows"] for entry in entries], dtype=np.int64)])
    prompts = source.prompts(settings)
    for part, wanted in _sample(rows, starts, compared):
        by_source: dict[int, list[int]] = {}
        for row in wanted.tolist():
            by_source.setdefault(int(rows.source_rows[row] - starts[part]), []).append(row)
        for place, examples in source.examples(parts[part], settings):
            asked = by_source.pop(place.position, [])
            if not asked or (source.config.data.train_on == "all" and len(examples) > 1):
                continue
            found = [prompts(example) for example in examples]
            joined = tuple(prompt for own, _ in found for prompt in own)
            refusal = next((refusal for _, refusal in found if refusal), "")
            for row in asked:
                yield Served(rows.where(row), *rows.row(row), joined, refusal)
            if not by_source:
                break


def _sample(rows: PreparedSplit, starts: IntArray, compared: int | None) -> Iterator[tuple[int, IntArray]]:
    """Part numbers with the rows to compare, evenly spread."""
    part_of = np.searchsorted(starts, rows.source_rows, side="right") - 1
    candidates = np.arange(len(rows))
    if compared is not None and compared < len(rows):
        present = np.unique(part_of)
        some = present[np.linspace(0, len(present) - 1, min(len(present), _PARTS_READ)).astype(np.int64)]
        candidates = candidates[np.isin(part_of, some)]
        spread = np.linspace(0, len(candidates) - 1, min(compared, len(candidates)))
        candidates = candidates[np.unique(spread.astype(np.int64))]
    for part in np.unique(part_of[candidates]).tolist():
        yield part, candidates[part_of[candidates] == part]


def _refused(config: Config, tokenizer: Any, tokens: SpecialTokens, error: DataError) -> Inspection | None:
    """What can be shown of data that was refused: answers that do not follow the prompt which a server renders."""
    source = _Reader(config, tokenizer)
    settings = Settings.of(config)
    try:
        parts = plan(settings, [stream for stream in plan_streams(config.data) if stream.split == "train"])
        rows = list(islice(_unprepared(source, parts, settings), _ROWS_AFTER_A_REFUSAL))
    except FinrayError:
        return None
    serving = check_serving(rows, of=len(rows), whole=True, tokenizer=tokenizer, special=tokens.special)
    if not serving.differences:
        return None
    header = _header(config, parts[0].row_format.describe(), kind="chat", prepared="none: the data was refused")
    check = Check("Preparation", "problem", error.message, 0, 0, () if error.where is None else (error.where,))
    return Inspection(header, (), (), (check,), serving, (), refusal=error)


def _unprepared(source: _Reader, parts: Iterable[Part], settings: Settings) -> Iterator[Served]:
    """Each answer of the first conversations, as the conversation up to it is rendered."""
    renderer = settings.encoder(source.tokenizer).renderer
    prompts = source.prompts(settings)
    for part in parts:
        for place, examples in source.examples(part, settings):
            for example in examples:
                if not isinstance(example, Chat):
                    continue
                file = part.stream.source.short(place.piece.file)
                where = f"{file}:{row_number(place.piece, place.number, settings.reading)}"
                for prompt in prompts(example)[0]:
                    text = renderer.render(example.messages[: prompt.turn + 1], example.tools)
                    ids = np.array(source.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
                    yield Served(where, ids, np.ones(len(ids), dtype=np.uint8), (prompt,))
