"""`finray convert`: learning from preferences in LLaMA-Factory and Axolotl, with rows as their data sets have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finray.config.load import load_config
from finray.config.preference import TAKEN
from finray.data.formats.convert import FormatChoice, converter_of
from finray.errors import ConfigError
from tests.unit.config.test_convert import converted

FACTORY = {"model_name_or_path": "org/model", "dataset": "mine"}
AXOLOTL = {"base_model": "org/model", "datasets": [{"path": "org/rows", "type": "chat_template.default"}]}


def needs(objective: str) -> Any:
    return pytest.mark.skipif(objective not in TAKEN, reason=f"there is no {objective} yet")


@pytest.mark.parametrize(
    ("theirs", "objective", "preference", "lost"),
    [
        (FACTORY | {"stage": "dpo"}, "dpo", {"beta": 0.1}, set()),
        (
            FACTORY | {"stage": "dpo", "pref_beta": "3e-1", "pref_ftx": 0.7, "dpo_label_smoothing": 0.2},
            "dpo",
            {"beta": 0.3, "chosen_weight": 0.7, "label_smoothing": 0.2},
            set(),
        ),
        (FACTORY | {"stage": "dpo", "pref_loss": "ipo"}, "dpo", {"beta": 0.1, "loss": "ipo"}, set()),
        (FACTORY | {"stage": "dpo", "pref_loss": "hinge"}, "dpo", {"beta": 0.1, "loss": "hinge"}, set()),
        (FACTORY | {"stage": "dpo", "ref_model": "org/other"}, "dpo", {"beta": 0.1, "reference": "org/other"}, set()),
        # The adapter is switched off for the reference there.
        (
            FACTORY | {"stage": "dpo", "adapter_name_or_path": "saves/sft"},
            "dpo",
            {"beta": 0.1, "reference": "base"},
            set(),
        ),
        # finray's ORPO has no weight of the chosen answer's loss, and no gamma.
        (
            FACTORY | {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.3, "pref_ftx": 0.5, "simpo_gamma": 0.4},
            "orpo",
            {"beta": 0.3},
            {"pref_ftx", "simpo_gamma"},
        ),
        # What they assume is not what finray assumes.
        (FACTORY | {"stage": "dpo", "pref_loss": "simpo"}, "simpo", {"beta": 0.1, "gamma": 0.5}, set()),
        pytest.param(
            FACTORY | {"stage": "kto", "kto_chosen_weight": 1.5, "kto_rejected_weight": 0.5},
            "kto",
            {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5},
            set(),
            marks=needs("kto"),
        ),
        pytest.param(FACTORY | {"stage": "rm"}, "reward", {}, set(), marks=needs("reward")),
        # Negative control: a number that a supervised run does not use.
        (FACTORY | {"stage": "sft", "pref_beta": 0.3}, None, {}, {"pref_beta"}),
        (AXOLOTL | {"rl": "dpo", "rl_beta": 0.3, "rpo_alpha": 0.5}, "dpo", {"beta": 0.3, "chosen_weight": 0.5}, set()),
        (
            AXOLOTL | {"rl": "ipo", "dpo_use_weighting": True, "dpo_label_smoothing": 0.2},
            "dpo",
            {"beta": 0.1, "loss": "ipo"},
            {"dpo_use_weighting", "dpo_label_smoothing"},
        ),
        (
            AXOLOTL | {"rl": "dpo", "dpo_loss_type": ["robust"], "dpo_label_smoothing": 0.2},
            "dpo",
            {"beta": 0.1, "loss": "robust", "label_smoothing": 0.2},
            set(),
        ),
        # Without the share of swapped pairs it is plain DPO.
        (AXOLOTL | {"rl": "dpo", "dpo_loss_type": ["robust"]}, "dpo", {"beta": 0.1}, set()),
        (
            AXOLOTL | {"rl": "dpo", "dpo_loss_type": ["sigmoid_norm", "sft"], "dpo_loss_weights": [1.0, 0.2]},
            "dpo",
            {"beta": 0.1, "length_normalized": True, "chosen_weight": 0.2},
            set(),
        ),
        (AXOLOTL | {"rl": "orpo", "orpo_alpha": 0.2, "max_prompt_len": 512}, "orpo", {"beta": 0.2}, {"max_prompt_len"}),
        (
            AXOLOTL | {"rl": "simpo", "rl_beta": 2, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
            "simpo",
            {"beta": 2, "gamma": 0.8, "chosen_weight": 0.0},
            set(),
        ),
        (AXOLOTL | {"rl": "simpo"}, "simpo", {"beta": 0.1, "gamma": 0.5, "chosen_weight": 1.0}, set()),
        pytest.param(
            AXOLOTL | {"rl": "kto", "kto_desirable_weight": 0.2},
            "kto",
            {"beta": 0.1, "desirable_weight": 0.2},
            set(),
            marks=needs("kto"),
        ),
        pytest.param(
            AXOLOTL | {"reward_model": True, "center_rewards_coefficient": 0.01, "num_labels": 1},
            "reward",
            {"centering": 0.01},
            set(),
            marks=needs("reward"),
        ),
    ],
)
def test_objectives_and_their_numbers(
    theirs: dict[str, Any], objective: str | None, preference: dict[str, Any], lost: set[str], tmp_path: Path
) -> None:
    found = converted(yaml.safe_dump(theirs), tmp_path)
    config = load_config(found.plain)
    assert (config.train.objective, found.plain.get("preference", {})) == (objective, preference)
    assert {one.key.partition(":")[0] for one in found.lost if "eval" not in one.key} == lost


@pytest.mark.parametrize(
    "theirs",
    [
        FACTORY | {"stage": "ppo"},
        FACTORY | {"stage": "dpo", "pref_loss": "kto_pair"},
        AXOLOTL | {"rl": "grpo"},
        AXOLOTL | {"rl": "dpo", "dpo_loss_type": ["sigmoid", "hinge"]},
        AXOLOTL | {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [0.5, 1.0]},
        AXOLOTL | {"process_reward_model": True},
    ],
)
def test_what_finray_has_no_loss_for_is_refused(theirs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not supported"):
        converted(yaml.safe_dump(theirs), tmp_path)


SAID = {"from": "human", "value": "Q"}, {"role": "user", "content": "Q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}


@pytest.mark.parametrize(
    ("about", "row"),
    [
        ({}, {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"}),
        (
            {"columns": {"prompt": "ask", "query": "with", "chosen": "up", "rejected": "down"}},
            {"ask": "Q", "with": "", "up": "good", "down": "bad"},
        ),
        (
            {"formatting": "sharegpt", "columns": {"messages": "talk", "chosen": "up", "rejected": "down"}},
            {"talk": [SAID[0]], "up": {"from": "gpt", "value": "good"}, "down": {"from": "gpt", "value": "bad"}},
        ),
        ({"type": "chat_template.default"}, {"messages": [SAID[1]], "chosen": GOOD, "rejected": BAD}),
        (
            {"type": "chat_template.default", "field_messages": "talk", "field_chosen": "up", "field_rejected": "down"},
            {"talk": [SAID[1]], "up": GOOD, "down": BAD},
        ),
        ({"type": "chat_template.argilla_chat"}, {"chosen": [SAID[1], GOOD], "rejected": [SAID[1], BAD]}),
        ({"type": "chatml.intel"}, {"question": "Q", "chosen": "good", "rejected": "bad"}),
        ({"type": "chatml.argilla"}, {"instruction": "Q", "chosen_response": "good", "rejected_response": "bad"}),
        (
            {"type": {"field_prompt": "ask", "field_chosen": "up", "field_rejected": "down"}},
            {"ask": "Q", "up": "good", "down": "bad"},
        ),
    ],
)
def test_rows_of_their_data_sets_are_the_same_pair(about: dict[str, Any], row: dict[str, Any], tmp_path: Path) -> None:
    if "type" in about:
        theirs: dict[str, Any] = AXOLOTL | {"rl": "dpo", "datasets": [{"path": "org/rows", **about}]}
    else:
        theirs = FACTORY | {"stage": "dpo"}
        table = {"mine": {"file_name": "rows.json", "ranking": True, **about}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(table))
    found = converted(yaml.safe_dump(theirs), tmp_path, dataset_info=tmp_path / "dataset_info.json")
    assert not [note for note in found.notes if "dataset_info" in note or "unknown" in note]
    choice = FormatChoice.of(load_config(found.plain).data, preferences="preference")
    (pair,) = converter_of(choice.decide(row), has_chat_template=True)(row)
    for side, answer in ((pair.chosen, "good"), (pair.rejected, "bad")):  # type: ignore[union-attr]
        assert [(one.role, one.content) for one in side.messages] == [("user", "Q"), ("assistant", answer)]


@needs("kto")
def test_rows_with_labels_are_answers_that_are_wanted_or_not(tmp_path: Path) -> None:
    columns = {"messages": "talk", "kto_tag": "fine"}
    table = {"mine": {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(table))
    theirs = yaml.safe_dump(FACTORY | {"stage": "kto"})
    found = converted(theirs, tmp_path, dataset_info=tmp_path / "dataset_info.json")
    choice = FormatChoice.of(load_config(found.plain).data, preferences="unpaired")
    for wanted in (True, False):
        row = {"talk": [SAID[0], {"from": "gpt", "value": "A"}], "fine": wanted}
        (answer,) = converter_of(choice.decide(row), has_chat_template=True)(row)
        assert answer.is_wanted is wanted  # type: ignore[union-attr]
