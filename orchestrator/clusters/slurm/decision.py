"""The decision on what follows an attempt that ended; `finalize.py` carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from orchestrator.rundir.outcome import State
from orchestrator.rundir.restarts import FRUITLESS


class Decision(Enum):
    """What follows an attempt.

    | member | the run |
    |---|---|
    | `STOP` | ends as stopped, since it was cancelled |
    | `STOP_IN_QUEUE` | ends as stopped, since SLURM may not requeue its job |
    | `END` | ends in the state of the attempt |
    | `GIVE_UP` | fails: start after start makes no progress |
    | `RESTART` | restarts: the attempt was cut short, which is no failure |
    | `JUDGE_FAILURE` | restarts if `run.max_restarts` allows that, else it fails |
    """

    STOP = "stop"
    STOP_IN_QUEUE = "stop in queue"
    END = "end"
    GIVE_UP = "give up"
    RESTART = "restart"
    JUDGE_FAILURE = "judge failure"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """The end of an attempt whose job was not cancelled through the scheduler.

    Attributes:
        state: by the coordinator; None if it wrote none.
        began: a node of it began.
        departed: it left in order, or was cut short; `lost`: by a loss, not by a stop.
        granted: a restart after it is recorded already, and perhaps not carried out.
        cancelled: the run is, by `cancel`.
        may_restart: the job may be requeued, or the next attempt begins in its allocation.
        program: the run is one of a program.
    """

    state: State | None
    began: bool = True
    departed: bool = False
    lost: bool = False
    granted: bool = False
    cancelled: bool = False
    may_restart: bool = True
    program: bool = False


def decide(end: AttemptEnd, count_fruitless: Callable[[], int]) -> Decision:
    """Decide what follows an attempt.

    Args:
        count_fruitless: returns how many starts in a row, with this one, made no progress.
    """
    if end.granted and end.may_restart and not end.cancelled:
        return Decision.RESTART
    # The script of a cancelled run that is requeued starts nothing.
    well = end.state in (State.FINISHED, State.STOPPED) or (end.state is None and not end.began)
    if end.cancelled and (end.departed or well):
        return Decision.STOP
    if end.departed and well and not end.lost and not end.may_restart:
        return Decision.STOP_IN_QUEUE
    # No worker of a program could know that all had ended.
    ended = end.state is State.STOPPED or (end.program and end.state is State.FINISHED)
    if ended and not end.departed:
        return Decision.END
    # A program's progress is not known here, and preemption may end it time and again.
    may_be_stuck = end.departed and (end.lost or not end.program)
    if may_be_stuck and count_fruitless() >= FRUITLESS:
        return Decision.GIVE_UP
    if end.may_restart and end.departed:
        return Decision.RESTART
    return Decision.JUDGE_FAILURE
