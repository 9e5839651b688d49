"""What the driver hands to every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from finray.config.resolved import Execution, PreparedRun
from finray.publishing.hub import Target
from finray.runtime.progress import Address


@dataclass(frozen=True, slots=True)
class Pushing:
    """Where rank 0 pushes checkpoints, and under which account; determined where the run was started."""

    target: Target
    endpoint: str
    token: str = field(repr=False)

    @classmethod
    def here(cls, target: Target) -> Pushing:
        """With the token and the Hub of this process."""
        from huggingface_hub import constants, get_token

        return cls(target, constants.ENDPOINT, get_token() or "")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the driver hands to every worker."""

    config: dict[str, Any]  # of the run, as plain types
    execution: Execution  # what the config leaves open; with what depends on the data, if these are prepared
    prepared: PreparedRun | None  # None while the data are being prepared; then the worker waits for the driver's
    run_dir: str  # the run directory
    start: str  # identifies this `finray train`
    threads: int  # number of threads of this worker
    listener: Address  # address at which the driver receives records
    hang_s: float | None = None  # how long the driver waits for a rank; None means forever
    shared_gpus: bool = False  # whether several workers may share a GPU
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # of the user, set in the worker's environment
    evaluator: dict[str, float] | None = None  # Ray resources for evaluations during training; None if there are none
    memory: str | None = None  # name prefix of the actors that keep checkpoints in memory; None if there are none
    push: Pushing | None = None  # where checkpoints are pushed; None if they are not
