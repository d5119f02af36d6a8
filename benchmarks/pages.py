"""Markdown from results: a page for each, and the figures in documents.

The README has the summary of `peers` and docs/how-to/lengths.md that of `lengths`, each between two
comments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    boundary,
    chaos_page,
    checkpoints,
    lengths,
    load,
    overhead,
    pairs,
    peers_page,
    reproducible,
    scale,
    survive,
    sweeps,
)
from benchmarks.markdown import grid, spread_cells
from benchmarks.measure import RESULTS, kept

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {"peers": ROOT / "README.md", "lengths": ROOT / "docs" / "how-to" / "lengths.md"}
Result = dict[str, Any]

_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_SUMMARIES: dict[str, Callable[[Result], str]] = {
    "peers": peers_page.summary,
    "lengths": lengths.summary,
}


def table(part: Result) -> str:
    """Return a table of contenders with ratios; several figures of one are side by side."""
    figures = part["figures"]
    head = ["contender"]
    for name in figures:
        head += [name, "quartiles", "ratio"]
    lines: list[list[str]] = []
    for index, row in enumerate(next(iter(figures.values()))):
        cells = [row["name"]]
        for rows in figures.values():
            cells += spread_cells(rows[index]["spread"], ".3g")
            cells.append(f"{rows[index]['ratio']['median']:.2f}")
        lines.append(cells)
    return grid(head, lines)


def _plain(data: Result) -> str:
    """Return the note and all parts of a plain result, each with its heading if it has one."""
    parts = [
        f"{part['heading']}:\n\n{table(part)}" if part["heading"] else table(part)
        for part in data["parts"]
    ]
    return "\n\n".join([data["note"], *parts, *data.get("more", [])])


_BODIES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "peers": ("An update against what people use today", peers_page.body),
    "pairs": ("An update beside DDP + no_sync, in pairs", pairs.body),
    "lengths": ("Samples of different lengths, and ranks of different speed", lengths.body),
    "reproducible": ("Cost of equal bits", reproducible.body),
    "boundary": ("Cost of a boundary beyond its reduction", boundary.body),
    "overhead": ("What is around a micro-step and a boundary", overhead.body),
    "chaos": ("Runs disturbed on purpose", chaos_page.body),
    "checkpoints": ("Cost of checkpoints for the training", checkpoints.body),
    "load": ("Load of a run on shared services", load.body),
    "scale": ("Growth with the number of nodes", scale.body),
    "sweeps": ("Sweeps of many points", sweeps.body),
    "survive": ("Cost and benefit of run.survive", survive.body),
}


def page(name: str, data: Result) -> str:
    """Return the whole page of one result."""
    title, body = _BODIES.get(name, (data.get("title", name), _plain))
    return f"# {title}\n\n{made_on(data)}\n\n{body(data)}\n"


def made_on(data: Result) -> str:
    """Describe the machine in one sentence, and whether the run was quick."""
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    loads = [machine["load"], *data.get("load", [])]
    busy = f"load average {min(loads)} to {max(loads)}" if len(loads) > 1 else f"load {loads[0]}"
    hurry = " A quick run: fewer repetitions and cells." if data["quick"] else ""
    return (
        f"Measured on {machine['processor']}, {machine['cores']} cores ({busy}); {versions}.{hurry}"
    )


def filled(text: str, results: Callable[[str], Result] = kept) -> str:
    """Return `text` with the summaries of results, by their names, between its comments."""

    def summary(marked: re.Match[str]) -> str:
        name = marked[2]
        return f"{marked[1]}{_SUMMARIES[name](results(name))}\n{marked[3]}"

    return _MARKED.sub(summary, text)


def write() -> None:
    """Write all pages, and the figures into the documents."""
    for result in sorted(RESULTS.glob("*.json")):
        text = page(result.stem, kept(result.stem))
        result.with_suffix(".md").write_text(text, encoding="utf-8")
    for document in DOCUMENTS.values():
        text = filled(document.read_text(encoding="utf-8"))
        document.write_text(text, encoding="utf-8")
