"""The accumulator: sums in, one reduction at the boundary, one exact update out.

It is all that a training loop of your own needs:

    accumulator = Accumulator(model, optimizer, clip_norm=1.0)
    for batches in windows:
        for batch in batches:
            total = loss_fn(model(batch.x), batch.y)  # a sum, never a mean
            accumulator.backward(Loss(total, weight=len(batch.y)), last=batch is batches[-1])
        report = accumulator.boundary()

Ranks may have different numbers of micro-steps, and none at all.

The path of a gradient, from `backward` to `step`, with the class that does each part:

    backward     hooks count each gradient; a parameter's first is copied to       GradHooks
                 its view of the flat buffers, and autograd adds the others there  GradientBuffers
                 in a window's last backward, complete buckets are sent            FastReduction
    boundary     only backwards wrote, and which parameters they reached           GradientBuffers
                 weights and losses are summed, with flags, in a few numbers       Trailer
                 these travel with the rest of the gradient; wait for the sums     FastReduction
                 all ranks hold the same weights                                   ReplicaChecker
      _step      from the sums: refuse, skip, or one factor, clip factor / weight  UpdatePolicy
                 the buffers are multiplied by it
                 the optimizer steps; unused parameters have no gradient           GradientBuffers

Around it, `WindowState` refuses calls that would lose a gradient or count one twice.

With a sharded optimizer, `reduce` leaves each rank with the sum of its segments of the buckets
alone. It steps its pieces of the weights in there (`OptimizerShard`), and gathers those of others.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions, BoundaryReport, EngineSettings
from orchestrator.engine.common.clock import Clock
from orchestrator.engine.common.trailer import NEWCOMERS, STOP, Trailer
from orchestrator.engine.common.update_policy import UpdatePolicy
from orchestrator.engine.torch.buffers import (
    HALVES,
    GradHooks,
    GradientBuffers,
    Named,
    UsedParameters,
    bucket_slices,
    local_part,
    real_numbers,
)
from orchestrator.engine.torch.checks import (
    check_arguments,
    check_group,
    check_supported,
    checked_loss,
    finite_float,
    is_fully_sharded,
    mean_refusal,
)
from orchestrator.engine.torch.consistency_checks import (
    check_same_start,
    machine_warning,
    replica_checker,
)
from orchestrator.engine.torch.gradient_digest import gradient_digest, leaf_digest
from orchestrator.engine.torch.group import BaseGroup, gather_numbers, ranks_where, to_floats
from orchestrator.engine.torch.model import Precision, check_optimizer, learning_rate_of
from orchestrator.engine.torch.model_parts import ModelParts
from orchestrator.engine.torch.owners import (
    Ownership,
    needs_whole_parameters,
    ownership,
    step_cost,
    whole_parameters,
)
from orchestrator.engine.torch.reducer import FastReduction
from orchestrator.engine.torch.reproducible import ReproducibleReduction
from orchestrator.engine.torch.sharding import OptimizerShard, ShardedReduction, check_shardable
from orchestrator.engine.torch.state import restore_optimizer
from orchestrator.engine.torch.transports import group_of_torch
from orchestrator.engine.torch.window_state import MicroBatchTracker, WindowState
from orchestrator.errors import ConfigError, JobError, ReplicasDiffer, did_you_mean
from orchestrator.job import Loss
from orchestrator.rundir.warnings import warn
from orchestrator.units import named_ranks

if TYPE_CHECKING:
    from orchestrator.engine.torch.fully_sharded import FullySharded

# ------------------------------------------------------------------ Choice of the reduction
# A reduction owns the `buffers` that a window's gradients go to, and sums them over ranks: `begin`
# a window, `before_backward`, `after_backward`, and at the boundary `reduce` and, where the norm is
# not finite, `non_finite`. Another one is a class with these five methods and the
# attributes `buffers`, `buffers_made` and `replicate_traffic`.


def _fully_sharded(
    model: Any,
    trained: Named,
    optimizer: Optimizer,
    group: BaseGroup,
    options: AccumulationOptions,
) -> FullySharded | None:
    """Return the copies of a model that `fully_shard` has sharded; None for any other."""
    if not (isinstance(model, Module) and is_fully_sharded(model)):
        return None
    if needs_whole_parameters(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} steps whole parameters, and fully_shard() has cut this "
            "model's into shards: leave fully_shard() out and take shard_optimizer=True "
            "(engine.shard_model=none engine.shard_optimizer=true), which gives each parameter to "
            "one rank"
        )
    if options.reduction != "fast" or options.shard_optimizer:
        raise ConfigError(
            "a model that fully_shard() has sharded takes reduction='fast' and no "
            "shard_optimizer: FSDP adds up gradients within a copy in an order of its own, and "
            "shards the optimizer's state already"
        )
    from orchestrator.engine.torch.fully_sharded import FullySharded  # takes a second to import

    return FullySharded(model, trained, group)


def _reduction_for(
    parameters: Named,
    group: BaseGroup,
    options: AccumulationOptions,
    fully_sharded: FullySharded | None,
    owners: Ownership,
) -> FastReduction | ReproducibleReduction:
    """Build the reduction of these options, with its buffers.

    One rank is sharded for the sake of float32 masters only.
    """
    reduction, sharded = options.reduction, options.shard_optimizer
    known = ("fast", "reproducible")
    if reduction not in known:
        raise ConfigError(
            f"there is no accumulation.reduction={reduction}{did_you_mean(reduction, known)}"
        )
    if reduction != "fast" and sharded:
        raise ConfigError(
            f"engine.shard_optimizer=true is for accumulation.reduction=fast, not for {reduction}"
        )
    # Where others' collectives are allowed in a window, buckets could pair up with them.
    bucket_bytes, overlap = options.bucket_bytes, options.overlap and options.silent
    if fully_sharded is not None:
        return fully_sharded.reduction(parameters, bucket_bytes)
    if sharded and (group.size > 1 or any(p.dtype in HALVES for _, p in parameters)):
        together = [bucket.members for bucket in owners.buckets]
        buffers = GradientBuffers(
            parameters, pad_to=group.size, move_weights=True, together=together
        )
        return ShardedReduction(buffers, group, bucket_bytes, overlap=overlap, owners=owners)
    if reduction == "reproducible":
        buffers = GradientBuffers(parameters, pad_to=group.size)
        return ReproducibleReduction(buffers, group)
    buffers = GradientBuffers(parameters, metric_count=len(options.metric_names))
    slices = bucket_slices(buffers.payloads, bucket_bytes)
    return FastReduction(buffers, group, slices, overlap=overlap)


# ------------------------------------------------------------------ Accumulator


class Accumulator:
    """Accumulate gradients over micro-steps and ranks; see the module's example.

    Args:
        model: a module, or named or plain parameters. Parameters that do not require gradients are
            left alone, shared ones counted once.
        optimizer: steps once a boundary. Its parameter groups, weight decay and rates are its own.
        group: the ranks; by default those of torch's own group, or this process alone where there
            is none and no launcher started more.
        model_group: where each rank holds a part of one model, as in a pipeline: the ranks of one
            copy. The gradient's norm, clipping, loss and every decision are of the whole model
            then, at the price of one small gather between its parts at each boundary.
        options: see there; or some of them by name, as in `clip_norm=1.0`.

    Building one is collective: ranks compare what has to be the same on all of them.

    Attributes:
        learning_rate: the optimizer's, which `begin_window` sets where it gets one.
        newcomers_wait: this rank knows of ranks that wait to join; every rank's report will say so.
        refuse_means: refuse a loss whose graph looks like that of a mean; else `mean_seen` tells
            why the latest one would have been refused.
        padding: the micro-step to come only keeps ranks in step, and its loss is not counted.

    Raises:
        JobError: the model has nothing to train, or ranks do not start alike.
        ConfigError: settings, a model or an optimizer that cannot be used.
    """

    def __init__(
        self,
        model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
        optimizer: Optimizer,
        group: BaseGroup | None = None,
        options: AccumulationOptions | None = None,
        *,
        model_group: BaseGroup | None = None,
        **keywords: Any,
    ) -> None:
        self.options = options = (options or AccumulationOptions()).with_options(keywords)
        if group is None:
            groups: Any = getattr(optimizer, "param_groups", ())
            devices = (parameter.device for group in groups for parameter in group["params"])
            group = group_of_torch(next(devices, torch.device("cpu")))
        self.model, self.group = check_arguments(model, group, options), group
        self.optimizer = check_optimizer(optimizer, "the optimizer")
        named, trained = check_supported(self.model, self.optimizer)
        _refuse_shared(trained)
        self.fully_sharded = _fully_sharded(self.model, trained, optimizer, group, options)
        replicate_group = self.fully_sharded.replicate_group if self.fully_sharded else group
        ranks = self.fully_sharded.replicate_ranks if self.fully_sharded else range(group.size)
        check_same_start(group, self.model, named, optimizer, options, replicate_group, ranks)
        # The engine of a job class compares machines itself, in fast mode too.
        if options.reduction == "reproducible" and not isinstance(options, EngineSettings):
            sentences = machine_warning(partial(gather_numbers, group), options.reduction)
            for sentence in sentences if group.rank == 0 else ():
                warn(sentence, depth=1)
        self._parts = None
        if model_group is not None:
            self._parts = ModelParts(check_group(model_group, "model_group"), options)
        self.precision = Precision(options.precision, trained[0][1].device)
        self.learning_rate = learning_rate_of(optimizer)
        self._policy = UpdatePolicy(options, self.precision, partial(gather_numbers, group))
        owners = Ownership()
        if options.shard_optimizer:
            whole = whole_parameters(optimizer, trained, options.shard_by)
            cost = step_cost(optimizer)
            owners = ownership(trained, whole, group.size, options.bucket_bytes, cost)
            buffers = self.model.named_buffers() if isinstance(self.model, Module) else ()
            check_shardable(optimizer, trained, [*named, *buffers])
        self._reduction = _reduction_for(trained, group, options, self.fully_sharded, owners)
        self._used = UsedParameters(self.buffers.used, group)
        self._shard = None
        if isinstance(self._reduction, ShardedReduction):
            self._shard = OptimizerShard(optimizer, self._reduction, group)
        # A trailer's digests are compared over all ranks, which do not hold the same shards.
        self._window_checker = replica_checker(() if self.fully_sharded else named, group)
        self._replica_checker = self._window_checker
        if self.fully_sharded:
            self._replica_checker = replica_checker(named, replicate_group, ranks)
        # If one copy spans all ranks, FSDP uses this group in each micro-step: it is not silent.
        silent = options.silent and (not self.fully_sharded or replicate_group.size > 1)
        options = replace(options, silent=silent)  # `self.options` stays what the user set
        self._window = WindowState(self.model, named, trained, optimizer, group, options)
        self._losses: list[Any] = []  # weight, total and metrics of each micro-step
        self._tracker: MicroBatchTracker | None = None
        weakref.finalize(self, self._window.close).atexit = False
        if options.warn_about_layers:
            weakref.finalize(self, self._window.warn_if_unfinished)
        self._expected_weight = 1.0
        self.newcomers_wait = self.padding = False
        self.refuse_means, self.mean_seen = True, ""
        self.clock = Clock()
        parameters = [parameter for _, parameter in trained]
        self._dtypes = {parameter.dtype for parameter in parameters}
        self._hooks = GradHooks(parameters, self.buffers, self._window.note_undeclared)
        # They would refuse the backwards of the next one, if this one is dropped in mid-window.
        weakref.finalize(self, self._hooks.remove).atexit = False
        self._may_step = False  # the optimizer may step now
        self._has_stepped = False
        itself = weakref.ref(self)  # the hook would keep this alive as long as the optimizer

        def refuse_other_steps(*_: Any) -> None:
            living = itself()
            if living is not None and not living._may_step:  # noqa: SLF001  # ours
                raise JobError(
                    "optimizer.step() was called, but the optimizer steps at the boundary: call "
                    "accumulator.boundary() instead, which reduces, divides, clips and steps once"
                )

        self._step_guard = optimizer.register_step_pre_hook(refuse_other_steps)
        _living.add(self)

    # ------------------------------------------------------------------ a window

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
                update is the same either way, up to rounding. In bfloat16 they are divided by the
                nearest power of two, in float16 not at all.

        Raises:
            ValueError: `leaves` or `expected_weight` cannot be used.
            JobError: micro-steps of the window before would be lost, or a parameter was unfrozen
                that the accumulator does not train.
        """
        with self._window.within("begin_window()"):
            if self._tracker is not None:
                raise JobError("run.windows() begins its windows itself; leave begin_window() out")
            self._begin(update, learning_rate, leaves, expected_weight)

    def begin_tracked(
        self,
        update: int,
        *,
        expected_weight: float | None,
        leaves: int | None,
        own_leaves: Sequence[int | None],
    ) -> None:
        """Start an update of `run.windows`; see `begin_window`. Not collective.

        Args:
            own_leaves: the leaf that each of this rank's micro-batches is, or None.
        """
        with self._window.within("run.windows()"):
            self._begin(update, None, leaves, expected_weight)
            if self._tracker is not None:
                self._tracker.begin(update, own_leaves)

    def _begin(
        self,
        update: int | None = None,
        learning_rate: float | None = None,
        leaves: int | None = None,
        expected_weight: float | None = None,
        implied_by: str | None = None,
    ) -> None:
        if expected_weight is not None:
            expected_weight = finite_float("expected_weight", expected_weight, least="above 0")
        self._expected_weight = 1.0 if expected_weight is None else self._divisor(expected_weight)
        self._window.begin(update, implied_by=implied_by)
        if learning_rate is not None:
            self.learning_rate.set(finite_float("learning_rate", learning_rate))
        self._reduction.begin(leaves)
        self._losses.clear()
        self.padding = False
        # No parameter is used yet. In place, since the buffers write into the same array.
        self._used.own[:] = bytes(len(self._used.own))
        self.clock.begin()
        self._window.error_breaks = ""

    def _divisor(self, expected_weight: float) -> float:
        """Return what losses are divided by before their backward; the boundary does the rest.

        It is the same on all ranks, so it follows from the settings and not from a loss's dtype.
        """
        # A float16 backward wants sums: means of large batches would underflow in it.
        if self.precision.name == "float16" or torch.float16 in self._dtypes:
            return 1.0
        # The factor of a bfloat16 loss is rounded to 8 bits, which leaves a power of two exact.
        if self.precision.name == "bfloat16" or torch.bfloat16 in self._dtypes:
            return 2.0 ** round(math.log2(expected_weight))
        return expected_weight

    def backward(self, loss: Loss, *, last: bool = False, leaf: int | None = None) -> None:
        """Back-propagate one micro-step's sum. Silent, but for finished buckets in the last one.

        Args:
            loss: its `total` is back-propagated as it is; averaging is the boundary's.
            last: this rank has no further micro-step in this window, so buckets may leave already
                (not while another accumulator's window is open on the same ranks). Leaving it
                False is always right, and slower.
            leaf: the micro-step's global number in the update, where `leaves` was given; a rank's
                come in order.

        Raises:
            JobError: `loss` is not what the job's contract says; a micro-step marked `last` was
                there already; gradients were written by something else than a backward.
        """
        with self._window.within("backward()"):
            if self._tracker is not None:
                last, leaf = self._tracker.next_step("backward()", last=last, leaf=leaf)
            elif not self._window.open:
                self._begin(implied_by="backward()")
            with self.clock.compute:
                row = checked_loss(loss, self.options.metric_names)
                self._check_mean(loss)
                # Its backward runs for the collectives of FSDP in it, and changes no gradient.
                if self.padding:
                    row = [0.0] * len(row)
                self._window.begin_micro_step(last=last)
                # Tensors, read at the boundary: reading one here would wait for the device.
                self._losses += row
                # With several windows open, ranks would start their buckets in different orders.
                early = last and not self._window.overlaps
                factor = 0.0 if self.padding else self.precision.scale / self._expected_weight
                on_gradient = self._reduction.before_backward(last=early, leaf=leaf)
                self._hooks.begin_backward(on_gradient, attached=self.buffers.attached)
                if self._window.overlaps:
                    self._window.note_factor(factor)
                try:
                    _back_propagate(loss.total, factor)
                finally:
                    self._hooks.end_backward()
                    if self._window.overlaps:
                        self._window.note_factor(1.0)
                self._reduction.after_backward()
            if self._tracker is not None:
                self._tracker.computed += 1

    def _check_mean(self, loss: Loss) -> None:
        self.mean_seen = mean_refusal(loss, self._tracker and self._tracker.samples)
        if self.mean_seen and self.refuse_means:
            raise JobError(self.mean_seen)

    def record(self, loss: Loss) -> None:
        """Count a micro-step whose backward other code runs (a pipeline's schedule, say).

        Its gradients must be those of `loss.total`, unscaled. For reduction="fast" only, and not
        for float16. Call `begin_window` before that backward, and this after it.

        Raises:
            ConfigError: settings, or a window with an expected weight, that its backward does not
                follow.
            JobError: the backward ran before the window began.
        """
        with self._window.within("record()"):
            if self._tracker is not None:
                self._tracker.next_step("record()", last=False, leaf=None)
            elif not self._window.open:
                self._begin(implied_by="record()")
            if self.options.reduction != "fast":
                raise ConfigError(
                    "record() is for reduction='fast'; with 'reproducible' each leaf's gradient "
                    "is kept apart, by backward()"
                )
            if self.options.precision == "float16":
                raise ConfigError(
                    "record() is not for precision='float16': the backward that other code ran has "
                    "not scaled its loss. Use 'bfloat16', or backward()"
                )
            if self._expected_weight != 1.0:
                where = "one accumulator's run.windows()" if self._tracker else "`expected_weight`"
                raise ConfigError(
                    f"record() is not for {where}, whose losses are divided before their backward; "
                    "use begin_window() without it, and boundary(), in a loop of your own"
                )
            if self._window.undeclared_factor != 1.0:
                raise ConfigError(
                    "record() came after the backward of another accumulator that scaled its loss: "
                    "give that one no `expected_weight`, and not precision='float16'"
                )
            row = checked_loss(loss, self.options.metric_names)
            self._check_mean(loss)
            self._window.begin_micro_step(recorded=True)
            self._losses += row
            if self._tracker is not None:
                self._tracker.computed += 1

    # ------------------------------------------------------------------ a leaf again

    def leaf_digest(self) -> int:
        """Return a digest of this rank's latest micro-step in this window: of its gradient, total,
        weight and metrics. In reproducible mode. Not collective.
        """
        width = 2 + len(self.options.metric_names)
        return leaf_digest(self.buffers.flat_grads, to_floats(self._losses[-width:]))

    def recompute(self, loss: Callable[[], Loss]) -> int:
        """Return `leaf_digest` of a micro-step that leaves the window as it is. Not collective.

        Args:
            loss: computes it; called within the window, between micro-steps.

        Raises:
            ConfigError: not in reproducible mode.
            JobError: `loss` returns what the job's contract forbids.
        """
        if not isinstance(self._reduction, ReproducibleReduction):
            raise ConfigError("leaves are computed again with reduction='reproducible' alone")
        with self._window.within("recompute()"), self.clock.compute:
            leaf_loss = loss()
            row = checked_loss(leaf_loss, self.options.metric_names)
            factor = self.precision.scale / self._expected_weight
            with self._reduction.aside() as buffers:
                self._hooks.begin_backward(None, attached=buffers.attached)
                try:
                    _back_propagate(leaf_loss.total, factor)
                finally:
                    self._hooks.end_backward()
                buffers.complete()
                return leaf_digest(buffers.flat_grads, to_floats(row))

    # ------------------------------------------------------------------ the boundary

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
        tracker, names = self._tracker, self.options.metric_names
        with self._window.within("boundary()"):
            if tracker is not None:
                tracker.require_complete()
                stop = stop or tracker.stop_requested()
            elif not self._window.open:
                self._begin(implied_by="boundary()")
            agreed = {**self._window.end(), "expected_weight": self._expected_weight}
            update, scale = self._window.update, self.precision.scale
            # What the ranks sent since this window began may be another window's boundary.
            mark = self.group.mark() if self._window.overlaps else self._window.mark
            with self.clock.compute:  # the device may still be computing
                self._reduction.buffers.complete()
                numbers, width = to_floats(self._losses), 2 + len(names)
                # Travels with the gradients, so that ranks agree without a collective of its own.
                trailer = Trailer.from_losses(numbers, len(names))
            with self.clock.wait:
                trailer.flags[STOP] = int(stop)
                trailer.flags[NEWCOMERS] = int(self.newcomers_wait)
                self._used.flag(trailer)
                self._window_checker.write_digest(trailer, update, agreed)
                totals, norms = self._reduction.reduce(trailer)
                self._window.error_breaks = ""  # from here on all ranks know the same
                self._window_checker.check(totals, update)
                summed_norm = norms.value()
                if self._parts is not None:
                    totals, summed_norm = self._parts.join(update, totals, summed_norm)
            with self.clock.optimize:
                # Before the step, which divides and clips in place.
                digest = None
                if self.options.reduction == "reproducible":  # the same bits on all ranks
                    digest = gradient_digest(self.buffers.flat_grads)
                norm = self._step(update, totals, trailer, summed_norm)
            traffic = [self.group.since(mark), self._reduction.replicate_traffic]
            if self._parts is not None:
                traffic.append(self._parts.traffic)
            report = BoundaryReport(
                update=update,
                applied=norm is not None,
                gradient_norm=norm,
                loss_scale=scale,
                micro_steps=self._window.micro_steps,
                collectives=sum(sent.collectives for sent in traffic),
                exchanges=self._used.exchanges,
                bytes_on_wire=sum(sent.bytes_on_wire for sent in traffic),
                gradient_digest=digest,
                losses=tuple(zip(numbers[1::width], numbers[::width], strict=True)),
                **totals.report(names),
                **self.clock.seconds(),
            )
            self._losses.clear()
            if tracker is not None:
                tracker.ended(report)
            if self._window.overlaps:
                self._window.silence_others()
            return report

    def _step(
        self, update: int, totals: Trailer, trailer: Trailer, summed_norm: float
    ) -> float | None:
        """Average and clip the summed gradient, and let the optimizer step.

        Collective where it refuses, or where the set of used parameters changed.

        Returns:
            The averaged gradient's norm; None where the update is skipped.
        """
        decision = self._policy.norm_and_factor(
            update,
            totals,
            trailer,
            summed_norm,
            self._reduction.non_finite,
            divided_by=self._expected_weight,
        )
        if decision is None:
            return None
        norm, factor = decision
        # Holds the summed gradient that this rank's optimizer steps on: its segments, or all of it.
        local = self._shard or self._reduction.buffers
        if factor != 1.0:  # else a pass over all gradients is saved
            for gradient in local.flat_grads:
                gradient.mul_(factor)
        # A parameter that no rank used keeps its weight and state, as without accumulation.
        unused = self._used.unused(totals)
        if len(unused) == len(self._used.own):
            raise JobError(
                f"no gradient reached any parameter in update {update}, on any rank: were the "
                "losses computed by another model, or by a copy of this one?"
            )
        self._window.error_breaks = "accumulator"  # a step may lack memory on one rank alone
        with local.stepping(unused):
            self._may_step = True
            try:
                self.optimizer.step()
            finally:
                self._may_step = False
        if not self._has_stepped:
            _refuse_kept_gradients(self.optimizer, local.flat_grads)
            self._has_stepped = True
        self.precision.succeeded()
        if self._shard is not None:
            with self.clock.wait:  # for the slowest rank's step
                self._shard.gather_weights()
        if self.fully_sharded is not None:
            self.fully_sharded.reshard()
        # A loop within one autocast context would go on with casts of the weights before.
        torch.clear_autocast_cache()
        self._window.error_breaks = ""
        return norm

    # ------------------------------------------------------------------ between windows

    @property
    def buffers(self) -> GradientBuffers:
        """The gradient buffers. After a boundary they hold the averaged and clipped gradient (of a
        sharded optimizer only this rank's segments).
        """
        return self._reduction.buffers

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients as they are now; see `ShowsGradients`. After a boundary each rank
        has only its segments where the optimizer is sharded.
        """
        buffers = self.buffers
        named = zip(buffers.slots, buffers.views, strict=True)
        return {slot.name: view for slot, view in named}

    def parameter_count(self) -> int:
        """Return the trained real numbers, shared ones counted once."""
        return sum(map(real_numbers, self.buffers.parameters))

    def gradient_bytes(self) -> int:
        """Return the memory of all gradient buffers that were made."""
        return self._reduction.buffers_made * sum(flat.nbytes for flat in self.buffers.flats)

    @property
    def sharded(self) -> bool:
        """True if this rank holds a part of the optimizer's state only."""
        return self._shard is not None or self.fully_sharded is not None

    def optimizer_state(self, survivors: BaseGroup | None = None) -> dict[str, Any] | None:
        """Return the optimizer's `state_dict()`, put together from all ranks' where it is sharded.

        Collective where it is sharded; it is on the CPU then, and None but on rank 0.

        Args:
            survivors: ranks of the group that are left: all of them get the state.

        Raises:
            StateLost: on all ranks; `survivors` lacks a rank of the group, and thus its shard.
        """
        if self.fully_sharded is not None:
            return self.fully_sharded.whole_state(self.optimizer, keep=self.group.rank == 0)
        if self._shard is None:
            return self.optimizer.state_dict()
        return self._shard.whole_state(survivors)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take what `optimizer_state` gave, on however many ranks, sharded or not. Not collective.

        Raises:
            ValueError, KeyError: it is another optimizer's.
        """
        if self.fully_sharded is not None:
            state = self.fully_sharded.sharded_state(self.optimizer, state)
        if self._shard is None:
            restore_optimizer(self.optimizer, state)
        else:
            self._shard.load(state)

    def check_replicas(self) -> None:
        """Compare all parameters of all ranks, trained or not. Collective, for between windows.

        Raises:
            ReplicasDiffer: on all ranks alike.
        """
        error: ReplicasDiffer | None = None
        try:
            self._replica_checker.check_all()
        except ReplicasDiffer as difference:
            error = difference
        if self.fully_sharded is not None:  # only the ranks with the same shards know of it
            odd = ranks_where(self.group, error is not None and self.group.rank in error.ranks)
            if odd and (error is None or tuple(odd) != error.ranks):
                error = ReplicasDiffer(
                    f"the shards of {named_ranks(odd)} are no longer those of the other copies of "
                    "the model: they were changed there alone",
                    odd,
                )
        if error is not None:
            raise error

    def refuse_tracked(self) -> None:
        """Refuse `run.windows` where it cannot take the windows. Not collective.

        Raises:
            JobError: it was called before, or micro-steps wait for their boundary.
        """
        with self._window.within("run.windows()"):
            if self._tracker is not None:
                raise JobError(
                    "run.windows() was called before for this accumulator: one call is the whole "
                    "training, all its epochs (epochs=3, say); it goes on where it stopped"
                )
            if self._window.open and self._window.micro_steps:
                raise JobError(
                    f"run.windows() came in mid-window: update {self._window.update} has micro-"
                    "steps already, which would be lost; call boundary() first"
                )

    def track_windows(self, tracker: MicroBatchTracker) -> None:
        """Take all windows from `run.windows` from now on. Raises as `refuse_tracked`."""
        self.refuse_tracked()
        self._tracker, self._window.tracked = tracker, True

    def take_over(self, earlier: Accumulator) -> None:
        """Continue where `earlier` stopped, with the same model and optimizer in another group:
        parameter groups keep the ratios of their rates, and float16 its scale.
        """
        self.learning_rate = earlier.learning_rate
        self.precision.load(earlier.precision.state())

    def close(self, *, release: bool = False) -> None:
        """Remove the hooks from model and optimizer, so that another accumulator can be built.

        A model that `fully_shard` has sharded remains set for accumulators: FSDP alone would not
        reduce its gradients between copies.

        Args:
            release: free the gradient, and give the optimizer whole parameters again, where it was
                in shards, and none of its state; a single rank's was one shard, of all.
        """
        if self not in _living:  # closed already, when a group was lost while it formed
            return
        _living.discard(self)
        self._window.close()
        self._step_guard.remove()
        self._hooks.remove()
        self.buffers.release()
        if not release:
            return
        for parameter in self.buffers.parameters:
            parameter.grad = None
        del self._reduction  # frees its buffers before the next accumulator builds its own
        if self._shard is not None:
            self._shard.release()
        elif self.options.shard_optimizer:
            self.optimizer.state.clear()


_living: weakref.WeakSet[Accumulator] = weakref.WeakSet()


def _back_propagate(total: Tensor, factor: float) -> None:
    """Add the gradients of `total * factor`, with the same bits and two operations less."""
    if total.dtype in HALVES and not _is_exact(factor, total.dtype):
        name = str(total.dtype).removeprefix("torch.")
        warn(
            f"Loss.total is a {name} number, in which the factor of its gradient "
            f"({factor:.4g}) is rounded, and so is the gradient: add up losses in float32, as in "
            "losses.float().sum()",
            kind="total dtype",
        )
    total.backward(None if factor == 1.0 else torch.full_like(total, factor))


def _is_exact(factor: float, dtype: torch.dtype) -> bool:
    return torch.tensor(factor, dtype=dtype, device="cpu").item() == factor


def _refuse_kept_gradients(optimizer: Optimizer, flat_grads: Sequence[Tensor]) -> None:
    """Raise `ConfigError` for an optimizer whose state has gradients themselves, not copies."""
    buffers = {flat.untyped_storage().data_ptr() for flat in flat_grads}
    for state in optimizer.state.values():
        entries: Mapping[Any, Any] = state if isinstance(state, Mapping) else {}
        for key, value in entries.items():
            kept = local_part(value) if isinstance(value, Tensor) else None
            if kept is None or kept.layout is not torch.strided:
                continue
            if kept.numel() and kept.untyped_storage().data_ptr() in buffers:
                raise ConfigError(
                    f"the {type(optimizer).__name__} keeps .grad itself as {key!r} of its state, "
                    "and the next window writes its gradient to the same memory: let it keep a "
                    "copy, as in state[...] = p.grad.clone()"
                )


def _refuse_shared(trained: Named) -> None:
    """Raise `ConfigError` for a parameter that a living accumulator has."""
    for collected in (False, True):  # what is shared after a collection is refused
        taken = {
            id(parameter) for accumulator in _living for parameter in accumulator.buffers.parameters
        }
        shared = [name for name, parameter in trained if id(parameter) in taken]
        if shared and collected:
            raise ConfigError(
                f"parameter {shared[0]} belongs to another accumulator: one model has one, and "
                "each parameter's gradient is reduced once. close() the other one first"
            )
        if shared:
            gc.collect()  # an accumulator without references may be part of a cycle


def only_accumulator() -> Accumulator:
    """Return the accumulator of this process that was built and not closed.

    Raises:
        ConfigError: there is none, or more than one.
    """
    if len(_living) > 1:
        gc.collect()  # as in `_refuse_shared`
    if len(_living) == 1:
        return next(iter(_living))
    raise ConfigError(
        "run.windows() needs an Accumulator: build it before, Accumulator(model, optimizer)"
        if not _living
        else f"there are {len(_living)} accumulators: say whose windows they are, as in "
        "run.windows(len(data), accumulator, ...); several that share them are a list"
    )
