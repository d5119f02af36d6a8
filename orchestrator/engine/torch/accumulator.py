"""The accumulator: sums in, one reduction at the boundary, one exact update out.

It is all that a training loop of your own needs:

    accumulator = Accumulator(model, optimizer, clip_norm=1.0)
    for batches in windows:
        for batch in batches:
            total = loss_fn(model(batch.x), batch.y)  # a sum, never a mean
            accumulator.backward(Loss(total, weight=len(batch.y)), last=batch is batches[-1])
        report = accumulator.boundary()

Ranks may have different numbers of micro-steps, and none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.engine.api import BoundaryReport
from orchestrator.engine.common.boundary.boundary_sums import said_by
from orchestrator.engine.common.boundary.packed_sums import NEWCOMERS, STOP, Trailer
from orchestrator.engine.torch.accumulator_parts import AccumulatorParts
from orchestrator.engine.torch.checks.at_start.arguments import number
from orchestrator.engine.torch.gradients.gradient_norm import GradientNorm
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import Loss


class Accumulator(AccumulatorParts):
    """Accumulates gradients over micro-steps and ranks; see the module's example.

    Args:
        model: a module, or named or plain parameters. Parameters that do not require gradients are
            left alone, shared ones counted once.
        optimizer: steps once a boundary. Its parameter groups, weight decay and rates are its own.
        group: the ranks; by default those of torch's own group, or this process alone where there
            is none and nobody said that there are more.
        options: how; or some of them by their names, as in `clip_norm=1.0`.

    To build one is collective: ranks compare what has to be the same on all of them.

    Raises:
        JobError: the model has nothing to train, or ranks do not start alike.
        ConfigError: settings, a model or an optimizer that cannot be used.
    """

    def begin_window(
        self,
        *,
        update: int | None = None,
        learning_rate: float | None = None,
        leaves: int | None = None,
        expected_weight: float | None = None,
    ) -> None:
        """Start an update without gradients. Not collective. `backward` does it if need be.

        Args:
            update: its number, for messages and the report; one more than the last by default.
            learning_rate: to set; None leaves the optimizer's.
            leaves: leaves of this update over all ranks, for reduction="reproducible"; without it
                they are counted as they come, in the order of ranks, for more memory.
            expected_weight: what the window's weights will probably add up to over all ranks, the
                same number on all. Losses are divided by it before their backward, which costs
                nothing; where it proves right, the boundary need not divide the gradient. The
                update is the same either way, but for the last bits.

        Raises:
            ValueError: `leaves` or `expected_weight` cannot be used.
            JobError: micro-steps of the window before would be lost, or the model or the
                optimizer's groups have changed.
        """
        with self._window.within("begin_window()"):
            if self._handed is not None:
                raise JobError("run.windows() begins its windows itself; leave begin_window() out")
            self._begin(update, learning_rate, leaves, expected_weight)

    def begin_handed(
        self, update: int, *, micro_batches: int, expected_weight: float | None,
        leaves: tuple[int, Sequence[int]] | None,
    ) -> None:  # fmt: skip
        """Start the update that `run.windows` hands out; see `HandedOut.begin`. Not collective.

        Args:
            leaves: how many the update has over all ranks, and the numbers of this rank's.
        """
        of_all, mine = leaves or (None, ())
        with self._window.within("run.windows()"):
            self._begin(update, None, of_all, expected_weight)
            if self._handed is not None:
                self._handed.begin(update, micro_batches, mine)

    def _begin(
        self, update: int | None = None, learning_rate: float | None = None,
        leaves: int | None = None, expected_weight: float | None = None,
    ) -> None:  # fmt: skip
        if expected_weight is not None:
            expected_weight = number("expected_weight", expected_weight, least="above 0")
        # A float16 backward wants sums: means of large batches would underflow in it.
        early = expected_weight is not None and self.precision.scale == 1.0
        self._expected = float(expected_weight or 1.0) if early else 1.0
        self._window.begin(update, self._tally.micro_steps)
        if learning_rate is not None:
            self._rate.set(number("learning_rate", learning_rate))
        self._reduction.begin(leaves=leaves)
        self._tally.begin()
        self._used.begin()
        self._mark = self.group.mark()
        self.clock.begin()
        self._checks.begin(self._window.update)

    def backward(self, loss: Loss, *, last: bool = False, leaf: int | None = None) -> None:
        """Back-propagate one micro-step's sum. Silent, but for finished buckets in the last one.

        Args:
            loss: its `total` is back-propagated as it is; averaging is the boundary's.
            last: this rank has no further micro-step in this window, so buckets may leave already.
                Leaving it False is always right, and slower.
            leaf: the micro-step's global number in the update, where `leaves` was given; a rank's
                come in order.

        Raises:
            JobError: `loss` is not what the job's contract says; a micro-step marked `last` was
                there already; gradients were written by something else than a backward; a
                parameter was frozen or unfrozen since the window's first micro-step.
        """
        with self._window.within("backward()"):
            self._need_window("backward()")
            if self._handed is not None:
                last, leaf = self._handed.told("backward()", last=last, leaf=leaf)
            with self.clock.compute():
                row = self._row(loss)
                with self._window.micro_step(last=last):
                    self._tally.add(row)
                    self._back_propagate(loss, last=last, leaf=leaf)
            if self._handed is not None:
                self._handed.count()

    def _back_propagate(self, loss: Loss, *, last: bool, leaf: int | None) -> None:
        self.buffers.expect()
        told = self._reduction.before_backward(last=last, leaf=leaf)
        factor = self.precision.scale / self._expected
        counted = self.buffers.begun and not told
        with self._ears.counting(self.buffers.versions if counted else None):
            (loss.total if factor == 1.0 else loss.total * factor).backward()
        self._used.mark(*self.buffers.settle())
        self._reduction.after_backward()

    def record(self, loss: Loss) -> None:
        """Count a micro-step whose backward somebody else runs (a pipeline's schedule, say).

        Its gradients must be those of `loss.total`, unscaled. For reduction="fast" only. Call
        `begin_window` before that backward.

        Raises:
            ValueError: the window has an expected weight, which its backward did not divide by.
            JobError: the backward ran before the window began.
        """
        with self._window.within("record()"):
            self._need_window("record()")
            if self._handed is not None:
                self._handed.told("record()", last=False, leaf=None)
            self._record(loss)
            if self._handed is not None:
                self._handed.count()

    def _record(self, loss: Loss) -> None:
        if not self._reduction.records:
            raise ConfigError(
                "record() is for reduction='fast'; with 'reproducible' each chunk's gradient is "
                "kept apart, by backward()"
            )
        row = self._row(loss)
        self._window.record()
        if self._expected != 1.0:
            raise ValueError("record() is for windows without `expected_weight`")
        self._tally.add(row)

    def _row(self, loss: Loss) -> list[Any]:
        """What the tally keeps of a micro-step that may be one of this window's."""
        row = self._tally.row(loss)
        self._checks.micro_step(self._window.update, loss, first=not self._tally.micro_steps)
        return row

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        """Reduce once, divide by the weight, clip once, step once. Collective.

        Args:
            stop: this rank was asked to stop; every rank's report then says so.

        Raises:
            NonFiniteError: on all ranks alike, when a loss or a gradient is not finite and the
                policy is "stop". Weights are as before.
            JobError: on all ranks alike, when the weights add up to 0 or one is negative.
            ReplicasDiffer: on all ranks alike, when their parameters are not the same any more.
            PeerLost: another rank went away.
        """
        with self._window.within("boundary()"):
            self._need_window("boundary()")
            if self._handed is None:
                self._window.end()
                return self._boundary(stop=stop)
            self._handed.whole()
            self._window.end()
            report = self._boundary(stop=stop or self._handed.stop())
            self._handed.ended(report)
            return report

    def _need_window(self, call: str) -> None:
        if self._handed is not None:
            self._handed.need(call)
        elif not self._window.open:
            self._window.untold_before(call)
            self._begin()

    def _boundary(self, *, stop: bool) -> BoundaryReport:
        scale, update, norm_of_sum = self.precision.scale, self._window.update, GradientNorm()
        with self._window.alone():
            with self.clock.compute():  # the device may still be at it
                self._checks.end(update)
                trailer = self._tally.trailer()
            with self.clock.wait():
                trailer.flags[STOP] = int(stop)
                trailer.flags[NEWCOMERS] = int(self.newcomers_wait)
                self._used.flag(trailer)
                self._checks.tell(trailer, update, self._told())
                totals = self._reduction.finish(trailer, norm_of_sum.add)
        with self.clock.wait():
            self._checks.compare(totals, update)
        summed = self._shard or self.buffers
        with self.clock.optimize():
            norm, applied = self._step.prepare(
                update, totals, norm_of_sum, summed, self._tally, divided_by=self._expected
            )
            if applied:
                with self._step.allowed(summed):
                    self.optimizer.step()
        if self._shard is not None and applied:
            with self.clock.wait():
                self._shard.spread()
        self._checks.applied(trailer, totals, self._tally.micro_steps)
        return self._report(totals, gradient_norm=norm, applied=applied, loss_scale=scale)

    def _told(self) -> dict[str, float]:
        """What ranks were told of this window, and has to be the same on all of them."""
        return {
            "the number of the update": self._window.update,
            "expected_weight": self._expected,
            "the learning rate": self._rate.of_first_group,
        }

    def _report(self, totals: Trailer, **what_became_of_it: Any) -> BoundaryReport:
        sent = self.group.since(self._mark)
        return BoundaryReport(
            update=self._window.update,
            micro_steps=self._tally.micro_steps,
            collectives=sent.collectives,
            exchanges=self._used.exchanges,
            bytes_on_wire=sent.bytes_on_wire,
            **said_by(totals, self.options.metric_names),
            **self.clock.seconds(),
            **what_became_of_it,
        )
