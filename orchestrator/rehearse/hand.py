"""The hand that hurts ranks on the node where they run. It is beside them, never in them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import psutil

from orchestrator.lifecycle.signs.processes import descendants
from orchestrator.rehearse.connections import Connection, End, Way, change, connections

Ends = Sequence[tuple[End, End]]
WORDS = ("signal", "outward", "cut", "silence", "renew", "fill", "lift")
"""What a hand can be told from afar."""


class Hand:
    """Over the ranks of one run.

    Args:
        find: gives the living ranks that are in reach, with their processes' numbers.
    """

    def __init__(self, find: Callable[[], Mapping[int, int]]) -> None:
        self._find = find
        self._full: dict[int, tuple[int, int]] = {}  # pid: its limits before
        self._deaf: set[Connection] = set()
        self._alone: set[int] = set()  # ranks whose node is cut off in silence

    def ranks(self) -> list[int]:
        return sorted(self._find())

    def signal(self, ranks: Iterable[int], number: int) -> None:
        for pid in self._of(ranks):
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, number)

    # ------------------------------------------------------------------ the network

    def outward(self, ranks: Iterable[int]) -> list[tuple[End, End]]:
        """Both ends of each connection that leads from these ranks to anybody but them."""
        return [(one.here, one.there) for one in self._outward(ranks) if one.there is not None]

    def cut(self, ranks: Iterable[int]) -> None:
        """Cut all of these. They may be made anew at once."""
        self._change(self._outward(ranks), "cut")

    def silence(self, ends: Ends, alone: Iterable[int]) -> None:
        """Make whatever has one of these `ends` deaf, and all that leads to or from the ranks that
        are `alone`, where they listen included: until `lift`, and what is new after each `renew`.

        A question and its answer are quicker than any `renew`. So what listens beside the other
        ranks, their witnesses, hears nobody either: only who has lost them asks there.
        """
        self._alone = set(alone)
        pairs = [(tuple(here), tuple(there)) for here, there in ends]  # JSON knows lists only
        ours = {*pairs, *((there, here) for here, there in pairs)}
        found = self._find()
        every = _of_all(found.values())
        others = [pid for rank, pid in found.items() if rank not in self._alone]
        beside = _of_all(pid for other in others for pid in descendants(other))
        asked = [one for one in beside if one.there is None]
        self._deafen([*asked, *(one for one in every if (one.here, one.there) in ours)])
        self.renew()

    def renew(self) -> None:
        """What has been connected since is deaf as well."""
        if self._alone:
            listening = [one for one in self._all(self._alone) if one.there is None]
            self._deafen([*self._outward(self._alone), *listening])

    def _outward(self, ranks: Iterable[int]) -> list[Connection]:
        every = self._all(ranks)
        inside = {(one.there, one.here) for one in every}
        return [one for one in every if one.there and (one.here, one.there) not in inside]

    def _all(self, ranks: Iterable[int]) -> list[Connection]:
        return _of_all(self._of(ranks))

    def _deafen(self, those: Iterable[Connection]) -> None:
        new = set(those) - self._deaf
        self._change(new, "deafen")
        self._deaf |= new

    def _change(self, those: Iterable[Connection], way: Way) -> None:
        for one in those:
            change(one, way)

    # ------------------------------------------------------------------ the disk

    def fill(self, ranks: Iterable[int]) -> None:
        """From now on none of them can write to a file, as where a disk is full, until `lift`: a
        limit of the kernel's (RLIMIT_FSIZE), under which every write ends with an error.
        """
        pids = self._of(ranks)
        for pid in [*pids, *_agents_of(pids)]:
            with suppress(ProcessLookupError):  # it has ended by itself
                before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
                self._full[pid] = before

    def lift(self) -> None:
        """Take back what lasts: there is room again, and who was deaf hears."""
        for pid, before in self._full.items():
            with suppress(ProcessLookupError):  # it has ended since
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        self._change(self._deaf, "hear")
        self._full, self._deaf, self._alone = {}, set(), set()

    def _of(self, ranks: Iterable[int]) -> list[int]:
        found = self._find()
        return [found[rank] for rank in ranks if rank in found]


def _of_all(pids: Iterable[int]) -> list[Connection]:
    """Of these processes, of what they have started, and of their agents."""
    pids = list(pids)
    every = [one for pid in pids for one in (pid, *descendants(pid))] + _agents_of(pids)
    return [connection for pid in every for connection in connections(pid)]


def _agents_of(pids: Iterable[int]) -> list[int]:
    """The agents whose workers these processes are."""
    found: set[int] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid).parent()
            if parent is not None and parent.name().startswith("node"):
                found.add(parent.pid)
    return sorted(found)
