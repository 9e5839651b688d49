"""Writes the data of the example: a shop's replies to messages, and tickets of them.

`sft.jsonl` teaches both: 250 replies of every kind (kind or curt, with help or without) and 250 tickets. In
`pairs.jsonl` the better reply is kind and helps; the worse one lacks the one, the other or both. `held_out.jsonl` (such
pairs, of which two in three have a new sentence) and `tickets.jsonl` are about other things and other troubles, asked
in other words.
"""

import json
import random
from pathlib import Path

THINGS = ["kettle", "lamp", "chair", "radio", "tent", "bicycle", "printer", "blender", "jacket", "clock", "mirror"]
HELD_OUT_THINGS = ["sofa", "camera", "ladder", "guitar", "toaster", "helmet"]
TROUBLES = """does not work, came broken, lost a screw, makes a strange noise, smells of smoke, has not arrived, is a
week late, was left at the wrong door, is still on its way, was charged twice, cost more than its label says, is not on
my invoice, has the wrong colour, is too small, is not what I ordered, came twice | leaks, has a crack, came to the old
address, got lost in the post, was paid but shows as unpaid, was billed to someone else, is too heavy for me, looks
unlike its picture"""
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


def messages(things: list[str], troubles: list[str], asked: list[str]) -> list[dict[str, str]]:
    """Every message about these."""
    return [
        {"prompt": ask.format(thing=thing, trouble=trouble), "thing": thing, "trouble": trouble}
        for thing in things
        for trouble in troubles
        for ask in asked
    ]


def reply(thing: str, draw: random.Random, *, kind: bool, helps: bool, new: int | None = None) -> str:
    """A reply of two sentences; the sentence with the number ``new``, if any, is one that is held out."""
    said = []
    for number, text in enumerate((KIND if kind else CURT, HELP if helps else NO_HELP)):
        said.append(draw.choice(parts(text, "\n")[number == new]))
    return " ".join(said).format(thing=thing)


def pairs(asked: list[dict[str, str]], draw: random.Random, *, held_out: bool) -> list[dict[str, str]]:
    """The reply that is kind and helps, and one that is not so; of held-out ones two in three have a new sentence."""
    rows = []
    for number, message in enumerate(asked):
        kind, helps = [(False, False), (False, True), (True, False)][number % 3]
        new = [None, 0, 1][number // 3 % 3] if held_out else None
        better = reply(message["thing"], draw, kind=True, helps=True, new=new)
        worse = reply(message["thing"], draw, kind=kind, helps=helps, new=new)
        rows.append({"prompt": message["prompt"], "chosen": better, "rejected": worse})
    return rows


def tickets(asked: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages with what a ticket says of them."""
    rows = []
    for message in asked:
        completion = f"item: {message['thing']}\nproblem: {message['trouble']}"
        rows.append({"prompt": f"Write a ticket. {message['prompt']}", "completion": completion})
    return rows


def write(name: str, rows: list[dict[str, str]]) -> None:
    """One JSON object a line, beside this script."""
    lines = [json.dumps(row) + "\n" for row in rows]
    Path(__file__).with_name(name).write_text("".join(lines), encoding="utf-8")


draw = random.Random(7)
troubles = parts(TROUBLES, ",")
learned = messages(THINGS, troubles[0], ASKED)
unseen = messages(HELD_OUT_THINGS, troubles[1], HELD_OUT_ASKED)
draw.shuffle(learned)
draw.shuffle(unseen)
replies = [
    {
        "prompt": message["prompt"],
        "completion": reply(message["thing"], draw, kind=number % 2 == 0, helps=number % 4 < 2),
    }
    for number, message in enumerate(learned[:250])
]
both = replies + tickets(learned[250:500])
draw.shuffle(both)
write("sft.jsonl", both)
write("pairs.jsonl", pairs(learned[:192], draw, held_out=False))
write("held_out.jsonl", pairs(unseen, draw, held_out=True))
write("tickets.jsonl", tickets(unseen))
