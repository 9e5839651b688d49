"""Write docs/reference/models.md: what works with each type of decoder in the pinned Transformers, and with the text
part of each type that reads images too, found by doing it.

Each type has a process of its own with a time limit: its default configuration is shrunk as for the check of packing,
saved with a tokenizer, and then planned, trained for one step, adapted with LoRA, exported merged and asked.

    python -m tools.families [TYPE ...]           prints a line for each
    python -m tools.families --write              writes the page; some 20 minutes on an idle machine
    python -m tools.families --write --kept FILE  takes the types that have a line in a file of such lines from there
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tests.support import packing, tiny
from torch.nn import functional as F

from finray.config.resolved import BY_ROW, Packing
from finray.config.schema import AdapterConfig, ModelConfig
from finray.files import first_line
from finray.models import adapters, attention, towers
from finray.models.artifacts import read_artifact
from finray.models.export import TOLERANCE, export, relative_difference
from finray.models.loading import load_model
from finray.models.packing_cache import packing_of_config
from finray.models.packing_check import shrunk, small_model
from finray.planning.blueprint import draw_blueprint
from finray.pretrained.tokenizers import silence_transformers
from finray.pretrained.weights import stored_weights
from finray.tasks.causal_lm import CausalLM

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
SECONDS = 120
DTYPE = torch.float32
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
_FULL = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
# What the defaults of a class leave out, and published models have.
COMPLETE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 4]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_AXES["rope_parameters"], "partial_rotary_factor": 1.0}}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0]},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"causal": True},
    # Half of a small width is rounded up.
    "xlstm": {"qk_dim_factor": 1.0},
    "phi4_multimodal": {"vision_config": {"num_hidden_layers": 2}, "audio_config": {"num_blocks": 2}},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 2, "clip_qkv": 8}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "cohere_compass_text": {"rope_parameters": _FULL},
    "cohere_compass": {"text_config": {"rope_parameters": _FULL}},
    "qwen2_5_omni_thinker": {"text_config": _AXES, "vision_start_token_id": 383},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 383},
    **{kind: {"text_config": _AXES} for kind in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")},
    **{kind: {"text_config": _AXES} for kind in ("glm4v", "glm46v", "glmga", "glm_ocr", "hunyuan_vl")},
}
# Sizes of what reads images; `TEXT` of what has the width of the text part.
_WIDTHS = ("hidden_size", "embed_dim", "projection_dim", "vision_output_dim", "projector_hidden_size", "d_vision_model")
_TEXT = ("out_hidden_size", "text_hidden_size", "output_hidden_size", "proj_out_num", "output_dim")
_DEPTHS = ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "num_global_layers")
_IMAGES = {
    **dict.fromkeys((*_WIDTHS, "num_position_embeddings", "position_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "mlp_dim", "projector_intermediate_size"), 128),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(_DEPTHS, 2),
    **{"head_dim": 16, "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0], "vocab_size": 384},
    **{"fullatt_block_indexes": [1], "mm_tokens_per_image": 4, "image_seq_length": 4},
}
STEPS = ("plans", "rows", "trains", "LoRA on", "exports merged", "answers")


def examine(kind: str, folder: Path) -> dict[str, str]:
    """What each step of :data:`STEPS` gives for a type: its result, or why there is none."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    found: dict[str, str] = {}

    def step(name: str, do: Callable[[], str]) -> None:
        try:
            found[name] = do()
        except Exception as error:
            found[name] = f"no: {first_line(error).replace(str(folder), '.')[:120]}"

    torch.manual_seed(0)
    options = COMPLETE.get(kind, {})
    whole = CONFIG_MAPPING[kind](**options)
    if getattr(whole, "is_decoder", None) is False:
        whole = CONFIG_MAPPING[kind](**options, is_decoder=True)
    reads = towers.reads_images(whole)
    auto_class = AutoModelForImageTextToText if reads else AutoModelForCausalLM
    model = small_reader(whole) if reads else small_model(whole.get_text_config(), auto_class.__name__, dtype=DTYPE)
    tokenizer = tiny.train_tokenizer()
    model = widened(model, len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.ndim >= 2 else 1.0)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    section = ModelConfig(name=str(folder / "base"))
    batches = [packing.rows(), [packing.rows()[1]]]

    def checked() -> Packing:
        # As the engine below asks for it, which then finds it in the cache.
        return packing_of_config(AutoConfig.from_pretrained(folder / "base").get_text_config())

    def plans() -> str:
        draw_blueprint(load_model(section, dtype=torch.float32, on_meta=True), AdapterConfig(method="none"))
        checked()
        return "yes"

    def rows() -> str:
        packed = checked()
        return "packed" if packed.safe else f"of one length: {packed.reason}"

    def trains() -> str:
        is_packed = found["rows"] == "packed"
        name = (BY_ROW if checked().by_row else attention.NAME) if is_packed else None
        ours = load_model(section, dtype=torch.float32, attention_name=name)
        theirs = auto_class.from_pretrained(folder / "base", dtype=torch.float32).eval()
        items = batches[0 if is_packed else 1]
        task = CausalLM(ours, precision="fp32", attention_name=name, device=torch.device("cpu"))
        loss = task.outputs(packing.batch_of(items))
        torch.autograd.backward(loss)
        expected = _plain_loss(theirs, items)
        torch.autograd.backward(expected)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
        expected_gradients = packing.gradients(theirs)
        # Some families amplify a rounding of their weights far more than others: Gemma 4 to 1e-4.
        tolerance = max(1e-5, _effect_of_rounding(theirs, items, expected_gradients))
        packing.assert_equal_gradients(packing.gradients(ours), expected_gradients, tolerance)
        return "yes"

    def adapts() -> str:
        adapted = adapters.add_lora(load_model(section, dtype=torch.float32), AdapterConfig(rank=4), seed=3)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        adapted.save_pretrained(folder / "adapter")
        tokenizer.save_pretrained(folder / "adapter")
        named = [
            name.split(".lora_")[0].replace(".base_layer", "")
            for name, _ in adapted.named_parameters()
            if "lora_A" in name
        ]
        step("exports merged", lambda: exports(adapted.eval()))
        # Some are numbers in a list, which has the name.
        return ", ".join(sorted({next(part for part in name.split(".")[::-1] if not part.isdigit()) for name in named}))

    def exports(adapted: Any) -> str:
        export(read_artifact(folder / "adapter"), folder / "merged", merge=True, dtype="fp32")
        merged = auto_class.from_pretrained(folder / "merged", dtype=torch.float32).eval()
        tokens = torch.from_numpy(batches[1][0][0]).long()[None]
        with torch.no_grad():
            given, expected = (one(tokens, use_cache=False).logits for one in (merged, adapted))
            assert relative_difference(expected, given) <= TOLERANCE["fp32"], "other logits"
        before, after = stored_weights(folder / "base"), stored_weights(folder / "merged")
        assert before is not None
        assert after is not None
        assert before.tensors.keys() == after.tensors.keys(), "tensors have other names"
        of_images = {id(weight) for part in towers.other_parts(merged) for weight in weights_of(merged, part)}
        for name, weight in merged.named_parameters():
            assert id(weight) not in of_images or torch.equal(weight, model.get_parameter(name)), f"{name} has changed"
        return "yes"

    def answers() -> str:
        from finray.evaluation.engines.sampling import Sampling
        from finray.evaluation.engines.transformers import TransformersEngine

        model = auto_class.from_pretrained(folder / "base", dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        prompts = [ids.tolist() for ids, _ in batches[0]]
        plain = [
            model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(prompt) :]
            for prompt in prompts
        ]
        # Nothing ends an answer.
        tokenizer.eos_token = None
        engine = TransformersEngine.of(model, tokenizer)
        given = {answer.row: list(answer.tokens) for answer in engine.generate(prompts, Sampling(6))}
        engine.close()
        ours = [given[row] for row in range(len(prompts))]
        if ours == [one.tolist() for one in plain]:
            return "yes"
        assert ours == [_greedy(model, prompt, 6) for prompt in prompts], "other answers"
        return "yes: as its forward pass, of which Transformers' `generate` makes others"

    for name, do in zip(
        ("plans", "rows", "trains", "LoRA on", "answers"), (plans, rows, trains, adapts, answers), strict=True
    ):
        step(name, do)
        if name == "plans" and found[name] != "yes":
            break
    return found


def small_reader(config: Any) -> Any:
    """A random model that reads images, of a configuration's kind: the text part shrunk as a decoder's, the rest by the
    names of sizes. Raises Exception: what the model's code said to the first way."""
    from transformers import AutoModelForImageTextToText

    text = config.get_text_config()
    errors = []
    for way in ({}, {"filled": True}, {"narrow": False}, {"narrow": False, "filled": True}):
        try:
            small = shrunk(text, **way)
            plain = {
                name: {**small.to_dict(), "model_type": text.model_type}
                if getattr(config, name, None) is text
                else _small_part(name, value, small.hidden_size)
                for name, value in config.to_dict().items()
                if name not in ("model_type", "transformers_version", "architectures", "dtype")
            }
            with torch.device("meta"):
                large = AutoModelForImageTextToText.from_config(type(config)(**plain), dtype=DTYPE).num_parameters()
            assert large < 200_000_000, "it cannot be made small"
            model = AutoModelForImageTextToText.from_config(type(config)(**plain), dtype=DTYPE).eval()
            model(torch.full((1, 3), 3), use_cache=False)
            return model
        except Exception as error:
            errors.append(error)
    raise errors[0]


def widened(model: Any, tokens: int) -> Any:
    """A random model like this one, with as many tokens."""
    for config in (model.config, model.config.get_text_config()):
        for name in ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"):
            if getattr(config, name, None) is not None:
                setattr(config, name, tokens)
    return type(model)._from_config(model.config, dtype=DTYPE).eval()


def _small_part(name: str, value: Any, width: int) -> Any:
    if isinstance(value, dict) and name.startswith("rope"):
        return value
    if isinstance(value, dict):
        depth = next((value[name] for name in _DEPTHS if isinstance(value.get(name), int)), None)
        return {
            # One entry for each layer.
            key: entry[:2] if isinstance(entry, list) and len(entry) == depth else _small_part(str(key), entry, width)
            for key, entry in value.items()
        }
    if value is None or isinstance(value, bool | str):
        return value
    if name.endswith(("_token_id", "_token_index")):
        # Of the tokenizer; none of them is in a text.
        return 383
    small = width if name in _TEXT else _IMAGES.get(name, value)
    # Height and width.
    return [small] * len(value) if isinstance(value, list | tuple) and isinstance(small, int) else small


def weights_of(model: Any, part: str) -> Iterator[Any]:
    """The parameters of a part."""
    return iter(model.get_submodule(part).parameters())


def _plain_loss(model: Any, items: list[tuple[Any, Any]]) -> torch.Tensor:
    """Of plain Transformers, row by row."""
    total = torch.zeros(())
    for ids, mask in items:
        tokens, learned = torch.from_numpy(ids).long(), torch.from_numpy(mask).bool()[1:]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits[learned], tokens[1:][learned], reduction="sum")
    return total


def _effect_of_rounding(model: Any, items: list[tuple[Any, Any]], before: dict[str, torch.Tensor]) -> float:
    """How far the gradients of plain Transformers move if each weight is rounded once more, by the largest of all."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps / 2 * torch.randn(parameter.shape, generator=generator))
    model.zero_grad()
    torch.autograd.backward(_plain_loss(model, items))
    after = packing.gradients(model)
    largest = max(float(gradient.abs().max()) for gradient in before.values())
    return max(float((after[name] - before[name]).abs().max()) for name in before) / largest


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The answer of plain Transformers' forward pass alone: without `generate`, and without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def apart(kind: str) -> dict[str, str]:
    """:func:`examine` in a process of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = examine(kind, Path(folder))
            except BaseException as error:
                found = {"built": f"no: {first_line(error)[:120]}"}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"built": f"no: it takes more than {SECONDS} s, or crashes"}


def page(found: dict[str, dict[str, str]]) -> str:
    """The page, as Markdown."""
    readers = set(filter(_is_reader, found))
    lines = [
        "# Models",
        "",
        f"Written by `make families` on {datetime.date.today():%Y-%m-%d}, with Transformers {version('transformers')} "
        f"and PEFT {version('peft')}: every type of decoder, and the text part of every type that reads images, tried "
        "with a tiny random model of its default configuration. It *trains* if loss and gradients are those of plain "
        "Transformers, row by row, within 1e-5 in fp32; it *answers* if greedy answers are the same; a merged *export* "
        "is loaded by plain Transformers, with the original's names of tensors, and what reads images unchanged. "
        "Encoders such as BERT are tried as decoders (`is_decoder`): finray refuses to train an encoder to write.",
        "",
    ]
    lines += _table("Decoders", {kind: steps for kind, steps in found.items() if kind not in readers})
    lines += _table("Text parts of models that read images", {kind: found[kind] for kind in sorted(readers)})
    return "\n".join(lines) + "\n"


def _is_reader(kind: str) -> bool:
    from transformers import CONFIG_MAPPING

    try:
        return towers.reads_images(CONFIG_MAPPING[kind]())
    except Exception:
        # Its defaults contradict each other.
        return False


def _table(title: str, found: dict[str, dict[str, str]]) -> list[str]:
    built = {kind: steps for kind, steps in found.items() if "built" not in steps}
    good = [kind for kind, steps in built.items() if not any(one.startswith("no:") for one in steps.values())]
    packed = [kind for kind, steps in built.items() if steps.get("rows") == "packed"]
    lines = [
        f"## {title}",
        "",
        f"Of {len(found)} types {len(built)} can be built; {len(good)} of these do everything, and {len(packed)} are "
        "trained packed.",
        "",
        "| type | " + " | ".join(STEPS) + " |",
        "|---" * (len(STEPS) + 1) + "|",
    ]
    for kind, steps in built.items():
        cells = [steps.get(name, "").replace("|", "\\|") for name in STEPS]
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    lines += ["", "These cannot be built from their default configuration:", ""]
    lines += [f"- `{kind}`: {steps['built'][4:]}" for kind, steps in found.items() if "built" in steps]
    return [*lines, ""]


def main() -> None:
    """See the module."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    silence_transformers()
    # Once for all processes.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import_module("peft")
    torch.set_num_threads(1)
    attention.register()
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kept", type=Path)
    asked = parser.parse_args()
    lines = [] if asked.kept is None else asked.kept.read_text(encoding="utf-8").splitlines()
    kept = {kind: json.loads(steps) for kind, _, steps in (line.partition(" ") for line in lines) if steps[:1] == "{"}
    everything = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *filter(_is_reader, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)}
    found = {}
    for kind in asked.types or sorted(everything):
        found[kind] = kept.get(kind) or apart(kind)
        print(kind, json.dumps(found[kind]), flush=True)
    if asked.write:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
