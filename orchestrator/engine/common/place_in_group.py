"""One rank's place in a group, and the counts of what it sent: the same under every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.engine.api import Counters
from orchestrator.engine.common.no_collectives import Silence


@dataclass(frozen=True, slots=True)
class Mark:
    """A group's counts at one moment, for `Member.since`."""

    collectives: int
    bytes_handed: int
    share: int


class Member:
    """What all groups are built on.

    Args:
        rank, size: this rank, and how many there are.
        generation: number of this group among those of its attempt.
        transport: name of what carries the bytes.
    """

    def __init__(self, *, rank: int, size: int, generation: int = 0, transport: str) -> None:
        self._rank, self._size, self._generation = rank, size, generation
        self._transport = transport
        self._counters = Counters()
        self._share = 0  # bytes on the wire times R: exact where the quotient is not whole
        self.silence = Silence()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def generation(self) -> int:
        """Number of this group among those of its attempt."""
        return self._generation

    @property
    def transport(self) -> str:
        """Name of what carries the bytes."""
        return self._transport

    @property
    def counters(self) -> Counters:
        """What was sent since the group was formed. Only ever grows."""
        return self._counters

    def mark(self) -> Mark:
        """The counts now, to ask `since` about later."""
        return Mark(self._counters.collectives, self._counters.bytes_handed, self._share)

    def since(self, mark: Mark) -> Counters:
        """What was sent since `mark`; bytes on the wire are rounded up once, as the plan does."""
        return Counters(
            collectives=self._counters.collectives - mark.collectives,
            bytes_handed=self._counters.bytes_handed - mark.bytes_handed,
            bytes_on_wire=-(-(self._share - mark.share) // self._size),
        )

    def _count(self, bytes_handed: int, share: int) -> None:
        """One more collective. `share`: bytes that all ranks together have to send for it."""
        self._share += share
        self._counters.collectives += 1
        self._counters.bytes_handed += bytes_handed
        self._counters.bytes_on_wire = -(-self._share // self._size)


def checked_sizes(
    shape: Sequence[int], sizes: Sequence[int] | None, rank: int, ranks: int
) -> tuple[int, ...]:
    """The leading sizes of all ranks' tensors, this one's being of `shape`.

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
