"""Everything that a page says, as plain values: the page, the other formats and the charts only
put it into shape. Every figure has its raw value (seconds, bytes, counts) and its text.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from orchestrator.page.facts import Facts, RunFacts, differing
from orchestrator.page.hidden_values import hidden, shown
from orchestrator.page.timeline import timeline
from orchestrator.report.tables.search_table import told_in_words
from orchestrator.report.tables.sweep_table import differences, names
from orchestrator.report.tables.time_and_memory import verdict
from orchestrator.report.terminal import harmless
from orchestrator.rundir.metrics import Record, Summary
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.sweep.tables import accumulation_pairs, remarks
from orchestrator.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_rate,
    format_seconds,
    plural,
)

POINTS = 24_000  # drawn in all lines together, so that the page stays below 2 MB
DIGITS = 6
MOST_MARKS = 100  # restarts of a run, the latest


def _per_second(value: float | None) -> str:
    return format_rate(value, "").replace(" /s", "")


# Of each run: key, title, what its text is made by. `metrics` follow.
ELSEWHERE = re.compile(r"[+~]*(run\.dir=|hydra[/.]|sweep\.)")
FIGURES: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("updates", "updates", format_count),
    ("samples", "samples", format_count),
    ("seconds", "time", format_seconds),
    ("seconds_per_update", "time per update", format_seconds),
    ("samples_per_second", "samples per second", _per_second),
    ("peak_memory_bytes", "peak memory", format_bytes),
    ("bytes_on_wire_per_update", "bytes per update", format_bytes),
    ("collectives_per_update", "collectives per update", format_count),
)


def data_of(facts: Facts) -> dict[str, Any]:
    """The page's data. Nothing in it is a secret by the name of its key, and no text in it does
    anything to a terminal.
    """
    return sayable(_data_of(facts))


def sayable(value: Any) -> Any:
    r"""A value without escape sequences in any text, names of metrics, hosts and folders included;
    and without numbers that JSON cannot say.

    >>> sayable({"\x1b[2Jloss": [1.5, float("nan"), "\x07x"]})
    {'loss': [1.5, None, 'x']}
    """
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {sayable(key): sayable(inner) for key, inner in value.items()}
    return list(map(sayable, value)) if isinstance(value, list | tuple) else value


def _data_of(facts: Facts) -> dict[str, Any]:
    cells = [run.cell for run in facts.runs]
    apart = differences(cells) if facts.sweep else [UNKNOWN] * len(cells)
    most = max(2, POINTS // max(1, len(cells)))
    varied = differing(facts.runs)
    points = names(cells) if facts.sweep else ["1"]
    return {
        "title": facts.path.name,
        "path": str(facts.path),
        "sweep": facts.sweep,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": [
            _run(point, run, weights, most)
            for point, run, weights in zip(points, facts.runs, apart, strict=True)
        ],
        "figures": [{"key": key, "title": title} for key, title, _ in FIGURES],
        "metrics": list(dict.fromkeys(name for cell in cells for name in cell.summary.metrics)),
        "programs": any(cell.plan.get("program") for cell in cells),
        "differing": [
            {"key": key, "values": [shown(key, value) for value in values]}
            for key, values in varied.items()
        ],
        "sentences": [
            *(told_in_words(facts.search) if facts.search else ()),
            *(verdict(pair) for pair in accumulation_pairs(cells)),
            *remarks(cells),
            *(f"not read: {sentence}" for sentence in facts.unreadable),
        ],
    }


def _run(point: str, run: RunFacts, weights: str, most: int) -> dict[str, Any]:
    cell, summary = run.cell, run.cell.summary
    result = cell.result or {}
    rows = _rows(cell.updates)
    drawn = thinned(rows, most)
    return {
        "point": point,
        "name": run.name,
        "folder": str(cell.folder),
        "overrides": {key: shown(key, value) for key, value in cell.overrides.items()},
        "state": "pruned" if run.pruned and summary.state == "stopped" else summary.state,
        "why": _why(result) or run.pruned,
        "weights": weights,
        "sha256": result.get("weights_sha256"),
        "figures": _figures(summary),
        "metrics": {
            name: {"value": value, "text": format_number(value)}
            for name, value in summary.metrics.items()
        },
        "memory": summary.memory_bytes,
        "time_shares": summary.time_shares,
        "plan": {
            key: cell.plan.get(key)
            for key in ("nodes", "ranks", "global_batch", "micro_steps", "updates", "parameters")
        },
        "restarts": [
            {key: str(note.get(key, "")) for key in ("attempt", "resumed_from", "why")}
            for note in result.get("restarts") or []
        ],
        "warnings": list(
            dict.fromkeys(
                str(text) for record in cell.updates for text in record.get("warnings") or []
            )
        ),
        "drawn": f"{format_count(len(drawn))} of {plural(len(rows), 'update')}",
        "series": {name: [row[name] for row in drawn] for name in rows[0]} if rows else {},
        "marks": _marks(cell.updates, rows, summary.state, _why(result)),
        "timeline": timeline(run.windows, run.nodes, (result.get("culprit") or {}).get("rank")),
        "evaluations": _evaluations(thinned(run.evaluations, most)),
        "environment": _environment(run.environment),
        "command": _command(run.submission),
        "made_in": str(run.submission.get("folder") or UNKNOWN),
    }


def _figures(summary: Summary) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, _, form in FIGURES:
        value = getattr(summary, key)
        found[key] = {"value": value, "text": form(value)}
    return found


def _why(result: Mapping[str, Any]) -> str:
    culprit = result.get("culprit")
    return describe_culprit(culprit) if culprit else ""


def thinned(records: Sequence[Record], most: int) -> Sequence[Record]:
    """At most `most` of them at even distances, the first and the last included.

    >>> [r["n"] for r in thinned([{"n": n} for n in range(10)], 4)]
    [0, 3, 6, 9]
    """
    if len(records) <= most:
        return records
    last = len(records) - 1
    return [records[round(place * last / (most - 1))] for place in range(most)]


def _rows(updates: Sequence[Record]) -> list[dict[str, Any]]:
    """What curves are drawn of, update by update."""
    began = updates[0]["time"] - (updates[0].get("update_s") or 0) if updates else 0.0
    samples, rows = 0, list[dict[str, Any]]()
    for record in updates:
        samples += record.get("samples") or 0
        spent = {n: record.get(f"{n}_s") or 0.0 for n in ("compute", "wait", "optimizer")}
        row: dict[str, Any] = {
            "update": record["update"] + 1,
            "samples": samples,
            "elapsed_s": record["time"] - began,
            "loss": record.get("loss"),
            **{f"{name}_s": seconds for name, seconds in spent.items()},
            "other_s": max(0.0, (record.get("update_s") or 0.0) - sum(spent.values())),
        }
        rows.append({name: rounded(value) for name, value in row.items()})
    return rows


def _marks(
    updates: Sequence[Record], rows: Sequence[Mapping[str, Any]], state: str, why: str
) -> list[dict[str, Any]]:
    """Where on its curves a run went on after a failure or a stop, and where it failed."""
    places = ("update", "samples", "elapsed_s")
    begun = [
        ("restart", number)
        for number in range(1, len(updates))
        if updates[number].get("attempt") != updates[number - 1].get("attempt")
    ][-MOST_MARKS:]
    ended = [("failed", len(rows) - 1)] if state == "failed" and rows else []
    return [
        {"what": what, "why": why if what == "failed" else _why_restarted(updates[number])}
        | {place: rows[number][place] for place in places}
        for what, number in [*begun, *ended]
    ]


def _why_restarted(record: Record) -> str:
    return (record.get("restart") or {}).get("why", "")


def _evaluations(records: Sequence[Record]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for record in records for name in record["evaluation"])
    columns: dict[str, list[Any]] = {"update": [record["update"] + 1 for record in records]}
    for name in names:
        columns[name] = [rounded(record["evaluation"].get(name)) for record in records]
    return columns if names else {}


def rounded(value: Any) -> Any:
    """A number in six digits; None where it is not finite, which JSON cannot say.

    >>> rounded(1.23456789), rounded(float("nan")), rounded(7)
    (1.23457, None, 7)
    """
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return short if math.isfinite(short) else None


def _environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """What a run was computed with, flat, without what repeats elsewhere (the optimizer, diffs)."""
    packages = environment.get("packages") or {}
    framework, git = environment.get("framework") or {}, environment.get("git") or {}
    rows = {
        **{key: environment.get(key) for key in ("python", "platform", "processor", "cpus")},
        **{key: environment.get(key) for key in ("transport", "threads")},
        **{str(name): version for name, version in packages.items()},
        **{f"framework {name}": text for name, text in framework.items()},
        "git commit": git.get("commit"),
        "uncommitted changes": ("yes" if git.get("diff") else "no") if git else None,
    }
    return {key: str(value) for key, value in rows.items() if value is not None}


def _command(submission: Mapping[str, Any]) -> str:
    """The command that makes the run again, in a folder of its own: without what chose the folder,
    or the point among others.
    """
    stated = submission.get("overrides") or []
    words = [hidden(word) for word in stated if not ELSEWHERE.match(word)]
    return f"python -m orchestrator.launch {shlex.join(words)}".rstrip()
