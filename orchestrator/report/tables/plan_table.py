# ruff: noqa: RUF001, RUF002 - the signs are meant, and have stand-ins where they cannot be shown.
"""Prints a plan: who computes what in an update, how long the run is, what goes over the wire.

Ranks that do the same share a row, so that 10,000 ranks fit a screen. What cannot be known yet is
`unknown`, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.report.terminal import literal, say
from orchestrator.units import format_bytes, format_count, format_learning_rate, plural

SHOWN_GROUPS = 12
SHOWN_RANGES = 6
SHOWN_SIZES = 4

_NO_DATA = "the data set is not looked at here"
_NO_MODEL = "the model is not built here"


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print a plan, given as `plan --json` has it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in [*_rows(plan), *_rank_rows(plan)]:
        style = "dim" if value.startswith("unknown") else ""
        table.add_row(literal(label, console), literal(value, console, style))
    console.print(table)
    for warning in plan.get("warnings") or ():
        say(console, f"warning: {warning}", "yellow", prose=True)


def _rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranks = f"{plural(plan.get('ranks'), 'rank')} on {plural(plan.get('nodes'), 'node')}"
    if program := plan.get("program"):
        told = {"torch": "torchrun's", "mindspore": "msrun's"}.get(program["style"])
        variables = f"told by {told} variables" if told else "told by the scheduler's variables"
        return [("where", ranks), ("program", " ".join(program["words"])), ("ranks are", variables)]
    batch = f"{plural(plan.get('global_batch'), 'sample')} in {_micro_steps(plan)}"
    epoch = _known(plan, "updates_per_epoch", _NO_DATA)
    return [
        ("where", ranks),
        ("global batch", batch),
        ("updates", f"{_known(plan, 'updates', _NO_DATA)}{_epochs(plan)}"),
        ("updates per epoch", epoch),
        ("samples in the data set", _known(plan, "dataset_samples", _NO_DATA)),
        ("parameters", _known(plan, "parameters", _NO_MODEL)),
        ("learning rate", _learning_rate(plan)),
        ("collectives per update", _known(plan, "collectives_per_update", _talk_reason(plan))),
        ("bytes on the wire", _wire(plan)),
    ]


def _micro_steps(plan: Mapping[str, Any]) -> str:
    text = plural(plan.get("micro_steps"), "micro-step")
    asked = plan.get("steps")
    if asked is not None and asked != plan.get("micro_steps"):
        text += f" ({format_count(asked)} asked for)"
    cap = plan.get("micro_batch")
    if cap is not None:
        text += f" of at most {plural(cap, 'sample')}"
    return text


def _epochs(plan: Mapping[str, Any]) -> str:
    epochs = plan.get("epochs")
    return "" if epochs is None else f" ({plural(epochs, 'epoch')})"


def _talk_reason(plan: Mapping[str, Any]) -> str:
    if plan.get("reduction") == "reproducible":
        return "reproducible reductions depend on the leaves"
    return _NO_MODEL


def _wire(plan: Mapping[str, Any]) -> str:
    size = plan.get("bytes_on_wire_per_update")
    if size is None:
        return f"unknown ({_talk_reason(plan)})"
    return f"{format_bytes(size)} per update and rank"


def _learning_rate(plan: Mapping[str, Any]) -> str:
    """First, highest and last, or one number when it stays as it is."""
    if plan.get("learning_rate_first") is None:
        return "the job's own: learning_rate(update)"
    marks = [
        (name, plan.get(f"learning_rate_{name}"))
        for name in ("first", "peak", "last")
        if plan.get(f"learning_rate_{name}") is not None
    ]
    if len({rate for _, rate in marks}) == 1 and len(marks) == 3:
        return f"{format_learning_rate(marks[0][1])}, constant"
    text = ", ".join(f"{name} {format_learning_rate(rate)}" for name, rate in marks)
    return text if len(marks) == 3 else f"{text}, last unknown ({_NO_DATA})"


def _known(plan: Mapping[str, Any], key: str, why_not: str) -> str:
    value = plan.get(key)
    return f"unknown ({why_not})" if value is None else format_count(value)


def _rank_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One row for the ranks that do the same, the busiest ranks as they come."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, sizes in enumerate(plan.get("micro_batches") or []):
        groups.setdefault(tuple(sizes), []).append(rank)
    rows = [(_ranks(ranks), _work(sizes)) for sizes, ranks in groups.items()]
    hidden = len(rows) - SHOWN_GROUPS
    if hidden > 0:
        rows = [*rows[:SHOWN_GROUPS], ("", f"and {plural(hidden, 'more group')} (see --json)")]
    return rows


def _work(sizes: Sequence[int]) -> str:
    """A rank's samples of one update and their micro-batches.

    >>> _work([7, 6]), _work([8] * 64), _work([4] * 9 + [3]), _work([])
    ('13 samples = 7+6', '512 samples = 64×8', '39 samples = 9×4 + 1×3', 'idle')
    """
    if not sizes:
        return "idle"
    total = plural(sum(sizes), "sample")
    if len(sizes) == 1:
        return total
    if len(sizes) <= SHOWN_SIZES:
        return f"{total} = {'+'.join(map(str, sizes))}"
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    shown = " + ".join(f"{count}×{size}" for size, count in runs[:SHOWN_SIZES])
    return f"{total} = {shown}{' + …' if len(runs) > SHOWN_SIZES else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as ranges.

    >>> _ranks([0]), _ranks([0, 1, 2, 5]), _ranks(list(range(192)))
    ('rank 0', 'ranks 0–2, 5', 'ranks 0–191')
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in ranges[:SHOWN_RANGES]]
    more = ", …" if len(ranges) > SHOWN_RANGES else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}{more}"
