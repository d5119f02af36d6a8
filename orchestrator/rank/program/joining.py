"""Whether a program's rank comes to where the others are: seen from its connections, from outside.

A rank that is stuck before it joins (in an import, say) leaves the others waiting for the half hour
that torch gives it. Its own parent sees that the place is served and that it has no connection to
it. One that does not use a processor either is given up after `cluster.rendezvous_timeout_s`; one
that computes (a data set that is prepared first) after `cluster.collective_timeout_s`. Nothing is
said of programs that never form a group.

Rank 0 serves the place, so while it is stuck nobody can see that others want to come: an attempt
that is refused leaves no trace, and a program whose first rank only waits may be none that forms a
group. It is warned of, and named once the others give up. MindSpore's place is served by ours.
"""

from __future__ import annotations

import time

from orchestrator.config.schema import ClusterConfig
from orchestrator.errors import RankHangs
from orchestrator.lifecycle.signs.node_watch import AT_WORK
from orchestrator.rank.attending.attendance import Attendance
from orchestrator.rank.program import processes
from orchestrator.rank.program.meeting_place import MeetingPlace
from orchestrator.rundir.warnings import warn


class Joining:
    """One rank's; asked every second until it has joined."""

    def __init__(
        self, place: MeetingPlace, rank: int, cluster: ClusterConfig, attendance: Attendance
    ) -> None:
        self._address, self._port = place.address, place.port
        self._serves = rank == 0 and place.scheduler is None
        self._attendance = attendance
        self._patience_s = cluster.rendezvous_timeout_s
        self._most_s = max(cluster.collective_timeout_s, self._patience_s)
        self._began = self._looked = time.monotonic()
        self._idle_since, self._used_s = self._began, 0.0
        self._joined = self._told = self._stands = False

    def look(self, pid: int) -> None:
        """Raises `RankHangs` once it is sure that this rank keeps the others waiting."""
        if self._joined:
            return
        now = time.monotonic()
        used_s = processes.used_s(pid)
        if used_s - self._used_s > AT_WORK * (now - self._looked):
            self._idle_since = now
        self._looked, self._used_s = now, used_s
        if processes.has_joined(pid, self._port):
            self._joined = True
            self._attendance.stands_before(None)
            return
        waited_s = now - self._began
        if waited_s < self._patience_s:
            return
        idle = now - self._idle_since >= self._patience_s / 2
        if self._serves:
            self._does_not_serve(idle=idle)
            return
        if not processes.is_served(self._address, self._port):
            return
        sentence = (
            f"it has not joined the others, who wait for it at {self._address}:{self._port}, in "
            f"{waited_s:.0f} s"
        )
        if idle:
            raise RankHangs(
                f"{sentence} (cluster.rendezvous_timeout_s), and uses no processor: it is stuck "
                f"before its group is formed"
            )
        if waited_s >= self._most_s:
            raise RankHangs(f"{sentence} (cluster.collective_timeout_s)")
        if not self._told:
            self._told = True
            warn(f"{sentence}; it is at work, so it is waited for", kind="not joined")

    def _does_not_serve(self, *, idle: bool) -> None:
        """On rank 0: if the others fail, it is known why; until then who looks on is told."""
        if not self._stands:
            self._stands = True
            self._attendance.stands_before(self._began)
        if idle and not self._told:
            self._told = True
            warn(
                f"the program of rank 0 has not opened {self._address}:{self._port}, where the "
                f"ranks meet, in {self._patience_s:g} s (cluster.rendezvous_timeout_s), and uses "
                f"no processor: whoever waits for it there does so until a time-out of its own",
                kind="not served",
            )
