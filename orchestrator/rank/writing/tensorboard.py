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
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]  # made at run time by protobuf
        )
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]  # made at run time by protobuf
        )
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        run.tensorboard.mkdir(mode=0o700, exist_ok=True)
        self._event: Any = Event
        self._summary: Any = Summary
        self._writer: Any = EventFileWriter(str(run.tensorboard))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pairs = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=pairs))
        )

    def close(self) -> None:
        self._writer.close()
