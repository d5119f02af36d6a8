"""The parent of a program's rank: start it, watch it from outside, report how it ended.

A rank that is stuck before it joins (in an import, say) leaves the others waiting for the half hour
that torch gives it. Its parent sees that the port is served and that the program has no connection
to it. A rank that uses no processor either fails after `cluster.rendezvous_timeout_s`; one that
computes (a data set that is prepared first) after `cluster.collective_timeout_s`. A program that
never forms a group is not judged.

Rank 0 serves the port, so while it is stuck, nothing shows whether others want to connect. It is
only warned of, and blamed once the others give up. MindSpore's port is served by ours.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path

from orchestrator.agent.liveness import FROZEN, ProgressWatchdog, WatchdogTimeouts
from orchestrator.agent.processes import (
    adopt_orphans,
    descendants,
    set_parent_death_signal,
    state_of,
)
from orchestrator.agent.stacks import describe_processes
from orchestrator.agent.topology import OUTER_UMASK_VARIABLE
from orchestrator.agent.workers import STOP_SIGNALS
from orchestrator.config.program import program_of
from orchestrator.config.reading import read_config
from orchestrator.config.schema import Config
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import EXIT_FINISHED, OrchestratorError, RankHangs, StopRequested
from orchestrator.rundir.files import read_end, write_json
from orchestrator.rundir.program_link import NOT_YET, STOP_HANDLER, read_number, write_number
from orchestrator.rundir.warnings import warn
from orchestrator.trainer.program_environment import (
    ProgramRendezvous,
    ProgramStart,
    command_line,
    copies_of,
    environment,
    find,
    host,
)
from orchestrator.trainer.program_processes import (
    LOOKED_AT_BYTES,
    describe_end,
    end_all,
    end_leftovers,
    error_of,
    has_joined,
    is_served,
    is_stopped,
    used_s,
)
from orchestrator.trainer.stop import restart_note
from orchestrator.trainer.worker import WorkerProcess, run_in_worker

log = logging.getLogger(__name__)

TICK_S = 0.25
CHECK_S = 1.0
STOP_AGAIN_S = 5.0
"""After which another stop signal is forwarded to the program as well."""
SHOULD_STOP_S = 5.0
"""Within which a rank that calls `should_stop` after every update has called it."""


def main(path: Path, attempt: int) -> int:
    """Run one rank of a program; return its exit status."""
    adopt_orphans()
    program = ProgramRank()
    return run_in_worker(path, attempt, program.run, program.clean_up)


class Joining:
    """Check for whether a rank's program joins the others. Call `check` each second."""

    def __init__(self, place: ProgramRendezvous, worker: WorkerProcess, config: Config) -> None:
        self._address, self._port = place.address, place.port
        self._serves = worker.topology.rank == 0 and place.scheduler is None
        self._link = worker.link
        self._patience_s = patience_s = config.cluster.rendezvous_timeout_s
        self._most_s = max(config.cluster.collective_timeout_s, patience_s)
        self._began = time.monotonic()
        self._watchdog = ProgressWatchdog(
            WatchdogTimeouts(notice_s=patience_s, most_s=patience_s, hang_s=patience_s / 2)
        )
        self._joined = self._warned = self._reported = False

    def check(self, pid: int) -> None:
        """Raise `RankHangs` once it is certain that the others wait for this rank."""
        if self._joined:
            return
        now = time.monotonic()
        idle, waited_s = self._watchdog.hangs(now, used_s(pid)), now - self._began
        if has_joined(pid, self._port):
            self._joined = True
            self._link.send_behind(None)
        elif waited_s >= self._patience_s and self._serves:
            self._report_unserved(idle=idle)
        elif waited_s >= self._patience_s and is_served(self._address, self._port):
            sentence = (
                f"it has not joined the others, who wait for it at {self._address}:{self._port}, "
                f"in {waited_s:.0f} s"
            )
            if idle:
                raise RankHangs(
                    f"{sentence} (cluster.rendezvous_timeout_s), and uses no processor: it is "
                    f"stuck before its group is formed"
                )
            if waited_s >= self._most_s:
                raise RankHangs(f"{sentence} (cluster.collective_timeout_s)")
            self._warn(f"{sentence}; it is at work, so it is waited for", "not joined")

    def _report_unserved(self, *, idle: bool) -> None:
        """On rank 0: let the agent know, in case the others fail; warn if it is idle."""
        if not self._reported:
            self._reported = True
            self._link.send_behind(
                {
                    "where": "the start of its program",
                    "since": self._began,
                    "at": "and has not opened the port where the ranks meet",
                    "stack": [],
                }
            )
        if idle:
            self._warn(
                f"the program of rank 0 has not opened {self._address}:{self._port}, where the "
                f"ranks meet, in {self._patience_s:g} s (cluster.rendezvous_timeout_s), and uses "
                f"no processor: ranks that wait for it there do so until a time-out of their own",
                "not served",
            )

    def _warn(self, sentence: str, kind: str) -> None:
        if not self._warned:
            self._warned = True
            warn(sentence, kind=kind)


class StopForwarding:
    """Forwards a stop to the program, as the signal that it knows.

    The process that calls `should_stop` gets it, or the whole program if none does: workers of a
    loader would end by it before the update is done, and the training with them.

    Attributes:
        done: whether the program was asked to stop.
    """

    def __init__(self, worker: WorkerProcess, number: signal.Signals) -> None:
        run, attempt, topology = worker.run, worker.attempt, worker.topology
        self._stop, self._number, self._size = worker.stop, number, topology.size
        self._rank, self._folder = topology.rank, run.attempt(attempt)
        self._asked, self._agreed = str(run.stop_asked(attempt)), str(run.stop_after(attempt))
        self._sent_at: float | None = None
        self._sent_to: int | None = None  # None: all processes
        self._unhandled_since: float | None = None
        self._warned = False

    @property
    def done(self) -> bool:
        return self._sent_at is not None

    @property
    def agreed(self) -> bool:
        """Return whether the ranks of the program agreed to stop."""
        return read_number(self._agreed) != NOT_YET

    def check(self, pid: int) -> None:
        """Forward a pending stop. `pid`: of the program's first process, which leads its group."""
        if not self._stop.requested:
            return
        now, handler = time.monotonic(), self._handler(pid)
        others_left = self._sent_to is not None and handler is None  # they have not received it
        if self._sent_at is not None and not others_left:
            again = max(self._stop.times.values()) > self._sent_at
            if not again or now < self._sent_at + STOP_AGAIN_S:
                return
        first, self._sent_at, self._sent_to = self._sent_at is None, now, handler
        if first and handler is not None and self.agreed:
            return  # it knows from the others, or is done: a Python that ends has no handler left
        log.info("asked to stop: %s to the program", self._number.name)
        write_number(self._asked, 0)
        try:
            if handler is None:
                os.killpg(pid, self._number)
            else:
                os.kill(handler, self._number)
        except ProcessLookupError:  # it has just ended
            return

    def _handler(self, pid: int) -> int | None:
        """Return the process that calls `should_stop`, while it lives."""
        found = read_number(str(self._folder / STOP_HANDLER.format(self._rank)))
        ours = found in (pid, *descendants(pid)) and state_of(found) not in "ZX"
        return found if ours else None

    def check_all_handle(self, now: float) -> None:
        """On rank 0, warn once if a stop was asked for, and only some ranks call `should_stop`."""
        if self._warned or self._rank or read_number(self._asked) == NOT_YET:
            return
        self._unhandled_since = self._unhandled_since or now
        if now - self._unhandled_since < SHOULD_STOP_S or self.agreed:
            return
        self._warned = True
        missing = [
            r for r in range(self._size) if not (self._folder / STOP_HANDLER.format(r)).exists()
        ]
        if 0 < len(missing) < self._size:
            named = ", ".join(map(str, missing))
            warn(
                f"asked to stop, but rank {named} never called should_stop, as all ranks must "
                f"after every update; the stop waits for that",
                kind="stop not handled",
            )


class ProgramRank:
    """The program of this rank, from its start to its end."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._place: ProgramRendezvous | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._own: set[int] = set()  # children that are ours, not the program's
        self._log_began = 0

    def run(self, worker: WorkerProcess) -> int:
        """Start the program and wait for its end; return this rank's exit status.

        Raises:
            OrchestratorError: it failed, hangs, or could not be started; or it was asked to stop.
        """
        self._worker = worker
        run, attempt, topology = worker.run, worker.attempt, worker.topology
        self._log_began = run.rank_log(topology.rank).stat().st_size
        config = read_config(run.existing().read_config())
        program = program_of(config.job)
        number = signal.Signals[f"SIG{program.stop_signal}"]
        worker.begin(config)
        if attempt and topology.rank == 0:
            write_json(run.restart(attempt), restart_note(run, attempt, topology, 0))
        start = self._prepare(worker, config)
        # A scheduler signals all processes of a rank; the program expects its own stop signal only.
        ignored = [signal.SIGUSR2] if topology.scheduled and number != signal.SIGUSR2 else []
        began = time.monotonic()
        child = self._child = self._start(start, ignored)
        worker.link.mark("its program", waits=True)
        stop = StopForwarding(worker, number)
        status = self._wait(child, worker, config, stop)
        if topology.rank == 0:
            write_json(run.program_end(attempt), {"seconds": time.monotonic() - began})
        output = self._output(run.rank_log(topology.rank))
        self._end_leftovers()
        if stop.done or (stop.agreed and status == 0):
            if status not in (0, -signal.SIGTERM, -number):
                warn(f"asked to stop, the program {describe_end(status)}", kind="stopped otherwise")
            raise StopRequested("the program ended after it was asked to stop")
        if status:
            raise error_of(status, output, start.error_file)
        return EXIT_FINISHED

    def _prepare(self, worker: WorkerProcess, config: Config) -> ProgramStart:
        run, attempt, topology = worker.run, worker.attempt, worker.topology
        program, timeout_s = program_of(config.job), config.cluster.rendezvous_timeout_s
        published = run.meeting_place(attempt)
        if topology.rank == 0:  # before any rank looks: file systems cache absent names
            write_number(str(run.stop_asked(attempt)), NOT_YET)
            write_number(str(run.stop_after(attempt)), NOT_YET)
        if program.style != "plain" and topology.rank == 0:
            self._place = host(published, topology, program.style, timeout_s)
        elif program.style != "plain":
            with for_others():
                self._place = find(published, timeout_s, lambda: worker.stop.requested)
        return ProgramStart(
            program=program,
            topology=topology,
            place=self._place,
            run=run,
            error_file=run.program_error(attempt, topology.rank),
            attempt=attempt,
            most_restarts=config.run.max_restarts,
            timeout_s=timeout_s,
        )

    def _start(self, start: ProgramStart, ignored: list[signal.Signals]) -> subprocess.Popen[bytes]:
        copies = copies_of(os.environ)
        words = command_line(start.program, start.run, copies, start.attempt)
        log.info("attempt %d: %s", start.attempt, shlex.join(words))
        self._own = set(descendants(os.getpid()))
        parent, umask = os.getpid(), int(os.environ.get(OUTER_UMASK_VARIABLE, "-1"), 8)

        def set_signals() -> None:
            set_parent_death_signal(parent)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        try:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                env=environment(os.environ, start, copies),
                start_new_session=True,
                umask=umask,
                preexec_fn=set_signals,  # noqa: PLW1509  # other threads of ours hold no lock it needs
            )
        except OSError as error:
            named = f"{start.program.target} cannot be started: {error.strerror}"
            raise OrchestratorError(named) from error

    def _wait(
        self,
        child: subprocess.Popen[bytes],
        worker: WorkerProcess,
        config: Config,
        stop: StopForwarding,
    ) -> int:
        """Wait for the program's end; forward a stop, and check from outside for progress.

        Raises:
            RankHangs: with the stack of any process of the program that can be asked for it.
        """
        joining = self._place and Joining(self._place, worker, config)
        silence_s, stopped_since, check = config.cluster.heartbeat_timeout_s, None, 0.0
        descriptor = os.pidfd_open(child.pid)
        try:
            while child.poll() is None:
                select.select([descriptor], [], [], TICK_S)
                stop.check(child.pid)
                now = time.monotonic()
                if now < check:
                    continue
                check = now + CHECK_S
                stop.check_all_handle(now)
                if is_stopped(child.pid):
                    stopped_since = stopped_since or now
                    if now - stopped_since >= silence_s:
                        raise RankHangs(FROZEN.format(f"{silence_s:g}"))
                    continue
                stopped_since = None
                if joining is not None and not worker.stop.requested:
                    try:
                        joining.check(child.pid)
                    except RankHangs as error:
                        log = worker.run.rank_log(worker.topology.rank)
                        where = describe_processes([child.pid, *descendants(child.pid)], log)
                        raise RankHangs(f"{error}{where}") from error
        finally:
            os.close(descriptor)
        return child.returncode

    def _output(self, log: Path) -> str:
        """Return the end of the program's output in this attempt."""
        written = log.stat().st_size - self._log_began
        return read_end(log, min(written, LOOKED_AT_BYTES)).decode("utf-8", errors="replace")

    def _end_leftovers(self) -> None:
        if self._child is not None and (ended := end_leftovers(self._own)):
            log.info("%d processes that the program left running were ended", ended)

    def clean_up(self) -> None:
        """End all processes of the program; end the log with a whole line."""
        if self._child is not None and self._child.poll() is None:
            end_all(self._child.pid)
            self._child.wait()
        self._end_leftovers()
        if self._place is not None:
            self._place.close()
        if self._worker is None:
            return
        if read_end(self._worker.run.rank_log(self._worker.topology.rank), 1) not in (b"", b"\n"):
            print(flush=True)
