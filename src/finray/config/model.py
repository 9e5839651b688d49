"""The ``model`` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from finray.config.extensions import named
from finray.config.section import Section


class ModelConfig(Section):
    """Which model is trained."""

    name: str = Field(description="A model directory, a `.gguf` file, or a Hugging Face model id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face model.")
    task: Annotated[str, AfterValidator(named("finray.tasks"))] = Field(
        "causal_lm",
        description="What the model is trained to do: `causal_lm`, or your own task as `package.module:Class`.",
    )
    chat_template: str | None = Field(None, description="Jinja file that replaces the tokenizer's chat template.")
    chat_template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables passed to the chat template, in training and in serving, such as `enable_thinking`.",
    )
    attention: Literal["auto", "packed", "flash_attention_2"] = Field(
        "auto",
        description="Attention over packed rows. `auto` is FlashAttention 2 on a GPU where it is installed, else "
        "finray's own (`packed`).",
    )
    trust_remote_code: bool = Field(
        False, description="Run code that comes with the model. Leave it off unless you have read that code."
    )
    quantization: Literal["none", "8bit", "4bit", "auto"] = Field(
        "none",
        description="Storage of the frozen linear layers under an adapter: unchanged (`none`), int8 with one scale per "
        "row (`8bit`), or NF4 with double quantisation (`4bit`). `auto` is `8bit` on a single GPU, else `none`.",
    )
    new_tokens: list[str] = Field(
        default_factory=list,
        description="Tokens added to the vocabulary. Their embeddings start as the mean of the others, and are trained "
        "and saved.",
    )

    @field_validator("new_tokens")
    @classmethod
    def _words(cls, value: list[str]) -> list[str]:
        if any(not word.strip() for word in value) or len(set(value)) < len(value):
            raise ValueError("tokens must not be blank, and none may be listed twice")
        return value

    @field_validator("chat_template_arguments")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        ours = sorted(set(value) & {"messages", "tools", "documents", "add_generation_prompt"})
        if ours:
            raise ValueError(f"finray sets {', '.join(ours)} itself")
        return value
