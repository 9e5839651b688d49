"""Words added to a model: tokens in its tokenizer, rows in its embedding and head.

A new row begins as the mean of the rows of the words that the tokenizer knew. Rows that a model has beyond its
vocabulary are used before the tables grow, and are not part of the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finray.pretrained.tokenizers import NewTokens


def table_weights(model: Any) -> list[str]:
    """Names of the parameters that have a row for each word: of the embedding, and of the head."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(part) for table in tables if table is not None for part in table.modules()}
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if id(module) in inside
        for own, _ in module.named_parameters(recurse=False)
        if own in ("weight", "bias")
    ]


@torch.no_grad()
def widen(model: Any, added: NewTokens) -> None:
    """Make room for new words, and give their rows the mean of the known ones (not on the meta device)."""
    if added.rows > model.get_input_embeddings().weight.shape[0]:
        # What Transformers draws is replaced.
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(added.rows, mean_resizing=False)
    tensors = dict(model.named_parameters())
    for name in table_weights(model):
        table = tensors.get(name)
        if table is not None and not table.is_meta:
            known = min(added.known, len(table))
            table[list(added.ids)] = table[:known].mean(dim=0, dtype=torch.float32).to(table.dtype)


def with_new_rows(
    read: Callable[[int, int], torch.Tensor], stored: int, added: NewTokens
) -> Callable[[int, int], torch.Tensor]:
    """As ``read``, of a table that has ``stored`` rows, with the rows of new words."""
    mean: list[torch.Tensor] = []

    def wider(start: int, stop: int) -> torch.Tensor:
        found = read(min(start, stored), min(stop, stored))
        rows = torch.empty((stop - start, *found.shape[1:]), dtype=found.dtype)
        rows[: len(found)] = found
        for number in added.ids:
            if start <= number < stop:
                if not mean:
                    mean.append(read(0, min(added.known, stored)).mean(dim=0, dtype=torch.float32).to(found.dtype))
                rows[number - start] = mean[0]
        return rows

    return wider
