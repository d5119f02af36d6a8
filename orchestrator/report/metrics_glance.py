"""A glance at `metrics.jsonl` in bounded time, however long the run: its end and its loss so far.

Lines that are torn or damaged are passed over; what is asked for is a glance, not an account.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.report.metrics import Record, record_of, tells_no_update
from orchestrator.run_folder.files import open_regular

RECENT_BYTES = 64 * 1024
WHOLE_BYTES = 256 * 1024  # up to here all of the file is read
PIECE_BYTES = 4 * 1024  # a few lines


def recent_records(path: Path) -> list[Record]:
    """The latest lines of the latest attempt, evaluations among them; empty without a file.

    Raises:
        OSError: it may not be read.
    """
    found = list(_records(_piece(path, -RECENT_BYTES)))
    last = max((record.get("attempt", 0) for record in found), default=0)
    return [record for record in found if record.get("attempt", 0) == last]


def updates_of(records: Iterable[Record]) -> list[Record]:
    """Those of them that tell of an update."""
    return [r for r in records if "evaluation" not in r and not tells_no_update(r)]


def loss_course(path: Path, points: int) -> list[float]:
    """Losses from the beginning to now, at most about `points` of them, evenly over the file."""
    size = path.stat().st_size if path.exists() else 0
    if size <= WHOLE_BYTES:
        pieces = [_piece(path, 0, size)]
    else:
        step = size / max(1, points - 1)
        starts = [int(step * n) for n in range(points - 1)]
        pieces = [_first_line(_piece(path, start, PIECE_BYTES)) for start in starts]
        pieces.append(b"\n".join(_piece(path, -PIECE_BYTES).split(b"\n")[-2:]))
    # What a later attempt did again replaces what was done first.
    losses: dict[int, float] = {}
    for piece in pieces:
        for record in updates_of(_records(piece)):
            if record["update"] <= max(losses, default=-1):
                losses = {n: loss for n, loss in losses.items() if n < record["update"]}
            if record.get("loss") is not None:
                losses[record["update"]] = float(record["loss"])
    course = [losses[update] for update in sorted(losses)]
    if len(course) <= points:
        return course
    return [course[round(n * (len(course) - 1) / (points - 1))] for n in range(points)]


def _first_line(piece: bytes) -> bytes:
    """The first whole line of a piece from the middle of the file."""
    lines = piece.split(b"\n")
    return b"\n".join(lines[1:2]) + b"\n" if len(lines) > 2 else b""


def _piece(path: Path, start: int, length: int = RECENT_BYTES) -> bytes:
    """Bytes of the file from `start`, counted from its end where negative."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size + start) if start < 0 else start)
        content = file.read(length)
    if start < 0 and size > -start:
        content = content.partition(b"\n")[2]
    return content


def _records(content: bytes) -> Iterable[Record]:
    for line in content.split(b"\n")[:-1]:
        record = record_of(line.decode("utf-8", errors="replace").strip("\0 \t\r"))
        if record is not None:
            yield record
