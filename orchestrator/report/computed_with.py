"""What computed a run, as environment.json tells it, and where two of them differ.

Versions, threads and the kind of processor decide the last bits of a result: where they differ,
equal bits are nobody's promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differing(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, str]:
    """What differs, by name, as "this against that"; nothing where one of them is not known.

    >>> differing({"framework": {"torch": "2.13.0"}}, {"framework": {"torch": "2.12.0"}})
    {'torch': '2.13.0 against 2.12.0'}
    """
    if a is None or b is None:
        return {}
    left, right = _decisive(a), _decisive(b)
    return {
        name: f"{left.get(name, 'none')} against {right.get(name, 'none')}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def warnings_of(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    """A sentence when a run goes on with something else than it was begun with."""
    found = differing(now, before)
    if not found:
        return []
    what = ", ".join(f"{name} {values}" for name, values in found.items())
    sentence = (
        f"this attempt is computed with something else than the one before it: {what}. From here "
        "on the weights may differ in bits from those of an undisturbed run"
    )
    return [sentence]


def _decisive(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {"processor": environment.get("processor"), **environment.get("framework", {})}
