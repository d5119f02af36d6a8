"""Reading `metrics.jsonl`, the one record of what a run did, while it grows and afterwards.

A run may be killed in the middle of a line and may redo updates after a resume, so a reader meets
torn lines and updates that appear twice. `Tail` deals with the first, `History` with the second.
Nothing here writes, waits or prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from orchestrator.errors import RunFolderError
from orchestrator.run_folder.files import open_regular
from orchestrator.run_folder.shapes import fits_record

Record = dict[str, Any]
MOST_TABLES = 64  # in a record
MOST_BYTES = 4 << 30  # of some million updates; what is larger no run has written


class Tail:
    """What was appended to a `metrics.jsonl` since the last look, in whole lines only.

    `damaged` counts lines that could not be read: a killed writer leaves at most one per attempt,
    so more than that is worth telling somebody.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0

    def skip_to_the_end(self, but: int = 0) -> None:
        """Count what is there as read, but for whole lines in the last `but` bytes."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                size = self._bounded_size(file)
                file.seek(max(0, size - but))
                data = file.read()
        except FileNotFoundError:
            return
        cut = data.find(b"\n") + 1 if size > but else 0
        self._offset = size - len(data) + (cut or len(data))

    def read(self) -> list[Record]:
        """New complete records, oldest first; empty when there is no file yet.

        A file that became shorter was cut back by a resume: it is read from its start again, which
        `History` takes without counting anything twice.
        """
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                if self._bounded_size(file) < self._offset:
                    self._offset = 0
                data = self._unread(file)
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return self._parse(data[:end].split(b"\n")[:-1])

    def rest(self) -> list[Record]:
        """A last line without its line feed, if it is a whole record. For runs that have ended."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                data = self._unread(file)
        except FileNotFoundError:
            return []
        records = self._parse([data])
        self._offset += len(data)
        return records

    def _unread(self, file: BinaryIO) -> bytes:
        self._bounded_size(file)
        file.seek(self._offset)
        return file.read()

    def _bounded_size(self, file: BinaryIO) -> int:
        size = file.seek(0, os.SEEK_END)
        if size > MOST_BYTES:
            raise RunFolderError(f"{self.path} is damaged: it is larger than {MOST_BYTES} bytes")
        return size

    def _parse(self, lines: Iterable[bytes]) -> list[Record]:
        records: list[Record] = []
        for line in lines:
            text = line.decode("utf-8", "replace").strip("\0 \t\r\n")
            if not text:
                continue
            record = record_of(text)
            if record is None:
                self.damaged += 1
                # A torn line and the first one of the next attempt can share a line.
                record = _record_at_end(text)
            if record is not None:
                records.append(record)
        return records


class History:
    """The updates that count, in order, and the evaluations that belong to them.

    Of lines for the same update the one with the higher attempt counts, and within an attempt the
    later one. When a later attempt begins at update u, what earlier attempts did from u on was
    thrown away with their weights, so those lines no longer count even before they are redone; nor
    do those that survivors of a loss redo from a checkpoint, within an attempt.

    >>> history = History([{"update": 0, "attempt": 1}, {"update": 1, "attempt": 1}])
    >>> history.add([{"update": 0, "attempt": 2}])
    >>> history.updates
    [{'update': 0, 'attempt': 2}]
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._attempt = -1
        self._updates: dict[int, Record] = {}
        self._evaluations: dict[int, Record] = {}
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        """Take new records in the order in which they were written."""
        for record in records:
            if "evaluation" in record:
                self._evaluations[record["update"]] = record
                continue
            if tells_no_update(record):
                continue
            attempt = record.get("attempt", 0)
            if attempt < self._attempt:
                continue
            if attempt > self._attempt:
                self._forget_from(record["update"])
                self._attempt = attempt
            if "lost_updates" in record.get("survived", ()):  # back to a checkpoint in its midst
                self._forget_from(record["update"])
            self._updates[record["update"]] = record

    def _forget_from(self, update: int) -> None:
        self._updates = {n: r for n, r in self._updates.items() if n < update}
        self._evaluations = {n: r for n, r in self._evaluations.items() if n < update}

    @property
    def updates(self) -> list[Record]:
        """One record per update that counts, by update."""
        return [self._updates[n] for n in sorted(self._updates)]

    @property
    def evaluations(self) -> list[Record]:
        """One record per evaluation that counts, by update."""
        return [self._evaluations[n] for n in sorted(self._evaluations)]

    @property
    def attempt(self) -> int:
        """The latest attempt seen; -1 before the first record."""
        return self._attempt


def tells_no_update(record: Record) -> bool:
    """Whether a line is none of an update: warnings that came up after the last, or that a program
    has saved.
    """
    return "saved" in record or ("warnings" in record and "loss" not in record)


def read_metrics(path: Path) -> History:
    """All of a `metrics.jsonl`; empty when the run ended before it wrote one."""
    tail = Tail(path)
    history = History(tail.read())
    history.add(tail.rest())
    return history


def record_of(text: str) -> Record | None:
    """One line as a record, or None when it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("Record", value) if fits_record(value) else None


def _record_at_end(text: str) -> Record | None:
    """The whole record with which a damaged line ends, if there is one. What begins at a table in
    it is none: its end is one of too many.
    """
    start = len(text)
    for _ in range(MOST_TABLES):
        start = text.rfind('{"', 1, start)
        if start == -1:
            return None
        record = record_of(text[start:])
        if record is not None:
            return record
    return None
