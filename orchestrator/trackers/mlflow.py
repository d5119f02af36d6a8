"""The tracker MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import State
from orchestrator.trainer.recorder import Tracker

SEND_EVERY_S = 1.0  # between two calls of the store, which may be far away
MOST_VALUES = 500  # values in a call; servers take 1000
NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")
TAG = "orchestrator.run"
STATUS = {State.FINISHED: "FINISHED", State.STOPPED: "KILLED", State.FAILED: "FAILED"}


@dataclass
class MLflowOptions:
    """`tracker.options` of `tracker.kind=mlflow`.

    Attributes:
        uri: of a tracking server or a database; None: files in the run's folder.
        experiment: in which the run is one.
    """

    uri: str | None = None
    experiment: str = "orchestrator"


class MLflow(Tracker):
    """`tracker.kind=mlflow`: files in the run's folder, or a server of the user's.

    A run of ours is one of MLflow's, to which later attempts add.
    """

    Options = MLflowOptions
    title = "MLflow's metrics"
    requires = ("mlflow", "mlflow-skinny")

    def __init__(self, run: RunDir, config: Config) -> None:
        super().__init__(run, config)
        # Plain files are safe on a shared file system with a single writer. MLflow prefers
        # databases, and requires this to be set.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # The training waits, and a failure is not known before the close. MLflow would try a
        # server that is gone for four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._error = Metric, MlflowException
        uri = self.options.uri or run.mlflow.absolute().as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._run_id = self._find_or_create_run()
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def _find_or_create_run(self) -> str:
        """Return the id of MLflow's run: an earlier attempt's, if there is one."""
        experiment, identity = self._find_or_create_experiment(), self.run.identity
        for begun in self._client.search_runs([experiment], f"tags.`{TAG}` = '{identity}'"):
            self._client.update_run(begun.info.run_id, status="RUNNING")
            return begun.info.run_id
        tags = {TAG: identity}
        created = self._client.create_run(experiment, tags=tags, run_name=self.run.path.name)
        return created.info.run_id

    def _find_or_create_experiment(self) -> str:
        name = self.options.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return self._client.create_experiment(name)
            except self._error:  # points of a sweep begin together, and another one was faster
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return experiment.experiment_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        for name, value in values.items():
            key = NOT_IN_NAMES.sub("_", name)
            self._waiting.append(self._metric(key, float(value), now_ms, step))
        if len(self._waiting) >= MOST_VALUES or time.monotonic() - self._sent >= SEND_EVERY_S:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:MOST_VALUES])
            del self._waiting[:MOST_VALUES]
        self._sent = time.monotonic()

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._run_id, STATUS[self.state])
