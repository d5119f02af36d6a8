"""Standstill detection: a main thread at one place longer than usual, without doing work."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import ClusterConfig
from orchestrator.lifecycle.signs.node_watch import AT_WORK, BEAT_S

USUAL = 3.0
LATEST = 3.0  # times heartbeat_timeout_s: when a standstill is reported at the latest
LOOKS = 4
"""How often processes are looked at during `notice_s`, once a place has lasted that long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Time limits: when a standstill is reported, and when the rank is given up.

    Attributes:
        notice_s: nothing shorter is reported.
        most_s: it is reported at the latest after this, whatever was usual.
        hang_s: for how long neither the rank nor its children may leave the processors unused.
    """

    notice_s: float
    most_s: float
    hang_s: float

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Patience:
        """Derive the limits so that a rank that is behind reports before the others' wait ends."""
        notice_s = cluster.heartbeat_timeout_s
        over_s = min(cluster.collective_timeout_s, cluster.rendezvous_timeout_s) / 2
        return cls(
            notice_s=min(notice_s, over_s),
            most_s=min(LATEST * notice_s, over_s),
            hang_s=cluster.hang_timeout_s,
        )


class Standstill:
    """How long the main thread has been at one place, sampled once a second.

    Attributes:
        reported: the standstill at the present place was reported.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = self._stood = self._longest = 0.0
        self.reported = False
        self._due = self._at_work = 0.0
        self._used_s: float | None = None

    def look(self, now: float, since: float, *, waits: bool) -> str:
        """Return what to report: "behind", "moves", or nothing.

        Args:
            since: when the main thread reached its present place, or its last wait there ended.
            waits: whether it waits for other ranks.
        """
        if since != self._since or waits:
            self._longest = max(self._longest, self._stood)
            self._since, self._stood = since, 0.0
            before, self.reported = self.reported, False
            self._used_s, self._due = None, since + self._patience.notice_s
            return "moves" if before else ""
        self._stood = now - since
        limit = max(self._patience.notice_s, USUAL * self._longest)
        if self.reported or self._stood <= min(limit, self._patience.most_s):
            return ""
        self.reported = True
        return "behind"

    def due(self, now: float) -> bool:
        """Return whether the standstill is long enough to inspect processes."""
        if not self._stood or now < self._due:
            return False
        self._due = now + min(self._patience.hang_s, self._patience.notice_s) / LOOKS
        return True

    def hangs(self, now: float, used_s: float) -> bool:
        """Return whether the processors were unused for `hang_s`.

        Args:
            used_s: processor time of the process and its children so far.
        """
        before, elapsed = self._used_s, max(BEAT_S, now - self._at_work)
        if before is None or used_s - before > AT_WORK * elapsed:
            self._used_s, self._at_work = used_s, now
        return now - self._at_work > self._patience.hang_s
