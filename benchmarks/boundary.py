"""Cost of a boundary beyond its reduction and the optimizer's step, at 25 million parameters.

One rank, so that nothing travels: what is left is the norm of the gradient (one pass over it), the
trailer, the checks and the bookkeeping.
"""

from __future__ import annotations

from typing import Any

from benchmarks.link import alone
from benchmarks.markdown import grid
from benchmarks.measure import keep, machine
from benchmarks.ranks import on_ranks

NET, STEPS = "large", (1, 2, 4, 8, 16)
NOTE = """\
One rank, micro-batches of 32 samples, AdamW: the time between the last micro-step and the end of
`boundary()`, less the optimizer's step. It is one pass over the gradient for its norm, which also
finds what is not finite, and some bookkeeping. The micro-batches are small for such a net, so the
share is higher than in most trainings."""


def body(data: dict[str, Any]) -> str:
    """Return the page: a line for each K."""
    head = ["K", "update (ms)", "boundary beyond reduction and step (ms)", "share", "quartiles"]
    lines: list[list[str]] = []
    for row in data["rows"]:
        share = row["share"]
        lines.append(
            [
                f"{row['leaves']}",
                f"{1000 * row['update']['median']:.0f}",
                f"{1000 * row['beyond']['median']:.1f}",
                f"{100 * share['median']:.1f} %",
                f"{100 * share['q1']:.1f} to {100 * share['q3']:.1f} %",
            ]
        )
    note = f"{data['parameters'] / 1e6:.1f} million parameters. {NOTE}"
    return f"{note}\n\n{grid(head, lines, left=0)}"


def main(*, quick: bool = False) -> None:
    task = {
        "kind": "boundary",
        "net": NET,
        "leaves": STEPS[:1] if quick else STEPS,
        "repetitions": 7 if quick else 21,
    }
    keep("boundary", {"machine": machine(), **on_ranks(alone(), task)}, quick=quick)
