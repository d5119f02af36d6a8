"""The parent of a program's rank: start it, watch it from outside, report how it ended.

A rank that is stuck before it joins (in an import, say) leaves the others waiting for the half hour
that torch gives it. Its own parent sees that the place is served and that it has no connection to
it. One that does not use a processor either is given up after `cluster.rendezvous_timeout_s`; one
that computes (a data set that is prepared first) after `cluster.collective_timeout_s`. Nothing is
said of programs that never form a group.

Rank 0 serves the place, so while it is stuck nobody can see that others want to come: an attempt
that is refused leaves no trace, and a program whose first rank only waits may be none that forms a
group. It is warned of, and named once the others give up. MindSpore's place is served by ours.
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

from orchestrator.agent.liveness import (
    AT_WORK,
    FAILED,
    FINISHED,
    FROZEN,
    LINK_VARIABLE,
    STOPPED,
)
from orchestrator.agent.processes import adopt_orphans, descendants, die_with, state_of
from orchestrator.agent.rank_log import send_output_to
from orchestrator.agent.stacks import describe_processes
from orchestrator.agent.topology import OUTER_UMASK_VARIABLE, Topology, interface_variables
from orchestrator.config.program import Program, program_of
from orchestrator.config.reading import read_config
from orchestrator.config.schema import ClusterConfig, Config
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    OrchestratorError,
    RankHangs,
    StopRequested,
)
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.program_link import HEEDS, NOT_YET, read_number, write_number
from orchestrator.rundir.warnings import warn, warn_into
from orchestrator.trainer.attendance import Attendance
from orchestrator.trainer.failure import exit_code
from orchestrator.trainer.program_environment import (
    MeetingPlace,
    Start,
    command_line,
    copies_of,
    environment,
    find,
    host,
    shown,
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
from orchestrator.trainer.stop import STOP_SIGNALS, StopFlag


class Joining:
    """Whether a rank joins the others. `look` is called each second until it has."""

    def __init__(
        self, place: MeetingPlace, rank: int, cluster: ClusterConfig, attendance: Attendance
    ) -> None:
        self._address, self._port = place.address, place.port
        self._serves = rank == 0 and place.scheduler is None
        self._attendance = attendance
        self._patience_s = cluster.rendezvous_timeout_s
        self._most_s = max(cluster.collective_timeout_s, self._patience_s)
        self._began = self._looked = time.monotonic()
        self._idle_since, self._used_s = self._began, 0.0
        self._joined = self._told = self._stands = False

    def look(self, pid: int) -> None:
        """Raise `RankHangs` once it is certain that the others wait for this rank."""
        if self._joined:
            return
        now = time.monotonic()
        used = used_s(pid)
        if used - self._used_s > AT_WORK * (now - self._looked):
            self._idle_since = now
        self._looked, self._used_s = now, used
        if has_joined(pid, self._port):
            self._joined = True
            self._attendance.stands_before(None)
            return
        waited_s = now - self._began
        if waited_s < self._patience_s:
            return
        idle = now - self._idle_since >= self._patience_s / 2
        if self._serves:
            self._does_not_serve(idle=idle)
            return
        if not is_served(self._address, self._port):
            return
        sentence = (
            f"it has not joined the others, who wait for it at {self._address}:{self._port}, in "
            f"{waited_s:.0f} s"
        )
        if idle:
            raise RankHangs(
                f"{sentence} (cluster.rendezvous_timeout_s), and uses no processor: it is stuck "
                f"before its group is formed"
            )
        if waited_s >= self._most_s:
            raise RankHangs(f"{sentence} (cluster.collective_timeout_s)")
        if not self._told:
            self._told = True
            warn(f"{sentence}; it is at work, so it is waited for", kind="not joined")

    def _does_not_serve(self, *, idle: bool) -> None:
        """On rank 0: if the others fail, it is known why; until then who looks on is told."""
        if not self._stands:
            self._stands = True
            self._attendance.stands_before(self._began)
        if idle and not self._told:
            self._told = True
            warn(
                f"the program of rank 0 has not opened {self._address}:{self._port}, where the "
                f"ranks meet, in {self._patience_s:g} s (cluster.rendezvous_timeout_s), and uses "
                f"no processor: whoever waits for it there does so until a time-out of its own",
                kind="not served",
            )


# ----------------------------------------------------------------------
# A stop that came to a rank, on its way to the program: as the signal that the program knows.

AGAIN_S = 5.0  # after which another stop signal of ours is passed on as well


class PassingOn:
    """To the process that asks `should_stop`, or to all of the program where none does. Workers of
    a loader would end by it before the update is done, and take the training with them.

    Args:
        number: the signal.

    Attributes:
        done: whether the program was told to stop.
    """

    def __init__(
        self, run: RunDir, attempt: int, rank: int, stop: StopFlag, number: signal.Signals
    ) -> None:
        self._stop, self._number = stop, number
        self._note = run.attempt(attempt) / HEEDS.format(rank)
        self._asked_file = str(run.stop_asked(attempt))
        self._agreed_file = str(run.stop_after(attempt))
        self._at: float | None = None
        self._told: int | None = None  # which process; all of them, where None

    @property
    def done(self) -> bool:
        return self._at is not None

    def look(self, pid: int) -> None:
        """Pass on what there is. `pid`: of the program's first process, which leads its group."""
        if not self._stop.requested:
            return
        now, heeding = time.monotonic(), self._heeding(pid)
        others_left = self._told is not None and heeding is None  # they have not heard of it
        if self._at is not None and not others_left:
            again = max(self._stop.times.values(), default=0.0) > self._at
            if not again or now < self._at + AGAIN_S:
                return
        first, self._at, self._told = self._at is None, now, heeding
        if first and heeding is not None and read_number(self._agreed_file) != NOT_YET:
            return  # it knows from the others, or is done: a Python that ends has no handler left
        print(f"asked to stop: {self._number.name} to the program", flush=True)
        write_number(self._asked_file, 0)
        try:
            if heeding is None:
                os.killpg(pid, self._number)
            else:
                os.kill(heeding, self._number)
        except ProcessLookupError:  # it has just ended
            return

    def _heeding(self, pid: int) -> int | None:
        """Return the process that asks `should_stop`, while it lives."""
        found = read_number(str(self._note))
        ours = found in (pid, *descendants(pid)) and state_of(found) not in "ZX"
        return found if ours else None


# ----------------------------------------------------------------------
# Ranks of a program that never ask whether to stop, while others do: the stop waits for them.

PATIENCE_S = 5.0  # in which a rank that asks after every update has asked


class Unheeded:
    """Looked at by rank 0's parent, from outside: rank 0 may be one that never asks."""

    def __init__(self, run: RunDir, attempt: int, size: int) -> None:
        self._folder, self._size = run.attempt(attempt), size
        self._asked, self._after = run.stop_asked(attempt), run.stop_after(attempt)
        self._since: float | None = None
        self._told = False

    def look(self, now: float) -> None:
        """Warn once when a stop was asked for some time ago, and only some ranks would heed it.

        Args:
            now: of the monotonic clock.
        """
        if self._told or read_number(str(self._asked)) == NOT_YET:
            return
        self._since = now if self._since is None else self._since
        if now - self._since < PATIENCE_S or read_number(str(self._after)) != NOT_YET:
            return
        self._told = True
        missing = [r for r in range(self._size) if not (self._folder / HEEDS.format(r)).exists()]
        if 0 < len(missing) < self._size:
            named = ", ".join(map(str, missing))
            warn(
                f"asked to stop, but rank {named} never called should_stop, which all ranks must "
                f"after every update; the stop waits for that",
                kind="not heeded",
            )


# ----------------------------------------------------------------------
# A rank whose work is a program: start it as its own launcher would, attend it, say how it ended.

TICK_S = 0.25
LOOK_S = 1.0
LAST_WORDS = {EXIT_FINISHED: FINISHED, EXIT_STOPPED: STOPPED}


def main(path: Path, attempt: int) -> int:
    """Be one rank of the run at `path`; give the exit code."""
    stop = StopFlag()
    if LINK_VARIABLE not in os.environ:
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
    """The program of this rank, from its start to its end."""

    def __init__(
        self, run: RunDir, attempt: int, topology: Topology, stop: StopFlag, attendance: Attendance
    ) -> None:
        self._run, self._attempt, self._topology = run, attempt, topology
        self._stop, self._attendance = stop, attendance
        self._log = run.rank_log(topology.rank)
        self._began_at = self._log.stat().st_size
        self._place: MeetingPlace | None = None
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
            self._place = host(published, topology, program.style, timeout_s)
        elif program.style != "plain":
            with for_others():
                self._place = find(published, topology, timeout_s, lambda: self._stop.requested)
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
        """Return the signals that the program ignores.

        A scheduler sends its notice to all processes of a rank, but the program expects it once, as
        its own stop signal.
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
                if not is_stopped(child.pid):
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
        """Raise `RankHangs` with the stack of any process of the program that answers."""
        try:
            joining.look(pid)
        except RankHangs as error:
            asked = describe_processes([pid, *descendants(pid)], self._log)
            raise RankHangs(f"{error}{asked}") from error

    def depart(self) -> None:
        """Note after a stop that the run continues later, if no other rank has."""
        if not self._run.departure(self._attempt).exists():
            self._attendance.leave(None)

    def end_program(self) -> None:
        """End all processes of the program; end the log with a whole line."""
        if self._child is not None and self._child.poll() is None:
            end_all(self._child.pid)
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
        if self._child is not None and (ended := end_leftovers(self._own)):
            print(f"{ended} processes that the program left running were ended", flush=True)

    def _said(self) -> str:
        """Return the end of the program's output in this attempt."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._began_at, size - LOOKED_AT_BYTES))
            return file.read().decode("utf-8", errors="replace")
