"""Whether a rank's main thread stands still for longer than was usual, and does no work either."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import ClusterConfig
from orchestrator.lifecycle.signs.node_watch import AT_WORK, BEAT_S

USUAL = 3.0
LATEST = 3.0  # times heartbeat_timeout_s: when one that stands still is spoken of at the latest
LOOKS = 4
"""How often processes are looked at during `notice_s`, once a place has lasted that long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """After how long a rank that stands still is spoken of, and after how long it is given up.

    Attributes:
        notice_s: nothing below this is mentioned.
        most_s: it is mentioned at the latest after this, whatever was usual.
        hang_s: for how long neither the rank nor its children may leave the processors unused.
    """

    notice_s: float
    most_s: float
    hang_s: float

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Patience:
        """A rank that is behind is spoken of before the others' wait for it is over."""
        notice_s = cluster.heartbeat_timeout_s
        over_s = min(cluster.collective_timeout_s, cluster.rendezvous_timeout_s) / 2
        return cls(
            notice_s=min(notice_s, over_s),
            most_s=min(LATEST * notice_s, over_s),
            hang_s=cluster.hang_timeout_s,
        )


class Standstill:
    """For how long the main thread has stood at one place, by what a thread sees every second.

    Attributes:
        told: it was said that it stands where it stands now.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = self._stood = self._longest = 0.0
        self.told = False
        self._due = self._at_work = 0.0
        self._used_s: float | None = None

    def look(self, now: float, since: float, *, waits: bool) -> str:
        """What is to be said: "behind", "moves", or nothing.

        Args:
            since: when the main thread came to its present place, or its last wait there ended.
            waits: whether it waits for other ranks.
        """
        if since != self._since or waits:
            self._longest = max(self._longest, self._stood)
            self._since, self._stood = since, 0.0
            before, self.told = self.told, False
            self._used_s, self._due = None, since + self._patience.notice_s
            return "moves" if before else ""
        self._stood = now - since
        limit = max(self._patience.notice_s, USUAL * self._longest)
        if self.told or self._stood <= min(limit, self._patience.most_s):
            return ""
        self.told = True
        return "behind"

    def due(self, now: float) -> bool:
        """Whether it has stood so long that it is time to look at processes."""
        if not self._stood or now < self._due:
            return False
        self._due = now + min(self._patience.hang_s, self._patience.notice_s) / LOOKS
        return True

    def hangs(self, now: float, used_s: float) -> bool:
        """Whether it has left the processors unused for `hang_s`.

        Args:
            used_s: processor time of the process and its children so far.
        """
        before, elapsed = self._used_s, max(BEAT_S, now - self._at_work)
        if before is None or used_s - before > AT_WORK * elapsed:
            self._used_s, self._at_work = used_s, now
        return now - self._at_work > self._patience.hang_s
