"""Differences between two configurations, by what they do to a run's numbers.

`FREE`: no number depends on the key. `ROUNDING`: sums are added in another order, so results agree
up to rounding, not in bits. `PLANNED`: the two plans are compared, update by update. `NUMBERS`:
`resume` refuses the change. docs/explanation/reproducible.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """The effect of a changed key."""

    FREE = "no number depends on it"
    ROUNDING = "sums are added in another order"
    PLANNED = "it depends on the rest of the plan"
    NUMBERS = "it changes what is computed"


# The longest prefix of a key's dotted name counts.
KINDS: dict[str, Kind] = {
    "cluster": Kind.FREE,
    "cluster.nodes": Kind.PLANNED,
    "cluster.ranks_per_node": Kind.PLANNED,
    "cluster.cpus_per_rank": Kind.ROUNDING,  # threads of a kernel
    "run": Kind.FREE,
    "run.dir": Kind.NUMBERS,
    "run.name": Kind.NUMBERS,
    "sweep": Kind.FREE,
    "tracker": Kind.FREE,
    "notify": Kind.FREE,
    "facts": Kind.FREE,
    "transport": Kind.ROUNDING,
    "accumulation": Kind.NUMBERS,
    "accumulation.global_batch": Kind.PLANNED,
    "accumulation.batch_schedule": Kind.PLANNED,
    "accumulation.steps": Kind.PLANNED,
    "accumulation.micro_batch": Kind.PLANNED,
    "accumulation.micro_tokens": Kind.PLANNED,
    "accumulation.balance": Kind.ROUNDING,
    "accumulation.reduction": Kind.ROUNDING,
    "accumulation.sentinel": Kind.FREE,
    "accumulation.sentinel_every": Kind.FREE,
    "schedule": Kind.PLANNED,
    "train": Kind.NUMBERS,
    "train.updates": Kind.PLANNED,
    "train.epochs": Kind.PLANNED,
    "train.samples": Kind.PLANNED,
    "train.evaluate_every": Kind.FREE,
    "train.checkpoint_every": Kind.FREE,
    "train.keep_checkpoints": Kind.FREE,
    "train.keep_every": Kind.FREE,
    "train.keep_best": Kind.FREE,
    "train.patience": Kind.FREE,  # whether the next update is made, not what it is
    "train.checkpoint_in_background": Kind.FREE,
    "train.loader_workers": Kind.FREE,
    "train.on_non_finite": Kind.FREE,  # completed updates had only finite values
    "engine": Kind.NUMBERS,
    "engine.bucket_mib": Kind.ROUNDING,
    "engine.shard_optimizer": Kind.ROUNDING,
    "engine.shard_by": Kind.ROUNDING,
    "engine.shard_model": Kind.ROUNDING,
    "engine.mode": Kind.ROUNDING,
    "engine.jit_level": Kind.ROUNDING,
    "optimizer": Kind.NUMBERS,
    "job": Kind.NUMBERS,
    "job.resume_arguments": Kind.FREE,  # say where a program continues from
}
# Free, but what a sweep's point records, where it ends and what it runs in depend on them.
OF_RESULTS = (
    "cluster.kind",
    "cluster.gpus_per_node",
    "cluster.constraint",
    "cluster.environment",
    "cluster.preamble",
    "cluster.container",
    "cluster.container_runtime",
    "cluster.options",
    "train.evaluate_every",
    "train.keep_best",
    "train.patience",
    "train.on_non_finite",
    "job.resume_arguments",
)
OTHER_FOLDER = {"run.dir": "the run is its folder", "run.name": "it names a new run's folder"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One key that is set to another value.

    Attributes:
        is_new: the key was not set before, as an argument with a default need not be.
    """

    key: str
    before: Any
    after: Any
    is_new: bool = False

    @property
    def kind(self) -> Kind:
        """The effect on numbers."""
        if self.key.startswith("job.") and _is_path(self.before) and _is_path(self.after):
            return Kind.FREE  # where data lie; whether they are the same is compared at the start
        return _kind_of(self.key)

    @property
    def text(self) -> str:
        """The change as it would be typed."""
        return f"{self.key}={'null' if self.after is None else self.after}"

    @property
    def text_before(self) -> str:
        """The value before.

        >>> [change.text_before for change in changes({"a": None}, {"a": 1, "b": 2})]
        ['null', 'not set']
        """
        if self.is_new:
            return "not set"
        return "null" if self.before is None else str(self.before)


def _kind_of(key: str) -> Kind:
    parts = key.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(KINDS[prefix] for prefix in prefixes if prefix in KINDS)


def values_of_result(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values on which the result of a sweep's point depends, by dotted key; those that
    are not set are left out.

    >>> values_of_result({"train": {"seed": 1, "keep_every": 5}, "run": {"name": "a"}, "job": {}})
    {'train.seed': 1}
    """
    return {
        key: value
        for key, value in flat(values).items()
        if value not in (None, {}, [])
        and key not in OTHER_FOLDER
        and (_kind_of(key) is not Kind.FREE or key.startswith(OF_RESULTS))
    }


def _is_path(value: Any) -> bool:
    """Return whether a value is a path by its beginning; `org/name` may as well be a name."""
    return isinstance(value, str) and value.startswith(("/", "./", "../", "~"))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table's values by dotted key; an empty table is a value.

    >>> flat({"a": {"b": 1, "c": {}}, "d": None})
    {'a.b': 1, 'a.c': {}, 'd': None}
    """
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two configurations, as plain values.

    >>> nan = {"job": {"fill": float("nan"), "samples": 1}}
    >>> [change.text for change in changes(nan, {"job": {"fill": float("nan"), "samples": 2}})]
    ['job.samples=2']
    >>> [change.text for change in changes({"optimizer": {}}, {"optimizer": {"name": "adam"}})]
    ['optimizer.name=adam']
    """
    old, new = flat(before), flat(after)
    return [
        Change(key=key, before=old.get(key), after=new.get(key), is_new=key not in old)
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and repr(old.get(key)) != repr(new.get(key))  # NaN
        # The keys that an empty table gets, or loses, say the same as the table itself.
        and not (old.get(key) == {} and _has_keys_under(key, new))
        and not (new.get(key) == {} and _has_keys_under(key, old))
    ]


def _has_keys_under(table: str, values: Mapping[str, Any]) -> bool:
    return any(key.startswith(f"{table}.") for key in values)
