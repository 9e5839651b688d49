"""Reads the source rows of prepared ones again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from finray.config.schema import Config
from finray.data.dataset.plan import Part, plan
from finray.data.dataset.prepare import plan_preparation
from finray.data.formats.convert import converter_of
from finray.data.formats.examples import Example
from finray.data.sources.pieces import read_piece, row_number
from finray.data.sources.readers import Value
from finray.errors import DataError


class SourceRows:
    """The source rows of prepared ones, read again from their source."""

    def __init__(self, config: Config, *, has_chat_template: bool) -> None:
        planned = plan_preparation(config)
        self._reading = planned.settings.reading
        self._parts = plan(planned.settings, planned.streams)
        self._has_chat_template = has_chat_template

    def parts(self, split: str) -> list[Part]:
        """The parts that the rows of a split were prepared from, in the order of their rows."""
        return [part for part in self._parts if part.stream.split == split]

    def all_parts(self) -> list[Part]:
        """The parts of all splits."""
        return list(self._parts)

    def places(self, part: Part) -> list[str]:
        """``file:row`` of each row of a part, in order."""
        lines = []
        for piece in part.pieces:
            file, first = part.stream.source.short(piece.file), row_number(piece, 0, self._reading)
            lines += [f"{file}:{first + number}" for number, _ in read_piece(piece, part.stream.source, self._reading)]
        return lines

    def examples(self, part: Part) -> Iterator[list[Example]]:
        """The examples from each row of a part, in order; none for a bad row."""
        return map(self.converter(part), self.values(part))

    def converter(self, part: Part) -> Callable[[Value], list[Example]]:
        """Returns the examples from a row of a part; none for a bad row."""
        convert = converter_of(part.row_format, has_chat_template=self._has_chat_template)

        def converted(value: Value) -> list[Example]:
            if not isinstance(value, DataError):
                with suppress(DataError):
                    return convert(value)
            return []

        return converted

    def values(self, part: Part) -> Iterator[Value]:
        """Each row of a part, in order: its columns, or what is wrong with it."""
        for piece in part.pieces:
            for _, value in read_piece(piece, part.stream.source, self._reading):
                yield value
