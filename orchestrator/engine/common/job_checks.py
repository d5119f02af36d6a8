"""Checks of what a job gives to an engine, and sentences about it, for all frameworks."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

from orchestrator.errors import ConfigError, JobError, did_you_mean, shortened
from orchestrator.job import Job, Loss
from orchestrator.rundir.warnings import warn
from orchestrator.units import first_few


def checked_figures(returned: Any, job: Any) -> dict[str, float]:
    """Return the figures that `job.evaluate()` returned as numbers; warn of NaN and infinity.

    >>> from types import SimpleNamespace
    >>> checked_figures({"accuracy": 1}, SimpleNamespace())
    {'accuracy': 1.0}

    Raises:
        JobError: it is no dictionary, or a value is not one number.
    """
    named = f"{type(job).__name__}.evaluate()"
    if not isinstance(returned, Mapping):
        raise JobError(
            f"{named} must return figures by name, as in return {{'accuracy': 0.9}}, but returned "
            f"{_describe_value(returned)}; leave evaluate() out where there is nothing to say"
        )
    figures: dict[str, float] = {}
    for name, value in returned.items():
        try:
            number = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):
            raise JobError(
                f"{named}'s '{name}' must be one number, but is {_describe_value(value)}"
            ) from None
        figures[str(name)] = number
    warn_of_non_finite(figures, named)
    return figures


def warn_of_non_finite(figures: Mapping[str, float], named: str) -> None:
    """Warn of held-out figures that are NaN or infinite, of what `named` gives."""
    for name, number in figures.items():
        if not math.isfinite(number):
            warn(
                f"{named}'s '{name}' is {number}: of a model that diverged, or of a mistake in it",
                kind=f"evaluate {name}",
            )


# ------------------------------------------------------------------ Names

_OTHER_NAMES = {
    "collate_fn": "collate",
    "configure_optimizers": "optimizer",
    "evaluation": "evaluate",
    "validation_step": "validation",
    "val_dataset": "validation",
    "valid_dataset": "validation",
    "validation_dataset": "validation",
    "eval_dataset": "validation",
    "after_step": "after_update",
    "after_optimizer_step": "after_update",
    "on_train_batch_end": "after_update",
}
"""Names that other tools have for a job's optional methods, and people remember."""


def warn_of_names(job: Any) -> None:
    """Warn of methods of a job that have another tool's name, so that nothing calls them, and of
    an update's number that the job takes for that of an epoch.
    """
    kind = type(job)
    for name, own_name in _OTHER_NAMES.items():
        is_ours = getattr(kind, own_name, None) is getattr(Job, own_name)
        if is_ours and callable(getattr(kind, name, None)):
            warn(f"the training does not call {kind.__name__}.{name}(); did you mean {own_name}()?")
    for name in ("learning_rate", "after_update"):
        method = getattr(job, name, None)
        taken = [*inspect.signature(method).parameters] if inspect.ismethod(method) else []
        if taken and "epoch" in taken[-1]:
            warn(
                f"{kind.__name__}.{name}() gets the number of an update, from 0, not of an epoch: "
                f"call its argument update, not {taken[-1]}"
            )


# ------------------------------------------------------------------ Training


def refuse_scheduler(groups: Iterable[Mapping[str, Any]], job: Any) -> None:
    """Raise `JobError` when a scheduler of the framework's hangs on a job's own optimizer.

    Args:
        groups: the optimizer's; both frameworks' schedulers leave their mark in them.
    """
    if any("initial_lr" in group for group in groups):
        raise JobError(
            f"{type(job).__name__}.optimizer has a learning-rate scheduler, which would have no "
            "effect: each update sets the rate. Leave it out and define learning_rate(self, "
            "update) in the job, or use schedule.*"
        )


def left_in_evaluation(job: Any, call: str, undo: str) -> JobError:
    """Return the error of a model that is in evaluation mode at an update's end. Nothing else would
    show it: without dropout, and with frozen statistics, losses look fine.

    Args:
        call: puts a model of the framework into it; `undo`: puts it back.
    """
    return JobError(
        "the model is in evaluation mode at an update's end, but did not begin in it: "
        f"{type(job).__name__}.loss() or after_update() has called {call} without a {undo} after it"
    )


# ------------------------------------------------------------------ Losses


_WHOLE_NUMBERS = {"bfloat16": 256, "float16": 2048}
"""All whole numbers up to these are exact in a half-precision type."""


def check_loss(loss: Any, names: Collection[str], tensor: type) -> None:
    """Raise `JobError` for what breaks the contract of `Loss`; warn of figures in half precision.

    Args:
        names: the job's metric_names.
        tensor: the framework's class of tensors.
    """
    if type(loss) is not Loss and not all(hasattr(loss, part.name) for part in fields(Loss)):
        returned = "a plain tensor" if isinstance(loss, tensor) else type(loss).__name__
        raise JobError(
            f"loss() must return Loss(total, weight), but returned {returned}: a sum and what to "
            "divide it by, as in Loss(cross_entropy(scores, wanted, reduction='sum'), "
            "weight=len(wanted)); from orchestrator import Loss"
        )
    total: Any = loss.total
    if not isinstance(total, tensor) or math.prod(total.shape) != 1 or total.is_complex():
        if isinstance(total, Real):
            raise JobError(
                f"Loss.total must be a tensor with its graph, but is the number {total!r:.20}: "
                "leave out .item()"
            )
        wrong = _describe_value(total)
        raise JobError(
            f"Loss.total must be a real scalar tensor, but is {wrong}; use reduction='sum'"
        )
    metrics: Any = loss.metrics
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
        wrong = _describe_value(metrics)
        raise JobError(f"Loss.metrics must be a dictionary, but is {wrong}")
    for place, (name, value) in enumerate((("", loss.weight), *metrics.items())):
        if type(value) in (int, float):  # a look at an abstract class takes longer than the rest
            continue
        if isinstance(value, tensor):
            number: Any = value
            valid = math.prod(number.shape) == 1 and not number.is_complex()
        else:
            valid = isinstance(value, Real)
        what = f"metrics['{name}']" if place else "weight"
        if not valid:
            wrong = _describe_value(value)
            raise JobError(f"Loss.{what} must be a real number, but is {wrong}")
        dtype = str(getattr(value, "dtype", "")).rpartition(".")[2].lower()
        if dtype in _WHOLE_NUMBERS:
            warn(
                f"Loss.{what} is a {dtype} number, which holds whole numbers up to "
                f"{_WHOLE_NUMBERS[dtype]} only: a larger or fractional one is rounded in each "
                "micro-step and depends on how a batch is split; add it up in float32, as in "
                "mask.float().sum()",
                kind=f"{what} dtype",
            )
    if metrics or names:
        check_metric_names(metrics, names)


def _describe_value(value: Any) -> str:
    """Describe a value; of a tensor or an array its kind and shape, not the first of its lines."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return shortened(repr(value), 40)
    kind = "array" if type(value).__module__.partition(".")[0] == "numpy" else "tensor"
    return f"a {dtype} {kind} of shape {tuple(shape)}"


def check_metric_names(names: Collection[str], declared: Collection[str]) -> None:
    """Raise `JobError` for a metric that was not declared, or that is missing."""
    for name in names:
        if name not in declared:
            raise JobError(
                f"Loss.metrics has '{name}', which the job's metric_names do not declare"
                f"{did_you_mean(name, declared)}"
            )
    for name in declared:
        if name not in names:
            raise JobError(f"Loss.metrics lacks '{name}', which the job's metric_names declare")


# ------------------------------------------------------------------ Optimizers by name


def optimizer_class(
    settings: Mapping[str, Any], by_name: Mapping[str, Callable[..., Any]]
) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Return an optimizer of the configuration: how it is spelled there, its class, its arguments.

    The submission has checked names and the arguments of named ones (`config.optimizer`).

    Raises:
        ConfigError: there is no class of this dotted name on this machine.
    """
    options = {key: value for key, value in settings.items() if key not in ("name", "_target_")}
    if "_target_" not in settings:
        return f"optimizer.name={settings['name']}", by_name[settings["name"]], options
    spelled = f"optimizer._target_={settings['_target_']}"
    module, _, name = str(settings["_target_"]).rpartition(".")
    try:
        return spelled, getattr(importlib.import_module(module), name), options
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{spelled}: {error}") from error


# ------------------------------------------------------------------ Batch norm


def name_layers(layers: Collection[str]) -> str:
    """Return the first few of some layers' names, as text."""
    return first_few([name or "the model itself" for name in layers], 5)


NORMS_OF_JOB = (
    "Use engine.norm=group or layer (group or layer norm in its place), engine.norm=frozen (freeze "
    "the statistics that it has)"
)
NORMS_OF_LOOP = (
    "Before the optimizer is built: from orchestrator import with_norms; model, _ = "
    "with_norms(model, 'group'), 'layer' (group or layer norm in its place) or 'frozen' (freeze "
    "the statistics that it has)"
)


def norm_advice(layers: Collection[str], *, apart: bool, remedy: str = NORMS_OF_JOB) -> str:
    """Return a sentence about batch norms of these names; `apart`: ranks have statistics of their
    own.
    """
    differ = ", and running statistics differ between ranks" * apart
    return (
        f"batch norm in {name_layers(layers)} sees one micro-batch at a time, so the update is not "
        f"that of one big batch{differ}. {remedy}, or take one micro-step of the whole batch on "
        "one rank"
    )


def replaced_norms(choice: str, layers: Collection[str]) -> str:
    """Return a sentence about batch norms that `engine.norm` has frozen or replaced."""
    what = {
        "frozen": "keeps the statistics that it has (load trained ones in model())",
        "group": "was replaced by group norm",
        "layer": "was replaced by layer norm",
    }[choice]
    return f"engine.norm={choice}: batch norm in {name_layers(layers)} {what}"


def norm_groups(choice: str, channels: int, *, vectors: bool) -> int:
    """Return the groups of the group norm that replaces a batch norm of so many channels.

    A layer norm is a group norm of one group (Wu and He, "Group Normalization", 2018, section 3).
    Channels of vectors have no places to take statistics over, so all of them make one group.

    >>> norm_groups("group", 64, vectors=False), norm_groups("layer", 64, vectors=False)
    (16, 1)
    """
    most = 1 if vectors or choice == "layer" else max(1, min(32, channels // 4))
    return next(count for count in range(most, 0, -1) if channels % count == 0)


# ------------------------------------------------------------------ Weights files


Kinds = Mapping[str, tuple[str, tuple[int, ...]]]  # name: dtype, shape


def uncompiled(name: str) -> str:
    """Return the name of a tensor without what `torch.compile` puts before it."""
    return re.sub(r"(?<![^.])_orig_mod\.", "", name)


def check_fits(actual: Kinds, wanted: Kinds) -> None:
    """Check initial weights. Not collective; every rank gets the same result.

    Args:
        actual: tensors of the file; wanted: those of the model.

    Raises:
        ConfigError: they are not alike; the first few that differ are named.
    """
    if wrong := describe_mismatches(actual, wanted):
        raise ConfigError(f"the weights do not fit this model: {wrong}")


def describe_mismatches(actual: Kinds, wanted: Kinds) -> str:
    """Return the first few tensors of a file that are not as the model wants them, as text."""
    wrong: list[str] = []
    for name in sorted(actual.keys() | wanted.keys()):
        if name not in actual:
            wrong.append(f"{name} is missing")
        elif name not in wanted:
            wrong.append(f"the model has no {name}")
        elif actual[name] != wanted[name]:
            is_now, due = (
                f"{dtype}[{', '.join(map(str, shape))}]"
                for dtype, shape in (actual[name], wanted[name])
            )
            wrong.append(f"{name} is {is_now}, but must be {due}")
    more = len(wrong) - 5
    return "; ".join(wrong[:5]) + (f"; and {more} more" if more > 0 else "")
