"""How large a step is and how many epochs there are, where the config does not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finray.config.identity import with_decisions
from finray.config.load import build_config
from finray.config.resolved import Resolved, Steps
from finray.config.schema import Config, TrainConfig
from finray.data.dataset.run_data import decide_steps, pack_length_of
from finray.data.sampling.order import total_steps
from finray.planning.steps import choose_learning_rate, chosen_notes, step_note, step_warnings

MICRO = (TrainConfig(), TrainConfig(micro_batch_size=2))
BEGAN = Resolved("fp32", None, None, True, "ddp", False, global_batch_size=3, epochs=2.0, pack_length=90)


def config(**sections: Any) -> Config:
    return build_config({"model": {"name": "m"}, "data": {"source": "d"}, **sections}, source="test")


@pytest.mark.parametrize(
    ("packs", "size", "epochs", "steps"),
    [
        (1, 1, 3, 3),
        (5, 1, 3, 15),  # about 100 short rows
        (50, 1, 2, 100),  # about 1,000
        (100, 3, 3, 100),
        (255, 7, 3, 110),
        (256, 8, 3, 96),
        (800, 8, 1, 100),
        (5000, 8, 1, 625),  # about 100,000
    ],
)
def test_little_data_makes_small_steps_and_more_epochs(packs: int, size: int, epochs: float, steps: int) -> None:
    found = decide_steps(TrainConfig(), packs=packs)
    assert found == Steps(size, epochs)
    assert total_steps(packs, found, max_steps=None)[0] == steps


def test_what_the_config_says_or_the_run_began_with_stays() -> None:
    assert decide_steps(TrainConfig(global_batch_size=8, epochs=1), packs=5) == Steps(8, 1.0)
    assert decide_steps(TrainConfig(global_batch_size=2), packs=10) == Steps(2, 3.0)
    # The epochs of the run that this one may be extended to.
    assert decide_steps(TrainConfig(max_steps=7), packs=5) == Steps(1, 3.0)
    assert step_note(TrainConfig(max_steps=7, global_batch_size=8), Steps(8, 3.0)) is None
    assert step_note(TrainConfig(max_steps=7), Steps(8, 3.0)) is None
    assert "epochs" not in str(step_note(TrainConfig(max_steps=7), Steps(1, 3.0)))
    assert decide_steps(TrainConfig(), packs=5000, pack_length=80, before=BEGAN) == Steps(3, 2.0, 90)
    assert decide_steps(TrainConfig(epochs=4), packs=5, before=BEGAN) == Steps(3, 4.0, 90)
    # Another number of packs in a pass would draw other dropout masks.
    many = replace(BEGAN, micro_batch_size=4)
    assert [decide_steps(train, packs=9, before=many).micro_batch_size for train in MICRO] == [4, 2]
    # Runs that began before these were kept.
    older = Resolved("fp32", None, None, True, "ddp", False)
    assert decide_steps(TrainConfig(), packs=5, before=older) == Steps(8, 1.0)
    assert decide_steps(TrainConfig(), packs=None) == Steps(8, 1.0)


def test_packs_of_little_data_are_shorter_so_that_a_run_has_tens_of_steps() -> None:
    short, long = np.full(100, 20), np.full(16, 1024)
    assert pack_length_of(config(), short) == 125
    assert decide_steps(TrainConfig(), packs=17, pack_length=125) == Steps(1, 3.0, 125)
    # No shorter than the longest row, and as ever where there is enough, or where the config says how large a step is.
    assert pack_length_of(config(), np.array([*short, 700])) == 700
    assert pack_length_of(config(), long) is None
    assert pack_length_of(config(train={"global_batch_size": 1}), short) is None
    assert pack_length_of(config(data={"source": "d", "packing": False}), short) is None
    assert "with packs of 1,250 tokens," in str(step_note(TrainConfig(), Steps(1, 3.0, 1250)))


def test_odd_steps_are_warned_of_with_a_repair() -> None:
    def said(size: int, packs: int | None, steps: int = 2, continued: bool = False, **sections: Any) -> str:
        asked = config(**sections)
        taken = replace(decide_steps(asked.train, packs=None), global_batch_size=size)
        found = step_warnings(asked, taken, total=steps, packs=packs, continued=continued)
        return "; ".join(" | ".join(map(str, one)) for one in found)

    assert said(8, 8) == said(8, None) == ""
    assert "a single step | train.global_batch_size | train.global_batch_size=1, or auto" in said(8, 5, 1)
    assert "5: it sees some of them again" in said(8, 5, 20)
    assert "train.global_batch_size=3, or auto" in said(128, 100)
    alone = said(1, 5, cluster={"num_workers": 4}, train={"micro_batch_size": 2})
    assert "1 micro-batch for 4 workers" in alone
    assert alone.endswith("train.global_batch_size=8 or more, or cluster.num_workers=1")
    # A run that is continued with steps of another size is refused.
    alone = said(1, 5, continued=True, cluster={"num_workers": 4})
    assert alone.endswith("cluster.num_workers=1, or train.global_batch_size=4 or more in a run of another run.name")
    assert said(8, 5, continued=True).endswith("or auto in a run of another run.name")


def test_what_finray_chose_is_said_and_nothing_else() -> None:
    note = step_note(TrainConfig(), Steps(1, 3.0))
    assert note is not None
    assert "train.global_batch_size=1 and train.epochs=3" in note
    assert "epochs" not in str(step_note(TrainConfig(epochs=2), Steps(1, 2.0)))
    assert step_note(TrainConfig(), Steps(8, 1.0)) is None
    assert step_note(TrainConfig(global_batch_size=2, epochs=2), Steps(2, 2.0)) is None


@pytest.mark.parametrize(
    ("width", "sections", "expected"),
    [
        # "LoRA Without Regret": ten times the rate of all weights, and more for narrow models.
        (2000, {}, 5e-4),
        (4096, {}, 2.9e-4),
        (4096, {"adapter": {"method": "none"}}, 2.9e-5),
        (576, {}, 1.3e-3),
        (384, {"model": {"name": "m", "task": "sequence_classification"}}, 7.2e-4),
        (None, {}, 5e-4),
        # What an update adds is proportional to alpha.
        (2000, {"adapter": {"alpha": 64.0}}, 2.5e-4),
        (2000, {"adapter": {"alpha": 8.0}}, 5e-4),
        # Nothing was fitted for these.
        (576, {"adapter": {"method": "pissa"}}, 2e-4),
        (576, {"train": {"optimizer": "adafactor"}}, 2e-4),
        # The user's own.
        (576, {"train": {"learning_rate": 3e-6}}, 3e-6),
    ],
)
def test_the_learning_rate_follows_from_method_width_and_task(
    width: int | None, sections: dict[str, Any], expected: float
) -> None:
    assert choose_learning_rate(config(**sections), hidden_size=width) == pytest.approx(expected)


def test_a_continued_run_keeps_its_learning_rate_and_one_from_before_there_was_a_choice_had_the_default() -> None:
    assert choose_learning_rate(config(), hidden_size=576, before=replace(BEGAN, learning_rate=7e-4)) == 7e-4
    assert choose_learning_rate(config(), hidden_size=576, before=BEGAN) == 2e-4
    assert with_decisions(config(), BEGAN)["train"]["learning_rate"] == 2e-4
    kept = config(train={"learning_rate": 1e-3})
    assert with_decisions(kept, BEGAN)["train"]["learning_rate"] == 1e-3


def test_the_learning_rate_that_finray_chose_is_said() -> None:
    (said,) = chosen_notes(TrainConfig(), Steps(), 1.3e-3)
    assert "train.learning_rate=0.0013" in said
    assert list(chosen_notes(TrainConfig(learning_rate=1e-3), Steps(), 1e-3)) == []
