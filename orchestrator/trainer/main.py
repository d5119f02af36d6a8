"""The trainer: a worker's main function for job classes.

It sets up, trains in as many groups as losses and newcomers make, and writes the result. What
follows an update is in `client/loop.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

from orchestrator.agent.processes import this_process_alone
from orchestrator.client.balance import (
    SPARE_WINDOWS,
    MeasuredSpeeds,
    RecordedSpeeds,
    Speeds,
    known_speed,
)
from orchestrator.client.loop import Callback, RankWindows, Trained, TrainingLoop
from orchestrator.client.run import current_run
from orchestrator.engine.api import RecomputesLeaves, ShowsGradients
from orchestrator.errors import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    Evicted,
    Excluded,
    PeerLost,
    ReplicasDiffer,
    StopRequested,
)
from orchestrator.plan.recorded_speeds import BALANCE
from orchestrator.plugins import OBSERVER, imported
from orchestrator.rundir.checkpoints import remove_partial
from orchestrator.rundir.files import write_json
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.warnings import warn
from orchestrator.trainer.agent_link import PositionMarks
from orchestrator.trainer.best import BestCheckpoint
from orchestrator.trainer.evaluation import HeldOutEvaluation, joined_figures
from orchestrator.trainer.setup import set_up
from orchestrator.trainer.stop import Follower, LeaveInTime, StopFlag, restart_note
from orchestrator.trainer.training import Training
from orchestrator.trainer.worker import WorkerProcess, run_in_worker, write_patiently


def main(run: Path, attempt: int) -> int:
    """Run one rank of a job; return its exit status."""
    return run_in_worker(run, attempt, _train)


def _train(worker: WorkerProcess) -> int:
    """Train to the end; on the rank that is 0 then, write the result. Collective."""
    rank, ranks = worker.topology.rank, worker.topology.size
    # Libraries that a job uses (loggers, say) look here for whether they are on rank 0.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    with this_process_alone(), _observed(rank):
        training = set_up(worker)
        worker.close_tracker = training.close_tracker
        progress, began = training.progress, time.perf_counter()
        facts = _train_in_groups(worker, training)
        seconds = time.perf_counter() - began
        finished = not progress.stopped
        if training.recorder is not None:
            training.recorder.close(finished=finished)
            if worker.topology.scheduled:  # others publish no attempts
                worker.fence.check()
            if finished:  # a rank 0 that was lost may have been saving
                remove_partial(worker.run.checkpoints)
                training.require_applied()
            # `depart` is true if the scheduler continues the run: result.json would end it.
            if finished or not worker.depart(progress.updates):
                result = training.result(facts, seconds)
                if not finished and (why := worker.why_for_good()):
                    result["why"] = why
                write_patiently(lambda: write_json(worker.run.result, result))
        # Groups that watch their peers learn that what follows is an end, not a loss.
        (training.group if training.membership is None else training.membership).close()
        return EXIT_FINISHED if finished else EXIT_STOPPED


@contextlib.contextmanager
def _observed(rank: int) -> Generator[None]:
    """Enter the context manager of this rank that the variable OBSERVER names, if it is set."""
    if OBSERVER not in os.environ:
        yield
        return
    observer: Callable[[int], AbstractContextManager[None]] = imported(os.environ[OBSERVER])
    with observer(rank):
        yield


def _train_in_groups(worker: WorkerProcess, training: Training) -> dict[str, Any]:
    """Train to the end, in as many groups as it takes; return the last one's `facts_of_ranks`.
    Collective.

    Raises:
        PeerLost: a rank is lost, and the others cannot continue.
    """
    membership, checkpoints = training.membership, training.checkpoints
    process, speeds = os.getpid(), None
    worker.link.send_event("trains")
    while True:
        rank, ranks = _enter_group(training)
        with contextlib.ExitStack() as resources:  # of this group
            try:
                speeds = _speeds(training, rank, ranks, before=speeds)
                loop = _group_loop(worker, training, rank, ranks, speeds, resources)
                _compute(loop, training, worker.stop)
                if membership is None or not training.progress.newcomers:
                    worker.link.mark("the end (result, goodbye to the others)")
                    return training.facts_of_ranks()  # a rank may still be lost here
                checkpoints.complete_parts(wait=True)
                membership.grow(training.progress)
            except Excluded:  # the others redo the update, without this rank
                checkpoints.drop_parts()
                raise
            except PeerLost as error:
                checkpoints.drop_parts()
                _continue_without_lost(worker, training, error)
            except Exception as error:
                if os.getpid() == process:  # else it is a child's that the job has forked
                    _save_before_failing(worker, training, error)
                raise


def _enter_group(training: Training) -> tuple[int, int]:
    """Adapt what outlives a group to the present one; return this rank in it, and its size.

    Raises:
        Unrecoverable: too few nodes are left. The state is saved.
    """
    membership, progress = training.membership, training.progress
    group = training.group if membership is None else membership  # with the present rank and size
    current_run.set_ranks(group.rank, group.size)
    if membership is not None and membership.changes:  # in another group than before
        progress.newcomers = False
        training.checkpoints.rank = group.rank
        if group.rank == 0:
            training.take_over_record(membership.changes)
        if why := membership.too_few():
            training.save()
            raise why
    if (group.rank == 0) != (training.recorder is not None):
        raise RuntimeError(f"rank {group.rank} of a group, of which only rank 0 writes")
    return group.rank, group.size


def _group_loop(
    worker: WorkerProcess,
    training: Training,
    rank: int,
    ranks: int,
    speeds: Speeds | None,
    resources: contextlib.ExitStack,
) -> TrainingLoop:
    """Return the loop of a new group, with its evaluation and callbacks. Collective.

    Args:
        rank, ranks: this rank in the group, and the group's size.
        speeds: by which the group's work is dealt.
        resources: closes what lives as long as the group.
    """
    engine, membership, train = training.engine, training.membership, training.config.train
    progress = training.progress
    best = training.best = _best(training, rank)
    windows = RankWindows(
        training.planned,
        rank,
        training.rates,
        ranks=ranks,
        shard_ranks=engine.shard_ranks,
        speeds=speeds,
    )
    loop = TrainingLoop(
        windows=windows,
        updates=training.updates,
        checkpoints=training.checkpoints,
        callbacks=_callbacks(worker, training),
        progress=progress,
        checkpoint_every=train.checkpoint_every,
        evaluate_every=train.evaluate_every,
        # SLURM may end the step when a lost node comes back, and more losses may follow.
        checkpoint_soon=membership is not None and bool(membership.changes),
        judge=best and best.judge,
        trained=Trained(
            job=training.job,
            gradients=engine.gradients if isinstance(engine, ShowsGradients) else dict,
            engine=engine if isinstance(engine, RecomputesLeaves) else None,
            windows=windows,
        ),
    )
    held_out: HeldOutEvaluation | None = None
    if training.held_out is not None:
        held_out = HeldOutEvaluation(
            training.held_out,
            engine,
            training.planned,
            rank=rank,
            ranks=ranks,
            before_piece=loop.begin_held_out_piece,
        )
        resources.callback(held_out.close)
    if rank == 0 or training.evaluates_together:
        loop.evaluate = partial(_evaluate, training, rank, held_out)
    if training.evaluates_together:  # some may have before others were lost
        rows = engine.gather([progress.evaluated])
        progress.evaluated = int(min(row[0] for row in rows))
    return loop


def _evaluate(
    training: Training, rank: int, held_out: HeldOutEvaluation | None
) -> dict[str, float]:
    """Return the held-out figures after the last update. Collective, if all ranks evaluate."""
    figures: Mapping[str, float] = {}
    progress, in_shards = training.progress, training.config.engine.shard_model != "none"
    progress.evaluating = training.evaluates_together
    if held_out is not None:
        report = held_out()
        figures = report.figures
        if training.recorder is not None:
            training.recorder.traffic = {
                "collectives": report.collectives,
                "bytes_on_wire": report.bytes_on_wire,
            }
    if rank == 0 or in_shards:
        figures = joined_figures(figures, training.engine.evaluate())
    progress.evaluating = False
    return dict(figures)


def _continue_without_lost(worker: WorkerProcess, training: Training, error: PeerLost) -> None:
    """Form the next group after a loss. Collective among the ranks that are left.

    Raises:
        Evicted: the others continue without this rank.
        PeerLost: no group follows. The last boundary's state is saved, if it can be.
    """
    try:
        if training.membership is None:
            raise error
        training.membership.continue_training(error, training.progress)
        training.progress.evaluating = False
    except Evicted:  # the others continue
        raise
    except PeerLost:
        _save_last_boundary(worker, training)
        raise


def _best(training: Training, rank: int) -> BestCheckpoint | None:
    """Return what watches the figure of `train.keep_best` in a new group."""
    train = training.config.train
    if train.keep_best is None:
        return None
    evaluations = None
    if rank == 0:
        recorded = read_metrics(training.run.metrics).evaluations
        evaluations = (line for line in recorded if line["update"] < training.progress.updates)
    gather = training.engine.gather
    return BestCheckpoint(
        train.keep_best, train.patience, training.checkpoints, gather, evaluations
    )


def _speeds(training: Training, rank: int, ranks: int, *, before: Speeds | None) -> Speeds | None:
    """Return what deals work by speed in a new group. Collective.

    Args:
        before: of the group before, on a rank that was in it.
    """
    config, checkpoints = training.config, training.checkpoints
    if changes := training.recorded_speeds:
        if ranks == len(changes[0][1]):
            return RecordedSpeeds(changes)
        if rank == 0:
            warn(
                f"{BALANCE}={config.accumulation.balance} has the speeds of "
                f"{len(changes[0][1])} ranks, but there are {ranks} now: work is dealt evenly"
            )
    if config.accumulation.balance != "measured":
        checkpoints.speeds = []  # of an attempt that measured
        return None
    if ranks == 1:
        return None
    # Each loader worker has two micro-batches waiting; a window of the fewest has one.
    ahead = 2 * config.train.loader_workers + SPARE_WINDOWS
    speeds = MeasuredSpeeds.begin(
        rank,
        training.progress.updates,
        ahead,
        training.engine.gather,
        known=(
            before.own
            if isinstance(before, MeasuredSpeeds)
            else known_speed(checkpoints.speeds, rank)
        ),
    )
    checkpoints.speeds = speeds.rows
    return speeds


def _save_before_failing(worker: WorkerProcess, training: Training, error: Exception) -> None:
    """Save the state of the last boundary on a rank whose own code failed in a window, if no other
    rank can: all of them may have failed in this way. Not within a boundary, whose state is no
    update's, and not after a stop or where replicas differ.
    """
    if training.in_boundary or isinstance(error, StopRequested | ReplicasDiffer):
        return
    worker.fail(error)  # first: saving may fail as well, or take long
    try:
        _save_last_boundary(worker, training, failed=True)
    except Exception as another:  # noqa: BLE001  # a consequence of the first one, perhaps
        warn(f"the state after update {training.progress.updates} is not saved: {another}")


def _save_last_boundary(worker: WorkerProcess, training: Training, *, failed: bool = False) -> None:
    """Save the state of the last boundary, unless another rank does. Not collective.

    Args:
        failed: this rank itself has failed, so that others come first.
    """
    progress, membership = training.progress, training.membership
    if not (progress.updates and training.saves_on_failure):
        return
    saver = worker.link.await_saver(progress.updates, failed=failed)
    saves = training.recorder is not None if saver is None else saver == worker.topology.rank
    if not saves:
        return
    if worker.topology.scheduled:
        worker.fence.check()
    if not training.checkpoints.has(progress.updates):
        training.checkpoints.save_now(progress)
    training.complete_record(() if membership is None else membership.changes)


def _compute(loop: TrainingLoop, training: Training, stop: StopFlag) -> None:
    """Compute the windows of one group."""
    engine, training.in_boundary = training.engine, False
    if last := training.progress.updates:  # what follows it may come first, after a loss say
        current_run.set_update(last - 1, loop.windows.epoch_of(last - 1))
    batches = engine.batches(loop.micro_batches(loop.progress.updates))
    for window in loop:
        current_run.set_update(window.update, window.epoch)
        engine.begin_window(window)
        for number, micro_batch in enumerate(window.micro_batches):
            loop.begin_micro_step(window, number)
            engine.micro_step(next(batches), micro_batch)
        loop.begin_micro_step(window, window.steps)
        stops = stop.requested or loop.wants_stop(window.update)
        training.in_boundary = True
        loop.end_window(engine.boundary(stop=stops))
        training.in_boundary = False


def _callbacks(worker: WorkerProcess, training: Training) -> list[Callback]:
    """Return the callbacks of this rank's loop in a new group."""
    run, attempt = worker.run, worker.attempt
    recorder, progress = training.recorder, training.progress
    membership, group = training.membership, training.group
    # HCCL cannot be interrupted: only a kill ends a collective that this rank is stuck in.
    leaves = training.saves_on_failure and group.transport != "hccl"
    worker.link.saves_on_failure = leaves
    if leaves:  # a rank that is no neighbour of the failed one would wait on
        interrupt = membership.interrupt if membership else cast("Any", group).interrupt
        worker.link.on_run_failed = interrupt
    callbacks: list[Callback] = [] if training.membership is None else [training.membership]
    callbacks.append(PositionMarks(worker.link))
    if recorder is None:
        if worker.topology.scheduled:
            callbacks.append(Follower(worker.stop, run.departure(attempt)))
        return [*callbacks, *training.callbacks]
    # The note says how the attempt began. A later group has an update of this attempt behind it, or
    # went back to a checkpoint.
    if attempt and progress.done is None and not progress.returned:
        note = restart_note(run, attempt, worker.topology, progress.updates)
        recorder.note["restart"] = note
        write_json(run.restart(attempt), note)
    callbacks += [training.checkpoints, recorder]
    if worker.topology.scheduled:
        callbacks.append(
            LeaveInTime(
                training.checkpoints,
                fence=worker.fence,
                stop=worker.stop,
                grace=worker.grace,
                cancelled=run.cancel.exists,
                progress=progress,
            )
        )
    return [*callbacks, *training.callbacks]
