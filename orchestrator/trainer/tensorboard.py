"""The default tracker: TensorBoard's event files."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import FileIO
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.rundir.folder import RunDir
from orchestrator.trainer.recorder import Tracker


class TensorBoard(Tracker):
    """`tracker.kind=tensorboard`: event files, for which no framework is needed."""

    title = "TensorBoard's events"
    requires = ("tensorboard", "tensorboard")

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
