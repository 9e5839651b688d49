"""The manifest of a prepared dataset: what is known of its parts, added up in their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from finray.data.dataset.plan import Stream, fingerprint
from finray.errors import DataError

# Counted per row by the encoder: see finray.data.tokenize.chat.
NOTES = ("system_ignored", "answers_rewritten", "tools_as_text", "empty_answers", "split_conversations")
COUNTS = (
    "source_rows",
    "rows",
    "tokens",
    "supervised",
    "truncated",
    "truncated_tokens",
    "answers_lost",
    "dropped_too_long",
    "dropped_tokens",
    "unlearnable",
    "left_out",
    "bad_rows",
    "split_rows",
    "split_tokens",
    *NOTES,
)


def manifest_of(shape: Mapping[str, Any], streams: list[Stream], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest of a prepared dataset, from what is known of its parts.

    Raises:
        DataError: a split has no token to learn.
    """
    splits: dict[str, Any] = {}
    for stream in streams:
        own = sorted((one for one in results if one["stream"] == stream.name), key=lambda one: int(one["number"]))
        _number_rows(own)
        split = splits.setdefault(
            stream.split, {**dict.fromkeys(COUNTS, 0), "longest": 0, "kind": None, "labels": [], "streams": []}
        )
        for name in COUNTS:
            split[name] += sum(one["counts"][name] for one in own)
        split["longest"] = max([split["longest"], *(one["longest"] for one in own)])
        split["kind"] = split["kind"] or next((one["kind"] for one in own if one["kind"]), None)
        labels = {*split["labels"], *(label for one in own for label in one["labels"])}
        split["labels"] = sorted(labels, key=_by_number_or_name)
        split["streams"].append(
            {
                "name": stream.name,
                "format": own[0]["format"],
                "rows": sum(one["counts"]["rows"] for one in own),
                "source_rows": sum(one["counts"]["source_rows"] for one in own),
                "parts": [_part_entry(one) for one in own],
            }
        )
    for name, split in splits.items():
        _check_learnable(name, split, [stream for stream in streams if stream.split == name])
    return {
        "fingerprint": fingerprint(shape),
        "content": content_of(splits),
        "shaped_by": dict(shape),
        "splits": splits,
    }


def bad_rows(streams: list[Stream], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were left out because they are bad: split, file, row and reason, in the order of the sources.

    The results must have gone through :func:`manifest_of`, which numbers them.
    """
    found = []
    for stream in streams:
        own = sorted((one for one in results if one["stream"] == stream.name), key=lambda one: int(one["number"]))
        for one in own:
            for row in one["bad"]:
                piece = one["pieces"][row["piece"]]
                number = piece["first"] + row["number"]
                found.append({"split": stream.split, "file": piece["file"], "row": number, "message": row["message"]})
    return found


def _by_number_or_name(label: str) -> tuple[bool, int, str]:
    return (not label.isdigit(), int(label) if label.isdigit() else 0, label)


def content_of(splits: Mapping[str, Any]) -> str:
    """A digest of all rows: equal exactly when the files of all splits are."""
    content = json.dumps([[name, _digests(splits[name])] for name in sorted(splits)])
    return hashlib.sha256(content.encode()).hexdigest()


def _digests(split: dict[str, Any]) -> list[str]:
    """SHA-256 of every file of a split, in the order of its rows."""
    parts = (part for stream in split["streams"] for part in stream["parts"])
    return [str(part[role]["sha256"]) for part in parts for role in ("tokens", "index")]


def _part_entry(result: dict[str, Any]) -> dict[str, Any]:
    counts = result["counts"]
    pieces = [{"file": piece["file"], "first": piece["first"]} for piece in result["pieces"]]
    return {"rows": counts["rows"], "source_rows": counts["source_rows"], "pieces": pieces, **result["files"]}


def _number_rows(results: list[dict[str, Any]]) -> None:
    """Fill in how many rows of its file lie before a piece, now that all pieces before it are counted."""
    file, passed = None, 0
    for piece in (piece for result in results for piece in result["pieces"]):
        if piece["file"] != file:
            file, passed = piece["file"], 0
        piece["first"] = passed if piece["first"] is None else piece["first"]
        passed = piece["first"] + piece["rows"]


def _check_learnable(name: str, split: dict[str, Any], streams: list[Stream]) -> None:
    if split["supervised"] or split["labels"]:
        return
    reasons = [
        f"{split[key]:,} {text}"
        for key, text in (
            ("answers_lost", "lost their answer to truncation"),
            ("dropped_too_long", "are longer than data.max_length"),
            ("bad_rows", "are bad"),
            ("unlearnable", "have nothing to learn"),
        )
        if split[key]
    ]
    raise DataError(
        f"none of the {split['source_rows']} rows has a token to learn ({name}: {', '.join(reasons)})",
        where=streams[0].source.name,
        repair="check data.train_on, the roles of the messages, and data.max_length (answers may be cut off)",
    )
