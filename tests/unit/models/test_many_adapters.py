"""Adapters beside each other on one base: each row gets what PEFT gives it; what is more than LoRA is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import KasaConfig

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.models.many_adapters import LoraPart, ManyAdapters, PlainLora, read_plain_lora
from tests.support import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("base")
    tiny.build_model("llama", tie_word_embeddings=False).save_pretrained(str(folder))
    return ModelConfig(name=str(folder))


def saved(base: ModelConfig, folder: Path, **options: Any) -> Any:
    """An adapter by PEFT with random values, and the model with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base.name)
    chosen = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **options}
    made = get_peft_model(model, LoraConfig(**chosen))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_(std=0.1)
    made.save_pretrained(str(folder), save_embedding_layers=False)
    return made.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "odd"),
    [
        ({"use_dora": True}, "magnitude"),
        ({"kasa_config": KasaConfig()}, "lora_diag"),
        ({"alora_invocation_tokens": [5, 6]}, "down_proj"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["lm_head", "q_proj"]}, "lm_head"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
    ],
)
def test_what_is_more_than_lora_on_linear_layers_is_refused_with_its_name(
    base: ModelConfig, tmp_path: Path, options: dict[str, Any], odd: str
) -> None:
    saved(base, tmp_path, **options)
    with pytest.raises(ModelError, match="more than LoRA on linear layers") as caught:
        read_plain_lora(tmp_path, base)
    assert odd in caught.value.message
    assert caught.value.where == str(tmp_path)


def test_an_adapter_of_other_sizes_is_refused_with_both(base: ModelConfig, tmp_path: Path) -> None:
    saved(base, tmp_path / "adapter", target_modules=["k_proj"])
    other = tiny.build_model("llama", hidden_size=96, num_attention_heads=4, num_key_value_heads=2)
    other.save_pretrained(str(tmp_path / "other"))
    with pytest.raises(ModelError, match="does not fit the model") as caught:
        read_plain_lora(tmp_path / "adapter", ModelConfig(name=str(tmp_path / "other")))
    # Two heads of 16 for keys, from 96 and from 64 numbers.
    assert "k_proj is 32 x 96 there, and 32 x 64 here" in caught.value.message


@pytest.mark.filterwarnings("ignore")
def test_each_piece_of_a_pass_has_the_answers_of_its_own_adapter(base: ModelConfig, tmp_path: Path) -> None:
    """Linear layers read tokens one by one: pieces laid end to end are compared with each alone."""
    from transformers import AutoModelForCausalLM

    one = saved(base, tmp_path / "one", lora_alpha=3)
    other = saved(base, tmp_path / "other", r=2, use_rslora=True, target_modules=["v_proj", "down_proj"])
    model = AutoModelForCausalLM.from_pretrained(base.name).eval()
    many = ManyAdapters(model)
    first, second = (many.placed(read_plain_lora(tmp_path / name, base)) for name in ("one", "other"))
    plain = AutoModelForCausalLM.from_pretrained(base.name).eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    draw = torch.Generator().manual_seed(0)
    for name, layer in layers.items():
        x = torch.randn(1, 9, layer.in_features, generator=draw)

        def alone(made: Any, some: torch.Tensor, name: str = name) -> torch.Tensor:
            inner = made.get_base_model() if hasattr(made, "get_base_model") else made
            found: torch.Tensor = inner.get_submodule(name)(some)
            return found

        with many.rows([(first, 2), (None, 3), (second, 1), (first, 3)]), torch.no_grad():
            mixed = layer(x)
        with torch.no_grad():
            wanted = [alone(one, x[:, :2]), alone(plain, x[:, 2:5]), alone(other, x[:, 5:6]), alone(one, x[:, 6:])]
            torch.testing.assert_close(mixed, torch.cat(wanted, dim=1), msg=name)
            with many.rows([(second, 9)]):
                torch.testing.assert_close(layer(x), alone(other, x), msg=name)
            # Outside of such a pass there is only the base.
            torch.testing.assert_close(layer(x), alone(plain, x), msg=name)


def test_a_layer_with_a_bias_and_one_that_gets_other_rows() -> None:
    class Model(torch.nn.Module):
        dtype, device = torch.float32, torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

    model, draw = Model(), torch.Generator().manual_seed(0)
    many = ManyAdapters(model)
    down, up = torch.randn(1, 3, generator=draw), torch.randn(2, 1, generator=draw)
    adapter = many.placed(PlainLora({"layer": LoraPart(down, up, 0.5)}))
    x = torch.randn(4, 3, generator=draw)
    weight, bias = model.layer.weight.detach(), model.layer.bias.detach()
    base, more = x @ weight.T + bias, x @ down.T @ up.T * 0.5
    with torch.no_grad(), many.rows([(adapter, 4)]):
        torch.testing.assert_close(model.layer(x), base + more)
        torch.testing.assert_close(model.layer(x[:2]), (base + more)[:2])
    with torch.no_grad(), many.rows([(None, 1), (adapter, 3)]):
        torch.testing.assert_close(model.layer(x), torch.cat([base[:1], (base + more)[1:]]))
        with pytest.raises(ModelError, match="layer does not get one row per token"):
            model.layer(x[:2])
    torch.testing.assert_close(model.layer(x).detach(), base)
