"""Warnings of a run's ranks.

Engines and workers call `warn`. The sentence goes to the rank's log and, as a line, into a file per
node in the attempt's folder, which the launcher's terminal, `status` and rank 0 (for metrics.jsonl)
read. A repeated warning is one entry with a count, on however many ranks it comes up.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import APPENDING, open_nofollow

PATTERN = "warnings-*.jsonl"
MOST_KINDS = 50  # of one rank
LONGEST = 1000  # characters of a sentence
MOST_FILES = 64
MOST_BYTES = 256 * 1024  # read of one file
MOST_NAMED = 4  # ranks
ABOUT_RANK = "it "  # the beginning of a sentence about the rank itself
POLL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWarning:
    """One warning of an attempt. `times`: at least so often, over all `ranks` that gave it.

    >>> RunWarning(sentence="slow", ranks=(0, 1), times=1).text
    'slow'
    >>> RunWarning(sentence="slow", ranks=(3,), times=8).text
    'rank 3: slow (at least 8 times)'
    >>> RunWarning(sentence="it was frozen", ranks=(0,)).text
    'rank 0: it was frozen'
    """

    sentence: str
    ranks: tuple[int, ...]
    times: int = 1
    time: float = 0.0

    @property
    def text(self) -> str:
        """The sentence with its ranks, unless it is rank 0's about the run, and its count."""
        named = ", ".join(map(str, self.ranks[:MOST_NAMED]))
        more = f" and {len(self.ranks) - MOST_NAMED} more" if len(self.ranks) > MOST_NAMED else ""
        about_run = 0 in self.ranks and not self.sentence.startswith(ABOUT_RANK)
        who = "" if about_run else f"rank{'s' * (len(self.ranks) > 1)} {named}{more}: "
        return f"{who}{self.sentence}{_count(self.times, len(self.ranks))}"


def _count(times: int, ranks: int) -> str:
    return f" (at least {times} times)" if times > ranks else ""


class _RankWarnings:
    """Writes a rank's warnings to its log and its node's file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._times: dict[str, int] = {}
        self._unwritten: deque[bytes] = deque(maxlen=MOST_KINDS)
        self._lock = threading.Lock()  # heartbeats warn from a thread of their own

    def warn(self, sentence: str, kind: str) -> None:
        with self._lock:
            if kind not in self._times and len(self._times) >= MOST_KINDS:
                kind = sentence = f"{MOST_KINDS} kinds of warnings came up here; no more are shown"
            times = self._times[kind] = self._times.get(kind, 0) + 1
            if times & (times - 1):  # written at 1, 2, 4, 8, …
                return
            line = {"sentence": sentence, "times": times, "rank": self._rank, "time": time.time()}
            line |= {"kind": kind} if kind != sentence else {}
            self._unwritten.append(json.dumps(line).encode() + b"\n")
            self._write(f"warning: {sentence}{_count(times, 1)}")  # its log has its name

    def _write(self, text: str) -> None:
        """Write to both; on a full disk the rest is tried again with the next warning."""
        try:
            print(text, flush=True)  # noqa: T201  # a rank's standard output is its log
            _append(self._path, self._unwritten)
        except (OSError, RunFolderError):
            return


def _append(path: Path, lines: deque[bytes]) -> None:
    descriptor = open_nofollow(path, APPENDING)
    try:
        while lines:
            os.write(descriptor, lines[0])  # one call: lines of ranks never mix
            lines.popleft()
    finally:
        os.close(descriptor)


def warn_of(path: Path, rank: int, sentence: str) -> None:
    """Warn for a rank that cannot do so itself, into its node's file. Raises `OSError`."""
    line = {"sentence": sentence, "times": 1, "rank": rank, "time": time.time()}
    _append(path, deque([json.dumps(line).encode() + b"\n"]))


_destination: _RankWarnings | None = None


def warn_into(path: Path, rank: int) -> None:
    """Write this process's warnings as those of `rank` into the file `path`, too."""
    global _destination  # noqa: PLW0603  # a process is one rank, as it has one standard output
    _destination = _RankWarnings(path, rank)


def warn(sentence: str, *, kind: str | None = None) -> None:
    """Warn the users of this run. Never raises in a run, not collective, cheap when repeated.

    In library mode it is Python's `UserWarning`.

    Args:
        sentence: what was seen, what it means, and the remedy.
        kind: warnings of one kind are counted as the same; the sentence itself by default. For
            sentences that hold a number of the moment.
    """
    sentence = sentence if len(sentence) <= LONGEST else sentence[: LONGEST - 1] + "…"
    if _destination is None:
        warnings.warn(sentence, UserWarning, stacklevel=2)
    else:
        _destination.warn(sentence, kind or sentence)


def read_warnings(attempt: Path) -> list[RunWarning]:
    """Return the warnings in an attempt's folder, each once, by the time of their first occurrence.

    Bounded in files and bytes. Lines torn by a full disk are skipped.
    """
    found: dict[str, dict[int, tuple[int, str, float]]] = {}
    for path in sorted(attempt.glob(PATTERN))[:MOST_FILES]:
        for line in _lines(path):
            ranks = found.setdefault(line.get("kind", line["sentence"]), {})
            before = ranks.get(line["rank"])
            _, sentence, moment = before or (0, line["sentence"], line["time"])
            ranks[line["rank"]] = (line["times"], sentence, moment)
    made = [
        RunWarning(
            sentence=min(ranks.items())[1][1],
            ranks=tuple(sorted(ranks)),
            times=sum(times for times, _, _ in ranks.values()),
            time=min(moment for _, _, moment in ranks.values()),
        )
        for ranks in found.values()
    ]
    return sorted(made, key=lambda warning: warning.time)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        descriptor = open_nofollow(path)
    except (OSError, RunFolderError):  # not ours, removed, or a link
        return
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MOST_BYTES).decode("utf-8", errors="replace")
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):  # torn by a full disk
            yield json.loads(line)


class NewWarnings:
    """The warnings of an attempt that were not shown yet, each once, as sentences.

    Args:
        already: shown elsewhere, as those of the plan before anything starts.
        clock: in seconds; the folder is read every `POLL_S` at the most.
    """

    def __init__(
        self,
        attempt: Path,
        already: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt, self._clock = attempt, clock
        self._shown = set(already)
        self._next = clock()

    def read(self, *, now: bool = False) -> list[str]:
        """Return new warnings; `now` skips the poll interval."""
        if not now and self._clock() < self._next:
            return []
        self._next = self._clock() + POLL_S
        fresh = [w for w in read_warnings(self._attempt) if w.sentence not in self._shown]
        self._shown.update(warning.sentence for warning in fresh)
        return [warning.text for warning in fresh]
