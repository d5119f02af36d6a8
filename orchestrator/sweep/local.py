"""Execution of a sweep's points on this machine, several at once where they fit."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Self

from rich.console import Console

from orchestrator.agent.local_nodes import import_ahead
from orchestrator.agent.processes import fork, name_process
from orchestrator.clusters.api import Share, cluster_of
from orchestrator.config.rules import max_concurrent_points
from orchestrator.config.schema import Config
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    OrchestratorError,
    RunFolderError,
    describe_status,
)
from orchestrator.interrupt import STOP_REQUEST, interrupts
from orchestrator.machine import Machine, free_memory_bytes
from orchestrator.report.sweep_tables import describe_outcome, only_varying
from orchestrator.report.terminal import outlive_reader, say
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import describe_stop
from orchestrator.runs.follow import OutputOptions, run_to_end
from orchestrator.runs.recorded import submission_directory
from orchestrator.sweep.tasks import Action, PointTask, prepared_task

RANK_BYTES = 512 << 20
"""Assumed memory of a rank, mostly for the framework's import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalResources:
    """Resources that one run has taken. `gpus`: by name; none if it computes without."""

    share: Share | None
    gpus: tuple[str, ...]


class LocalCapacity:
    """Resources of this machine for runs at the same time.

    Args:
        most: runs at once, also if they have to share cores; None: as many as there are cores for.
            GPUs are never shared, and memory has to suffice in either case.
        machine: as it was before the first of them.
    """

    def __init__(self, most: int | None = None, machine: Machine | None = None) -> None:
        self.most, self._machine = most, machine or Machine.here()

    def allocate(
        self, taken: Sequence[LocalResources], share: Share | None
    ) -> LocalResources | None:
        """Return the resources of one more run; None if it has to wait for one of these to end.

        A run that is larger than the machine waits until it is alone.
        """
        if taken and (
            share is None or not self._holds([*(resources.share for resources in taken), share])
        ):
            return None
        if taken and share and free_memory_bytes() < share.ranks * RANK_BYTES:
            return None
        used = {name for resources in taken for name in resources.gpus}
        free = [name for name in self._machine.gpus if name not in used]
        return LocalResources(share=share, gpus=tuple(free[: self._gpus_of(share)]))

    def holds_two(self, shares: Sequence[Share | None]) -> bool:
        """Return whether any two of such runs fit at once: the smallest ones do then."""
        able = sorted((s for s in shares if s), key=lambda s: (s.gpus, s.cores, s.ranks))
        return len(able) > 1 and self._holds(able[:2])

    def _holds(self, shares: Sequence[Share | None]) -> bool:
        able = [share for share in shares if share]
        return (
            len(able) == len(shares) <= (self.most or len(shares))
            and (self.most is not None or sum(s.cores for s in able) <= self._machine.cores)
            and sum(map(self._gpus_of, able)) <= len(self._machine.gpus)
            and sum(s.ranks for s in able) * RANK_BYTES <= self._machine.free_memory_bytes
        )

    def _gpus_of(self, share: Share | None) -> int:
        """Return how many GPUs a run uses: none if there are fewer than it has ranks."""
        return share.gpus if share and share.gpus <= len(self._machine.gpus) else 0


POLL_S = 0.1
LEAVE_S = 10.0  # given to a point to end its ranks before it is killed itself
# An interrupt is forwarded as signals of different kinds, so that both are delivered. The first one
# asks for nothing more of a point that was asked to stop already.
FORWARDED = (STOP_REQUEST, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult:
    """The end of a point.

    Attributes:
        exit_code: that of the command that would have launched it alone.
        refusal: why it could not start, or left no result; its folder does not say it then.
    """

    task: PointTask
    exit_code: int
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    task: PointTask
    pid: int
    pipe: Connection
    allocation: LocalResources


class LocalQueue:
    """Points that run here, each in a process of its own.

    While entered it counts interrupts: after the first one nothing more starts, and running points
    stop at their next update boundary, with a checkpoint; the second ends them at once. When it is
    left none is running.

    Args:
        terminal: points write to this command's terminal (there is never more than one), rather
            than to a file in their folder.
    """

    def __init__(
        self, output: OutputOptions, room: LocalCapacity, *, terminal: bool = False
    ) -> None:
        self._output, self._room, self._terminal = output, room, terminal
        self._running: list[_Running] = []
        self._forwarded, self._imported = 0, False
        self._reader = contextlib.ExitStack()

    def __enter__(self) -> Self:
        interrupts.__enter__()
        self._reader.enter_context(outlive_reader(interrupts.once))
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running:
            for number in FORWARDED:  # two interrupts: they end at once, not at a boundary
                os.kill(process.pid, number)
        self._forwarded = len(FORWARDED)
        give_up = time.monotonic() + LEAVE_S
        while self._running and time.monotonic() < give_up:
            self.wait_one(give_up - time.monotonic())
        for process in self._running:
            os.kill(process.pid, signal.SIGKILL)
        while self._running:
            self.wait_one()
        self._reader.close()
        interrupts.__exit__(*error)

    @property
    def running(self) -> Sequence[PointTask]:
        return [process.task for process in self._running]

    def has_room(self, task: PointTask) -> bool:
        """Return True if a point could start now. After an interrupt none can."""
        return self._allocation(task) is not None

    def _allocation(self, task: PointTask) -> LocalResources | None:
        if interrupts.count:
            return None
        taken = [process.allocation for process in self._running]
        return self._room.allocate(taken, cluster_of(task.point.config).share)

    def start(self, task: PointTask) -> bool:
        """Start a point; return False if it has no room yet, or after an interrupt."""
        allocation = self._allocation(task)
        if allocation is None:
            return False
        if not self._imported:
            # Once, in this process, of which the points' nodes are forks.
            self._imported, config = True, task.point.config
            if not config.cluster.environment:  # which may concern the interpreter itself
                request = cluster_of(config).request(task.run.path, 0)
                begun = task.action is Action.RESUME  # perhaps in another folder than this command
                with submission_directory(task.run) if begun else contextlib.nullcontext():
                    import_ahead(config.job, request.environment)
        pipe, its_end = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        counted = {*FORWARDED, signal.SIGINT}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, counted)  # until it counts them itself
        try:
            body = partial(
                _run_point, task, self._output, allocation.gpus, its_end, before, self._terminal
            )
            running = _Running(task=task, pid=fork(body), pipe=pipe, allocation=allocation)
            self._running.append(running)
        finally:
            its_end.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return True

    def wait_one(self, timeout_s: float = math.inf) -> PointResult | None:
        """Wait for a point to end; return None if none runs, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._running:
            self._forward_interrupts()
            left_s = deadline - time.monotonic()
            pipes = [process.pipe for process in self._running]
            for pipe in wait(pipes, max(0.0, min(POLL_S, left_s))):
                return self._result_of(
                    next(process for process in self._running if process.pipe is pipe)
                )
            if left_s <= 0:
                return None
        return None

    def cancel(self, task: PointTask) -> None:
        """Stop a point at its next update boundary, with a checkpoint, if it runs."""
        for process in self._running:
            if process.task.run.path == task.run.path:
                os.kill(process.pid, STOP_REQUEST)

    def _forward_interrupts(self) -> None:
        """Forward interrupts to all points, which are not in the terminal's process group."""
        count = min(interrupts.count, len(FORWARDED))
        if count and not self._forwarded and not self._terminal:
            described = (_describe_stop(process.task.run) for process in self._running)
            ways = dict.fromkeys(filter(None, described))
            what = f"each point that runs {', or '.join(ways)}" if ways else "no more are started"
            text = f"{what}; once more ends every process at once"
            say(self._output.console, text, "yellow")
        for number in FORWARDED[self._forwarded : count]:
            for process in self._running:
                os.kill(process.pid, number)
        self._forwarded = count

    def _result_of(self, process: _Running) -> PointResult:
        """Return the end of a point whose process has reported it, or has died."""
        try:
            report = process.pipe.recv()
        except EOFError:
            report = None
        process.pipe.close()
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        self._running.remove(process)
        run = process.task.run
        if report is not None:
            return PointResult(task=process.task, exit_code=report[0], refusal=report[1])
        has_log = os.path.exists(run.terminal_log)  # noqa: PTH110  # an outage raises nothing
        see = f"; see {run.terminal_log}" if has_log else ""
        why = f"its process ended without a report ({describe_status(status)}){see}"
        return PointResult(task=process.task, exit_code=EXIT_FAILED, refusal=why)


def _describe_stop(run: RunDir) -> str:
    """Return how a point stops; "" before it has begun. An outage of its files delays no stop."""
    try:
        return describe_stop(run) if run.plan.exists() else ""
    except (OSError, RunFolderError):
        return "is asked to stop"


def _describe_outcome(run: RunDir) -> str:
    """Return how a point ended. An outage of its files ends no other point."""
    try:
        return describe_outcome(run)
    except (OSError, RunFolderError) as error:
        return f"ended ({error})"


def _run_point(
    task: PointTask,
    output: OutputOptions,
    gpus: tuple[str, ...],
    pipe: Connection,
    mask: set[int],
    terminal: bool,
) -> int:
    """Run a point to its end, and report (exit code, refusal) through the pipe.

    Args:
        mask: of signals, once they are counted.
        terminal: as of `LocalQueue`.
    """
    name_process(f"point {task.point.number}")
    interrupts.count = 0
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    refusal, code = None, EXIT_FINISHED
    early = os.memfd_create("terminal.log")  # until there is a folder
    if not terminal:
        os.dup2(early, 1)
        output = replace(output, console=Console(width=output.console.width))
    try:
        with prepared_task(task, output) as ready:
            if not terminal:
                sys.stdout.flush()
                log = open_nofollow(task.run.terminal_log, APPENDING)
                for standard in (1, 2):
                    os.dup2(log, standard)
                printed = os.pread(early, os.fstat(early).st_size, 0)
                sys.stdout.write(printed.decode(sys.stdout.encoding, errors="replace"))
                sys.stdout.flush()  # or the run's own processes would inherit the text
            if ready is not None:
                code = run_to_end(ready)
    except OrchestratorError as error:
        refusal, code = str(error), error.exit_code
    pipe.send((code, refusal))
    return code


TIMED = ("accumulation", "cluster", "engine", "transport")
"""Sections whose values people compare by time and memory."""


def run_here(tasks: Sequence[PointTask], output: OutputOptions) -> dict[Path, PointResult]:
    """Run points to their ends, as many at once as `sweep.parallel` and the machine allow: a next
    one starts when one ends.

    Returns:
        Their ends, by folder: of all, or after an interrupt of those that began.
    """
    room = LocalCapacity(most_at_once([task.point.config for task in tasks], output))
    shares = {task.run.path: cluster_of(task.point.config).share for task in tasks}
    alone = not room.holds_two([*shares.values()])
    waiting = list(tasks)
    varying = only_varying([task.point.overrides for task in tasks])
    labels = {task.run.path: task.point.label(o) for task, o in zip(tasks, varying, strict=True)}
    names = {
        task.run.path: f"point {task.run.path.name}"
        + (f" ({' '.join(f'{k}={v}' for k, v in o.items())})" if o else "")
        for task, o in zip(tasks, varying, strict=True)
    }
    ended: dict[Path, PointResult] = {}
    with LocalQueue(output, room, terminal=alone) as queue:
        while True:
            no_room = set[Share | None]()  # thousands of points that use as much may wait
            for task in list(waiting):
                share = shares[task.run.path]
                if share in no_room:
                    continue
                if not queue.has_room(task):
                    no_room.add(share)
                    continue
                if alone:
                    say(output.console, labels[task.run.path], "bold")
                else:
                    output.note(f"{names[task.run.path]} starts", "dim")
                if queue.start(task):  # else an interrupt, or the memory is gone meanwhile
                    waiting.remove(task)
            result = queue.wait_one()
            if result is None:
                return ended
            path, good = result.task.run.path, result.exit_code == EXIT_FINISHED
            ended[path] = result
            if result.refusal is not None:
                say(output.console, f"{names[path]}: {result.refusal}", "bold red")
            elif not alone and not (output.quiet and good):  # alone, it has shown that itself
                counts = f"{len(queue.running)} running, {len(waiting)} waiting"
                rest = counts if queue.running or waiting else "the last"
                style = "green" if good else "bold red"
                say(
                    output.console,
                    f"{names[path]}: {_describe_outcome(result.task.run)} ({rest})",
                    style,
                )


def most_at_once(configs: Sequence[Config], output: OutputOptions) -> int | None:
    """Return the number in `sweep.parallel`; with `auto`, 1 if points differ in keys that set their
    speed, since their times are compared.
    """
    first, *others = configs
    most = max_concurrent_points(first.sweep.parallel)
    unlike = [n for n in TIMED if any(getattr(c, n) != getattr(first, n) for c in others)]
    if most is not None or not unlike:
        return most
    sentence = (
        f"one point after another, since they differ in {', '.join(unlike)}, and their times are "
        f"compared; sweep.parallel=2 runs two at once"
    )
    output.note(sentence, "dim", prose=True)
    return 1
