"""Rules for the `optimizer` section, checked without a framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.config.job_source import constructor_arguments, missing_class
from orchestrator.errors import ConfigError, did_you_mean

RATES = ("lr", "learning_rate")
_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
ARGUMENTS = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": _ADAM,
    "adamw": _ADAM,
}
"""What both frameworks take by name, besides the learning rate, which is the schedule's."""

CLASSES = {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW"}
"""Where more arguments are looked up, should one be stated that is not listed above."""


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
    name = optimizer.get("name")
    spelled = str(name or optimizer["_target_"])
    given = [key for key in optimizer if key not in ("name", "_target_")]
    for key in given:
        if key in RATES:
            yield (
                f"optimizer.{key}={optimizer[key]} is not used: the rate is the schedule's; set "
                f"schedule.base_lr={optimizer[key]}"
            )
    known = list(ARGUMENTS.get(str(name), ()))
    unknown = [key for key in given if key not in known and key not in RATES]
    if not unknown:
        return
    written = constructor_arguments(CLASSES.get(str(name), spelled))
    if written is None and not known:
        return  # the ranks see, with the class in hand
    known += [k for k in (written or [])[1:] if k not in known and k not in RATES]
    unknown = [key for key in unknown if key not in known]
    for key in unknown:
        taken = [
            f"{other} does: optimizer={other}"
            for other, arguments in ARGUMENTS.items()
            if set(unknown) <= set(arguments)
        ]
        yield f"{spelled} takes no '{key}' (from optimizer.{key})" + (
            f"; {taken[0]} optimizer.{key}={optimizer[key]}" if taken else did_you_mean(key, known)
        )


def chosen(own: Any, optimizer: Mapping[str, Any], job: str) -> Any:
    """Return the optimizer that a job gave; None if the configuration's is to be built.

    Args:
        own: what the job's `optimizer(model)` gave.
        job: the class's name.

    Raises:
        ConfigError: the job gave one and the configuration names one, or neither does.
    """
    if own is not None and optimizer:
        stated = optimizer.get("_target_") or optimizer.get("name")
        raise ConfigError(
            f"{job}.optimizer() gives an optimizer, and the configuration names {stated}: add "
            f"optimizer=null for the job's own, or let optimizer() give None"
        )
    if own is None and not optimizer:
        raise ConfigError(
            f"{job}.optimizer() gives no optimizer, and the configuration names none; add "
            f"optimizer=adam"
        )
    return own


def described(optimizer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what steps the weights, for environment.json and result.json.

    Args:
        settings: the configuration's `optimizer`, empty where the job builds its own.
    """
    groups: list[dict[str, Any]] = [
        {k: v for k, v in group.items() if isinstance(v, int | float | str | tuple | None)}
        for group in getattr(optimizer, "param_groups", [])
    ]
    kind = type(optimizer)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "from": "the configuration" if settings else "the job",
        "groups": [{k: v for k, v in group.items() if k != "lr"} for group in groups],
    }


def check_builder(optimizer: Mapping[str, Any], target: str, *, own: bool | None) -> None:
    """Refuse two optimizers, and none.

    Args:
        own: whether the job builds one itself; None where its source does not tell, and the ranks
            see.

    Raises:
        ConfigError: with both ways out.
    """
    if own and optimizer:
        stated = str(optimizer.get("_target_") or optimizer.get("name"))
        raise ConfigError(
            f"{target} builds its own optimizer, so optimizer={stated} would not be used. Leave "
            f"optimizer out: the job's own is kept, with the learning rates of its parameter "
            f"groups (each in its ratio to schedule.base_lr); or take optimizer() out of the job"
        )
    if own is False and not optimizer:
        raise ConfigError(
            f"{target} builds no optimizer of its own, and the configuration names none; try "
            f"optimizer=adam"
        )
