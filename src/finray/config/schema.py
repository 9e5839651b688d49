"""The configuration: its sections, and the rules that hold in them and between them. Long sections have a file each.

The reference page and ``finray init`` are generated from the docstrings of the sections and the ``description`` of each
field, so every field has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, PrivateAttr, field_validator, model_validator

from finray.config import RUNS
from finray.config.classification import ClassificationConfig as ClassificationConfig
from finray.config.data_schema import FIELDS as FIELDS
from finray.config.data_schema import DataConfig as DataConfig
from finray.config.data_schema import PrepareConfig as PrepareConfig
from finray.config.data_schema import SourceConfig as SourceConfig
from finray.config.evaluation import EarlyStoppingConfig as EarlyStoppingConfig
from finray.config.evaluation import EvaluationConfig as EvaluationConfig
from finray.config.export import ExportConfig as ExportConfig
from finray.config.extensions import named
from finray.config.preference import TAKEN
from finray.config.preference import PreferenceConfig as PreferenceConfig
from finray.config.redact import MASK, holds_secret, is_secret_name
from finray.config.replicas import legal_name
from finray.config.section import NO_TEXT as NO_TEXT
from finray.config.section import PositiveInt, Ratio
from finray.config.section import Section as Section
from finray.config.section import section_of as section_of
from finray.config.tasks import SPECS, TASK_OF
from finray.config.train import SCHEDULES as SCHEDULES
from finray.config.train import ProfileConfig as ProfileConfig
from finray.config.train import ScheduleOptions as ScheduleOptions
from finray.config.train import TrainConfig as TrainConfig


class RunConfig(Section):
    """The name of the run and where it is kept."""

    name: str = Field("run", description="Name of the run. Its directory is `<run.output_dir>/<run.name>`.")
    output_dir: str = Field(
        RUNS,
        description="Directory of runs and prepared datasets, or a URL (`s3://bucket/path`, `gs://bucket/path`).",
    )
    local_dir: str | None = Field(
        None,
        description="Where each machine keeps its copy of a run behind a URL. null is the user's cache "
        "(`~/.cache/finray/runs`).",
    )
    seed: int = Field(
        17, ge=0, lt=2**63, description="Seed for everything random: data order, splits, dropout, new weights."
    )

    @field_validator("name")
    @classmethod
    def _is_a_path_segment(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", value):
            # Of a secret, the suggestion would be another spelling, which nobody masks.
            like = "" if holds_secret(value) else legal_name(value)
            raise ValueError(
                "becomes a directory name: use letters, digits, '.', '_' and '-', and start with a letter or a digit"
                + (f" (such as `{like}`)" if like else "")
            )
        return value

    @field_validator("output_dir")
    @classmethod
    def _is_a_place(cls, value: str) -> str:
        if not value.strip() or re.match(r"https?://", value):
            raise ValueError("must be a directory, or a URL that can be written to (`s3://bucket/path`)")
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*/*", value) and not value.startswith(("file://", "memory://")):
            raise ValueError("names only a bucket: add a folder (`s3://bucket/runs`)")
        return value

    @field_validator("local_dir")
    @classmethod
    def _is_local(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "://" in value):
            raise ValueError("must be a local directory")
        return value


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    """Names of what is a secret in the arguments of a template, by name or by form."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _secrets(item, name)
    elif isinstance(value, str) and value not in ("", MASK):
        named = is_secret_name(name)
        if name.lower().endswith("_token"):
            # A template's tokens, such as `<|im_end|>` as its `eos_token`, are no credentials.
            named = re.fullmatch(r"[\w.=+/-]+" if named else r"[\w.=+/-]{16,}", value) is not None
        if named or holds_secret(value, environ={}):
            yield name
    elif type(value) in (int, float) and is_secret_name(name) and not name.lower().endswith("_token"):
        # `max_token: 5` is no credential, and `password: 12345678` is one.
        yield name


class ModelConfig(Section):
    """Which model is trained."""

    name: str = Field(description="A model directory, a `.gguf` file, or a model id on the Hugging Face Hub.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face model.")
    task: Annotated[str, AfterValidator(named("finray.tasks"))] = Field(
        "causal_lm",
        description="What the model is trained to do: `causal_lm`, `sequence_classification`, or your own task as "
        "`package.module:Class`. Where it is left out, `train.objective` `reward` and `classification` are "
        "`sequence_classification`.",
    )
    chat_template: str | None = Field(
        None, description="Jinja file that replaces the tokenizer's chat template, or the template itself."
    )
    chat_template_arguments: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Variables passed to the chat template, in training and in serving, such as `enable_thinking`.",
    )
    attention: Literal["auto", "packed", "flash_attention_2"] = Field(
        "auto",
        description="Attention over packed rows. `auto` uses FlashAttention 2 on a GPU if it is installed, else "
        "finray's own (`packed`).",
    )
    trust_remote_code: bool = Field(
        False, description="Run code that comes with the model. Leave it off unless you have read that code."
    )
    quantization: Literal["none", "8bit", "4bit", "auto"] = Field(
        "none",
        description="Storage of the frozen linear layers under an adapter: unchanged (`none`), int8 with one scale per "
        "row (`8bit`), or NF4 with double quantization (`4bit`). `auto` is `8bit` on a single GPU, else `none`.",
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
            raise ValueError("tokens must not be blank or repeated")
        return value

    @field_validator("chat_template_arguments")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        ours = sorted(set(value) & {"messages", "tools", "documents", "add_generation_prompt"})
        if ours:
            raise ValueError(f"{', '.join(ours)} cannot be set: finray sets it")
        if secret := sorted(set(_secrets(value))):
            raise ValueError(
                f"{', '.join(secret)} looks like a secret, and every checkpoint holds these arguments in plain text; "
                "leave it out of the template"
            )
        return value


class AdapterConfig(Section):
    """Which weights are trained."""

    method: Annotated[str, AfterValidator(named("finray.adapter_methods", "none"))] = Field(
        "lora",
        description="Which weights are trained: all of them (`none`), or an adapter: LoRA, rank-stabilised LoRA "
        "(`rslora`), weight-decomposed LoRA (`dora`), or LoRA initialized from the principal singular vectors of the "
        "weights (`pissa`).",
    )
    rank: PositiveInt = Field(16, description="Rank r of the LoRA matrices.")
    alpha: float = Field(
        32.0,
        gt=0,
        description="LoRA scaling numerator: updates are scaled by alpha / rank (`rslora`: by alpha / sqrt(rank)).",
    )
    dropout: Ratio = Field(0.0, description="Dropout probability on the input of the LoRA matrices.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="Layers that get an adapter: `all-linear`, a regular expression, or a list of module name "
        "suffixes; `q_proj,v_proj` is a list too.",
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Name suffixes of modules that are trained in full, in addition to the adapter.",
    )
    start_from: str | None = Field(
        None,
        description="Directory of a PEFT adapter, or of a finray run, to continue training from. Method, rank, alpha "
        "and target modules are read from it.",
    )
    lora_plus_ratio: float = Field(
        1.0,
        ge=1.0,
        description="LoRA+: learning rate of the B matrices as a multiple of `train.learning_rate`.",
    )

    @field_validator("target_modules")
    @classmethod
    def _comma_list(cls, value: str | list[str]) -> str | list[str]:
        # As other systems' flags have it; as a regular expression it would match no name.
        if isinstance(value, str) and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)+", value.strip()):
            return re.split(r"\s*,\s*", value.strip())
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"this is not a regular expression: {error}; use `all-linear`, a regular expression that matches "
                    "whole module names, or a list of their endings"
                ) from None
        return value


class ParallelConfig(Section):
    """How the work is divided among the workers."""

    strategy: Annotated[str, AfterValidator(named("finray.strategies", "auto"))] = Field(
        "ddp",
        description="`ddp`: a full copy of the model on each worker, gradients all-reduced. `fsdp`: weights, gradients "
        "and optimizer state sharded across the workers (FSDP2). `deepspeed`: sharded by DeepSpeed ZeRO. `auto`: "
        "`ddp` if the run fits into memory, else `fsdp`. Or your own as `package.module:Class`.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="`fsdp`: free the gathered weights of a layer after its forward pass and gather them again for the "
        "backward pass.",
    )
    shard_size: PositiveInt | None = Field(
        None,
        description="`fsdp`: number of workers that the weights are sharded across (hybrid sharding). null is all.",
    )
    cpu_offload: bool = Field(
        False,
        description="`fsdp`, `deepspeed`: keep the optimizer state, and the weights if they are sharded, in CPU "
        "memory.",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        None,
        description="`deepspeed`: what is sharded: 1 the optimizer state, 2 gradients too, 3 weights too. null takes "
        "the stage of `parallel.deepspeed_config`, else 2.",
    )
    deepspeed_config: str | dict[str, JsonValue] | None = Field(
        None,
        description="`deepspeed`: your own JSON file, or its content. Fields that it leaves out or sets to "
        '`"auto"` are filled in from this config; a contradicting value is an error.',
    )
    keep_deepspeed_shards: bool = Field(
        True,
        description="`deepspeed`: also keep DeepSpeed's own files in every checkpoint, with `zero_to_fp32.py`. finray "
        "does not read them.",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> ParallelConfig:
        for name in ("zero_stage", "deepspeed_config"):
            if getattr(self, name) is not None and self.strategy != "deepspeed":
                raise ValueError(f"parallel.{name} has no effect with parallel.strategy {self.strategy}")
        return self


class CheckpointConfig(Section):
    """When checkpoints are saved and how long they are kept."""

    every_steps: PositiveInt = Field(
        100, description="Optimizer steps between checkpoints. The last step is always saved."
    )
    every_epochs: float | None = Field(
        None,
        gt=0,
        description="Passes over the data between checkpoints: 1 saves at the end of each epoch, 0.25 four times per "
        "epoch. If it is set, `every_steps` is ignored.",
    )
    keep_last: PositiveInt = Field(2, description="Number of newest checkpoints to keep.")
    in_memory_every: PositiveInt | None = Field(
        None,
        description="Maximum number of optimizer steps lost with a node. Checkpoints are kept in memory twice as "
        "often (at 1, after each step), each worker's part on its own node and on another one. A restart uses one "
        "that is newer than the stored checkpoints. null keeps none.",
    )
    asynchronous: bool = Field(
        True,
        description="Write checkpoints in the background, from a copy in CPU memory, while training continues. An "
        "error is raised at the next save.",
    )
    grace_seconds: float = Field(
        20.0,
        gt=0,
        description="Time after Ctrl-C, SIGTERM or SIGHUP to finish the step and save a checkpoint.",
    )
    keep_best: bool = Field(
        True,
        description="Also save a checkpoint at every evaluation with a new best value of `evaluation.metric`, and keep "
        "the best one.",
    )


class TrackingConfig(Section):
    """Where metrics are written. `metrics.jsonl` is always written."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files to `<run>/tensorboard/`.")
    trackers: list[Annotated[str, AfterValidator(named("finray.trackers"))]] = Field(
        default_factory=list,
        description="Additional trackers: `wandb`, `mlflow`, or your own as `package.module:Class`.",
    )
    wandb_project: str | None = Field(None, description="Project at W&B. null takes `WANDB_PROJECT`, else `finray`.")
    wandb_entity: str | None = Field(
        None, description="Team or user at W&B. null takes `WANDB_ENTITY`, else the default of the key."
    )
    wandb_mode: Literal["online", "offline"] | None = Field(
        None,
        description="`offline` writes W&B's own files to `<run>/wandb/`, and needs no key. null takes `WANDB_MODE`, "
        "else `online`.",
    )
    mlflow_uri: str | None = Field(
        None, description="Address of the MLflow tracking server. null takes `MLFLOW_TRACKING_URI`."
    )
    mlflow_experiment: str | None = Field(
        None, description="Experiment at MLflow. null takes `MLFLOW_EXPERIMENT_NAME`, else `finray`."
    )
    tags: list[str] = Field(default_factory=list, description="Tags of the run at W&B and MLflow.")
    system_every_seconds: Annotated[float, Field(gt=0)] | None = Field(
        15.0,
        description="Seconds between records of rank 0's machine: CPU, memory, network, disk, GPUs. null writes none.",
    )
    log_every: PositiveInt = Field(
        1, description="Optimizer steps between records. Metrics are averaged over these steps."
    )
    record_samples: bool = Field(
        False, description="Record the ids of the rows of every step. A digest of them is always recorded."
    )

    @field_validator("mlflow_uri")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and holds_secret(value, environ={}):
            raise ValueError(
                "holds a password, and the config is written to files; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment instead"
            )
        return value


class ElasticWorkers(Section):
    """Bounds of a number of workers that follows the cluster."""

    min: PositiveInt = Field(1, description="Minimum number of workers; with less room the run waits.")
    max: PositiveInt = Field(description="Maximum number of workers.")

    @model_validator(mode="after")
    def _in_order(self) -> ElasticWorkers:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class ClusterConfig(Section):
    """Resources that the run asks Ray for."""

    address: str | None = Field(
        None,
        description="Address of a Ray cluster. null joins the cluster named by `RAY_ADDRESS`, or starts Ray on this "
        "machine.",
    )
    num_workers: PositiveInt | ElasticWorkers = Field(
        1,
        description="Number of training workers. `{min: 1, max: 8}`: as many as the cluster has room for, adjusted "
        "during the run.",
    )
    resize_seconds: float = Field(
        20.0,
        gt=0,
        description="With `num_workers: {min, max}`: how often to look for free resources for more workers.",
    )
    cpus_per_worker: PositiveInt | None = Field(
        None, description="CPUs per worker. null divides the CPUs of the cluster evenly."
    )
    use_gpu: bool | Literal["auto"] = Field(
        "auto", description="GPUs for the workers. `auto` uses GPUs if the cluster has enough of them."
    )
    gpus_per_worker: float = Field(
        1.0,
        # Ray counts in ten-thousandths.
        ge=0.0001,
        le=1,
        description="Share of a GPU per worker, if GPUs are used. Below 1, several workers share a GPU and exchange "
        "gradients through Gloo.",
    )
    max_failures: int = Field(
        3,
        ge=0,
        description="How often in a row Ray may restart the workers without progress (a start from a later step).",
    )
    hang_seconds: float | None = Field(
        300.0,
        gt=0,
        description="How long a worker may miss the all-reduce of a step, or not report at all, before it is named, "
        "its stack is printed, and the workers are restarted; six times as long (at least 5 minutes) while it starts. "
        "null waits forever.",
    )
    requeue_exit_code: int | None = Field(
        None,
        ge=1,
        le=125,
        description="Exit code of a run that was stopped by SIGTERM and can be continued, such as 75 for a scheduler "
        "that requeues by exit code. null is 143.",
    )
    dashboard: bool = Field(
        False, description="Start Ray's dashboard on this machine's loopback address, if finray starts Ray."
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the workers. Secrets are refused."
    )

    @property
    def min_workers(self) -> int:
        """The fewest workers that train."""
        return self.num_workers.min if isinstance(self.num_workers, ElasticWorkers) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Maximum number of workers."""
        return self.num_workers.max if isinstance(self.num_workers, ElasticWorkers) else self.num_workers

    @property
    def max_gpus(self) -> int:
        """Number of GPUs of all workers; a share of a GPU lies on a single one."""
        # Ray counts in ten-thousandths.
        return math.ceil(self.max_workers / (10_000 // round(self.gpus_per_worker * 10_000)))

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers < self.max_workers

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not name or "=" in name or "\0" in name + content:
                raise ValueError(
                    f"{name!r} is not a valid environment variable: a name has no `=`, and neither name nor value "
                    "has a NUL"
                )
        secret = sorted(name for name in value if is_secret_name(name))
        if secret:
            raise ValueError(f"{', '.join(secret)} looks like a secret; set it in the environment of the nodes instead")
        secret = sorted(name for name, text in value.items() if holds_secret(text, environ={}))
        if secret:
            raise ValueError(
                f"the value of {', '.join(secret)} looks like a secret, and the config is written to files; set it in "
                "the environment of the nodes instead"
            )
        return value


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig
    prepare: PrepareConfig = PrepareConfig()
    classification: ClassificationConfig = ClassificationConfig()
    train: TrainConfig = TrainConfig()
    preference: PreferenceConfig = PreferenceConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()
    export: ExportConfig = ExportConfig()
    # Notes about where it was read from; not a part of it.
    _notes: tuple[str, ...] = PrivateAttr(())
    # Of the config of a run that somebody else has started: its file, and the fields that are the user's own word.
    _foreign: tuple[str, frozenset[str]] = PrivateAttr(("", frozenset()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about what was read: names from the environment, and files of other systems."""
        return self._notes

    @property
    def foreign(self) -> tuple[str, frozenset[str]]:
        """The file of a config that somebody else has written, empty for one of the user's own, and the fields that
        the user has set in it (:mod:`finray.config.trust`)."""
        return self._foreign

    def with_foreign(self, where: str, said: frozenset[str]) -> Config:
        """A copy of the configuration with these."""
        marked = self.model_copy()
        marked._foreign = (where, said)
        return marked

    def with_notes(self, notes: Iterable[str]) -> Config:
        """The same configuration, with these notes."""
        self._notes = tuple(notes)
        return self

    @model_validator(mode="before")
    @classmethod
    def _task_of_objective(cls, raw: Any) -> Any:
        """An objective that goes with one task names it."""
        model, train = (raw.get(name) if isinstance(raw, Mapping) else None for name in ("model", "train"))
        if not isinstance(model, Mapping) or not isinstance(train, Mapping) or "task" in model:
            return raw
        task = TASK_OF.get(str(train.get("objective")))
        return raw if task is None else {**raw, "model": {**model, "task": task}}

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        data, evaluation = self.data, self.evaluation
        task, objective = SPECS.get(self.model.task), self.train.objective or "sft"
        if self.classification != ClassificationConfig():
            if objective in TAKEN:
                raise ValueError(
                    f"classification: has no effect with train.objective {objective}, which reads no labels"
                )
            if task is not None and not task.reads_labels:
                raise ValueError(
                    f"classification: has no effect with model.task {task.name}; set model.task to "
                    "sequence_classification"
                )
        for name, value in () if ":" in objective else self.preference:
            if value != PreferenceConfig.model_fields[name].default and name not in TAKEN.get(objective, ()):
                takers = " or ".join(taker for taker, names in TAKEN.items() if name in names)
                raise ValueError(f"preference.{name}: has no effect with train.objective {objective}; {takers} has it")
        if self.cluster.is_elastic and self.parallel.shard_size is not None:
            raise ValueError(
                "parallel.shard_size: must divide the number of workers, but cluster.num_workers lets it change; "
                "leave it out"
            )
        if self.parallel.strategy == "deepspeed" and self.train.optimizer in ("adafactor", "muon"):
            raise ValueError(
                f"train.optimizer: {self.train.optimizer} needs whole matrices, but DeepSpeed flattens them; use adamw "
                "or an 8-bit optimizer, or set parallel.strategy to fsdp"
            )
        if self.train.precision == "bf16-true":
            if self.adapter.method != "none":
                raise ValueError(
                    "train.precision: bf16-true is for full fine-tuning; with an adapter set it to bf16, which also "
                    "keeps the frozen weights in bf16"
                )
            if self.train.optimizer != "adamw":
                raise ValueError(
                    f"train.precision: bf16-true rounds updates stochastically, which {self.train.optimizer} does "
                    "not support; set train.optimizer to adamw, or train.precision to bf16"
                )
            if self.parallel.strategy == "deepspeed":
                raise ValueError(
                    "train.precision: bf16-true rounds updates stochastically, but DeepSpeed updates its own fp32 "
                    "copies and rounds them to nearest; set parallel.strategy to fsdp, or "
                    "train.precision to bf16"
                )
        if self.adapter.method == "none":
            if self.model.quantization in ("4bit", "8bit"):
                raise ValueError(
                    "model.quantization: quantized weights cannot be trained; set adapter.method to lora, or "
                    "model.quantization to none"
                )
            if self.adapter.start_from is not None:
                raise ValueError(
                    "adapter.start_from has no effect with adapter.method none; to train all weights, export the "
                    "merged model first and set model.name to it"
                )
        if self.prepare.chunk_overlap > data.max_length // 2:
            raise ValueError("prepare.chunk_overlap: must be at most half of data.max_length")
        by_name = data.eval_source is not None or data.eval_split is not None
        if by_name and data.eval_ratio:
            raise ValueError(
                "data: eval_ratio and eval_source or eval_split both choose the evaluation rows; keep one of them"
            )
        for name in ("every_steps", "every_epochs", "metric", "generate_rows"):
            if getattr(evaluation, name) is not None and not (by_name or data.eval_ratio):
                raise ValueError(
                    f"evaluation.{name}: there are no evaluation rows; set data.eval_ratio, data.eval_split or "
                    "data.eval_source"
                )
        if evaluation.generate_rows is not None and data.train_on == "all":
            raise ValueError(
                "evaluation.generate_rows: with data.train_on: all there are no prompts to answer; leave one of them "
                "out"
            )
        if evaluation.early_stopping is not None and evaluation.every_steps is evaluation.every_epochs is None:
            raise ValueError(
                "evaluation.early_stopping: without evaluation.every_steps the run is evaluated only at its end; set "
                "evaluation.every_steps, or evaluation.every_epochs"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON types."""
        return self.model_dump(mode="json")


def sections() -> dict[str, type[Section]]:
    """Section name to its model, in the order of the file."""
    return {name: kind for name, field in Config.model_fields.items() if (kind := section_of(field.annotation))}
