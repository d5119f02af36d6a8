"""Replay one update of a run: compute it again, compare it with the record, look into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config.schema import node_range
from orchestrator.errors import UsageError
from orchestrator.replay.agreement import (
    Agreement,
    agreement,
    figures_of,
    first_leaf_difference,
)
from orchestrator.replay.recorded import RecordedRun
from orchestrator.replay.scratch import Line, Replay, Request, Scratch
from orchestrator.rundir.checkpoints import folder_of, updates_after
from orchestrator.rundir.environments import NOT_RECORDED, environment_notes


@dataclass(kw_only=True)
class Replayed:
    """What a replay of one update found.

    Attributes:
        first: the first update that was computed; `last`: the last one.
        checkpoint: from which it began; None: the initial weights.
        agreement: None if the record does not have the update: the run failed in it.
        leaves: of the update, the largest mean loss first.
        samples: the same with each sample by itself, if that was asked for.
        norms: of the gradient, by parameter, the largest first.
        notes: what differs from the run: code, data, versions, machine.
        why: causes of a disagreement, as far as they were found.
    """

    run: Path
    update: int
    first: int
    last: int
    checkpoint: Path | None
    agreement: Agreement | None
    leaves: list[Line]
    norms: dict[str, float]
    samples: list[Line] = field(default_factory=list[Line])
    notes: list[str] = field(default_factory=list[str])
    why: list[str] = field(default_factory=list[str])

    @property
    def agrees(self) -> bool:
        return self.agreement is None or self.agreement.holds

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if key != "agreement"}
        agreed = None if self.agreement is None else self.agreement.to_json()
        paths = {"run": str(self.run), "checkpoint": self.checkpoint and str(self.checkpoint)}
        return {**values, **paths, "agreement": agreed}


def replay_update(
    recorded: RecordedRun,
    scratch: Scratch,
    update: int,
    *,
    short: bool = False,
    by_sample: bool = False,
) -> tuple[Replayed, Path | None]:
    """Compute an update again.

    Args:
        short: stop after the update, and do not continue to the next checkpoint.
        by_sample: compute the update once more with each sample by itself.

    Returns:
        What was found, and the checkpoint right before the update, in the replay or
        the run (None: the initial weights).

    Raises:
        UsageError: the run has no such update, or a setting that cannot be replayed.
        OrchestratorError: the replay failed.
    """
    record = recorded.require_update(update)
    if by_sample and recorded.is_program:
        raise UsageError(
            f"--by-sample: {recorded.path} has a loop of its own, which decides the size of its "
            "micro-batches; it needs a job class. Without it, micro-steps are listed"
        )
    checkpoint, notes = recorded.checkpoint_before(update)
    first, last = 0 if checkpoint is None else updates_after(checkpoint), update
    after = None if short or record is None else recorded.checkpoint_after(update)
    if after is not None:
        last = updates_after(after) - 1
    if checkpoint is None and (recorded.updates[0]["update"] > 0):
        notes.append("the record does not begin at update 0; what came before is not compared")
    notes += recorded.changes(code=not scratch.uses_copy)
    if scratch.uses_copy:
        notes.append(f"the code is the run's own copy: {scratch.code_copy()}")
    say = scratch.say
    for text in notes:
        say(f"note: {text}")
    begin = "the initial weights" if checkpoint is None else f"the checkpoint after {first} updates"
    which = f"update {first}" if first == last else f"updates {first} to {last}"
    say(f"computing {which} again, from {begin}")
    request = Request(update=update, last=last, keep_before=update > first)
    replay = scratch.compute(request, checkpoint)
    before = folder_of(replay.run.checkpoints, update)
    if not before.exists():  # it begins there, or the program saves when it likes
        before = checkpoint
    line = replay.lines.get(update) or {"leaves": [], "norms": {}}
    machine = environment_notes(replay.run, recorded.run)
    for text in machine:
        say(f"note: {text}")
    report = Replayed(
        run=recorded.path,
        update=update,
        first=first,
        last=last,
        checkpoint=checkpoint,
        agreement=None,
        leaves=by_loss(line["leaves"]),
        norms=by_size(line["norms"]),
        notes=[*notes, *machine],
    )
    if record is not None:
        report.agreement = agreement(recorded, replay, update, exact=recorded.is_exact)
    if not report.agrees:
        report.why = _causes(scratch, replay, report)
    if by_sample:
        say(f"computing update {update} again, each sample by itself")
        alone = scratch.compute(Request(update=update, last=update, by_sample=True), before)
        report.samples = by_loss((alone.lines.get(update) or {"leaves": []})["leaves"])
    return report, before


def by_loss(leaves: Sequence[Line]) -> list[Line]:
    """Return micro-steps by their mean loss, what is not finite and the largest first."""

    def mean(leaf: Line) -> tuple[bool, float]:
        value = leaf["total"] / leaf["weight"] if leaf["weight"] else 0.0
        finite = value - value == 0
        return finite, -value if finite else 0.0

    return sorted(leaves, key=mean)


def by_size(norms: dict[str, float]) -> dict[str, float]:
    """Return norms by size, what is not finite and the largest first."""
    order = sorted(norms.items(), key=lambda item: (item[1] - item[1] == 0, -item[1]))
    return dict(order)


def _causes(scratch: Scratch, replay: Replay, report: Replayed) -> list[str]:
    """Return what a disagreement may come from: computes the first differing update twice."""
    assert report.agreement is not None  # noqa: S101  # as the caller has seen
    differs = report.agreement.differing
    if not report.agreement.exact and not scratch.has_shape_of_run():
        cluster = scratch.recorded.config.cluster
        shape = f"cluster.nodes={node_range(cluster.nodes)[1]} "
        shape += f"cluster.ranks_per_node={cluster.ranks_per_node}"
        other = (
            "this replay has other micro-batches than the run's ranks, on which batch norm, "
            f"dropout and padding depend; with {shape} it has theirs"
        )
        return [other]
    if differs is None or not report.agreement.exact:
        return []
    scratch.say(f"update {differs} differs from the record; computing it once more, to compare")
    again = scratch.compute(Request(update=differs, last=differs), report.checkpoint)
    if (leaf := first_leaf_difference(replay.lines, again.lines)) is not None:
        where = f"in micro-step {leaf.leaf} of update {leaf.update} (loss {leaf.loss[0]!r} and "
        return [_two_replays_differ(f"{where}{leaf.loss[1]!r})")]
    records = replay.history.update(differs), again.history.update(differs)
    if records[0] and records[1]:
        figures = figures_of(records[0], records[1], report.agreement.precision)
        if not all(figure.is_same for figure in figures):
            return [_two_replays_differ(f"in the gradient of update {differs}")]
    why = ["computed twice here, it has the same bits both times"]
    if report.agreement.weights is not None and not report.agreement.weights_difference:
        edited = (
            f"the weights at the checkpoint after {report.agreement.weights} updates agree, so the "
            f"line of update {differs} in metrics.jsonl is not what the run computed: it was "
            "changed, or a rank recorded something else than it computed"
        )
        return [*why, edited]
    return [*why, _unrepeated(differs, report.notes)]


def _unrepeated(update: int, notes: Sequence[str]) -> str:
    """Return why an update may have other bits than recorded, and the same in each replay."""
    if any(text != NOT_RECORDED for text in notes):
        return "what differs from the run (the notes) may be the reason: undo it, and repeat"
    if notes:
        return (
            f"{NOT_RECORDED}; if they are those of the run, its code, its data or a machine did "
            f"something else in update {update}"
        )
    return (
        "nothing that is known to change bits differs from the run, so its code, its data or a "
        f"machine did something else in update {update}"
    )


def _two_replays_differ(where: str) -> str:
    return (
        f"two replays here differ, first {where}: the job draws random numbers from another "
        "generator than Python's, NumPy's or torch's own, or its data or state change"
    )
