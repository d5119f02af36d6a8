"""Preparation and submission of a sweep's runs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from orchestrator.cli.follow import OutputOptions, Ready, interrupts
from orchestrator.cli.start import begun, resumed, writing
from orchestrator.clusters.api import class_of
from orchestrator.config.job_source import read_once
from orchestrator.config.rules import at_once
from orchestrator.errors import (
    ClusterError,
    Interrupted,
    NotNow,
    RunFolderError,
    UsageError,
)
from orchestrator.plugins import CLUSTERS
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import held
from orchestrator.sweep.cells import Action, Cell, make_room
from orchestrator.sweep.points import refuse_points
from orchestrator.units import plural


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Hold a sweep's folder; one that nothing came to is removed again. Raises `RunFolderError`
    while another start does.
    """
    with contextlib.ExitStack() as until_the_end:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            until_the_end.enter_context(held(RunDir(folder)))
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
        until_the_end.callback(_remove_if_empty, RunDir(folder))
        yield


def _remove_if_empty(sweep: RunDir) -> None:
    if {entry.name for entry in sweep.path.iterdir()} <= {sweep.lock.name}:
        sweep.lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process has put something there
            sweep.path.rmdir()


@contextlib.contextmanager
def ready_of(cell: Cell, output: OutputOptions) -> Generator[Ready | None]:
    """Make a cell's run ready: a new one, or one that continues."""
    point = cell.point
    if cell.action is Action.RESUME:
        # What has changed was refused or accepted for all points together.
        with resumed(cell.run.path, output, to=point.config, changed=True) as ready:
            yield ready
        return
    make_room(cell)
    with begun(
        point.config,
        output,
        overrides=point.overrides,
        flags=point.flags,
        plan=point.plan,
        notes=cell.notes,
    ) as ready:
        yield ready


def submit(cells: Sequence[Cell], output: OutputOptions) -> None:
    """Submit them, by kinds of clusters; nothing is submitted before all folders are written.

    Raises:
        ConfigError: one of them cannot be; none was submitted then, and no new folder is left.
        Interrupted: by a person, before the first was submitted.
        NotNow: the scheduler is silent, and nothing was submitted.
        ClusterError: the scheduler refused some; those that are queued go on, and are counted.
    """
    with interrupts, read_once():
        made = _made_ready(cells, OutputOptions(console=output.console, quiet=True))
        _submit(made, at_once(cells[0].point.config.sweep.parallel))


def _made_ready(cells: Sequence[Cell], quiet: OutputOptions) -> list[Ready]:
    """Write all runs to the disk, or none and raise why."""
    made: list[Ready] = []
    wrong: dict[str, list[int]] = {}
    try:
        with writing(RunDir(cells[0].run.path.parent)):
            for cell in cells:
                _refuse_interrupted()
                try:
                    with ready_of(cell, quiet) as ready:
                        made += [ready] if ready is not None else []
                except NotNow:  # it is nothing that is wrong with a point
                    raise
                except UsageError as error:
                    wrong.setdefault(str(error), []).append(cell.point.number)
            refuse_points(wrong, min(cell.point.number for cell in cells), len(cells))
        _refuse_interrupted()
    except BaseException:
        _withdraw(made)
        raise
    return made


def _refuse_interrupted() -> None:
    if interrupts.count:
        raise Interrupted("interrupted: none of the points was submitted")


def _withdraw(made: Sequence[Ready]) -> None:
    for ready in made:
        if not ready.run.may_be_queued:
            ready.run.withdraw()


def _submit(made: Sequence[Ready], most: int | None) -> None:
    for kind in sorted({ready.config.cluster.kind for ready in made}):
        members = [(r.cluster, r.request) for r in made if r.config.cluster.kind == kind]
        try:
            with CLUSTERS.wrap_errors(kind, "to submit the points"):
                class_of(kind).submit_all(members, most)
        except ClusterError as error:
            queued = [r for r in made if r.run.handle.exists()]
            _withdraw(made)
            if not queued:
                raise
            raise ClusterError(
                f"{error}\n{plural(len(queued), 'point')} of {len(made)} "
                f"{'is' if len(queued) == 1 else 'are'} queued; the same line again submits the "
                f"others"
            ) from error
