"""The records of a run: `metrics.jsonl`, progress in the current window, sums.

A run may be killed in the middle of a line and may redo updates after a resume, so a reader meets
torn lines and updates that appear twice. `Tail` deals with the first, `History` with the second,
`recent_records` reads a long file in bounded time.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.rundir.files import open_nofollow, read_bytes
from orchestrator.rundir.warnings import warn

Record = dict[str, Any]
RECENT_BYTES = 64 * 1024
PACE_UPDATES = 50  # whose mean is the pace
CHANGES = ("survived", "joined")
"""Keys of a line about a change of the group: lost ranks, and replacements."""
_PROGRESS = struct.Struct("<qqqd")


class Kind(Enum):
    """The subject of a line of `metrics.jsonl`."""

    UPDATE = "an update"
    EVALUATION = "held-out figures after an update"
    CHANGE = "a change of the group"
    NOTE = "late warnings, or that a program saved"

    @classmethod
    def of(cls, record: Record) -> Kind:
        """Return the kind of a line. A program's updates need have no loss."""
        if "evaluation" in record:
            return cls.EVALUATION
        if "saved" in record:
            return cls.NOTE
        if "loss" in record:
            return cls.UPDATE
        if any(key in record for key in CHANGES):
            return cls.CHANGE
        return cls.NOTE if "warnings" in record else cls.UPDATE


class Tail:
    """Reads what was appended to a `metrics.jsonl` since the last read, in whole lines only.

    Lines that a killed writer left torn are skipped.

    Args:
        recent: begin with the whole lines in the present last bytes; None: with all lines.
    """

    def __init__(self, path: Path, recent: int | None = None) -> None:
        self.path, self._offset = path, 0
        if recent is not None and os.path.lexists(path):
            with os.fdopen(open_nofollow(path), "rb") as file:
                self._offset = max(0, file.seek(0, os.SEEK_END) - recent)
            if self._offset:
                data = self._read()
                self._offset += data.find(b"\n") + 1 or len(data)

    def read(self) -> list[Record]:
        """Return new complete records, oldest first; [] before the file exists."""
        data = self._read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.split(b"\n") if (record := _record(line)) is not None]

    def _read(self) -> bytes:
        try:
            descriptor = open_nofollow(self.path)
        except FileNotFoundError:
            return b""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(self._offset)
            return file.read()


class History:
    """The updates that count, in order, and their evaluations.

    Of lines for the same update the one with the higher attempt counts, and within an attempt the
    later one. When a later attempt begins at update u, what earlier attempts did from u on was
    thrown away with their weights, so those lines no longer count even before they are redone; nor
    do those that survivors of a loss redo from a checkpoint, within an attempt.

    `changes` has the lines about changes of the group, of all attempts.

    >>> history = History([{"update": 0, "attempt": 1}, {"update": 1, "attempt": 1}])
    >>> history.add([{"update": 0, "attempt": 2}])
    >>> history.updates
    [{'update': 0, 'attempt': 2}]
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._attempt = -1
        self.changes: list[Record] = []
        self._updates: dict[int, Record] = {}
        self._evaluations: dict[int, Record] = {}
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        """Add new records in the order in which they were written."""
        for record in records:
            kind = Kind.of(record)
            if kind is Kind.EVALUATION:
                self._evaluations[record["update"]] = record
            if kind not in (Kind.UPDATE, Kind.CHANGE):
                continue
            attempt = record.get("attempt", 0)
            if attempt < self._attempt:
                continue
            if attempt > self._attempt:
                self._forget_from(record["update"])
                self._attempt = attempt
            if kind is Kind.CHANGE:
                self.changes.append(record)
                if "lost_updates" in record.get("survived", ()):  # back to a checkpoint
                    self._forget_from(record["update"])
            else:
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


def read_metrics(path: Path) -> History:
    """Return all of a `metrics.jsonl`; empty if the run wrote none."""
    return History(Tail(path).read())


def _record(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("update"), int) else None


def recent_records(path: Path) -> list[Record]:
    """Return the latest lines of the latest attempt, evaluations included; [] without a file.

    Raises:
        OSError: it may not be read.
    """
    found = Tail(path, RECENT_BYTES).read()
    last = max((record.get("attempt", 0) for record in found), default=0)
    return [record for record in found if record.get("attempt", 0) == last]


def updates_of(records: Iterable[Record]) -> list[Record]:
    """Return the records of updates."""
    return [record for record in records if Kind.of(record) is Kind.UPDATE]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The costs of a run: totals of result.json and means of metrics.jsonl; None if unknown."""

    state: str
    updates: int
    samples: int | None
    loss: float | None
    seconds: float | None
    seconds_per_update: float | None
    samples_per_second: float | None
    time_shares: dict[str, float]
    collectives_per_update: float | None
    bytes_on_wire_per_update: float | None
    peak_memory_bytes: int | None
    memory_bytes: dict[str, int]
    metrics: dict[str, Any]


def summarize(result: Mapping[str, Any] | None, updates: Sequence[Record]) -> Summary:
    """Return the figures of a run from its result (None without one) and its update records."""
    result = result or {}
    count, samples = result.get("updates"), result.get("samples")
    ranks = [size for size in result.get("peak_memory_bytes") or [] if size is not None]
    seen = [r["peak_memory_bytes"] for r in updates if r.get("peak_memory_bytes") is not None]
    memory = (result.get("memory") or {}).items()
    rate = samples_per_second(updates)
    if rate is None and result.get("samples") and result.get("seconds"):
        rate = result["samples"] / result["seconds"]
    return Summary(
        state=str(result.get("state", "no result")),
        updates=len(updates) if count is None else count,
        samples=total(updates, "samples") if samples is None else samples,
        loss=result.get("loss"),
        seconds=result.get("seconds") or None,  # no update was made, or none was reported
        seconds_per_update=seconds_per_update(updates),
        samples_per_second=rate,
        time_shares=time_shares(updates),
        collectives_per_update=_per_update(result, updates, "collectives"),
        bytes_on_wire_per_update=_per_update(result, updates, "bytes_on_wire"),
        peak_memory_bytes=max(ranks or seen, default=None),
        memory_bytes={n: size for n, size in memory if size is not None and n != "peak"},
        metrics=dict(result.get("metrics") or {}),
    )


def seconds_of_earlier_attempts(updates: Sequence[Record], attempt: int) -> float:
    """Return how long the attempts before `attempt` trained, without updates that were redone.

    >>> times = [(0, 10.0), (0, 12.0), (1, 20.0)]
    >>> lines = [{"attempt": n, "time": time, "update_s": 1.0} for n, time in times]
    >>> seconds_of_earlier_attempts(lines, 1), seconds_of_earlier_attempts(lines, 2)
    (3.0, 4.0)
    """
    spans: dict[int, list[float]] = {}
    for record in updates:
        if (number := record.get("attempt", 0)) < attempt:
            began = record["time"] - (record.get("update_s") or 0.0)
            spans.setdefault(number, [began, began])[1] = record["time"]
    return sum(last - first for first, last in spans.values())


def seconds_per_update(updates: Sequence[Record]) -> float | None:
    """Return the median without the first update of each attempt, which also warms up caches.

    >>> seconds_per_update([{"update": n, "update_s": s} for n, s in enumerate([9.0, 1.0, 1.2])])
    1.1
    """
    timed = [r["update_s"] for r in _warm(updates)]
    return statistics.median(timed) if timed else None


def recent_pace(updates: Sequence[Record]) -> float | None:
    """Return the mean seconds from one update to the next, with evaluations and checkpoints between
    them; the first one's own where it is the only one.

    >>> recent_pace([{"time": t, "update_s": 1.0} for t in (10.0, 11.0, 14.0)])
    2.0
    """
    times = [r["time"] for r in updates if r.get("time") is not None][-PACE_UPDATES:]
    if len(times) > 1 and times[-1] > times[0]:
        return (times[-1] - times[0]) / (len(times) - 1)
    return updates[-1].get("update_s") if updates else None


def _warm(updates: Sequence[Record]) -> list[Record]:
    """Return timed updates without the first of each attempt, unless there are no others."""
    timed = [r for r in updates if r.get("update_s")]
    warm = [r for before, r in pairwise(updates) if r.get("attempt", 0) == before.get("attempt", 0)]
    return [r for r in warm if r.get("update_s")] or timed


def time_shares(updates: Sequence[Record]) -> dict[str, float]:
    """Return the shares of the updates' wall time; `other` is loading and bookkeeping.

    >>> time_shares([{"compute_s": 6.0, "wait_s": 2.0, "optimizer_s": 1.0, "update_s": 10.0}])
    {'compute': 0.6, 'wait': 0.2, 'optimizer': 0.1, 'other': 0.1}
    """
    parts = {name: total(updates, f"{name}_s") for name in ("compute", "wait", "optimizer")}
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    whole = max(total(updates, "update_s") or 0.0, sum(known.values()))
    if not known or whole <= 0:
        return {}
    shares = {name: seconds / whole for name, seconds in known.items()}
    return {**shares, "other": round(1 - sum(shares.values()), 12)}


def samples_per_second(updates: Sequence[Record]) -> float | None:
    """Return the mean rate without the first update of each attempt.

    >>> samples_per_second([{"samples": 8, "update_s": s} for s in (9.0, 1.0, 3.0)])
    4.0
    """
    timed = [r for r in _warm(updates) if r.get("samples") is not None]
    return sum(r["samples"] for r in timed) / sum(r["update_s"] for r in timed) if timed else None


def _per_update(result: Mapping[str, Any], updates: Sequence[Record], name: str) -> float | None:
    values = [r[name] for r in updates if r.get(name) is not None]
    if values:
        return sum(values) / len(values)
    if result.get(name) is not None and result.get("updates"):
        return result[name] / result["updates"]
    return None


def total(updates: Sequence[Record], name: str) -> Any:
    """Return the sum of a field over updates; None if no update has it."""
    values = [r[name] for r in updates if r.get(name) is not None]
    return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank's progress: update (from 0), micro-steps done and to do in it, time of writing."""

    update: int
    done: int
    steps: int
    time: float


class ProgressWriter:
    """Writes one rank's progress at every micro-step.

    By pwrite, not by a store into mapped memory: that kills the process (SIGBUS) on a full disk. A
    rank that takes over continues the file of the one before.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_nofollow(path, os.O_RDWR | os.O_CREAT)
        if os.fstat(self._descriptor).st_size < _PROGRESS.size:
            os.pwrite(self._descriptor, bytes(_PROGRESS.size), 0)

    def write(self, update: int, done: int, steps: int) -> None:
        """Write the progress; a failure is warned of once."""
        try:
            os.pwrite(self._descriptor, _PROGRESS.pack(update, done, steps, time.time()), 0)
        except OSError as error:
            warn(f"its progress could not be written: {error.strerror}", kind="no progress")


def read_progress(path: Path) -> RankProgress | None:
    """Return the latest progress; None before the first."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    if len(content) < _PROGRESS.size:
        return None
    progress = RankProgress(*_PROGRESS.unpack(content[: _PROGRESS.size]))
    return progress if progress.time > 0 else None
