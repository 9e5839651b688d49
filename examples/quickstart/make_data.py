"""Write the quickstart dataset: expense notes turned into strict JSON records.

``python examples/quickstart/make_data.py`` rewrites ``train.jsonl`` and
``validation.jsonl`` next to this file, byte for byte the same every time. All notes
are made up. What a model has to copy (merchants, amounts) and the sentence templates
of the validation rows never occur in training rows, so a model only does well on
them by extracting. Shared are only closed sets: the things bought and the ways to
write an amount of money.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 20_240
TRAIN_ROWS = 400
VALIDATION_ROWS = 60

SYSTEM = (
    "Turn the expense note into one line of JSON with the keys merchant, amount "
    "(two decimals), currency (EUR, USD or GBP) and category (meals, travel, lodging, "
    "office or software), in that order."
)

# Things bought, by category: the closed set that the category is inferred from.
ITEMS: dict[str, tuple[str, ...]] = {
    "meals": (
        "breakfast", "coffee", "dinner", "lunch", "pizza", "sandwiches", "snacks",
        "soup",
    ),
    "travel": (
        "bus tickets", "car rental", "ferry tickets", "fuel", "parking",
        "plane tickets", "taxi fare", "train tickets",
    ),
    "lodging": (
        "accommodation", "a guest room", "a hostel stay", "a hotel room",
        "a motel room", "an overnight stay",
    ),
    "office": (
        "desk lamps", "envelopes", "notebooks", "pens", "printer paper", "staplers",
        "sticky notes", "toner",
    ),
    "software": (
        "antivirus software", "an app subscription", "cloud storage",
        "a database licence", "a software licence", "a software upgrade",
    ),
}  # fmt: skip

# Ways to write an amount, by currency.
MONEY: dict[str, tuple[str, ...]] = {
    "EUR": ("{} euros", "€{}", "EUR {}", "{} EUR"),
    "USD": ("{} dollars", "${}", "USD {}", "{} USD"),
    "GBP": ("{} pounds", "£{}", "GBP {}", "{} GBP"),
}

# {item} is the thing bought, {Item} the same with a capital letter.
TRAIN_TEMPLATES = (
    "Paid {money} at {merchant} for {item}.",
    "{Item} at {merchant}, {money}.",
    "{merchant}: {item}, {money}",
    "Spent {money} on {item} at {merchant}.",
    "I bought {item} from {merchant} for {money}.",
    "{money} for {item} ({merchant})",
    "Please reimburse {money} for {item}, bought at {merchant}.",
    "Hi, here is my receipt from {merchant}: {item}, {money} in total. Thanks!",
    "{merchant} charged me {money} for {item}.",
    "We got {item} at {merchant} on Monday and paid {money}.",
    "Invoice from {merchant} over {money} for {item}.",
    "{Item} from {merchant} cost {money}.",
    "{Item}. {merchant}. {money}.",
    "Receipt attached: {merchant}, {money}, {item}.",
    "The bill from {merchant} was {money}, it was for {item}.",
    "Could you book {money} to {merchant}? It was {item} for the client visit.",
    "Had to pay {merchant} {money} for {item} today.",
    "Card payment of {money} to {merchant}, {item}.",
    "For {item} I paid {merchant} {money} in cash.",
    "{merchant} - {money} - {item}",
    "{Item}, {money}, at {merchant}",
    "Last week, {item}: {money} at {merchant}.",
    "New expense: {item} for {money} from {merchant}.",
    "My manager approved {item} from {merchant}, price {money}.",
    "{merchant} sent us a bill of {money} because of {item}.",
    "Total {money}, paid to {merchant} for {item} on Friday.",
    "Team event: {item} by {merchant}, {money} with tax.",
    "Refund request. Merchant {merchant}, {item}, {money}.",
    "Yesterday {merchant} took {money} off my card for {item}.",
    "I need {money} back, I paid for {item} at {merchant}.",
    "Ordered {item} at {merchant}; the price was {money}.",
    "{money} went to {merchant}, for {item}.",
    "Used the company card at {merchant} for {item}: {money}.",
    "Note to accounting: {item}, {merchant}, sum {money}.",
    "While in town I stopped at {merchant} for {item}, which was {money}.",
    "{Item} ({money}) was paid to {merchant}.",
)

VALIDATION_TEMPLATES = (
    "Bought {item} at {merchant}, that was {money}.",
    "Expense claim: {money} to {merchant} for {item}.",
    "{merchant}, {item}, {money}, paid by card.",
    "On Thursday I paid {money} for {item} at {merchant}.",
    "Hello, I spent {money} at {merchant}. It was for {item}.",
    "{Item} for the team, bought from {merchant} at {money}.",
    "{money} / {merchant} / {item}",
    "Please pay me back for {item} from {merchant}: {money}.",
    "The receipt from {merchant} says {money} for {item}.",
    "Our costs for {item} at {merchant} were {money}.",
)

# Parts of coined merchant words: start + middle + end.
STARTS = (
    "Bal", "Cor", "Dren", "Fen", "Gar", "Hol", "Jas", "Kel", "Lun", "Mor", "Nev", "Ost",
    "Pel", "Quen", "Ras", "Sil", "Tam", "Ulv", "Ver", "Wim", "Yar", "Zel",
)  # fmt: skip
MIDDLES = ("a", "e", "i", "o", "u")
ENDS = ("bury", "dell", "ford", "lia", "mont", "nix", "ra", "sen", "ton", "vik")


@dataclass(frozen=True)
class Words:
    """The words that one split makes its merchant names from."""

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    suffixes: tuple[str, ...]


TRAIN_WORDS = Words(
    firsts=(
        "Amber", "Blue", "Copper", "Golden", "Green", "Happy", "Iron", "Little",
        "Lucky", "Northern", "Old", "Quiet", "Red", "Royal", "Silver", "Sunny",
        "White", "Wild",
    ),
    seconds=(
        "Acorn", "Anchor", "Badger", "Bridge", "Castle", "Feather", "Garden", "Harbour",
        "Heron", "Kettle", "Lantern", "Maple", "Meadow", "Orchid", "Otter", "Pepper",
        "River", "Sparrow", "Spoon", "Tower", "Willow", "Wolf",
    ),
    suffixes=(
        "& Sons", "Brothers", "Company", "Direct", "Express", "Goods", "Group", "House",
        "Market", "Services", "Station", "Supply", "Trading", "Works",
    ),
)  # fmt: skip

VALIDATION_WORDS = Words(
    firsts=(
        "Black",
        "Bright",
        "Crimson",
        "Grand",
        "Hidden",
        "Purple",
        "Southern",
        "Tiny",
    ),
    seconds=(
        "Candle",
        "Falcon",
        "Forest",
        "Island",
        "Lemon",
        "Mirror",
        "Rabbit",
        "Tulip",
    ),
    suffixes=("& Daughters", "Centre", "Corner", "Partners", "Point", "Store"),
)


@dataclass(frozen=True)
class Row:
    """One expense note with the record it stands for."""

    template: str
    item: str
    money: str
    merchant: str
    amount: str
    currency: str
    category: str

    @property
    def note(self) -> str:
        """The free text that the user sends."""
        return self.template.format(
            item=self.item,
            Item=self.item[0].upper() + self.item[1:],
            money=self.money,
            merchant=self.merchant,
        )

    @property
    def record(self) -> str:
        """The JSON line that the assistant answers with."""
        merchant = json.dumps(self.merchant, ensure_ascii=False)
        return (
            f'{{"merchant": {merchant}, "amount": {self.amount}, '
            f'"currency": "{self.currency}", "category": "{self.category}"}}'
        )

    def to_json(self) -> str:
        """Return the row as one line of the data file."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.note},
            {"role": "assistant", "content": self.record},
        ]
        return json.dumps({"messages": messages}, ensure_ascii=False)


# Of random.Random only random() is used, whose sequence all Python versions share.
def pick(rng: random.Random, options: Sequence[str]) -> str:
    """Return one of ``options``."""
    return options[int(rng.random() * len(options))]


def shuffled(rng: random.Random, options: Sequence[str]) -> list[str]:
    """Return ``options`` in a random order."""
    return [option for _, option in sorted((rng.random(), option) for option in options)]


def deal(rng: random.Random, options: Sequence[str], count: int) -> list[str]:
    """Return ``count`` options, each used equally often (give or take one)."""
    dealt: list[str] = []
    while len(dealt) < count:
        dealt += shuffled(rng, options)
    return dealt[:count]


def make_merchants(rng: random.Random, words: Words, coined: list[str], count: int) -> list[str]:
    """Return ``count`` different merchant names; ``coined`` words are used up."""
    pools = {"first": words.firsts, "second": words.seconds, "suffix": words.suffixes}

    def make_word(part: str) -> str:
        if part == "coined":
            return coined.pop()
        return pick(rng, pools[part]) if part in pools else part

    names: dict[str, None] = {}
    shapes = (
        "coined",
        "coined suffix",
        "first second",
        "second suffix",
        "coined & coined",
    )
    for shape in deal(rng, shapes, count):
        size = len(names)
        while len(names) == size:
            names[" ".join(make_word(part) for part in shape.split())] = None
    return list(names)


def make_amount(rng: random.Random, used: set[str]) -> tuple[str, str]:
    """Return an unused amount as a note may write it, and with two decimals."""
    while True:
        whole = str(3 + int(rng.random() ** 2 * 397))  # mostly small
        cents = f"{int(rng.random() * 100):02d}" if rng.random() < 0.75 else "00"
        amount = f"{whole}.{cents}"
        if amount not in used:
            used.add(amount)
            return (whole if cents == "00" else amount), amount


def make_rows(
    rng: random.Random,
    templates: Sequence[str],
    merchants: Sequence[str],
    used_amounts: set[str],
) -> list[Row]:
    """Return one row per merchant."""
    count = len(merchants)
    rows: list[Row] = []
    for template, category, currency, merchant in zip(
        deal(rng, templates, count),
        deal(rng, tuple(ITEMS), count),
        deal(rng, tuple(MONEY), count),
        merchants,
        strict=True,
    ):
        written, amount = make_amount(rng, used_amounts)
        rows.append(
            Row(
                template=template,
                item=pick(rng, ITEMS[category]),
                money=pick(rng, MONEY[currency]).format(written),
                merchant=merchant,
                amount=amount,
                currency=currency,
                category=category,
            )
        )
    return rows


def words_of(text: str) -> set[str]:
    """Return the words of ``text``, in lower case."""
    return set(re.findall(r"[^\W\d_]+", text.lower()))


def skeleton(row: Row) -> str:
    """Return the note's phrasing: its lower-case text without what fills the slots."""
    text = row.note
    for value, slot in ((row.merchant, "M"), (row.money, "A"), (row.item, "I")):
        pattern = rf"(?<!\w){re.escape(value)}(?!\w)"
        text = re.sub(pattern, f"<{slot}>", text, count=1, flags=re.IGNORECASE)
    return text.lower()


def check(train: Sequence[Row], validation: Sequence[Row]) -> None:
    """Assert that the splits share no name, amount or phrasing, and rows are valid."""
    train_words = set().union(*(words_of(row.note) for row in train))
    train_amounts = {row.amount for row in train}
    train_skeletons = {skeleton(row) for row in train}
    for row in validation:
        shared = words_of(row.merchant) & train_words
        assert not shared, f"merchant words in both splits: {sorted(shared)}"
        assert row.amount not in train_amounts, f"amount in both splits: {row.amount}"
        assert skeleton(row) not in train_skeletons, f"phrasing in both splits: {row.note}"
    assert len(train_skeletons) == len(TRAIN_TEMPLATES)
    assert len({skeleton(row) for row in validation}) == len(VALIDATION_TEMPLATES)
    for row in (*train, *validation):
        record = json.loads(row.record)
        assert list(record) == ["merchant", "amount", "currency", "category"]
        assert record["merchant"] in row.note


def main() -> None:
    """Write both files."""
    rng = random.Random(SEED)
    coined = shuffled(rng, [s + m + e for s in STARTS for m in MIDDLES for e in ENDS])
    used_amounts: set[str] = set()
    train = make_rows(
        rng,
        TRAIN_TEMPLATES,
        make_merchants(rng, TRAIN_WORDS, coined, TRAIN_ROWS),
        used_amounts,
    )
    validation = make_rows(
        rng,
        VALIDATION_TEMPLATES,
        make_merchants(rng, VALIDATION_WORDS, coined, VALIDATION_ROWS),
        used_amounts,
    )
    check(train, validation)
    for name, rows in (("train", train), ("validation", validation)):
        path = Path(__file__).with_name(f"{name}.jsonl")
        text = "".join(row.to_json() + "\n" for row in rows)
        path.write_bytes(text.encode())
        print(f"{path.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
