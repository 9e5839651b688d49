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
    """What the driver hands to every worker.

    Attributes:
        config: of the run, as plain types.
        execution: what the config leaves open; with what depends on the data, if these are prepared.
        prepared: None while the data are being prepared; then the worker waits for the driver's.
        run_dir: the run directory.
        start: identifies this `finray train`.
        threads: number of threads of this worker.
        shared_gpus: whether several workers may share a GPU.
        listener: address at which the driver receives records.
        hang_s: how long the driver waits for a rank; None means forever.
        secrets: of the user, set in the worker's environment.
        memory: name prefix of the actors that keep checkpoints in memory; None if there are none.
        evaluator: Ray resources for evaluations during training; None if there are none.
        push: where checkpoints are pushed; None if they are not.
    """

    config: dict[str, Any]
    execution: Execution
    prepared: PreparedRun | None
    run_dir: str
    start: str
    threads: int
    listener: Address
    hang_s: float | None = None
    shared_gpus: bool = False
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    evaluator: dict[str, float] | None = None
    memory: str | None = None
    push: Pushing | None = None
