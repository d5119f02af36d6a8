"""A rank whose work is a program: start it as its own launcher would, attend it, say how it ended.

This process stays beside the program and does what a rank does beside training: signs of life, the
log, signals, the report of a failure. It imports no framework. The program ends with it, and what
the program leaves running ends as well.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from orchestrator.config.program import Program, program_of
from orchestrator.config.reading import read_config
from orchestrator.config.schema import Config
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    OrchestratorError,
    RankHangs,
    StopRequested,
)
from orchestrator.inside.stop import read_number, write_number
from orchestrator.inside.variables import NOT_YET
from orchestrator.lifecycle.address import interface_variables
from orchestrator.lifecycle.prctl import adopt_orphans, die_with
from orchestrator.lifecycle.signs.node_watch import FAILED, FINISHED, FROZEN, LINK_VARIABLE, STOPPED
from orchestrator.lifecycle.signs.processes import descendants
from orchestrator.lifecycle.signs.stacks import told_by
from orchestrator.lifecycle.stopping.stop_signals import STOP_SIGNALS, StopFlag
from orchestrator.lifecycle.topology import BASE_ATTEMPT_VARIABLE, OUTER_UMASK_VARIABLE, Topology
from orchestrator.rank.attending.attendance import Attendance
from orchestrator.rank.failure import exit_code
from orchestrator.rank.program import meeting_place, processes
from orchestrator.rank.program.ending import LOOKED_AT_BYTES, describe_end, error_of
from orchestrator.rank.program.environment import (
    Start,
    command_line,
    copies_of,
    environment,
    shown,
)
from orchestrator.rank.program.joining import Joining
from orchestrator.rank.program.passing_on import PassingOn
from orchestrator.rank.program.unheeded import Unheeded
from orchestrator.rank.writing.rank_log import send_output_to
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn, warn_into

TICK_S = 0.25
LOOK_S = 1.0
LAST_WORDS = {EXIT_FINISHED: FINISHED, EXIT_STOPPED: STOPPED}


def run_program(path: Path, attempt: int) -> int:
    """Be one rank of the run at `path`; give the exit code."""
    stop = StopFlag()
    if LINK_VARIABLE not in os.environ or BASE_ATTEMPT_VARIABLE in os.environ:
        stop.install()  # else the agent acts on signals, and this process ignores them
    adopt_orphans()
    run, topology = RunDir(path), Topology.from_env(os.environ)
    if topology.scheduled:
        os.environ.update(interface_variables(os.environ, topology.address))
    log = run.rank_log(topology.rank)
    send_output_to(log)
    warn_into(run.warnings(attempt, topology.node_index), topology.rank)
    attendance = Attendance(run, attempt, topology, stop)
    parent = _Parent(run, attempt, topology, stop, attendance)
    code = EXIT_FAILED
    try:
        code = parent.attend()
    except StopRequested:
        code = EXIT_STOPPED
        parent.depart()
    except BaseException as error:  # noqa: BLE001  # whatever ended this rank has to be told to the others
        if attendance.excused(error):
            code = EXIT_STOPPED
        else:
            _say(error)
            attendance.failed(error)
            code = exit_code(error)
    finally:
        parent.end_program()
        attendance.end(LAST_WORDS.get(code, FAILED))
    return code


def _say(error: BaseException) -> None:
    if not isinstance(error, OrchestratorError):
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)


class _Parent:
    """The program of this rank, and what is known of it."""

    def __init__(
        self, run: RunDir, attempt: int, topology: Topology, stop: StopFlag, attendance: Attendance
    ) -> None:
        self._run, self._attempt, self._topology = run, attempt, topology
        self._stop, self._attendance = stop, attendance
        self._log = run.rank_log(topology.rank)
        self._began_at = self._log.stat().st_size
        self._place: meeting_place.MeetingPlace | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._own: set[int] = set()  # children that are ours, not the program's

    def attend(self) -> int:
        """Start the program, attend it to its end, and give this rank's exit code.

        Raises:
            OrchestratorError: it failed, hangs, or could not be started; or it was asked to stop.
        """
        run, rank = self._run, self._topology.rank
        config = read_config(run.existing().read_config())
        program = program_of(config.job)
        self._attendance.begin(config)
        self._attendance.restarted()
        start = self._start_of(config, program)
        child, began = self._begin(start), time.monotonic()
        self._child = child
        self._attendance.at_a_program()
        asked = PassingOn(run, self._attempt, rank, self._stop, self._signal(program))
        status = self._wait(child, start, config, asked)
        if rank == 0:
            ran = {"seconds": time.monotonic() - began}
            write_json(run.program_end(self._attempt), ran)
        said = self._said()
        self._collect()
        agreed = read_number(str(run.stop_after(self._attempt))) != NOT_YET
        if asked.done or (agreed and status == 0):
            if status not in (0, -signal.SIGTERM, -self._signal(program)):
                warn(f"asked to stop, the program {describe_end(status)}", kind="stopped otherwise")
            raise StopRequested("the program ended after it was asked to stop")
        if status:
            raise error_of(status, said, start.error_file)
        return EXIT_FINISHED

    def _start_of(self, config: Config, program: Program) -> Start:
        run, attempt, topology = self._run, self._attempt, self._topology
        timeout_s = config.cluster.rendezvous_timeout_s
        published = run.meeting_place(attempt)
        if topology.rank == 0:  # before any rank looks: file systems remember what was not there
            write_number(str(run.stop_asked(attempt)), NOT_YET)
            write_number(str(run.stop_after(attempt)), NOT_YET)
        if program.style != "plain" and topology.rank == 0:
            self._place = meeting_place.host(published, topology, program.style, timeout_s)
        elif program.style != "plain":
            with for_others():
                self._place = meeting_place.find(
                    published, topology, timeout_s, lambda: self._stop.requested
                )
        return Start(
            program=program,
            topology=topology,
            place=self._place,
            run=run,
            error_file=run.program_error(attempt, topology.rank),
            attempt=attempt,
            most_restarts=config.run.max_restarts,
            timeout_s=timeout_s,
        )

    def _begin(self, start: Start) -> subprocess.Popen[bytes]:
        copies = copies_of(os.environ)
        words = command_line(start.program, copies)
        print(f"attempt {self._attempt}: {' '.join(shown(words))}", flush=True)
        self._own = set(descendants(os.getpid()))
        parent, ignored = os.getpid(), self._ignored(start.program)
        umask = int(os.environ.get(OUTER_UMASK_VARIABLE, "-1"), 8)

        def become() -> None:
            die_with(parent)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        try:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                env=environment(os.environ, start, copies),
                start_new_session=True,
                umask=umask,
                preexec_fn=become,  # noqa: PLW1509  # other threads of ours hold no lock it needs
            )
        except OSError as error:
            named = f"{start.program.target} cannot be started: {error.strerror}"
            raise OrchestratorError(named) from error

    def _ignored(self, program: Program) -> list[signal.Signals]:
        """A scheduler sends its notice to every process of a rank; the program is to hear of it
        once, as the signal that it knows.
        """
        notice = signal.SIGUSR2
        return [notice] if self._topology.scheduled and notice != self._signal(program) else []

    @staticmethod
    def _signal(program: Program) -> signal.Signals:
        return signal.Signals[f"SIG{program.stop_signal}"]

    def _wait(
        self, child: subprocess.Popen[bytes], start: Start, config: Config, asked: PassingOn
    ) -> int:
        """Wait for its end; meanwhile pass a stop on, and look from outside whether it lives."""
        joining = start.place and Joining(
            start.place, self._topology.rank, config.cluster, self._attendance
        )
        unheeded = None
        if self._topology.rank == 0:
            unheeded = Unheeded(self._run, self._attempt, self._topology.size)
        silence_s, stopped_since, look = config.cluster.heartbeat_timeout_s, None, 0.0
        descriptor = os.pidfd_open(child.pid)
        try:
            while child.poll() is None:
                select.select([descriptor], [], [], TICK_S)
                asked.look(child.pid)
                now = time.monotonic()
                if now < look:
                    continue
                look = now + LOOK_S
                if unheeded is not None:
                    unheeded.look(now)
                if not processes.is_stopped(child.pid):
                    stopped_since = None
                    if joining is not None and not self._stop.requested:
                        self._look(joining, child.pid)
                    continue
                stopped_since = stopped_since or now
                if now - stopped_since >= silence_s:
                    raise RankHangs(FROZEN.format(f"{silence_s:g}"))
        finally:
            os.close(descriptor)
        return child.returncode

    def _look(self, joining: Joining, pid: int) -> None:
        """Raises `RankHangs`, with the place of what in the program answers when it is asked."""
        try:
            joining.look(pid)
        except RankHangs as error:
            asked = told_by([pid, *descendants(pid)], self._log)
            raise RankHangs(f"{error}{asked}") from error

    def depart(self) -> None:
        """After a stop: note that the run goes on later, where it does; whoever comes first."""
        if not self._run.departure(self._attempt).exists():
            self._attendance.leave(None)

    def end_program(self) -> None:
        """Whatever happened, nothing of the program is left, and the log ends with a whole line."""
        if self._child is not None and self._child.poll() is None:
            processes.end_all(self._child.pid)
            self._child.wait()
        self._collect()
        if self._place is not None:
            self._place.close()
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):
                print(flush=True)

    def _collect(self) -> None:
        if self._child is not None and (ended := processes.end_leftovers(self._own)):
            print(f"{ended} processes that the program left running were ended", flush=True)

    def _said(self) -> str:
        """The end of what the program said in this attempt."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._began_at, size - LOOKED_AT_BYTES))
            return file.read().decode("utf-8", errors="replace")
