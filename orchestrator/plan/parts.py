"""The parts of a plan; `Plan.figures` has all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.plan.order import Branch, Shards
from orchestrator.plan.schedule import Schedule
from orchestrator.plan.wire import Wire

if TYPE_CHECKING:  # numpy is loaded on first use: a plan that is only printed does without it
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """Facts of a job besides its configuration: all of them on the ranks, fewer before.

    Attributes:
        nodes: how many there really are; None for the most that the configuration asks for.
        dataset_samples, parameters: of the data set and the model; None: use `facts`.
        metric_count: metrics that the job reports besides its loss.
        framework: the job's, if known.
        coupled: the job's loss is one of all embeddings, which are gathered once an update.
        extra_collectives: of each update, besides the gradient's reduction, as the engine counts
            them; None when there is none yet.
        own_rate: the job gives the learning rates itself.
        base_rate: of the job's own optimizer, or the stated one; None when not known.
        shards: of a data set that is read along them.
        lengths: of the data set's samples, in tokens, shape (N,); None: not known, or not needed.
        lengths_digest: of them in a run's earlier plan, where they are not known.
        cost: see `TokenBudget`.
        branch: of another run, where this one begins.
    """

    nodes: int | None = None
    dataset_samples: int | None = None
    parameters: int | None = None
    metric_count: int = 0
    framework: str | None = None
    coupled: bool = False
    extra_collectives: int | None = None
    own_rate: bool = False
    base_rate: float | None = None
    shards: Shards | None = None
    lengths: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    lengths_digest: str | None = None
    cost: Callable[[int, int], float] | None = None
    branch: Branch | None = None


def branch_in(plan: Mapping[str, Any]) -> Branch | None:
    """Return the branch in a run's plan.json; None if the run began anew."""
    return Branch(**plan["branch"]) if plan.get("branch") else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """The length of the run.

    Attributes:
        updates: of the whole run; None when the data set is not known and they are not stated.
        epochs: stated, or what `updates` amount to; None when not known.
        updates_per_epoch: see `DataOrder`; None when the data set is not known.
        dataset_samples: of the data set; None when not known.
        samples: that the run is to reach, if its length is stated so.
    """

    updates: int | None
    epochs: float | None
    updates_per_epoch: int | None
    dataset_samples: int | None
    samples: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Learning rates.

    Attributes:
        source: what decides them: `schedule`, the job's `learning_rate` or its own `optimizer`.
        first, peak, last: of update 0, at the top, of the last update; None when not known
            beforehand, as where the job gives its own.
        schedule: the whole schedule; None when it needs the number of updates and that is unknown.
            Its base is a stand-in where the rate of the job's own optimizer is not known yet.
    """

    source: str

    first: float | None
    peak: float | None
    last: float | None
    schedule: Schedule | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The traffic of one update, as far as it is known.

    Attributes:
        parameters: of the model; None when not known.
        collectives: each rank's in an update, 0 on one rank; None when not known beforehand, which
            is so without `parameters`, in reproducible mode and for a model in shards.
        bytes_on_wire: per rank; None if it is not known.
        wire: how it travels.
        gathers: of the collectives, those that bring weights back from the ranks that step them,
            where the optimizer is sharded; an update that is skipped needs none.
    """

    parameters: int | None
    collectives: int | None
    bytes_on_wire: int | None
    wire: Wire
    gathers: int = 0

    def among(self, ranks: int) -> int | None:
        """Return `collectives` for an update with another number of ranks."""
        if self.collectives is None or ranks == 1:
            return self.collectives and 0
        count = replace(self.wire, ranks=ranks).collectives(self.parameters)
        own_count = self.wire.collectives(self.parameters)
        return None if count is None or own_count is None else self.collectives - own_count + count
