"""Random pairs of answer and reference: equal, alike and unlike, empty, in several scripts, with numbers and JSON."""

from __future__ import annotations

import json
import random
import re

_WORDS = re.split(
    " ",
    "the a an cat sat on mat Paris straße über naïve 東京 は 日本 Привет мир مرحبا עולם 🙂 e\u0301 don't U.S. "
    "well-known 12 1,000 3.5 $7 -4 #### \\boxed{5} . , ! ? ( ) \n \t { } é Ω ß",
)


def text(draw: random.Random, most: int = 14) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(0, most)))


def pairs(count: int = 1000, seed: int = 0) -> list[tuple[str, str]]:
    """(answer, reference)."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        reference = text(draw)
        words = reference.split(" ")
        match number % 5:
            case 0:
                answer = text(draw)
            case 1:
                answer = f" {reference}\n"
            case 2:
                answer = " ".join(word for word in words if draw.random() < 0.7)
            case 3:
                answer = reference.upper()
            case _:
                draw.shuffle(words)
                answer = " ".join([*words, text(draw, 3)])
        found.append((answer, reference))
    found[3], found[7], found[11] = ("", ""), ("", "a b c d e f"), ("a b c d e f", "")
    return found


def json_pairs(count: int = 1000, seed: int = 0) -> list[tuple[str, str]]:
    """(answer, reference), most of them JSON."""
    draw = random.Random(seed)

    def value(depth: int) -> object:
        kind = draw.randint(0, 7 if depth else 5)
        if kind > 5:
            inside = [value(depth - 1) for _ in range(draw.randint(0, 3))]
            return (
                inside if kind == 6 else dict(zip(draw.sample(["a", "b", "ü", "東"], len(inside)), inside, strict=True))
            )
        return [None, True, 1, 1.0, draw.choice(["x", "é", ""]), draw.randint(0, 2)][kind]

    found = []
    for _ in range(count):
        reference = value(3)
        answer = draw.choice([reference, value(3), value(3)])
        text_of = json.dumps(answer, ensure_ascii=draw.random() < 0.5)
        broken = draw.choice(["", "{", text_of[:-1] + ",", "NaN", f"```json\n{text_of}\n```", "yes"])
        found.append((broken if draw.random() < 0.2 else text_of, json.dumps(reference)))
    return found
