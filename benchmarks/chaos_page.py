"""The page of `chaos`, from its results: without the add-on that breaks the runs."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import grid

EVERY = 5
"""Updates between two checkpoints."""
NOTE = f"""\
A run of 40 updates on two nodes, a checkpoint every {EVERY}, disturbed at a moment drawn from the
seed. *Noticed*: until a failure or a departure was written. *Updates again*: until the first update
of the next attempt was done, with the start of its processes. Medians, and the highest."""


def table(data: dict[str, Any]) -> str:
    """Return the table: a line for each kind of fault, and one for all."""
    head = [
        "fault",
        "runs",
        "as undisturbed",
        "noticed (s)",
        "updates again (s)",
        "updates redone",
    ]
    lines: list[list[str]] = []
    for kind, row in [*data["kinds"].items(), ("**all**", data["all"])]:
        cells = [_cell(row[name]) for name in ("noticed_s", "resumed_s", "redone")]
        lines.append([kind, str(row["runs"]), str(row["as_undisturbed"]), *cells])
    return grid(head, lines)


def _cell(spread: dict[str, float] | None) -> str:
    """Return the median, and the highest value if there are several."""
    if spread is None:
        return ""
    most = f" (to {spread['high']:.3g})" if spread["count"] > 1 else ""
    return f"{spread['median']:.3g}{most}"


def body(data: dict[str, Any]) -> str:
    """Return the page."""
    wrong = [f"- {line}" for line in data["wrong"]] or ["None was otherwise."]
    share = data["all"]["scheduler_s"]
    waits = (
        f"Between a departure and the next attempt's first process the scheduler took "
        f"{_cell(share)} s of that."
        if share
        else ""
    )
    return "\n\n".join([NOTE, table(data), waits, "Not as undisturbed:", "\n".join(wrong)])
