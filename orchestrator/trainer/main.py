"""A rank, from its environment to its exit code: set up, train in as many groups as it takes, say
how it ended.

`entry.py` chooses it: for a fork (local), for the one pickled task (SLURM), or for whoever starts
`python -m orchestrator.trainer RUN --attempt N`. All give it SLURM's variables; what differs is in
`attendance`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from orchestrator.agent.liveness import EVICTED, FAILED, FINISHED, LINK_VARIABLE, STOPPED
from orchestrator.agent.processes import this_process_alone
from orchestrator.agent.rank_log import send_output_to
from orchestrator.agent.topology import Topology, interface_variables
from orchestrator.client.loop import RankWindows
from orchestrator.errors import (
    EVICTED_RANK,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    OrchestratorError,
    PeerLost,
    StopRequested,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn_into
from orchestrator.trainer.attendance import Attendance
from orchestrator.trainer.failure import exit_code
from orchestrator.trainer.loop import Loop
from orchestrator.trainer.recorder import memory_of_ranks, result_of
from orchestrator.trainer.setup import Training, set_up
from orchestrator.trainer.stop import StopFlag

LAST_WORDS = {EXIT_FINISHED: FINISHED, EXIT_STOPPED: STOPPED, EVICTED_RANK: EVICTED}


def main(run_path: Path, attempt: int) -> int:
    """Be one rank of the run in `run_path`; give the exit code. Never raises what a job raised."""
    stop = StopFlag()
    if LINK_VARIABLE not in os.environ:
        stop.install()  # else the agent acts on signals, and this process ignores them
    # MindSpore's C++ prints pages of warnings unless told otherwise before its import.
    os.environ.setdefault("GLOG_v", "3")
    run = RunDir(run_path)
    topology = Topology.from_env(os.environ)
    if topology.scheduled:
        os.environ.update(interface_variables(os.environ, topology.address))
    send_output_to(run.rank_log(topology.rank))
    warn_into(run.warnings(attempt, topology.node_index), topology.rank)
    attendance = Attendance(run, attempt, topology, stop)
    code = EXIT_FAILED
    try:
        with this_process_alone():
            training = set_up(run, attempt, topology, stop, attendance)
            code = _trained(training, stop, attendance)
    except StopRequested:
        if attendance.leads:
            attendance.leave(None)
        code = EXIT_STOPPED
    except BaseException as error:  # noqa: BLE001  # whatever ended this rank has to be told to the others
        code = _told(error, attendance)
    finally:
        attendance.end(LAST_WORDS.get(code, FAILED))
    return code


def _told(error: BaseException, attendance: Attendance) -> int:
    """Say what ended this rank, where people and other ranks look; give the exit code."""
    if attendance.excused(error):
        return EXIT_STOPPED
    if not isinstance(error, OrchestratorError):
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)
    attendance.failed(error)
    return exit_code(error)


def _trained(training: Training, stop: StopFlag, attendance: Attendance) -> int:
    """Train to the end; on whoever is rank 0 then, write the result. Gives the exit code."""
    run, outcome = training.run, training.outcome
    began = time.perf_counter()
    memory = _train(training, stop, attendance)
    seconds = time.perf_counter() - began
    if training.recorder is not None:
        training.recorder.close(finished=outcome.state == "finished")
        attendance.allow_result()
        if outcome.state == "finished" or not attendance.leave(outcome.updates):
            result = result_of(
                run, outcome, training.engine, training.planned, seconds=seconds, memory=memory,
                unwritten=training.recorder.note,
            )  # fmt: skip
            if outcome.state == "stopped" and (why := attendance.why_for_good()):
                result["why"] = why
            run.write_own(run.result, result)
    # Groups that watch their peers are told that what follows is an end, not a loss.
    getattr(training.group, "close", lambda: None)()
    return EXIT_FINISHED if outcome.state == "finished" else EXIT_STOPPED


def _train(training: Training, stop: StopFlag, attendance: Attendance) -> dict[str, list[int]]:
    """Train to the end, in as many groups as it takes; give the memory of the last one's ranks.
    Collective. Raises `PeerLost`: a peer is gone, and there is no way on.
    """
    engine, planned, others = training.engine, training.planned, training.others
    assert planned.updates is not None  # noqa: S101  # the data set is known here
    rank, ranks, notes = training.group.rank, training.group.size, training.entered
    while True:
        if others is not None and notes is not None:  # in another group than before
            training.outcome.newcomers = False
            rank, ranks = others.place
            if rank == 0:
                training.write_on(notes)
            if why := others.too_few():
                training.save()
                raise why
        if (rank == 0) != (training.recorder is not None):
            raise RuntimeError(f"rank {rank} of a group, of which rank 0 and nobody else writes")
        callbacks = attendance.callbacks(
            training.recorder, training.outcome, transport=training.group.transport
        )
        loop = Loop(
            engine=engine,
            windows=RankWindows(planned, rank, training.rates, ranks=ranks),
            settings=training.config.train,
            callbacks=callbacks if others is None else [others, *callbacks],
            updates=planned.updates,
            stop=stop,
            rank=rank,
            outcome=training.outcome,
        )
        try:
            loop.run()
            if others is None or not training.outcome.newcomers:
                attendance.at_the_end()
                return memory_of_ranks(engine)
            notes = others.grow(training.outcome)
        except PeerLost as error:
            if others is None:
                raise
            notes = others.go_on(error, training.outcome)
