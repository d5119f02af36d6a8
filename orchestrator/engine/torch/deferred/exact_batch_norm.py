"""Windows of a model with batch norms that are to be those of one big batch (`engine.norm=exact`).

A norm's statistics depend on all samples of the window, and those of the next norm on them. So the
window's micro-batches are run again at the boundary, with the same random numbers: once for each
norm, up to it, for its statistics; once for each, backwards from the last, for their influence on
the loss; and once for the gradients. For n norms these are 2n + 1 forwards (three passes for one)
and 2n small gathers, whatever the number of micro-steps. What is held is the activations of one
micro-batch, and of the others the inputs. The mathematics is in `batch_norm/exact.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.api import MicroBatch, Window
from orchestrator.engine.torch.batch_norm.exact import (
    Enough,
    ExactBatchNorm,
    Statistics,
    in_order,
)
from orchestrator.engine.torch.comm.tensors import writes_of
from orchestrator.engine.torch.deferred.parts import Parts
from orchestrator.engine.torch.seeds import derived_seed, seed_everything
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Job, Loss

MOST_NORMS = 16  # 33 forwards of every micro-batch


@dataclass(frozen=True, slots=True)
class _Kept:
    batch: Any
    micro_batch: MicroBatch


class ExactWindows:
    """One rank's windows of such a model.

    Args:
        parts: whose job's `loss` is called 2n + 1 times for each micro-batch, and once here, and
            whose model holds `ExactBatchNorm`s.

    Raises:
        ConfigError: there are too many norms.
        JobError: a norm that is called twice in a forward, or buffers that a forward changes.
    """

    def __init__(self, parts: Parts) -> None:
        self._job, self._model, self._parts = parts.job, parts.model, parts
        self._accumulator, self._group = parts.accumulator, parts.accumulator.group
        self._clock, self._prepare = parts.accumulator.clock, parts.prepare
        self._seed = parts.settings.seed
        self._norms: list[ExactBatchNorm] = []
        self._norms = self._called(parts.any_batch())
        self._kept: list[_Kept] = []
        self._rows: list[Tensor] = []

    @property
    def collectives(self) -> int:
        """Gathers in each window."""
        return 2 * len(self._norms) if self._group.size > 1 else 0

    def begin(self) -> None:
        """Forget: a window begins."""
        self._kept.clear()
        self._rows.clear()
        for norm in self._norms:
            norm.forget()

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Keep one micro-batch for the boundary, and run it up to the first norm. Silent."""
        kept = _Kept(batch, micro_batch)
        self._kept.append(kept)
        if self._norms:
            with self._clock.compute():
                self._rows.append(self._row(kept, self._norms[0]))

    def finish(self, window: Window) -> None:
        """All passes but the first part of the first. Collective."""
        with self._clock.compute():
            for number, norm in enumerate(self._norms):
                rows = self._rows if number == 0 else [self._row(kept, norm) for kept in self._kept]
                gathered = self._everyones(rows, window.steps, 1 + 2 * norm.channels)
                norm.statistics = Statistics.of(gathered)
            for place, norm in reversed(list(enumerate(self._norms))):
                rows = [self._influence(kept, place) for kept in self._kept]
                norm.influence = in_order(self._everyones(rows, window.steps, 2 * norm.channels))
        for number, kept in enumerate(self._kept):
            with self._clock.compute():
                loss, parts = self._run(kept)
            self._accumulator.backward(
                Loss(loss.total + sum(parts), loss.weight, loss.metrics),
                last=number == len(self._kept) - 1,
                leaf=self._parts.leaves.leaf_of(kept.micro_batch),
            )
        self._kept.clear()

    def applied(self) -> None:
        """The update was applied: move the running statistics."""
        with torch.no_grad():
            for norm in self._norms:
                norm.follow()

    # ------------------------------------------------------------------ parts

    def _run(self, kept: _Kept, job: Job | None = None) -> tuple[Loss, list[Tensor]]:
        """The loss of a micro-batch, and the norms' parts, which are 0, with their graphs."""
        update, start = kept.micro_batch.update, kept.micro_batch.start
        seed_everything(derived_seed("step", self._seed, update, start))
        with self._accumulator.precision.forward():
            loss = (job or self._job).loss(self._model, self._prepare(kept.batch))
        return loss, [part for norm in self._norms for part in norm.take_parts()]

    def _row(self, kept: _Kept, norm: ExactBatchNorm) -> Tensor:
        norm.asked = True
        try:
            with torch.no_grad():
                self._run(kept)
        except Enough:
            pass
        finally:
            norm.asked = False
        row, norm.row = norm.row, None
        if row is None:
            raise JobError(
                f"engine.norm=exact: {norm.name} was called when it was tried, but not for the "
                f"samples from place {kept.micro_batch.start} of update {kept.micro_batch.update}; "
                "a forward must call every norm, whatever its samples are"
            )
        return row

    def _influence(self, kept: _Kept, place: int) -> Tensor:
        """d/dt of norm number `place` of this micro-batch's loss and later norms' parts."""
        norm = self._norms[place]
        known = norm.statistics
        assert known is not None  # noqa: S101  # the passes before this one set it
        norm.variables = (
            known.mean.clone().requires_grad_(),
            known.variance.clone().requires_grad_(),
        )
        try:
            loss, parts = self._run(kept)
            slopes: Any = torch.autograd.grad(
                loss.total + sum(parts), norm.variables, allow_unused=True, materialize_grads=True
            )
        finally:
            norm.variables = None
        return torch.cat(slopes)

    def _everyones(self, rows: Sequence[Tensor], steps: int, width: int) -> list[Tensor]:
        """The rows of all ranks' micro-batches, in order."""
        mine = torch.zeros((steps, width), dtype=torch.float64, device=self._group.device)
        for place, row in enumerate(rows):
            mine[place] = row
        with self._clock.wait(), self._group.silence.lifted():
            return list(self._group.all_gather(mine))

    def _called(self, batch: Any) -> list[ExactBatchNorm]:
        """The norms in the order in which a forward calls them. Not collective."""
        calls: list[ExactBatchNorm] = []
        norms = [layer for layer in self._model.modules() if isinstance(layer, ExactBatchNorm)]
        for norm in norms:
            norm.trial = calls
        versions = {name: writes_of(buffer) for name, buffer in self._model.named_buffers()}
        try:
            with torch.no_grad():
                # A shallow copy, so that what a job counts in its own attributes is not counted.
                trial = MicroBatch(update=0, start=0, indices=())
                self._run(_Kept(batch, trial), copy.copy(self._job))
        finally:
            for norm in norms:
                norm.trial = None
        changed = [n for n, b in self._model.named_buffers() if writes_of(b) != versions.get(n)]
        if changed:
            raise JobError(
                f"engine.norm=exact runs a forward several times, but the model's forward changes "
                f"{', '.join(changed[:3])}; use engine.norm=group or frozen"
            )
        twice = [norm.name for norm in norms if calls.count(norm) > 1]
        if twice:
            raise JobError(
                f"engine.norm=exact: {twice[0]} is called more than once in a forward, and would "
                "need statistics for each call; use a norm of its own for each, or "
                "engine.norm=group or frozen"
            )
        if len(calls) > MOST_NORMS:
            raise ConfigError(
                f"engine.norm=exact runs every micro-batch 2n + 1 times for n batch norms; this "
                f"model has {len(calls)}, and {MOST_NORMS} are the most that make sense: use "
                "engine.norm=group or frozen"
            )
        return calls
