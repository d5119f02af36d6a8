"""The other ranks of a node under a scheduler: who gives no sign of life, seen by its neighbour.

No process watches the ranks of a real node, so they watch each other, in a ring. Each stores its
beat, and where it is, in memory that they share: no system call, no file of a shared file system.
Only of a rank whose beat has stopped the kernel is asked what it does (`NodeWatch`): stopped, or
at work with Python's interpreter held, or lost. Where ranks do not share memory, or see each
other's processes (a container of its own for each), nobody is heard, and nobody is judged.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from pathlib import Path

from orchestrator.lifecycle.signs.node_watch import NodeWatch
from orchestrator.lifecycle.signs.processes import state_of
from orchestrator.rundir.files import open_nofollow

RANK = b"SLURM_PROCID="
STEP = b"SLURM_STEP_ID="
SHARED = Path("/dev/shm")  # noqa: S108  # memory; a name of our own, opened as `files` opens
MOST_BYTES = 504
_BEAT = struct.Struct(f"<q{MOST_BYTES}s")


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or somebody else's
        return []


def ranks_beside() -> dict[int, int]:
    """Process ids of this node's other ranks, by rank: children of this process's parent."""
    mine = [v for v in _variables(os.getpid()) if v.startswith(STEP)]
    found: dict[int, int] = {}
    for path in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in map(int, path.read_text(encoding="ascii").split()):
            variables = _variables(pid)
            rank = next((v[len(RANK) :] for v in variables if v.startswith(RANK)), b"")
            if pid != os.getpid() and rank.isdigit() and all(v in variables for v in mine):
                found[int(rank)] = pid
    return found


class Beats:
    """A number and a text of each rank of a node, by its owner; 0 before the first beat.

    The file has no name any more once all ranks of the node have it.

    Raises:
        OSError: there is no memory to share, or a file of that name that is not this user's.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        descriptor = open_nofollow(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(errno.EPERM, f"{path} is somebody else's")
            # Not only made that long: to touch a page that there is no memory for would be fatal.
            os.posix_fallocate(descriptor, 0, _BEAT.size * count)
            self._memory = mmap.mmap(descriptor, _BEAT.size * count)
        finally:
            os.close(descriptor)

    def beat(self, local_rank: int, words: str = "") -> None:
        last = self.of(local_rank)
        content = words.encode(errors="replace")[:MOST_BYTES]
        _BEAT.pack_into(self._memory, _BEAT.size * local_rank, last + 1, content)
        if last == 0 and all(self.of(one) for one in range(self._count)):
            self._path.unlink(missing_ok=True)

    def of(self, local_rank: int) -> int:
        return _BEAT.unpack_from(self._memory, _BEAT.size * local_rank)[0]

    def words_of(self, local_rank: int) -> str:
        said: bytes = _BEAT.unpack_from(self._memory, _BEAT.size * local_rank)[1]
        return said.rstrip(b"\0").decode(errors="replace")


class Siblings:
    """One rank's part in the ring of its node.

    Args:
        ranks: the node's ranks, in the order of their local numbers.
        name: of what they share, the same for all of them and nobody else.
        silence_s, hang_s: for how long one may give no sign of life; sleep in the kernel.
    """

    def __init__(
        self,
        ranks: list[int],
        local_rank: int,
        name: str,
        silence_s: float,
        hang_s: float,
        *,
        folder: Path = SHARED,
    ) -> None:
        self._beats, self._local = Beats(folder / name, len(ranks)), local_rank
        self._next = (local_rank + 1) % len(ranks)
        self._rank, self._heard = ranks[self._next], 0
        self._watch = NodeWatch(silence_s, hang_s)

    def beat(self, words: str = "") -> tuple[int, int, str] | None:
        """Beat, and look at the next: its rank, process id and last words when it has just become
        lost.

        Args:
            words: where this rank is.
        """
        self._beats.beat(self._local, words)
        heard = self._beats.of(self._next)
        if heard and not self._watch.ranks:
            pid = ranks_beside().get(self._rank)
            if pid is None:
                return None
            self._watch.joined(self._rank, pid)
        if heard != self._heard and self._watch.ranks:
            self._heard = heard
            self._watch.hear(self._rank, b"")
        for rank in self._watch.silent():
            pid = self._watch.ranks[rank].pid
            if state_of(pid) not in "XZ":  # who has ended is others' to judge
                return rank, pid, self._beats.words_of(self._next)
        return None
