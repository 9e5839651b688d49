"""The sections `data` and `prepare`: the training data, and how they are prepared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from finray.config.section import HeldOut, PositiveInt, Section

Format = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text", "labelled_text", "template"]

# Fields that `field_mapping` may map a column to, besides the placeholders of `input_template` and `output_template`.
FIELDS = (
    frozenset(("messages", "conversations", "tools", "system", "prompt", "completion"))
    .union(("instruction", "input", "output", "history", "text", "text_pair", "label"))
    .union(("chosen", "rejected", "answers", "scores", "ranks", "margin", "score_chosen", "score_rejected"))
    # Names that columns of these have, and under which a field may be mapped as well.
    .union(("conversation", "question", "query", "answer", "response", "context", "content", "sentence", "labels"))
    .union(("sentence1", "sentence2", "premise", "hypothesis"))
)


class SourceConfig(Section):
    """One of several sources that are mixed.

    A field that is not set has the value of the data section, except ``subset`` and ``revision``.
    """

    source: str = Field(description="As `data.source`.")
    subset: str | None = Field(None, description="As `data.subset`.")
    revision: str | None = Field(None, description="As `data.revision`.")
    split: str | None = Field(None, description="As `data.train_split`.")
    format: Format | None = Field(None, description="As `data.format`.")
    field_mapping: dict[str, str] | None = Field(None, description="As `data.field_mapping`.")
    input_template: str | None = Field(None, description="As `data.input_template`.")
    output_template: str | None = Field(None, description="As `data.output_template`.")
    system: str | None = Field(None, description="As `data.system`; an empty string means none.")
    weight: float | None = Field(None, gt=0, description="Share of the mixed rows, relative to the other weights.")
    count: Annotated[int, Field(ge=1, le=100_000_000)] | None = Field(
        None, description="Rows of this source per epoch, instead of `weight`."
    )

    @model_validator(mode="after")
    def _one_size(self) -> SourceConfig:
        if self.weight is not None and self.count is not None:
            raise ValueError("set weight or count, not both")
        if (self.input_template is None) != (self.output_template is None):
            raise ValueError("input_template and output_template go together")
        return self


class DataConfig(Section):
    """Where examples come from and how they become tokens."""

    source: str | None = Field(
        None,
        description="A file, directory, glob, URL (`s3://`, `gs://`, `https://`), or Hugging Face dataset "
        "(`org/name`, or `org/name:data_dir`).",
    )
    mix: list[SourceConfig] = Field(
        default_factory=list, description="Several sources instead of `data.source`, mixed by `weight` or `count`."
    )
    subset: str | None = Field(None, description="Subset (configuration) of a Hugging Face dataset.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face dataset.")
    train_split: str = Field(
        "train", description="Named split used for training, optionally a slice: `train[:1%]`, `train[100:200]`."
    )
    eval_source: str | None = Field(None, description="A second source, used only for evaluation.")
    eval_split: str | None = Field(
        None,
        description="Named split used for evaluation, of `data.eval_source` if that is set, else of `data.source`.",
    )
    eval_ratio: HeldOut = Field(
        0.0,
        description="Share of the training rows held out for evaluation, chosen by `run.seed`; from 2 on, their "
        "number.",
    )
    test_split: str | None = Field(None, description="Named split held out for tests after training.")
    test_ratio: HeldOut = Field(
        0.0, description="Share of the training rows held out for tests after training; from 2 on, their number."
    )
    group_by: str | None = Field(
        None,
        description="Column (a user, a document): rows with equal values stay on the same side of a ratio split.",
    )
    format: Format = Field(
        "auto",
        description="Format of a row. `auto` detects it from the columns and prints what it detected; prompts and "
        "completions are chat turns if the model has a chat template. `prompt_completion` joins them as plain text. "
        "For classification `auto` is `labelled_text`: one text or two, and a label.",
    )
    field_mapping: dict[str, str] = Field(
        default_factory=dict,
        description="Field to column (`prompt: question`). A dot reaches into nested columns (`data.question`).",
    )
    input_template: str | None = Field(
        None,
        description="Prompt built from columns, such as `Question: {question}\\n`. Requires `data.output_template`.",
    )
    output_template: str | None = Field(None, description="Completion built from columns, such as `{answer}`.")
    system: str | None = Field(
        None,
        description="System message of conversations that have none. `finray generate` uses it too.",
    )
    tool_format: Literal["plain", "hermes", "llama3"] = Field(
        "plain",
        description="How tools and calls are written if the chat template does not support them: only schemas "
        "(`plain`), with instructions and calls in tags as in Hermes and Qwen (`hermes`), or as in Llama 3.1 "
        "(`llama3`).",
    )
    converter: str | None = Field(
        None,
        description="Your own function, `package.module:function`, that converts a row to one of the formats.",
    )
    train_on: Literal["completion", "assistant", "last_assistant", "all"] = Field(
        "completion",
        description="Supervised tokens: the completion (in a chat, every assistant message that is not part of a "
        "prompt), every assistant message, only the last one, or all tokens. A message with `train: false` is never "
        "supervised.",
    )
    max_length: Annotated[int, Field(ge=8, le=2**24)] = Field(
        1024, description="Maximum number of tokens in a row, and in a pack."
    )
    on_too_long: Literal["truncate", "drop", "error"] = Field(
        "truncate",
        description="What to do with a conversation longer than `data.max_length`. Plain text is cut into pieces.",
    )
    packing: bool = Field(
        True,
        description="Join rows into packs of up to `data.max_length` tokens. Rows do not attend to each other.",
    )
    on_bad_row: Literal["error", "drop"] = Field(
        "error", description="Stop at a row that cannot be used, or drop it and list it in `bad-rows.jsonl`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.source is None) == (not self.mix):
            raise ValueError("data.source: set either data.source or data.mix (`data.source: null` unsets it)")
        if (self.input_template is None) != (self.output_template is None):
            raise ValueError("data.input_template and data.output_template go together")
        if self.converter is not None and (self.input_template or self.field_mapping or self.format != "auto"):
            raise ValueError(
                "data.converter: a converter replaces format, field_mapping and the templates; leave these out"
            )
        if self.input_template is not None and self.format not in ("auto", "template"):
            raise ValueError(f"data.input_template has no effect with format {self.format}")
        for place, mapping, template in [
            ("data.field_mapping", self.field_mapping, self.input_template),
            *(
                (
                    f"data.mix.{number}.field_mapping",
                    entry.field_mapping or {},
                    entry.input_template or self.input_template,
                )
                for number, entry in enumerate(self.mix)
            ),
        ]:
            unknown = sorted(set(mapping) - FIELDS)
            if unknown and template is None:
                fields = ", ".join(sorted(FIELDS))
                raise ValueError(f"{place}: unknown field {', '.join(unknown)}; use {fields}")
        for number, entry in enumerate(self.mix):
            reads = entry.input_template or entry.field_mapping or entry.format not in (None, "auto")
            if self.converter is not None and reads:
                raise ValueError(
                    f"data.mix.{number}: data.converter replaces format, field_mapping and templates; leave these out"
                )
            form = entry.format or self.format
            if entry.input_template is not None and form not in ("auto", "template"):
                raise ValueError(f"data.mix.{number}.input_template has no effect with format {form}")
            if entry.format == "template" and (entry.input_template or self.input_template) is None:
                raise ValueError(f"data.mix.{number}.format: template requires input_template and output_template")
        if self.format == "template" and self.input_template is None:
            raise ValueError("data.format: template requires data.input_template and data.output_template")
        if self.group_by is not None and not (self.eval_ratio or self.test_ratio):
            raise ValueError("data.group_by has no effect without data.eval_ratio or data.test_ratio")
        if sum(ratio for ratio in (self.eval_ratio, self.test_ratio) if ratio < 1) >= 1:
            raise ValueError("data.eval_ratio and data.test_ratio leave nothing for training")
        if self.test_split is not None and self.test_ratio:
            raise ValueError("data.test_split and data.test_ratio both choose the test rows; keep one")
        return self


class PrepareConfig(Section):
    """How and where data is prepared."""

    num_workers: PositiveInt | None = Field(
        None,
        description="Number of processes that tokenize: the driver and Ray workers. 1 never uses Ray; null adds a "
        "worker for each free CPU if there is enough work left, on a cluster or with more than four CPUs.",
    )
    dir: str | None = Field(
        None,
        description="Directory or URL (`s3://bucket/path`) of prepared datasets. null is `<run.output_dir>/.prepared`.",
    )
    local_dir: str | None = Field(
        None,
        description="Where workers cache files of a remote `prepare.dir`. null is the user's cache directory.",
    )
    max_row_bytes: PositiveInt = Field(
        8_000_000, description="Largest row of a JSON or CSV file. A larger row is treated as a bad row."
    )
    text_rows: Literal["file", "paragraph", "line"] = Field(
        "file", description="What one row of a text or source file is: the whole file, a paragraph, or a line."
    )
    chunk_overlap: int = Field(
        0,
        ge=0,
        description="Plain text that is cut into pieces: tokens of the previous piece repeated, unsupervised, at the "
        "start of the next.",
    )
