"""The trainer: a worker's main function for job classes.

It sets up, trains in as many groups as losses and newcomers make, and writes the result.
"""

from __future__ import annotations

import time
from pathlib import Path

from orchestrator.agent.processes import this_process_alone
from orchestrator.client.loop import RankWindows
from orchestrator.errors import EXIT_FINISHED, EXIT_STOPPED, PeerLost
from orchestrator.rundir.files import write_json
from orchestrator.trainer.agent_link import PlaceMarks
from orchestrator.trainer.loop import Callback, Loop
from orchestrator.trainer.rank_times import RankTimes
from orchestrator.trainer.recorder import memory_of_ranks, result_of
from orchestrator.trainer.setup import Training, set_up
from orchestrator.trainer.stop import Follower, LeaveInTime, restart_note
from orchestrator.trainer.worker import Worker, run_worker

ASYNCHRONOUS = ("nccl", "hccl")
"""Transports whose collectives return before they are done."""


def main(run: Path, attempt: int) -> int:
    """Run one rank of a job; return its exit status."""
    return run_worker(run, attempt, _train)


def _train(worker: Worker) -> int:
    """Train to the end; on the rank that is 0 then, write the result. Collective."""
    with this_process_alone():
        training = set_up(worker)
        outcome, began = training.outcome, time.perf_counter()
        memory = _train_in_groups(worker, training)
        seconds = time.perf_counter() - began
        finished = outcome.state == "finished"
        if training.recorder is not None:
            training.recorder.close(finished=finished)
            if worker.topology.scheduled:
                worker.fence.check()
            if finished or not worker.depart(outcome.updates):
                result = result_of(
                    worker.run, outcome, training.engine, training.planned, seconds=seconds,
                    memory=memory,
                )  # fmt: skip
                if not finished and (why := worker.why_for_good()):
                    result["why"] = why
                worker.run.write_own(worker.run.result, result)
        # Groups that watch their peers learn that what follows is an end, not a loss.
        getattr(training.group, "close", lambda: None)()
        return EXIT_FINISHED if finished else EXIT_STOPPED


def _train_in_groups(worker: Worker, training: Training) -> dict[str, list[int]]:
    """Train to the end, in as many groups as it takes; return the last one's memory. Collective.

    Raises:
        PeerLost: a rank is lost, and the others cannot continue.
    """
    survivors, outcome, updates = training.survivors, training.outcome, training.updates
    rank, ranks, changes = training.group.rank, training.group.size, training.changes
    worker.link.send_event("trains")
    while True:
        if survivors is not None and changes is not None:  # in another group than before
            outcome.newcomers = False
            rank, ranks = survivors.place
            if rank == 0:
                training.take_over_record(changes)
            if why := survivors.too_few():
                training.save()
                raise why
        if (rank == 0) != (training.recorder is not None):
            raise RuntimeError(f"rank {rank} of a group, of which only rank 0 writes")
        callbacks = _callbacks(worker, training)
        loop = Loop(
            engine=training.engine,
            windows=RankWindows(training.planned, rank, training.rates, ranks=ranks),
            settings=training.config.train,
            callbacks=callbacks if survivors is None else [survivors, *callbacks],
            updates=updates,
            stop_requested=lambda: worker.stop.requested,
            rank=rank,
            outcome=outcome,
        )
        try:
            loop.run()
            if survivors is None or not outcome.newcomers:
                worker.link.mark("the end (result, goodbye to the others)")
                return memory_of_ranks(training.engine)  # a rank may still be lost here
            changes = survivors.grow(outcome)
        except PeerLost as error:
            if survivors is None:
                if worker.topology.scheduled:
                    worker.fence.check()
                training.save_after_failure()
                raise
            changes = survivors.go_on(error, outcome)


def _callbacks(worker: Worker, training: Training) -> list[Callback]:
    """Return the callbacks of this rank's loop in a new group, but for `Survivors`."""
    run, attempt, outcome, recorder = (
        worker.run,
        worker.attempt,
        training.outcome,
        training.recorder,
    )
    asynchronous = training.group.transport in ASYNCHRONOUS
    # Others may be stuck in a collective that only a kill ends.
    worker.link.saves_on_failure = training.saves_on_failure and not asynchronous
    found: list[Callback] = [
        PlaceMarks(worker.link, waits_unmarked=asynchronous),
        RankTimes(run.timeline(attempt) if recorder else None),
    ]
    if recorder is None:
        if worker.topology.scheduled:
            found.append(Follower(worker.stop, run.departure(attempt)))
        return found
    if attempt and outcome.done is None and not outcome.returned:
        note = restart_note(run, attempt, worker.topology, outcome.updates)
        recorder.note["restart"] = note
        write_json(run.restart(attempt), note)
    found.append(recorder.progress)
    if worker.topology.scheduled:
        found.append(
            LeaveInTime(
                recorder,
                fence=worker.fence,
                stop=worker.stop,
                notice=worker.notice,
                cancelled=run.cancel.exists,
                outcome=outcome,
            )
        )
    return [*found, recorder]
