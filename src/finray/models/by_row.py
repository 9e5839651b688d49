"""Packed rows of a model whose attention is its own: it computes each row alone, and everything else computes all.

Some attention cannot be told where rows end: it is written out in the model, has a bias by distance, chunks, or an
index of keys, or its positions are counted and not given. So the model's own forward pass is called for each row up to
its blocks, which only note what they are given: hidden states with positions, masks, biases. The blocks then run once
over all rows joined, and in them each module that takes a mask, a cache or a state gets the rows apart, each with what
was noted for it. After the last block the forward pass is called for each row again, and makes its outputs.

Nothing of this knows a family. That it is right for one the small model of :mod:`finray.models.packing_check` shows.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from finray.models import states

# Parts of names of arguments of whatever lets tokens see each other.
_OF_OTHERS = ("mask", "past", "cache_params")


@dataclass(frozen=True, slots=True)
class Batches:
    """Rows of a pass by their lengths: those of one length are computed together."""

    lengths: tuple[int, ...]
    rows: list[list[int]]

    def split(self, value: Any) -> Sequence[Any]:
        """What a batch gets of a value: see :func:`finray.models.states.split`, and what was left apart."""
        if isinstance(value, _Apart):
            return value.values
        if isinstance(value, tuple | list):
            apart = zip(*map(self.split, value), strict=True) if value else [()] * len(self.rows)
            return [type(value)(parts) for parts in apart]
        if isinstance(value, dict):
            return [dict(zip(value, parts, strict=True)) for parts in self.split(tuple(value.values()))]
        return states.split(value, self.lengths, self.rows)

    def join(self, values: Sequence[Any]) -> Any:
        """The reverse."""
        if isinstance(values[0], tuple | list):
            return type(values[0])(self.join(parts) for parts in zip(*values, strict=True))
        if isinstance(values[0], dict):
            return {name: self.join([value[name] for value in values]) for name in values[0]}
        if isinstance(values[0], torch.Tensor) and any(value is not values[0] for value in values):
            whole = zip(values, self.rows, strict=True)
            by_token = all(one.shape[:2] == (len(rows), self.lengths[rows[0]]) for one, rows in whole)
            if by_token and len({one.shape[2:] for one in values}) == 1:
                return states.joined(values, self.rows)
            return _Apart(values)
        return values[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Apart:
    """Values of batches that have no place for each token, such as masks: blocks only hand them on."""

    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Note:
    """What a block is given for a batch alone."""

    hidden: Any
    others: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Result:
    """Stands for what a block returns beside hidden states, until it has run."""

    block: int
    place: int


class _BlocksReached(Exception):
    """The forward pass of a row has come to the last block that is asked for."""


class _StandIn(torch.nn.Module):
    """In the place of a module, and like it to whoever reads its attributes."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        # Not a child: that would have weights.
        self.__dict__ |= {"_module": module, "_call": call}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class RowWise:
    """The body of a model, made to take rows apart where they could touch, within
    :func:`finray.models.states.of_rows`.

    Raises:
        RuntimeError: it has no blocks of which each runs once.
    """

    def __init__(self, body: Any) -> None:
        while len(children := list(body.children())) == 1 and not isinstance(children[0], torch.nn.ModuleList):
            # A wrapper: some callers reach into it.
            body = children[0]
        self._body, self._table = body, body.get_input_embeddings()
        lists = [part for part in body.modules() if isinstance(part, torch.nn.ModuleList)]
        inside = {id(part) for each in lists for part in each.modules() if part is not each}
        # The last of the longest: what reads images is before what writes.
        outermost = (each for each in reversed(lists) if id(each) not in inside)
        self._blocks: torch.nn.ModuleList = max(outermost, key=len, default=torch.nn.ModuleList())
        if not self._blocks or len({id(block) for block in self._blocks}) < len(self._blocks):
            raise RuntimeError(f"{type(body).__name__} has no list of blocks of which each runs once")
        if any(getattr(part, "layerdrop", 0) for part in body.modules()):
            raise RuntimeError(f"{type(body).__name__} leaves out blocks at random")
        # How many things a block returns; 0 if hidden states alone, and no tuple. Known after the first.
        self._returned: int | None = None
        if "finray_by_row" not in body.__dict__:
            body.__dict__["finray_by_row"] = self
            body.forward = types.MethodType(lambda body, *args, **kwargs: self._forward(*args, **kwargs), body)
            for block in self._blocks:
                for part in _parts_apart(block):
                    states.take_apart(part, _part_forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the body's own, for packed rows (1, T) as for each row alone."""
        rows = states.rows_of_pass()
        if rows is None or len(rows) == 1:
            return type(self._body).forward(self._body, *args, **kwargs)
        batches = Batches(tuple(rows), states.rows_by_length(rows))
        given = list(zip(batches.split(args), *map(batches.split, kwargs.values()), strict=True))
        calls = [(own_args, dict(zip(kwargs, own_kwargs, strict=True))) for own_args, *own_kwargs in given]
        # Once for all rows: its weights may be sharded, and its gradient is as large as the vocabulary.
        ids = kwargs.get("input_ids", args[0] if args else None)
        embedded = [None] * len(calls) if ids is None else batches.split(self._table(ids))

        def noted(count: int) -> list[list[_Note]]:
            made = []
            for at, (own_args, own_kwargs) in enumerate(calls):
                notes: list[_Note] = []
                note = partial(self._note, notes, count)
                with self._standing_in(note, embedded[at]), suppress(_BlocksReached):
                    type(self._body).forward(self._body, *own_args, **own_kwargs)
                if len(notes) != count:
                    raise RuntimeError(f"the blocks of {type(self._body).__name__} do not run one after the other")
                made.append(notes)
            return made

        notes = noted(1 if self._returned is None else len(self._blocks))
        # Some pad a row (BigBird), and take the padding away after the blocks.
        lengths = {row: own[0].hidden.shape[1] for own, some in zip(notes, batches.rows, strict=True) for row in some}
        within = Batches(tuple(lengths[row] for row in range(len(rows))), batches.rows)
        hidden = within.join([own[0].hidden for own in notes])
        outputs: list[Any] = []
        for number, block in enumerate(self._blocks):
            if number == len(notes[0]):
                # Now it is known what blocks return.
                notes = noted(len(self._blocks))
            others, options = self._joined([own[number] for own in notes], outputs, within)
            with states.of_rows(within):
                outputs.append(block(hidden, *others, **options))
            is_plain = isinstance(outputs[-1], torch.Tensor)
            hidden, self._returned = (outputs[-1], 0) if is_plain else (outputs[-1][0], len(outputs[-1]))
        finals, results = [within.split(output) for output in outputs], []
        for at, (own_args, own_kwargs) in enumerate(calls):
            with self._standing_in(lambda number, *_, at=at, **__: finals[number][at], embedded[at]):
                results.append(type(self._body).forward(self._body, *own_args, **own_kwargs))
        if isinstance(results[0], dict):
            for name in results[0]:
                results[0][name] = batches.join([result[name] for result in results])
            return results[0]
        return batches.join(results)

    def _note(self, notes: list[_Note], count: int, number: int, *args: Any, **kwargs: Any) -> Any:
        """In the place of a block: notes what it is given, and returns the hidden states as it would."""
        if number != len(notes):
            raise RuntimeError(f"the blocks of {type(self._body).__name__} do not run one after the other")
        first = None if args else next(iter(kwargs))
        hidden = args[0] if first is None else kwargs.pop(first)
        notes.append(_Note(hidden, args[1:], kwargs))
        if len(notes) == count:
            raise _BlocksReached
        if not self._returned:
            return hidden
        return (hidden, *(_Result(number, place) for place in range(1, self._returned)))

    def _joined(
        self, notes: Sequence[_Note], outputs: Sequence[Any], batches: Batches
    ) -> tuple[list[Any], dict[str, Any]]:
        """What a block is given beside hidden states, by all rows."""

        def join(values: Sequence[Any]) -> Any:
            if isinstance(result := values[0], _Result):
                return outputs[result.block][result.place]
            return batches.join(values)

        others = [join(values) for values in zip(*(note.others for note in notes), strict=True)]
        return others, {name: join([note.options[name] for note in notes]) for name in notes[0].options}

    @contextmanager
    def _standing_in(self, call: Callable[..., Any], embedded: Any) -> Iterator[None]:
        """Within it ``call`` is called with a block's number in place of the block, the table returns ``embedded``, and
        nothing takes rows apart."""
        named = enumerate(self._blocks.named_children())
        places = [(self._blocks, name, _StandIn(block, partial(call, number))) for number, (name, block) in named]
        if embedded is not None:
            # Padding at the end of a row is seen by nothing.
            table = _StandIn(self._table, lambda ids: F.pad(embedded, (0, 0, 0, ids.shape[1] - embedded.shape[1])))
            holders = [
                (part, name)
                for part in self._body.modules()
                for name, child in part.named_children()
                if child is self._table
            ]
            places += [(holder, name, table) for holder, name in holders]
        with ExitStack() as stack:
            for holder, name, stand_in in places:
                stack.callback(holder._modules.__setitem__, name, holder._modules[name])
                holder._modules[name] = stand_in
            stack.enter_context(states.of_rows(None))
            yield


def _parts_apart(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules of a block in which tokens see each other, by the names of what they take; the block itself
    where there are none."""
    parts: list[torch.nn.Module] = []
    inside = {id(block)}
    for part in block.modules():
        if id(part) not in inside and any(map(_is_of_others, inspect.signature(type(part).forward).parameters)):
            parts.append(part)
            inside |= {id(each) for each in part.modules()}
    return parts or [block]


def _is_of_others(name: str) -> bool:
    return name == "state" or any(part in name for part in _OF_OTHERS)


def _part_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As the module's own, for packed rows (1, T, H) as for each row alone."""
    forward, batches = type(self).forward, states.rows_of_pass()
    if not isinstance(batches, Batches):
        return forward(self, *args, **kwargs)
    given = zip(batches.split(args), *map(batches.split, kwargs.values()), strict=True)
    with states.of_rows(None):
        return batches.join([forward(self, *own, **dict(zip(kwargs, options, strict=True))) for own, *options in given])
