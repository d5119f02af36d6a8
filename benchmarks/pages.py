"""Markdown from results: a page for each, and the figures in README and docs.

A document takes figures in by two comments, between which `python -m benchmarks tables` writes:

    <!-- figures: submission -->
    <!-- end of figures -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    boundary,
    chaos,
    checkpoints,
    load,
    memory,
    one_rank_page,
    peers_page,
    reproducible,
    survive,
    sweeps,
    trials,
)
from benchmarks.measure import RESULTS, kept

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/**/*.md")
Result = dict[str, Any]

_MARKED = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[\w.]+) -->\n).*?(?P<end><!-- end of figures -->)", re.DOTALL
)


def table(part: Result) -> str:
    """Return a table of contenders with ratios; several figures of one are side by side."""
    figures = part["figures"]
    head = [f"{name} | quartiles | ratio" for name in figures]
    lines = [f"| contender | {' | '.join(head)} |", "|---|" + "---:|" * 3 * len(figures)]
    for place, row in enumerate(next(iter(figures.values()))):
        cells = [row["name"]]
        for rows in figures.values():
            spread = rows[place]["spread"]
            cells += [
                f"{spread['median']:.3g}",
                f"{spread['q1']:.3g} to {spread['q3']:.3g}",
                f"{rows[place]['ratio']['median']:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(data: Result) -> str:
    """Return all parts of a plain result, each with its heading if it has one."""
    parts = [
        f"{part['heading']}:\n\n{table(part)}" if part["heading"] else table(part)
        for part in data["parts"]
    ]
    return "\n\n".join(parts)


def _plain(data: Result) -> str:
    return f"{data['note']}\n\n{tables(data)}"


_BODIES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "peers": ("An update beside what people use today", peers_page.body),
    "one_rank": ("One rank beside a plain loop", one_rank_page.body),
    "reproducible": ("What equal bits cost", reproducible.body),
    "boundary": ("What a boundary costs beyond its reduction", boundary.body),
    "memory": ("Peak memory of a rank in a run", memory.body),
    "chaos": ("Runs disturbed on purpose", chaos.body),
    "checkpoints": ("What a checkpoint costs the training", checkpoints.body),
    "load": ("What a run asks of what all users share", load.body),
    "sweeps": ("Sweeps of many points", sweeps.body),
    "survive": ("What surviving costs, and what it saves", survive.body),
    "trials": ("A search of uneven trials", trials.body),
}
_BLOCKS: dict[str, Callable[[Result], str]] = {
    "peers": peers_page.summary,
    "peers.steps": peers_page.by_steps,
    "reproducible": reproducible.table,
    "boundary": boundary.table,
    "chaos": chaos.table,
    "checkpoints": checkpoints.table,
    "load": load.table,
    "survive": survive.table,
    "sweeps": sweeps.table,
    "trials": trials.table,
    "submission": tables,
    "mindspore_start": tables,
    "mindspore_steps": tables,
    "mindspore_reduction": tables,
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


def filled(text: str, folder: Path = RESULTS) -> str:
    """Return `text` with the figures of the results in `folder` between its comments.

    Raises:
        KeyError: a comment names an unknown block.
        FileNotFoundError: the result was not measured.
    """

    def figures(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in _BLOCKS:
            raise KeyError(f"there are no figures called '{name}'; there are: {', '.join(_BLOCKS)}")
        block = _BLOCKS[name](kept(name.partition(".")[0], folder))
        return f"{found['begin']}{block}\n{found['end']}"

    return _MARKED.sub(figures, text)


def documents() -> list[Path]:
    """Return every document that may hold figures."""
    return [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]


def write() -> None:
    """Write all pages, and the figures into all documents."""
    for result in sorted(RESULTS.glob("*.json")):
        text = page(result.stem, kept(result.stem))
        result.with_suffix(".md").write_text(text, encoding="utf-8")
    for document in documents():
        text = document.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            document.write_text(new, encoding="utf-8")
            print(f"figures of {document.relative_to(ROOT)} are new")
