"""MLflow: a tracking server, or any other address that its client accepts."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from finray.config.environment import set_default
from finray.config.identity import flatten
from finray.config.redact import redact_text
from finray.errors import ConfigError
from finray.tracking.follow import Cursor, Followed, Service, numbers_of

URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
# What a server takes at once, and the longest parameter and tag.
_METRICS, _PARAMS, _PARAM_TEXT, _TAG_TEXT = 1000, 100, 6000, 5000
# Names have at most so many characters, and none of these.
_NAME, _REFUSED = 250, re.compile(r"[^\w/.\- ]")


def address_of(tracking: Mapping[str, Any]) -> str:
    """The tracking URI from the config, else from the environment. Raises ConfigError: there is none."""
    address = tracking["mlflow_uri"] or os.environ.get(URI)
    if not address:
        raise ConfigError(
            "MLflow needs an address",
            where="tracking.mlflow_uri",
            repair=f"set it to the address of your server, such as http://127.0.0.1:5000, or set {URI}",
        )
    return str(address)


def name_of(text: str) -> str:
    """A text as MLflow takes it in a name, such as the label ``C++``: other characters as their number, ``C_2b_2b``."""
    return _REFUSED.sub(lambda match: f"_{ord(match[0]):x}", text)[:_NAME]


class MlflowService(Service):
    """A run of an experiment: parameters are the flattened config; metrics have the steps and times of the records."""

    def where(self, run: Followed) -> str:
        """Address and experiment."""
        tracking = run.config["tracking"]
        self._uri = address_of(tracking)
        self._experiment = tracking["mlflow_experiment"] or os.environ.get(EXPERIMENT) or "finray"
        return f"{redact_text(self._uri)} {self._experiment}"

    def open(self, run: Followed, known: Cursor | None) -> Cursor:
        """Find the run by its id, else by its tag, else create it."""
        # finray retries by itself, without keeping the run waiting.
        for name, value in (
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "15"),
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ):
            set_default(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag
        from mlflow.exceptions import MlflowException

        self._client: Any = MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        place = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        existing = None
        if known is not None:
            try:
                existing = self._client.get_run(known.run)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        if existing is None or existing.info.lifecycle_stage != "active":
            # Find the same finray run there, even if a kill came before its id was stored here.
            same = self._client.search_runs([place], f"tags.`finray.run_id` = '{run.run_id}'", max_results=1)
            run_tags = {"finray.run_id": run.run_id}
            existing = same[0] if same else self._client.create_run(place, run_name=run.name, tags=run_tags)
        self._run_id: str = existing.info.run_id
        settings = {
            name_of(path): (value if isinstance(value, str) else json.dumps(value))[:_PARAM_TEXT]
            for path, value in flatten(run.config).items()
        }
        known_there = existing.data.params
        tags = {
            "finray.run_dir": str(run.run_dir),
            "finray.final": str(run.run_dir / "final"),
            # A parameter cannot be changed; changes of later starts are stored as tags.
            **{
                f"changed.{path}"[:_NAME]: text[:_TAG_TEXT]
                for path, text in settings.items()
                if text != known_there.get(path, text)
            },
            **dict.fromkeys(map(name_of, run.config["tracking"]["tags"]), "true"),
        }
        entries = [Param(path, text) for path, text in settings.items() if path not in known_there]
        for start in range(0, len(entries), _PARAMS):
            self._client.log_batch(self._run_id, params=entries[start : start + _PARAMS])
        self._client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.update_run(self._run_id, status="RUNNING")
        self._experiment_id = existing.info.experiment_id
        # The server knows what it has: a kill may have come before the cursor was written.
        self._trained = max((point.step for point in self._history("train/loss")), default=0)
        return Cursor(
            self.where(run),
            self._run_id,
            train=self._trained,
            evaluated=[point.step for point in self._history("eval/eval_seconds")],
            system=max((point.timestamp for point in self._history("system/rss_bytes")), default=0) / 1000,
        )

    def _history(self, name: str) -> list[Any]:
        history: list[Any] = self._client.get_metric_history(self._run_id, name)
        return history

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Send metrics, those of a record together."""
        from mlflow.entities import Metric

        batch: list[Any] = []
        for record in records:
            at = round(record.get("time", time.time()) * 1000)
            metrics = [Metric(name_of(name), value, at, record["step"]) for name, value in numbers_of(record).items()]
            if len(batch) + len(metrics) > _METRICS:
                self._log(batch)
                batch = []
            batch += metrics
            if record["kind"] == "train":
                self._trained = max(self._trained, record["step"])
        self._log(batch)

    def _log(self, metrics: list[Any]) -> None:
        # A classifier of very many classes has records that are too large for one request.
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS])

    def close(self, *, complete: bool, totals: Mapping[str, float]) -> None:
        """Set the final status; a run that continues later is set to running again."""
        for name, value in totals.items():
            self._client.log_metric(self._run_id, name, value, step=self._trained)
        self._client.set_terminated(self._run_id, "FINISHED" if complete else "KILLED")

    def url(self) -> str:
        """The page of the run."""
        page = f"/#/experiments/{self._experiment_id}/runs/{self._run_id}"
        return redact_text(self._uri).rstrip("/") + page if self._uri.startswith("http") else ""
