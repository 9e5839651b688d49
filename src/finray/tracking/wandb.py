"""Weights & Biases: online, or as offline files that `wandb sync` sends later."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from finray.tracking.follow import Cursor, Followed, Service, numbers_of

KEY, MODE, ADDRESS, PROJECT, ENTITY = "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY"
_MODES = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}
# Timeouts for reaching the service, and for sending the last records.
_START_S, _FINISH_S = 30.0, 25.0


def mode_of(tracking: Mapping[str, Any]) -> str:
    """`online` or `offline`: the config's, else the environment's, which may also be `disabled`: nothing is written."""
    return str(tracking["wandb_mode"] or _MODES.get(os.environ.get(MODE, "").lower(), "online"))


def address() -> str:
    """The service's address: the environment's, else the one that its client has."""
    if not (address := os.environ.get(ADDRESS)):
        import wandb

        address = str(wandb.Settings().base_url)
    return address.rstrip("/")


class WandbService(Service):
    """A run of a project, with finray's run id, which is the same at every start.

    Each record is a separate row: an evaluation of an earlier step may arrive after later steps. Charts use the steps
    in the records as x axis.
    """

    def where(self, run: Followed) -> str:
        """Address, entity and project; offline files have no address."""
        tracking = run.config["tracking"]
        self._mode = mode_of(tracking)
        self._project = tracking["wandb_project"] or os.environ.get(PROJECT) or "finray"
        self._entity = tracking["wandb_entity"] or os.environ.get(ENTITY)
        place = address() if self._mode == "online" else self._mode
        return f"{place} {self._entity or ''}/{self._project}"

    def open(self, run: Followed, known: Cursor | None) -> Cursor:
        """Start the run there, or resume it."""
        import wandb

        where = self.where(run)
        if self._mode == "offline":
            # wandb's process buffers rows in memory, and a kill loses them. So each start writes the whole run, into a
            # single folder.
            if folders := [*(run.run_dir / "wandb").glob(f"offline-run-*-{run.run_id}")]:
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                # Folders are named by the second, and the process of a killed start may still write into its own.
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
            # Do not affect other runs of this process.
            reinit="create_new",
            settings=wandb.Settings(
                # Otherwise wandb uses the settings from its first use in this process.
                base_url=address(),
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                disable_code=True,
                # The command line is private, and finray records the machine's metrics itself.
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
            # Records in flight when a process was killed are lost, and a cursor from storage may be outdated. The
            # service knows what it has.
            summary = self._run.summary
            known = as_far_as(known, *(summary.get(f"{kind}/{name}") for kind, name in _MARKS))
        return known

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Pass rows to wandb's process, which writes them to a file and sends them."""
        for record in records:
            row = {**numbers_of(record), f"{record['kind']}/step": record["step"]}
            self._run.log({**row, f"{record['kind']}/time": record["time"]} if "time" in record else row)

    def close(self, *, complete: bool, totals: Mapping[str, float]) -> None:
        """Wait until everything is sent; a run that continues later is marked as failed until then."""
        self._run.summary.update(dict(totals))
        self._run.finish(exit_code=0 if complete else 1)

    def url(self) -> str:
        """The page of the run."""
        return str(self._run.url or "")


# The numbers that tell what the service has: of the last record of each kind.
_MARKS = (("train", "step"), ("eval", "step"), ("system", "time"))


def as_far_as(known: Cursor, train: float | None, evaluated: float | None, system: float | None) -> Cursor:
    """A cursor for what the service has.

    Args:
        known: what was sent, in an order that the service keeps.
        train: step of the last training record there; None if there is none.
        evaluated: step of the last evaluation.
        system: time of the last system record.
    """
    last = [] if evaluated is None else [int(evaluated)]
    sent = known.evaluated
    there = sent[: sent.index(last[0]) + 1] if last and last[0] in sent else [*sent, *last] if last else []
    return replace(known, train=int(train or 0), evaluated=there, system=system or 0.0)
