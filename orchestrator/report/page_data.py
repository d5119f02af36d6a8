"""The data of a report: runs as their folders have them, as plain values.

Every figure has its raw value (seconds, bytes, counts) and its text; the page, the charts and the
other formats only arrange them.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.config.changes import changes
from orchestrator.config.command_line import LENGTHS, key_of
from orchestrator.errors import RunFolderError
from orchestrator.report.status_tables import describe_search, search_of
from orchestrator.report.sweep_tables import (
    SweptRun,
    accumulation_pairs,
    differences,
    names,
    only_varying,
    short_key,
    swept_run,
    timed_concurrently,
    verdict,
)
from orchestrator.report.terminal import harmless
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Record, Summary, read_metrics
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.rundir.status import find_runs
from orchestrator.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_rate,
    format_seconds,
    plural,
    short_number,
)

DIGITS = 6
WORDS = ("token", "secret", "password", "passwd", "passphrase", "api_key", "apikey", "credential")


def shown(key: str, value: Any) -> str:
    """Return a value as text, unless its key's name says that it is a secret.

    >>> shown("job.api_key", "x"), shown("job.width", 3)
    ('(hidden)', '3')
    """
    secret = any(word in key.lower() for word in WORDS)
    return "(hidden)" if secret and value is not None else harmless(value)


def hidden(override: str) -> str:
    """Return an override, without its value if that is a secret."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{shown(key, value)}"


OF_NO_RUN = ("run", "hydra")  # sections that say where a run lies, not what it computes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. `name` tells it from the others; the mappings are the files of its folder.

    Attributes:
        changed: overrides of the commands that resumed it.
        pruned: why a search ended it early; "" if none did.
    """

    name: str
    cell: SweptRun
    evaluations: Sequence[Record]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    submission: Mapping[str, Any]
    changed: Sequence[str]
    pruned: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One run, or the runs of a sweep in the order of their folders' names.

    Attributes:
        search: its search.json, if the sweep is a search.
    """

    path: Path
    runs: Sequence[RunFacts]
    unreadable: Sequence[str]
    search: Mapping[str, Any] | None = None

    @property
    def sweep(self) -> bool:
        """True if several runs are compared."""
        return len(self.runs) > 1


def facts_of(path: Path) -> Facts:
    """Read a run's folder, or every run in a sweep's.

    A damaged run of a sweep is named in `unreadable`, and the others are read.

    Raises:
        RunFolderError: there is no run, or none that can be read.
    """
    folders = find_runs(path)
    if not folders:
        RunDir(path).existing()
        raise RunFolderError(f"there is no run in {path}")
    sound: list[tuple[RunDir, dict[str, Any]]] = []
    runs: list[RunFacts] = []
    unreadable: list[str] = []
    for folder in sorted(folders, key=_as_numbered):
        try:
            run = RunDir(folder).existing()
            sound.append((run, run.read_submission()))
        except RunFolderError as error:
            unreadable.append(str(error))
    varying = only_varying([s.get("overrides") or [] for _, s in sound])
    for (run, submission), overrides in zip(sound, varying, strict=True):
        try:
            runs.append(_read(run, submission, overrides if len(sound) > 1 else {}))
        except RunFolderError as error:
            unreadable.append(str(error))
    if not runs:
        raise RunFolderError("\n".join(unreadable))
    found: Mapping[str, Any] | None = None
    try:
        found = search_of(path)
    except RunFolderError as error:
        unreadable.append(str(error))
    if len({run.name for run in runs}) < len(runs):  # charts identify their lines by names
        places = names([run.cell for run in runs])
        named = zip(runs, places, strict=True)
        runs = [replace(run, name=f"{run.name} ({place})") for run, place in named]
    return Facts(path=path, runs=runs, unreadable=unreadable, search=found)


def _as_numbered(folder: Path) -> tuple[Path, bool, int, str]:
    """Hydra calls a sweep's points 0, 1, …, 10."""
    name = folder.name
    return folder.parent, not name.isdigit(), int(name) if name.isdigit() else 0, name


def _read(run: RunDir, submission: Mapping[str, Any], overrides: Mapping[str, str]) -> RunFacts:
    cell = swept_run(run, {k: v for k, v in overrides.items() if k.split(".")[0] not in OF_NO_RUN})
    keys = list(cell.overrides)
    return RunFacts(
        name=" ".join(
            f"{short_key(k, keys)}={short_number(str(v))}" for k, v in cell.overrides.items()
        )
        or run.path.name,
        cell=cell,
        evaluations=read_metrics(run.metrics).evaluations if run.metrics.exists() else (),
        config=run.read_config(),
        environment=run.read_environment() or {},
        submission=submission,
        changed=[word for entry in run.read_resumes() for word in entry.get("overrides", [])],
        pruned=(read_json(run.pruned) or {}).get("why", ""),
    )


def differing(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Return the keys that differ between runs, with each run's value."""
    if not runs:
        return {}
    first, *others = runs
    keys: dict[str, None] = {}
    for other in others:
        for change in changes(first.config, other.config):
            if change.key.split(".")[0] not in OF_NO_RUN:
                keys[change.key] = None
    return {key: [_at(run.config, key) for run in runs] for key in keys}


def _at(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


POINTS = 24_000  # drawn in all lines together, so that the page stays below 2 MB
MOST_MARKS = 100  # restarts of a run, the latest


# Of each run: key, title, what its text is made by. `metrics` follow.
ELSEWHERE = re.compile(r"[+~]*(run\.dir=|hydra[/.]|sweep\.)")
FIGURES: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("updates", "updates", format_count),
    ("samples", "samples", format_count),
    ("seconds", "time", format_seconds),
    ("seconds_per_update", "time per update", format_seconds),
    ("samples_per_second", "samples per second", lambda v: format_rate(v, "").replace(" /s", "")),
    ("peak_memory_bytes", "peak memory", format_bytes),
    ("bytes_on_wire_per_update", "bytes per update", format_bytes),
    ("collectives_per_update", "collectives per update", format_count),
)


def data_of(facts: Facts) -> dict[str, Any]:
    """Return the page's data, without secrets and without escape sequences."""
    return sayable(_data_of(facts))


def sayable(value: Any) -> Any:
    r"""Remove escape sequences from all texts, names of metrics, hosts and folders included, and
    numbers that JSON does not have.

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
            *(describe_search(facts.search) if facts.search else ()),
            *(verdict(pair) for pair in accumulation_pairs(cells)),
            *filter(None, [timed_concurrently(cells)]),
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
        "evaluations": _evaluations(thinned(run.evaluations, most)),
        "environment": _environment(run.environment),
        "command": _command(run),
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
    """Return the values of the curves, update by update."""
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
    """Return where on its curves a run continued after a failure or a stop, and where it failed."""
    places = ("update", "samples", "elapsed_s")
    begun = [
        ("restart", number)
        for number in range(1, len(updates))
        if updates[number].get("attempt") != updates[number - 1].get("attempt")
    ][-MOST_MARKS:]
    ended = [("failed", len(rows) - 1)] if state == "failed" and rows else []
    marks: list[dict[str, Any]] = []
    for what, number in [*begun, *ended]:
        cause = why if what == "failed" else (updates[number].get("restart") or {}).get("why", "")
        place = {name: rows[number][name] for name in places}
        marks.append({"what": what, "why": cause, **place})
    return marks


def _evaluations(records: Sequence[Record]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for record in records for name in record["evaluation"])
    columns: dict[str, list[Any]] = {"update": [record["update"] + 1 for record in records]}
    for name in names:
        columns[name] = [rounded(record["evaluation"].get(name)) for record in records]
    return columns if names else {}


def rounded(value: Any) -> Any:
    """Round a number to six digits; return None if it is not finite, which JSON does not have.

    >>> rounded(1.23456789), rounded(float("nan")), rounded(7)
    (1.23457, None, 7)
    """
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return short if math.isfinite(short) else None


def _environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a run as flat texts, without what repeats elsewhere (the optimizer,
    diffs).
    """
    packages = environment.get("packages") or {}
    framework, git = environment.get("framework") or {}, environment.get("git") or {}
    rows = {
        **{key: environment.get(key) for key in ("python", "platform", "processor", "cpus")},
        **{key: environment.get(key) for key in ("transport", "threads")},
        **{str(name): version for name, version in packages.items()},
        **{f"framework {name}": text for name, text in framework.items()},
        "git commit": git.get("commit"),
        "uncommitted changes": ("yes" if git.get("diff") else "no") if git.get("commit") else None,
    }
    return {key: str(value) for key, value in rows.items() if value is not None}


def _command(run: RunFacts) -> str:
    """Return the command that repeats the run in a folder of its own, with what resumes changed:
    without overrides that choose the folder, or the point among others.
    """
    later = {key_of(word) for word in run.changed}
    later |= set(LENGTHS) if later.intersection(LENGTHS) else set()
    stated = [w for w in run.submission.get("overrides") or [] if key_of(w) not in later]
    words = [hidden(word) for word in (*stated, *run.changed) if not ELSEWHERE.match(word)]
    flags = run.submission.get("flags") or []
    return f"python -m orchestrator.launch {shlex.join([*flags, *words])}".rstrip()
