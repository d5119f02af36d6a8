"""Where the ranks of a local run stand, by what their nodes tell: who gets nowhere, who waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from orchestrator.clusters.api import Culprit
from orchestrator.clusters.root_cause import Behind, behind_of, tail, told_with_waits
from orchestrator.lifecycle.signs.node_watch import ASLEEP, FROZEN, NO_SIGN, Seen
from orchestrator.lifecycle.signs.stacks import (
    DUMP_BYTES,
    Frame,
    as_lines,
    in_words,
    of_main_thread,
)
from orchestrator.rundir.folder import RunDir


class Standing:
    """Of one attempt.

    Args:
        silence_s, hang_s: for how long a rank may be stopped, and may sleep in the kernel.

    Attributes:
        behind: ranks that stand still, as they say themselves.
    """

    def __init__(self, run: RunDir, silence_s: float, hang_s: float) -> None:
        self._run, self._silence_s, self._hang_s = run, silence_s, hang_s
        self._frozen: dict[int, tuple[str, float]] = {}  # rank: node, when it counts as lost
        self._seen: dict[int, Seen] = {}
        self._unanswered: dict[int, int] = {}  # rank: the size of its log when it was asked
        self.behind: dict[int, Behind] = {}

    def heed(self, node: str, event: dict[str, Any]) -> None:
        """Take what a node tells of a rank."""
        kind, rank = event["event"], event.get("rank")
        if rank is None:
            return
        if "seen" in event:
            self._seen[rank] = Seen.from_json(event["seen"])
        if kind == "frozen":
            self._frozen[rank] = (node, time.monotonic() + self._silence_s)
        elif kind in ("thawed", "exit"):
            self._frozen.pop(rank, None)
        elif kind == "started" or (kind == "behind" and event["behind"] is None):  # again, perhaps
            self.behind.pop(rank, None)
        elif kind == "behind":
            self.behind[rank] = behind_of(rank, node, event["behind"])

    def gone(self, ranks: Iterable[int]) -> None:
        """Their node is gone, and they with it."""
        for rank in ranks:
            self._frozen.pop(rank, None)

    def too_long_frozen(self) -> list[Culprit]:
        """Ranks that are stopped: they say nothing and give no error; peers would wait for ever.
        Each is told once.
        """
        now = time.monotonic()
        lost = [(rank, node) for rank, (node, at) in self._frozen.items() if now >= at]
        for rank, _ in lost:
            del self._frozen[rank]
        return [
            self._lost(rank, node, FROZEN.format(f"{self._silence_s:g}")) for rank, node in lost
        ]

    def silent(self, node: str, event: dict[str, Any]) -> Culprit:
        """A rank that gives no sign of life, although it is not stopped."""
        cause = NO_SIGN.format(f"{self._silence_s:g}")
        if event["asleep"]:
            cause = ASLEEP.format(event["asleep"], f"{self._hang_s:g}")
        return self._lost(event["rank"], node, cause)

    def _lost(self, rank: int, node: str, cause: str) -> Culprit:
        self._unanswered[rank] = self._run.rank_log(rank).stat().st_size
        return Culprit(rank=rank, node=node, cause=cause, hangs=True)

    def told(self, culprit: Culprit) -> Culprit:
        """One that hangs, with where it is: by the stack that it was asked for and has written to
        its log meanwhile, else by what it said within the second before; and what others wait for.
        """
        rank = culprit.rank
        if not culprit.hangs or rank is None:
            return culprit
        if rank in self._unanswered:
            log = self._run.rank_log(rank)
            with log.open("rb") as file:
                file.seek(self._unanswered[rank])
                stack = of_main_thread(file.read(DUMP_BYTES).decode(errors="replace"))
            seen = self._seen.get(rank, Seen())
            cause = (
                f"{culprit.cause}; it is {in_words(stack)}" if stack else seen.told(culprit.cause)
            )
            lines = as_lines(stack or [Frame(*frame) for frame in seen.stack]) or tail(log)
            culprit = replace(culprit, cause=cause, log_tail=tuple(lines))
        return told_with_waits(culprit, {of: seen.waits for of, seen in self._seen.items()})
