"""The configuration: all sections together, and the rules that hold between them.

The reference page and ``finray init`` are generated from the ``description`` of each field, so every field has one.
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
from finray.config.run import RunConfig
from finray.config.section import Section, section_of
from finray.config.tracking import TrackingConfig
from finray.config.train import ProfileConfig, TrainConfig

__all__ = [
    "FIELDS",
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

    run: RunConfig = Field(default_factory=RunConfig, description="The name of the run and where it is kept.")
    model: ModelConfig = Field(description="Which model is trained.")
    adapter: AdapterConfig = Field(default_factory=AdapterConfig, description="Which weights are trained.")
    data: DataConfig = Field(description="Where examples come from and how they become tokens.")
    prepare: PrepareConfig = Field(default_factory=PrepareConfig, description="How and where data is prepared.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="Optimisation.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How the work is divided between workers."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When checkpoints are saved and how long they are kept."
    )
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="Evaluation during and after training."
    )
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Where metrics are written.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Resources that the run asks Ray for.")

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        data, evaluation = self.data, self.evaluation
        if self.parallel.strategy == "deepspeed" and self.train.optimizer in ("adafactor", "muon"):
            raise ValueError(
                f"train.optimizer: {self.train.optimizer} needs whole matrices, but DeepSpeed flattens them; use adamw "
                "or an 8-bit optimizer, or set parallel.strategy to fsdp"
            )
        if self.adapter.method == "none":
            if self.model.quantization in ("4bit", "8bit"):
                raise ValueError(
                    "model.quantization: quantised weights cannot be trained; set adapter.method to lora, or "
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
        if evaluation.every_steps is not None and not (by_name or data.eval_ratio):
            raise ValueError(
                "evaluation.every_steps: there is nothing to evaluate on; set data.eval_ratio, data.eval_split or "
                "data.eval_source"
            )
        if evaluation.early_stopping is not None and evaluation.every_steps is None:
            raise ValueError(
                "evaluation.early_stopping: without evaluation.every_steps the loss is evaluated only once, at the "
                "end; set evaluation.every_steps"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON types."""
        return self.model_dump(mode="json")


def sections() -> dict[str, type[Section]]:
    """Section name to its model, in the order of the file."""
    kinds = {name: section_of(field.annotation) for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}
