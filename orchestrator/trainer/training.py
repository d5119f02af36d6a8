"""The training of one rank: its state, its record in the run folder, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.client.loop import Callback, TrainingProgress
from orchestrator.config.schema import Config
from orchestrator.data import HeldOutData
from orchestrator.engine.api import Engine, Group, Survives
from orchestrator.errors import JobError
from orchestrator.job import Job
from orchestrator.plan.plan import Plan
from orchestrator.plan.recorded_speeds import SpeedChanges
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import (
    CHANGES,
    RECENT_BYTES,
    Figures,
    StoredHistory,
    Tail,
    read_metrics,
    read_metrics_around,
)
from orchestrator.rundir.outcome import State
from orchestrator.rundir.warnings import warn
from orchestrator.trainer.best import BestCheckpoint
from orchestrator.trainer.recorder import Recorder
from orchestrator.trainer.survival import GroupMembership
from orchestrator.units import plural


@dataclass(kw_only=True, slots=True)
class Training:
    """State of one rank's training, from its first window to its last.

    Attributes:
        group: the first one.
        updates: of the whole run.
        rates: the job's own learning rates, if any.
        held_out: what all ranks evaluate together; None where the job has none.
        best: watches the figure of `train.keep_best`, in the present group.
        callbacks: of the job, then those of `run.callbacks`.
        membership: None where losses are not survived.
        recorded_speeds: that the run repeats, if any.
        recorder: on rank 0, the one that writes. If that rank dies, another makes its own.
        in_boundary: weights and optimizer may be changing.
    """

    run: RunDir
    attempt: int
    config: Config
    job: Job
    engine: Engine
    checkpoints: CheckpointManager
    group: Group
    planned: Plan
    updates: int
    rates: Callable[[int], float] | None
    held_out: HeldOutData | None = None
    best: BestCheckpoint | None = None
    callbacks: Sequence[Callback] = ()
    membership: GroupMembership | None = None
    recorded_speeds: SpeedChanges = field(default_factory=list)
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    recorder: Recorder | None = None
    in_boundary: bool = False

    def restore(self, rank: int) -> bool:
        """Load the newest valid checkpoint, if any; return whether there is one. Collective."""
        position = self.checkpoints.restore(rank)
        if position is not None:
            self.progress.updates, self.progress.samples = position
        return position is not None

    def save(self) -> None:
        """Write a checkpoint after the last update. Collective."""
        if self.progress.updates:
            self.checkpoints.collect(self.progress.updates, self.progress.samples)
            if self.recorder is not None:
                self.checkpoints.save_now(self.progress)
            self.checkpoints.complete_parts(wait=True)

    @property
    def evaluates_together(self) -> bool:
        """Return whether all ranks evaluate: a job's held-out data, or a model in shards."""
        return self.held_out is not None or self.config.engine.shard_model != "none"

    @property
    def saves_on_failure(self) -> bool:
        """Return whether this rank can save the last boundary's state when another one fails.

        An engine that could continue in another group still has that state.
        """
        whole = self.checkpoints.can_save() and self.engine.part() is None
        return whole and isinstance(self.engine, Survives)

    def go_back(self, rank: int) -> int | None:
        """Load the newest checkpoint; return how many updates that loses, None without one."""
        self.checkpoints.wait()  # one that is being written counts
        before = self.progress.updates
        if not self.restore(rank):
            return None
        self.progress.go_back()
        return max(0, before - self.progress.updates)

    def record(self) -> Recorder:
        """Make this rank the one that writes, and note how many collectives its group needs."""
        if self.recorder is None:
            self.recorder = Recorder(
                self.run, self.attempt, self.config, self.engine, self.checkpoints, self.updates
            )
        ranks = self.membership.size if self.membership else self.planned.ranks
        self.recorder.note["planned_collectives"] = self.planned.traffic.among(ranks)
        return self.recorder

    def close_tracker(self, state: State) -> None:
        """Close the tracker, if it is this rank's; the run ended in `state`."""
        if self.recorder is not None:
            self.recorder.scalars.close(state)

    def take_over_record(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0 of a new group, record changes; continue the record of a lost rank 0."""
        progress, took_over = self.progress, self.recorder is None
        recorder = self.record()
        if took_over:
            self.recall()
            history = read_metrics(self.run.metrics)
            own_changes = [
                line for line in history.changes if line.get("attempt", 0) == self.attempt
            ]
            recorder.generation = max((line["generation"] for line in own_changes), default=0)
            recorded = history.updates[-1]["update"] + 1 if history.updates else 0
            progress.recorded = min(recorded, progress.updates)
            first = (
                progress.recent_updates[0].window.update
                if progress.recent_updates
                else progress.updates
            )
            if progress.recorded < first:
                warn(
                    f"metrics.jsonl lacks updates {progress.recorded + 1} to {first}: the rank "
                    f"that wrote it is gone, and there had been no room for its lines"
                )
        recorder.record_changes(changes, progress.updates)

    def complete_record(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Write the updates that metrics.jsonl lacks, on the rank that saves them at a failure."""
        if self.recorder is None:  # the rank that writes is lost, or has not come so far
            self.take_over_record(changes)
        recorder, progress = self.record(), self.progress
        for done in progress.recent_updates:
            if done.window.update >= progress.recorded:
                recorder.on_boundary(done)
        progress.recorded = progress.updates

    def recall(self) -> None:
        """Take from the record what it says of the last update: from its end, where that is."""
        progress = self.progress
        if not progress.updates:
            return
        last = progress.updates - 1
        history = read_metrics_around(self.run.metrics, last)
        if record := history.update(last):
            progress.loss = record["loss"]
        if record := history.evaluation(last):
            progress.evaluated, progress.evaluation = progress.updates, record["evaluation"]

    def require_applied(self) -> None:
        """On the rank that writes, refuse a training that has changed no weight.

        Raises:
            JobError: no update of any attempt was applied.
        """
        path = self.run.metrics
        # In almost every run one of the last updates was applied, which spares reading the others.
        recent = StoredHistory(Tail(path, RECENT_BYTES)).updates
        if any(record.get("applied", True) for record in recent):
            return
        updates = read_metrics(path).updates
        if self.progress.updates and not any(record.get("applied", True) for record in updates):
            raise JobError(
                f"none of {plural(self.progress.updates, 'update')} was applied, so the weights "
                "are those of the beginning: each had a loss or gradient that is not finite "
                "(train.on_non_finite=skip, or float16), or nothing in it counted (a weight of 0)"
            )

    def _best_figure(self) -> dict[str, Any]:
        """Return what result.json says of the best evaluation."""
        figure = None if self.best is None else self.best.figure
        if figure is None or not figure.updates:
            return {}
        summary: dict[str, Any] = {"best": figure.to_json()}
        if self.progress.ended_early:
            many = plural(figure.without, "evaluation")
            summary["ended_early"] = f"no better {figure.objective} in {many}"
        return summary

    def facts_of_ranks(self) -> dict[str, Any]:
        """Return values of result.json that all ranks know together. Collective.

        `memory` has bytes by what they are for, and their peak, a number for each rank, as
        `seconds_of_ranks` has those of work and waiting in this attempt's updates;
        `weights_sha256` is among them if no rank holds all weights.
        """
        engine = self.engine
        own_memory = {**engine.memory_bytes(), "peak": engine.peak_memory_bytes()}
        times = self.progress.work_s, self.progress.wait_s
        rows = engine.gather([*times, *(float(size) for size in own_memory.values())])
        work, wait, *sizes = zip(*rows, strict=True)
        facts: dict[str, Any] = {
            "memory": {
                name: list(map(int, row)) for name, row in zip(own_memory, sizes, strict=True)
            },
            "seconds_of_ranks": {
                "work": [round(s, 3) for s in work],
                "wait": [round(s, 3) for s in wait],
            },
        }
        if engine.part() is not None:
            facts["weights_sha256"] = engine.weights_sha256()
        return facts

    def result(self, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the values of result.json, which rank 0 writes when a run ends well or is stopped.

        Args:
            facts: `facts_of_ranks`; `memory` in the result is that of the largest, in bytes.
            seconds: of this attempt.
        """
        progress, recorded = self.progress, read_metrics(self.run.metrics)
        figures = Figures(recorded.updates)  # of all attempts
        changes = {key: [line[key] for line in recorded.changes if key in line] for key in CHANGES}
        return {
            "state": (State.STOPPED if progress.stopped else State.FINISHED).value,
            "updates": progress.updates,
            "samples": progress.samples,
            "loss": progress.loss,
            "metrics": progress.evaluation,
            "optimizer": self.engine.optimizer_used(),
            "weights_sha256": facts.get("weights_sha256") or self.engine.weights_sha256(),
            "peak_memory_bytes": facts["memory"]["peak"],
            "memory": {name: max(sizes) for name, sizes in facts["memory"].items()},
            "seconds_of_ranks": facts["seconds_of_ranks"],
            "collectives": figures.total("collectives") or 0,
            "bytes_on_wire": figures.total("bytes_on_wire") or 0,
            "seconds": seconds + figures.seconds_before(self.attempt),
            "planned_updates": self.planned.updates,
            "planned_collectives_per_update": self.planned.traffic.collectives,
            "culprit": None,
            "restarts": self.run.restarts(),
            **self._best_figure(),
            **{key: notes for key, notes in changes.items() if notes},
        }
