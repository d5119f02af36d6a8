"""What rank 0 decides about a rendezvous, and what every rank then raises, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.engine.api import GroupSpec
from orchestrator.errors import RanksMissing, StopRequested, TransportError


def obey(spec: GroupSpec, verdict: dict[str, Any]) -> None:
    """Raise what the verdict calls for, in the same words on all ranks; return when it is go."""
    refusals: dict[str, Callable[[], Exception]] = {
        "stop": lambda: StopRequested("the run was asked to stop while its ranks came together"),
        "transport": lambda: TransportError(str(verdict["message"])),
        "missing": lambda: RanksMissing(
            f"{in_words(verdict['ranks'])} of {spec.size} did not come within {spec.timeout_s:g} s"
        ),
    }
    if verdict["verdict"] in refusals:
        error = refusals[verdict["verdict"]]
        raise error()


def in_words(numbers: list[int]) -> str:
    """The missing ranks in words, ranges joined.

    >>> in_words([3]), in_words([1, 2, 3, 7])
    ('rank 3', 'ranks 1-3, 7')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {words}" if len(numbers) == 1 else f"ranks {words}"
