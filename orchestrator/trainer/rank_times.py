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
NONE = -1  # in the place of an update


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
        self._found: dict[str, dict[str, Any]] = {}  # rank 0's

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
        chosen = [int(update) for update in self._gather(self._choice(self._first, rows))[0]]
        mine = dict([self._first, *rows])
        unknown = (math.nan,) * len(PARTS)
        rows_of_ranks = self._gather([s for update in chosen for s in mine.get(update, unknown)])
        if self._file is not None:
            self._keep(chosen, rows_of_ranks)
            self._write(self._file)

    def _choice(self, first: Row, rows: Sequence[Row]) -> list[float]:
        """Choose an update for each of `KINDS`; `NONE` keeps the present one. Rank 0 decides."""
        by_length = sorted(rows, key=_length)
        slowest, typical = by_length[-1], by_length[len(by_length) // 2]
        before = self._found.get("slowest")
        exceeded = before is None or _length(slowest) > before["update_s"][0]
        chosen = (
            None if "first" in self._found else first,
            typical,
            slowest if exceeded else None,
            rows[-1],
        )
        return [float(NONE if one is None else one[0]) for one in chosen]

    def _keep(self, chosen: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
        for place, (kind, update) in enumerate(zip(KINDS, chosen, strict=True)):
            if update == NONE:
                continue
            columns = {
                part: [round(row[place * len(PARTS) + number], 6) for row in rows]
                for number, part in enumerate(PARTS)
            }
            self._found[kind] = {"kind": kind, "update": update, **columns}

    def _write(self, file: Path) -> None:
        try:
            write_json(file, {"windows": [self._found[k] for k in KINDS if k in self._found]})
        except OSError as error:  # only the picture is lost
            why = error.strerror or str(error)
            warn(f"{file.name} could not be written: {why}", kind="timeline not written")


def _length(row: Row) -> float:
    return row[1][-1]
