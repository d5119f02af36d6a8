"""Base of every group: rank, traffic counters, silence in mid-window."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from orchestrator.engine.api import Counters
from orchestrator.errors import SilenceError


class Silence:
    """Ban on collectives between boundaries. One belongs to each group.

    The engine's own reductions start from gradient hooks, which may run on autograd's threads; so
    the exemption is per thread, and the rule is for all of them.

    Attributes:
        reason: while set, collectives are refused; it says when: "in mid-window of update 3".
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._exempt = threading.local()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Allow this thread's collectives meanwhile: the engine's own."""
        before = getattr(self._exempt, "on", False)
        self._exempt.on = True
        try:
            yield
        finally:
            self._exempt.on = before

    def check(self, operation: str) -> None:
        """Raise `SilenceError` when `operation` may not run now."""
        if self.reason is not None and not getattr(self._exempt, "on", False):
            raise SilenceError(
                f"the collective '{operation}' was called {self.reason}; ranks talk only at the "
                "boundary. Move it there, or set `talks_in_window = True` in the job's class when "
                "every rank calls it equally often"
            )


Mark = tuple[int, int, int]
"""Counts of a group at one moment: collectives, bytes handed, share of the wire."""


class Member:
    """Base of all groups.

    Args:
        rank, size: this rank, and how many there are.
        generation: number of this group among those of its attempt.
        transport: name of what carries the bytes.
    """

    def __init__(self, *, rank: int, size: int, generation: int = 0, transport: str) -> None:
        self.rank, self.size, self.generation = rank, size, generation
        self.transport = transport
        self.counters = Counters()
        self._share = 0  # bytes on the wire times R: exact where the quotient is not whole
        self.silence = Silence()

    def mark(self) -> Mark:
        """Return the current counts, for `since`."""
        return self.counters.collectives, self.counters.bytes_handed, self._share

    def since(self, mark: Mark) -> Counters:
        """Return the traffic since `mark`; bytes on the wire are rounded up once."""
        collectives, bytes_handed, share = mark
        return Counters(
            collectives=self.counters.collectives - collectives,
            bytes_handed=self.counters.bytes_handed - bytes_handed,
            bytes_on_wire=-(-(self._share - share) // self.size),
        )

    def _admit(self, operation: str, bytes_handed: int, share: int) -> None:
        """Check that a collective may run now, and count it; a lone rank sends nothing.

        Args:
            share: bytes that all ranks together have to send for it.

        Raises:
            SilenceError: ranks are to be silent.
        """
        if self.silence.reason is not None:
            self.silence.check(operation)
        if self.size == 1:
            return
        self._share += share
        self.counters.collectives += 1
        self.counters.bytes_handed += bytes_handed
        self.counters.bytes_on_wire = -(-self._share // self.size)


def checked_sizes(
    shape: Sequence[int], sizes: Sequence[int] | None, rank: int, ranks: int
) -> tuple[int, ...]:
    """Return the leading sizes of all ranks' tensors, this one's being of `shape`.

    Raises:
        ValueError: they cannot be right.
    """
    if not shape:
        raise ValueError("a tensor to gather needs an axis 0, but has none; use tensor.reshape(1)")
    if sizes is None:
        return (shape[0],) * ranks
    if len(sizes) != ranks or sizes[rank] != shape[0] or min(sizes) < 0:
        raise ValueError(
            f"`sizes` must be the {ranks} ranks' leading sizes, with {shape[0]} for rank {rank}, "
            f"but is {list(sizes)}"
        )
    return tuple(sizes)
