"""All that is looked at in an accumulator's windows, so that nothing goes wrong in silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from orchestrator.engine.common.boundary.packed_sums import Trailer
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.engine.torch.checks.in_window.invariants import WindowWatch
from orchestrator.engine.torch.checks.in_window.likely_slips import Habits
from orchestrator.engine.torch.checks.in_window.same_buffers import SameBuffers
from orchestrator.engine.torch.checks.in_window.same_optimizer import SameOptimizer
from orchestrator.engine.torch.checks.in_window.same_weights import replicas_of
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.job import Loss


class WindowChecks:
    """The looks at one accumulator's windows, each at its moment.

    Args:
        model: what the accumulator was given.
        named: all parameters of the model, trained or not.
        trained: those that are.
        optimizer, group, options: the accumulator's.
    """

    def __init__(
        self,
        model: Any,
        named: Sequence[tuple[str, Tensor]],
        trained: Sequence[tuple[str, Tensor]],
        optimizer: Optimizer,
        group: BaseGroup,
        options: AccumulationOptions,
    ) -> None:
        self._watch = WindowWatch(
            model, named, trained, group, silent=options.silent, advise=options.advise
        )
        self._replicas, self._same_buffers = replicas_of(named, group), SameBuffers(model, group)
        self._same_optimizer = SameOptimizer(optimizer)
        self._habits = Habits(model, group.rank, group.size) if options.advise else None

    def begin(self, update: int) -> None:
        """A window begins; silence is kept from now on. Raises `JobError` for what has changed."""
        self._watch.begin(update)
        self._same_optimizer.check_parameters()
        if self._habits is not None:
            self._habits.begin()

    def micro_step(self, update: int, loss: Loss, *, first: bool) -> None:
        """A loss that can be taken in. Raises `JobError` for what changed in mid-window."""
        if first:
            self._same_optimizer.keep()
        self._watch.micro_step(update, first=first)
        if self._habits is not None:
            self._habits.micro_step(loss)

    def end(self, update: int) -> None:
        """The boundary is reached: collectives are allowed again. Raises as `WindowWatch.end`."""
        self._watch.end(update)
        self._same_optimizer.check_settings(update)

    def tell(self, trailer: Trailer, update: int, told: dict[str, float]) -> None:
        """Have digests travel: of the weights, and of what ranks were `told` of this window."""
        own = {
            "the digest of which parameters are frozen": self._watch.frozen,
            "the number of layers in training mode": self._watch.training,
        }
        self._replicas.tell(trailer, update, told | own)

    def compare(self, totals: Trailer, update: int) -> None:
        """Look at what came back. Raises as `Replicas.check`, on all ranks alike."""
        self._replicas.check(totals, update)

    def applied(self, mine: Trailer, totals: Trailer, micro_steps: int) -> None:
        """The window is over: warn of what looks like a slip."""
        if self._habits is not None:
            self._habits.end(mine, totals, micro_steps)

    def all_weights(self) -> None:
        """Compare everything, between two windows. Collective; raises `ReplicasDiffer`."""
        self._replicas.check_all()
        self._same_buffers.look()
