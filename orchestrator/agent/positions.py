"""Positions of a run's workers, as their agents report them: which are stuck, which wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.agent.liveness import ASLEEP, BUSY, FROZEN, SILENT, STOPPED_PROCESS, Seen
from orchestrator.agent.root_cause import Straggler, add_waits, read_straggler, tail
from orchestrator.agent.stacks import (
    DUMP_BYTES,
    STACK_S,
    Frame,
    as_lines,
    in_words,
    of_main_thread,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import Culprit

CAUSES = {
    STOPPED_PROCESS: FROZEN,
    ASLEEP: "it slept in {1} for {0} s (cluster.hang_timeout_s), where nothing wakes it: a disk or "
    "a file system does not answer",
    SILENT: "it gave no sign of life for {0} s ({2}): code that holds Python's interpreter waits "
    "there for something",
    BUSY: "it said nothing for {0} s (cluster.hang_timeout_s), although its process lives: code "
    "that holds Python's interpreter",
}


class Positions:
    """Positions of one attempt's workers.

    Attributes:
        behind: workers that report that they have not reached where the others wait.
    """

    answer_s = STACK_S

    def __init__(self, run: RunDir, hang_s: float) -> None:
        self._run, self._hang_s = run, hang_s
        self._seen: dict[int, Seen] = {}
        # Positions at the request count: the signal that requests a stack may wake a sleeper.
        self._answered: set[int] = set()
        self._unanswered: dict[int, int] = {}  # rank: the size of its log at the request
        self.behind: dict[int, Straggler] = {}

    def handle_event(self, node: str, event: Mapping[str, Any]) -> None:
        """Record an agent's report of a worker."""
        kind, rank = event["event"], event["rank"]
        if kind == "seen":
            self._answered.add(rank)
        if kind == "seen" or ("seen" in event and rank not in self._answered):
            self._seen[rank] = Seen.from_json(event["seen"])
        if kind == "started" or (kind == "behind" and event["behind"] is None):
            self.behind.pop(rank, None)
        elif kind == "behind":
            self.behind[rank] = read_straggler(rank, node, event["behind"])

    def unresponsive(
        self, rank: int, node: str, event: Mapping[str, Any], limit_s: float
    ) -> Culprit:
        """Blame a worker that sent nothing for `limit_s`."""
        key = f"cluster.{'hang' if limit_s == self._hang_s else 'heartbeat'}_timeout_s"
        cause = CAUSES[event["state"]].format(f"{limit_s:g}", event["asleep_in"], key)
        log = self._run.rank_log(rank)
        self._unanswered[rank] = log.stat().st_size if log.exists() else 0
        return Culprit(rank=rank, node=node, cause=cause, hangs=True)

    def describe(self, culprit: Culprit) -> Culprit:
        """Describe where a hanging culprit is, and what the others wait for.

        The place is the stack written to its log since the request, else its last report.
        """
        rank = culprit.rank
        if not culprit.hangs or rank is None:
            return culprit
        if rank in self._unanswered:
            log = self._run.rank_log(rank)
            stack: list[Frame] = []
            if log.exists():
                with log.open("rb") as file:
                    file.seek(self._unanswered[rank])
                    stack = of_main_thread(file.read(DUMP_BYTES).decode(errors="replace"))
            seen = self._seen.get(rank, Seen())
            cause = (
                f"{culprit.cause}; it is {in_words(stack)}" if stack else seen.locate(culprit.cause)
            )
            lines = as_lines(stack or [Frame(*frame) for frame in seen.stack]) or tail(log)
            culprit = replace(culprit, cause=cause, log_tail=tuple(lines))
        return add_waits(culprit, {of: seen.waits for of, seen in self._seen.items()})
