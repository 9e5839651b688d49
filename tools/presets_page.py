"""Write the page `docs/guide/presets.md`: the GPUs, memory by part and expected speed of each preset.

HF_HUB_OFFLINE=1 python -m tools.presets_page > docs/guide/presets.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from finray.config.load import build_config, preset_names, preset_text, read_preset
from finray.config.schema import Config
from finray.planning.blueprint import build_blueprint
from finray.planning.flops import LAUNCHING, UTILIZATION, Flops, flops_per_token, rounded
from finray.planning.placement import GPUS as KINDS
from finray.planning.plan import make_plan
from finray.planning.result import Plan
from finray.pretrained.bundled_configs import bundled_config

# A GPU on which each preset fits, with room for what the estimate does not include.
GPUS = {
    "bert-sst2-lora": "t4-16gb",
    "bloomz-zero3": "t4-16gb",
    "dpo-lora": "a100-40gb",
    "reward-lora": "a100-40gb",
    "llama3-70b-fsdp": "h100-80gb",
    "llama3-8b-lora": "a100-40gb",
    "mistral-7b-qlora": "rtx4090-24gb",
    "orpo-lora": "a100-40gb",
    "phi3-medium-lora": "a100-80gb",
    "qwen3-8b-lora": "a100-40gb",
    "rust-coder": "l4-24gb",
    "smollm2-lora": "l4-24gb",
}
# The rows assumed for the speeds.
ROW = 512
LEARNED = 0.5
GIB = 2**30


def preset_config(name: str, *, output_dir: Path) -> Config:
    """A preset as the configuration of a run."""
    raw = read_preset(name)
    raw["run"] = {**raw.get("run", {}), "output_dir": str(output_dir)}
    return build_config(raw, source=name)


def plan_preset(name: str, *, output_dir: Path, gpu: str | None = None) -> Plan:
    """The offline plan of a preset on its GPU."""
    config = preset_config(name, output_dir=output_dir)
    return make_plan(config, gpu=gpu or GPUS[name], environ={}, offline=True)


def preset_flops(config: Config) -> Flops:
    """Floating-point operations per token of a preset."""
    shape = bundled_config(config.model)
    assert shape is not None, f"the shape of {config.model.name} is not shipped"
    return flops_per_token(
        build_blueprint(shape, config.adapter),
        row=min(ROW, config.data.max_length),
        learned=LEARNED,
        checkpointing=config.train.gradient_checkpointing == "full",
    )


def tokens_per_second(config: Config, gpu: str, flops: Flops) -> float:
    """Expected tokens/s of all workers, if only arithmetic took time."""
    rate = KINDS[gpu].tflops
    assert rate is not None
    return config.cluster.num_workers * UTILIZATION * rate * 1e12 / flops.total


def page(plans: Mapping[str, Plan]) -> str:
    """The whole page, from the plans of all presets."""
    return "\n".join(_lines(plans)).rstrip() + "\n"


def _lines(plans: Mapping[str, Plan]) -> Iterator[str]:
    yield _HEAD
    configs = {name: preset_config(name, output_dir=Path("runs")) for name in plans}
    flops = {name: preset_flops(config) for name, config in configs.items()}
    yield "| preset | GPUs | parameters, million | trained, million | memory per GPU, GiB | tokens/s, estimated |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, plan in plans.items():
        assert plan.model is not None, plan.problems
        assert plan.memory is not None, plan.problems
        assert plan.speed is not None
        speed = tokens_per_second(configs[name], GPUS[name], flops[name])
        speed = rounded(plan.speed.tokens_per_s if plan.speed.waiting > 1 else speed)
        yield (
            f"| [`{name}`](#{name}) | {configs[name].cluster.num_workers} × {GPUS[name]} "
            f"| {plan.model.parameters / 1e6:,.0f} | {plan.model.trainable / 1e6:,.1f} "
            f"| {plan.memory.total / GIB:.1f} of {(plan.memory.available or 0) / GIB:.1f} | {speed:,} |"
        )
    yield _BELOW
    for name, plan in plans.items():
        assert plan.memory is not None
        yield f"## {name}\n"
        yield preset_text(name).splitlines()[0].lstrip("# ") + "\n"
        count = flops[name]
        again = f", and {count.again / 1e9:.1f} to recompute activations" if count.again else ""
        yield f"GFLOP per token: {count.useful / 1e9:.1f}{again}.\n"
        yield "| part | GiB per GPU |"
        yield "| --- | ---: |"
        for part, size in sorted(plan.memory.parts.items(), key=lambda item: -item[1]):
            yield f"| {part} | {size / GIB:.2f} |"
        yield ""


_HEAD = """# Presets

A preset is a configuration to start from. `finray config presets` lists them, and prints the one that is named. A
command takes a preset's name wherever it takes a config. `finray init my-run.yaml --preset NAME` writes one to edit. A
line `preset: NAME` in your own file supplies what the file leaves out. If your file (or an override) sets a
`data.source`, the preset's fields about its own source are ignored, and its `evaluation` where nothing is held out.

```
finray config presets llama3-8b-lora
finray plan llama3-8b-lora data.source=data/train.jsonl --gpu a100-40gb --offline
finray init my-run.yaml --preset llama3-8b-lora
```

With `--offline`, and `--gpu` for the GPUs that it will have, `finray plan` accepts every preset on a machine without a
network or a GPU: the shapes of their models come with finray. Packages that a preset needs and that are missing here
are warnings: `deepspeed` and `quantization` for `bloomz-zero3`, `quantization` for `mistral-7b-qlora`. What cannot be
checked that way (the tokenizer, the data) is listed as `not checked`. On a single GPU `bert-sst2-lora` takes 8 bits and
needs `quantization`, too; without it, `plan` warns.

<!-- Made by `HF_HUB_OFFLINE=1 python -m tools.presets_page`; a test compares it. -->
"""
_BELOW = f"""
Memory is the plan's estimate of the peak of one worker, for packs as long as the preset allows with loss on every
token; shorter rows need less. Tokens/s are computed, not measured: {UTILIZATION:.0%} of the 16-bit matrix throughput in
the GPU's data sheet, times the GPUs, divided by the operations per token, for rows of {ROW} tokens with loss on half of
them; or what the host allows, which takes {LAUNCHING * 1000:.0f} ms a layer to launch the kernels of a micro-batch.
Slow networks give less.
"""


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        print(page({name: plan_preset(name, output_dir=Path(scratch)) for name in preset_names()}), end="")
