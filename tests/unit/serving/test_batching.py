"""The batch that all requests share: each row gets what it would get alone, whoever is beside it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.config.schema import ModelConfig
from finray.errors import ConfigError, ModelError
from finray.evaluation.engines import Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.models.many_adapters import ManyAdapters, read_plain_lora
from finray.models.slots import Slots
from finray.serving import batching
from finray.serving.adding import Attempt
from finray.serving.batching import AnswerFailed, AnswerFinished, Event, Queue, ServeJob, TextPiece
from finray.serving.errors import ApiError
from finray.serving.models import Models, ServeSettings, find
from tests.support import served, tiny

PROMPTS = [[5, 9, 17, 33], [7], list(range(40, 61)), [12, 13, 14, 200, 201], [99, 98]]
NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return served.save_adapters(tmp_path_factory.mktemp("served"), tokenizer)


def models_of(folder: Path, *names: str, slots: int = 4, max_queue: int = 20, **options: Any) -> Models:
    adapters = tuple((name, str(folder / name)) for name in names)
    settings = ServeSettings(
        str(folder / "base"), adapters=adapters, slots=slots, max_queue=max_queue, dtype="fp32", **options
    )
    return Models(settings, find(settings), lambda line: None)


@pytest.fixture(scope="module")
def models(folder: Path) -> Models:
    return models_of(folder, *served.TARGETS)


class Heard:
    """A job and what is told of it."""

    def __init__(self, models: Models, name: str, prompt: list[int], sampling: Sampling, **options: Any) -> None:
        self.events: list[Event] = []
        one = models.get(name)
        self.job = ServeJob(
            number=0,
            prompt=list(prompt),
            room=sampling.max_new_tokens,
            sampling=sampling,
            ends=frozenset(),
            adapter=one.adapter,
            tokenizer=one.asking.tokenizer,
            on_event=self.events.append,
            **options,
        )

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], AnswerFinished | AnswerFailed)

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.events if isinstance(one, TextPiece))


def work(models: Models, until: Callable[[], bool], most: int = 500) -> None:
    for _ in range(most):
        if until():
            return
        models.batcher.advance()
    raise AssertionError("it does not come to an end")


def answer(models: Models, *heard: Heard, beside: Sequence[Heard] = ()) -> None:
    """Submit jobs, and work until these and those ``beside`` them are over."""
    models.batcher.submit([one.job for one in heard])
    work(models, lambda: all(one.is_over for one in (*heard, *beside)))


def all_answers(models: Models, folder: Path) -> tuple[list[Heard], list[list[int]]]:
    """Every prompt asked of the base and every adapter, coming one after the other; and what is right."""
    asked = [(name, prompt) for prompt in PROMPTS for name in ("base", *served.TARGETS)]
    heard, right = [], []
    references = {name: served.reference(folder, name) for name in ("base", *served.TARGETS)}
    for name, prompt in asked:
        heard.append(Heard(models, name, prompt, Sampling(NEW)))
        models.batcher.submit([heard[-1].job])
        models.batcher.advance()
        right.append(served.greedy(references[name], prompt, NEW))
    work(models, lambda: all(one.is_over for one in heard))
    return heard, right


def test_rows_of_the_base_and_of_adapters_share_steps_and_each_is_answered_as_alone(
    models: Models, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = TransformersEngine.step

    def counted(self: Any, slots: Any, working: Any, coming: Any, known: int = 0) -> Any:
        steps.append(len({id(job.adapter) for job in (*working, *coming)}))
        return step(self, slots, working, coming, known)

    monkeypatch.setattr(TransformersEngine, "step", counted)
    heard, right = all_answers(models, folder)
    assert [one.job.output_ids for one in heard] == right
    assert max(steps) >= 3, "several adapters in one forward pass"
    # Prompts and adapters matter: else the comparison would say nothing.
    assert len({tuple(one) for one in right}) > len(right) // 2


@pytest.mark.long
def test_the_comparison_can_see_an_adapter_of_the_row_beside(
    models: Models, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ManyAdapters.rows
    monkeypatch.setattr(ManyAdapters, "rows", lambda self, pieces: rows(self, [*pieces[1:], pieces[0]]))
    heard, right = all_answers(models, folder)
    assert [one.job.output_ids for one in heard] != right


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (1.4, 0.8, 0), (0.7, 1.0, 20)])
def test_what_is_sampled_is_what_the_engine_samples_for_the_same_seed(
    models: Models, temperature: float, top_p: float, top_k: int
) -> None:
    samplings = [Sampling(NEW, temperature, top_p, seed, top_k) for seed in (3, 4)] + [Sampling(NEW)]
    heard = [Heard(models, "base", PROMPTS[0], one) for one in samplings]
    beside = [Heard(models, "two", PROMPTS[2], Sampling(NEW, 1.0, seed=8))]
    models.batcher.submit([one.job for one in (*beside, *heard)])
    work(models, lambda: all(one.is_over for one in heard))
    models.batcher.drop([one.job for one in beside])
    models.batcher.advance()
    found = [list(one.job.output_ids) for one in heard]
    plain = TransformersEngine.of(tiny.build_model("llama").eval(), models.get("base").asking.tokenizer)
    plain._ends = frozenset()
    assert found == [list(next(plain.generate([PROMPTS[0]], one)).tokens) for one in samplings]
    assert found[0] != found[1]


def test_probabilities_are_the_models_own(models: Models, folder: Path) -> None:
    one = Heard(models, "two", PROMPTS[0], Sampling(3, 0.5, seed=1), top=2)
    answer(models, one)
    chosen = [each for event in one.events if isinstance(event, TextPiece) for each in event.logprobs]
    assert [each.token for each in chosen] == one.job.output_ids
    with torch.no_grad():
        logits = served.reference(folder, "two")(torch.tensor([[*PROMPTS[0], *one.job.output_ids]])).logits[0].double()
    for place, each in enumerate(chosen, start=len(PROMPTS[0]) - 1):
        right = logits[place].log_softmax(-1)
        assert each.logprob == pytest.approx(float(right[each.token]), abs=1e-4)
        assert [token for token, _ in each.top] == right.topk(2).indices.tolist()


def test_the_token_that_ends_an_answer_has_no_probability_in_it(models: Models) -> None:
    free = Heard(models, "two", PROMPTS[0], Sampling(8))
    answer(models, free)
    told = free.job.output_ids
    # The first token that is not one of those before it ends the answer.
    at = next(place for place in range(2, len(told)) if told[place] not in told[:place])
    one = Heard(models, "two", PROMPTS[0], Sampling(8), top=1)
    one.job.ends = frozenset({told[at]})
    answer(models, one)
    chosen = [each.token for event in one.events if isinstance(event, TextPiece) for each in event.logprobs]
    assert chosen == one.job.output_ids == told[:at]


def test_an_adapter_cannot_have_the_name_of_the_model_under_it(folder: Path) -> None:
    for options in ({"name": "base"}, {}):
        model = folder / "two"
        if not options:
            model = folder / "run" / "base"
            model.parent.mkdir(exist_ok=True)
            shutil.copytree(folder / "two", model)
        with pytest.raises(ConfigError, match="`base` is the name of the model under the adapter"):
            find(ServeSettings(str(model), dtype="fp32", **options))


def test_text_comes_piece_by_piece_and_ends_before_a_stop_string(models: Models) -> None:
    whole = Heard(models, "three", PROMPTS[3], Sampling(30))
    answer(models, whole)
    assert len(whole.events) > 3
    ended = whole.events[-1]
    assert isinstance(ended, AnswerFinished)
    assert (ended.reason, ended.tokens) == ("length", 30)
    stop = next(whole.text[at : at + 3] for at in range(4, 20) if "\ufffd" not in whole.text[at : at + 3])
    cut = Heard(models, "three", PROMPTS[3], Sampling(30, stop=(stop,)))
    answer(models, cut)
    ended = cut.events[-1]
    assert isinstance(ended, AnswerFinished)
    assert ended.reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_a_full_queue_refuses_all_or_nothing_and_a_row_that_is_dropped_makes_room(folder: Path) -> None:
    models = models_of(folder, slots=2, max_queue=1)
    heard = [Heard(models, "base", PROMPTS[0], Sampling(400)) for _ in range(3)]
    models.batcher.submit([one.job for one in heard[:2]])
    models.batcher.advance()
    with pytest.raises(ApiError) as caught:
        models.batcher.submit([Heard(models, "base", [5], Sampling(4)).job for _ in range(2)])
    assert (caught.value.status, caught.value.headers()) == (429, {"Retry-After": "1"})
    models.batcher.submit([heard[2].job])
    assert models.batcher.counts() == (2, 1)
    models.batcher.drop([heard[0].job])
    models.batcher.advance()
    assert models.batcher.counts() == (2, 0)
    assert heard[2].job.output_ids, "it has the place"
    assert len(heard[0].job.output_ids) == 1, "nothing more was computed for it"
    models.batcher.drop([one.job for one in heard])
    models.batcher.advance()
    assert models.batcher.counts() == (0, 0)


def weights_of(models: Models, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what an adapter adds in the first layer."""
    parts = models.get(name).adapter.parts  # type: ignore[union-attr]
    part = next(part for layer, part in parts.items() if layer.endswith("v_proj"))
    part.up.copy_(change(part.up))


@pytest.mark.parametrize(
    ("change", "temperature", "top"),
    [
        (lambda up: up * math.nan, 0.0, None),
        (lambda up: up * math.nan, 1.0, 3),
        (lambda up: up * math.inf, 0.001, None),
        # Finite, but not what comes of it.
        (lambda up: torch.full_like(up, 3e38), 0.0, 3),
        (lambda up: torch.full_like(up, 3e38), 1.0, None),
    ],
)
def test_a_row_without_finite_logits_fails_alone(
    folder: Path, change: Any, temperature: float, top: int | None
) -> None:
    """And leaves nothing behind in its slot, which another row gets."""
    models = models_of(folder, "one", "two", slots=3)
    weights_of(models, "two", change)
    beside = Heard(models, "one", PROMPTS[0], Sampling(NEW))
    sampled = Heard(models, "base", PROMPTS[2], Sampling(NEW, 1.0, seed=3))
    models.batcher.submit([beside.job, sampled.job])
    models.batcher.advance()
    bad = [Heard(models, "two", prompt, Sampling(NEW, temperature, seed=1), top=top) for prompt in PROMPTS]
    after = Heard(models, "one", PROMPTS[1], Sampling(NEW))
    answer(models, *bad, after, beside=(beside, sampled))
    for one in bad:
        failed = one.events[-1]
        assert isinstance(failed, AnswerFailed)
        assert failed.status == 422
        assert "the model's logits are not finite (NaN or infinite)" in failed.message
        assert one.text == ""
    reference = served.reference(folder, "one")
    for one, prompt in ((beside, PROMPTS[0]), (after, PROMPTS[1])):
        assert one.job.output_ids == served.greedy(reference, prompt, NEW)
    assert len(sampled.job.output_ids) == NEW
    assert models.batcher.counts() == (0, 0)


def test_what_a_row_leaves_in_its_slot_would_reach_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: masked values count if they are not finite."""
    monkeypatch.setattr(Slots, "clear", lambda self, slot, length: None)
    models = models_of(folder, "two", slots=2)
    weights_of(models, "two", lambda up: up * math.nan)
    beside = Heard(models, "base", PROMPTS[0], Sampling(20))
    bad, after = Heard(models, "two", PROMPTS[2], Sampling(NEW)), Heard(models, "base", PROMPTS[1], Sampling(NEW))
    answer(models, beside, bad, after)
    assert isinstance(after.events[-1], AnswerFailed)


@pytest.mark.parametrize("error", [RuntimeError("in /secret/place"), MemoryError()])
def test_a_row_with_which_steps_fail_is_found_and_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    models, step = models_of(folder, "one", slots=5), TransformersEngine.step

    def failing(self: Any, slots: Any, working: Any, coming: Any, known: int = 0) -> Any:
        if any(job.prompt == PROMPTS[2] for job in (*working, *coming)):
            raise error
        return step(self, slots, working, coming, known)

    monkeypatch.setattr(TransformersEngine, "step", failing)
    running = Heard(models, "one", PROMPTS[0], Sampling(NEW))
    models.batcher.submit([running.job])
    models.batcher.advance()
    heard = [Heard(models, "base", prompt, Sampling(NEW)) for prompt in PROMPTS[1:]]
    answer(models, *heard, beside=[running])
    assert running.job.output_ids == served.greedy(served.reference(folder, "one"), PROMPTS[0], NEW)
    base = served.reference(folder, "base")
    for one, prompt in zip(heard, PROMPTS[1:], strict=True):
        if prompt != PROMPTS[2]:
            assert one.job.output_ids == served.greedy(base, prompt, NEW)
    failed = heard[1].events[-1]
    assert isinstance(failed, AnswerFailed)
    assert failed.status == (413 if isinstance(error, MemoryError) else 500)
    if not isinstance(error, MemoryError):
        assert (failed.message, "in /secret/place" in caplog.text) == ("the server failed; see its log", True)
    assert models.batcher.counts() == (0, 0)


def test_rows_that_are_tried_again_leave_clean_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, step, failures = models_of(folder, "two", slots=4), TransformersEngine.step, iter([RuntimeError()])
    weights_of(models, "two", lambda up: up * math.nan)

    def failing(self: Any, slots: Any, working: Any, coming: Any, known: int = 0) -> Any:
        logits = step(self, slots, working, coming, known)
        if len(coming) > 1 and (error := next(failures, None)) is not None:
            raise error
        return logits

    monkeypatch.setattr(TransformersEngine, "step", failing)
    running = Heard(models, "base", PROMPTS[0], Sampling(20))
    models.batcher.submit([running.job])
    models.batcher.advance()
    # When the second one is tried again, the first has left its slot to it.
    models.batcher.submit([Heard(models, name, PROMPTS[2], Sampling(1)).job for name in ("base", "two")])
    models.batcher.advance()
    after = [Heard(models, "base", prompt, Sampling(NEW)) for prompt in (PROMPTS[4], PROMPTS[1])]
    answer(models, *after, beside=[running])
    assert next(failures, None) is None
    assert [len(one.job.output_ids) for one in after] == [NEW, NEW]


def test_where_memory_runs_out_while_rows_grow_the_longest_one_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, reserve = models_of(folder, slots=3), Slots.reserve

    def limited(self: Slots, length: int) -> None:
        if length > 70:
            raise MemoryError
        reserve(self, length)

    monkeypatch.setattr(Slots, "reserve", limited)
    heard = [Heard(models, "base", prompt, Sampling(new)) for prompt, new in zip(PROMPTS, (30, 30, 90), strict=False)]
    answer(models, *heard)
    assert [type(one.events[-1]) for one in heard] == [AnswerFinished, AnswerFinished, AnswerFailed]
    failed = heard[2].events[-1]
    assert isinstance(failed, AnswerFailed)
    assert (failed.status, "has no room for prompt and answer of up to 111 tokens" in failed.message) == (413, True)


def test_a_row_whose_client_cannot_be_told_fails_alone(models: Models) -> None:
    heard = [Heard(models, "base", prompt, Sampling(NEW)) for prompt in PROMPTS[:2]]

    class Odd:
        def decode(self, *_: Any, **__: Any) -> str:
            raise KeyError("no such token")

    heard[0].job.stream._tokenizer = Odd()
    answer(models, *heard)
    assert [type(one.events[-1]) for one in heard] == [AnswerFailed, AnswerFinished]


def test_a_queue_that_is_closed_leaves_nobody_waiting() -> None:
    """Neither who called before nor who calls after, nor a job of a batch whose thread has died."""
    queue = Queue(slots=1, max_queue=1)
    before = queue.call(lambda: 1)
    queue.close()
    for future in (before, queue.call(lambda: 2)):
        with pytest.raises(ApiError) as caught:
            future.result(timeout=5)
        assert caught.value.status == 503
    dying, events = Queue(slots=1, max_queue=1), list[Event]()
    job: Any = SimpleNamespace(is_done=False, on_event=events.append)
    dying.submit([job])
    # It cannot work.
    with pytest.raises(NotImplementedError):
        dying.run()
    assert events == [AnswerFailed("the server has stopped")]
    with pytest.raises(ApiError) as caught:
        dying.submit([job])
    assert caught.value.status == 503


@pytest.mark.long
def test_a_model_whose_rows_share_no_step_is_answered_too(tmp_path: Path, tokenizer: Any) -> None:
    tiny.save_model("bloom", tmp_path / "base", tokenizer)
    save = {"target_modules": ["query_key_value"]}
    served.save_adapter(tmp_path / "base", tmp_path / "one", tokenizer, **save)
    models = models_of(tmp_path, "one")
    assert not models.engine.has_slots
    for name in ("base", "one"):
        heard = Heard(models, name, PROMPTS[0], Sampling(5))
        answer(models, heard)
        assert heard.job.output_ids == served.greedy(served.reference(tmp_path, name), PROMPTS[0], 5)
        assert heard.text == tokenizer.decode(heard.job.output_ids, skip_special_tokens=True)
    dropped = Heard(models, "base", PROMPTS[0], Sampling(50))
    dropped.job.on_event = lambda event: models.batcher.drop([dropped.job])
    models.batcher.submit([dropped.job])
    models.batcher.advance()
    assert len(dropped.job.output_ids) < 50
    assert models.batcher.counts() == (0, 0)


# --- adapters that come and go ---------------------------------------------------------------------------------------


def test_an_adapter_is_added_and_removed_while_rows_are_at_work(folder: Path) -> None:
    models = models_of(folder, "one", slots=4, adapters_from=(str(folder),))
    models.batcher.call = lambda function: _done(function())  # type: ignore[method-assign, assignment]
    before = Heard(models, "one", PROMPTS[0], Sampling(NEW))
    models.batcher.submit([before.job])
    models.batcher.advance()
    models.add("late", str(folder / "two"), Attempt())
    after = Heard(models, "late", PROMPTS[0], Sampling(NEW))
    models.batcher.submit([after.job])
    models.batcher.advance()
    models.remove("one")
    assert models.names() == ["base", "late"]
    with pytest.raises(ApiError, match="`one` does not exist; there are: base, late"):
        models.get("one")
    work(models, lambda: before.is_over and after.is_over)
    for name, heard in (("one", before), ("two", after)):
        assert heard.job.output_ids == served.greedy(served.reference(folder, name), PROMPTS[0], NEW), name


def _done(value: Any) -> Any:
    future: Any = batching.Future()
    future.set_result(value)
    return future


def test_what_is_more_than_lora_is_served_alone_and_merged(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    dora = served.save_adapter(folder / "base", tmp_path / "dora", tokenizer, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ModelError, match="more than LoRA"):
        read_plain_lora(dora, ModelConfig(name=str(folder / "base")))
    lines: list[str] = []
    settings = ServeSettings(str(dora), dtype="fp32", adapters_from=(str(folder),))
    models = Models(settings, find(settings), lines.append)
    assert models.names() == ["dora"]
    assert ["merged" in line for line in lines] == [True]
    heard = Heard(models, "dora", PROMPTS[0], Sampling(NEW))
    answer(models, heard)
    reference = served.reference(folder, "base")
    right = served.PeftModel.from_pretrained(reference, str(dora)).eval()
    assert heard.job.output_ids == served.greedy(right, PROMPTS[0], NEW)
    with pytest.raises(ApiError, match="merged"):
        models.require_room_for("one")


def test_a_row_whose_positions_turn_is_read_anew_with_its_own_adapter(tmp_path: Path, tokenizer: Any) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.5 + 2.0 * step for step in range(8)]}
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    tiny.save_model("phi3", tmp_path / "base", tokenizer, **settings)
    for seed, name in enumerate(("one", "two")):
        served.save_adapter(tmp_path / "base", tmp_path / name, tokenizer, seed=seed, target_modules=["qkv_proj"])
    models = models_of(tmp_path, "one", "two")
    assert models.engine.has_slots
    asked = [(name, [5 + step * 7 for step in range(length)]) for length in (12, 14, 30) for name in ("one", "two")]
    heard = [Heard(models, name, prompt, Sampling(NEW)) for name, prompt in asked]
    for one in heard:
        models.batcher.submit([one.job])
        models.batcher.advance()
    work(models, lambda: all(one.is_over for one in heard))
    for (name, prompt), one in zip(asked, heard, strict=True):
        assert one.job.output_ids == served.greedy(served.reference(tmp_path, name), prompt, NEW)
