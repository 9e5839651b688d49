"""Writes the data of the example: a shop's replies, and which department a message is for.

`sft.jsonl` teaches both: 250 replies of every kind (kind or curt, with help or without) and 250 departments. In
`pairs.jsonl` the better reply is kind and helps; the worse one lacks the one, the other or both. `held_out.jsonl` (such
pairs) and `departments.jsonl` are about things, troubles and words that no other file has.
"""

import json
import random
from pathlib import Path

THINGS = ["kettle", "lamp", "chair", "radio", "tent", "bicycle", "printer", "blender", "jacket", "clock", "mirror"]
HELD_OUT_THINGS = ["sofa", "camera", "ladder", "guitar", "toaster", "helmet"]
# By department, troubles; those behind the bar are held out.
TROUBLES = {
    "repairs": "does not work, came broken, lost a screw, makes a strange noise, smells of smoke | leaks, has a crack",
    "delivery": "has not arrived, is a week late, was left at the wrong door, is still on its way | came to the old "
    "address, got lost in the post",
    "billing": "was charged twice, cost more than its label says, is not on my invoice | was paid but shows as unpaid, "
    "was billed in the wrong currency",
    "returns": "has the wrong colour, is too small, is not what I ordered, came twice | is too heavy for me, looks "
    "unlike its picture",
}
ASKED = ["My {thing} {trouble}.", "Hello, the {thing} that I bought {trouble}.", "What now? The {thing} {trouble}."]
HELD_OUT_ASKED = ["I bought a {thing} here. It {trouble}.", "Can you help me? My {thing} {trouble}."]
KIND = """I am sorry about your {thing}, and thank you for telling us.
Thank you for your message; it is our mistake, not yours.
That must be annoying, and I understand that well.
I apologise for the trouble that the {thing} has made.
We regret this, and you are right to write to us.
Your {thing} deserves better, and so do you. |
Please accept our apologies for all of this.
I can see why you are unhappy with the {thing}.
It is good that you ask; we want you to be content.
How unpleasant! We did not mean to let you down."""
CURT = """So what? Every {thing} has something, and people cope.
You should have read the rules before you bought it.
Nobody else has complained of that, only you.
We hear this all day long, and it is tiring.
It is your own fault, as it usually is.
Your {thing} is not our concern, and you are late. |
Do not write to us because of such a trifle.
A {thing} is a {thing}; what did you expect?
How boring! We have better things to do than this.
It is odd that you ask; others read the manual."""
HELP = """We will send you a new one tomorrow.
You will get all of your money back.
Someone will call you today and put it right.
I have made it my task, and it is done by Friday.
We will fix it for you at no cost.
Keep it, and we take half off the price. |
A colleague will come and see to it on Monday.
Choose another one, and we pay the difference.
We pick it up from you and make it good.
Tell me when it suits you, and I will see to it."""
NO_HELP = """There is nothing that we will do about it.
You will not get any of your money back.
We do not call people because of that.
It stays as it is, on Friday and after.
We fix such things for nobody here.
Keep it, and do not ask for half of the price. |
No colleague has time to come and see it.
Buy another one if you want, and pay for it.
We pick up nothing, and we make nothing good.
Tell somebody else, as I will not see to it."""


def parts(text: str, sep: str) -> tuple[list[str], list[str]]:
    """What may be learned, and what is held out."""
    first, rest = text.split("|")
    return [[" ".join(part.split()) for part in some.split(sep) if part.strip()] for some in (first, rest)]


def messages(things: list[str], troubles: list[tuple[str, str]], asked: list[str]) -> list[dict[str, str]]:
    """Every message about these, with its department and its thing."""
    return [
        {"prompt": ask.format(thing=thing, trouble=trouble), "department": department, "thing": thing}
        for thing in things
        for department, trouble in troubles
        for ask in asked
    ]


def reply(thing: str, *, kind: bool, helps: bool, held_out: bool, draw: random.Random) -> str:
    """A reply; half of the words of a held-out one are of those that were held out."""
    said = []
    for text in (KIND if kind else CURT, HELP if helps else NO_HELP):
        learned, rest = parts(text, "\n")
        said.append(draw.choice(rest if held_out else learned))
    return " ".join(said).format(thing=thing)


def pairs(asked: list[dict[str, str]], *, held_out: bool, draw: random.Random) -> list[dict[str, str]]:
    """The reply that is kind and helps, and one that is not so."""
    rows = []
    for number, message in enumerate(asked):
        kind, helps = [(False, False), (False, True), (True, False)][number % 3]
        better = reply(message["thing"], kind=True, helps=True, held_out=held_out, draw=draw)
        worse = reply(message["thing"], kind=kind, helps=helps, held_out=held_out, draw=draw)
        rows.append({"prompt": message["prompt"], "chosen": better, "rejected": worse})
    return rows


def departments(asked: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages with the department as the answer."""
    question = "Repairs, delivery, billing or returns? "
    return [{"prompt": question + message["prompt"], "completion": message["department"]} for message in asked]


def write(name: str, rows: list[dict[str, str]]) -> None:
    """One JSON object a line, beside this script."""
    lines = [json.dumps(row) + "\n" for row in rows]
    Path(__file__).with_name(name).write_text("".join(lines), encoding="utf-8")


draw = random.Random(7)
by_part = [[(name, trouble) for name, text in TROUBLES.items() for trouble in parts(text, ",")[at]] for at in (0, 1)]
learned = messages(THINGS, by_part[0], ASKED)
unseen = messages(HELD_OUT_THINGS, by_part[1], HELD_OUT_ASKED)
draw.shuffle(learned)
draw.shuffle(unseen)
replies = [
    {
        "prompt": message["prompt"],
        "completion": reply(message["thing"], kind=number % 2 == 0, helps=number % 4 < 2, held_out=False, draw=draw),
    }
    for number, message in enumerate(learned[:250])
]
both = replies + departments(learned[250:500])
draw.shuffle(both)
write("sft.jsonl", both)
write("pairs.jsonl", pairs(learned[:192], held_out=False, draw=draw))
write("held_out.jsonl", pairs(unseen, held_out=True, draw=draw))
write("departments.jsonl", departments(unseen))
