"""Network traffic of one update: how many collectives, how many bytes.

Pure arithmetic on counts. It knows the *layout* of what travels at the boundary (all gradients,
then a short trailer of agreed numbers, cut into equal buckets), not how an engine fills it.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import PlanError

LIMBS = 12
"""Numbers of the gradient's type that carry one sum exactly (its digits, so nothing is rounded)."""

SUMS = 4
"""Exact sums in addition to the metrics': weight, loss, and two that show if ranks still agree."""

FLAGS = 6
"""Agreed yes-or-no facts that travel with every boundary (stop, non-finite values, ...)."""

WHOLE, USUAL, LARGEST = 3 * 2**20, 8 * 2**20, 25 * 2**20
FEWEST, MOST = 2, 8
"""Default bytes of buckets, and their number; see `bucket_count`."""


def trailer_numbers(metric_count: int) -> int:
    """Return how many numbers follow the gradients in a boundary's payload.

    `SUMS` sums and each metric take `LIMBS` numbers, the flags `FLAGS` more.

    >>> trailer_numbers(0)
    54
    >>> trailer_numbers(1)
    66
    """
    return LIMBS * (SUMS + metric_count) + FLAGS


def padded(parameters: int, ranks: int) -> int:
    """Return the numbers of a sharded gradient, padded to equal segments, one for each rank.

    >>> padded(10, 4)
    12
    """
    return -(-parameters // ranks) * ranks


def bucket_count(payload: int, bucket_bytes: int | None, *, early: bool = True) -> int:
    """Return how many equal buckets `payload` bytes make, none over `bucket_bytes`.

    None: one up to 3 MiB, else of about 8 MiB, two to eight, so that most of them travel while the
    backward still computes; and none above 25 MiB. More would cost more processor time than the
    overlap gains. Not `early`: all travel after the backward, so as few as that bound allows.

    >>> [bucket_count(mib * 2**20, None) for mib in (1, 4, 30, 100, 1000)]
    [1, 2, 4, 8, 40]
    >>> bucket_count(40 * 2**20, None, early=False)
    2
    >>> bucket_count(100, 30)
    4
    """
    if bucket_bytes is None:
        bucket_bytes = LARGEST
        if early and payload > WHOLE:
            count = min(max(-(-payload // USUAL), FEWEST), MOST)
            bucket_bytes = min(-(-payload // count), LARGEST)
    return max(1, -(-payload // bucket_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Communication of a gradient and its trailer in one update.

    Attributes:
        ranks: R; on a single one nothing travels.
        itemsize: bytes of a number of the gradient.
        metric_count: metrics that the job reports besides its loss.
        bucket_bytes: see `bucket_count`.
        sharded: each rank steps 1/R of the weights.
        early: buckets leave during the backward.

    Raises:
        PlanError: `bucket_bytes` below 1.
    """

    ranks: int
    itemsize: int
    metric_count: int
    bucket_bytes: int | None = None
    sharded: bool = False
    early: bool = True

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise PlanError(
                f"the size of a bucket is {self.bucket_bytes} bytes; it must be 1 or more"
            )

    def collectives(self, parameters: int | None) -> int | None:
        """Return the collectives of each rank in one update; 0 on a single rank.

        They are all-reduces. When `sharded`, each bucket is a reduce-scatter of the gradient and a
        gather of the weights, and the trailer travels in one gather more. None when `parameters` is
        unknown and there is more than one rank.

        >>> Wire(ranks=4, itemsize=4, metric_count=1, bucket_bytes=10**6).collectives(1_000_000)
        5
        >>> sharded = Wire(ranks=4, itemsize=4, metric_count=1, bucket_bytes=10**6, sharded=True)
        >>> sharded.collectives(999_000)
        9
        """
        if self.ranks == 1:
            return 0
        if parameters is None:
            return None
        if self.sharded:
            return 2 * self._sharded_buckets(parameters) + 1
        return bucket_count(self._payload(parameters), self.bucket_bytes, early=self.early)

    def bytes_sent(self, parameters: int | None) -> int | None:
        """Return the least bytes that each rank sends in one update: 2(R-1)/R of those it reduces.

        That floor is reached by ring and recursive-halving all-reduces (Patarasuk and Yuan, 2009).
        Rounded up; None when `parameters` is unknown, 0 on a single rank.
        When `sharded`, (R-1)/R of the padded gradient and of the weights, and to every other rank
        the numbers of the trailer and a norm, in float64.

        >>> Wire(ranks=4, itemsize=4, metric_count=0).bytes_sent(1_000)
        6324
        """
        if self.ranks == 1:
            return 0
        if parameters is None:
            return None
        if self.sharded:
            row = 8 * (trailer_numbers(self.metric_count) + 1)
            shard = padded(parameters, self.ranks) // self.ranks * self.itemsize
            return (self.ranks - 1) * (2 * shard + row)
        return -(-2 * (self.ranks - 1) * self._payload(parameters) // self.ranks)

    def _payload(self, parameters: int) -> int:
        """Return the bytes of one rank in one synchronisation: every gradient and the trailer."""
        return (parameters + trailer_numbers(self.metric_count)) * self.itemsize

    def gathers(self, parameters: int | None) -> int:
        """Return the part of `collectives` that gathers stepped weights from their owners."""
        if not self.sharded or self.ranks == 1 or parameters is None:
            return 0
        return self._sharded_buckets(parameters)

    def _sharded_buckets(self, parameters: int) -> int:
        """Return the number of buckets, 0 without a number for each rank."""
        numbers = padded(parameters, self.ranks)
        return min(bucket_count(numbers * self.itemsize, self.bucket_bytes), numbers // self.ranks)
