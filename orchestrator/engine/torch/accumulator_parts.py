"""What an accumulator is made of, and what it offers between its windows."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.common.clock import Clock
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.engine.torch.checks.at_start.arguments import check_arguments
from orchestrator.engine.torch.checks.at_start.same_start import start_alike
from orchestrator.engine.torch.checks.at_start.supported import served
from orchestrator.engine.torch.checks.in_window.call_order import WindowState
from orchestrator.engine.torch.checks.in_window.handed_out import HandedOut
from orchestrator.engine.torch.checks.in_window.window_checks import WindowChecks
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.process_group import group_of_torch
from orchestrator.engine.torch.gradients.buffer import GradientBuffers
from orchestrator.engine.torch.gradients.hooks import listen
from orchestrator.engine.torch.gradients.unused_parameters import UsedParameters
from orchestrator.engine.torch.loss_sums import Tally
from orchestrator.engine.torch.model.precision import Precision
from orchestrator.engine.torch.optimizer_step import Step
from orchestrator.engine.torch.optimizers import LearningRate, usable
from orchestrator.engine.torch.reduction_choice import reduction_for
from orchestrator.engine.torch.sharding.eligibility import check_shardable
from orchestrator.engine.torch.sharding.pieces import OptimizerShard
from orchestrator.engine.torch.sharding.reduction import ShardedBoundary
from orchestrator.engine.torch.sharding.state import gathered, part_of, recovered
from orchestrator.engine.torch.state import restore_optimizer
from orchestrator.errors import ConfigError, JobError


class AccumulatorParts:
    """All of `Accumulator` but its windows; the arguments are explained there."""

    def __init__(
        self,
        model: Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
        optimizer: Optimizer,
        group: BaseGroup | None = None,
        options: AccumulationOptions | None = None,
        **keywords: Any,
    ) -> None:
        self.options = options = (options or AccumulationOptions()).but(keywords)
        group = group_of_torch(_device_of(model)) if group is None else group
        model = check_arguments(model, group, options)
        self.model, self.group, self.optimizer = model, group, usable(optimizer, "the optimizer")
        named, trained = served(model, self.optimizer)
        start_alike(
            group, model, named, optimizer, options.of_all_ranks(), broadcast=options.broadcast
        )
        self.precision = Precision(options.precision, trained[0][1].device)
        self._rate, self._tally = LearningRate(optimizer), Tally(options.metric_names)
        self._used = UsedParameters(len(trained), group)
        self._step = Step(self.optimizer, group, self.precision, self._used, options)
        self._reduction = reduction_for(trained, group, options)
        if options.shard_optimizer:
            check_shardable(optimizer, trained)
        self._shard = None
        if isinstance(self._reduction, ShardedBoundary):
            slices = self._reduction.slices
            self._shard = OptimizerShard(optimizer, self.buffers, group, slices)
        # Once the shard has put its pieces into the optimizer, which has to stay as it is then.
        self._checks = WindowChecks(model, named, trained, optimizer, group, options)
        self._window = WindowState([name for name, _ in trained], group.size)
        self._handed: HandedOut | None = None
        if options.advise:
            weakref.finalize(self, _say_left_over, self._window, self._tally)
        self._expected = 1.0
        self.newcomers_wait = False  # this rank knows of some, and every rank's report will say so
        self._mark = group.mark()
        self.clock = Clock()
        self._ears = listen(self, trained)
        _living.add(self)

    def gradient_ready(self, parameter: int) -> None:
        """For the hooks of this accumulator's parameters."""
        if not self._window.arrived(parameter):
            return
        self.buffers.take(parameter)
        self._used.mark(parameter)
        self._reduction.ready(parameter)

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

    def optimizer_state_among(self, left: BaseGroup) -> dict[str, Any]:
        """Return `optimizer_state` on every rank of `left`; collective over it where sharded.

        Raises:
            StateLost: on all ranks; `left` lacks a rank of the group, and thus its shard.
        """
        return self.optimizer.state_dict() if self._shard is None else recovered(self._shard, left)

    def check_replicas(self) -> None:
        """Compare all parameters of all ranks, trained or not; buffers that differ are warned of.
        Collective, for between windows.

        Raises:
            ReplicasDiffer: on all ranks alike.
        """
        self._checks.all_weights()

    def follow(self, handed: HandedOut) -> None:
        """Be given all windows by `run.windows` from now on, for good. Not collective.

        Raises:
            JobError: it was so before, or micro-steps wait for their boundary.
        """
        with self._window.within("run.windows()"):
            if self._handed is not None:
                raise JobError(
                    "run.windows() was called before for this accumulator: one call is the whole "
                    "training, all its epochs (epochs=3, say); it goes on where it stopped"
                )
            if self._window.open and self._tally.micro_steps:
                raise JobError(
                    f"run.windows() came in mid-window: update {self._window.update} has micro-"
                    "steps already, which would be lost; call boundary() first"
                )
            self._handed = handed

    def set_rate(self, rate: float) -> None:
        """The learning rate from now on, as `begin_window` sets it."""
        self._rate.set(rate)

    def succeed(self, earlier: AccumulatorParts) -> None:
        """Go on where `earlier` stopped, which had the same model and optimizer in another group:
        parameter groups keep the ratios of their rates, and float16 its scale.
        """
        self._rate = earlier._rate
        self.precision.load(earlier.precision.state())

    def __reduce__(self) -> Any:
        raise ConfigError(
            "an accumulator can be neither copied nor pickled: it is bound to its process, model "
            "and group. Save model.state_dict() and accumulator.optimizer_state(), and build "
            "another one"
        )

    def close(self) -> None:
        """Take the hooks off model and optimizer: another accumulator is to have them."""
        _living.discard(self)
        self._window.close()
        self._step.close()
        self._ears.remove()

    def release_shard(self) -> None:
        """Once it is closed: the optimizer has whole parameters again, where it was in shards, and
        none of its state; a single rank's was one shard, of all.
        """
        if self._shard is not None:
            self._shard.release()
        elif self.options.shard_optimizer:
            self.optimizer.state.clear()


_living: weakref.WeakSet[AccumulatorParts] = weakref.WeakSet()


def the_only_one() -> AccumulatorParts:
    """The accumulator of this process that was built and not closed.

    Raises:
        ConfigError: there is none, or more than one.
    """
    if len(_living) > 1:
        gc.collect()  # one that nobody has any more may be part of a circle
    if len(_living) == 1:
        return next(iter(_living))
    raise ConfigError(
        "run.windows() needs an Accumulator: build it before, Accumulator(model, optimizer)"
        if not _living
        else f"there are {len(_living)} accumulators: say whose windows they are, as in "
        "run.windows(len(data), accumulator, ...); several that share them are a list"
    )


def _device_of(model: Any) -> torch.device:
    parameters = model.parameters() if isinstance(model, Module) else ()
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _say_left_over(window: WindowState, tally: Tally) -> None:
    """An accumulator is gone: say so if micro-steps were left without a boundary, for no error."""
    if window.unfinished and tally.micro_steps and sys.exc_info()[1] is None:
        if getattr(sys, "last_value", None) is not None:
            return  # the program ends because of that
        sys.stderr.write(
            f"warning: micro-steps of update {window.update} ({tally.micro_steps}) were "
            "accumulated and trained nothing: boundary() was not called after them\n"
        )
