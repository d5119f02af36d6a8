"""Times of all ranks in a few windows, which the report draws as a timeline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.client.loop import Callback, Done
from orchestrator.rundir.files import write_json
from orchestrator.rundir.warnings import warn

LATEST = 1024  # windows that a rank keeps, besides the first
Row = tuple[int, tuple[float, ...]]  # an update, and its seconds in the order of `PARTS`
KINDS = ("first", "typical", "slowest", "last")
PARTS = ("compute_s", "wait_s", "optimizer_s", "update_s")
UNKNOWN = (math.nan,) * len(PARTS)


class RankTimes(Callback):
    """The seconds of one rank's windows, in one attempt.

    Args:
        gather: see `Engine.gather`.
        file: where rank 0 writes the times of all ranks; None on the others.
    """

    def __init__(
        self, gather: Callable[[Sequence[float]], list[list[float]]], file: Path | None
    ) -> None:
        self._gather, self._file = gather, file
        self._first: Row | None = None
        self._latest = deque[Row](maxlen=LATEST)
        self._meetings = 0
        self._slowest: dict[str, Any] | None = None

    def on_boundary(self, done: Done) -> None:
        report = done.report
        row = (report.update, (report.compute_s, report.wait_s, report.optimizer_s, done.seconds))
        if self._first is None:
            self._first = row
        else:
            self._latest.append(row)

    def on_meeting(self, *, last: bool) -> None:
        """Gather the seconds of chosen windows from all ranks, ever more seldom."""
        self._meetings += 1
        seldom = not self._meetings & (self._meetings - 1)  # a power of two
        if self._first is None or not (seldom or last):
            return
        rows = list(self._latest) or [self._first]
        by_length = sorted(rows, key=lambda row: row[1][-1])
        mine = (self._first, by_length[len(by_length) // 2], by_length[-1], rows[-1])
        chosen = self._gather([float(update) for update, _ in mine])[0]  # rank 0 decides
        known = dict([self._first, *rows])
        ranks = self._gather([s for one in chosen for s in known.get(int(one), UNKNOWN)])
        if self._file is not None:
            self._write(self._file, [int(update) for update in chosen], ranks)

    def _write(self, file: Path, chosen: Sequence[int], ranks: Sequence[Sequence[float]]) -> None:
        windows: dict[str, dict[str, Any]] = {}
        for place, (kind, update) in enumerate(zip(KINDS, chosen, strict=True)):
            columns = {
                part: [round(row[place * len(PARTS) + number], 6) for row in ranks]
                for number, part in enumerate(PARTS)
            }
            windows[kind] = {"kind": kind, "update": update, **columns}
        before, slowest = self._slowest, windows["slowest"]
        if before is not None and before["update_s"][0] >= slowest["update_s"][0]:
            windows["slowest"] = before
        self._slowest = windows["slowest"]
        try:
            write_json(file, {"windows": list(windows.values())})
        except OSError as error:  # only the picture is lost
            why = error.strerror or str(error)
            warn(f"{file.name} could not be written: {why}", kind="timeline not written")
