"""Disturb runs one after another, and compare each with the undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFailed
from orchestrator.rehearse.asked import Asked
from orchestrator.rehearse.beside import compare
from orchestrator.rehearse.disturbed import Disturbed, Row, until
from orchestrator.rehearse.drawing import PER_RUN, draws
from orchestrator.rehearse.outside import Outside
from orchestrator.rehearse.pretended import Pretended
from orchestrator.rehearse.slurm.run import OnSlurm


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


def _outside(folder: Path, asked: Asked) -> Outside:
    return (OnSlurm if asked.config.cluster.kind == "slurm" else Pretended)(folder, asked)


def _undisturbed(asked: Asked, folder: Path) -> Outside:
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
