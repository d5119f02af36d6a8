"""The built-in trackers: TensorBoard, MLflow, Weights & Biases, each by its own package.

A package is imported once its tracker is chosen.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import EXIT_CODES, State
from orchestrator.trainer.recorder import Tracker


class TensorBoard(Tracker):
    """`tracker.kind=tensorboard`: event files, for which no framework is needed."""

    title = "TensorBoard's events"

    def __init__(self, run: RunDir, config: Config) -> None:
        super().__init__(run, config)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        run.tensorboard.mkdir(mode=0o700, exist_ok=True)
        self._events: Any = event_pb2  # protobuf makes what is in them at run time
        self._summaries: Any = summary_pb2
        # The beginning is what TensorBoard looks for; it reads files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = FileIO(run.tensorboard / name, "x")
        # EventFileWriter writes in a thread, and drops its errors.
        self._records: Any = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")

    def _add(self, **content: Any) -> None:
        self._records.write(
            self._events.Event(wall_time=time.time(), **content).SerializeToString()
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summaries.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._add(step=step, summary=summary)

    def close(self) -> None:
        self._file.close()


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
        made = self._client.create_run(experiment, tags=tags, run_name=self.run.path.name)
        return made.info.run_id

    def _find_or_create_experiment(self) -> str:
        name = self.options.experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except self._error:  # points of a sweep begin together, and another one was faster
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

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


# The scalars, and nothing of the machine, the code or what is printed: these stay ours.
QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


@dataclass
class WandBOptions:
    """`tracker.options` of `tracker.kind=wandb`."""

    project: str = "orchestrator"


class WandB(Tracker):
    """`tracker.kind=wandb`: offline, in the run's folder. Nothing is sent anywhere; `wandb sync`
    does that, when you want it.

    Every attempt has a folder of its own, under the same id.
    """

    Options = WandBOptions
    title = "what Weights & Biases is to keep"

    def __init__(self, run: RunDir, config: Config) -> None:
        super().__init__(run, config)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._end: Any = wandb.teardown
        run.wandb.mkdir(mode=0o700, exist_ok=True)
        folder = run.wandb / f"{len(list(run.wandb.iterdir())):03d}"
        folder.mkdir(mode=0o700)
        self._run: Any = wandb.init(
            dir=str(folder),
            mode="offline",
            project=self.options.project,
            name=run.path.name,
            id=run.identity,
            resume="allow",
            settings=wandb.Settings(**QUIET),
        )
        # Its own steps only grow, while an update comes twice after a resume.
        self._run.define_metric("*", step_metric="update")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"update": step, **values})

    def close(self) -> None:
        self._run.finish(EXIT_CODES[self.state])
        self._end()  # its service's process has written all, and is gone
