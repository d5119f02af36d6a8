"""What a field of the configuration may hold: said beside the field, checked by one walk.

Upper bounds are where nothing that exists could run it; they are looked at before anything is
computed from a number, so that a slip of a few zeros is a sentence and not a machine that computes
for an hour or runs out of memory. What two fields must not be together, `rules.py` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from orchestrator.errors import did_you_mean, shortened
from orchestrator.extensions import Seam

LARGEST_INT = 2**63 - 1  # what the files, the random numbers' seeds and the frameworks can hold
LONGEST_S = 10 * 365 * 24 * 3600.0
LONGEST_NAME = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What one field may hold, besides null where its type has that.

    Attributes:
        choice: the words that it may be.
        seam: where installed packages may add such words.
        least, most: the smallest and largest number.
        above: a finite number that it must be above.
        why_free: why there is no bound, besides those of every text and whole number.
    """

    choice: tuple[str, ...] = ()
    seam: Seam | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    why_free: str = ""

    def too_much(self, dotted: str, value: Any) -> str | None:
        """A sentence when `value` is more than `most`."""
        if self.most is None or not isinstance(value, int | float) or value <= self.most:
            return None
        return f"{dotted} must be at most {self.most:g}, but is {value}; try {dotted}={self.most:g}"

    def refusal(self, dotted: str, value: Any) -> str | None:
        """A sentence when `value` is no choice, or too little."""
        if self.seam is not None:
            return self.seam.refusal(value)
        if self.choice and value not in self.choice:
            meant = did_you_mean(str(value), self.choice).partition("; known are: ")[0]
            return f"{dotted} must be one of {', '.join(self.choice)}, but is {value!r}{meant}"
        if value is not None and self.least is not None and value < self.least:
            return (
                f"{dotted} must be at least {self.least}, but is {value}; try {dotted}={self.least}"
            )
        if value is None or self.above is None or (value > self.above and math.isfinite(value)):
            return None
        return f"{dotted} must be a number above {self.above}, but is {value}"


FREE = Bound()


def choice(*allowed: str, default: str | None = None) -> Any:
    """A field that is one of these words; the first, where nobody says otherwise."""
    bound = Bound(choice=allowed)
    return field(default=allowed[0] if default is None else default, metadata={"bound": bound})


def registered(seam: Seam, default: str) -> Any:
    """A field that is the name of one of ours, or of an installed package's."""
    bound = Bound(choice=(*seam.besides, *seam.ours), seam=seam)
    return field(default=default, metadata={"bound": bound})


def number(
    default: float | None,
    *,
    least: int | None = None,
    above: int | None = None,
    most: float | None = None,
) -> Any:
    """A field that is a number from `least`, or above `above`, to `most`."""
    bound = Bound(least=least, above=above, most=most)
    return field(default=default, metadata={"bound": bound})


def free(
    why: str, default: Any = None, *, factory: Callable[[], Any] | None = None,
    most: float | None = None,
) -> Any:  # fmt: skip
    """A field that may hold what its type can, for a reason."""
    metadata = {"bound": Bound(why_free=why, most=most)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def bounds_of(schema: Any, prefix: str = "") -> dict[str, Bound]:
    """The bound of each field of a schema, by its dotted name; fields without one are left out."""
    found: dict[str, Bound] = {}
    for item in fields(schema):
        if "bound" in item.metadata:
            found[prefix + item.name] = item.metadata["bound"]
        elif is_dataclass(section := item.default_factory):
            found |= bounds_of(section, f"{prefix}{item.name}.")
    return found


def beyond(values: Mapping[str, Any], bounds: Mapping[str, Bound]) -> list[str]:
    """A sentence for every value of a configuration that is beyond what can be meant.

    >>> beyond({"train": {"seed": 2**64}}, {})
    ['train.seed must lie between -(2**63 - 1) and 2**63 - 1, but is 18446744073709551616']
    """
    return [
        sentence
        for dotted, value in leaves(values)
        if (sentence := _too_large(dotted, value) or _odd(dotted, value))
        or (sentence := bounds.get(dotted, FREE).too_much(dotted, value))
    ]


def value_of(config: Any, dotted: str) -> Any:
    """What stands at `engine.wire`, say, in dataclasses."""
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


_LEAVES = frozenset({int, str, float, bool, type(None)})
"""What nearly all values are: a sweep of a thousand points asks for each of half a million."""


def plain(config: Any) -> Any:
    """As `asdict` has it, but lists and tables are the configuration's own, and only to be read."""
    if type(config) in _LEAVES or not is_dataclass(config):
        return config
    return {name: plain(value) for name, value in vars(config).items()}


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value in nested dicts and lists, with its dotted name."""
    if type(values) in _LEAVES:
        yield prefix, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from leaves(value, f"{prefix}[{place}]")
    else:
        yield prefix, values


def _too_large(dotted: str, value: Any) -> str | None:
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"{dotted} must lie between -(2**63 - 1) and 2**63 - 1, but is {shortened(value)}"
    if isinstance(value, str) and len(value) > LONGEST_NAME:
        return f"{dotted} must have at most {LONGEST_NAME} characters, but has {len(value)}"
    return None


def _odd(dotted: str, value: Any) -> str | None:
    """What no file name, shell or terminal can take; odd but harmless signs are let be."""
    if not isinstance(value, str) or value.isprintable():
        return None
    for sign in value:
        if (ord(sign) < 32 and sign not in "\t\n") or ord(sign) == 127:
            odd = f"the control character {ord(sign):#04x}"
        elif 0xD800 <= ord(sign) < 0xE000:
            odd = "bytes that are not UTF-8"
        else:
            continue
        return f"{dotted} must not contain {odd}, but is {shortened(repr(value))}"
    return None
