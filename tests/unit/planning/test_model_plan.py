"""The model part of a plan: special tokens, vocabulary, context, and models that the Hub does not give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finray.config.load import build_config
from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.planning.blueprint import Blueprint, build_blueprint
from finray.planning.findings import Findings
from finray.planning.model import check_context, check_tokens, explained


def checked(tokenizer: Any, rows: int, stop: set[int]) -> Findings:
    found = Findings()
    check_tokens(tokenizer, rows, stop, found)
    return found


def test_a_tokenizer_that_fits(tokenizer: Any) -> None:
    found = checked(tokenizer, 384, {tokenizer.eos_token_id})
    assert found.problems == found.warnings == ()


def test_more_tokens_than_embeddings(tokenizer: Any) -> None:
    (problem,) = checked(tokenizer, 100, set()).problems
    assert "have no embedding: the model has 100 rows" in problem.message


def test_only_special_tokens_without_an_embedding_are_a_warning(tokenizer: Any) -> None:
    import copy

    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<image>"], special_tokens=True)
    found = checked(larger, len(tokenizer), {larger.eos_token_id})
    assert found.problems == ()
    assert "<image>" in found.warnings[0].message
    larger.eos_token = "<image>"
    assert checked(larger, len(tokenizer), set()).problems


def test_an_end_that_the_model_does_not_name(tokenizer: Any) -> None:
    assert "<|im_end|>" in checked(tokenizer, 384, {0}).warnings[0].message


def test_no_end_at_all(tokenizer: Any) -> None:
    import copy

    without = copy.deepcopy(tokenizer)
    without.eos_token = None
    assert "no end-of-sequence token" in checked(without, 384, set()).warnings[0].message


@pytest.fixture(scope="module")
def blueprint(tiny_model_dir: Path) -> Blueprint:
    return build_blueprint(ModelConfig(name=str(tiny_model_dir)), AdapterConfig(rank=2))


@pytest.mark.parametrize(
    ("max_length", "longest", "learned", "kind"),
    [
        (512, None, False, ""),
        (1024, 400, False, ""),
        (1024, 600, False, "warning"),
        (1024, None, False, "warning"),
        (1024, 600, True, "problem"),
        # Not all rows are known: it may go well.
        (1024, None, True, "warning"),
    ],
)
def test_context(blueprint: Blueprint, max_length: int, longest: int | None, learned: bool, kind: str) -> None:
    found = Findings()
    shape = replace(blueprint, learned_positions=learned)
    check_context(shape, max_length=max_length, longest=longest, found=found)
    assert bool(found.problems) == (kind == "problem")
    assert bool(found.warnings) == (kind == "warning")
    for one in (*found.problems, *found.warnings):
        assert one.repair == "data.max_length=512"


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("You are trying to access a gated repo", {}, "HF_TOKEN is not set"),
        ("401 Client Error", {"HF_TOKEN": "x"}, "HF_TOKEN gives no access to it"),
        ("We couldn't connect to the Hub to load the files", {}, "cannot be reached"),
        ("unrecognised model", {}, "unrecognised model"),
    ],
)
def test_models_that_the_hub_does_not_give(text: str, environ: dict[str, str], message: str) -> None:
    config = build_config({"model": {"name": "someone/model"}, "data": {"source": "rows.jsonl"}}, source="test")
    assert message in str(explained(ModelError(text), config, environ))
