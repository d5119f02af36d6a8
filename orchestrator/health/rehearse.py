"""`rehearse`: disturb runs one after another, and compare each with an undisturbed one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.errors import RunFailed
from orchestrator.health.rehearsal import (
    CLOSE,
    FILL_DISK,
    ORDERLY,
    PER_RUN,
    Fault,
    RehearsalSpec,
    draws,
)
from orchestrator.health.rehearsed_run import RehearsedRun, SimulatedRun, SlurmRun
from orchestrator.report.terminal import say
from orchestrator.rundir.metrics import History
from orchestrator.rundir.warnings import read_warnings

LOOK_S = 0.01
PATIENCE_S = 180.0
LONGEST_PAUSE_S = 2.0
MOST_RESUMES = 3
UNWRITTEN = "could not be written"
Noted = tuple[str, dict[str, Any], dict[str, Any]]


@dataclass(kw_only=True)
class Row:
    """What became of one fault. Times in seconds since it.

    Attributes:
        fault: its kind, and to whom it was done.
        update: in which it was done, from 0.
        noticed_s: until the run, or its launcher, knew of it.
        recovered_s: until the next update was done; None where there was none left to do.
        how: survived, restart, resume or went on (nobody was lost); "" where the run was over.
        redone: updates that were begun more than once for it.
        samples_lost: of the updates up to the next fault.
        equal: these are as the undisturbed run's, and the end of the run is, for its last fault.
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


def until(true: Callable[[], bool], run: RehearsedRun) -> None:
    """Look until it is true. Raises `TimeoutError` when nothing moves for long."""
    moved = time.monotonic()
    while not true():
        if run.look() or run.waits:
            moved = time.monotonic()
        if time.monotonic() - moved > PATIENCE_S:
            raise TimeoutError(f"nothing has moved for {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


class Disturbed:
    """One run under some faults.

    Attributes:
        rows: of those that came to their turn.
    """

    def __init__(
        self,
        run: RehearsedRun,
        undisturbed: RehearsedRun,
        asked: RehearsalSpec,
        faults: Sequence[Fault],
    ) -> None:
        self._run, self._asked, self._faults = run, asked, faults
        self._update_s = statistics.median(r["update_s"] for r in undisturbed.records)
        self._resumes = 0
        self.rows: list[Row] = []

    def play(self) -> None:
        """Raises `TimeoutError` where the run gets nowhere."""
        self._run.launch()
        for fault in self._faults:
            until(lambda: bool(self._run.records) or self._run.ended, self._run)
            if not self._run.ended:
                self._run.arm(fault)
            update = fault.update(self._asked.updates)
            until(lambda update=update: self._stands >= update or self._run.ended, self._run)
            if self._run.ended:
                break
            time.sleep(min(fault.late * self._update_s, LONGEST_PAUSE_S))  # the moment drawn
            self._disturb(fault)
        until(self._over, self._run)
        self._run.look()

    @property
    def _stands(self) -> int:
        """The update under way."""
        return self._run.records[-1]["update"] + 1 if self._run.records else 0

    def _over(self) -> bool:
        """Whether it is finished. A run that has ended otherwise is followed by `resume`."""
        if not self._run.ended:
            return False
        if not self._run.finished and self._resumes < MOST_RESUMES:
            self._resumes += 1
            self._run.resume()
            return False
        return True

    def _disturb(self, fault: Fault) -> None:
        following = _FaultFollower(self._run, self._stands, fault)
        self.rows.append(following.row)
        self._resumes = 0
        following.begin(self._update_s)
        until(lambda: following.look(resumed=self._resumes > 0) or self._over(), self._run)
        following.end()


class _FaultFollower:
    """One fault, and what follows from it."""

    def __init__(self, run: RehearsedRun, stands: int, fault: Fault) -> None:
        self._run, self._fault = run, fault
        self._seen, self._attempt = len(run.records), run.run.attempts_made() - 1
        self._lifted: int | None = None  # lines since it came, when it ended
        self.row = Row(kind=fault.kind, fault=fault.kind, run=run.run.path.name, update=stands)

    def begin(self, update_s: float) -> None:
        self._at, self._began = time.time(), time.monotonic()
        self._harm = self._run.hurt(self._fault, update_s)
        self.row.fault = self._harm.said

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self._began

    def look(self, *, resumed: bool) -> bool:
        """Whether the run is at work again."""
        self._notice()
        news = self._run.records[self._seen :]
        notes = _notes(news, self._attempt)
        again = [record for key, _, record in notes if key == "restart"]
        lost = {rank for key, note, _ in notes if key == "survived" for rank in note["gone"]}
        if self._harm.lasts_s and self._lifted is None:
            self._lift_after(bool(again) or (bool(lost) and self._harm.is_over(lost)))
            return False
        over = self._lifted is not None
        if again:
            self._at_work("resume" if resumed else "restart", again[-1], notes)
        elif lost and not self._harm.whole_run and (over or self._harm.is_over(lost)):
            self._at_work("survived", notes[-1][2], notes)
        elif self._lifted is not None and len(news) > self._lifted:
            self._at_work("went on", news[self._lifted], notes)
        else:
            return False
        return True

    def _at_work(self, how: str, first: dict[str, Any], notes: Sequence[Noted]) -> None:
        self.row.how = how
        self.row.recovered_s = round(first["time"] - self._at, 2)
        self.row.redone = sum(_redone(note) for _, note, _ in notes)
        if self._fault.kind in ORDERLY:
            self.row.redone = max(0, self.row.redone - 1)

    def end(self) -> None:
        """The run is at work again, or over."""
        if self._harm.lasts_s and self._lifted is None:
            self._run.lift()
        news = self._run.records[self._seen :]
        if not self.row.how and news and self._run.finished:
            # Who was killed had not come in yet, say: nobody lost it, or not all of them.
            notes = _notes(news, self._attempt)
            if notes:
                self._at_work("survived", notes[-1][2], notes)
            else:
                self._at_work("went on", news[0], notes)

    def _lift_after(self, known: bool) -> None:
        if known or self._age_s >= self._harm.lasts_s or self._run.ended:
            self._run.lift()
            self._run.look()
            self._lifted = len(self._run.records) - self._seen
        else:
            self._run.keep_up()

    def _notice(self) -> None:
        if self.row.noticed_s is not None:
            return
        warned = [
            one.time - self._at
            for one in read_warnings(self._run.run.attempt(self._attempt))
            if UNWRITTEN in one.sentence and one.time >= self._at
        ]
        if self._fault.kind == FILL_DISK and warned:
            self.row.noticed_s = round(min(warned), 2)
        elif self._run.ended or self._run.noticed(self._at, self._attempt):
            self.row.noticed_s = round(self._age_s, 2)


def _notes(records: Sequence[dict[str, Any]], attempt: int) -> list[Noted]:
    """What these lines say of losses that came in `attempt`, and of attempts after it; each with
    its line.
    """
    found = [("survived", r["survived"], r) for r in records if "survived" in r]
    return found + [
        ("restart", r["restart"], r) for r in records if "restart" in r and r["attempt"] > attempt
    ]


def _redone(note: dict[str, Any]) -> int:
    """The update that was under way, and those that were thrown away."""
    return 1 + note.get("lost_updates", 0)


def compare(
    rows: Sequence[Row], run: RehearsedRun, undisturbed: RehearsedRun, asked: RehearsalSpec
) -> list[str]:
    """Fill in what rows say of equality; give what is wrong, in sentences."""
    theirs = {r["update"]: r for r in History(undisturbed.records).updates}
    ours = {r["update"]: r for r in History(run.records).updates}
    bounds = [0, *(row.update for row in rows[1:]), asked.updates]
    wrong: list[str] = []
    for row, first, end in zip(rows, bounds, bounds[1:], strict=False):
        span = range(min(first, row.update), end)
        of = [(ours.get(n, {}), theirs[n]) for n in span]
        row.samples_lost = sum(abs(b["samples"] - a.get("samples", 0)) for a, b in of)
        row.equal = not row.samples_lost and all(_same(a, b, asked) for a, b in of)
        if not row.equal:
            wrong.append(f"{row.run}: after {row.fault} in update {row.update} it differs")
    if why := _end_differs(run, undisturbed, asked):
        wrong.append(f"{run.run.path.name}: {why}")
        for row in rows[-1:]:
            row.equal = False
    return wrong


def _same(ours: dict[str, Any], theirs: dict[str, Any], asked: RehearsalSpec) -> bool:
    if ours["weight"] != theirs["weight"]:
        return False
    if asked.to_the_bit:
        return ours["loss"] == theirs["loss"]
    return abs(ours["loss"] - theirs["loss"]) <= CLOSE * max(1.0, abs(theirs["loss"]))


def _end_differs(run: RehearsedRun, undisturbed: RehearsedRun, asked: RehearsalSpec) -> str:
    ours, theirs = (one.run.read_result() or {} for one in (run, undisturbed))
    if ours.get("state") != "finished":
        return f"it is {ours.get('state', 'without an end')}: {run.last_words}"
    keys = ["updates", "samples", *(["weights_sha256"] if asked.to_the_bit else [])]
    unlike = [key for key in keys if ours.get(key) != theirs.get(key)]
    return f"its {' and '.join(unlike)} differ" if unlike else ""


@dataclass(kw_only=True)
class Rehearsal:
    """All of it. `wrong`: what was not as in the undisturbed run, in sentences."""

    seed: int
    equality: str
    rows: list[Row] = field(default_factory=list[Row])
    wrong: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rehearse(
    asked: RehearsalSpec, folder: Path, *, seed: int, faults: int, say: Callable[[str], None]
) -> Rehearsal:
    """Play so many faults, some to a run, in runs below `folder`. Nothing is left running.

    Raises:
        RunFailed: the undisturbed run does not end well, or is over before any fault comes.
    """
    undisturbed = _undisturbed(asked, folder / "undisturbed")
    found = Rehearsal(seed=seed, equality=asked.equality)
    waiting = list(islice(draws(seed, asked.kinds), faults))
    while waiting and not found.wrong:
        run = _outside(folder / f"run-{len(list(folder.glob('run-*.log'))) + 1:03d}", asked)
        first = waiting[0].number // PER_RUN
        now = [fault for fault in waiting if fault.number // PER_RUN == first]
        played = Disturbed(run, undisturbed, asked, now)
        try:
            played.play()
        except TimeoutError as error:
            found.wrong.append(f"{run.run.path}: {error}")
        finally:
            run.end()
        found.rows += played.rows
        found.wrong += compare(played.rows, run, undisturbed, asked)
        for row in played.rows:
            say(f"{row.fault} in update {row.update}: {row.how or 'the run was over'}")
        if not played.rows and not found.wrong:
            raise RunFailed(
                f"{run.run.path} was over before a fault could come; rehearse more of it, with "
                f"train.updates={4 * asked.updates} say"
            )
        waiting = waiting[len(played.rows) :]
    return found


def _outside(folder: Path, asked: RehearsalSpec) -> RehearsedRun:
    return (SlurmRun if asked.config.cluster.kind == "slurm" else SimulatedRun)(folder, asked)


def _undisturbed(asked: RehearsalSpec, folder: Path) -> RehearsedRun:
    run = _outside(folder, asked)
    try:
        run.launch()
        until(lambda: run.ended, run)
    except TimeoutError as error:
        raise RunFailed(f"the undisturbed run: {error}; see {folder}") from error
    finally:
        run.end()
    run.look()
    if not run.finished:
        raise RunFailed(f"the undisturbed run does not end well: {run.last_words}; see {folder}")
    return run


COLUMNS = ("fault", "run", "update", "noticed", "at work", "how", "redone", "lost", "equal")


def print_rehearsal(found: Rehearsal, console: Console) -> None:
    """A line for each fault, and what the columns mean."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        words = name in ("fault", "run", "how")
        table.add_column(name, justify="left" if words else "right", no_wrap=name != "fault")
    for row in found.rows:
        cells = (
            row.fault, row.run, str(row.update), _seconds(row.noticed_s),
            _seconds(row.recovered_s), row.how, str(row.redone), str(row.samples_lost),
            "yes" if row.equal else "NO",
        )  # fmt: skip
        table.add_row(*cells)
    console.print(table)
    say(
        console,
        "noticed, at work: seconds from the fault until the run knew of it, and until its next "
        f"update was done; redone: updates; lost: samples; equal: {found.equality}",
        "dim",
        prose=True,
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
