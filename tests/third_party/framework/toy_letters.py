"""A group of letters: every rank leaves its array in the attempt's folder, where all read it."""

import fcntl
import math
import time

import numpy as np

from orchestrator.engine.api import Group
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import PeerLost, RanksMissing, StopRequested
from orchestrator.units import named_ranks


class Letters(Group):
    """A group of NumPy arrays; forming it waits for all ranks."""

    def __init__(self, spec):
        place = {"rank": spec.rank, "size": spec.size, "generation": spec.generation}
        super().__init__(**place, transport="letters")
        self._folder, self._turn = spec.folder / f"letters-{spec.generation}", 0
        self._folder.mkdir(exist_ok=True)
        self._left = self._folder / "left"
        self._alive = self._sign_of_life(self.rank).open("w")  # open as long as we are
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        try:
            self._meet(spec)
        except BaseException:
            self.close()
            raise

    def _meet(self, spec):
        self._stop_requested, self._timeout = spec.stop_requested, spec.timeout_s
        self._letters(b"")  # turn 0: all are there
        self._stop_requested, self._timeout = lambda: False, spec.collective_timeout_s
        try:
            self._letters(b"")  # turn 1: and none has left at a stop that the others saw too late
        except PeerLost:
            if self._left.exists():
                raise StopRequested("another rank was asked to stop before it saw all") from None
            raise

    def all_reduce_sum(self, tensor):
        self._admit("all_reduce_sum", 2 * (self.size - 1) * tensor.nbytes)
        # In the order of ranks, so that all of them have the same bits.
        parts = [np.frombuffer(letter, tensor.dtype) for letter in self._letters(tensor.tobytes())]
        tensor[...] = sum(parts[1:], parts[0]).reshape(tensor.shape)

    def all_gather(self, tensor, sizes=None):
        sizes = self._leading_sizes(tensor.shape, sizes)
        row = tensor.shape[1:]
        gathered = sum(sizes) * math.prod(row) * tensor.itemsize
        self._admit("all_gather", (self.size - 1) * gathered)
        letters = self._letters(tensor.tobytes())
        parts = [np.frombuffer(letter, tensor.dtype) for letter in letters]
        return np.concatenate(parts).reshape((sum(sizes), *row))

    def broadcast(self, tensor, source=0):
        self._admit("broadcast", (self.size - 1) * tensor.nbytes)
        letters = self._letters(tensor.tobytes() if self.rank == source else b"")
        tensor[...] = np.frombuffer(letters[source], tensor.dtype).reshape(tensor.shape)

    def barrier(self):
        self._admit("barrier", 0)
        self._letters(b"")

    def close(self):
        self._alive.close()

    def _sign_of_life(self, rank):
        """A file that a rank has locked; the kernel takes the lock back, however the rank ends."""
        return self._folder / f"alive-{rank}"

    def _letters(self, mine):
        """Return all ranks' letters of this turn, in the order of ranks."""
        turn, self._turn = self._turn, self._turn + 1
        own = self._folder / f"{turn}-{self.rank}"
        own.with_suffix(".part").write_bytes(mine)
        own.with_suffix(".part").rename(own)
        found, until = {}, time.monotonic() + self._timeout
        with for_others("turn %d of their letters", turn):  # who waits does not hang itself
            while missing := [rank for rank in range(self.size) if rank not in found]:
                gone = self._gone(missing[0])  # looked up first: who is gone may have written
                for rank in missing:
                    letter = self._folder / f"{turn}-{rank}"
                    if letter.exists():
                        found[rank] = letter.read_bytes()
                if gone and missing[0] not in found:
                    raise PeerLost(f"rank {self.rank} lost {named_ranks(missing[:1])}")
                if len(found) < self.size:
                    self._look_up(missing, until)
        if turn:  # all have come to this turn, so no rank reads the one before any more
            (self._folder / f"{turn - 1}-{self.rank}").unlink()
        return [found[rank] for rank in range(self.size)]

    def _gone(self, rank):
        if rank == self.rank or not self._sign_of_life(rank).exists():
            return False
        with self._sign_of_life(rank).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return self._turn > 1  # in turn 0 it may not have locked it yet

    def _look_up(self, missing, until):
        if self._stop_requested():
            self._left.touch()
            raise StopRequested("asked to stop before all ranks were there")
        if time.monotonic() > until:
            kind = PeerLost if self._turn > 1 else RanksMissing
            raise kind(f"no letter of {named_ranks(missing)} within {self._timeout:g} s")
        time.sleep(0.001)
