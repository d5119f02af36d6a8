"""TensorBoard event files, written by the tensorboard package itself; no framework needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.rank.writing.tracker import Tracker
from orchestrator.run_folder.rundir import RunDir


class TensorBoard(Tracker):
    """`tracker.kind=tensorboard`."""

    title = "TensorBoard's events"

    def __init__(self, run: RunDir, config: Config) -> None:
        super().__init__(run, config)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        run.tensorboard.mkdir(mode=0o700, exist_ok=True)
        self._events: Any = event_pb2  # protobuf makes what is in them at run time
        self._summaries: Any = summary_pb2
        self._writer: Any = EventFileWriter(str(run.tensorboard))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summaries.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()
