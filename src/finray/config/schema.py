"""The configuration: one small frozen model per section, every field with a default, a reason and one line of help.

The reference page and ``finray config docs`` are generated from the ``description`` of each field, so a field that
is not described does not exist.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from finray.config.redact import is_secret_name

NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")

PositiveInt = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A group of fields: frozen, with no unknown keys, and finite numbers only."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class RunConfig(Section):
    """Names the run and says where it is kept."""

    name: str = Field("run", description="Name of the run; its directory is `run.output_dir/run.name`.")
    output_dir: str = Field("runs", description="Directory that holds runs and prepared data sets.")
    seed: int = Field(17, ge=0, lt=2**63, description="Seed of everything random: order, splits, dropout, new weights.")

    @field_validator("name")
    @classmethod
    def _is_a_path_segment(cls, value: str) -> str:
        if not NAME_PATTERN.match(value):
            raise ValueError(
                "becomes a directory: use letters, digits, '.', '_' and '-', and start with one of the first two"
            )
        return value


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


Format = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text", "labelled_text", "template"]


# What columns can stand for, besides the names in a template of one's own.
FIELDS = frozenset(
    "messages conversations tools system prompt completion instruction input output history text label".split()  # noqa: SIM905
)


class SourceConfig(Section):
    """One of several sources that are mixed; what is left out is taken from the data section."""

    source: str = Field(description="As `data.source`.")
    subset: str | None = Field(None, description="As `data.subset`.")
    revision: str | None = Field(None, description="As `data.revision`.")
    split: str | None = Field(None, description="As `data.train_split`.")
    format: Format | None = Field(None, description="As `data.format`.")
    field_mapping: dict[str, str] | None = Field(None, description="As `data.field_mapping`.")
    input_template: str | None = Field(None, description="As `data.input_template`.")
    output_template: str | None = Field(None, description="As `data.output_template`.")
    weight: float | None = Field(None, gt=0, description="Share of the mixed rows, relative to the other weights.")
    count: PositiveInt | None = Field(None, description="Rows of this source in an epoch; replaces `weight`.")

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
        description="A file, directory, glob, URL (`s3://`, `gs://`, `https://`), or Hugging Face data set "
        "(`org/name`, or `org/name:data_dir`).",
    )
    mix: list[SourceConfig] = Field(
        default_factory=list, description="Several sources instead of `data.source`, mixed by `weight` or `count`."
    )
    subset: str | None = Field(None, description="Configuration (subset) of a Hugging Face data set.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face data set.")
    train_split: str = Field(
        "train", description="Named split used for training, with a slice if wanted: `train[:1%]`, `train[100:200]`."
    )
    eval_source: str | None = Field(None, description="A second source, used for evaluation only.")
    eval_split: str | None = Field(
        None,
        description="Named split used for evaluation: of `data.eval_source` where that is set, else of the source.",
    )
    eval_ratio: Ratio = Field(
        0.0, description="Share of the training rows held out for evaluation, chosen by `run.seed`."
    )
    test_split: str | None = Field(None, description="Named split of the source kept for tests after training.")
    test_ratio: Ratio = Field(0.0, description="Share of the training rows kept for tests after training.")
    group_by: str | None = Field(
        None, description="Column whose equal values stay on one side of a ratio split (a user, a document)."
    )
    format: Format = Field(
        "auto", description="How a row is read. `auto` decides from the columns and says what it decided."
    )
    field_mapping: dict[str, str] = Field(
        default_factory=dict,
        description="Field to column (`prompt: question`); a dot reaches into nested columns (`data.question`).",
    )
    input_template: str | None = Field(
        None, description="Prompt made from columns, such as `Question: {question}\\n`. Needs `data.output_template`."
    )
    output_template: str | None = Field(None, description="Completion made from columns, such as `{answer}`.")
    converter: str | None = Field(
        None, description="Your own function, `package.module:function`: from a row to a row of one of the formats."
    )
    train_on: Literal["completion", "assistant", "last_assistant", "all"] = Field(
        "completion",
        description="Supervised tokens: the completion (in a chat: every assistant message that is not part of a "
        "prompt), every assistant message, only the last one, or all tokens. A message with `train: false` is never "
        "supervised.",
    )
    max_length: Annotated[int, Field(ge=8)] = Field(1024, description="Most tokens in a row, and in a pack.")
    on_too_long: Literal["truncate", "drop", "error"] = Field(
        "truncate",
        description="What happens to a conversation longer than `data.max_length`. Plain text is cut into pieces.",
    )
    packing: bool = Field(
        True, description="Join rows into packs of up to `data.max_length` tokens. Rows never see each other."
    )
    on_bad_row: Literal["error", "drop"] = Field(
        "error", description="Stop at a row that cannot be used, or leave it out and list it in `bad-rows.jsonl`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (self.source is None) == (not self.mix):
            raise ValueError("data.source: set it, or data.mix, one of the two (`data.source: null` leaves it out)")
        if (self.input_template is None) != (self.output_template is None):
            raise ValueError("data.input_template and data.output_template go together")
        if self.converter is not None and (self.input_template or self.field_mapping or self.format != "auto"):
            raise ValueError("data.converter: it reads the rows alone; leave out format, field_mapping and templates")
        if self.input_template is not None and self.format not in ("auto", "template"):
            raise ValueError(f"data.input_template has no effect with format {self.format}")
        for place, mapping, template in [
            ("data.field_mapping", self.field_mapping, self.input_template),
            *(
                (f"data.mix.{number}.field_mapping", one.field_mapping or {}, one.input_template or self.input_template)
                for number, one in enumerate(self.mix)
            ),
        ]:
            unknown = sorted(set(mapping) - FIELDS)
            if unknown and template is None:
                known = ", ".join(sorted(FIELDS))
                raise ValueError(f"{place}: unknown field {', '.join(unknown)}; use {known}")
        if self.format == "template" and self.input_template is None:
            raise ValueError("data.format: template needs data.input_template and data.output_template")
        if self.group_by is not None and not (self.eval_ratio or self.test_ratio):
            raise ValueError("data.group_by has no effect without data.eval_ratio or data.test_ratio")
        if self.eval_ratio + self.test_ratio >= 1:
            raise ValueError("data.eval_ratio and data.test_ratio leave nothing for training")
        if self.test_split is not None and self.test_ratio:
            raise ValueError("data.test_split and data.test_ratio each choose the test rows; keep one")
        return self


class PrepareConfig(Section):
    """How and where data is prepared."""

    num_workers: PositiveInt | None = Field(
        None, description="Ray workers that tokenise; null takes as many as there are CPUs or pieces of work."
    )
    dir: str | None = Field(
        None,
        description="Directory or URL (`s3://bucket/path`) of prepared data sets; null is `run.output_dir/.prepared`.",
    )
    local_dir: str | None = Field(
        None, description="Where workers keep what they fetch from a remote `prepare.dir`; null is the user's cache."
    )
    max_row_bytes: PositiveInt = Field(
        8_000_000, description="A row of a JSON or CSV file that is larger is a bad row."
    )
    text_rows: Literal["file", "paragraph", "line"] = Field(
        "file", description="What is a row in a text or source file: all of it, a paragraph, or a line."
    )
    chunk_overlap: int = Field(
        0, ge=0, description="Tokens of plain text repeated, unsupervised, at the start of the next piece."
    )


class ProfileConfig(Section):
    """Steps that are looked at closely."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="The first step and the last.")

    @model_validator(mode="after")
    def _in_order(self) -> ProfileConfig:
        if self.steps[0] > self.steps[1]:
            raise ValueError("train.profile: steps are the first and the last, in this order")
        return self


def _checkpointing_by_name(value: Any) -> Any:
    """Before there were two kinds it was true or false."""
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


class TrainConfig(Section):
    """The optimisation."""

    epochs: float | None = Field(
        None, gt=0, description="Passes over the data (1 when neither this nor `max_steps` is set)."
    )
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; replaces `epochs`.")
    global_batch_size: PositiveInt = Field(
        8, description="Packs (rows without packing) per optimizer step, over all workers and accumulation."
    )
    micro_batch_size: PositiveInt = Field(
        1, description="Packs (or rows) per forward pass and worker. Accumulation is derived from it."
    )
    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    min_learning_rate: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay after warm-up.")
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warm-up; replaces `warmup_ratio`.")
    warmup_ratio: Ratio = Field(0.03, description="Share of all steps spent on warm-up.")
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = Field(
        "adamw",
        description="`adamw`; `adamw_8bit`: its state in 8 bits (bitsandbytes); `paged_adamw_8bit`: that state moves "
        "to the CPU when a GPU is full; `adafactor`: a state of rows and columns; `muon`: for hidden matrices, with "
        "AdamW for the rest.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; never applied to norms and biases.")
    adam_beta1: Ratio = Field(0.9, description="AdamW decay of the first moment.")
    adam_beta2: Ratio = Field(0.999, description="AdamW decay of the second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Clip the global gradient norm to this; null to leave it."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Arithmetic of forward and backward. `auto` is bf16 where the hardware has it, else fp32. `fp16` "
        "scales the loss, and leaves out updates whose gradients are too large.",
    )
    gradient_checkpointing: Annotated[Literal["none", "selective", "full"], BeforeValidator(_checkpointing_by_name)] = (
        Field(
            "none",
            description="Recompute activations in the backward pass to save memory: `full` all of a layer, `selective` "
            "all but its matrix products and attention (`true` and `false` are `full` and `none`).",
        )
    )
    activation_offload: bool = Field(
        False, description="Keep what the backward pass needs in the memory of the CPU meanwhile; for GPUs."
    )
    compile: bool = Field(
        False, description="Compile each layer with `torch.compile`; the first steps take much longer, and others less."
    )
    liger: Literal["auto"] | bool = Field(
        "auto",
        description="Liger's kernels for norms, rotary embeddings and gated layers: `auto` on a GPU where they are "
        "installed. The loss stays finray's.",
    )
    profile: ProfileConfig | None = Field(
        None,
        description="Write a trace of some steps and a table of their time to `<run>/profile/`: `{steps: [10, 15]}`.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("set epochs or max_steps, not both")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError("min_learning_rate is larger than learning_rate")
        return self


class ParallelConfig(Section):
    """How the work is shared between workers."""

    strategy: Literal["ddp", "fsdp", "deepspeed", "auto"] = Field(
        "ddp",
        description="`ddp`: a full model per worker, gradients summed. `fsdp`: weights, gradients and optimizer state "
        "shared between the workers (FSDP2). `deepspeed`: the same by DeepSpeed's ZeRO, in three stages. `auto`: `ddp` "
        "where it fits into memory, else `fsdp`.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="`fsdp`: free gathered weights after the forward pass and gather them again for the backward.",
    )
    shard_size: PositiveInt | None = Field(
        None, description="`fsdp`: workers that share one copy of the weights (hybrid sharding); null for all of them."
    )
    cpu_offload: bool = Field(
        False,
        description="`fsdp`, `deepspeed`: keep optimizer state in the memory of the CPU, and weights where they are "
        "sharded.",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        None,
        description="`deepspeed`: what is sharded. 1: optimizer state, 2: gradients too, 3: weights too; null takes "
        "that of the JSON, else 2.",
    )
    deepspeed_config: str | None = Field(
        None,
        description='`deepspeed`: your own JSON. What it leaves out, or calls `"auto"`, follows from this file; what '
        "it says differently is an error.",
    )
    keep_deepspeed_shards: bool = Field(
        True,
        description="`deepspeed`: keep DeepSpeed's own files in every checkpoint too, with `zero_to_fp32.py`. finray "
        "does not read them.",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> ParallelConfig:
        for name in ("zero_stage", "deepspeed_config"):
            if getattr(self, name) is not None and self.strategy != "deepspeed":
                raise ValueError(f"parallel.{name} has no effect with parallel.strategy {self.strategy}")
        return self


class CheckpointConfig(Section):
    """When state is saved and how long it is kept."""

    every_steps: PositiveInt = Field(
        100, description="Optimizer steps between checkpoints; the last step always has one."
    )
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept.")
    asynchronous: bool = Field(
        True,
        description="Write behind the training, from a copy in memory; a failure shows at the next save.",
    )
    keep_best: bool = Field(True, description="Also keep the checkpoint with the lowest evaluation loss.")


class EvaluationConfig(Section):
    """Evaluation during training, and `finray evaluate` after it."""

    every_steps: PositiveInt | None = Field(
        None, description="Optimizer steps between evaluations; null for the end only."
    )
    max_rows: PositiveInt | None = Field(None, description="Evaluate at most this many rows.")
    max_new_tokens: PositiveInt = Field(128, description="Tokens generated per answer by `finray evaluate`.")
    batch_size: PositiveInt = Field(16, description="Prompts generated at a time by `finray evaluate`.")


class TrackingConfig(Section):
    """Where metrics go. `metrics.jsonl` is always written."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files to `<run>/tensorboard/`.")
    log_every: PositiveInt = Field(1, description="Optimizer steps between records; metrics in between are averaged.")
    record_samples: bool = Field(
        False, description="Record the ids of the rows seen in each step (a digest of them is always recorded)."
    )


class ClusterConfig(Section):
    """What the run asks of Ray."""

    address: str | None = Field(
        None, description="Ray address; null joins `RAY_ADDRESS`, else starts Ray on this machine."
    )
    num_workers: PositiveInt = Field(1, description="Training workers.")
    cpus_per_worker: PositiveInt | None = Field(
        None, description="CPUs per worker; null takes as many as all workers can have."
    )
    use_gpu: bool | Literal["auto"] = Field(
        "auto", description="One GPU per worker. `auto`: when the cluster has enough."
    )
    max_failures: int = Field(3, ge=0, description="Times Ray may restart the workers from the last checkpoint.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the workers. No secrets.")

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        secret = sorted(name for name in value if is_secret_name(name))
        if secret:
            raise ValueError(
                f"{', '.join(secret)} looks like a secret: set it in the environment of the workers' nodes instead"
            )
        return value


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = Field(default_factory=RunConfig, description="Names the run and says where it is kept.")
    model: ModelConfig = Field(description="Which model is trained.")
    adapter: AdapterConfig = Field(default_factory=AdapterConfig, description="Which weights are trained.")
    data: DataConfig = Field(description="Where examples come from and how they become tokens.")
    prepare: PrepareConfig = Field(default_factory=PrepareConfig, description="How and where data is prepared.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The optimisation.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="How work is shared between workers.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="When state is saved and kept.")
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="Evaluation during and after training."
    )
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Where metrics go.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="What the run asks of Ray.")

    @model_validator(mode="after")
    def _strategy_can(self) -> Config:
        if self.parallel.strategy == "deepspeed" and self.train.optimizer in ("adafactor", "muon"):
            raise ValueError(
                f"train.optimizer: {self.train.optimizer} needs whole matrices, DeepSpeed flattens them; take adamw "
                "or an 8-bit one, or set parallel.strategy to fsdp"
            )
        return self

    @model_validator(mode="after")
    def _one_evaluation_set(self) -> Config:
        data = self.data
        if self.adapter.method == "none":
            if self.model.quantization in ("4bit", "8bit"):
                raise ValueError(
                    "model.quantization: quantised weights cannot be trained; set adapter.method to lora, or "
                    "model.quantization to none"
                )
            if self.adapter.start_from is not None:
                raise ValueError(
                    "adapter.start_from has no effect with adapter.method: none; to train all weights, export the "
                    "merged model first and name it as model.name"
                )
        if self.prepare.chunk_overlap > data.max_length // 2:
            raise ValueError("prepare.chunk_overlap: must be at most half of data.max_length")
        named = [
            name
            for name, value in (
                ("eval_source or eval_split", data.eval_source or data.eval_split),
                ("eval_ratio", data.eval_ratio),
            )
            if value
        ]
        if len(named) > 1:
            raise ValueError(f"data: {' and '.join(named)} each choose the evaluation rows; keep one")
        if self.evaluation.every_steps is not None and not named:
            raise ValueError(
                "evaluation.every_steps: there is nothing to evaluate on; "
                "set data.eval_ratio, data.eval_split or data.eval_source"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON types."""
        return self.model_dump(mode="json")


def sections() -> dict[str, type[Section]]:
    """Section name to its model, in the order of the file."""
    kinds = ((name, field.annotation) for name, field in Config.model_fields.items())
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Section)}
