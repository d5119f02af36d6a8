"""What a run's ranks want a person to know: said by any rank at any time, read by whoever looks.

`warn` is the one function that engines and workers call. The sentence goes to the rank's log and,
as a line, into the attempt's folder: a file a node, made only when there is something to say. From
there the launcher's terminal, `status`, and rank 0 (for metrics.jsonl) take it. Bounded everywhere:
the same warning is one entry with a count, however often and on however many ranks it comes up.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from orchestrator.errors import RunFolderError
from orchestrator.run_folder.files import APPENDING, open_regular

PATTERN = "warnings-*.jsonl"
MOST_KINDS = 50  # of one rank
LONGEST = 1000  # characters of a sentence
MOST_FILES = 64
MOST_BYTES = 256 * 1024  # read of one file
MOST_NAMED = 4  # ranks
OF_THE_RANK = "it "
"""With which a sentence begins that is about the rank that says it."""
LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """One warning of an attempt. `times`: at least so often, over all `ranks` that said it.

    >>> Warned(sentence="slow", ranks=(0, 1), times=1).told
    'slow'
    >>> Warned(sentence="slow", ranks=(3,), times=8).told
    'rank 3: slow (at least 8 times)'
    >>> Warned(sentence="it was frozen", ranks=(0,)).told
    'rank 0: it was frozen'
    """

    sentence: str
    ranks: tuple[int, ...]
    times: int = 1
    time: float = 0.0

    @property
    def told(self) -> str:
        """For people: who says it where that is not rank 0, or where it is of that rank itself, and
        how often if more than once.
        """
        named = ", ".join(map(str, self.ranks[:MOST_NAMED]))
        more = f" and {len(self.ranks) - MOST_NAMED} more" if len(self.ranks) > MOST_NAMED else ""
        of_the_run = 0 in self.ranks and not self.sentence.startswith(OF_THE_RANK)
        who = "" if of_the_run else f"rank{'s' * (len(self.ranks) > 1)} {named}{more}: "
        return f"{who}{self.sentence}{_often(self.times, len(self.ranks))}"


def _often(times: int, ranks: int) -> str:
    return f" (at least {times} times)" if times > ranks else ""


class _Rank:
    """A rank's way to its log and its node's file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._times: dict[str, int] = {}
        self._unwritten: deque[bytes] = deque(maxlen=MOST_KINDS)
        self._lock = threading.Lock()  # heartbeats warn from a thread of their own

    def warn(self, sentence: str, kind: str) -> None:
        with self._lock:
            if kind not in self._times and len(self._times) >= MOST_KINDS:
                kind = sentence = f"{MOST_KINDS} kinds of warnings came up here; no more are told"
            times = self._times[kind] = self._times.get(kind, 0) + 1
            if times & (times - 1):  # told at 1, 2, 4, 8, …
                return
            line = {"sentence": sentence, "times": times, "rank": self._rank, "time": time.time()}
            line |= {"kind": kind} if kind != sentence else {}
            self._unwritten.append(json.dumps(line).encode() + b"\n")
            self._write(f"warning: {sentence}{_often(times, 1)}")  # its log has its name

    def _write(self, text: str) -> None:
        """Both may lie on a full disk, where nobody can be told; what is left is tried again with
        the next warning.
        """
        try:
            print(text, flush=True)  # noqa: T201  # a rank's standard output is its log
            _append(self._path, self._unwritten)
        except (OSError, RunFolderError):
            return


def _append(path: Path, lines: deque[bytes]) -> None:
    descriptor = open_regular(path, APPENDING)
    try:
        while lines:
            os.write(descriptor, lines[0])  # one call: lines of ranks never mix
            lines.popleft()
    finally:
        os.close(descriptor)


def warn_of(path: Path, rank: int, sentence: str) -> None:
    """Warn of a rank that cannot do so itself, into the file of its node. Raises `OSError`."""
    line = {"sentence": sentence, "times": 1, "rank": rank, "time": time.time()}
    _append(path, deque([json.dumps(line).encode() + b"\n"]))


_destination: _Rank | None = None


def warn_into(path: Path, rank: int) -> None:
    """From now on this process's warnings are those of `rank`, and go to the file `path` too."""
    global _destination  # noqa: PLW0603  # a process is one rank, as it has one standard output
    _destination = _Rank(path, rank)


def warn(sentence: str, *, kind: str | None = None) -> None:
    """Tell whoever looks at this run. Never raises in a run, not collective, cheap when repeated.

    In a program of a user's own (library mode) it is Python's `UserWarning`.

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


def read_warnings(attempt: Path) -> list[Warned]:
    """The warnings of an attempt's folder so far, each once, by the time they first came up.

    Bounded in files and bytes. A line that is none, as a full disk leaves behind, is passed over.
    """
    found: dict[str, dict[int, tuple[int, str, float]]] = {}
    for path in sorted(attempt.glob(PATTERN))[:MOST_FILES]:
        for line in _lines(path):
            ranks = found.setdefault(line.get("kind", line["sentence"]), {})
            before = ranks.get(line["rank"])
            _, sentence, moment = before or (0, line["sentence"], line["time"])
            ranks[line["rank"]] = (line["times"], sentence, moment)
    made = [
        Warned(
            sentence=min(ranks.items())[1][1],
            ranks=tuple(sorted(ranks)),
            times=sum(times for times, _, _ in ranks.values()),
            time=min(moment for _, _, moment in ranks.values()),
        )
        for ranks in found.values()
    ]
    return sorted(made, key=lambda warned: warned.time)


_FIELDS: dict[str, Any] = {"sentence": str, "times": int, "rank": int, "time": (int, float)}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        descriptor = open_regular(path)
    except (OSError, RunFolderError):  # it is somebody else's, or gone, or no file
        return
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MOST_BYTES).decode("utf-8", errors="replace")
    for line in text.split("\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if not isinstance(value, dict):
            continue
        record = cast("dict[str, Any]", value)
        whole = all(isinstance(record.get(name), kind) for name, kind in _FIELDS.items())
        if whole and isinstance(record.get("kind", ""), str):
            yield record


class NewWarnings:
    """The warnings of an attempt that have not been told yet, each once, as sentences.

    Args:
        already: told elsewhere, as those of the plan are before anything starts.
        clock: in seconds; the folder is looked at every `LOOK_S` at the most.
    """

    def __init__(
        self,
        attempt: Path,
        already: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt, self._clock = attempt, clock
        self._told = set(already)
        self._next = clock()

    def read(self, *, now: bool = False) -> list[str]:
        """What is new; looked for at once with `now`, as at an end."""
        if not now and self._clock() < self._next:
            return []
        self._next = self._clock() + LOOK_S
        fresh = [w for w in read_warnings(self._attempt) if w.sentence not in self._told]
        self._told.update(warned.sentence for warned in fresh)
        return [warned.told for warned in fresh]
