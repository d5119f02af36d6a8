"""Programs: a rank's process that has executed a user's program, as its agent watches it.

A worker becomes its program by `exec` (`trainer/program.py`), so the agent forwards stops as
signals, and sees all else from outside: the exit status, the log, `/proc`, the TCP connections, and
the stacks that py-spy reads.

From outside, a rank that waits for others looks like one that waits for a lock, so no rank is
judged alone: the coordinator warns once all ranks of a program are idle, and ends them once they
have been for `cluster.hang_timeout_s`. A program without a group (`job.style=plain`) is not judged.

A program whose main thread has ended, and which does not exit, is ended as finished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from orchestrator.agent.judge import ProgramJudge, Standing, Work
from orchestrator.agent.liveness import FAILED, FINISHED, STOPPED, RankPosition
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.processes import descendants, state_of, waits_of
from orchestrator.agent.rank_log import append_line
from orchestrator.agent.root_cause import NOT_JOINED, NOT_OPENED, RAISED
from orchestrator.agent.stacks import ProgramStacks, describe_stack
from orchestrator.config.launchers import program_style
from orchestrator.config.program import is_program, program_of
from orchestrator.engine.common.rendezvous import keep_port
from orchestrator.errors import PEER_LOST, OrchestratorError, RunFolderError, describe_status
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import read_end, read_json, read_text, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import failure_record, note_departure, write_failure
from orchestrator.rundir.program_link import (
    DECLARED,
    NOT_YET,
    STOP_HANDLER,
    read_number,
    write_number,
)
from orchestrator.rundir.warnings import About, warn_of

log = logging.getLogger(__name__)

CHECK_S = 1.0
REFRESH_S = 60.0
"""Between two readings of a program's stacks, while it does not move."""
STOP_AGAIN_S = 5.0
"""After which another stop signal is forwarded to the program as well."""
SHOULD_STOP_S = 5.0
"""Within which a rank that calls `should_stop` after every update has called it."""


def host_rendezvous(spec: NodeSpec) -> Callable[[], None]:
    """On the first node, publish where the ranks of a program meet; return how to end that.

    torchrun would look for a free port and let go of it, and another run may take it before the
    program does. Here it is kept until then.
    """
    run = RunDir(spec.run)
    try:
        job: Mapping[str, Any] = run.existing().read_config().get("job") or {}
    except OrchestratorError:  # the workers read the same, and report it in their logs
        job = {}
    if not is_program(job):
        return lambda: None
    for path in (run.stop_requested(spec.attempt), run.stop_after(spec.attempt)):
        write_number(str(path), NOT_YET)  # before any rank looks: file systems cache absent names
    style = program_style(program_of(job).style)
    if not style.forms_group:
        return lambda: None
    if style.rank_0_listens:
        keeper = keep_port(spec.address)
        port, end = keeper.getsockname()[1], keeper.close
    else:
        port, end = style.serve(spec.address, spec.ranks, spec.join_s)
    write_json(run.program_rendezvous(spec.attempt), {"address": spec.address, "port": port})
    return end


class RankProgram:
    """The program of one rank, from its start to its end.

    Args:
        pid: of its first process, which leads its session.
        clock: of the agent, which leaves out the time for which it was suspended.
        facts: what the worker has sent before it became the program:
            `stop_signal`: its name without SIG; `rendezvous`: address and port,
            None without a group; `serves`: this rank's program opens that port; `restarts`: the
            scheduler restarts the run after a stop; `log_bytes`: the size of its log.

    Attributes:
        standing: see `judge.Standing`.
        seen: its position while it does not move, by its stack.
        stood_s: for how long it has not moved.
    """

    def __init__(
        self,
        spec: NodeSpec,
        rank: int,
        pid: int,
        facts: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._spec, self._rank, self._pid = spec, rank, pid
        self._run, self.seen = RunDir(spec.run), RankPosition()
        self._log = self._run.rank_log(rank)
        self._log_bytes, self._restarts = int(facts["log_bytes"]), bool(facts["restarts"])
        self._signal = signal.Signals[f"SIG{facts['stop_signal']}"]
        self._rendezvous: tuple[str, int] | None = (
            tuple(facts["rendezvous"]) if facts["rendezvous"] else None
        )
        self._began = self._checked = time.monotonic()
        self._judge = ProgramJudge(spec.limits, clock())
        self._stacks: ProgramStacks | None = None  # the newest that are complete
        self._request: ProgramStacks | None = None
        self._requested_at = 0.0
        self._own_bytes = 0  # of lines that the agent wrote into the log
        self._serves, self._joined = bool(facts["serves"]), self._rendezvous is None
        self.standing, self.stood_s = Standing.MOVES, 0.0
        self._warned: set[str] = set()
        self._stop_request = str(self._run.stop_requested(spec.attempt))
        self._stop_name = ""  # of the latest signal
        self._stop_sent: float | None = None
        self._sent_to: int | None = None  # None: all processes
        self._unhandled_since: float | None = None

    # ------------------------------------------------------------------ while it runs

    def check(self, stops: Mapping[str, float]) -> None:
        """Forward a stop, and judge once a second whether the program makes progress.

        Args:
            stops: monotonic time of the first stop signal of each name that the agent received.
        """
        now = time.monotonic()
        if stops:
            if not self._stop_name:  # what it waited for may have come, and it saves from now on
                self._judge = ProgramJudge(self._spec.limits, self._clock())
                self.standing, self.seen, self.stood_s = Standing.MOVES, RankPosition(), 0.0
            self._stop_name = max(stops, key=lambda name: stops[name])
            self._forward_stop(now, latest=stops[self._stop_name])
        if now - self._checked < CHECK_S:
            return
        self._checked = now
        if self._rank == 0:
            self.check_all_handle(now)
        if self._rendezvous is not None:
            self._judge_progress(self._clock(), self._rendezvous[1])

    def _forward_stop(self, now: float, *, latest: float) -> None:
        """Forward a stop to the program, as the signal that it knows.

        The process that calls `should_stop` gets it, or the whole program if none does: workers of
        a loader would end by it before the update is done, and the training with them.
        """
        # The process that calls `should_stop`, while it lives.
        handler = read_number(str(self._handler_file(self._rank)))
        if handler not in self._processes() or state_of(handler) in "ZX":
            handler = None
        others_left = self._sent_to is not None and handler is None  # they have not received it
        sent = self._stop_sent
        again = sent is not None and latest > sent and now >= sent + STOP_AGAIN_S
        if sent is not None and not others_left and not again:
            return
        first, self._stop_sent, self._sent_to = self._stop_sent is None, now, handler
        if first and handler is not None and self._agreed_to_stop:
            return  # it knows from the others, or is done: a Python that ends has no handler left
        log.info("asked to stop: %s to the program of rank %d", self._signal.name, self._rank)
        with _log_file_errors():
            write_number(self._stop_request, 0)
        try:
            if handler is None:
                os.killpg(self._pid, self._signal)
            else:
                os.kill(handler, self._signal)
        except ProcessLookupError:  # it has just ended
            return

    def _handler_file(self, rank: int) -> Path:
        return self._run.attempt(self._spec.attempt) / STOP_HANDLER.format(rank)

    @property
    def _agreed_to_stop(self) -> bool:
        """Return whether the ranks of the program agreed to stop."""
        return read_number(str(self._run.stop_after(self._spec.attempt))) != NOT_YET

    def check_all_handle(self, now: float) -> None:
        """Warn once if a stop was asked for, and only some ranks call `should_stop`."""
        if "stop" in self._warned or read_number(self._stop_request) == NOT_YET:
            return
        self._unhandled_since = self._unhandled_since or now
        if now - self._unhandled_since < SHOULD_STOP_S or self._agreed_to_stop:
            return
        ranks = range(self._spec.ranks)
        missing = [str(rank) for rank in ranks if not self._handler_file(rank).exists()]
        self._warned.add("stop")
        if 0 < len(missing) < len(ranks):
            self._warn(
                f"asked to stop, but rank {', '.join(missing)} never called should_stop, as all "
                f"ranks must after every update; the stop waits for that",
                about="run",
            )

    def _judge_progress(self, now: float, port: int) -> None:
        """Judge whether the program makes progress; while it does not, find out where it is."""
        pids = self._processes()
        self._joined = self._joined or has_joined(pids, port)
        is_done = self._stacks is not None and self._stacks.is_done
        standing = self._judge.observe(
            now,
            self._output(),
            Work.of(pids),
            done=is_done,
            waits=waits_of(self._stacks.threads) if self._stacks is not None and is_done else 0,
        )
        self.stood_s = self._judge.stood_s
        if standing is Standing.MOVES:
            self._stacks = self._request = None
            self.seen, self.standing = RankPosition(), standing
            return
        if self._request is None and (
            self._stacks is None or now - self._requested_at >= REFRESH_S
        ):
            self._request, self._requested_at = ProgramStacks(pids), now
        if self._request is not None and self._request.poll():
            self._stacks, self._request = self._request, None
        if self._stacks is None:
            return  # the standing is reported together with the stack
        if self._declared():
            standing = Standing.DECLARED
        elif standing is Standing.IDLE and self._stacks.is_done:
            standing = Standing.DONE
        if standing is not self.standing:
            self._describe(standing, self._stacks)
        self.standing = standing

    def _declared(self) -> str:
        """Return what a loop over `run.windows` has declared to do (`client/run.py`)."""
        path = self._run.attempt(self._spec.attempt) / DECLARED.format(self._rank)
        try:
            return read_text(path)
        except (OSError, RunFolderError):  # it has declared nothing
            return ""

    def _describe(self, standing: Standing, stacks: ProgramStacks) -> None:
        """Note where the program is, in its log and for the coordinator; warn where it alone can
        be meant.
        """
        with _log_file_errors():
            self._write_line("\n".join(["its stacks:", *stacks.dump] if stacks.dump else []))
        where = describe_stack(stacks.stack)
        if stacks.problem:
            where = f"at an unknown place, as its stack cannot be read ({stacks.problem})"
        late = NOT_OPENED if self._serves else NOT_JOINED
        self.seen = RankPosition(
            at=where,
            where="" if self._joined or stacks.is_after_script else late,
            stack=tuple(stacks.stack),
            stood_s=self.stood_s,
        )
        if standing is Standing.BUSY:
            self._warn(
                f"it uses a processor, but has written and reported nothing for {self.stood_s:.0f} "
                f"s, which is unusually long; it is {where}"
            )
        elif standing is Standing.DECLARED:
            self._warn(
                f"it has not moved for {self.stood_s:.0f} s ({self._declared()}); it is {where}"
            )
        elif standing is Standing.DONE:
            self._warn(
                f"it has not exited, although its main thread has ended (its log has the stacks of "
                f"its threads); it is ended as finished after {self._spec.limits.exit_s:.0f} s in "
                f"which none of them wakes"
            )

    def _output(self) -> tuple[int, ...]:
        """Return the sizes of what the program writes, without the agent's own lines."""
        sizes = [-self._own_bytes]
        for path in (self._log, self._run.metrics)[: 1 + (self._rank == 0)]:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        return (sum(sizes[:2]), *sizes[2:])

    @property
    def stays(self) -> bool:
        """Return whether its work is done, and it has to be ended."""
        return self._judge.stays

    def _processes(self) -> list[int]:
        return [self._pid, *descendants(self._pid)]

    def _warn(self, sentence: str, about: About = "rank") -> None:
        """Warn in the rank's log and in its node's file, as ranks of a job do."""
        self._write_line(f"warning: {sentence}")
        path = self._run.warnings(self._spec.attempt, self._spec.index)
        warn_of(path, self._rank, sentence, about=about)

    def _write_line(self, line: str = "") -> None:
        """Append a line to the rank's log, after the end of the program's last one."""
        self._own_bytes += append_line(self._log, line)

    # ------------------------------------------------------------------ its end

    def end(self, status: int) -> tuple[str, dict[str, Any] | None]:
        """Record the program's end, with a status as of `subprocess`; return its final state, and
        its failure if it is one.
        """
        spec = self._spec
        output = ""
        with _log_file_errors():
            written = self._log.stat().st_size - self._log_bytes
            output = read_end(self._log, min(written, LOOKED_AT_BYTES)).decode(errors="replace")
            self._write_line()
        if self._rank == 0:
            seconds = time.monotonic() - self._began
            with _log_file_errors():
                write_json(self._run.program_end(spec.attempt), {"seconds": seconds})
        if self.stays:  # ended by its agent: what its script did counts
            status = 1 if raised_in(output) else 0
            if not status:
                with _log_file_errors():
                    self._warn("it was ended as finished: its work was done, and it did not exit")
        agreed, failure = False, None
        with _log_file_errors():
            agreed = self._agreed_to_stop
            # Of a function of submitit's alone, which says so by itself.
            failure = read_json(self._run.failure(spec.attempt, self._rank))
        if failure is not None:
            return FAILED, failure
        if self._stop_sent is not None or (status == 0 and agreed):
            if status not in (0, -signal.SIGTERM, -self._signal):
                with _log_file_errors():
                    self._warn(f"asked to stop, the program {describe_end(status)}", about="run")
            with _log_file_errors():
                stale = Fence(self._run.newest_attempt, spec.attempt).is_stale
                ends = self._run.cancel.exists() or self._run.departure(spec.attempt).exists()
                if self._restarts and not stale and not ends:  # the run continues later
                    by = f" by {self._stop_name}" if self._stop_name else ""
                    note_departure(self._run, spec.attempt, f"asked to stop{by}")
            return STOPPED, None
        if status == 0:
            return FINISHED, None
        error_file = self._run.program_error(spec.attempt, self._rank)
        cause, secondary = f"the program {describe_end(status)}", False
        with _log_file_errors():
            cause, secondary = cause_of(status, output, error_file)
        failure = failure_record(self._rank, spec.name, cause, secondary=secondary)
        with _log_file_errors():
            write_failure(self._run, spec.attempt, failure)
            self._write_line(f"error: {cause}")
        return FAILED, failure


@contextlib.contextmanager
def _log_file_errors() -> Generator[None]:
    """Only log errors of the file system: a full disk must hide no program's end from the
    coordinator, and no stop from a program.
    """
    try:
        yield
    except (OSError, RunFolderError) as error:
        log.warning("%s", error)


def has_joined(pids: list[int], port: int) -> bool:
    """Return whether one of the processes serves the rendezvous port, or is connected to it."""
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or became another's
            continue
        for connection in connections:
            local, remote = connection.laddr, connection.raddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port:
                return True
            if connection.status == psutil.CONN_ESTABLISHED and remote and remote.port == port:
                return True
    return False


# ----------------------------------------------------------------------
# What a program's end means: its exit status described, what it raised, and whose fault that is.

LOOKED_AT_BYTES = 64 * 1024
MESSAGE_LINES = 3
LONGEST_LINE = 500
LOGGED = re.compile(
    r"\[?(?:rank\d+\]:\[)?(?:(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b|[IWEF]\d{4} \d\d:)"
)
"""Beginning of a line of a log, which threads of frameworks write while an exception is printed."""
RANK_OF_TORCH = re.compile(r"^\[rank[0-9]+\]: ?")  # before each line, once its group is formed
TRACEBACK = "Traceback (most recent call last):"
BY_SHELL = 128


def cause_of(status: int, output: str, error_file: Path) -> tuple[str, bool]:
    """Return what ended the program, and whether another rank's end caused it.

    Args:
        status: as of `subprocess`, not 0.
        output: the end of what the program said in this attempt.
        error_file: what torch's `record` writes, where the script is decorated with it.
    """
    raised: str | None = None
    try:
        value: Any = json.loads(read_end(error_file, LOOKED_AT_BYTES))
        message = value["message"]
        raised = str(message["message"] if isinstance(message, dict) else message)[:LONGEST_LINE]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # another program's file, or none
        pass
    raised = raised or raised_in(output)
    end = describe_end(status)
    if raised is None:
        return end, False
    return f"{raised} ({end})", PEER_LOST.search(raised) is not None


def describe_end(status: int) -> str:
    """Describe an exit status; shells return 128 + n for a child that signal n killed.

    >>> describe_end(-9), describe_end(3)
    ('killed by signal 9 (SIGKILL)', 'exited with code 3')
    >>> describe_end(137)
    'exited with code 137, as a shell does whose program was killed by signal 9 (SIGKILL)'
    """
    text = describe_status(status)
    if status > BY_SHELL and status - BY_SHELL in signal.valid_signals():
        text += f", as a shell does whose program was {describe_status(BY_SHELL - status)}"
    return text


def raised_in(log: str) -> str | None:
    r"""Return the last exception in a log: its line, and the further lines of its text.

    >>> raised_in("x\nTraceback (most recent call last):\n  File …\nValueError: no\n")
    'ValueError: no'
    >>> raised_in("[rank1]: Traceback (most recent call last):\n[rank1]: OSError: 5")
    'OSError: 5'
    >>> raised_in(f"{TRACEBACK}\nValueError: no\nsuch word\n[INFO] DISTRIBUTED(1): Start]\ndone")
    'ValueError: no such word'
    >>> raised_in("all is well\n") is None
    True
    """
    _, marker, after = log.rpartition(TRACEBACK)
    if not marker:
        return None
    lines = [RANK_OF_TORCH.sub("", line) for line in after.splitlines()]
    first = next((i for i, line in enumerate(lines) if RAISED.match(line)), None)
    if first is None:
        return None
    message = takewhile(lambda line: not LOGGED.match(line), lines[first:][:MESSAGE_LINES])
    parts = [line.strip()[:LONGEST_LINE] for line in message]
    return " ".join(filter(None, parts))
