"""The engine of finray's own says what plain Transformers says, token by token, whatever rows are beside a row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from finray.config.resolved import Packing
from finray.errors import DataError, ModelError
from finray.evaluation.engines import Answer, Continuation, Sampling
from finray.evaluation.engines import transformers as engine_module
from finray.evaluation.engines.base import Loading, mute
from finray.evaluation.engines.transformers import RunningRow, TransformersEngine, take
from finray.models import ropes, slots
from finray.models.artifacts import Artifact, read_artifact
from tests.support import tiny

pytestmark = pytest.mark.long

# Of many lengths, not sorted; some longer than the windows of the small models.
LENGTHS = (3, 9, 1, 5, 2, 6, 30, 17, 4, 12)
PROMPTS = [
    torch.randint(3, 380, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
NEW = 20
PACKED = [name for name in tiny.FAMILIES if name not in ("bloom", "mamba")]


class Words:
    """A tokenizer whose text shows every token."""

    def __init__(self, *, eos: int | None = None, pad: int | None = 0) -> None:
        self.eos_token_id, self.pad_token_id = eos, pad

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join(f"{token} " for token in tokens)


@torch.no_grad()
def plain(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """Transformers' own greedy answer, without the token that ends it."""
    ids = torch.tensor([prompt])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
    )[0, len(prompt) :].tolist()
    end = model.generation_config.eos_token_id
    return said[: said.index(end)] if end in said else said


def by_row(answers: Iterator[Answer]) -> dict[int, Answer]:
    return {answer.row: answer for answer in answers}


def made(family: str, **options: Any) -> TransformersEngine:
    return TransformersEngine.of(tiny.build_model(family).eval(), Words(), **options)


def base_of(artifact: Artifact) -> Artifact:
    """The model under an adapter."""
    assert artifact.base is not None
    return read_artifact(Path(artifact.base.name))


def reference(family: str) -> Any:
    """The same model, with its own attention."""
    return tiny.build_model(family).eval()


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "lfm2"])
def test_answers_are_those_of_transformers_greedy_generate_in_any_batch(family: str) -> None:
    model = tiny.build_model(family).eval()
    # Some answers end early, so that rows take each other's places.
    model.generation_config.eos_token_id = plain(model, PROMPTS[0])[4]
    expected = [plain(model, prompt) for prompt in PROMPTS]
    assert len({len(one) for one in expected}) > 1, "some end early, and others do not"
    for size in (1, 3, 16):
        lines: list[str] = []
        engine = TransformersEngine.of(model, Words(), batch_size=size, notify=lines.append)
        found = by_row(engine.generate(PROMPTS, Sampling(NEW)))
        assert [list(found[row].tokens) for row in range(len(PROMPTS))] == expected
        finished = {row: "stop" if len(said) < NEW else "length" for row, said in enumerate(expected)}
        assert {row: answer.finish for row, answer in found.items()} == finished
        assert len(lines) == (family not in PACKED)
        engine.close()
    assert plain(model, PROMPTS[0]) == expected[0], "the model has its own attention again"


def test_the_comparison_can_see_a_row_that_reads_what_was_in_its_slot_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made("llama", batch_size=3)
    expected = {row: plain(reference("llama"), prompt) for row, prompt in enumerate(PROMPTS)}

    def everything(self: Any, window: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(self._positions_B), 1, 1, self._longest, dtype=dtype)

    monkeypatch.setattr(slots.Step, "_bias_of", everything)
    found = by_row(engine.generate(PROMPTS, Sampling(NEW)))
    assert {row: list(answer.tokens) for row, answer in found.items()} != expected


@pytest.mark.parametrize(
    ("family", "shared", "read_once"),
    [("llama", 20, True), ("gemma2", 8, True), ("gpt2", 8, True), ("llama", 7, False)],
)
def test_a_prefix_that_all_prompts_have_in_common_is_read_once(family: str, shared: int, read_once: bool) -> None:
    prefix = torch.randint(3, 380, (shared,), generator=torch.Generator().manual_seed(99)).tolist()
    # One prompt is nothing but the prefix and a token.
    prompts = [prefix + prompt for prompt in PROMPTS] + [[*prefix, 5]]
    model, tokens = tiny.build_model(family).eval(), list[int]()
    model.generation_config.eos_token_id = None
    expected = [plain(model, prompt) for prompt in prompts]
    for size in (2, 16):
        tokens.clear()
        engine = TransformersEngine.of(model, Words(), batch_size=size)
        hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: tokens.append(args[0].numel()))
        found = by_row(engine.generate(prompts, Sampling(NEW)))
        hook.remove()
        engine.close()
        assert [list(found[row].tokens) for row in range(len(prompts))] == expected
        rest = sum(map(len, prompts)) - (shared * (len(prompts) - 1) if read_once else 0)
        # The first pass is of finray's comparison of its head with the model's.
        assert sum(tokens[1:]) == rest + len(prompts) * (NEW - 1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Of each packed pass the pieces: how many tokens, and where in its row the first is."""
    laid, found = slots.Laid.of, list[list[tuple[int, int]]]()

    def noted(pieces: Any, layout: Any, device: torch.device) -> slots.Laid:
        found.append([(len(tokens), place) for tokens, place in pieces])
        return laid(pieces, layout, device)

    monkeypatch.setattr(slots.Laid, "of", noted)
    return found


def test_a_prompt_that_begins_like_the_one_before_is_read_from_where_they_differ(
    passes: list[list[tuple[int, int]]],
) -> None:
    engine, model = made("gemma3"), reference("gemma3")
    first = next(engine.generate([PROMPTS[6]], Sampling(5)))
    longer = [*PROMPTS[6], *first.tokens, 17, 18, 19]
    passes.clear()
    second = next(engine.generate([longer], Sampling(5)))
    # The last token of the first answer was never given to the model.
    assert [size for size, _ in passes[0]] == [4]
    assert list(second.tokens) == plain(model, longer, 5)
    changed = [*PROMPTS[6][:20], 5, 6, 7]
    assert list(next(engine.generate([changed], Sampling(5))).tokens) == plain(model, changed, 5)
    assert list(next(engine.generate([PROMPTS[6]], Sampling(5))).tokens) == list(first.tokens)


def test_a_prompt_that_is_asked_again_or_begins_all_others_is_answered_as_before() -> None:
    """At least one token is always read, for nothing follows from none."""
    engine, model = made("llama"), reference("llama")
    expected = plain(model, PROMPTS[6])
    for _ in range(2):
        assert list(next(engine.generate([PROMPTS[6]], Sampling(NEW))).tokens) == expected
    prompts = [[*PROMPTS[6], *PROMPTS[3]], PROMPTS[6], [*PROMPTS[6], 5]]
    found = by_row(engine.generate(prompts, Sampling(NEW)))
    assert [list(found[row].tokens) for row in range(3)] == [plain(model, prompt) for prompt in prompts]


def test_prompts_of_one_pass_have_no_more_tokens_than_fit(
    passes: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> list[list[int]]:
        # Rows that are running read one token.
        prompts = ([size for size, place in one if place == 0 or size > 1] for one in passes)
        return [sizes for sizes in prompts if sizes]

    engine, model = made("llama"), reference("llama")
    monkeypatch.setitem(engine_module.PASS_TOKENS, "cpu", 30)
    found = by_row(engine.generate(PROMPTS, Sampling(3)))
    assert [list(found[row].tokens) for row in range(len(PROMPTS))] == [plain(model, one, 3) for one in PROMPTS]
    # From the longest on, as many as make 30 tokens.
    assert read() == [[30], [17, 12], [9, 6, 5, 4, 3, 2, 1]]
    # What all have in common is read once, and does not count. A row that is longer than a pass is read alone.
    passes.clear()
    ends = [*(PROMPTS[at] for at in (6, 7, 9, 1)), PROMPTS[6] * 2]
    list(engine.generate([PROMPTS[7] + end for end in ends], Sampling(1)))
    assert read() == [[17], [60], [30], [17, 12], [9]]


def test_a_single_prompt_is_read_again_where_the_adapter_is_switched(tiny_adapter_dir: Path) -> None:
    """What was kept of the last prompt is of the other model."""
    artifact = read_artifact(tiny_adapter_dir)
    loading = Loading(artifact, Words(), torch.device("cpu"), torch.float32, batch_size=4)
    engine, base = TransformersEngine(loading), TransformersEngine(replace(loading, artifact=base_of(artifact)))
    expected = [
        [next(one.generate([PROMPTS[6]], Sampling(NEW), adapter=adapter)).tokens for adapter in (True, False)]
        for one in (TransformersEngine(loading), base)
    ]
    assert expected[0][0] != expected[1][0]
    for adapter in (True, False, True):
        answer = next(engine.generate([PROMPTS[6]], Sampling(NEW), adapter=adapter))
        assert answer.tokens == expected[0 if adapter else 1][0]


# --- how tokens are chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_what_is_sampled_for_a_row_does_not_depend_on_the_rows_beside_it(family: str) -> None:
    sampling = Sampling(8, temperature=1.3, top_k=50, top_p=0.9, seed=4)
    whole = by_row(made(family, batch_size=16).generate(PROMPTS, sampling))
    for size in (1, 3):
        assert by_row(made(family, batch_size=size).generate(PROMPTS, sampling)) == whole
    some = by_row(made(family, batch_size=2).generate(PROMPTS[5:8], sampling, rows=[5, 6, 7]))
    assert some == {row: whole[row] for row in (5, 6, 7)}
    other = by_row(made(family).generate(PROMPTS, Sampling(8, temperature=1.3, top_k=50, top_p=0.9, seed=5)))
    assert all(other[row] != whole[row] for row in whole)
    twice = by_row(made(family).generate([PROMPTS[0]] * 2, sampling))
    assert twice[0].tokens != twice[1].tokens, "a prompt that is asked twice gets two samples"


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.6, 5, 1.0), (1.0, 0, 0.6), (0.5, 9, 0.8)]
)
def test_tokens_are_sampled_as_often_as_transformers_warpers_make_them_likely(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)) * 2
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
    wanted = TopPLogitsWarper(top_p)(None, wanted).softmax(-1)[0]
    draws = 20_000
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=2)
    found = sampling.choose(logits.expand(draws, -1), range(draws), [3] * draws).bincount(minlength=30) / draws
    assert (found[wanted == 0] == 0).all()
    assert (found - wanted).abs().max() < 4 * (0.25 / draws) ** 0.5


def test_an_answer_ends_before_a_stop_string_and_tokens_are_told_as_they_come() -> None:
    engine = made("llama", batch_size=2)
    whole = by_row(engine.generate(PROMPTS[:2], Sampling(NEW)))[1]
    third, fourth = whole.tokens[3:5]
    told: list[tuple[int, int]] = []
    stop = (f"{third} {fourth} ", "nowhere")
    cut = by_row(engine.generate(PROMPTS[:2], Sampling(NEW, stop=stop), on_token=lambda *one: told.append(one)))
    at = whole.text.index(stop[0])
    assert (cut[1].text, cut[1].finish) == (whole.text[:at], "stop")
    assert [token for row, token in told if row == 1] == list(cut[1].tokens)
    assert len(cut[0].tokens) == NEW


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_have_the_log_probability_of_each_token_that_was_chosen_and_the_version_of_the_weights(
    family: str, temperature: float
) -> None:
    model = tiny.build_model(family).eval()
    greedy = plain(model, PROMPTS[1])
    # One of two answers ends here.
    engine = TransformersEngine.of(model, Words(eos=greedy[6]), batch_size=2)
    engine.weights = 7
    # The penalty changes what is chosen, and what slots give is before it.
    penalty = 1.0 if family == "bloom" else 1.3
    sampling = Sampling(NEW, temperature=temperature, top_k=9, seed=4, repetition_penalty=penalty)
    answers = list(engine.generate(PROMPTS[:3], sampling, logprobs=True))
    engine.close()
    for answer in answers:
        chosen = [*answer.tokens, *([] if answer.end is None else [answer.end])]
        assert (answer.finish == "stop", answer.weights) == (answer.end is not None, 7)
        ids, first = torch.tensor([[*PROMPTS[answer.row], *chosen]]), len(PROMPTS[answer.row])
        with torch.no_grad():
            expected = model(ids).logits[0, first - 1 : -1].double().log_softmax(-1)
        assert answer.logprobs == pytest.approx(expected[range(len(chosen)), chosen].tolist(), abs=1e-4)
    without = by_row(engine.generate(PROMPTS[:3], sampling)) if family == "bloom" else {}
    assert all(one.logprobs == () for one in without.values())


class Bytes(Words):
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("stop", [("ééééééé", "!"), ("!", "ééééééé"), ("ab ééééééé",)])
def test_a_string_to_stop_at_may_have_a_token_for_each_of_its_bytes(stop: tuple[str, ...]) -> None:
    row = RunningRow(3, [1], 99, Sampling(99, stop=stop), frozenset())
    said = list("x ab ééééééé".encode())
    *before, last = [take(row, token, Bytes(), mute) for token in said]
    assert before == [None] * (len(said) - 1)
    assert last == Answer(3, tuple(said), "x ab " if len(stop) == 2 else "x ", "stop")


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize(("of_config", "penalty"), [(1.0, 8.0), (8.0, 1.0), (8.0, 1.2), (1.4, None)])
def test_a_repetition_penalty_that_is_asked_for_is_transformers_processor(
    family: str, of_config: float, penalty: float | None
) -> None:
    """Step by step, whatever the generation config says, else as it says; bloom is answered by Transformers' own
    `generate`."""
    own, model = tiny.build_model(family).eval(), reference(family)
    own.generation_config.repetition_penalty = of_config
    processor = RepetitionPenaltyLogitsProcessor(penalty or of_config)

    @torch.no_grad()
    def penalised(prompt: list[int], steps: int) -> list[int]:
        ids = list(prompt)
        for _ in range(steps):
            ids.append(int(processor(torch.tensor([ids]), model(torch.tensor([ids])).logits[:, -1]).argmax()))
        return ids[len(prompt) :]

    # Prompts that are filled up begin with tokens that nobody wrote, and that do not count: one is said by the model.
    engine = TransformersEngine.of(own, Words(pad=penalised(PROMPTS[4], 1)[0]), batch_size=4)
    found = by_row(engine.generate(PROMPTS[3:8], Sampling(8, repetition_penalty=penalty)))
    for row, prompt in enumerate(PROMPTS[3:8]):
        assert list(found[row].tokens) == penalised(prompt, len(found[row].tokens))
    assert (by_row(engine.generate(PROMPTS[3:8], Sampling(8))) == found) == (penalty is None)


# By name: values that change nothing, and one that does.
SETTINGS: dict[str, tuple[list[Any], Any]] = {
    **dict.fromkeys(("min_new_tokens", "no_repeat_ngram_size", "min_length"), ([None, 0], 1)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ([None], 5)),
    **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens"), ([None], [5])),
    **{"bad_words_ids": ([None], [[5]]), "sequence_bias": ([None], [[[5], -1.0]])},
    **{"exponential_decay_length_penalty": ([None], (3, 1.5)), "penalty_alpha": ([None, False], 0.6)},
    **{"guidance_scale": ([None, 1, 1.0], 1.5), "encoder_repetition_penalty": ([None, 1.0], 2.0)},
    "remove_invalid_values": ([None, False], True),
}


def test_a_setting_of_a_generation_config_that_changes_answers_is_named() -> None:
    for name, (idle, asking) in SETTINGS.items():
        model = tiny.build_model("llama").eval()
        for value in [*idle, asking]:
            setattr(model.generation_config, name, value)
            lines: list[str] = []
            TransformersEngine.of(model, Words(), batch_size=4, notify=lines.append)
            assert [name in line for line in lines] == [True] * (value == asking), (name, value)


def test_a_generation_config_that_asks_for_more_is_given_to_transformers() -> None:
    model = tiny.build_model("llama").eval()
    model.generation_config.no_repeat_ngram_size = 2
    lines: list[str] = []
    engine = TransformersEngine.of(model, Words(), batch_size=4, notify=lines.append)
    assert ["no_repeat_ngram_size" in line for line in lines] == [True]
    # Also of shorter prompts, which are padded.
    found = by_row(engine.generate(PROMPTS, Sampling(NEW)))
    assert [list(found[row].tokens) for row in range(len(PROMPTS))] == [plain(model, prompt) for prompt in PROMPTS]


def by_length(kind: str, family: str) -> dict[str, Any]:
    """Settings of a tiny model whose positions turn to others in a row of more than 16 tokens."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [1.5 + 2.0 * step for step in range(8)]}
    if family == "gemma3":
        usual = {"rope_type": "default", "rope_theta": 10000.0}
        return {"rope_parameters": {"sliding_attention": usual, "full_attention": rope}, "max_position_embeddings": 16}
    settings = {"rope_parameters": rope, "max_position_embeddings": 16}
    return settings | ({"original_max_position_embeddings": 16} if family == "phi3" else {})


BY_LENGTH = [("dynamic", "llama"), ("longrope", "llama"), ("longrope", "phi3"), ("dynamic", "gemma3")]
BY_LENGTH += [("longrope", "gemma3")]


@pytest.mark.parametrize(
    ("kind", "family", "packs"),
    [
        *((*one, True) for one in BY_LENGTH),
        # In padded batches, by Transformers' own `generate`.
        *((*one, False) for one in BY_LENGTH if one[1] in ("llama", "phi3")),
    ],
)
def test_positions_that_depend_on_the_length_of_a_row_are_those_of_the_row_alone(
    kind: str, family: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on both sides of the turn, and some that cross it in their answer: Phi-3 then reads the row anew."""
    settings = by_length(kind, family)
    # A new model for each row: dynamic NTK in Transformers remembers the longest row so far.
    expected = [plain(tiny.build_model(family, **settings).eval(), prompt) for prompt in PROMPTS]
    if not packs:
        monkeypatch.setitem(engine_module._ASKS, "top_h", ())
    engine = TransformersEngine.of(tiny.build_model(family, **settings).eval(), Words(), batch_size=4)
    assert engine.has_slots == packs
    # The small model has far fewer positions than rows.
    engine.max_length = None
    found = by_row(engine.generate(PROMPTS, Sampling(NEW)))
    assert [list(found[row].tokens) for row in range(len(PROMPTS))] == expected
    prefix = PROMPTS[6][:14]
    for prompt in ([*prefix, 9, 8, 7], PROMPTS[6]):
        # One after the other, as in a chat, and several that begin alike.
        (answer,) = engine.generate([prompt], Sampling(NEW))
        right = plain(tiny.build_model(family, **settings).eval(), prompt)
        assert list(answer.tokens) == right
        beside = by_row(engine.generate([prompt, [*prefix, 5]], Sampling(NEW)))
        assert list(beside[0].tokens) == right
    rows = [Continuation(PROMPTS[at], [7] * count) for at in (9, 6, 1) for count in (1, 3, 9)]
    for one in engine.log_likelihood(rows):
        logprobs, _ = likelihood(tiny.build_model(family, **settings).eval(), rows[one.row])
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("broken", ["_kinds", "anew"])
def test_that_comparison_can_see_a_long_row_beside_and_keys_that_are_not_made_anew(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = by_length("longrope", "phi3")
    expected = [plain(tiny.build_model("phi3", **settings).eval(), prompt) for prompt in PROMPTS]
    if broken == "anew":
        monkeypatch.setattr(TransformersEngine, "anew", lambda self, working: [])
    else:
        monkeypatch.setattr(ropes, "_kinds", lambda module: set())
        monkeypatch.setattr(engine_module, "packing_of_config", lambda config: Packing(True, "phi3"))
    engine = TransformersEngine.of(tiny.build_model("phi3", **settings).eval(), Words(), batch_size=4)
    engine.max_length = None
    found = by_row(engine.generate(PROMPTS, Sampling(NEW)))
    assert [list(found[row].tokens) for row in range(len(PROMPTS))] != expected


def test_a_merged_adapter_answers_as_the_two_together_and_its_base_cannot(tiny_adapter_dir: Path) -> None:
    artifact = read_artifact(tiny_adapter_dir)
    loading = Loading(artifact, Words(), torch.device("cpu"), torch.float32, batch_size=4)
    apart, merged = (TransformersEngine(replace(loading, merge=merge)) for merge in (False, True))
    base = TransformersEngine(replace(loading, artifact=base_of(artifact)))
    answers = [by_row(engine.generate(PROMPTS, Sampling(NEW))) for engine in (apart, merged, base)]
    assert answers[0] == answers[1] != answers[2]
    # It costs nothing more than its base.
    names = [sorted(name for name, _ in engine.model.named_parameters()) for engine in (apart, merged, base)]
    assert names[0] != names[1] == names[2]
    assert by_row(apart.generate(PROMPTS, Sampling(NEW), adapter=False)) == answers[2]
    for asked in (
        lambda: list(merged.generate(PROMPTS, Sampling(NEW), adapter=False)),
        lambda: list(merged.log_likelihood([Continuation([1], [2])], adapter=False)),
    ):
        with pytest.raises(ModelError, match="merged into the weights"):
            asked()
    # There is nothing to merge in a model without an adapter.
    whole = TransformersEngine(replace(loading, artifact=base_of(artifact), merge=True))
    assert by_row(whole.generate(PROMPTS, Sampling(NEW), adapter=False)) == answers[2]


def test_beams_of_the_generation_config_are_not_searched() -> None:
    for family in ("llama", "bloom"):
        model = tiny.build_model(family).eval()
        expected = [plain(model, prompt, 6) for prompt in PROMPTS[:4]]
        model.generation_config.num_beams = 3
        found = by_row(TransformersEngine.of(model, Words(), batch_size=2).generate(PROMPTS[:4], Sampling(6)))
        assert [list(found[row].tokens) for row in range(4)] == expected


@pytest.mark.parametrize(("family", "left"), [("gpt2", 3), ("llama", 2)])
def test_a_row_of_a_batch_that_leaves_little_room_does_not_shorten_the_others(family: str, left: int) -> None:
    model = tiny.build_model(family).eval()
    # More than this room asks for nothing, and has Transformers answer in padded batches.
    model.generation_config.no_repeat_ngram_size = 600
    prompts = [(PROMPTS[6] * 99)[: model.config.max_position_embeddings - left], PROMPTS[3]]
    found = by_row(TransformersEngine.of(model, Words(), batch_size=2).generate(prompts, Sampling(NEW)))
    for row, new in ((0, left), (1, NEW)):
        assert (list(found[row].tokens), found[row].finish) == (plain(model, prompts[row], new), "length")


@pytest.mark.parametrize(
    ("pad", "eos", "filled"), [(7, 5, 7), (0, 5, 0), (None, 5, 5), (None, 0, 0), (None, None, 0), (7, None, 7)]
)
def test_batches_are_filled_with_the_padding_token_else_with_the_one_that_ends(
    monkeypatch: pytest.MonkeyPatch, pad: int | None, eos: int | None, filled: int
) -> None:
    """Models such as RoBERTa count the positions of what is not padding."""
    model = tiny.build_model("bloom").eval()
    seen: list[dict[str, Any]] = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **options: (seen.append(options), generate(**options)))
    engine = TransformersEngine.of(model, Words(pad=pad, eos=eos), batch_size=2)
    list(engine.generate([[9, 9, 9], [8]], Sampling(2)))
    (asked,) = seen
    assert asked["input_ids"].tolist() == [[9, 9, 9], [filled, filled, 8]]
    assert asked["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert asked["pad_token_id"] == filled


def test_any_token_of_the_generation_config_and_the_tokenizers_end_an_answer() -> None:
    model = tiny.build_model("llama").eval()
    model.generation_config.eos_token_id = None
    whole = plain(model, PROMPTS[6])
    first = {token: whole.index(token) for token in whole}
    early, late = sorted(first.values())[2], sorted(first.values())[4]
    for eos, ends in ((whole[late], [whole[early]]), (whole[early], whole[late])):
        model.generation_config.eos_token_id = ends
        answer = next(TransformersEngine.of(model, Words(eos=eos)).generate([PROMPTS[6]], Sampling(NEW)))
        assert (list(answer.tokens), answer.finish) == (whole[:early], "stop")


# --- what cannot be answered ------------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_is_refused_and_one_that_leaves_little_is_cut() -> None:
    engine = made("llama")
    assert engine.max_length == 512
    with pytest.raises(DataError, match="prompt 2: the prompt has 512 tokens; prompt and answer together may have 512"):
        engine.generate([[5], [5] * 512], Sampling())
    with pytest.raises(DataError, match="prompt is empty"):
        engine.generate([[]], Sampling())
    answer = next(engine.generate([[5] * 510], Sampling(NEW)))
    assert (len(answer.tokens), answer.finish) == (2, "length")


# --- likelihoods ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def likelihood(model: Any, row: Continuation) -> tuple[list[float], bool]:
    """By hand, in float64, one row alone."""
    ids = torch.tensor([[*row.context, *row.tokens]])
    logits = model(ids).logits[0, len(row.context) - 1 : -1].double()
    tokens = torch.tensor(list(row.tokens))
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist(), bool((logits.argmax(-1) == tokens).all())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "gpt_neox", "qwen3_moe", "bloom", "mamba"])
def test_likelihoods_are_those_of_each_row_alone_also_where_contexts_are_shared(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine_module.PASS_TOKENS, "cpu", 60)
    # Some passes are filled up with tokens that nobody asks for.
    monkeypatch.setattr(engine_module, "SAME_TOKENS", 3)
    engine, model = made(family), reference(family)
    choices = ([7], [9, 12, 15], plain(model, PROMPTS[1], 3), [8, 8])
    rows = [Continuation(PROMPTS[at], one) for at in (1, 3) for one in choices]
    rows += [Continuation(prompt[:1], prompt[1:]) for prompt in PROMPTS if len(prompt) > 1]
    found = {one.row: one for one in engine.log_likelihood(rows)}
    assert sorted(found) == list(range(len(rows)))
    for number, row in enumerate(rows):
        logprobs, is_greedy = likelihood(model, row)
        assert found[number].logprobs == pytest.approx(logprobs, abs=1e-4)
        assert found[number].is_greedy == is_greedy
    assert found[2].is_greedy, "one of them is what greedy search says"


def test_large_passes_over_rows_of_any_length_have_few_numbers_of_tokens(passes: list[list[tuple[int, int]]]) -> None:
    """Each other number of tokens costs memory that is not given back."""
    rows = [Continuation([5] * length, [6] * (1 + length % 7)) for length in range(90, 210)]
    assert len(list(made("llama").log_likelihood(rows))) == len(rows)
    seen = [sum(size for size, _ in one) for one in passes]
    assert [tokens % 64 for tokens in seen[:-1]] == [0] * (len(seen) - 1)
    assert len(seen) > 2 * len({*seen[:-1]})
    assert max(seen) <= 2048 + 63


def test_rows_that_share_a_short_context_are_several_passes(
    passes: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As texts share their first token: 512 of them at once would take tens of GiB."""
    engine, draw = made("llama"), random.Random(3)
    rows = [Continuation([5], [draw.randrange(3, 90) for _ in range(150 + row)]) for row in range(60)]
    found = {one.row: one.logprobs for one in engine.log_likelihood(rows)}
    seen = [sum(size for size, _ in one) for one in passes]
    assert sum(seen) > 60 * 150
    assert max(seen) <= 2048 + 63
    # A long context is computed once for a few short continuations.
    passes.clear()
    list(engine.log_likelihood([Continuation([5] * 500, [choice]) for choice in (7, 8, 9)]))
    monkeypatch.setitem(engine_module.PASS_TOKENS, "cpu", 300)
    list(engine.log_likelihood([Continuation([5] * 500, [choice, 3]) for choice in (7, 8, 9)]))
    assert len(passes) == 2
    for row in (0, 31, 59):
        assert found[row] == pytest.approx(likelihood(reference("llama"), rows[row])[0], abs=1e-4)


def test_the_comparison_can_see_a_continuation_that_reads_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made("llama")
    rows = [Continuation(PROMPTS[1], one) for one in ([9, 12, 15], [8, 8, 4])]
    usual = slots.Branches.__init__

    def joined(self: Any, lengths: Any) -> None:
        usual(self, [(context + sum(branches), []) for context, branches in lengths])

    monkeypatch.setattr(slots.Branches, "__init__", joined)
    found = {one.row: one for one in engine.log_likelihood(rows)}
    assert found[1].logprobs != pytest.approx(likelihood(reference("llama"), rows[1])[0], abs=1e-4)


def test_a_continuation_that_cannot_be_scored_is_refused() -> None:
    engine = made("llama")
    for row, why in (
        (Continuation([], [1]), "at least one token, and a token before"),
        (Continuation([1], []), "needs at least one token"),
    ):
        with pytest.raises(DataError, match=f"row 2: .*{why}"):
            list(engine.log_likelihood([Continuation([1], [2]), row]))
    with pytest.raises(DataError, match="514 tokens, but the model reads at most 512"):
        list(engine.log_likelihood([Continuation([1] * 512, [2, 3])]))
    assert len(list(engine.log_likelihood([Continuation([1] * 512, [2])]))) == 1
