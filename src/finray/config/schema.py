"""The configuration: its sections together, and what must agree between them.

The reference page and ``finray config docs`` are generated from the ``description`` of each field, so a field that
is not described does not exist.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from finray.config.adapter import AdapterConfig
from finray.config.checkpoint import CheckpointConfig
from finray.config.cluster import ClusterConfig
from finray.config.data import FIELDS, DataConfig, Format, SourceConfig
from finray.config.evaluation import EarlyStoppingConfig, EvaluationConfig
from finray.config.model import ModelConfig
from finray.config.parallel import ParallelConfig
from finray.config.prepare import PrepareConfig
from finray.config.run import NAME_PATTERN, RunConfig
from finray.config.section import Section
from finray.config.tracking import TrackingConfig
from finray.config.train import ProfileConfig, TrainConfig

__all__ = [
    "FIELDS",
    "NAME_PATTERN",
    "AdapterConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EarlyStoppingConfig",
    "EvaluationConfig",
    "Format",
    "ModelConfig",
    "ParallelConfig",
    "PrepareConfig",
    "ProfileConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TrackingConfig",
    "TrainConfig",
    "sections",
]


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
    def _can_stop_early(self) -> Config:
        if self.evaluation.early_stopping is not None and self.evaluation.every_steps is None:
            raise ValueError(
                "evaluation.early_stopping: the loss is looked at once, at the end; set evaluation.every_steps"
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
