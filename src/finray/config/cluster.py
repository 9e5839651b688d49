"""The ``cluster`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from finray.config.redact import is_secret_name
from finray.config.section import PositiveInt, Section


class ClusterConfig(Section):
    """Resources that the run asks Ray for."""

    address: str | None = Field(
        None,
        description="Address of a Ray cluster. null joins the cluster named by `RAY_ADDRESS`, or starts Ray on this "
        "machine.",
    )
    num_workers: PositiveInt = Field(1, description="Number of training workers.")
    cpus_per_worker: PositiveInt | None = Field(
        None, description="CPUs per worker. null shares the CPUs of the cluster evenly."
    )
    use_gpu: bool | Literal["auto"] = Field(
        "auto", description="One GPU per worker. `auto` uses GPUs if the cluster has enough of them."
    )
    max_failures: int = Field(3, ge=0, description="How often Ray may restart the workers from the last checkpoint.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the workers. Secrets are refused."
    )

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        secret = sorted(name for name in value if is_secret_name(name))
        if secret:
            raise ValueError(f"{', '.join(secret)} looks like a secret; set it in the environment of the nodes instead")
        return value
