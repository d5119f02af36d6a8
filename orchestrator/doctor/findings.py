"""What was looked at, as values: a finding says what is there and, where that hurts, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what it belongs to: "SLURM", "devices", ...
        found: what is there, in a sentence.
        state: `GOOD`; `NOTE`, where it is worth knowing; `BAD`, where runs suffer from it.
        do: what to do; "" where nothing is to be done.
    """

    about: str
    found: str
    state: str = GOOD
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], Iterable[Finding]]


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """What the checks find, in their order."""
    for check in checks:
        yield from check()
