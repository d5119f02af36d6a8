"""Agreement of a replay with the record of its run: in bits, or up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.replay.recorded import RecordedRun
from orchestrator.replay.scratch import Line, Replay
from orchestrator.report.compare import compare
from orchestrator.rundir.checkpoints import weights_of
from orchestrator.rundir.metrics import Record

FIGURES = ("loss", "gradient_norm", "gradient_digest", "weight", "applied")
"""Fields of a record that a replay must repeat."""
NAMES = {"gradient_norm": "gradient norm", "gradient_digest": "gradient's digest"}
EPSILONS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Rounding units: the distance of 1 to the next larger number."""
ROUNDINGS = 1000.0
"""Rounding units for each recomputed update that another order of a sum may explain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of an update, as recorded and as recomputed.

    Attributes:
        units: distance in rounding units; 0 for the same bits, None where it has no measure.
    """

    name: str
    recorded: Any
    replayed: Any
    units: float | None

    @property
    def is_same(self) -> bool:
        return _bits(self.recorded) == _bits(self.replayed)


@dataclass(kw_only=True)
class Agreement:
    """What a replay and the record have in common.

    Attributes:
        exact: the bits must be the same.
        precision: of the training, whose rounding units are counted.
        updates: how many were compared.
        differing: the first update with another figure; None if there is none.
        figures: of that update, or else of the one that was asked for.
        weights: after how many updates a checkpoint of the run was compared; None: none was.
        weights_difference: largest relative difference there; 0 for the same bits.
    """

    exact: bool
    precision: str
    updates: int = 0
    differing: int | None = None
    figures: list[Figure] = field(default_factory=list[Figure])
    weights: int | None = None
    weights_difference: float = 0.0

    @property
    def holds(self) -> bool:
        """True if everything agrees: to the bit where that is promised, else up to rounding."""
        if self.exact:
            return self.differing is None and not self.weights_difference
        most = ROUNDINGS * max(1, self.updates)
        units = [figure.units for figure in self.figures if figure.name != "gradient_digest"]
        return all(value is not None and value <= most for value in units)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.holds}


def _bits(value: Any) -> str:
    """Return a number as text that tells NaN and the sign of zero."""
    return repr(value)


def figures_of(recorded: Record, replayed: Record, precision: str) -> list[Figure]:
    """Return the figures that both records have."""
    names = [name for name in FIGURES if name in recorded and name in replayed]
    pairs = [(name, recorded[name], replayed[name]) for name in names]
    metrics = recorded.get("metrics") or {}, replayed.get("metrics") or {}
    pairs += [(name, value, metrics[1].get(name)) for name, value in metrics[0].items()]
    return [
        Figure(name=name, recorded=a, replayed=b, units=_units(a, b, EPSILONS[precision]))
        for name, a, b in pairs
    ]


def _units(a: Any, b: Any, epsilon: float) -> float | None:
    if _bits(a) == _bits(b):
        return 0.0
    numbers = all(isinstance(value, float | int) and math.isfinite(value) for value in (a, b))
    if not numbers or isinstance(a, bool):
        return None
    return abs(a - b) / (epsilon * max(abs(a), abs(b)))


def agreement(recorded: RecordedRun, replay: Replay, update: int, *, exact: bool) -> Agreement:
    """Compare all updates of a replay with the run's, and the weights at its end.

    Args:
        update: that was asked for.
    """
    config: Config = recorded.config
    agreed = Agreement(exact=exact, precision=config.train.precision)
    for line in replay.history.updates:
        number = int(line["update"])
        record = recorded.history.update(number)
        if record is None:
            continue
        agreed.updates += 1
        figures = figures_of(record, line, agreed.precision)
        differs = not all(figure.is_same for figure in figures)
        if differs and agreed.differing is None:
            agreed.differing = number
        if number == (agreed.differing if exact and agreed.differing is not None else update):
            agreed.figures = figures
    checkpoint, own = _last_of_both(recorded, replay)
    if checkpoint is not None and own is not None:
        agreed.weights = int(own.name.rpartition("-")[2])
        try:
            weights = compare(weights_of(own), weights_of(checkpoint))
        except UsageError:  # parts of a model in shards that are no rows
            agreed.weights = None
        else:
            largest = weights.max_relative_difference
            if (
                exact and not weights.equal_bits
            ):  # also where only a counter or a zero's sign differs
                largest = largest or math.inf
            agreed.weights_difference = largest
    return agreed


def _last_of_both(recorded: RecordedRun, replay: Replay) -> tuple[Path | None, Path | None]:
    """Return the run's and the replay's checkpoint after the replay's last update."""
    done = int(replay.history.updates[-1]["update"]) + 1 if replay.history.updates else 0
    checkpoint = recorded.checkpoint_after(done - 1)
    if checkpoint is None or int(checkpoint.name.rpartition("-")[2]) != done:
        return None, None
    own = replay.run.checkpoints / checkpoint.name
    return (checkpoint, own) if done > replay.first and own.exists() else (None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafDifference:
    """The first micro-step of an update that two replays computed differently.

    Attributes:
        parameters: whose gradients differ, where these were digested.
    """

    update: int
    leaf: int
    samples: Sequence[int]
    loss: tuple[float, float]
    parameters: Sequence[str] = ()


def first_leaf_difference(a: Mapping[int, Line], b: Mapping[int, Line]) -> LeafDifference | None:
    """Return the first micro-step that differs in its loss or a gradient; None if none does."""
    for update in sorted(a.keys() & b.keys()):
        for left, right in zip(a[update]["leaves"], b[update]["leaves"], strict=False):
            digests = left.get("digests", {}), right.get("digests", {})
            names = [name for name in digests[0] if digests[0][name] != digests[1].get(name)]
            totals = left["total"], right["total"]
            if names or _bits(totals[0]) != _bits(totals[1]):
                return LeafDifference(
                    update=update,
                    leaf=left["leaf"],
                    samples=left.get("samples", ()),
                    loss=totals,
                    parameters=names,
                )
    return None
