"""Adds tokens to a model: in its tokenizer, embedding and head.

A new row is initialized with the mean of the rows of the original vocabulary. Unused rows beyond the vocabulary are
used before the tables grow, and are not part of the mean.
"""

from __future__ import annotations

from typing import Any

import torch

from finray.pretrained.tokenizers import NewTokens
from finray.pretrained.weights import StoredWeights


def table_weights(model: Any) -> list[str]:
    """Names of the parameters with one row per token: the embedding, and the head."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(part) for table in tables if table is not None for part in table.modules()}
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if id(module) in inside
        for parameter, _ in module.named_parameters(recurse=False)
        if parameter in ("weight", "bias")
    ]


@torch.no_grad()
def widen(model: Any, added: NewTokens) -> None:
    """Add rows for new tokens, initialized with the mean of the known ones (not on the meta device).

    So are rows that a tokenizer with more tokens than the tables lacked before: they are the same in every load.
    """
    there = model.get_input_embeddings().weight.shape[0]
    if added.rows > there:
        # Transformers' random values are replaced.
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(added.rows, mean_resizing=False)
    tensors = dict(model.named_parameters())
    for name in table_weights(model):
        table = tensors.get(name)
        if table is not None and not table.is_meta:
            old_rows = min(added.known, there)
            table[[*added.ids, *range(there, len(table))]] = (
                table[:old_rows].mean(dim=0, dtype=torch.float32).to(table.dtype)
            )


def read_with_new_rows(
    stored: StoredWeights, name: str, start: int, stop: int | None, added: NewTokens
) -> torch.Tensor:
    """Rows of a table whose file does not have the new tokens yet, with rows for these."""
    there = stored.tensors[name].shape[0]
    stop = max(there, added.rows) if stop is None else stop
    stored_rows = stored.read(name, min(start, there), min(stop, there))
    rows = torch.empty((stop - start, *stored_rows.shape[1:]), dtype=stored_rows.dtype)
    rows[: len(stored_rows)] = stored_rows
    new = [number - start for number in (*added.ids, *range(there, stop)) if start <= number < stop]
    if new:
        rows[new] = stored.read(name, 0, min(added.known, there)).mean(dim=0, dtype=torch.float32).to(stored_rows.dtype)
    return rows
