"""Markdown tables, for pages of results and for documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def grid(head: Sequence[str], lines: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table whose first `left` columns are aligned to the left, the others to the right.

    >>> print(grid(["run", "loss"], [["a", "0.5"]]))
    | run | loss |
    |---|---:|
    | a | 0.5 |
    """
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join(
        [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]
    )


def spread_cells(spread: Mapping[str, float], form: str) -> list[str]:
    """Return two cells of a `Spread` as JSON: its median and its quartiles, as `form` writes them.

    >>> spread_cells({"median": 2.0, "q1": 1.0, "q3": 4.0}, ".1f")
    ['2.0', '1.0 to 4.0']
    """
    return [f"{spread['median']:{form}}", f"{spread['q1']:{form}} to {spread['q3']:{form}}"]
