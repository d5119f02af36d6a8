"""Growth with nodes (hollow runs, `hollow.py`), and with updates and points (`records.py`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.hollow import HollowRun
from benchmarks.markdown import grid
from benchmarks.measure import keep, machine

SIZES, QUICK_SIZES = (100, 300, 1000), (30, 100)
RANKS_PER_NODE = 8
RACK = 0.04
STEADY_S = 5
NOTE = f"""\
Real agents, coordinators, links over loopback and files, in one process; workers that only have a
rank; a simulated clock in steps of 0.1 s. N nodes of {RANKS_PER_NODE} ranks. Each event is one run.
A rack is {RACK:.0%} of the nodes. Steady load is that of a second of training, with a turn of the
coordinator for each heartbeat. Slow: each opened file keeps its agent for 5 ms, and agents connect
to the next coordinator in the course of 5 s. Survivors are the members of the next generation,
of all healthy ranks. Seconds are simulated, from the event until every live rank has the new
generation, or until the last agent has ended; CPU seconds are real ones of the coordinator alone;
files and bytes are those of all agents together."""


@contextmanager
def _formed(nodes: int, **more: Any) -> Generator[HollowRun]:
    with tempfile.TemporaryDirectory() as folder:
        run = HollowRun(Path(folder) / "run", nodes=nodes, ranks_per_node=RANKS_PER_NODE, **more)
        with run():
            run.form()
            yield run


def _formation(nodes: int) -> dict[str, float]:
    with _formed(nodes) as run:
        return _row(run, run.now - 1000.0, 0)


def _steady(nodes: int) -> dict[str, float]:
    with _formed(nodes) as run:
        run.step()
        run.forget_costs()
        run.train(STEADY_S)
        row = _row(run, 1.0, 0)
        return {name: figure / STEADY_S for name, figure in row.items()} | {"seconds": 1.0}


def _loss(nodes: int, lost: Callable[[int], range], **more: Any) -> dict[str, float]:
    with _formed(nodes, **more) as run:
        run.step()
        run.forget_costs()
        seconds, gone = 0.0, lost(nodes)
        for index in gone:
            if index:
                run.kill(index)
        if 0 in gone:
            seconds += run.take_over()
        seconds += run.until(lambda: run.newest["generation"] > 0, 60.0)
        seconds += run.until(lambda: run.reached(1), 60.0)
        row = _row(run, seconds, run.coordinator)
        healthy = RANKS_PER_NODE * (nodes - len(gone))
        return row | {"survivors": len(run.newest["members"]) / healthy}


def _end(nodes: int, *, fails: bool) -> dict[str, float]:
    with _formed(nodes, survive=not fails) as run:
        run.step()
        run.forget_costs()
        seconds = run.fail(0) if fails else run.finish()
        return _row(run, seconds, 0)


def _row(run: HollowRun, seconds: float, coordinator: int) -> dict[str, float]:
    return {
        "seconds": round(seconds, 1),
        "cpu_s": run.processor_s[coordinator],
        "files": sum(run.opened.values()),
        "megabytes": sum(run.sent.values()) / 1e6,
    }


EVENTS: dict[str, Callable[[int], dict[str, float]]] = {
    "formation": _formation,
    "a second of training": _steady,
    "a lost node": lambda nodes: _loss(nodes, lambda n: range(n // 2, n // 2 + 1)),
    "a lost rack": lambda nodes: _loss(nodes, lambda n: range(n // 2, n // 2 + int(n * RACK))),
    "takeover": lambda nodes: _loss(nodes, lambda _: range(1)),
    "takeover with a rack": lambda nodes: _loss(nodes, lambda n: range(int(n * RACK))),
    "takeover, slow": lambda nodes: _loss(nodes, lambda _: range(1), open_s=0.005, late_s=5.0),
    "a failed run": lambda nodes: _end(nodes, fails=True),
    "an orderly end": lambda nodes: _end(nodes, fails=False),
}


def main(*, quick: bool = False) -> None:
    found = machine()
    with tempfile.TemporaryDirectory() as folder:
        of_records = records.measured(Path(folder), quick=quick)
    rows = [
        {"event": name, "nodes": nodes, **event(nodes)}
        for name, event in EVENTS.items()
        for nodes in (QUICK_SIZES if quick else SIZES)
    ]
    notes = {"note": NOTE, "note_on_records": records.NOTE}
    data = {"machine": found, **notes, "rows": rows, "records": of_records}
    keep("scale", data, quick=quick)


def body(data: dict[str, Any]) -> str:
    """Return the page's tables."""
    columns = ("simulated seconds", "coordinator's CPU s", "opened files", "MB between nodes")
    head = ["event", f"N x {RANKS_PER_NODE}", *columns, "survivors"]
    lines: list[list[str]] = []
    for row in data["rows"]:
        survivors = f"{row['survivors']:.1%}" if "survivors" in row else ""
        lines.append(
            [
                row["event"],
                f"{row['nodes']:,}",
                f"{row['seconds']:.1f}",
                f"{row['cpu_s']:.3f}",
                f"{row['files']:,.0f}",
                f"{row['megabytes']:.2f}",
                survivors,
            ]
        )
    parts = [data["note"], grid(head, lines), data["note_on_records"]]
    return "\n\n".join([*parts, records.table(data["records"])])
