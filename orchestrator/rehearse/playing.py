"""Disturb runs one after another, and compare each with the undisturbed one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFailed
from orchestrator.rehearse.asked import CLOSE, Asked
from orchestrator.rehearse.drawing import PER_RUN, STOP, Fault, draws
from orchestrator.rehearse.outside import Outside
from orchestrator.report.metrics import History

LOOK_S = 0.01
PATIENCE_S = 180.0
LONGEST_PAUSE_S = 2.0
MOST_RESUMES = 3


@dataclass(kw_only=True)
class Row:
    """What became of one fault. Times in seconds since it.

    Attributes:
        fault: its kind, and to whom it was done.
        update: in which it was done, from 0.
        noticed_s: until the run, or its launcher, knew of it.
        recovered_s: until the next update was done; None where there was none left to do.
        how: survived, restart or resume; "" where the run was over.
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
    asked: Asked, folder: Path, *, seed: int, faults: int, say: Callable[[str], None]
) -> Rehearsal:
    """Play so many faults, some to a run, in runs below `folder`. Nothing is left running.

    Raises:
        RunFailed: the undisturbed run does not end well, or is over before any fault comes.
    """
    undisturbed = _undisturbed(asked, folder / "undisturbed")
    found = Rehearsal(seed=seed, equality=asked.equality)
    waiting = list(islice(draws(seed), faults))
    while waiting and not found.wrong:
        run = Outside(folder / f"run-{len(list(folder.glob('run-*.log'))) + 1:03d}", asked)
        first = waiting[0].number // PER_RUN
        now = [fault for fault in waiting if fault.number // PER_RUN == first]
        played = _Disturbed(run, undisturbed, asked, now)
        try:
            played.play()
        except TimeoutError as error:
            found.wrong.append(f"{run.run.path}: {error}")
        finally:
            run.end()
        found.rows += played.rows
        found.wrong += played.compare()
        for row in played.rows:
            say(f"{row.fault} in update {row.update}: {row.how or 'the run was over'}")
        if not played.rows and not found.wrong:
            raise RunFailed(
                f"{run.run.path} was over before a fault could come; rehearse more of it, with "
                f"train.updates={4 * asked.updates} say"
            )
        waiting = waiting[len(played.rows) :]
    return found


def _undisturbed(asked: Asked, folder: Path) -> Outside:
    run = Outside(folder, asked)
    try:
        run.launch()
        _until(lambda: run.code is not None, lambda: len(run.look()))
    except TimeoutError as error:
        raise RunFailed(f"the undisturbed run: {error}; see {folder}") from error
    finally:
        run.end()
    run.look()
    if not run.finished:
        raise RunFailed(f"the undisturbed run does not end well: {run.last_words}; see {folder}")
    return run


def _until(true: Callable[[], bool], progress: Callable[[], object]) -> None:
    """Look until it is true. Raises `TimeoutError` when nothing moves for long."""
    moved = time.monotonic()
    while not true():
        if progress():
            moved = time.monotonic()
        if time.monotonic() - moved > PATIENCE_S:
            raise TimeoutError(f"nothing has moved for {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


class _Disturbed:
    """One run under some faults."""

    def __init__(
        self, run: Outside, undisturbed: Outside, asked: Asked, faults: Sequence[Fault]
    ) -> None:
        self._run, self._undisturbed, self._asked = run, undisturbed, asked
        self._faults = faults
        self._update_s = statistics.median(r["update_s"] for r in undisturbed.records)
        self._resumes = 0
        self.rows: list[Row] = []

    def play(self) -> None:
        """Raises `TimeoutError` where the run gets nowhere."""
        self._run.launch()
        for fault in self._faults:
            self._await(fault.update(self._asked.updates))
            if self._run.code is not None:
                break
            time.sleep(min(fault.late * self._update_s, LONGEST_PAUSE_S))  # the moment drawn
            self._disturb(fault)
        _until(self._over, self._run.look)
        self._run.look()

    def _await(self, update: int) -> None:
        """Until it is under way, or the run's command has ended."""
        _until(lambda: self._stands >= update or self._run.code is not None, self._run.look)

    @property
    def _stands(self) -> int:
        """The update under way."""
        return self._run.records[-1]["update"] + 1 if self._run.records else 0

    def _over(self) -> bool:
        """Whether it is finished. A command that has ended otherwise is followed by `resume`."""
        if self._run.code is None:
            return False
        if not self._run.finished and self._resumes < MOST_RESUMES:
            self._resumes += 1
            self._run.resume()
            return False
        return True

    def _disturb(self, fault: Fault) -> None:
        seen = len(self._run.records)
        attempt = self._run.run.attempts_made() - 1
        at, began = time.time(), time.monotonic()
        said, gone = self._run.hurt(fault)
        row = Row(kind=fault.kind, fault=said, run=self._run.run.path.name, update=self._stands)
        self.rows.append(row)
        self._resumes = 0

        def whole() -> bool:
            if row.noticed_s is None and (
                self._run.code is not None or self._run.noticed(at, attempt)
            ):
                row.noticed_s = round(time.monotonic() - began, 2)
            notes = _notes(self._run.records[seen:], attempt)
            again = [note for key, note in notes if key == "restart"]
            lost = {rank for key, note in notes if key == "survived" for rank in note["gone"]}
            if again or (gone and gone <= lost):
                row.how = "survived" if not again else "resume" if self._resumes else "restart"
                row.recovered_s = round(self._run.records[-1]["time"] - at, 2)
                row.redone = sum(_redone(key, note) for key, note in notes)
                return True
            return self._over()

        _until(whole, self._run.look)
        if fault.kind == STOP and row.how:
            row.redone = max(0, row.redone - 1)  # it left between two updates

    # ------------------------------------------------------------------ beside the undisturbed

    def compare(self) -> list[str]:
        """Fill in what rows say of equality; give what is wrong, in sentences."""
        theirs = {r["update"]: r for r in self._run_history(self._undisturbed)}
        ours = {r["update"]: r for r in self._run_history(self._run)}
        bounds = [0, *(row.update for row in self.rows[1:]), self._asked.updates]
        wrong: list[str] = []
        for row, first, end in zip(self.rows, bounds, bounds[1:], strict=False):
            span = range(min(first, row.update), end)
            of = [(ours.get(n, {}), theirs[n]) for n in span]
            row.samples_lost = sum(abs(b["samples"] - a.get("samples", 0)) for a, b in of)
            row.equal = not row.samples_lost and all(self._same(a, b) for a, b in of)
            if not row.equal:
                wrong.append(f"{row.run}: after {row.fault} in update {row.update} it differs")
        if why := self._end_differs():
            wrong.append(f"{self._run.run.path.name}: {why}")
            for row in self.rows[-1:]:
                row.equal = False
        return wrong

    @staticmethod
    def _run_history(run: Outside) -> list[dict[str, Any]]:
        return History(run.records).updates

    def _same(self, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
        if ours["weight"] != theirs["weight"]:
            return False
        if self._asked.to_the_bit:
            return ours["loss"] == theirs["loss"]
        return abs(ours["loss"] - theirs["loss"]) <= CLOSE * max(1.0, abs(theirs["loss"]))

    def _end_differs(self) -> str:
        ours, theirs = (run.run.read_result() or {} for run in (self._run, self._undisturbed))
        if ours.get("state") != "finished":
            return f"it is {ours.get('state', 'without an end')}: {self._run.last_words}"
        keys = ["updates", "samples", *(["weights_sha256"] if self._asked.to_the_bit else [])]
        unlike = [key for key in keys if ours.get(key) != theirs.get(key)]
        return f"its {' and '.join(unlike)} differ" if unlike else ""


def _notes(records: Sequence[dict[str, Any]], attempt: int) -> list[tuple[str, dict[str, Any]]]:
    """What these lines say of losses that came in `attempt`, and of attempts after it."""
    found = [("survived", r["survived"]) for r in records if "survived" in r]
    return found + [
        ("restart", r["restart"]) for r in records if "restart" in r and r["attempt"] > attempt
    ]


def _redone(key: str, note: dict[str, Any]) -> int:
    """The update that was under way, and those that were thrown away."""
    return 1 + (note["lost_updates"] if key == "restart" else 0)
