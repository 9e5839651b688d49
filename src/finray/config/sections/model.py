"""What is trained: the model, and the adapter on it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from finray.config.sections.base import PositiveInt, Ratio, Section


class ModelConfig(Section):
    """Which model is trained."""

    name: str = Field(description="A model directory, a `.gguf` file, or a Hugging Face model id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face model.")
    task: Literal["causal_lm"] = Field("causal_lm", description="What the model learns to do.")
    chat_template: str | None = Field(None, description="Jinja file that replaces the tokenizer's chat template.")
    chat_template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables given to the chat template, in training and in serving, such as `enable_thinking`.",
    )
    attention: Literal["auto", "packed", "flash_attention_2"] = Field(
        "auto",
        description="Attention over packed rows. `auto` takes FlashAttention 2 on a GPU where it is installed, "
        "else finray's own (`packed`).",
    )
    trust_remote_code: bool = Field(
        False, description="Run code shipped with the model. Off unless you have read that code."
    )
    quantization: Literal["none", "8bit", "4bit", "auto"] = Field(
        "none",
        description="Storage of the frozen linear layers under an adapter: as they are, int8 with a scale per row, or "
        "NF4 with double quantisation. `auto` is 8bit on one GPU, none on several workers or a CPU.",
    )
    new_tokens: list[str] = Field(
        default_factory=list,
        description="Words added to the tokenizer as one token each; their embeddings begin as the mean and are "
        "trained and saved.",
    )

    @field_validator("new_tokens")
    @classmethod
    def _words(cls, value: list[str]) -> list[str]:
        if any(not word.strip() for word in value) or len(set(value)) < len(value):
            raise ValueError("each must be a word of its own, and no word may come twice")
        return value

    @field_validator("chat_template_arguments")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        ours = sorted(set(value) & {"messages", "tools", "documents", "add_generation_prompt"})
        if ours:
            raise ValueError(f"{', '.join(ours)} is given by finray itself")
        return value


class AdapterConfig(Section):
    """Which weights are trained."""

    method: Literal["none", "lora", "rslora", "dora", "pissa"] = Field(
        "lora",
        description="`none` trains every weight, the others adapters: LoRA, with rank-stabilised scaling (rsLoRA), "
        "with magnitudes of their own (DoRA), or begun at the principal parts of the weights (PiSSA).",
    )
    rank: PositiveInt = Field(16, description="Rank r of the LoRA matrices.")
    alpha: float = Field(
        32.0, gt=0, description="LoRA scaling numerator; updates are scaled by alpha / rank (rsLoRA: by its root)."
    )
    dropout: Ratio = Field(0.0, description="Dropout on the input of the LoRA matrices.")
    target_modules: str | list[str] = Field(
        "all-linear", description="`all-linear`, a regular expression, or a list of module name endings."
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="Endings of the names of modules that are trained whole beside the adapter."
    )
    start_from: str | None = Field(
        None,
        description="Directory of a PEFT adapter (or of a run) to go on from; method, rank, alpha and targets are its "
        "own.",
    )
    lora_plus_ratio: float = Field(
        1.0, ge=1.0, description="The B matrices learn this many times as fast as `train.learning_rate` (LoRA+)."
    )
