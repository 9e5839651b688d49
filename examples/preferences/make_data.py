"""Writes the data of the example: replies of a shop in two tones, and pairs in which the kind one is preferred.

`sft.jsonl` has as many curt replies as kind ones, so that a model trained on it writes both. In `pairs.jsonl` and
`held_out.jsonl` (other things, other troubles) the kind reply is the better one; neither is longer than the other.
"""

import json
import random
from pathlib import Path

THINGS = [
    "kettle",
    "lamp",
    "chair",
    "radio",
    "tent",
    "bicycle",
    "printer",
    "blender",
    "jacket",
    "clock",
    "mirror",
    "drill",
]
TROUBLES = ["does not work", "came broken", "is too loud", "lost a screw", "has the wrong colour", "smells of smoke"]
HELD_OUT_THINGS = ["sofa", "camera", "ladder", "guitar", "toaster", "helmet"]
HELD_OUT_TROUBLES = ["came a week late", "has a deep scratch", "leaks"]
ASKED = ["My {thing} {trouble}.", "Hello, the {thing} that I bought {trouble}.", "What now? The {thing} {trouble}."]
KIND = [
    "I am sorry that your {thing} {trouble}. May I send you a new one?",
    "Thank you for telling us that the {thing} {trouble}. We will repair it.",
    "That the {thing} {trouble} is our mistake. You will get your money back.",
]
CURT = [
    "It is not our fault that your {thing} {trouble}. Read the rules.",
    "So your {thing} {trouble}. Nobody else has complained of that.",
    "That the {thing} {trouble} is your own problem. We do not take it back.",
]


def replies(things: list[str], troubles: list[str], draw: random.Random) -> list[tuple[str, str, str]]:
    """Question, kind reply and curt reply for each thing and trouble, in a random order."""
    rows = []
    for thing in things:
        for trouble in troubles:
            for asked in ASKED:
                texts = asked, draw.choice(KIND), draw.choice(CURT)
                rows.append(tuple(text.format(thing=thing, trouble=trouble) for text in texts))
    draw.shuffle(rows)
    return rows


def write(name: str, rows: list[dict]) -> None:
    """One JSON object a line, beside this script."""
    lines = [json.dumps(row) + "\n" for row in rows]
    Path(__file__).with_name(name).write_text("".join(lines), encoding="utf-8")


draw = random.Random(7)
rows = replies(THINGS, TROUBLES, draw)
write("sft.jsonl", [{"prompt": asked, "completion": draw.choice(both)} for asked, *both in rows])
pairs = {"pairs.jsonl": rows[:96], "held_out.jsonl": replies(HELD_OUT_THINGS, HELD_OUT_TROUBLES, draw)}
for name, some in pairs.items():
    write(name, [{"prompt": asked, "chosen": kind, "rejected": curt} for asked, kind, curt in some])
