"""The accumulator: sums in, one reduction at the boundary, one exact update out.

It is all that a training loop of your own needs:

    accumulator = Accumulator(model, optimizer, TorchGroup.wrap(dist.group.WORLD), clip_norm=1.0)
    for batches in windows:
        for batch in batches:
            total = loss_fn(model(batch.x), batch.y)  # a sum, never a mean
            accumulator.backward(Loss(total, weight=len(batch.y)), last=batch is batches[-1])
        report = accumulator.boundary()

Ranks may have different numbers of micro-steps, and none at all.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.api import BoundaryReport
from orchestrator.engine.common.packed_sums import MOST_RANKS, STOP, Trailer
from orchestrator.engine.torch.checks.alike import start_alike
from orchestrator.engine.torch.checks.arguments import check_arguments, number
from orchestrator.engine.torch.checks.call_order import WindowState
from orchestrator.engine.torch.checks.invariants import WindowWatch
from orchestrator.engine.torch.checks.same_buffers import SameBuffers
from orchestrator.engine.torch.checks.same_optimizer import SameOptimizer
from orchestrator.engine.torch.checks.supported import served
from orchestrator.engine.torch.checks.weights_digest import replicas_of
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.gradients.buffer import GradientBuffers
from orchestrator.engine.torch.gradients.clipping import GradientNorm
from orchestrator.engine.torch.gradients.hooks import listen
from orchestrator.engine.torch.gradients.unused_parameters import UsedParameters
from orchestrator.engine.torch.habits import Habits, say_left_over
from orchestrator.engine.torch.loss_sums import Tally
from orchestrator.engine.torch.optimizer_step import Step
from orchestrator.engine.torch.optimizers import LearningRate, usable
from orchestrator.engine.torch.precision import Precision
from orchestrator.engine.torch.reduction_choice import reduction_for
from orchestrator.engine.torch.sharding.eligibility import check_shardable
from orchestrator.engine.torch.sharding.pieces import OptimizerShard
from orchestrator.engine.torch.sharding.reduction import ShardedBoundary
from orchestrator.engine.torch.sharding.state import gathered, part_of
from orchestrator.engine.torch.state import restore_optimizer
from orchestrator.errors import ConfigError
from orchestrator.job import Loss


class Accumulator:
    """Accumulates gradients over micro-steps and ranks; see the module's example.

    Args:
        model: a module, or named or plain parameters. Parameters that do not require gradients are
            left alone, shared ones counted once.
        optimizer: steps once a boundary. Its parameter groups, weight decay and rates are its own.
        group: the ranks; `TorchGroup.alone()` for one.
        clip_norm: largest 2-norm of the averaged gradient, or None.
        metric_names: of `Loss.metrics`; the same on all ranks.
        bucket_bytes: the gradient travels in equal slices of at most this size; None: about
            eight (see `plan.wire.bucket_count`).
        reduction: "fast", or "reproducible": the same bits for any contiguous assignment of whole
            leaves (micro-steps that are the same whoever computes them) to ranks.
        sync: "boundary", or "every_step" (for comparison).
        on_non_finite: "stop" raises `NonFiniteError` on all ranks; "skip" skips the update on all.
        precision: see `EngineSettings`; only the loss scale of "float16" matters here. Run the
            forward within `accumulator.precision.forward()`.
        overlap: send buckets during the last backward; False sends them at the boundary.
        silent: refuse collectives on `group` between boundaries.
        wire: "own", or "bfloat16": gradients travel, and are added up between ranks, as that, for
            half the bytes and an error of R * 2**-8 of their magnitudes; for reduction="fast".
        order: numbers of the trained parameters in the order in which a backward reaches them, the
            same on all ranks: buckets fill up in it. The reverse of the model's by default.
        shard_optimizer: each rank keeps and steps 1/R of the optimizer, for reduction="fast" with
            sync="boundary". Parameters move into flat buffers, and `optimizer` holds pieces of them
            from then on: save it with `optimizer_state`. After a boundary every `.grad` is None.
        broadcast: begin with rank 0's parameters and buffers on all ranks, as DDP does.
        advise: warn, once, of layers that do not do what one big batch would, and of what looks
            like a slip.

    To build one is collective: ranks compare what has to be the same on all of them.

    Raises:
        JobError: the model has nothing to train, or ranks do not start alike.
        ConfigError: settings, a model or an optimizer that cannot be used.
    """

    def __init__(
        self,
        model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
        optimizer: Optimizer,
        group: BaseGroup,
        *,
        clip_norm: float | None = None,
        metric_names: Sequence[str] = (),
        bucket_bytes: int | None = None,
        reduction: str = "fast",
        sync: str = "boundary",
        on_non_finite: str = "stop",
        precision: str = "float32",
        overlap: bool = True,
        silent: bool = True,
        wire: str = "own",
        order: Sequence[int] | None = None,
        shard_optimizer: bool = False,
        broadcast: bool = False,
        advise: bool = True,
    ) -> None:
        model = check_arguments(
            model,
            group,
            metric_names=metric_names,
            numbers={"clip_norm": clip_norm},
        )
        if group.size > MOST_RANKS:
            raise ConfigError(
                f"sums stay exact up to {MOST_RANKS} ranks, but there are {group.size}"
            )
        self.group, self.optimizer = group, usable(optimizer, "the optimizer")
        named, self._parameters = served(model, self.optimizer)
        settings = {
            "clip_norm": clip_norm, "metric_names": tuple(metric_names), "wire": wire,
            "bucket_bytes": bucket_bytes, "reduction": reduction, "sync": sync, "order": order,
            "on_non_finite": on_non_finite, "precision": precision,
            "shard_optimizer": shard_optimizer,
        }  # fmt: skip
        start_alike(group, model, named, optimizer, settings, broadcast=broadcast)
        self._watch = WindowWatch(
            model, named, self._parameters, group, silent=silent, advise=advise
        )
        self._replicas, self._same_buffers = replicas_of(named, group), SameBuffers(model, group)
        self.precision = Precision(precision, self._parameters[0][1].device)
        self._names = tuple(metric_names)
        self._rate = LearningRate(optimizer)
        self._tally, self._used = Tally(metric_names), UsedParameters(len(self._parameters), group)
        self._step = Step(
            self.optimizer, group, self.precision, self._used,
            clip_norm=clip_norm, on_non_finite=on_non_finite,
        )  # fmt: skip
        self._reduction = reduction_for(
            self._parameters,
            group,
            reduction=reduction,
            sync=sync,
            metric_count=len(self._names),
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            wire=wire,
            order=order,
            shard_optimizer=shard_optimizer,
        )
        if shard_optimizer:
            check_shardable(optimizer, self._parameters)
        self._shard = (
            OptimizerShard(optimizer, self.buffers, group, self._reduction.slices)
            if isinstance(self._reduction, ShardedBoundary)
            else None
        )
        self._window = WindowState([name for name, _ in self._parameters], group.size)
        self._same_optimizer = SameOptimizer(optimizer)
        self._habits = Habits(model, group.rank, group.size) if advise else None
        if advise:
            weakref.finalize(self, say_left_over, self._window, self._tally)
        self._expected = 1.0
        self._mark = group.mark()
        self.compute_s = 0.0
        self._ears = listen(self, self._parameters)

    @property
    def buffers(self) -> GradientBuffers:
        """Where gradients are; after a boundary, the update's averaged and clipped gradient (with
        a sharded optimizer in this rank's segments only).
        """
        return self._reduction.buffers

    def parameter_count(self) -> int:
        """Trained real numbers, shared ones counted once."""
        return self.buffers.numbers()

    def gradient_bytes(self) -> int:
        """Memory of all gradient buffers that were made."""
        return self._reduction.buffers_made * self.buffers.bytes_of_all()

    @property
    def sharded(self) -> bool:
        """Whether this rank holds a part of the optimizer's state only."""
        return self._shard is not None

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimizer's `state_dict()`, put together from all ranks' where it is sharded.

        Collective where it is sharded; it is on the CPU then, and None but on rank 0.
        """
        return self.optimizer.state_dict() if self._shard is None else gathered(self._shard)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take what `optimizer_state` gave, on however many ranks, sharded or not. Not collective.

        Raises:
            ValueError, KeyError: it is another optimizer's.
        """
        if self._shard is None:
            restore_optimizer(self.optimizer, state)
            return
        with self._shard.loading():
            restore_optimizer(self.optimizer, part_of(self._shard, state))

    def check_replicas(self) -> None:
        """Compare all parameters of all ranks, trained or not; buffers that differ are warned of.
        Collective, for between windows.

        Raises:
            ReplicasDiffer: on all ranks alike.
        """
        self._replicas.check_all()
        self._same_buffers.look()

    def gradient_ready(self, parameter: int) -> None:
        """For the hooks of this accumulator's parameters."""
        if not self._window.arrived(parameter):
            return
        self.buffers.take(parameter)
        self._used.mark(parameter)
        self._reduction.ready(parameter)

    def __reduce__(self) -> Any:
        raise ConfigError(
            "an accumulator can be neither copied nor pickled: it is bound to its process, model "
            "and group. Save model.state_dict() and accumulator.optimizer_state(), and build "
            "another one"
        )

    def close(self) -> None:
        """Take the hooks off model and optimizer: another accumulator is to have them."""
        self._window.close()
        self._step.close()
        self._ears.remove()

    # ------------------------------------------------------------------ a window

    def begin_window(
        self,
        *,
        update: int | None = None,
        learning_rate: float | None = None,
        steps: int | None = None,
        leaves: int | None = None,
        expected_weight: float | None = None,
    ) -> None:
        """Start an update without gradients. Not collective. `backward` does it if need be.

        Args:
            update: its number, for messages and the report; one more than the last by default.
            learning_rate: to set; None leaves the optimizer's.
            steps: micro-steps of the rank that has most; needed with sync="every_step".
            leaves: leaves of this update over all ranks, for reduction="reproducible"; without it
                they are counted as they come, in the order of ranks, for more memory.
            expected_weight: what the window's weights will probably add up to over all ranks, the
                same number on all. Losses are divided by it before their backward, which costs
                nothing; where it proves right, the boundary need not divide the gradient. The
                update is the same either way, but for the last bits.

        Raises:
            ValueError: `steps`, `leaves` or `expected_weight` cannot be used.
            JobError: micro-steps of the window before would be lost, or the model or the
                optimizer's groups have changed.
        """
        with self._window.within("begin_window()"):
            self._begin(update, learning_rate, steps, leaves, expected_weight)

    def _begin(
        self,
        update: int | None = None,
        learning_rate: float | None = None,
        steps: int | None = None,
        leaves: int | None = None,
        expected_weight: float | None = None,
    ) -> None:
        if expected_weight is not None:
            expected_weight = number("expected_weight", expected_weight, least="above 0")
        # A float16 backward wants sums: means of large batches would underflow in it.
        early = expected_weight is not None and self.precision.scale == 1.0
        self._expected = float(expected_weight or 1.0) if early else 1.0
        self._window.begin(update, self._tally.micro_steps)
        if learning_rate is not None:
            self._rate.set(number("learning_rate", learning_rate))
        self._reduction.begin(steps=steps, leaves=leaves)
        self._tally.begin()
        self._used.begin()
        self._mark, self.compute_s = self.group.mark(), 0.0
        self._watch.begin(self._window.update)
        self._same_optimizer.check_parameters()
        if self._habits is not None:
            self._habits.begin()

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
            began = time.perf_counter()
            row = self._row(loss)
            with self._window.micro_step(last=last):
                self._tally.add(row)
                self.buffers.expect()
                told = self._reduction.before_backward(last=last, leaf=leaf)
                factor = self.precision.scale / self._expected
                counted = self.buffers.begun and not told
                with self._ears.counting(self.buffers.versions if counted else None):
                    # Not backward(gradient): that loads torch's symbolic shapes, and sympy's.
                    (loss.total if factor == 1.0 else loss.total * factor).backward()
                self._used.mark(*self.buffers.settle())
                self._reduction.after_backward()
            self.compute_s += time.perf_counter() - began

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
            self._record(loss)

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
        if not self._tally.micro_steps:
            self._same_optimizer.keep()
        self._watch.micro_step(self._window.update, first=not self._tally.micro_steps)
        if self._habits is not None:
            self._habits.micro_step(loss)
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
            self._window.end()
            return self._boundary(stop=stop)

    def _need_window(self, call: str) -> None:
        if not self._window.open:
            self._window.untold_before(call)
            self._begin()

    def _boundary(self, *, stop: bool) -> BoundaryReport:
        scale = self.precision.scale
        reached = time.perf_counter()
        norm_of_sum = GradientNorm()
        with self._window.alone():
            self._watch.end(self._window.update)
            self._same_optimizer.check_settings(self._window.update)
            trailer = self._tally.trailer()  # waits for the device: what follows is not computing
            self.compute_s += time.perf_counter() - reached
            reached = time.perf_counter()
            trailer.flags[STOP] = int(stop)
            self._used.flag(trailer)
            self._replicas.tell(trailer, self._window.update, self._agreed())
            totals = self._reduction.finish(trailer, norm_of_sum.add)
        self._replicas.check(totals, self._window.update)
        waited = time.perf_counter()
        norm, applied = self._step.take(
            self._window.update,
            totals,
            norm_of_sum,
            self._shard or self.buffers,
            self._tally,
            divided_by=self._expected,
        )
        stepped = time.perf_counter()
        if self._shard is not None and applied:
            self._shard.spread()
        spread_s = time.perf_counter() - stepped
        if self._habits is not None:
            self._habits.end(trailer, totals, self._tally.micro_steps)
        return self._report(
            totals,
            gradient_norm=norm,
            applied=applied,
            loss_scale=scale,
            wait_s=waited - reached + spread_s,
            optimizer_s=stepped - waited,
        )

    def _agreed(self) -> dict[str, float]:
        """What ranks were told of this window, and has to be the same on all of them."""
        return {
            "the number of the update": self._window.update,
            "expected_weight": self._expected,
            "the learning rate": self._rate.of_first_group,
            "the digest of which parameters are frozen": self._watch.frozen,
            "the number of layers in training mode": self._watch.training,
        }

    def _report(self, totals: Trailer, **figures: Any) -> BoundaryReport:
        weight = totals.weight.value
        sent = self.group.since(self._mark)
        return BoundaryReport(
            update=self._window.update,
            loss=totals.loss.value / weight,
            weight=weight,
            metrics={
                name: total.value / weight
                for name, total in zip(self._names, totals.metrics, strict=True)
            },
            stop_requested=totals.flags[STOP] > 0,
            micro_steps=self._tally.micro_steps,
            collectives=sent.collectives,
            exchanges=self._used.exchanges,
            bytes_on_wire=sent.bytes_on_wire,
            compute_s=self.compute_s,
            **figures,
        )
