"""`rehearse`: inject faults into runs one after another; compare each with a fault-free one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import compose
from orchestrator.config.program import is_program
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, RunFailed, UsageError
from orchestrator.rehearse.faults import (
    FREEZE_NODE,
    ON_SLURM,
    ORDERLY,
    PER_RUN,
    REQUEUE,
    SIMULATED,
    Fault,
    Injected,
    draws,
)
from orchestrator.rehearse.rehearsed_run import (
    CLOSE,
    RehearsalSpec,
    RehearsedRun,
    SimulatedRun,
    SlurmRun,
)
from orchestrator.report.terminal import say
from orchestrator.rundir.metrics import History, updates_of
from orchestrator.runs.planning import ask_cluster
from orchestrator.runs.start import prepare

LEAST_UPDATES = 5 * PER_RUN
RESTARTS = "run.max_restarts=1000"
# Set unless the command line sets them.
DEFAULTS = (
    "train.updates=60",
    "train.samples=null",
    "train.checkpoint_every=5",
    "cluster.heartbeat_timeout_s=4",
    "tracker=none",
    "run.snapshot=false",
    RESTARTS,
)
# Set, too, where the job supports them.
TRIED = ("run.survive=true", "accumulation.reduction=reproducible")
MOST_FAULTS = 1000
POLL_S = 0.01
PATIENCE_S = 180.0
LONGEST_PAUSE_S = 2.0
MOST_RESUMES = 3


def plan_rehearsal(line: CommandLine, faults: int, only: Sequence[str] = ()) -> RehearsalSpec:
    """Check a rehearsal before anything is written.

    Args:
        line: of the run, as for launch.
        only: kinds of faults; all that are possible by default.

    Raises:
        UsageError: the run cannot be started, or not rehearsed.
    """
    if not 1 <= faults <= MOST_FAULTS:
        raise ConfigError(f"--faults {faults}: there can be 1 to {MOST_FAULTS} in a rehearsal")
    typed_overrides = line.overrides
    keys = {override.lstrip("+").partition("=")[0] for override in typed_overrides}
    config = compose(typed_overrides, line.config_dir, line.config_name)
    _refuse(config, keys)
    on_slurm = config.cluster.kind == "slurm"
    possible = ON_SLURM if on_slurm else SIMULATED
    for kind in only:
        if kind not in possible:
            raise ConfigError(
                f"--only {kind!r}: there is no such fault here; there are {', '.join(possible)}"
            )
    queued_once = on_slurm and not config.cluster.requeue
    defaults = tuple(default for default in DEFAULTS if default != RESTARTS or not queued_once)
    overrides = (
        *typed_overrides,
        *(default for default in defaults if default.partition("=")[0] not in keys),
    )
    config = compose(overrides, line.config_dir, line.config_name)
    updates = config.train.updates
    if updates is None or updates < LEAST_UPDATES:
        raise ConfigError(
            f"train.updates={'null' if updates is None else updates}: {PER_RUN} faults of a run "
            f"need {LEAST_UPDATES} updates at the least; try train.updates={LEAST_UPDATES}"
        )
    barred = {REQUEUE: "cluster.requeue=false: SLURM queues it once only"} if queued_once else {}
    if prepare(config).nodes == 1:
        barred[FREEZE_NODE] = "no other node would notice"
    for kind in only:
        if kind in barred:
            raise ConfigError(f"--only {', '.join(only)}: {barred[kind]}")
    kinds = tuple(kind for kind in only or possible if kind not in barred)
    notes = [f"without {kind}: {why}" for kind, why in barred.items() if not only]
    for more in TRIED:
        if more.partition("=")[0] in keys:
            continue
        try:
            tried = compose((*overrides, more), line.config_dir, line.config_name)
            prepare(tried)
        except UsageError as refusal:
            notes.append(f"without {more}: {refusal}")
        else:
            config, overrides = tried, (*overrides, more)
    if on_slurm and (answer := ask_cluster(config)[1])["refused"]:  # now, not in the first run
        raise ConfigError(answer["scheduler"])
    return RehearsalSpec(
        config=config, overrides=overrides, flags=line.flags, kinds=kinds, notes=tuple(notes)
    )


def _refuse(config: Config, keys: set[str]) -> None:
    if is_program(config.job):
        raise ConfigError(
            "a rehearsal compares losses and weights with an undisturbed run's, and a program "
            "keeps its own; give it a job"
        )
    if config.cluster.kind not in ("local", "slurm"):
        raise ConfigError(
            f"a rehearsal is on simulated nodes, or on SLURM, not on a {config.cluster.kind} "
            "cluster; leave cluster= out, and say how many: cluster.nodes=2"
        )
    if config.cluster.allocation == "current":
        raise ConfigError(
            "a rehearsal submits jobs of its own, which come and go; leave "
            "cluster.allocation=current out"
        )
    if "run.dir" in keys:
        raise ConfigError("a rehearsal has a folder for each of its runs; use --into FOLDER")


@dataclass(kw_only=True)
class Row:
    """The outcome of one fault. Times are seconds since it.

    Attributes:
        fault: its kind and target.
        update: in which it was injected, from 0.
        noticed_s: until the run, or its launcher, noticed it.
        recovered_s: until the next update was done; None where none was left to do.
        how: survived, restart, resume or went on (no rank was lost); "" where the run was over.
        redone: updates that were begun more than once for it.
        samples_lost: of the updates up to the next fault.
        equal: these are as the fault-free run's, and the end of the run is, for its last fault.
    """

    kind: str
    fault: str
    run: str
    update: int
    noticed_s: float | None = None
    recovered_s: float | None = None
    how: str = ""
    redone: int = 0
    samples_lost: int = 0
    equal: bool = False


def until(condition: Callable[[], bool], run: RehearsedRun) -> None:
    """Poll until the condition is true. Raises `TimeoutError` if nothing moves for long."""
    moved = time.monotonic()
    while not condition():
        if run.read_new() or run.is_queued:
            moved = time.monotonic()
        if time.monotonic() - moved > PATIENCE_S:
            raise TimeoutError(f"nothing has moved for {PATIENCE_S:g} s")
        time.sleep(POLL_S)


class DisturbedRun:
    """One run under some faults. `rows`: the outcomes of those that were injected."""

    def __init__(
        self, run: RehearsedRun, undisturbed: RehearsedRun, faults: Sequence[Fault]
    ) -> None:
        self._run, self._faults = run, faults
        self._update_s = statistics.median(r["update_s"] for r in undisturbed.records)
        self._resumes = 0
        self.rows: list[Row] = []

    def play(self, updates: int) -> None:
        """Run to the end. Raises `TimeoutError` if the run makes no progress."""
        run = self._run
        run.launch()
        for fault in self._faults:
            due = fault.update(updates)
            until(lambda due=due: run.current_update >= due or run.ended, run)
            if run.ended:
                break
            time.sleep(min(fault.late * self._update_s, LONGEST_PAUSE_S))  # the moment drawn
            self._resumes = 0
            outcome = FaultOutcome(run, fault.kind, run.inject(fault))
            self.rows.append(outcome.row)
            until(lambda o=outcome: o.recovered(self._resumes > 0) or self._is_over(), run)
            outcome.finish()
        until(self._is_over, run)
        run.read_new()

    def _is_over(self) -> bool:
        """Return True once the run has finished. Resume one that ended otherwise."""
        if not self._run.ended:
            return False
        if not self._run.finished and self._resumes < MOST_RESUMES:
            self._resumes += 1
            self._run.resume()
            return False
        return True


class FaultOutcome:
    """The outcome of a fault that was injected just now."""

    def __init__(self, run: RehearsedRun, kind: str, injected: Injected) -> None:
        self._run, self._injected = run, injected
        self._seen, self._attempt = len(run.records), run.run.attempts_made() - 1
        self._began = time.time()
        name, update = run.run.path.name, run.current_update
        self.row = Row(kind=kind, fault=injected.text, run=name, update=update)

    @property
    def _new(self) -> list[dict[str, Any]]:
        return self._run.records[self._seen :]

    def recovered(self, resumed: bool) -> bool:
        """Return True once the run trains again."""
        unnoticed = self.row.noticed_s is None
        if unnoticed and (self._run.ended or self._run.noticed(self._began, self._attempt)):
            self.row.noticed_s = round(time.time() - self._began, 2)
        survived, restarted = self._losses()
        lost = {rank for record in survived for rank in record["survived"]["gone"]}
        if restarted:
            self._record("resume" if resumed else "restart", restarted[-1])
        elif self._injected.whole_run:
            return False
        elif lost and self._injected.gone <= lost:
            if after := updates_of(self._new[self._new.index(survived[-1]) :]):
                self._record("survived", after[0])
        elif not self._injected.gone and (
            # One that ended just before may have been unread until now.
            after := [r for r in updates_of(self._new) if r["time"] >= self._began]
        ):
            self._record("went on", after[0])
        return bool(self.row.how)

    def finish(self) -> None:
        """Judge a fault whose run is over."""
        if not self.row.how and self._new and self._run.finished:
            # Fewer ranks were lost than the fault hit: one had not joined yet, say.
            survived, restarted = self._losses()
            notes = survived + restarted
            self._record("survived" if notes else "went on", notes[-1] if notes else self._new[0])

    def _losses(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the records of survived losses, and the first ones of new attempts."""
        survived = [r for r in self._new if "survived" in r]
        return survived, [r for r in self._new if "restart" in r and r["attempt"] > self._attempt]

    def _record(self, how: str, first: dict[str, Any]) -> None:
        survived, restarted = self._losses()
        notes = [r["survived"] for r in survived] + [r["restart"] for r in restarted]
        self.row.how = how
        self.row.recovered_s = round(first["time"] - self._began, 2)
        # The update under way, and those that were thrown away.
        self.row.redone = sum(note.get("redone", 1) + note.get("lost_updates", 0) for note in notes)
        if self.row.kind in ORDERLY:
            self.row.redone = max(0, self.row.redone - 1)


def compare(
    rows: Sequence[Row], run: RehearsedRun, undisturbed: RehearsedRun, spec: RehearsalSpec
) -> list[str]:
    """Fill in whether rows are equal; return the differences, as sentences."""
    theirs = {r["update"]: r for r in History(undisturbed.records).updates}
    ours = {r["update"]: r for r in History(run.records).updates}
    bounds = [0, *(row.update for row in rows[1:]), spec.updates]
    wrong: list[str] = []
    for row, first, end in zip(rows, bounds, bounds[1:], strict=False):
        pairs = [(ours.get(n, {}), theirs[n]) for n in range(min(first, row.update), end)]
        row.samples_lost = sum(abs(b["samples"] - a.get("samples", 0)) for a, b in pairs)
        row.equal = not row.samples_lost and all(_is_same(a, b, spec) for a, b in pairs)
        if not row.equal:
            wrong.append(f"{row.run}: after {row.fault} in update {row.update} it differs")
    if why := _end_differs(run, undisturbed, spec):
        wrong.append(f"{run.run.path.name}: {why}")
        for row in rows[-1:]:
            row.equal = False
    return wrong


def _is_same(ours: dict[str, Any], theirs: dict[str, Any], spec: RehearsalSpec) -> bool:
    if ours["weight"] != theirs["weight"]:
        return False
    if spec.to_the_bit:
        return ours["loss"] == theirs["loss"]
    return abs(ours["loss"] - theirs["loss"]) <= CLOSE * max(1.0, abs(theirs["loss"]))


def _end_differs(run: RehearsedRun, undisturbed: RehearsedRun, spec: RehearsalSpec) -> str:
    ours, theirs = (rehearsed_run.run.read_result() or {} for rehearsed_run in (run, undisturbed))
    if ours.get("state") != "finished":
        return f"it is {ours.get('state', 'without an end')}: {run.last_line}"
    keys = ["updates", "samples", *(["weights_sha256"] if spec.to_the_bit else [])]
    unlike = [key for key in keys if ours.get(key) != theirs.get(key)]
    return f"its {' and '.join(unlike)} differ" if unlike else ""


@dataclass(kw_only=True)
class Rehearsal:
    """All outcomes. `wrong`: sentences about differences from the fault-free run."""

    seed: int
    equality: str
    rows: list[Row] = field(default_factory=list[Row])
    wrong: list[str] = field(default_factory=list[str])


def rehearse(
    spec: RehearsalSpec, folder: Path, *, seed: int, faults: int, say: Callable[[str], None]
) -> Rehearsal:
    """Inject so many faults, some to a run, in runs below `folder`. Nothing is left running.

    Raises:
        RunFailed: the fault-free run does not end well, or is over before any fault comes.
    """
    kind = SlurmRun if spec.config.cluster.kind == "slurm" else SimulatedRun
    undisturbed = kind(folder / "undisturbed", spec)
    run_undisturbed(undisturbed)
    rehearsal = Rehearsal(seed=seed, equality=spec.equality)
    waiting = list(islice(draws(seed, spec.kinds), faults))
    while waiting and not rehearsal.wrong:
        run = kind(folder / f"run-{len(list(folder.glob('run-*.log'))) + 1:03d}", spec)
        first = waiting[0].number // PER_RUN
        now = [fault for fault in waiting if fault.number // PER_RUN == first]
        played = DisturbedRun(run, undisturbed, now)
        try:
            played.play(spec.updates)
        except TimeoutError as error:
            rehearsal.wrong.append(f"{run.run.path}: {error}")
        finally:
            run.end()
        rehearsal.rows += played.rows
        rehearsal.wrong += compare(played.rows, run, undisturbed, spec)
        for row in played.rows:
            say(f"{row.fault} in update {row.update}: {row.how or 'the run was over'}")
        if not played.rows and not rehearsal.wrong:
            raise RunFailed(
                f"{run.run.path} was over before a fault could come; rehearse more of it, with "
                f"train.updates={4 * spec.updates} say"
            )
        waiting = waiting[len(played.rows) :]
    return rehearsal


def run_undisturbed(run: RehearsedRun) -> None:
    """Run to the end. Raises `RunFailed` if it does not finish."""
    folder = run.run.path
    try:
        run.launch()
        until(lambda: run.ended, run)
    except TimeoutError as error:
        raise RunFailed(f"the undisturbed run: {error}; see {folder}") from error
    finally:
        run.end()
    run.read_new()
    if not run.finished:
        raise RunFailed(f"the undisturbed run does not end well: {run.last_line}; see {folder}")


COLUMNS = ("fault", "run", "update", "noticed", "at work", "how", "redone", "lost", "equal")


def print_rehearsal(rehearsal: Rehearsal, console: Console) -> None:
    """Print a line for each fault, and the meaning of the columns."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        is_text = name in ("fault", "run", "how")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "fault")
    for row in rehearsal.rows:
        noticed, recovered = (
            "" if s is None else f"{s:.2f} s" for s in (row.noticed_s, row.recovered_s)
        )
        counts = (str(row.redone), str(row.samples_lost), "yes" if row.equal else "NO")
        table.add_row(row.fault, row.run, str(row.update), noticed, recovered, row.how, *counts)
    console.print(table)
    say(
        console,
        "noticed, at work: seconds from the fault until the run knew of it, and until its next "
        f"update was done; redone: updates; lost: samples; equal: {rehearsal.equality}",
        "dim",
        prose=True,
    )
