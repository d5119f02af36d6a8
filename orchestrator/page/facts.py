"""What a page is made of: runs as they lie on disk, told apart by what varies between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.report.tables.search_table import search_of
from orchestrator.report.tables.sweep_table import SweptRun, names, short_key
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Record, read_metrics
from orchestrator.runs.resuming.rules import changes
from orchestrator.runs.status import find_runs
from orchestrator.sweep.tables import only_varying, swept_run
from orchestrator.units import short_number

OF_NO_RUN = ("run", "hydra")  # sections that say where a run lies, not what it computes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """One run. `name` tells it from the others; the mappings are the files of its folder.

    Attributes:
        windows: what all ranks told of a few windows of the latest attempt that did.
        nodes: each rank's in that attempt, as far as they said so.
        pruned: why a search ended it early; "" where none did.
    """

    name: str
    cell: SweptRun
    evaluations: Sequence[Record]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    submission: Mapping[str, Any]
    windows: Sequence[Mapping[str, Any]]
    nodes: Mapping[int, str]
    pruned: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One run, or the runs of a sweep in the order of their folders' names.

    Attributes:
        search: its search.json, where the sweep is a search.
    """

    path: Path
    runs: Sequence[RunFacts]
    unreadable: Sequence[str]
    search: Mapping[str, Any] | None = None

    @property
    def sweep(self) -> bool:
        """Whether runs are set beside each other."""
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
    unreadable: list[str] = []
    for folder in sorted(folders, key=_as_numbered):
        try:
            run = RunDir(folder).existing()
            sound.append((run, run.read_submission()))
        except RunFolderError as error:
            if len(folders) == 1:
                raise
            unreadable.append(str(error))
    varying = only_varying([s.get("overrides") or [] for _, s in sound])
    runs: list[RunFacts] = []
    for (run, submission), overrides in zip(sound, varying, strict=True):
        try:
            runs.append(_read(run, submission, overrides if len(sound) > 1 else {}))
        except RunFolderError as error:
            if len(folders) == 1:
                raise
            unreadable.append(str(error))
    if not runs:
        raise RunFolderError("\n".join(unreadable))
    found: Mapping[str, Any] | None = None
    try:
        found = search_of(path)
    except RunFolderError as error:
        unreadable.append(str(error))
    return Facts(path=path, runs=_told_apart(runs), unreadable=unreadable, search=found)


def _told_apart(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Runs whose names are no others': those that would share one, as where they differ in a key of
    `run` alone, have their folders' names in it. Charts know their lines by names.
    """
    shared = Counter(run.name for run in runs)
    places = names([run.cell for run in runs])
    return [
        replace(run, name=f"{run.name} ({place})") if shared[run.name] > 1 else run
        for run, place in zip(runs, places, strict=True)
    ]


def _as_numbered(folder: Path) -> tuple[Path, bool, int, str]:
    """Hydra calls a sweep's points 0, 1, …, 10."""
    name = folder.name
    return folder.parent, not name.isdigit(), int(name) if name.isdigit() else 0, name


def _read(run: RunDir, submission: Mapping[str, Any], overrides: Mapping[str, str]) -> RunFacts:
    cell = swept_run(run, {k: v for k, v in overrides.items() if k.split(".")[0] not in OF_NO_RUN})
    keys = list(cell.overrides)
    latest = next((n for n in reversed(run.attempt_numbers()) if run.timeline(n).exists()), 0)
    told = run.read(run.timeline(latest))
    found = RunFacts(
        name=" ".join(
            f"{short_key(k, keys)}={short_number(str(v))}" for k, v in cell.overrides.items()
        )
        or run.path.name,
        cell=cell,
        evaluations=read_metrics(run.metrics).evaluations if run.metrics.exists() else (),
        config=run.read_config(),
        environment=run.read_environment() or {},
        submission=submission,
        windows=told["windows"] if told else (),
        nodes=run.nodes_of_ranks(latest) or _pretended(cell.plan),
    )
    return replace(found, pruned=(run.read(run.pruned) or {}).get("why", ""))


def _pretended(plan: Mapping[str, Any]) -> dict[int, str]:
    """The nodes of ranks on a local cluster, which have no files of their own."""
    ranks, nodes = plan.get("ranks") or 0, plan.get("nodes") or 1
    return {rank: f"node{rank * nodes // ranks}" for rank in range(ranks)}


def differing(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Keys of the configuration that are not the same in all runs, with each run's value."""
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
