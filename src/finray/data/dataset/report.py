"""The report on a prepared dataset: how rows were read, how many there are, and what was truncated or dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from finray.config.preference import PreferenceConfig
from finray.config.schema import Config
from finray.data.dataset.manifest import NAMED_ROWS, Manifest, SplitStats
from finray.data.dataset.prepared import BAD_ROWS, PreparedSplit, Splits
from finray.data.formats.preference_checks import balancing, contradictions, length_bias, only_class
from finray.data.sources.resolve import listed
from finray.limits import cut

_CLASSES = 10
# Nats per token from which on answers are not what a reference would write: what models write themselves has about one.
_UNKNOWN = 3.0
# Counters of rows, and what they mean for a row; `finray inspect` says the same.
COUNTERS: dict[str, str] = {
    "truncated": "were cut off at data.max_length: raise it, or set data.on_too_long to drop",
    "answers_lost": "lost their whole answer at data.max_length: raise it, or shorten what stands before the answer",
    "dropped_too_long": "were dropped: longer than data.max_length",
    "unlearnable": "were dropped: no token to learn",
    "bad_rows": f"are bad and were left out; they are listed in {BAD_ROWS}",
    "system_unused": "are no conversations: data.system has no effect on them",
    "system_ignored": "have a system message that the chat template leaves out",
    "answers_rewritten": "have an answer that the chat template rewrites",
    "empty_answers": "have an empty answer: the model learns to say nothing there",
    "joined_words": "have no white space between prompt and completion, which are joined as they are",
    "tools_as_text": "have tools or tool calls written as text, as data.tool_format says: the chat template knows none",
    "calls_left_out": "have tool calls of which the chat template leaves out a name or an argument",
    "open_answers": "have an answer that no end-of-turn token closes: the model does not learn to stop there; if a "
    "special token begins the next turn, add its id to eos_token_id in generation_config.json: then that is learned",
    "unpaired_tags": "have an answer with a tag of its reasoning, such as <think>, that is doubled, or that nothing "
    "opens or closes: write one pair around the reasoning, or the reasoning as `reasoning_content`",
    "doubled_bos": "begin with the BOS token twice: the text has one, and another was added",
    "doubled_eos": "have an end token twice in a row: the text has one, and another was added",
    "special_in_prompts": "have text in their prompt that the tokenizer reads as special tokens, which can end or "
    "begin a turn; a server reads it in the same way",
    "numbers_as_text": "have numbers, true or false where text belongs: learned as JSON writes them",
    "equal_answers": "have the same text as the better and as the worse answer: nothing is learned from them; leave "
    "them out",
    "inverted_margins": "have a worse answer with a better score: exchange the answers, or the scores",
    "unwanted_answers": "say that their answer is not wanted (as in data for KTO), and it is learned like the others",
}
_REASONING = (
    *("reasoning", "reasoning_content", "reasoning_details", "thinking", "think", "thought", "thoughts", "cot"),
    *("chain_of_thought", "rationale", "explanation"),
)
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_FLAGS = ("train", "training", "trainable", "loss", "loss_mask", "mask")
_WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight", "loss_scale")
_PROMPTS = ("prompt", "question", "query", "instruction", "input")
_ANSWERS = ("output", "response", "completion", "answer", "answers", "target")
# Columns, and keys of messages, that change what a row means: what it means that they are not read.
_MEANINGS: dict[str, str] = {
    **dict.fromkeys(_REASONING, "this reasoning is not learned"),
    **dict.fromkeys(_MEDIA, "the model is given text only"),
    **dict.fromkeys(
        (
            "system",
            "system_prompt",
            "system_message",
            "tools",
            "functions",
            "history",
            "context",
            "contexts",
            "passage",
        ),
        "the model is not given it",
    ),
    **dict.fromkeys(("document", "documents"), "the model is not given it"),
    "chat_template_kwargs": "no chat template is applied",
    "refusal": "the refusal is not learned",
    "prefix": "the chat template does not know it",
}
_OF_COLUMNS: dict[str, str] = {
    **_MEANINGS,
    **dict.fromkeys(_FLAGS, "all rows are learned; a flag belongs to a message"),
    **dict.fromkeys(_WEIGHTS, "all rows count the same"),
    **dict.fromkeys(
        (f"{one}{end}" for one in ("chosen", "rejected") for end in ("", "_response", "_responses", "_messages")),
        "preferences are not learned, only the answer that is read",
    ),
    "split": "rows of every split are read",
}
_OF_PAIRS = {
    **dict.fromkeys(_PROMPTS, "the model is not given it"),
    **dict.fromkeys(_ANSWERS, "it is another answer, which is not learned"),
}
_OF_PREFERENCES = dict.fromkeys(
    ("chosen_model", "chosen-model", "model", "generator"),
    "answers that another model wrote teach more after supervised fine-tuning on the better ones",
)
_OF_KEYS: dict[str, str] = {
    **_MEANINGS,
    **dict.fromkeys((*_FLAGS, *_WEIGHTS), "only answers are learned (data.train_on)"),
}


def report_lines(manifest: Manifest) -> list[str]:
    """A summary, one line per split, and warnings about truncated and dropped rows."""
    lines = []
    for split, stats in manifest.splits.items():
        for stream in stats.streams:
            lines.append(f"{stream.name}: read as {stream.format}")
        learned = "labelled" if stats.problem else f"{stats.supervised / max(1, stats.tokens):.0%} supervised"
        rows = f"{stats.rows // 2:,} pairs" if stats.kind == "preference" else f"{stats.rows:,} rows"
        lines.append(f"{split}: {rows}, {stats.tokens:,} tokens, {learned}, longest {stats.longest:,}")
        if stats.problem:
            lines.append(f"{split}: {balance(stats)}")
        if stats.left_out:
            lines.append(f"{split}: the converter left out {stats.left_out:,} of {stats.source_rows:,} rows")
        lines += [f"warning: {split}: {text}" for text in unread_fields(stats)]
        if stats.empty_files:
            lines.append(f"warning: {split}: {without_rows(stats)}")
        if stats.split_conversations:
            lines.append(
                f"{split}: {stats.split_conversations:,} conversations became {stats.split_rows:,} rows with "
                f"{stats.split_tokens / max(1, stats.tokens):.0%} of all tokens: the chat template rewrites "
                "earlier turns (data.train_on: last_assistant makes one row of each)"
            )
        named = {**stats.places, "answers_lost": stats.answers_lost_at, "truncated": stats.truncated_at}
        lines += [
            # A converter may make several rows of one.
            f"warning: {split}: {count:,} of {max(stats.source_rows, count):,} rows {text}"
            + (f", such as {', '.join(places)}" if (places := named.get(name)) else "")
            for name, text in COUNTERS.items()
            if (count := getattr(stats, name))
        ]
    return lines


def unserved_ends(manifest: Manifest, stops: Collection[int]) -> list[str]:
    """Warnings about answers that end with a token at which a server does not stop: neither EOS, nor one of the
    ``stops`` of the model's generation settings."""
    return [
        f"warning: {split}: {count:,} answers end with {end.partition(' ')[2]}, at which a server that goes by the "
        "model's generation settings does not stop; add its id to eos_token_id in generation_config.json"
        for split, stats in manifest.splits.items()
        for end, count in stats.ends.items()
        if int(end.partition(" ")[0]) not in stops
    ]


def unread_fields(stats: SplitStats) -> list[str]:
    """Of columns and keys of messages that are not read, those that would change what rows mean, and all keys."""
    lines, keys = [], dict[str, int]()
    for stream in stats.streams:
        kind = stream.format.partition(" ")[0]
        columns = {**_OF_COLUMNS, **(_OF_PAIRS if kind in ("prompt_completion", "alpaca", "template") else {})}
        columns |= _OF_PREFERENCES if stats.kind in ("preference", "unpaired") else {}
        for name, rows in stream.unread.items():
            key = name.removeprefix("messages[].")
            meaning = (columns if key == name else _OF_KEYS).get(key)
            if meaning is not None and rows:
                what = f"`{name}`, a column" if key == name else f"`{key}` in a message, a key"
                lines.append(f"{rows:,} of {stream.source_rows:,} rows have {what} that is not read: {meaning}")
            elif key != name:
                keys[key] = keys.get(key, 0) + rows
    if keys:
        named = ", ".join(f"`{cut(key, 60)}` ({rows:,} rows)" for key, rows in keys.items())
        lines.append(f"keys of messages that nothing reads: {cut(named, 300)}")
    return lines


def without_rows(stats: SplitStats) -> str:
    """The source files of a split that have no rows."""
    files = stats.empty_files
    return f"{len(files):,} file{'' if len(files) == 1 else 's'} without rows: {listed(files)}"


def shared_rows(splits: Splits, kind: str, config: Config) -> list[str]:
    """Warnings about held-out rows that are trained on too, by their tokens, and about preferences."""
    lines = [
        f"warning: {text}" + (f", such as {', '.join(where)}" if where else "")
        for _, text, _, where in preference_remarks(splits, kind, config)
    ]
    for name, rows in (("eval", splits.eval), ("test", splits.test)):
        if rows is not None and (count := int(np.isin(rows.digests, splits.train.digests).sum())):
            lines.append(
                f"warning: {name}: {count:,} of {len(rows):,} rows are also in train, so scores on them say little"
            )
    return lines


Remark = tuple[str, str, int, tuple[str, ...]]


def preference_remarks(splits: Splits, kind: str, config: Config) -> list[Remark]:
    """What no objective can learn from preferences, or learns wrongly: name, sentence, number of pairs or answers, and
    the first of them as ``file:row``. Nothing for rows of other kinds."""
    some = [rows for rows in (splits.train, splits.eval, splits.test) if rows is not None]
    if kind == "preference":
        return _of_pairs(some, config)
    return _of_answers(some, config.preference) if kind == "unpaired" else []


def _of_answers(some: Sequence[PreparedSplit], preference: PreferenceConfig) -> list[Remark]:
    """Of single answers, desirable or not; those to train on come first."""
    desirable, remarks = [rows.values("label") > 0 for rows in some], list[Remark]()
    digests, wanted = np.concatenate([rows.digests for rows in some]), np.concatenate(desirable)
    if len(both := np.intersect1d(digests[wanted], digests[~wanted])):
        places = [(rows, number) for rows in some for number in range(len(rows))]
        firsts = [(np.argmax((digests == one) & side) for side in (wanted, ~wanted)) for one in both[:NAMED_ROWS]]
        where = tuple(" = ".join(places[at][0].where(places[at][1]) for at in two) for two in firsts)
        text = f"{len(both):,} answers are desirable in one row and undesirable in another: remove one of the two"
        remarks.append(("Labels that contradict each other", text, len(both), where))
    counts = int(desirable[0].sum()), int((~desirable[0]).sum())
    if (only := only_class(desirable[0])) is not None:
        text = f"all {sum(counts):,} answers are {'' if only else 'un'}desirable: nothing says what to prefer to them"
        remarks.append(("One label", text, sum(counts), ()))
    elif (repair := balancing(*counts, preference.desirable_weight, preference.undesirable_weight)) is not None:
        ratio, name, low, high = repair
        text = (
            f"{counts[0]:,} answers are desirable and {counts[1]:,} undesirable: with their weights {ratio:.2f} to 1; "
            f"from 1 to 4/3 is recommended: set preference.{name} between {low:.3g} and {high:.3g}"
        )
        remarks.append(("Labels out of balance", text, sum(counts), ()))
    return remarks


def _of_pairs(some: Sequence[PreparedSplit], config: Config) -> list[Remark]:
    settings = config.preference
    each = [(rows, first) for rows in some for first in rows.groups.starts[:-1].tolist()]
    digests = [(int(rows.digests[first]), int(rows.digests[first + 1])) for rows, first in each]
    longest = {rows.name: int(rows.lengths.max()) for rows, _ in each}
    train, remarks = some[0], list[Remark]()
    if opposite := contradictions(*zip(*digests, strict=True)):
        where = tuple(" = ".join(each[at][0].where(each[at][1]) for at in pair) for pair in opposite[:NAMED_ROWS])
        text = (
            f"{len(opposite):,} of {len(each):,} pairs say the opposite of another one, with chosen and rejected "
            "exchanged: remove one of them"
        )
        remarks.append(("Pairs that contradict each other", text, len(opposite), where))
    # A row that was cut off is as long as any, and does not end as the other one does.
    cut_off = [
        (rows, first)
        for rows, first in each
        if len(set(lengths := rows.lengths[first : first + 2].tolist())) == 2
        and max(lengths) == longest[rows.name]
        and rows.row(first)[0][-1] != rows.row(first + 1)[0][-1]
    ]
    if cut_off:
        text = (
            f"{len(cut_off):,} of {len(each):,} pairs compare a whole answer with one that is cut off at "
            "data.max_length: raise it, or set data.on_too_long to drop"
        )
        where = tuple(rows.where(first) for rows, first in cut_off[:NAMED_ROWS])
        remarks.append(("One answer cut off", text, len(cut_off), where))
    learned = train.supervised[train.groups.starts[:-1, None] + [0, 1]]
    bias = length_bias(learned[:, 0], learned[:, 1])
    if bias.is_telling:
        which = "longer" if bias.share > 0.5 else "shorter"
        text = (
            f"the {which} answer is the better one in {max(bias.share, 1 - bias.share):.0%} of {bias.pairs:,} pairs: "
            f"the model may learn to answer {which} and nothing else; balance the lengths"
        )
        # The others' losses divide by them already, or see no lengths.
        if config.train.objective == "dpo" and not (settings.length_normalized or settings.loss == "ipo"):
            text += ", or set preference.length_normalized"
        remarks.append(("Length predicts the preference", text, bias.pairs, ()))
    return remarks


def reference_remark(rows: PreparedSplit, column: str = "reference") -> tuple[str, bool]:
    """How far a reference prefers the chosen answers of pairs already, by a column of log-probabilities, and whether it
    does not know such answers."""
    firsts = rows.groups.starts[:-1].tolist()
    sums_P2 = np.array([[rows.column(column, first + at).sum() for at in (0, 1)] for first in firsts], float)
    ahead_P, targets_P = sums_P2[:, 0] - sums_P2[:, 1], rows.supervised[firsts]
    nats = -float(sums_P2[:, 0].sum() / targets_P.sum())
    text = (
        f"the reference finds the chosen answer the more likely one in {np.mean(ahead_P > 0):.1%} of {len(firsts):,} "
        f"pairs, by {ahead_P.mean():.3g} nats in the mean; chosen answers have {nats:.3g} nats per token"
    )
    if nats > _UNKNOWN:
        text += (
            ": it is not the model that they came from, and does not write like that; fine-tune it on the chosen "
            "answers first, and go on from there (adapter.start_from)"
        )
    return text, nats > _UNKNOWN


def balance(stats: SplitStats) -> str:
    """The labels of a split, with the number of rows in the largest classes."""
    if stats.problem == "regression":
        return "regression: each label is a number"
    largest = sorted(zip(stats.label_rows, stats.labels, strict=False), key=lambda pair: -pair[0])[:_CLASSES]
    named = ", ".join(f"{cut(name, 40)} {rows:,} ({rows / max(1, stats.rows):.1%})" for rows, name in largest)
    more = len(stats.labels) - len(largest)
    classes = f"{len(stats.labels):,} class{'' if len(stats.labels) == 1 else 'es'}"
    return f"{stats.problem}, {classes}: {named}{f' and {more:,} more' if more else ''}"
