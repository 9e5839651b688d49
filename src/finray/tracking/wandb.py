"""Weights & Biases: online, or as files of its own that its program sends later."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from finray.tracking.follow import Cursor, Followed, Service, numbers_of

KEY, MODE, ADDRESS, PROJECT, ENTITY = "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY"
# How long it may take to reach the service, and to hand over the last records.
_START_S, _FINISH_S = 30.0, 25.0


def mode_of(tracking: Mapping[str, Any]) -> str:
    """`online` or `offline`: the config's, else the environment's."""
    return str(tracking["wandb_mode"] or ("offline" if os.environ.get(MODE) == "offline" else "online"))


def address() -> str:
    """The service's address: the environment's, else the one that its client has."""
    if not (found := os.environ.get(ADDRESS)):
        import wandb

        found = str(wandb.Settings().base_url)
    return found.rstrip("/")


class WandbService(Service):
    """A run of a project, under finray's id of it, which is the same at every start.

    A record is a row of its own: an evaluation of an earlier step may come after later steps. Charts are drawn over the
    steps in the records.
    """

    def where(self, run: Followed) -> str:
        """Address, entity and project; files of its own have no address."""
        tracking = run.config["tracking"]
        self._mode = mode_of(tracking)
        self._project = tracking["wandb_project"] or os.environ.get(PROJECT) or "finray"
        self._entity = tracking["wandb_entity"] or os.environ.get(ENTITY)
        place = address() if self._mode == "online" else "offline"
        return f"{place} {self._entity or ''}/{self._project}"

    def open(self, run: Followed, known: Cursor | None) -> Cursor:
        """Begin the run there, or go on with it."""
        import wandb

        where = self.where(run)
        if self._mode == "offline":
            # Its process keeps rows in memory for a while, and a kill takes them along. So each start writes the whole
            # run, and there is one folder of it.
            if folders := [*(run.run_dir / "wandb").glob(f"offline-run-*-{run.run_id}")]:
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                # Folders are named by the second, and the process of a start that was killed may still write into its.
                time.sleep(1.1)
            known = None
        self._run: Any = wandb.init(
            project=self._project,
            entity=self._entity,
            id=run.run_id,
            name=run.name,
            resume="allow",
            mode=self._mode,
            dir=str(run.run_dir),
            config=run.config,
            tags=list(run.config["tracking"]["tags"]),
            # No other run of this process is concerned.
            reinit="create_new",
            settings=wandb.Settings(
                # Else what it read when it was first used in this process.
                base_url=address(),
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                disable_code=True,
                # The command line is nobody's business, and the machine's numbers are records.
                program="finray",
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                init_timeout=_START_S,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )
        for kind in ("train", "eval", "system"):
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        if known is None:
            known = Cursor(where, run.run_id)
        if self._mode == "online":
            # What was on its way when a process was killed is not there, and a cursor that was fetched from storage may
            # be an older one. The service knows how far it came.
            summary = self._run.summary
            known = as_far_as(known, *(summary.get(f"{kind}/{name}") for kind, name in _MARKS))
        return known

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Hand rows to its own process, which keeps them in a file and sends them."""
        for record in records:
            row = {**numbers_of(record), f"{record['kind']}/step": record["step"]}
            self._run.log({**row, f"{record['kind']}/time": record["time"]} if "time" in record else row)

    def close(self, *, complete: bool) -> None:
        """Wait until it has sent everything; a run that goes on later is marked as failed until then."""
        self._run.finish(exit_code=0 if complete else 1)

    def url(self) -> str:
        """The page of the run."""
        return str(self._run.url or "")


# By which numbers the service tells how far it has come: of the last record of each kind.
_MARKS = (("train", "step"), ("eval", "step"), ("system", "time"))


def as_far_as(known: Cursor, train: float | None, evaluated: float | None, system: float | None) -> Cursor:
    """A cursor that says what the service has.

    Args:
        known: what was handed over, in an order that the service keeps.
        train: step of the last training record there; None where there is none.
        evaluated: step of the last evaluation.
        system: time of the last record of the machine.
    """
    last = [] if evaluated is None else [int(evaluated)]
    sent = known.evaluated
    there = sent[: sent.index(last[0]) + 1] if last and last[0] in sent else [*sent, *last] if last else []
    return replace(known, train=int(train or 0), evaluated=there, system=system or 0.0)
