"""Warnings of a run's ranks.

Engines and workers call `warn`. The sentence goes to the rank's log and, as a line, into a file per
node in the attempt's folder, which the launcher's terminal, `status` and rank 0 (for metrics.jsonl)
read. A repeated warning is one entry, on however many ranks it comes up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.program_link import RANK, WARNINGS
from orchestrator.units import named_numbers

log = logging.getLogger(__name__)

PATTERN = "warnings-*.jsonl"
MOST_KINDS = 50  # of one rank
LONGEST = 1000  # characters of a sentence
MOST_FILES = 64
MOST_BYTES = 256 * 1024  # read of one file
MOST_NAMED = 4  # groups of ranks
POLL_S = 2.0

About = Literal["rank", "run"]
"""What a warning is about: the rank that gives it, which its readers need to know, or the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWarning:
    """One warning of an attempt, by all `ranks` that gave it.

    >>> RunWarning(sentence="slow", ranks=(0, 1)).text
    'slow'
    >>> RunWarning(sentence="it was frozen", ranks=(0,), about="rank").text
    'rank 0: it was frozen'
    """

    sentence: str
    ranks: tuple[int, ...]
    time: float = 0.0
    about: About = "run"

    @property
    def text(self) -> str:
        """The sentence with its ranks, unless it is rank 0's about the run."""
        if 0 in self.ranks and self.about == "run":
            return self.sentence
        return f"{named_numbers('rank', self.ranks, MOST_NAMED)}: {self.sentence}"


class _RankWarnings:
    """Writes a rank's warnings to its log and its node's file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._kinds: set[str] = set()
        self._unwritten: deque[bytes] = deque(maxlen=MOST_KINDS)
        self._lock = threading.Lock()  # heartbeats warn from a thread of their own

    def warn(self, sentence: str, kind: str, about: About) -> None:
        with self._lock:
            if len(self._kinds) >= MOST_KINDS and kind not in self._kinds:
                kind = sentence = f"{MOST_KINDS} kinds of warnings came up here; no more are shown"
            if kind in self._kinds:
                return
            self._kinds.add(kind)
            self._unwritten.append(_line(self._rank, sentence, kind, about))
            # A program's own output may be closed, a broken pipe, or ASCII, which ends no run.
            with contextlib.suppress(OSError, ValueError):
                print(f"warning: {sentence}", flush=True)  # noqa: T201  # the rank's own log
            # On a full disk the rest is tried again with the next warning.
            with contextlib.suppress(OSError, RunFolderError):
                _append(self._path, self._unwritten)


def _line(rank: int, sentence: str, kind: str, about: About) -> bytes:
    line = {
        "sentence": sentence,
        "kind": kind,
        "rank": rank,
        "about": about,
        "time": time.time(),
    }
    return json.dumps(line).encode() + b"\n"


def _append(path: Path, lines: deque[bytes]) -> None:
    descriptor = open_nofollow(path, APPENDING)
    try:
        while lines:
            os.write(descriptor, lines[0])  # one call: lines of ranks never mix
            lines.popleft()
    finally:
        os.close(descriptor)


def warn_of(
    path: Path, rank: int, sentence: str, *, kind: str | None = None, about: About = "run"
) -> None:
    """Warn for a rank that cannot do so itself, into its node's file; see `warn`."""
    sentence = sentence if len(sentence) <= LONGEST else sentence[: LONGEST - 1] + "…"
    try:
        _append(path, deque([_line(rank, sentence, kind or sentence, about)]))
    except (OSError, RunFolderError) as error:  # a full disk, or no plain file
        log.warning("%s (not shown elsewhere: %s)", sentence, error)


_destination: _RankWarnings | None = None


def warn_into(path: Path, rank: int) -> None:
    """Write this process's warnings as those of `rank` into the file `path`, too."""
    global _destination  # noqa: PLW0603  # a process is one rank, as it has one standard output
    _destination = _RankWarnings(path, rank)


def _destination_here() -> _RankWarnings | None:
    """Return where this process's warnings go; None in library mode.

    A worker says it by `warn_into`. A program that a run has started has it from its environment,
    whichever part of ours it uses.
    """
    if _destination is None and (path := os.environ.get(WARNINGS)):
        # RANK first: a program may itself start ranks, as `torchrun` does.
        numbers = [os.environ.get(name, "") for name in ("RANK", RANK)]
        warn_into(Path(path), next((int(n) for n in numbers if n.isdecimal()), 0))
    return _destination


def warn(sentence: str, *, kind: str | None = None, about: About = "run", depth: int = 0) -> None:
    """Warn the users of this run. Never raises in a run, not collective, cheap when repeated.

    In library mode it is Python's `UserWarning`, with the rank that torchrun has given the process.

    Args:
        sentence: what was seen, what it means, and the remedy.
        kind: of each kind only the first is shown; the sentence itself by default. For sentences
            that hold a number of the moment.
        about: "rank" if the sentence means this rank, as in "it was frozen".
        depth: in library mode, how many calls above the caller the line is that it is about.
    """
    sentence = sentence if len(sentence) <= LONGEST else sentence[: LONGEST - 1] + "…"
    destination = _destination_here()
    if destination is None:
        if about == "rank" and (rank := os.environ.get("RANK")):
            sentence = f"rank {rank}: {sentence}"
        warnings.warn(sentence, UserWarning, stacklevel=2 + depth)
    else:
        destination.warn(sentence, kind or sentence, about)


def read_warnings(attempt: Path) -> list[RunWarning]:
    """Return the warnings in an attempt's folder, each once, by the time of their first occurrence.

    Bounded in files and bytes. Lines torn by a full disk are skipped.
    """
    moments: dict[str, dict[int, tuple[float, str, About]]] = {}
    for path in sorted(attempt.glob(PATTERN))[:MOST_FILES]:
        for line in _lines(path):
            # Earlier versions wrote no `about`: naming the rank is right for every warning.
            moment = (line["time"], line["sentence"], line.get("about", "rank"))
            moments.setdefault(line["kind"], {}).setdefault(line["rank"], moment)
    warnings: list[RunWarning] = []
    for ranks in moments.values():
        moment, sentence, about = min(ranks.values())
        warnings.append(
            RunWarning(sentence=sentence, ranks=tuple(sorted(ranks)), time=moment, about=about)
        )
    return sorted(warnings, key=lambda warning: warning.time)


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
