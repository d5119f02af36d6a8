"""The user's interface: a job. No framework is imported here: a job's file imports its own.

A job is any class with `model`, `dataset` and `loss`; deriving from `Job` only saves typing. The
keys under `job:` in the configuration (all but `_target_`) are its constructor's arguments.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

REQUIRED_METHODS = ("model", "dataset", "loss")
_DEFINITION_TIMES: weakref.WeakKeyDictionary[type, float] = weakref.WeakKeyDictionary()
COUPLED_METHODS = ("embed", "loss_of_embeddings")  # both of them instead of `loss`


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one micro-batch as a *sum*, and the weight to divide it by.

    The update's loss is (sum of `total`) / (sum of `weight`) over every micro-batch of every rank,
    and so is its gradient: exact for any split. Give sums, never means.

    Attributes:
        total: scalar tensor with a graph: the sum of the samples' (or tokens') losses.
        weight: the divisor: the number of samples, tokens, or the sum of sample weights.
        metrics: further sums by name, averaged in the same way (say, how many were right). Their
            names must be those in the job's `metric_names`.
    """

    total: Any
    weight: float
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Job:
    """Base class of jobs: the optional parts with their defaults.

    Attributes:
        framework: "torch", "mindspore", or the name that another package registers.
        metric_names: names that `loss` fills in `Loss.metrics`. Declared, because a rank that has
            no samples in a window has to send the same numbers as all the others.
        talks_in_window: set it to True when `loss` has to call collectives; every rank must then
            call the same ones equally often. Otherwise ranks are silent between boundaries.
        augments: set it to True when `dataset[i]` draws random numbers: every sample then gets
            its own generator state from (seed, update, position in the update), on any rank.
        batch_dependent: set it to True to accept a loss that is no sum over samples (one divided by
            the micro-batch's maximum, say): updates then depend on how a batch is split. Without
            it such a loss is refused at the first update (torch).

    A job may define `learning_rate(self, update) -> float` as well: the rate of update number
    `update`, from 0, instead of the configuration's schedule; setting both is refused. It
    must depend on that number alone. Parameter groups keep their ratios to it.

    Likewise `state_dict(self)` and `load_state_dict(self, state)`: what it keeps on itself besides
    the model, for checkpoints. What progress decides (annealing, say) it reads from
    `orchestrator.current_run`, which has `update`, `epoch`, `rank`, `ranks` and `folder`.

    Likewise `lengths(self)`: the length of each sample of the data set in tokens, a sequence or an
    array of whole numbers, for `accumulation.micro_tokens`; an attribute `lengths` of the data set
    serves as well. It must be cheap to read. And `cost(self, length, samples) -> float`: what a
    micro-step of `samples` samples, padded to `length` tokens, costs in any unit, where that is not
    in proportion to its padded tokens (attention over long sequences, say).

    Likewise `shard(self, model, mesh)`: it calls `fully_shard(..., mesh=mesh)` on parts of the
    model, and on the whole last, where `engine.shard_model` would take each layer.
    """

    framework: ClassVar[str] = "torch"
    metric_names: ClassVar[tuple[str, ...]] = ()
    augments: ClassVar[bool] = False
    talks_in_window: ClassVar[bool] = False
    batch_dependent: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _DEFINITION_TIMES[cls] = time.time()

    def model(self) -> Any:
        """Build the model. Called once on every rank, with the same random seed."""
        raise NotImplementedError(f"{type(self).__name__} must define model()")

    def dataset(self) -> Any:
        """Return the training data: anything with `len()` and `[index]`, the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define dataset()")

    def loss(self, model: Any, batch: Any) -> Loss:
        """Return the loss of one micro-batch, as sums.

        It must not call a collective, unless the class declares `talks_in_window`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def after_update(self, model: Any, update: int) -> None:
        """Run after each update, on every rank, after the optimizer's step.

        For values that follow the weights, such as moving averages: keep them in the model's state,
        so that checkpoints hold them. No gradients are recorded, and no collective may be called.
        """
        del model, update

    def callbacks(self) -> Sequence[Any]:
        """Return callbacks of the training loop: a list of `orchestrator.callbacks.Callback`.

        Called once on every rank, with the model and the data set built. The loop calls them on
        every rank, after its own and in order. They must not change what the training computes
        with, and must call no collective; an exception fails the run.
        """
        return []

    def optimizer(self, model: Any) -> Any | None:
        """Build an own optimizer, or return None for the one that the configuration names."""
        del model
        return None

    def validation(self) -> Any:
        """Return held-out data, on which all ranks together compute `loss` in evaluation mode.

        A data set as `dataset` returns, or several by name; None (the default) for none. The
        figures are the loss and the metrics of `loss`, as exact sums over each data set divided by
        its weight, under `loss` and the metrics' names; of several data sets under `NAME.loss` and
        so on.
        """
        return None

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return held-out figures by name that are no sums over samples. Called on rank 0; the
        others wait. With `engine.shard_model` it is called on all ranks, which must call the model
        equally often.
        """
        del model
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples; None (the default) means the framework's own way."""
        del samples
        return None


class Coupled(Protocol):
    """Methods that a job defines *instead of* `loss` when samples need each other's embeddings.

    The update's loss is then a function of the embeddings of all its samples, wherever they were
    computed: contrastive losses with global negatives, for one. Only the torch engine does this.
    """

    def embed(self, model: Any, batch: Any) -> Any:
        """Return a tensor, or a tuple of them, with one row for each sample of the micro-batch.

        Called twice for each micro-batch, with the same random numbers. No collective.
        """
        ...

    def loss_of_embeddings(self, model: Any, embeddings: Any) -> Loss:
        """Return the loss as a sum over all samples of the update, in the update's order.

        Called once an update on every rank, with the same values and random numbers. `model` gives
        the loss's own parameters, such as a temperature.
        """
        ...


def definition_time(job: type) -> float | None:
    """Return when this process defined a class of `Job`, in seconds since 1970."""
    return _DEFINITION_TIMES.get(job)


def is_coupled(job: Any) -> bool:
    """Return whether a job, or its class, defines `embed` and `loss_of_embeddings`."""
    return all(callable(getattr(job, name, None)) for name in COUPLED_METHODS)


def evaluates(job: Any) -> bool:
    """Return whether the job defines `evaluate`."""
    return getattr(type(job), "evaluate", Job.evaluate) is not Job.evaluate


def has_own_rate(job: Any) -> bool:
    """Return whether a job, or its class, defines `learning_rate(update)`."""
    return callable(getattr(job, "learning_rate", None))


def dataset_of(job: Any) -> Any:
    """Return the job's data set, which is built at the first call: the plan, checks and the loader
    of each group of ranks read it.
    """
    attributes = getattr(job, "__dict__", {})
    name = "_orchestrator_dataset"  # no name of the user's
    if name not in attributes:
        attributes[name] = job.dataset()
    return attributes[name]
