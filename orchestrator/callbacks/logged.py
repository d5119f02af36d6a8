"""What a framework logs, as figures of a record: it logs texts and tables as well, by any name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.inside.figures import LONGEST_NAME, MOST_FIGURES

OTHERS = ("loss", "samples", "update", "self")  # what `report` has a use of its own for


def figures_of(logged: Mapping[str, Any] | None) -> dict[str, Any]:
    """The numbers among them, as many as a line takes."""
    found = {
        name: value
        for name, value in (logged or {}).items()
        if name not in OTHERS and len(name) <= LONGEST_NAME and _is_number(value)
    }
    return dict(list(found.items())[:MOST_FIGURES])


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return True
    return hasattr(value, "numel") and value.numel() == 1
