"""All that a rank trains with, in whatever group it is: the windows, the record, and who writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.config.schema import Config
from orchestrator.engine.api import Engine, Group
from orchestrator.errors import PeerLost
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.plan.plan import Plan
from orchestrator.rank.attendance import Attendance
from orchestrator.rank.loop import Attended, Outcome, train
from orchestrator.rank.windows import RankWindows
from orchestrator.rank.writing.recorder import Recorder, Silent
from orchestrator.rank.writing.result import memory_of_ranks
from orchestrator.report.metrics import read_metrics
from orchestrator.run_folder.rundir import RunDir


class WayOn(Protocol):
    """What becomes of a rank whose peer is gone; see `Survivors`."""

    def go_on(self, error: PeerLost, outcome: Outcome) -> dict[str, Any]: ...
    def too_few(self) -> PeerLost | None: ...
    def watched(self, inner: Attended) -> Attended: ...
    @property
    def place(self) -> tuple[int, int]: ...


@dataclass(kw_only=True, slots=True)
class Training:
    """One rank's, from its first window to its last.

    Attributes:
        rates: of the job, in the place of the plan's.
        outcome: where the run stands.
        recorder: on rank 0 what writes. When that one dies, another rank 0's comes into being.
    """

    run: RunDir
    attempt: int
    config: Config
    engine: Engine
    planned: Plan
    rates: Callable[[int], float] | None
    attendance: Attendance
    stop: StopFlag
    outcome: Outcome = field(default_factory=Outcome)
    recorder: Recorder | Silent = field(default_factory=Silent)

    def among(self, others: WayOn | None, group: Group) -> dict[str, list[int]]:
        """Train to the end, in as many groups as it takes; give the memory of the last one's ranks.
        Collective.

        Args:
            others: None where nobody goes on without the others.
            group: the first one.

        Raises:
            PeerLost: a peer is gone, and there is no way on.
        """
        rank, ranks = group.rank, group.size
        while True:
            recorder = self.attendance.recorder(
                self.recorder, self.outcome, transport=group.transport
            )
            watched = others.watched(recorder) if others else recorder
            try:
                return self._in_group(watched, rank, ranks)
            except PeerLost as error:
                if others is None:
                    raise
                note = others.go_on(error, self.outcome)
                rank, ranks = others.place
                self._write(note, rank)
                if why := others.too_few():
                    self._save()
                    raise why from error

    def _save(self) -> None:
        """A checkpoint of the last update. Collective."""
        if self.outcome.updates:
            self.engine.gather_state()
            self.recorder.checkpoint(self.outcome.updates, self.outcome.samples)
            self.recorder.settle()

    def _in_group(self, recorder: Attended, rank: int, ranks: int) -> dict[str, list[int]]:
        assert self.planned.updates is not None  # noqa: S101  # the data set is known here
        train(
            engine=self.engine,
            windows=RankWindows(self.planned, rank, self.rates, ranks=ranks),
            settings=self.config.train,
            recorder=recorder,
            updates=self.planned.updates,
            stop=self.stop,
            rank=rank,
            outcome=self.outcome,
        )
        self.attendance.at_the_end()
        return memory_of_ranks(self.engine)

    def write(self) -> Recorder:
        """This rank writes from now on."""
        assert self.planned.updates is not None  # noqa: S101  # the data set is known here
        self.recorder = Recorder(
            self.run, self.attempt, self.config, self.engine, self.planned.updates
        )
        return self.recorder

    def _write(self, note: dict[str, Any], rank: int) -> None:
        """On the rank that writes: what the one before it did not come to follows."""
        if rank:
            return
        recorder = self.recorder
        if isinstance(recorder, Silent):
            recorder = self.write()
            there = read_metrics(self.run.metrics)
            update = self.outcome.updates - 1
            self.outcome.recorded = max((r["update"] + 1 for r in there.updates), default=0)
            for record in there.evaluations:
                if record["update"] == update:
                    self.outcome.evaluated = update + 1
                    self.outcome.evaluation = record["evaluation"]
        recorder.note["survived"] = note
