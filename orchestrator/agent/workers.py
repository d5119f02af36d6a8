"""The worker processes of one node: started, watched, restarted and ended by their agent.

Workers are children of the agent, so their ends come from `waitpid`. Whether one is stopped,
computing or asleep comes from `/proc`. Each worker reports its position in training in a line a
second over a socket pair (`trainer/agent_link.py` is the other end). Once a second the agent judges
each worker's progress by that (`judge.py`), reports changes to the coordinator, and warns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.agent.judge import Standing, Work, WorkerJudge
from orchestrator.agent.links import Link
from orchestrator.agent.liveness import (
    BEAT_S,
    FAILED,
    LINK_VARIABLE,
    RankPosition,
    WorkerLiveness,
)
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.processes import (
    adopt_orphans,
    asleep_in,
    descendants,
    fork_session,
    state_of,
    wait_readable,
)
from orchestrator.agent.programs import RankProgram
from orchestrator.agent.rank_log import append_line
from orchestrator.agent.stacks import (
    STACK_SIGNAL,
    ProcessStacks,
    as_lines,
    describe_stack,
)
from orchestrator.agent.topology import INCARNATION_VARIABLE
from orchestrator.errors import EXIT_FAILED
from orchestrator.interrupt import catches
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import failure_record
from orchestrator.rundir.warnings import warn_of

log = logging.getLogger(__name__)

KILL_DEADLINE_S = 5.0
LINGER_S = 1.0
"""Time for processes that end by themselves once the ranks have: loaders, trackers."""
OOM_SCORE = 500
"""Of workers, so that the kernel does not choose the agent when memory is short."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

Report = Callable[[dict[str, Any]], None]


class BecomeWorker(BaseException):  # control flow, not an error
    """Raised in the process of a new worker, of `rank`, to leave the agent's loop behind."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


@dataclass(slots=True)
class Worker:
    """Worker process of this node.

    Attributes:
        incarnation: how many processes had this rank before in this attempt.
        judge: of its progress, until it becomes a program.
        program: what it has become by exec, if it has.
        children: the request for its children's stacks, while its progress is unusual.
        warned: of the present stay; ending: its children are asked for their stacks once more;
            hangs: reported to the coordinator, which ends it; taken back if it moves before that.
        child_stopped_since: agent's time from which each look has found a child of it stopped
            (SIGSTOP); None if the latest has not.
        killed: by the coordinator's command.
        latest_events: its newest message of each kind that the coordinator needs.
        status: exit status as of `subprocess`; None while it runs.
        ended: monotonic time of its end.
    """

    rank: int
    incarnation: int
    signs: WorkerLiveness
    link: Link
    judge: WorkerJudge
    program: RankProgram | None = None
    children: ProcessStacks | None = None
    warned: bool = False
    ending: bool = False
    hangs: bool = False
    child_stopped_since: float | None = None
    killed: bool = False
    status: int | None = None
    ended: float = 0.0
    out_of_memory: bool = False
    latest_events: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def pid(self) -> int:
        return self.signs.pid

    @property
    def seen(self) -> RankPosition:
        return self.program.seen if self.program else self.signs.seen


class Workers:
    """Workers of one node.

    Args:
        selector: of the agent's loop, which calls each key's data.
        report: called with each event about a worker.
        on_fork: called in each new worker, to release what belongs to the agent.
    """

    def __init__(
        self,
        *,
        spec: NodeSpec,
        selector: selectors.BaseSelector,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        on_fork: Callable[[], None] = lambda: None,
    ) -> None:
        adopt_orphans()
        self._spec, self._selector, self._report = spec, selector, report
        self._on_fork = on_fork
        self._ranks = spec.ranks_of(spec.index)
        self._clock, self._keeps_positions = clock, False
        self._stops: dict[str, float] = {}  # monotonic time of the first stop signal of each name
        self._cpus = cpus_in_order()
        self._kills_for_memory, self._killing = kills_for_memory(), False
        self.all: dict[int, Worker] = {}
        self._closed_link = Link(socket.socket())  # of workers that could not be started
        self._closed_link.close()

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.all.values() if worker.status is None]

    # ------------------------------------------------------------------ start

    def start(self, rank: int, incarnation: int) -> None:
        """Fork a worker for a rank.

        Raises:
            BecomeWorker: in the worker.
        """
        if (before := self.all.get(rank)) is not None:
            if before.status is None:
                return
            self._close(before)
        pair: tuple[socket.socket, ...] = ()
        agent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # no stop between fork and ignoring
        try:
            own_end, worker_end = pair = socket.socketpair()
            pid = fork_session()
        except OSError as error:  # no memory, process or descriptor left
            for end in pair:
                end.close()
            cause = (
                f"its process could not be started: {error.strerror}; what limits it: `ulimit -u` "
                "and `-n`, pids.max of the job's cgroup, or memory"
            )
            log.warning("rank %d: %s", rank, cause)
            failed = Worker(
                rank,
                incarnation,
                WorkerLiveness(0),
                self._closed_link,
                WorkerJudge(self._spec.limits),
                status=-signal.SIGKILL,
            )
            failed.ended = time.monotonic()
            if not incarnation:  # else it counts as a replacement that was killed at once
                failed.status, failed.signs.final_state = EXIT_FAILED, FAILED
                node = self._spec.name
                failed.signs.failure = failure_record(rank, node, cause, secondary=False)
            self.all[rank] = failed
            self._report(self.exit_of(failed))
            return
        finally:
            if os.getpid() == agent:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if not pid:
            own_end.close()
            self._become(rank, incarnation, worker_end)
        worker_end.close()
        judge = WorkerJudge(self._spec.limits)
        worker = Worker(
            rank, incarnation, WorkerLiveness(pid), Link(own_end, peer_index=rank), judge
        )
        self.all[rank] = worker
        self._selector.register(own_end, selectors.EVENT_READ, partial(self._hear, worker))
        self._report({"event": "started", "rank": rank, "incarnation": incarnation})
        for name in self._stops:
            self.send(rank, stop=name)

    def _become(self, rank: int, incarnation: int, link: socket.socket) -> None:
        """Run in the fork: release the agent's state and ignore stop signals."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._selector.close()
        self._on_fork()
        for sibling in self.all.values():
            sibling.link.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)  # the node's log, until the worker opens its own
        share, local_rank = self._spec.cpus_per_rank, self._ranks.index(rank)
        # With more CPUs, or with CPUs shared by several nodes, the kernel places better.
        if share and len(self._cpus) == len(self._ranks) * share:
            os.sched_setaffinity(0, self._cpus[local_rank * share : (local_rank + 1) * share])
        score = Path("/proc/self/oom_score_adj")
        try:
            if int(score.read_text("ascii")) < OOM_SCORE:  # lowering it may not be allowed
                score.write_text(str(OOM_SCORE), "ascii")
        except OSError as error:  # a container may forbid it
            log.warning(
                "rank %d could not raise its oom_score_adj (%s): if memory runs out, the kernel "
                "may kill the agent instead of a worker",
                rank,
                error.strerror,
            )
        os.environ["SLURM_PROCID"] = str(rank)
        os.environ["SLURM_LOCALID"] = str(local_rank)
        os.environ[INCARNATION_VARIABLE] = str(incarnation)
        os.environ[LINK_VARIABLE] = str(link.detach())
        raise BecomeWorker(rank)

    # ------------------------------------------------------------------ watch

    def _hear(self, worker: Worker) -> None:
        """Handle messages of a worker."""
        if worker.link.socket.fileno() < 0:  # replaced by an event before this one
            return
        messages = worker.link.receive()
        if messages is None:
            self._close(worker)
            return
        for message in messages:
            if self._keeps_positions:
                message.pop("seen", None)
            worker.signs.receive(message, self._clock())
            if facts := message.get("program"):
                worker.program = RankProgram(
                    self._spec, worker.rank, worker.pid, facts, self._clock
                )
            if "event" in message:
                self._report_of(worker, message)

    def _report_of(self, worker: Worker, event: Mapping[str, Any]) -> None:
        """Report an event about a worker, to a later coordinator as well."""
        own = {"rank": worker.rank, "incarnation": worker.incarnation}
        worker.latest_events[event["event"]] = {**event, **own}
        self._report(worker.latest_events[event["event"]])

    def check_programs(self) -> None:
        """Forward stops to programs, and judge their progress."""
        for worker in self.alive:
            if (program := worker.program) is None:
                continue
            before = program.standing
            program.check(self._stops)
            if program.standing is not before:
                self._report_standing(worker, program.standing, program.stood_s)
            if program.stays:
                os.kill(worker.pid, signal.SIGKILL)  # not reaped, so the pid is its own

    def _close(self, worker: Worker) -> None:
        if worker.link.socket.fileno() >= 0:
            self._selector.unregister(worker.link.socket)
            worker.link.close()

    def judge(self, stopped_limit_s: float) -> None:
        """Report stopped workers, and changes of the others' standing; send what workers have not
        read yet. Call it once a second.

        Args:
            stopped_limit_s: for how long a child of a worker may be stopped (SIGSTOP).
        """
        now = self._clock()
        for worker in self.alive:
            worker.link.flush()
            signs = worker.signs
            if (seconds := signs.stopped_s(now)) is not None:
                worker.child_stopped_since = None  # it may continue before its children do
                self._report(
                    {
                        "event": "stopped",
                        "rank": worker.rank,
                        "seconds": seconds,
                        "seen": worker.seen.to_json(),
                    }
                )
            elif signs.received and not signs.final_state and not signs.program:
                self._judge_worker(worker, now, stopped_limit_s)

    def _judge_worker(self, worker: Worker, now: float, stopped_limit_s: float) -> None:
        """Judge the progress of a worker that sends reports."""
        judge, signs = worker.judge, worker.signs
        stopped_since, worker.child_stopped_since = worker.child_stopped_since, None
        # The stack that a hanging one is asked for may move it; a debugger may hold one.
        if (worker.hangs and self._keeps_positions) or state_of(worker.pid) == "t":
            return
        children: list[int] = []

        def work() -> Work:
            children.extend(descendants(worker.pid))
            return Work.of([worker.pid, *children])

        before = judge.standing
        age_s = now - signs.received
        standing = judge.observe(now, signs.seen, age_s, work)
        stopped = [pid for pid in children if state_of(pid) == "T"]
        if stopped and not signs.seen.declared:
            # One look may fall into a short pause, or see a child that continues after its agent.
            since = worker.child_stopped_since = now if stopped_since is None else stopped_since
            if now - since >= stopped_limit_s:
                if not worker.hangs:
                    child = f"its child process {stopped[0]}"
                    self._report_hang(worker, f"and {child} is stopped (SIGSTOP)")
                return
        if worker.hangs and not judge.hangs:
            # It is alive, so no coordinator has acted on it: the next one must not end it.
            worker.hangs = False
            worker.latest_events.pop("hangs", None)
        if standing in (Standing.MOVES, Standing.WAITS):
            if worker.warned:
                self._write_log(worker.rank, "progress resumed")
            worker.children, worker.warned, worker.ending = None, False, False
        else:
            if worker.children is None:
                worker.children = ProcessStacks(children, self._log_of(worker.rank))
            if worker.children.poll() and not worker.warned:
                worker.warned = True
                self._warn_of_stay(worker, worker.children.text, age_s)
        if standing is not before:
            self._report_standing(worker, standing, judge.stood_s)
        if judge.hangs and not worker.hangs:
            if not worker.ending:  # its children may have moved since the warning
                worker.ending = True
                worker.children = ProcessStacks(children, self._log_of(worker.rank))
            if worker.children is not None and worker.children.poll():
                self._report_hang(worker, "without using a processor (cluster.hang_timeout_s)")

    def _warn_of_stay(self, worker: Worker, children: str, age_s: float) -> None:
        """Warn that a worker has been at one position for unusually long.

        Args:
            children: where its children are.
            age_s: of its latest report.
        """
        seen, stood_s = worker.signs.seen, worker.judge.stood_s
        self._write_log(worker.rank, "\n".join(["its stack:", *as_lines(seen.stack)]))
        does = f" ({seen.declared})" if seen.declared else ""
        silent = "; it sends nothing: its code holds Python's interpreter"
        shown_log = Path(*self._log_of(worker.rank).parts[-2:])
        self.warn(
            worker.rank,
            f"it has stood at {seen.where} for {stood_s:.0f} s{does}, "
            f"{describe_stack(seen.stack)}{children}{silent * (age_s >= 2 * BEAT_S)}; "
            f"{shown_log} has its stack",
            # What it does there is part of the news: first it imports, say, then it prepares data.
            kind=f"standing at {re.sub('[0-9]+', 'n', seen.where + does)}",
        )

    def _report_hang(self, worker: Worker, why: str) -> None:
        """Report to the coordinator that a worker hangs."""
        worker.hangs = True
        seen, age_s = worker.signs.seen, self._clock() - worker.signs.received
        silent = age_s >= 2 * BEAT_S
        if silent:  # its latest report is from before: it no longer waits
            seen = worker.signs.seen = replace(seen, waits="", waited_s=0.0)
        children = worker.children.text if worker.children else ""
        if asleep := asleep_in(worker.pid):
            why += f", asleep in {asleep}: a disk or a file system does not answer"
        if silent:  # where it is now, only its stack can tell, which the coordinator adds
            cause = f"it hangs: it has sent nothing for {age_s:.0f} s {why}"
            cause += "; its code holds Python's interpreter" * (not asleep) + children
        else:
            cause = (
                f"it hangs: it has been at {seen.where} for {worker.judge.stood_s:.0f} s {why}; "
                f"{describe_stack(seen.stack)}{children}"
            )
        lines = ["its stack:", *as_lines(seen.stack)] * (not silent)
        self._write_log(worker.rank, "\n".join([*lines, f"error: {cause}"]))
        self._report_of(
            worker,
            {
                "event": "hangs",
                "cause": cause,
                "asleep": bool(asleep),
                "silent": silent,
                "seen": seen.to_json(),
            },
        )

    def _report_standing(self, worker: Worker, standing: Standing, seconds: float) -> None:
        event = {
            "event": "standing",
            "standing": standing.value,
            "seconds": seconds,
            "program": worker.program is not None,
            "seen": worker.seen.to_json(),
        }
        self._report_of(worker, event)

    def write_stacks(self) -> None:
        """Write each worker's stack, as last reported, to its log."""
        for worker in self.alive:
            if worker.program is None:
                lines = ["its stack:", *as_lines(worker.seen.stack)]
                self._write_log(worker.rank, "\n".join(lines))

    def warn(self, rank: int, sentence: str, *, kind: str | None = None) -> None:
        """Warn about a rank, in its log and in its node's file."""
        self._write_log(rank, f"warning: {sentence}")
        path = RunDir(self._spec.run).warnings(self._spec.attempt, self._spec.index)
        warn_of(path, rank, sentence, kind=kind, about="rank")

    def _log_of(self, rank: int) -> Path:
        return RunDir(self._spec.run).rank_log(rank)

    def _write_log(self, rank: int, text: str) -> None:
        append_line(self._log_of(rank), text)

    def reap(self) -> bool:
        """Collect children that ended, and report workers among them; return whether some live.

        The agent adopts orphans, so without a child it has no descendant.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            worker = next((candidate for candidate in self.alive if candidate.pid == pid), None)
            if worker is None:  # a process that a worker left behind
                continue
            link = worker.link.socket
            while link.fileno() >= 0 and wait_readable([link.fileno()], 0):
                self._hear(worker)  # its final messages
            worker.status, worker.ended = os.waitstatus_to_exitcode(status), time.monotonic()
            # Its forks would keep its connections open, and others waiting. After a stop they may
            # still save something.
            if worker.status < 0 and not self._stops:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            if worker.status == -signal.SIGKILL:
                kills = kills_for_memory()
                worker.out_of_memory = kills > self._kills_for_memory
                self._kills_for_memory = kills
            signs, program = worker.signs, worker.program
            by_us = self._killing or worker.killed
            killed_by_us = by_us and worker.status == -signal.SIGKILL
            if program is not None and not signs.final_state and not killed_by_us:
                signs.final_state, signs.failure = program.end(worker.status)
            self._report(self.exit_of(worker))

    def exit_of(self, worker: Worker) -> dict[str, Any]:
        """Return the event of a worker's end."""
        return {
            "event": "exit",
            "rank": worker.rank,
            "incarnation": worker.incarnation,
            "status": worker.status,
            "out_of_memory": worker.out_of_memory,
            "ago_s": time.monotonic() - worker.ended,
            "final_state": worker.signs.final_state,
            "failure": worker.signs.failure,
            "seen": worker.seen.to_json(),
        }

    def keep_positions(self, *, stacks: bool) -> None:
        """Keep each worker's present position as its last; with `stacks`, have them write theirs.

        Later reports are ignored: the failure of another worker, or the signal that requests a
        stack and may wake a sleeper, may have changed them.
        """
        self._keeps_positions = True
        for worker in self.alive if stacks else ():
            if catches(worker.pid, STACK_SIGNAL):  # without the handler the signal would end it
                os.kill(worker.pid, STACK_SIGNAL)

    # ------------------------------------------------------------------ send and end

    def send(self, rank: int | None = None, **message: Any) -> None:
        """Send a message to a worker, if it is of this node and alive, or to all."""
        for worker in self.alive:
            if rank in (None, worker.rank) and worker.link.socket.fileno() >= 0:
                worker.link.send(**message)

    def stop(self, name: str) -> None:
        """Ask all workers to stop, also those that start later, by the name of a signal."""
        self._stops.setdefault(name, time.monotonic())
        self.send(stop=name)

    def kill(self, rank: int) -> None:
        """Kill one worker; the others continue without it."""
        worker = self.all.get(rank)
        if worker is not None and worker.status is None:  # not reaped, so the pid is its own
            worker.killed = True
            os.kill(worker.pid, signal.SIGKILL)

    def await_leftovers(self) -> None:
        """Give processes that ended workers have left behind a moment to end by themselves."""
        until = time.monotonic() + LINGER_S
        while self.reap():
            if time.monotonic() >= until:
                log.info("processes that the ranks left running are ended")
                return
            time.sleep(0.01)

    def kill_all(self, spare: Collection[int] = ()) -> None:
        """Kill all descendants, adopted ones included, except those in the sessions `spare`."""
        self._killing = True
        kill_descendants(spare)

    def end_all(self) -> None:
        """Kill all descendants, and wait until none is left."""
        self._killing = True
        end_descendants(self.reap)


def cpus_in_order() -> list[int]:
    """Return the CPUs that this process may use, grouped by core and socket."""

    def core_of(cpu: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            socket, core = (
                int((topology / name).read_text("ascii"))
                for name in ("physical_package_id", "core_id")
            )
        except OSError:  # a container may hide it
            return 0, 0, cpu
        return socket, core, cpu

    return sorted(os.sched_getaffinity(0), key=core_of)


def kills_for_memory(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory; 0
    where that is unknown.

    Args:
        groups: the control groups of this process, one a line; `mount`: of their version 2.
    """
    try:
        lines = os.fsdecode(groups.read_bytes()).splitlines()  # a name may hold any bytes
        group = next((line[len("0::") :] for line in lines if line.startswith("0::")), None)
        if group is None:  # version 1, or none
            return 0
        events = (mount / group.lstrip("/") / "memory.events").read_text("ascii")
    except OSError:  # a container may not show it
        return 0
    counts = dict(line.split(maxsplit=1) for line in events.splitlines())
    return int(counts.get("oom_kill", 0))


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Kill all descendants of this process, except those in the sessions `spare`."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) not in spare:
                os.kill(pid, signal.SIGKILL)


def end_descendants(reap: Callable[[], bool] | None = None) -> None:
    """Kill all descendants of this process, which adopts orphans, and wait until none is left.

    Args:
        reap: collects children that ended, and returns whether some live; by default all of them,
            unseen.
    """
    deadline = time.monotonic() + KILL_DEADLINE_S
    # Only the kernel can say that none is left: a list read from /proc misses a process whose
    # parent ends meanwhile.
    while (reap or _reap_all)() and time.monotonic() < deadline:
        kill_descendants()
        time.sleep(0.005)  # between two polls of processes that were just killed


def _reap_all() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
