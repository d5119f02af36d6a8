"""Options of `run.windows`, and their plan, with messages in the terms of a call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from orchestrator.client.arguments import whole_number
from orchestrator.client.loop import Callback, describe_misuse
from orchestrator.config.rules import accumulation_problems
from orchestrator.config.schema import (
    BOUNDS,
    Config,
    out_of_bounds,
    plain,
    unrepresentable_values,
)
from orchestrator.errors import ConfigError, PlanError, UsageError, did_you_mean
from orchestrator.plan.cost import lengths_of
from orchestrator.plan.order import Shards
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.plan.recorded_speeds import SpeedChanges, speeds_for

_SECTIONS = re.compile(r"\b(?:accumulation|train)\.(?=[a-z_]+\b)")
_PLANNED = {
    "global_batch": "accumulation.global_batch",
    "steps": "accumulation.steps",
    "micro_batch": "accumulation.micro_batch",
    "micro_tokens": "accumulation.micro_tokens",
    "pad_to": "accumulation.pad_to",
    "batch_schedule": "accumulation.batch_schedule",
    "balance": "accumulation.balance",
    "ragged": "accumulation.ragged",
    "updates": "train.updates",
    "epochs": "train.epochs",
    "total_samples": "train.samples",
    "seed": "train.seed",
}
"""The key of the configuration that an option sets for the plan."""
_KEYS = {
    **_PLANNED,
    "checkpoint_every": "train.checkpoint_every",
    "keep_checkpoints": "train.keep_checkpoints",
    "keep_every": "train.keep_every",
}
_LEAST = {
    "first": 0,
    **{
        name: int(least)
        for name, key in _KEYS.items()
        if key in BOUNDS and (least := BOUNDS[key].least) is not None
    },
}
_KINDS: Mapping[str, tuple[Any, str]] = {
    "state": (Mapping, "state={'rate': scheduler}"),
    "shards": ((Shards, type(None)), "shards=data.shards"),
    "balance": (str, "balance='measured'"),
}


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """The options of `run.windows`.

    Attributes:
        global_batch, steps, micro_batch: any two give the third, as everywhere here.
        batch_schedule: other global batches from given updates on: [[1000, 512], [5000, 3072]].
        updates, epochs: length, over all starts; `updates` wins; by default one epoch.
        total_samples: the length in their place: as many updates as it takes to reach them.
        micro_tokens: most padded tokens of a micro-batch, in the place of `steps` and
            `micro_batch`; it needs `lengths`.
        lengths: of the samples, in tokens: a sequence or array of whole numbers, one for each.
        pad_to: you pad a micro-batch to a multiple of it.
        cost: of a micro-batch, from its padded length and its number of samples, in any unit;
            without it, its padded tokens.
        balance: "even"; "measured": by the speeds that ranks are seen to have; or the folder of a
            run, by the speeds that it has recorded.
        ragged: treatment of an epoch's last samples: "update", "drop" or "carry".
        seed: of the order of samples, and of the random numbers of every micro-step.
        shards: of a data set that is read shard after shard (`orchestrator.Shards`).
        first: the update to begin with, if you keep checkpoints of your own.
        checkpoints: a folder that all ranks see. By default the run's; without a run nothing is
            saved, and SIGTERM keeps its effect.
        checkpoint_every: updates between checkpoints; 0: only at the end of the loop; None: at
            the ends of epochs as well.
        keep_checkpoints: number of the newest that stay.
        keep_every: of the older ones the first at or after each multiple of so many updates stays.
        state: further objects to save, by name: any with `state_dict()` and
            `load_state_dict()`, such as a learning-rate scheduler.
        callbacks: of the loop (`orchestrator.callbacks.Callback`), called after ours.
    """

    global_batch: int | None = None
    steps: int | None = None
    micro_batch: int | None = None
    micro_tokens: int | None = None
    lengths: Any = None
    pad_to: int = 1
    cost: Callable[[int, int], float] | None = None
    balance: str = "even"
    batch_schedule: Sequence[Sequence[int]] = ()
    updates: int | None = None
    epochs: float | None = None
    total_samples: int | None = None
    ragged: str = "update"
    seed: int = 0
    shards: Shards | None = None
    first: int | None = None
    checkpoints: str | Path | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    keep_every: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    callbacks: Sequence[Callback] = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> WindowOptions:
        """Return the options in the arguments of a call.

        Raises:
            TypeError: there is no option of such a name.
            ConfigError: a value is of another kind, or two exclude each other.
        """
        known = [option.name for option in fields(cls)]
        for name in arguments:
            if name not in known:
                raise TypeError(
                    f"there is no option '{name}' of run.windows(){did_you_mean(name, known)}"
                )
        checked: dict[str, Any] = dict(arguments)
        for name, least in _LEAST.items():
            if name in arguments and not (arguments[name] is None and getattr(cls, name) is None):
                checked[name] = whole_number("windows", name, arguments[name], least, ConfigError)
        epochs = arguments.get("epochs")
        if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int | float)):
            raise ConfigError(f"run.windows(): epochs must be a number, but is {epochs!r:.60}")
        options = cls(**checked)
        for name in ("updates", "epochs"):
            value = getattr(options, name)
            if options.total_samples is not None and value is not None:
                raise ConfigError(
                    f"run.windows(): {name}={value} and total_samples={options.total_samples} are "
                    "two lengths of the training; leave one of them out"
                )
        folder: Any = options.checkpoints
        if options.first is not None and folder is not None:
            raise ConfigError(
                f"first={options.first} is for checkpoints of your own, and checkpoints= for ours, "
                "which know where to go on; leave one out"
            )
        if folder is not None and not (folder and isinstance(folder, (str, os.PathLike))):
            raise ConfigError(f"checkpoints must be a folder, but is {folder!r:.60}")
        for name, (kind, example) in _KINDS.items():
            if not isinstance(value := getattr(options, name), kind):
                raise ConfigError(f"{name} must be as in {example}, but is {value!r:.60}")
        if misuse := describe_misuse(options.callbacks, "callbacks", "callbacks=[losses]"):
            raise ConfigError(misuse)
        calls = ("state_dict", "load_state_dict")
        for name, part in options.state.items():
            if not all(callable(getattr(part, call, None)) for call in calls):
                raise ConfigError(
                    f"state[{name!r}] must have state_dict() and load_state_dict(), as a scheduler "
                    f"has, but is {part!r:.60}"
                )
        return options


def plan_of(
    samples: int, options: WindowOptions, *, ranks: int, reduction: str, in_step: bool = False
) -> Plan:
    """Return the plan of these windows.

    Args:
        in_step: of models that `fully_shard` has sharded.

    Raises:
        ConfigError: it cannot be made; the message is in the terms of the call.
    """
    config = Config()
    config.cluster.nodes, config.cluster.ranks_per_node = 1, ranks
    config.accumulation.reduction = reduction
    config.engine.shard_model = "all" if in_step else "none"
    for name, key in _PLANNED.items():
        section, _, setting = key.partition(".")
        setattr(getattr(config, section), setting, getattr(options, name))
    keys = ("accumulation.ragged", "train.epochs")
    problems = [*out_of_bounds(config, keys), *accumulation_problems(config.accumulation)]
    if refused := [*unrepresentable_values(plain(config)), *problems]:
        raise ConfigError(f"run.windows(): {as_options(refused[0])}")
    try:
        known = JobFacts(
            dataset_samples=samples,
            shards=options.shards,
            lengths=_checked_lengths(options, samples),
            cost=options.cost,
        )
        return Plan.of(config, known)
    except UsageError as error:
        raise ConfigError(f"run.windows(): {as_options(str(error))}") from None


def recorded_speeds_of(options: WindowOptions, ranks: int) -> SpeedChanges:
    """Return the recorded speeds that these windows use; none where they use none. Raises
    `ConfigError`.
    """
    try:
        return speeds_for(options.balance, [ranks])
    except ConfigError as error:
        raise ConfigError(f"run.windows(): {as_options(str(error))}") from None


def _checked_lengths(options: WindowOptions, samples: int) -> Any:
    """Return the samples' lengths, if they are needed. Raises `PlanError` if they are missing."""
    if options.micro_tokens is None:
        return None
    if options.lengths is None:
        raise PlanError(
            f"micro_tokens={options.micro_tokens} needs lengths=, the length of each of the "
            f"{samples} samples in tokens"
        )
    return lengths_of(options.lengths, samples)


def as_options(sentence: str) -> str:
    """Turn a sentence about keys of the configuration into one about arguments.

    >>> as_options("train.epochs must be a number above 0, but is 0")
    'epochs must be a number above 0, but is 0'
    """
    return _SECTIONS.sub("", sentence)


def decided_by(samples: int, options: WindowOptions, plan: Plan) -> dict[str, Any]:
    """Return what decides the samples and random numbers of every update, and must not change."""
    leaf = budget = cost = None
    if plan.reduction == "reproducible":
        leaf = plan.batch.micro_batch_cap
        budget = plan.work and (plan.work.budget.micro_tokens, plan.work.budget.pad_to)
        cost = plan.work and plan.work.cost_digest
    shards = options.shards
    return {
        "samples": samples,
        "global_batch": plan.batch.global_batch,
        "batch_schedule": [list(stage) for stage in plan.order.batch_schedule],
        "ragged": options.ragged,
        "seed": options.seed,
        "shards": list(shards.lengths) if shards else None,
        "lanes of shards": shards.lanes if shards else None,
        "micro_batch (of reduction='reproducible')": leaf,
        "micro_tokens and pad_to (of reduction='reproducible')": budget and list(budget),
        "cost (its digest, of reduction='reproducible')": cost,
        "lengths (their digest)": plan.work and plan.work.digest,
    }
