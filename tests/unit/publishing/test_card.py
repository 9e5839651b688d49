"""What a model card does not say: where things are on the machine that trained the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from finray.config.load import build_config
from finray.evaluation.overlap import Overlap
from finray.publishing import card


def test_other_models_have_the_names_of_their_directories() -> None:
    score = {"exact_match": {"value": 0.5, "low": 0.4, "high": 0.6}}
    other = "/home/me/secret/runs/first-try"
    says = [f"tuned is better than {other} on exact match", "tuned is better than org/model on exact match"]
    scores = {"rows": 3, "models": {other: score, "org/model": score, "tuned": score}, "says": says}
    text = card._scores(SimpleNamespace(scores=scores))  # type: ignore[arg-type]
    assert "secret" not in text
    assert "|  | first-try | org/model | tuned |" in text
    assert "tuned is better than first-try on exact match" in text
    assert "tuned is better than org/model on exact match" in text


@pytest.mark.parametrize(("equal", "shared", "says"), [(30, 1170, "1,200 of these rows"), (0, 2, "2 of these rows")])
def test_all_rows_that_are_in_the_training_data_are_counted_not_only_those_that_are_named(
    equal: int, shared: int, says: str
) -> None:
    found = Overlap(tuple(range(equal)), tuple(range(equal, equal + shared)), (("a.jsonl:1", "b.jsonl:1", 1.0),) * 2)
    scores = {"rows": 2000, "models": {"tuned": {}}, "in_training_data": found.plain()}
    assert f"\n{says} are in the training data" in card._scores(SimpleNamespace(scores=scores))  # type: ignore[arg-type]
    for none in (None, Overlap((), (), ()).plain()):
        text = card._scores(SimpleNamespace(scores={**scores, "in_training_data": none}))  # type: ignore[arg-type]
        assert "training data" not in text


@pytest.mark.parametrize("field", ["tracking.mlflow_uri", "run.output_dir", "prepare.dir", "cluster.address"])
def test_no_address_is_in_the_config(field: str) -> None:
    section, name = field.split(".")
    raw: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}, section: {name: "s3://10.0.0.5/x"}}
    text = card._again(SimpleNamespace(config=build_config(raw, source="test"), version="1"))  # type: ignore[arg-type]
    assert "finray train" in text
    assert "10.0.0.5" not in text
    assert name not in text


def test_the_config_keeps_its_texts_and_shortens_its_paths() -> None:
    system = "Answer briefly. See https://example.com/docs for style rules"
    raw: dict[str, Any] = {
        "model": {
            "name": "/home/me/secret/My Models/base",
            "chat_template": "{%if a%}https://example.com/{{a}}{%endif%}",
            "chat_template_arguments": {"style": "/think/hard"},
            "new_tokens": ["/think", "~/x"],
        },
        "adapter": {"start_from": "~/secret/adapter"},
        "data": {
            "source": "/home/me/secret/My Data/a.jsonl",
            "mix": [{"source": "s3://secret/data/b.jsonl", "weight": 1, "system": "/no_think/now"}],
            "eval_source": "file:///home/me/secret/c.jsonl",
            "system": system,
            "input_template": "/ask/ {question}",
            "output_template": "https://example.com/{answer}",
            "field_mapping": {"prompt": "/a/b"},
        },
        "evaluation": {"scoring": {"encoder": "/home/me/secret/encoder", "choices": ["/yes/no"]}},
        "parallel": {"deepspeed_config": {"zero_optimization": {"offload_param": {"nvme_path": "/secret/nvme"}}}},
        "run": {"local_dir": "/home/me/secret copies/runs"},
    }
    facts = SimpleNamespace(config=SimpleNamespace(model_dump=lambda **_: raw), version="1")
    text = card._again(facts)  # type: ignore[arg-type]
    assert "secret" not in text
    found = yaml.safe_load(text.split("```yaml\n")[1].removesuffix("```"))
    data = raw["data"]
    assert found["data"] == {
        **data,
        **{"source": "a.jsonl", "mix": [{**data["mix"][0], "source": "b.jsonl"}], "eval_source": "c.jsonl"},
    }
    assert found["model"] == {**raw["model"], "name": "base"}
    assert found["adapter"] == {"start_from": "adapter"}
    assert found["evaluation"] == {"scoring": {"encoder": "encoder", "choices": ["/yes/no"]}}
    assert found["parallel"]["deepspeed_config"]["zero_optimization"]["offload_param"] == {"nvme_path": "nvme"}
    assert found["run"] == {"local_dir": "runs"}
