"""A disturbed run beside the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.rehearse.asked import CLOSE, Asked
from orchestrator.rehearse.disturbed import Row
from orchestrator.rehearse.outside import Outside
from orchestrator.rundir.metrics import History


def compare(rows: Sequence[Row], run: Outside, undisturbed: Outside, asked: Asked) -> list[str]:
    """Fill in what rows say of equality; give what is wrong, in sentences."""
    theirs = {r["update"]: r for r in History(undisturbed.records).updates}
    ours = {r["update"]: r for r in History(run.records).updates}
    bounds = [0, *(row.update for row in rows[1:]), asked.updates]
    wrong: list[str] = []
    for row, first, end in zip(rows, bounds, bounds[1:], strict=False):
        span = range(min(first, row.update), end)
        of = [(ours.get(n, {}), theirs[n]) for n in span]
        row.samples_lost = sum(abs(b["samples"] - a.get("samples", 0)) for a, b in of)
        row.equal = not row.samples_lost and all(_same(a, b, asked) for a, b in of)
        if not row.equal:
            wrong.append(f"{row.run}: after {row.fault} in update {row.update} it differs")
    if why := _end_differs(run, undisturbed, asked):
        wrong.append(f"{run.run.path.name}: {why}")
        for row in rows[-1:]:
            row.equal = False
    return wrong


def _same(ours: dict[str, Any], theirs: dict[str, Any], asked: Asked) -> bool:
    if ours["weight"] != theirs["weight"]:
        return False
    if asked.to_the_bit:
        return ours["loss"] == theirs["loss"]
    return abs(ours["loss"] - theirs["loss"]) <= CLOSE * max(1.0, abs(theirs["loss"]))


def _end_differs(run: Outside, undisturbed: Outside, asked: Asked) -> str:
    ours, theirs = (one.run.read_result() or {} for one in (run, undisturbed))
    if ours.get("state") != "finished":
        return f"it is {ours.get('state', 'without an end')}: {run.last_words}"
    keys = ["updates", "samples", *(["weights_sha256"] if asked.to_the_bit else [])]
    unlike = [key for key in keys if ours.get(key) != theirs.get(key)]
    return f"its {' and '.join(unlike)} differ" if unlike else ""
