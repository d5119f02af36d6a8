"""Positions of a run's workers, as their agents report them: who is stuck, who waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.agent.liveness import ASLEEP, FROZEN, NO_SIGN, Seen
from orchestrator.agent.node_spec import NodeSpec
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

QUIET = (
    "it said nothing for {} s (cluster.hang_timeout_s), although its process lives: code that "
    "holds Python's interpreter"
)


class Positions:
    """Positions of one attempt's workers.

    Attributes:
        behind: workers that report that they have not reached where the others wait.
    """

    answer_s = STACK_S

    def __init__(self, run: RunDir, spec: NodeSpec, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._run, self._spec = run, spec
        self._frozen: dict[int, tuple[str, float]] = {}  # rank: its node, since when
        self._seen: dict[int, Seen] = {}
        # Positions at the request count: the signal that requests a stack may wake a sleeper.
        self._answered: set[int] = set()
        self._unanswered: dict[int, int] = {}  # rank: the size of its log at the request
        self.behind: dict[int, Straggler] = {}

    def take(self, node: str, event: Mapping[str, Any]) -> None:
        """Record an agent's report of a worker."""
        kind, rank = event["event"], event["rank"]
        if kind == "seen":
            self._answered.add(rank)
        if kind == "seen" or ("seen" in event and rank not in self._answered):
            self._seen[rank] = Seen.from_json(event["seen"])
        if kind == "frozen":
            self._frozen[rank] = (node, self._clock())
        elif kind in ("thawed", "exit"):
            self._frozen.pop(rank, None)
        elif kind == "started" or (kind == "behind" and event["behind"] is None):
            self.behind.pop(rank, None)
        elif kind == "behind":
            self.behind[rank] = read_straggler(rank, node, event["behind"])

    def ended(self, rank: int) -> None:
        """Forget a worker whose agent is lost."""
        self._frozen.pop(rank, None)

    def too_long_frozen(self, *, survived: bool) -> list[Culprit]:
        """Return the workers that were stopped for too long, each once.

        They raise no error, so the others would wait for ever.

        Args:
            survived: the others would continue without them.
        """
        limit_s = self._spec.silence_s if survived else self._spec.heartbeat_s
        now = self._clock()
        lost = [(rank, node) for rank, (node, at) in self._frozen.items() if now - at >= limit_s]
        for rank, _ in lost:
            del self._frozen[rank]
        return [self._lost(rank, node, FROZEN.format(f"{limit_s:g}")) for rank, node in lost]

    def silent(self, node: str, event: Mapping[str, Any]) -> Culprit:
        """Blame a worker that gives no sign of life, although it is not stopped."""
        cause = NO_SIGN.format(f"{self._spec.heartbeat_s:g}")
        if event["asleep"]:
            cause = ASLEEP.format(event["asleep"], f"{self._spec.hang_s:g}")
        return self._lost(event["rank"], node, cause)

    def quiet(self, rank: int, node: str) -> Culprit:
        """Blame a live worker that has not let its other threads run for too long."""
        return self._lost(rank, node, QUIET.format(f"{self._spec.hang_s:g}"))

    def _lost(self, rank: int, node: str, cause: str) -> Culprit:
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
