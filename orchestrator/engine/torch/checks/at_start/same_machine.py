"""Which ranks differ from the others: in what computes (asked at the start), or in anything."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence

from orchestrator.engine.common.replicas import unlike_most
from orchestrator.engine.torch.checks.at_start.versions import versions

_WORD_BITS = 48  # float64 carries 53 exactly
_WORDS = 5


def as_numbers(hexadecimal: str) -> list[float]:
    """The first 240 bits of a digest as numbers that survive a float64."""
    digits = _WORD_BITS // 4
    return [float(int(hexadecimal[n * digits : (n + 1) * digits], 16)) for n in range(_WORDS)]


def machine_digest() -> str:
    """Digest of what decides the bits of a kernel: versions, threads, kind of processor."""
    facts = {**versions(), "machine": platform.machine()}
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


def machine_warning(rows: Sequence[Sequence[float]], reduction: str) -> list[str]:
    """A sentence when ranks compute with different versions, threads or devices."""
    odd = unlike_most(rows)
    if not odd:
        return []
    price = (
        "the bits of the result may depend on who computes which leaf"
        if reduction == "reproducible"
        else "results may not repeat to the bit"
    )
    verb = "computes" if len(odd) == 1 else "compute"
    sentence = (
        f"{_ranks(odd)} {verb} with another version of torch, number of threads or kind of "
        f"processor than the others: {price}"
    )
    return [sentence]


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
