"""Find where two runs that should be equal part: the update by their records, the micro-step and
the parameter by a replay of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.replay.agreement import LeafDifference, agreement, first_leaf_difference
from orchestrator.replay.recorded import RecordedRun
from orchestrator.replay.scratch import Replay, Request, scratch
from orchestrator.report.compare_runs import differing_settings
from orchestrator.rundir.checkpoints import updates_after
from orchestrator.rundir.environments import NOT_RECORDED, differing
from orchestrator.rundir.files import open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import History, Kind, Record
from orchestrator.runs.inputs import code_differences

COMPARED = ("gradient_digest", "loss", "gradient_norm", "learning_rate", "samples", "weight")
_LINE = re.compile(
    rb'\{"update": (?P<update>\d+), "time": [^,]+, "loss": (?P<loss>[^,]+), '
    rb'"weight": (?P<weight>[^,]+),.*?"gradient_norm": (?P<gradient_norm>[^,]+), '
    rb'(?:"gradient_digest": (?P<gradient_digest>"[^"]*"), )?.*?"learning_rate": '
    rb'(?P<learning_rate>[^,]+), "samples": (?P<samples>\d+),.*"attempt": (?P<attempt>\d+)\}\n'
)
"""An update's line as runs write it; any other is read as JSON."""


def quick_records(path: Path) -> Iterator[Record]:
    """Yield the records of a metrics.jsonl as far as they are compared, each field as its text.

    A long file has a hundred thousand lines, and reading all of each takes ten times as long.
    """
    with open(open_nofollow(path), "rb") as file:  # noqa: PTH123  # a descriptor
        for line in file:
            if (match := _LINE.fullmatch(line)) is None:
                yield from _whole(line)
                continue
            record: Record = match.groupdict()
            record["update"], record["attempt"] = int(match["update"]), int(match["attempt"])
            if match["gradient_digest"] is None:
                del record["gradient_digest"]
            yield record


def _whole(line: bytes) -> Iterator[Record]:
    """Yield the record of a line that is not a plain update's, if it counts."""
    try:
        record: Any = json.loads(line)
    except ValueError:  # torn by a kill
        return
    if not isinstance(record, dict) or not isinstance(record.get("update"), int):
        return
    if Kind.of(record) is Kind.UPDATE:
        values = {name: json.dumps(record[name]).encode() for name in COMPARED if name in record}
        record = {"update": record["update"], "attempt": record.get("attempt", 0), **values}
    yield record


@dataclass(kw_only=True)
class Bisection:
    """Where two runs part.

    Attributes:
        updates: recorded by both, from `first` on.
        by_digest: the gradients' digests were compared, not only losses and norms.
        update: the first that differs; None if there is none.
        fields: of the record that differ there, with both texts.
        leaf: the first micro-step that two replays compute differently.
        repeats: whether each run's own replay repeats its record of that update.
        unlike: see `differences_of`.
        notes: what could not be done, and why.
    """

    updates: int
    first: int = 0
    by_digest: bool
    update: int | None = None
    fields: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    leaf: LeafDifference | None = None
    repeats: tuple[bool, bool] | None = None
    unlike: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_records(a: Path, b: Path) -> Bisection:
    """Compare two records, update by update.

    Raises:
        UsageError: they have no update in common.
    """
    histories = History(quick_records(a)), History(quick_records(b))
    left, right = ({int(r["update"]): r for r in history.updates} for history in histories)
    common = sorted(left.keys() & right.keys())
    if not common:
        raise UsageError(f"{a.parent} and {b.parent} have recorded no update that both have made")
    digests = [update for update in common if _has_digest(left[update], right[update])]
    bisection = Bisection(
        updates=len(common), first=common[0], by_digest=len(digests) == len(common)
    )
    for update in common:
        record, other = left[update], right[update]
        unlike = {
            name: (record[name].decode(), other[name].decode())
            for name in COMPARED
            if name in record and name in other and record[name] != other[name]
        }
        if unlike:
            bisection.update, bisection.fields = update, unlike
            break
    return bisection


def _has_digest(a: Record, b: Record) -> bool:
    return "gradient_digest" in a and "gradient_digest" in b


def differences_of(a: RunDir, b: RunDir) -> list[str]:
    """Return what differs in settings, code, versions, processor and threads of two runs, or may
    differ since it is not recorded.
    """
    settings = differing_settings(a, b)
    differences = [f"{key}: {values[0]} against {values[1]}" for key, values in settings.items()]
    environments = a.read_environment(), b.read_environment()
    differences += [f"{name}: {values}" for name, values in differing(*environments).items()]
    if None in environments:
        differences.append(NOT_RECORDED)
    return [*differences, *code_differences(a, b)]


def bisect_runs(
    a: RecordedRun, b: RecordedRun, say: Callable[[str], None], *, replays: bool = True
) -> Bisection:
    """Find the first update, micro-step and parameter in which two runs differ.

    Args:
        say: shows a line of progress.
        replays: compute that update again for both.

    Raises:
        UsageError: they have no update in common.
    """
    bisection = compare_records(a.run.metrics, b.run.metrics)
    bisection.unlike = differences_of(a.run, b.run)
    if not bisection.by_digest:
        bisection.notes.append(
            "not all records have a gradient_digest (accumulation.reduction=reproducible writes "
            "it): compared are losses and gradient norms, in which a small difference may show late"
        )
    if bisection.update is None or not replays:
        return bisection
    try:
        left, right = (_replayed(run, bisection.update, say) for run in (a, b))
    except OrchestratorError as error:
        bisection.notes.append(f"the update could not be computed again: {error}")
        return bisection
    (own_a, repeats_a), (own_b, repeats_b) = left, right
    update = bisection.update
    bisection.leaf = first_leaf_difference(
        {update: own_a.get(update, {"leaves": []})}, {update: own_b.get(update, {"leaves": []})}
    )
    bisection.repeats = repeats_a, repeats_b
    return bisection


def _replayed(
    recorded: RecordedRun, update: int, say: Callable[[str], None]
) -> tuple[dict[int, Any], bool]:
    """Compute an update of a run again; return its micro-steps, and whether all that was computed
    agrees with the record.
    """
    checkpoint, notes = recorded.checkpoint_before(update)
    for text in notes:
        say(f"note: {text}")
    first = 0 if checkpoint is None else updates_after(checkpoint)
    say(f"{recorded.path}: computing updates {first} to {update} again")
    with scratch(recorded, (), say) as place:
        request = Request(update=update, last=update, gradients=True)
        replay: Replay = place.compute(request, checkpoint)
        lines = replay.lines
        agreed = agreement(recorded, replay, update, exact=recorded.is_exact)
    return lines, agreed.holds
