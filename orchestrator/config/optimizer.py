"""Rules for the `optimizer` section, checked without a framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from orchestrator.config.job_source import missing_class
from orchestrator.errors import ConfigError, did_you_mean

RATES = ("lr", "learning_rate")
_TORCH = ("maximize", "foreach", "differentiable", "fused")
_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "capturable", *_TORCH)
ARGUMENTS = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov", *_TORCH),
    "adam": (*_ADAM, "decoupled_weight_decay"),
    "adamw": _ADAM,
}
"""Arguments besides the learning rate, which is the schedule's."""


def optimizer_problems(optimizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each error. An empty section leaves the optimizer to the job."""
    target, name = optimizer.get("_target_"), optimizer.get("name")
    if not optimizer:
        return
    if target is not None and name is not None:
        yield (
            f"optimizer.name={name} and optimizer._target_={target} are two optimizers; leave "
            f"optimizer={name} out"
        )
    elif target is None and name not in ARGUMENTS:
        yield (
            f"optimizer.name must be one of {', '.join(ARGUMENTS)}, but is {name}; another class "
            f"is named by optimizer._target_, as in optimizer._target_=torch.optim.Adagrad"
        )
    elif target is not None and (sentence := missing_class(str(target), "optimizer._target_")):
        yield sentence
    else:
        yield from _arguments(optimizer)


def _arguments(optimizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors in the arguments; those of another class are left to the ranks."""
    name = optimizer.get("name")
    arguments = [key for key in optimizer if key not in ("name", "_target_", *RATES)]
    for key in optimizer.keys() & set(RATES):
        yield (
            f"optimizer.{key}={optimizer[key]} is not used: the rate is the schedule's; set "
            f"schedule.base_lr={optimizer[key]}"
        )
    known = ARGUMENTS.get(str(name), arguments)
    unknown = [key for key in arguments if key not in known]
    taker = next((n for n, taken in ARGUMENTS.items() if set(unknown) <= set(taken)), None)
    for key in unknown:
        yield f"{name} takes no '{key}' (from optimizer.{key})" + (
            f"; {taker} does: optimizer={taker} optimizer.{key}={optimizer[key]}"
            if taker
            else did_you_mean(key, known)
        )


def base_rate(used: Mapping[str, Any], configured_lr: float | None, job: str) -> float | None:
    """Return the base of the schedule: the rate of a job's own optimizer, unless the configuration
    sets one.

    Args:
        used: the optimizer, as `described`.
        configured_lr: `schedule.base_lr`.

    Raises:
        ConfigError: they disagree. A rate of 1.0 and the class's default leave it to the schedule.
    """
    own, left_open = used.get("lr"), (configured_lr, 1.0, used.get("default_lr"))
    if used["from"] != "the job" or own is None:
        return configured_lr
    if configured_lr is not None and own not in left_open:
        kind = str(used["class"]).rpartition(".")[2]
        raise ConfigError(
            f"schedule.base_lr={configured_lr:g}, but {job}.optimizer() builds {kind} with "
            f"lr={own:g}: leave schedule.base_lr out to train with lr={own:g}, or build it with "
            f"lr=1.0"
        )
    return own if configured_lr is None else configured_lr


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # none, or a schedule of the framework's
        return None
    # A rate in a tensor of 32 bits is 0.10000000149 where 0.1 was typed.
    return float(f"{number:.7g}") if "32" in str(getattr(value, "dtype", "")) else number


def described(optimizer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the optimizer, for environment.json and result.json.

    Args:
        settings: the configuration's `optimizer`, empty where the job builds its own.
    """
    groups: list[dict[str, Any]] = [
        {k: v for k, v in group.items() if isinstance(v, int | float | str | tuple | None)}
        for group in getattr(optimizer, "param_groups", [])
    ]
    kind = type(optimizer)
    defaults: Mapping[str, Any] = getattr(optimizer, "defaults", {})
    default = signature(kind).parameters.get("lr")
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "from": "the configuration" if settings else "the job",
        "lr": _number(defaults.get("lr", getattr(optimizer, "learning_rate", None))),
        "default_lr": _number(default.default if default else None),
        "groups": [{k: v for k, v in group.items() if k != "lr"} for group in groups],
    }


def check_builder(optimizer: Mapping[str, Any], target: str, *, own: bool | None) -> None:
    """Refuse two optimizers, and none.

    Args:
        own: whether the job builds one itself; None where its source does not tell, so that the
            ranks check it.

    Raises:
        ConfigError: with both ways out.
    """
    if own and optimizer:
        name = str(optimizer.get("_target_") or optimizer.get("name"))
        raise ConfigError(
            f"{target} builds its own optimizer, so optimizer={name} would not be used. Leave "
            f"optimizer out, or if you did not state it, add optimizer=null: the job's own is "
            f"kept, with the learning rates of its parameter groups (each in its ratio to "
            f"schedule.base_lr); or take optimizer() out of the job"
        )
    if own is False and not optimizer:
        raise ConfigError(
            f"{target} builds no optimizer of its own, and the configuration names none; try "
            f"optimizer=adam"
        )
