"""Faults: drawn from a seed, and injected into the processes of a node from outside.

As a module it is a task of a SLURM step that takes orders from standard input, line by line:
{"word": …, "what": [...]} comes, {"node": …, "gives": [...]} goes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import re
import resource
import select
import socket
import struct
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import psutil

from orchestrator.agent.processes import descendants
from orchestrator.errors import UsageError

PER_RUN = 4
EARLY = 0.7  # of a fault's own part of the run; the rest is for what follows from it

KILL_RANK, KILL_TWO, KILL_NODE = "kill a rank", "kill two ranks", "kill a node"
FREEZE_RANK, STOP, KILL_LAUNCHER = "freeze a rank", "stop, resume", "kill the launcher"
CUT, SILENCE, FILL_DISK = "cut a node's links", "silence a node", "fill the disk"
SIMULATED = (
    KILL_RANK,
    KILL_NODE,
    FREEZE_RANK,
    STOP,
    KILL_TWO,
    KILL_LAUNCHER,
    CUT,
    SILENCE,
    FILL_DISK,
)

KILL_SCRIPT, REQUEUE = "kill the batch script", "requeue"
ASK_TO_LEAVE = "ask to leave"
ON_SLURM = (
    *(kind for kind in SIMULATED if kind != KILL_LAUNCHER),
    KILL_SCRIPT,
    REQUEUE,
    ASK_TO_LEAVE,
)

LINKS = frozenset({CUT, SILENCE})  # these need a kernel that lends a process's connections
ORDERLY = (STOP, REQUEUE, ASK_TO_LEAVE)  # after these, ranks leave between two updates

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, in numbers from 0 to below 1 that fit any run.

    Attributes:
        number: from 0; those of one run follow each other.
        at: place in this fault's part of the run's updates.
        late: place in that update.
        target: place among the ranks or nodes that live then.
    """

    number: int
    kind: str
    at: float
    late: float
    target: float

    def update(self, updates: int) -> int:
        """Return in which update of a run it happens; never the first, nor the last.

        >>> [Fault(number=n, kind="", at=0.99, late=0, target=0).update(20) for n in range(4)]
        [4, 8, 13, 17]
        """
        part = self.number % PER_RUN + EARLY * self.at
        return 1 + int(part / PER_RUN * (updates - 2))

    def choose(self, candidates: Sequence[Item]) -> Item:
        return candidates[int(self.target * len(candidates))]


def draws(seed: int, kinds: Sequence[str]) -> Iterator[Fault]:
    """Yield all kinds in turn, each time in another order. More faults begin with the same ones."""
    chance = random.Random(seed)  # noqa: S311  # it has to repeat
    number = 0
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            at, late, target = chance.random(), chance.random(), chance.random()
            yield Fault(number=number, kind=kind, at=at, late=late, target=target)
            number += 1


_GETFD = 438  # pidfd_getfd's number, on every architecture
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # one instruction of BPF: take 0 bytes of the packet
_libc = ctypes.CDLL(None, use_errno=True)

End = tuple[str, int]
Way = Literal["cut", "deafen", "hear"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """One end of one. `there` is None of a socket that listens."""

    pid: int
    descriptor: int
    here: End
    there: End | None


def connections(pid: int) -> list[Connection]:
    """Return the connections of a process, and where it listens; none of one that has ended."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [
        Connection(
            pid=pid,
            descriptor=one.fd,
            here=(one.laddr.ip, one.laddr.port),
            there=(one.raddr.ip, one.raddr.port) if one.raddr else None,
        )
        for one in found
        if one.laddr
    ]


def change(connection: Connection, way: Way) -> None:
    """Cut it, make this end deaf, or let it hear again. One that is closed meanwhile stays so."""
    try:
        with _lent(connection.pid, connection.descriptor) as lent:
            if way == "cut":
                lent.shutdown(socket.SHUT_RDWR)
            elif way == "deafen":
                program = ctypes.create_string_buffer(_DROP_ALL)
                filter_ = struct.pack("HP", 1, ctypes.addressof(program))
                lent.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filter_)
            else:
                lent.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
    except PermissionError:
        raise
    except OSError:  # its process has closed it, or has ended; a socket that hears has no filter
        return


def check_lending(those: Iterable[Connection] = ()) -> None:
    """Check that this kernel lends our own sockets, and each of `those`.

    Raises:
        UsageError: it does not; says what is missing.
    """
    with closing(socket.socket()) as own:
        for pid, descriptor in [
            (os.getpid(), own.fileno()),
            *((one.pid, one.descriptor) for one in those),
        ]:
            try:
                with _lent(pid, descriptor):
                    pass
            except ProcessLookupError:  # it has ended
                continue
            except OSError as error:
                if error.errno == errno.EBADF:  # it is closed
                    continue
                raise UsageError(
                    f"connections cannot be cut from outside here: pidfd_getfd: {error.strerror} "
                    "(it needs Linux 5.6, a sandbox that allows it, and, on SLURM, "
                    "kernel.yama.ptrace_scope=0)"
                ) from error


@contextmanager
def _lent(pid: int, descriptor: int) -> Generator[socket.socket]:
    process = os.pidfd_open(pid)
    try:
        number = _libc.syscall(_GETFD, process, descriptor, 0)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(process)
    with closing(socket.socket(fileno=number)) as lent:
        yield lent


Ends = Sequence[tuple[End, End]]
METHODS = ("signal", "outward", "cut", "silence", "renew", "fill", "lift")


class FaultInjector:
    """Over the ranks of one run.

    Args:
        find: gives the living ranks that are in reach, with their processes' numbers.
    """

    def __init__(self, find: Callable[[], Mapping[int, int]]) -> None:
        self._find = find
        self._full: dict[int, tuple[int, int]] = {}  # pid: its limits before
        self._deaf: set[Connection] = set()
        self._alone: set[int] = set()  # ranks whose node is cut off in silence

    def ranks(self) -> list[int]:
        return sorted(self._find())

    def signal(self, ranks: Iterable[int], number: int) -> None:
        for pid in self._of(ranks):
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, number)

    # ------------------------------------------------------------------ the network

    def outward(self, ranks: Iterable[int]) -> list[tuple[End, End]]:
        """Both ends of each connection that leads from these ranks to anybody but them."""
        return [(one.here, one.there) for one in self._outward(ranks) if one.there is not None]

    def cut(self, ranks: Iterable[int]) -> None:
        """Cut all of these. They may be made anew at once."""
        self._change(self._outward(ranks), "cut")

    def silence(self, ends: Ends, alone: Iterable[int]) -> None:
        """Make whatever has one of these `ends` deaf, and all that leads to or from the ranks that
        are `alone`, where they listen included: until `lift`, and what is new after each `renew`.
        """
        self._alone = set(alone)
        pairs = [(tuple(here), tuple(there)) for here, there in ends]  # JSON knows lists only
        ours = {*pairs, *((there, here) for here, there in pairs)}
        every = _of_all(self._find().values())
        self._deafen(one for one in every if (one.here, one.there) in ours)
        self.renew()

    def renew(self) -> None:
        """Silence connections made since, too."""
        if self._alone:
            listening = [one for one in self._all(self._alone) if one.there is None]
            self._deafen([*self._outward(self._alone), *listening])

    def _outward(self, ranks: Iterable[int]) -> list[Connection]:
        every = self._all(ranks)
        inside = {(one.there, one.here) for one in every}
        return [one for one in every if one.there and (one.here, one.there) not in inside]

    def _all(self, ranks: Iterable[int]) -> list[Connection]:
        return _of_all(self._of(ranks))

    def _deafen(self, those: Iterable[Connection]) -> None:
        new = set(those) - self._deaf
        self._change(new, "deafen")
        self._deaf |= new

    def _change(self, those: Iterable[Connection], way: Way) -> None:
        for one in those:
            change(one, way)

    # ------------------------------------------------------------------ the disk

    def fill(self, ranks: Iterable[int]) -> None:
        """Let no rank write to a file, as on a full disk, until `lift`: a limit of the kernel's
        (RLIMIT_FSIZE), under which every write ends with an error.
        """
        pids = self._of(ranks)
        for pid in [*pids, *_agents_of(pids)]:
            with suppress(ProcessLookupError):  # it has ended by itself
                before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
                self._full[pid] = before

    def lift(self) -> None:
        """Take back what lasts: there is room again, and who was deaf hears."""
        for pid, before in self._full.items():
            with suppress(ProcessLookupError):  # it has ended since
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        self._change(self._deaf, "hear")
        self._full, self._deaf, self._alone = {}, set(), set()

    def _of(self, ranks: Iterable[int]) -> list[int]:
        found = self._find()
        return [found[rank] for rank in ranks if rank in found]


def _of_all(pids: Iterable[int]) -> list[Connection]:
    """Return the connections of these processes, their descendants and their agents."""
    pids = list(pids)
    every = [one for pid in pids for one in (pid, *descendants(pid))] + _agents_of(pids)
    return [connection for pid in every for connection in connections(pid)]


def _agents_of(pids: Iterable[int]) -> list[int]:
    """Return the agents whose workers these processes are: forks have their agent's command."""
    found: set[int] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            parent = process.parent()
            if parent is not None and parent.cmdline() == process.cmdline():
                found.add(parent.pid)
    return sorted(found)


RENEW_S = 0.02
RANK_NAME = re.compile(r"rank (\d+)")  # as agents name their workers


def ranks_here(run: str) -> Mapping[int, int]:
    """Return the ranks of a run on this node that live and are not stopped: rank -> pid."""
    job, node = os.environ["SLURM_JOB_ID"], os.environ["SLURMD_NODENAME"]
    found: dict[int, int] = {}
    for process in psutil.process_iter(["cmdline", "name"]):
        words = process.info["cmdline"] or []
        name = RANK_NAME.fullmatch(process.info["name"])
        if name is None or not any(word.endswith("node_entry.py") for word in words):
            continue
        try:
            environment, state = process.environ(), process.status()
            parent = process.parent()
        except psutil.Error:  # it has ended, or is somebody else's
            continue
        ours = (environment.get("SLURM_JOB_ID"), environment.get("SLURMD_NODENAME"))
        alive = state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
        its_fork = parent is not None and parent.name() == name[0]
        of_run = ours == (job, node) and any(word.startswith(run) for word in words)
        if of_run and alive and not its_fork:
            found[int(name[1])] = process.pid
    return found


def serve(run: str) -> None:
    """Do what comes on standard input, to its end; then nothing that was done lasts."""
    injector = FaultInjector(lambda: ranks_here(run))
    try:
        check_lending(one for pid in ranks_here(run).values() for one in connections(pid))
        refused = ""
    except UsageError as error:
        refused = str(error)
    _say({"ranks": injector.ranks(), "refused": refused})
    unread = b""
    try:
        while True:
            if not select.select([0], [], [], RENEW_S)[0]:
                injector.renew()
                continue
            content = os.read(0, 65536)
            if not content:
                return
            *lines, unread = (unread + content).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if told["word"] not in METHODS:
                    raise UsageError(f"no injector can {told['word']}")
                _say({"gives": getattr(injector, told["word"])(*told["what"]) or []})
    finally:
        injector.lift()


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"node": os.environ["SLURMD_NODENAME"], **what}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
