"""The data of a report: runs as their folders have them, as plain values.

Every figure has its raw value (seconds, bytes, counts) and its text; the page, the charts and the
other formats only arrange them.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.config.changes import flat
from orchestrator.errors import RunFolderError
from orchestrator.report.run_tables import stage_rows
from orchestrator.report.secrets import hidden, shown
from orchestrator.report.status_tables import describe_search
from orchestrator.report.sweep_tables import (
    SweptRun,
    accumulation_pairs,
    current_overrides,
    differences,
    names,
    only_varying,
    swept_run,
    timed_concurrently,
    verdict,
)
from orchestrator.report.terminal import harmless
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Record, read_metrics
from orchestrator.rundir.outcome import describe_end
from orchestrator.rundir.status import end_of, find_runs
from orchestrator.rundir.warnings import read_warnings
from orchestrator.units import (
    UNKNOWN,
    first_few,
    format_bytes,
    format_count,
    format_number,
    format_rate,
    format_seconds,
    plural,
    short_overrides,
)

DIGITS = 6
OF_NO_RUN = ("run", "hydra")  # sections that say where a run lies, not what it computes
POINTS = 24_000  # drawn in all lines together, so that the page stays below 2 MB
MOST_MARKS = 100  # restarts of a run, the latest
MOST_RANKS = 32  # whose times are drawn
PLANNED = (
    "nodes",
    "ranks",
    "global_batch",
    "micro_tokens",
    "micro_steps",
    "updates",
    "parameters",
)
ELSEWHERE = re.compile(r"[+~]*(run\.dir=|hydra[/.]|sweep\.)")
# Of each run: key, title, what its text is made by. `metrics` follow.
FIGURES: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("updates", "updates", format_count),
    ("samples", "samples", format_count),
    ("loss", "final loss", format_number),
    ("seconds", "time", format_seconds),
    ("seconds_per_update", "time per update", format_seconds),
    ("samples_per_second", "samples per second", lambda v: format_rate(v, "").replace(" /s", "")),
    ("peak_memory_bytes", "peak memory", format_bytes),
    ("bytes_on_wire_per_update", "bytes per update", format_bytes),
    ("collectives_per_update", "collectives per update", format_count),
)


def data_of(path: Path, *others: Path) -> dict[str, Any]:
    """Return the page's data of a run's folder, or of every run in a sweep's folder; or of several.

    A damaged run of a sweep is named among the sentences. There are no secrets in it, and no
    escape sequences.

    Raises:
        RunFolderError: there is no run, or none that can be read.
    """
    paths = [path, *others]
    folders: list[Path] = []
    for root in paths:
        there = find_runs(root)
        if not there:
            RunDir(root).existing()
            raise RunFolderError(f"there is no run in {root}")
        folders += [folder for folder in there if folder not in folders]
    readable: list[tuple[RunDir, dict[str, Any]]] = []
    unreadable: list[str] = []
    for folder in folders:
        try:
            run = RunDir(folder).existing()
            readable.append((run, run.read_submission()))
        except RunFolderError as error:
            unreadable.append(str(error))
    varying = only_varying(
        [current_overrides(run, s.get("overrides") or []) for run, s in readable]
    )
    points: list[SweptRun] = []
    first: dict[str, Any] = {}  # values of the first run, of which others keep what differs
    changes: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for (run, submission), overrides in zip(readable, varying, strict=True):
        own = {
            k: v for k, v in overrides.items() if len(readable) > 1 and _section(k) not in OF_NO_RUN
        }
        try:
            most = max(2, POINTS // len(readable))
            history = read_metrics(run.metrics)
            curves = Curves(len(history.updates), most)
            point = swept_run(run, own, updates=curves.watch(history.updates))
            config = flat(run.read_config())
            evaluations = _evaluations(thinned(history.evaluations, most))
            runs.append(_run(run, point, submission, curves, evaluations))
        except RunFolderError as error:
            unreadable.append(str(error))
        else:
            points.append(point)
            first = first or config
            keys = {**first, **config}
            changes.append({k: config.get(k) for k in keys if config.get(k) != first.get(k)})
    if not runs:
        raise RunFolderError("\n".join(unreadable))
    search: dict[str, Any] | None = None
    try:
        search = None if others else RunDir(path).read_search()
    except RunFolderError as error:
        unreadable.append(str(error))
    sweep = len(runs) > 1
    unique = len({run["name"] for run in runs}) == len(runs)
    weights = differences(points) if sweep else [UNKNOWN]
    for run, label, difference in zip(runs, names(points), weights, strict=True):
        run["point"], run["weights"] = label, difference
        if not unique:  # charts identify their lines by names
            run["name"] += f" ({label})"
    data = {
        "title": ", ".join(root.name for root in paths),
        "path": ", ".join(map(str, paths)),
        "sweep": sweep,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": runs,
        "figures": [{"key": key, "title": title} for key, title, _ in FIGURES],
        "metrics": list(dict.fromkeys(name for point in points for name in point.summary.metrics)),
        "programs": any(point.plan.get("program") for point in points),
        "differing": _differing(first, changes),
        "sentences": [
            *(describe_search(search) if search else ()),
            *(verdict(pair) for pair in accumulation_pairs(points)),
            *filter(None, [timed_concurrently(points)]),
            *(sentence for run, _ in readable for sentence in _changed_inputs(run)),
            *(f"not read: {sentence}" for sentence in unreadable),
        ],
    }
    return sanitized(data)


def _changed_inputs(run: RunDir) -> Iterator[str]:
    """Yield a sentence for each resume of a run whose code or data had changed (`--changed`)."""
    for resume in run.read_resumes():
        if changed := resume.get("changed_inputs"):
            yield (
                f"{run.path.name} was resumed with --changed (attempt {resume['attempt']}): "
                f"{', '.join(changed)}, so its updates before and after are of different inputs"
            )


def _section(key: str) -> str:
    return key.split(".", maxsplit=1)[0]


def _differing(
    first: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the keys that differ between runs, with each run's value.

    Args:
        first: values of the first run.
        changes: values of each run that differ from these.
    """
    changed = dict.fromkeys(key for values in changes for key in values)
    keys = [key for key in {**first, **changed} if key in changed]
    return [
        {"key": key, "values": [shown(key, change.get(key, first.get(key))) for change in changes]}
        for key in keys
        if _section(key) not in OF_NO_RUN
    ]


def sanitized(value: Any) -> Any:
    r"""Return the value without escape sequences in its texts (names of metrics, hosts and folders
    included), and without numbers that JSON does not have.

    >>> sanitized({"\x1b[2Jloss": [1.5, float("nan"), "\x07x"]})
    {'loss': [1.5, None, 'x']}
    """
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {sanitized(key): sanitized(inner) for key, inner in value.items()}
    return list(map(sanitized, value)) if isinstance(value, list | tuple) else value


def _run(
    run: RunDir,
    point: SweptRun,
    submission: Mapping[str, Any],
    curves: Curves,
    evaluations: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the data of one run."""
    summary, result = point.summary, point.result or {}
    drawn = curves.rows
    state, why = end_of(run, result) if result.get("state") else (summary.state, None)
    why = describe_end(result) or why or ""
    overrides = {key: shown(key, value) for key, value in point.overrides.items()}
    return {
        "name": short_overrides(overrides) or run.path.name,
        "folder": str(point.folder),
        "overrides": overrides,
        "state": state,
        "why": why,
        "sha256": result.get("weights_sha256"),
        "figures": {
            key: {"value": (value := getattr(summary, key)), "text": form(value)}
            for key, _, form in FIGURES
        },
        "metrics": {
            name: {"value": value, "text": format_number(value)}
            for name, value in summary.metrics.items()
        },
        "memory": summary.memory_bytes,
        "time_shares": summary.time_shares,
        "plan": {
            **{key: _planned(point.plan.get(key)) for key in PLANNED},
            "batch_schedule": _planned("; ".join(map(" ".join, stage_rows(point.plan))) or None),
        },
        "seconds_of_ranks": _of_ranks(result.get("seconds_of_ranks") or {}),
        "restarts": [
            {key: str(note.get(key, "")) for key in ("attempt", "resumed_from", "why")}
            for note in result.get("restarts") or []
        ],
        "warnings": _warnings(run),
        "drawn": f"{format_count(len(drawn))} of {plural(curves.updates, 'update')}",
        "series": {name: [row[name] for row in drawn] for name in drawn[0]} if drawn else {},
        "marks": curves.marks(state, why),
        "evaluations": evaluations,
        "environment": _environment(run.read_environment() or {}),
        "command": _command(run, submission),
        "made_in": str(submission.get("folder") or UNKNOWN),
    }


def _planned(value: int | str | None) -> dict[str, Any]:
    """Return a value of the plan with its text, as figures have it."""
    return {"value": value, "text": value if isinstance(value, str) else format_count(value)}


def _of_ranks(seconds: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return each rank's seconds of work and of waiting in updates, those first that wait least; of
    many ranks those that wait least, and most.

    >>> [row["rank"] for row in _of_ranks({"work": [1.0, 3.0, 2.0], "wait": [2.0, 0.0, 1.0]})]
    [1, 2, 0]
    """
    columns = zip(seconds.get("work", ()), seconds.get("wait", ()), strict=True)
    rows = [
        {"rank": rank, "work": rounded(work), "wait": rounded(wait)}
        for rank, (work, wait) in enumerate(columns)
    ]
    rows.sort(key=lambda row: row["wait"])
    half = MOST_RANKS // 2
    return rows if len(rows) <= MOST_RANKS else [*rows[:half], *rows[-half:]]


def _warnings(run: RunDir) -> list[str]:
    """Return the warnings of all attempts, each once, also those that no update's record has."""
    attempts = (run.attempt(number) for number in run.attempt_numbers())
    return [*dict.fromkeys(w.text for attempt in attempts for w in read_warnings(attempt))]


def thinned(records: Sequence[Record], most: int) -> Sequence[Record]:
    """Return at most `most` of them at even distances, the first and the last included.

    >>> [r["n"] for r in thinned([{"n": n} for n in range(10)], 4)]
    [0, 3, 6, 9]
    """
    if len(records) <= most:
        return [*records]
    return [records[number] for number in _spread(len(records), most)]


def _spread(count: int, most: int) -> Sequence[int]:
    """Return at most `most` of the first `count` numbers, at even distances."""
    if count <= most:
        return range(count)
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


class Curves:
    """The values of the curves of a run, taken while its updates are read.

    Args:
        updates: how many will come.
        most: values to keep of each curve, at even distances.
    """

    AXES = ("update", "samples", "elapsed_s")

    def __init__(self, updates: int, most: int) -> None:
        self.updates = updates
        self.rows: list[dict[str, Any]] = []
        self._drawn = frozenset(_spread(updates, most))
        self._restarts = deque[tuple[dict[str, Any], str]](maxlen=MOST_MARKS)
        self._samples, self._began = 0, 0.0

    def watch(self, updates: Iterable[Record]) -> Iterator[Record]:
        """Yield the updates again."""
        attempt: Any = None
        for number, record in enumerate(updates):
            self._samples += record.get("samples") or 0
            if number in self._drawn or record.get("attempt") != attempt:
                if not number:
                    self._began = record["time"] - (record.get("update_s") or 0)
                row = self._row(record)
                if number and record.get("attempt") != attempt:
                    self._restarts.append((row, (record.get("restart") or {}).get("why", "")))
                if number in self._drawn:
                    self.rows.append(row)
                attempt = record.get("attempt")
            yield record

    def _row(self, record: Record) -> dict[str, Any]:
        spent = {n: record.get(f"{n}_s") or 0.0 for n in ("compute", "wait", "optimizer")}
        row: dict[str, Any] = {
            "update": record["update"] + 1,
            "samples": self._samples,
            "elapsed_s": record["time"] - self._began,
            "loss": record.get("loss"),
            **{f"{name}_s": seconds for name, seconds in spent.items()},
            "other_s": max(0.0, (record.get("update_s") or 0.0) - sum(spent.values())),
        }
        return {name: rounded(value) for name, value in row.items()}

    def marks(self, state: str, why: str) -> list[dict[str, Any]]:
        """Return where the run continued after a failure or a stop, and where it failed."""
        marks = [("restart", row, cause) for row, cause in self._restarts]
        if state == "failed" and self.rows:
            marks.append(("failed", self.rows[-1], why))
        return [
            {"what": what, "why": cause, **{name: row[name] for name in self.AXES}}
            for what, row, cause in marks
        ]


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
    uncommitted = "yes" if git.get("diff") else "no"
    if untracked := git.get("untracked"):
        uncommitted = f"yes; no commit holds {first_few(untracked, 3)}"
    rows = {
        **{key: environment.get(key) for key in ("python", "platform", "processor", "cpus")},
        **{key: environment.get(key) for key in ("transport", "threads")},
        **{str(name): version for name, version in packages.items()},
        **{f"framework {name}": text for name, text in framework.items()},
        "git commit": git.get("commit"),
        "uncommitted changes": uncommitted if git.get("commit") else None,
    }
    return {key: str(value) for key, value in rows.items() if value is not None}


def _command(run: RunDir, submission: Mapping[str, Any]) -> str:
    """Return the command that repeats the run in a folder of its own, with what resumes changed:
    without overrides that choose the folder, or the point among others.
    """
    words = current_overrides(run, submission.get("overrides") or [])
    overrides = [hidden(o) for o in words if not ELSEWHERE.match(o)]
    flags = submission.get("flags") or []
    return f"python -m orchestrator.launch {shlex.join([*flags, *overrides])}".rstrip()
