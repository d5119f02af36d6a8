"""The records of a run: `metrics.jsonl`, progress in the current window, sums.

A run may be killed in the middle of a line and may redo updates after a resume, so a reader meets
torn lines and updates that appear twice. `Tail` deals with the first, `History` with the second,
`recent_records` reads a long file in bounded time.

A run may also record millions of updates. A long file is read line by line, and its history keeps
where the records are, not the records; `Figures` sums them up in one pass.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import struct
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, overload

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import open_nofollow, read_bytes
from orchestrator.rundir.warnings import warn

Record = dict[str, Any]
HELD_OUT = "held_out."  # begins the names of figures of evaluations
RECENT_BYTES = 64 * 1024
KEPT_BYTES = 4 * 1024**2
"""Largest file whose records are kept (some 30 MiB), which saves reading them again."""
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
                    file.seek(self._offset)
                    self._offset += len(file.readline())
        self.from_start = not self._offset

    def read(self) -> list[Record]:
        """Return new complete records, oldest first; [] before the file exists."""
        return [record for _, record in self.lines()]

    def lines(self) -> Iterator[tuple[int, Record]]:
        """Yield new complete records, oldest first, each with its line's position in the file."""
        for position, line in self.raw_lines():
            if (record := _record(line)) is not None:
                yield position, record

    def raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield new whole lines, oldest first, each with its position in the file."""
        try:
            descriptor = open_nofollow(self.path)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position = self._offset
                self._offset += len(line)
                yield position, line


class StoredRecords(Sequence[Record]):
    """Records of a `metrics.jsonl`, read again at each use: one at a time, or all in one pass.

    Args:
        positions: of their lines in the file.
    """

    def __init__(self, path: Path, positions: Sequence[int]) -> None:
        self._path, self._positions = path, positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> StoredRecords: ...
    def __getitem__(self, index: int | slice) -> Record | StoredRecords:
        if isinstance(index, slice):
            return StoredRecords(self._path, self._positions[index])
        return next(self._read([self._positions[index]]))

    def __iter__(self) -> Iterator[Record]:
        return self._read(self._positions)

    def _read(self, positions: Iterable[int]) -> Iterator[Record]:
        with os.fdopen(open_nofollow(self._path), "rb") as file:
            end = 0
            for position in positions:
                if position != end:  # between them are lines that do not count
                    file.seek(position)
                line = file.readline()
                end = position + len(line)
                if (record := _record(line)) is None:
                    raise RunFolderError(
                        f"{self._path} was changed while it was read, or is damaged at byte "
                        f"{position}"
                    )
                yield record


class _Index:
    """The position of each update's record: 16 bytes each."""

    def __init__(self) -> None:
        self._numbers, self._positions = array("q"), array("q")
        self._is_sorted = True

    def add(self, update: int, position: int) -> None:
        if self._numbers and update <= self._numbers[-1]:
            self._is_sorted = False
        self._numbers.append(update)
        self._positions.append(position)

    def forget_from(self, update: int) -> None:
        first = bisect_left(self._sorted(), update)
        del self._numbers[first:], self._positions[first:]

    @property
    def positions(self) -> array[int]:
        """Return one position per update, by update; of an update that was redone, the last."""
        self._sorted()
        return self._positions

    def position_of(self, update: int) -> int | None:
        numbers = self._sorted()
        place = bisect_left(numbers, update)
        is_here = place < len(numbers) and numbers[place] == update
        return self._positions[place] if is_here else None

    def holds_with_earlier(self, update: int) -> bool:
        """Return True if `update` and one before it are here."""
        return self.position_of(update) is not None and self._numbers[0] < update

    def _sorted(self) -> array[int]:
        if not self._is_sorted:
            latest = sorted(dict(zip(self._numbers, self._positions, strict=True)).items())
            self._numbers = array("q", [update for update, _ in latest])
            self._positions = array("q", [position for _, position in latest])
            self._is_sorted = True
        return self._numbers


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
        self._updates, self._evaluations = _Index(), _Index()
        self._records: list[Record] = []
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        """Add new records in the order in which they were written."""
        for record in records:
            self._note(record, len(self._records))
            self._records.append(record)

    def _note(self, record: Record, position: int) -> None:
        """Note the next record, which `_read` finds at `position`."""
        kind = Kind.of(record)
        if kind is Kind.EVALUATION:
            self._evaluations.add(record["update"], position)
        if kind is Kind.UPDATE:
            self._note_update(record["update"], record.get("attempt", 0), position)
        elif kind is Kind.CHANGE and self._is_latest(record["update"], record.get("attempt", 0)):
            self.changes.append(record)
            if "lost_updates" in record.get("survived", ()):  # back to a checkpoint
                self._forget_from(record["update"])

    def _note_update(self, update: int, attempt: int, position: int) -> None:
        if attempt == self._attempt or self._is_latest(update, attempt):
            self._updates.add(update, position)

    def _is_latest(self, update: int, attempt: int) -> bool:
        """Return whether a line is of the latest attempt, of which it may be the first one."""
        if attempt > self._attempt:
            self._forget_from(update)
            self._attempt = attempt
        return attempt == self._attempt

    def _forget_from(self, update: int) -> None:
        self._updates.forget_from(update)
        self._evaluations.forget_from(update)

    @property
    def updates(self) -> Sequence[Record]:
        """One record per update that counts, by update."""
        return self._read(self._updates.positions)

    @property
    def evaluations(self) -> Sequence[Record]:
        """One record per evaluation that counts, by update."""
        return self._read(self._evaluations.positions)

    def update(self, number: int) -> Record | None:
        """Return the record of an update that counts."""
        position = self._updates.position_of(number)
        return None if position is None else self._read([position])[0]

    def evaluation(self, number: int) -> Record | None:
        """Return the evaluation after an update that counts."""
        position = self._evaluations.position_of(number)
        return None if position is None else self._read([position])[0]

    def is_known(self, number: int) -> bool:
        """Return True if lines before those that were added could not change what is known of an
        update: they are those of its predecessors.
        """
        return self._updates.holds_with_earlier(number)

    def _read(self, positions: Sequence[int]) -> Sequence[Record]:
        return [self._records[position] for position in positions]


class StoredHistory(History):
    """A history that keeps the positions of its records in a file, in place of the records.

    Of most lines it needs two numbers, so it does not parse the others.
    """

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self._path = tail.path
        for position, line in tail.raw_lines():
            if (numbers := _numbers_of_update(line)) is not None:
                self._note_update(*numbers, position)
            elif (record := _record(line)) is not None:
                self._note(record, position)

    def _read(self, positions: Sequence[int]) -> Sequence[Record]:
        return StoredRecords(self._path, positions)


def read_metrics(path: Path) -> History:
    """Return all of a `metrics.jsonl`; empty if the run wrote none."""
    if not os.path.lexists(path) or path.lstat().st_size <= KEPT_BYTES:
        return History(Tail(path).read())
    return StoredHistory(Tail(path))


def read_metrics_around(path: Path, update: int) -> History:
    """Return the last part of a `metrics.jsonl` that tells what is known of `update`.

    All of it is read only where no line of that update counts.
    """
    recent = RECENT_BYTES
    while True:
        tail = Tail(path, recent)
        history = StoredHistory(tail)
        if tail.from_start or history.is_known(update):
            return history
        recent *= 4


_decode = json.JSONDecoder().decode  # without the checks of `json.loads`, once a line


def _record(line: bytes) -> Record | None:
    try:
        value = _decode(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    update = value.get("update")
    return value if isinstance(update, int) and abs(update) < 2**63 else None


_BEGIN_OF_UPDATE = re.compile(rb'\{"update": (\d{1,18}), "time": [\d.]+, "loss": ')


def _numbers_of_update(line: bytes) -> tuple[int, int] | None:
    r"""Return the update and the attempt in an update's line as training writes it: they are its
    first value and its last one. None of another line, and of a torn one, which lacks its end.

    >>> line = b'{"update": 7, "time": 1.5, "loss": 0.5, "metrics": {"error": 1}, "attempt": 2}\n'
    >>> _numbers_of_update(line), _numbers_of_update(line[:-15] + b"\n")
    ((7, 2), None)
    """
    begin = _BEGIN_OF_UPDATE.match(line)
    if begin is None or line.count(b"{") > 2 or line.count(b"{") != line.count(b"}"):
        return None
    attempt = line.rpartition(b', "attempt": ')[2].removesuffix(b"}\n")
    return (int(begin[1]), int(attempt)) if attempt.isdigit() else None


def recent_records(path: Path) -> list[Record]:
    """Return the latest lines of the latest attempt, evaluations included; [] without a file.

    Raises:
        OSError: it may not be read.
    """
    records = Tail(path, RECENT_BYTES).read()
    last = max((record.get("attempt", 0) for record in records), default=0)
    return [record for record in records if record.get("attempt", 0) == last]


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


class Figures:
    """The sums, means and spans of updates, which are added in order and not kept.

    The median alone needs 8 bytes for each of them.

    >>> times = [(0, 10.0), (0, 12.0), (1, 20.0)]
    >>> lines = [{"attempt": n, "time": time, "update_s": 1.0} for n, time in times]
    >>> Figures(lines).spans
    {0: (9.0, 12.0), 1: (19.0, 20.0)}

    Attributes:
        spans: begin and end of each attempt's updates.
    """

    SUMMED = (
        "samples",
        "collectives",
        "bytes_on_wire",
        "update_s",
        "compute_s",
        "wait_s",
        "optimizer_s",
    )
    TOGETHER = 64  # whose records are kept for a moment
    _FIELDS = itemgetter("peak_memory_bytes", "attempt", "time", *SUMMED)

    def __init__(self, updates: Iterable[Record] = ()) -> None:
        self.count = 0
        self.spans: dict[int, tuple[float, float]] = {}
        self.peak_memory_bytes: int | None = None
        self._sums: dict[str, Any] = dict.fromkeys(self.SUMMED, 0)
        self._counts: dict[str, int] = dict.fromkeys(self.SUMMED, 0)
        # The first update of each attempt also warms up caches. It is used only if all are first.
        self._first, self._others = _Times(), _Times()
        self._attempt: int | None = None
        rest = iter(updates)
        while records := list(islice(rest, self.TOGETHER)):
            self.add_all(records)

    def add_all(self, records: Sequence[Record]) -> None:
        """Add the next updates."""
        if not self._add_alike(records):
            for record in records:
                self.add(record)

    def _add_alike(self, records: Sequence[Record]) -> bool:
        """Add updates together, by field, if they are of the attempt under way and have all fields,
        which most do. Return whether they have.
        """
        try:
            columns = [*zip(*map(self._FIELDS, records), strict=True)]
            peaks, attempts, times, *summed = columns
            values = dict(zip(self.SUMMED, summed, strict=True))
            sums = {name: sum(column, self._sums[name]) for name, column in values.items()}
            peak = max(self.peak_memory_bytes or 0, *peaks)
        except (KeyError, TypeError):  # without a field, or with a null
            return False
        is_under_way = attempts.count(self._attempt) == len(records) and attempts[0] in self.spans
        if not is_under_way or None in times or not all(values["update_s"]):
            return False
        self.count += len(records)
        self._sums, self.peak_memory_bytes = sums, peak
        for name in self.SUMMED:
            self._counts[name] += len(records)
        self._others.add_all(values["update_s"], values["samples"])
        began, ended = self.spans[attempts[0]]
        self.spans[attempts[0]] = (began, max(ended, *times))  # a clock may be set back
        return True

    def add(self, record: Record) -> None:
        """Add the next update."""
        self.count += 1
        sums, counts = self._sums, self._counts
        for name in self.SUMMED:
            value = record.get(name)
            if value is not None:
                sums[name] += value
                counts[name] += 1
        peak = record.get("peak_memory_bytes")
        if peak is not None and (self.peak_memory_bytes is None or peak > self.peak_memory_bytes):
            self.peak_memory_bytes = peak
        attempt, seconds, time = (
            record.get("attempt", 0),
            record.get("update_s"),
            record.get("time"),
        )
        if seconds:
            times = self._others if attempt == self._attempt else self._first
            times.add(seconds, record.get("samples"))
        self._attempt = attempt
        if time is not None:
            began, ended = self.spans.get(attempt, (time - (seconds or 0.0), time))
            self.spans[attempt] = (began, max(ended, time))

    def total(self, name: str) -> Any:
        """Return the sum of a field; None if no update has it."""
        return self._sums[name] if self._counts[name] else None

    def mean(self, name: str) -> float | None:
        """Return the mean of a field over the updates that have it."""
        return self._sums[name] / self._counts[name] if self._counts[name] else None

    def seconds_before(self, attempt: int) -> float:
        """Return how long earlier attempts trained, without updates that were redone.

        >>> times = [(0, 10.0), (0, 12.0), (1, 20.0)]
        >>> lines = [{"attempt": n, "time": time, "update_s": 1.0} for n, time in times]
        >>> Figures(lines).seconds_before(1), Figures(lines).seconds_before(2)
        (3.0, 4.0)
        """
        return sum(last - first for n, (first, last) in self.spans.items() if n < attempt)

    @property
    def _warm(self) -> _Times:
        return self._others if self._others.seconds else self._first

    @property
    def seconds_per_update(self) -> float | None:
        """Return the median without the first update of each attempt.

        >>> Figures({"update_s": s} for s in (9.0, 1.0, 1.2)).seconds_per_update
        1.1
        """
        return statistics.median(self._warm.seconds) if self._warm.seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Return the mean rate without the first update of each attempt.

        >>> Figures({"samples": 8, "update_s": s} for s in (9.0, 1.0, 3.0)).samples_per_second
        4.0
        """
        return self._warm.samples_per_second

    @property
    def time_shares(self) -> dict[str, float]:
        """Return the shares of the updates' wall time; `other` is loading and bookkeeping.

        >>> update = {"compute_s": 6.0, "wait_s": 2.0, "optimizer_s": 1.0, "update_s": 10.0}
        >>> Figures([update]).time_shares
        {'compute': 0.6, 'wait': 0.2, 'optimizer': 0.1, 'other': 0.1}
        """
        parts = {name: self.total(f"{name}_s") for name in ("compute", "wait", "optimizer")}
        known = {name: seconds for name, seconds in parts.items() if seconds is not None}
        whole = max(self.total("update_s") or 0.0, sum(known.values()))
        if not known or whole <= 0:
            return {}
        shares = {name: seconds / whole for name, seconds in known.items()}
        return {**shares, "other": round(1 - sum(shares.values()), 12)}


class _Times:
    """Durations of updates, and the mean rate of those whose samples are known."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self._samples, self._samples_s = 0, 0.0

    def add(self, seconds: float, samples: int | None) -> None:
        self.seconds.append(seconds)
        if samples is not None:
            self._samples += samples
            self._samples_s += seconds

    def add_all(self, seconds: Sequence[float], samples: Sequence[int]) -> None:
        self.seconds.extend(seconds)
        self._samples += sum(samples)
        self._samples_s += sum(seconds)

    @property
    def samples_per_second(self) -> float | None:
        return self._samples / self._samples_s if self._samples_s else None


def summarize(result: Mapping[str, Any] | None, updates: Figures) -> Summary:
    """Return the figures of a run from its result (None without one) and its updates."""
    result = result or {}
    count, samples = result.get("updates"), result.get("samples")
    ranks = [size for size in result.get("peak_memory_bytes") or [] if size is not None]
    memory = (result.get("memory") or {}).items()
    rate = updates.samples_per_second
    if rate is None and result.get("samples") and result.get("seconds"):
        rate = result["samples"] / result["seconds"]
    return Summary(
        state=str(result.get("state", "no result")),
        updates=updates.count if count is None else count,
        samples=updates.total("samples") if samples is None else samples,
        loss=result.get("loss"),
        seconds=result.get("seconds") or None,  # no update was made, or none was reported
        seconds_per_update=updates.seconds_per_update,
        samples_per_second=rate,
        time_shares=updates.time_shares,
        collectives_per_update=_per_update(result, updates, "collectives"),
        bytes_on_wire_per_update=_per_update(result, updates, "bytes_on_wire"),
        peak_memory_bytes=max(ranks, default=updates.peak_memory_bytes),
        memory_bytes={n: size for n, size in memory if size is not None and n != "peak"},
        metrics=dict(result.get("metrics") or {}),
    )


def _per_update(result: Mapping[str, Any], updates: Figures, name: str) -> float | None:
    mean = updates.mean(name)
    if mean is None and result.get(name) is not None and result.get("updates"):
        return result[name] / result["updates"]
    return mean


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
            sentence = f"its progress could not be written: {error.strerror}"
            warn(sentence, kind="no progress", about="rank")


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
