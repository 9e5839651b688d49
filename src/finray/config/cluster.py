"""What the run asks of Ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from finray.config.redact import is_secret_name
from finray.config.section import PositiveInt, Section


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
