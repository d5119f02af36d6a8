"""All that a rank trains with, as one value: the engine, the plan, the record, and who writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.config.schema import Config
from orchestrator.engine.api import Engine, Group
from orchestrator.errors import PeerLost
from orchestrator.plan.plan import Plan
from orchestrator.rank.loop import Attended, Outcome
from orchestrator.rank.restoring import restore
from orchestrator.rank.writing.recorder import Recorder, Silent
from orchestrator.rank.writing.survival_notes import Notes, merged, unrecorded
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.warnings import warn


class WayOn(Protocol):
    """What becomes of a rank where others are gone, or come; see `Survivors`."""

    def go_on(self, error: PeerLost, outcome: Outcome) -> list[Notes]: ...
    def grow(self, outcome: Outcome) -> list[Notes]: ...
    def too_few(self) -> PeerLost | None: ...
    def watched(self, inner: Attended) -> Attended: ...
    @property
    def place(self) -> tuple[int, int]: ...


@dataclass(kw_only=True, slots=True)
class Training:
    """One rank's, from its first window to its last.

    Attributes:
        group: the first one.
        rates: of the job, in the place of the plan's.
        others: None where nobody goes on without the others.
        outcome: where the run stands.
        entered: of a newcomer, what is to be recorded of its coming.
        recorder: on rank 0 what writes. When that one dies, another rank 0's comes into being.
    """

    run: RunDir
    attempt: int
    config: Config
    engine: Engine
    group: Group
    planned: Plan
    rates: Callable[[int], float] | None
    others: WayOn | None = None
    outcome: Outcome = field(default_factory=Outcome)
    entered: list[Notes] | None = None
    recorder: Recorder | Silent = field(default_factory=Silent)

    def save(self) -> None:
        """A checkpoint of the last update. Collective."""
        if self.outcome.updates:
            self.engine.gather_state()
            self.recorder.checkpoint(self.outcome.updates, self.outcome.samples)
            self.recorder.settle()

    def over(self) -> bool:
        """Whether no window follows."""
        assert self.planned.updates is not None  # noqa: S101  # the data set is known here
        return self.outcome.over(self.planned.updates)

    def back(self, rank: int) -> int | None:
        """To the newest checkpoint: how many updates that takes back; None without one. Collective.

        Args:
            rank: of this one in the group as it is now.
        """
        self.recorder.settle()  # what is being written counts
        outcome, stood = self.outcome, self.outcome.updates
        if not restore(self.run, self.engine, outcome, rank):
            return None
        outcome.go_back()
        return max(0, stood - outcome.updates)

    def write(self) -> Recorder:
        """This rank writes from now on."""
        assert self.planned.updates is not None  # noqa: S101  # the data set is known here
        self.recorder = Recorder(
            self.run, self.attempt, self.config, self.engine, self.planned.updates
        )
        self.recorder.note["planned_collectives"] = self._collectives_planned()
        return self.recorder

    def _collectives_planned(self) -> int | None:
        """Return the collectives of each update of this group, if the plan knows them."""
        planned = self.planned
        return planned.traffic.among(self.others.place[1] if self.others else planned.ranks)

    def _miss_lines(self) -> None:
        """Say which lines nobody can write any more."""
        outcome = self.outcome
        first = outcome.kept[0].window.update if outcome.kept else outcome.updates
        if outcome.recorded < first:
            warn(
                f"metrics.jsonl lacks updates {outcome.recorded + 1} to {first}: the rank that "
                f"wrote it is gone, and there had been no room for its lines"
            )

    def write_on(self, history: list[Notes]) -> None:
        """On the rank that writes in the next group: what the one before it did not come to
        follows, and with it what no line has yet of these changes.
        """
        recorder = self.recorder
        if isinstance(recorder, Silent):
            recorder = self.write()
            there = read_metrics(self.run.metrics)
            update = self.outcome.updates - 1
            recorded = max((r["update"] + 1 for r in there.updates), default=0)
            self.outcome.recorded = min(recorded, self.outcome.updates)
            self._miss_lines()
            for record in there.evaluations:
                if record["update"] == update:
                    self.outcome.evaluated = update + 1
                    self.outcome.evaluation = record["evaluation"]
            mine = [line for line in there.updates if line.get("attempt", 0) == self.attempt]
            notes = unrecorded(history, mine)
        else:
            notes = merged(recorder.note, history[-1])
        recorder.note.update(notes, planned_collectives=self._collectives_planned())
