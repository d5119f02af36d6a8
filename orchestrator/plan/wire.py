"""What one update puts on the wire: how many collectives, how many bytes, how long.

Pure arithmetic on counts. It knows the *layout* of what travels at the boundary (all gradients,
then a short trailer of agreed numbers, cut into equal buckets), not how an engine fills it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import PlanError

LIMBS = 12
"""Numbers of the gradient's type that carry one sum exactly (its digits, so nothing is rounded)."""

SUMS = 4
"""Exact sums beside the metrics': weight, loss, and two that tell whether ranks still agree."""

FLAGS = 6
"""Agreed yes-or-no facts that travel with every boundary (stop, overflow, out of memory, ...)."""

WHOLE, MOST_EARLY, SMALLEST, LARGEST = 3 * 2**20, 8, 2**20, 25 * 2**20
"""How many buckets, of how many bytes, where nobody says; see `bucket_count`."""


def trailer_numbers(metric_count: int) -> int:
    """How many numbers follow the gradients in a boundary's payload.

    `SUMS` sums and each metric take `LIMBS` numbers, the flags `FLAGS` more.

    >>> trailer_numbers(0)
    54
    >>> trailer_numbers(1)
    66

    Raises:
        PlanError: `metric_count` is negative.
    """
    if metric_count < 0:
        raise PlanError(f"the number of metrics is {metric_count}; it must be 0 or more")
    return LIMBS * (SUMS + metric_count) + FLAGS


def padded(parameters: int, ranks: int) -> int:
    """Numbers of a sharded gradient: made up to equal segments, one for each rank.

    >>> padded(10, 4)
    12
    """
    return -(-parameters // ranks) * ranks


def payload_bytes(parameters: int, *, itemsize: int, metric_count: int) -> int:
    """Bytes that one rank hands to one synchronisation: every gradient and the trailer.

    Args:
        parameters: how many numbers the gradient has.
        itemsize: bytes a number (4 for float32, 8 for float64).
        metric_count: metrics that the job reports besides its loss.

    Raises:
        PlanError: a count is negative or `itemsize` is not positive.
    """
    if parameters < 0:
        raise PlanError(f"the number of parameters is {parameters}; it must be 0 or more")
    if itemsize < 1:
        raise PlanError(f"the size of a number is {itemsize} bytes; it must be 1 or more")
    return (parameters + trailer_numbers(metric_count)) * itemsize


def bucket_count(payload: int, bucket_bytes: int | None, *, early: bool = True) -> int:
    """Into how many equal buckets `payload` bytes are cut, so that none is over `bucket_bytes`.

    None: one up to 3 MiB, else eight, which is enough for most of them to travel while the backward
    still computes, but none below 1 MiB, where a collective's latency shows, nor above 25 MiB. Not
    `early`: all travel after the backward, so as few as that bound allows.

    >>> [bucket_count(mib * 2**20, None) for mib in (1, 4, 40, 1000)]
    [1, 4, 8, 40]
    >>> bucket_count(40 * 2**20, None, early=False)
    2
    >>> bucket_count(100, 30)
    4
    """
    if bucket_bytes is None:
        eighth = min(max(-(-payload // MOST_EARLY), SMALLEST), LARGEST)
        bucket_bytes = LARGEST if payload <= WHOLE or not early else eighth
    return max(1, -(-payload // bucket_bytes))


def collectives_per_update(
    parameters: int | None,
    *,
    itemsize: int,
    metric_count: int,
    bucket_bytes: int | None,
    ranks: int,
    sync_steps: int = 1,
    wire_itemsize: int | None = None,
    sharded: bool = False,
    early: bool = True,
) -> int | None:
    """Collectives that each rank takes part in during one update; 0 on a single rank.

    They are all-reduces. With `sharded`, each bucket is a reduce-scatter of the gradient and a
    gather of the weights, and what the trailer says travels in one gather more.

    `sync_steps` is how many times the update synchronises: 1 at the boundary, or K when it does so
    after every micro-step (`accumulation.sync=every_step`). `wire_itemsize` is what a number of the
    gradient has in bytes while it travels, where that is less than `itemsize`; the trailer then
    travels by itself. `early`: buckets leave during the backward. None when `parameters` is unknown
    and there is more than one rank.

    >>> collectives_per_update(
    ...     1_000_000, itemsize=4, metric_count=1, bucket_bytes=1_000_000, ranks=4
    ... )
    5
    >>> collectives_per_update(
    ...     999_000, itemsize=4, metric_count=1, bucket_bytes=1_000_000, ranks=4, sharded=True
    ... )
    9

    Raises:
        PlanError: a count that is not possible (see `payload_bytes`), or `bucket_bytes`, `ranks`
            or `sync_steps` below 1.
    """
    _check(ranks=ranks, sync_steps=sync_steps)
    if bucket_bytes is not None and bucket_bytes < 1:
        raise PlanError(f"the size of a bucket is {bucket_bytes} bytes; it must be 1 or more")
    if ranks == 1:
        return 0
    if parameters is None:
        return None
    if sharded:
        return 2 * sharded_buckets(parameters, itemsize, bucket_bytes, ranks) + 1
    payload = payload_bytes(parameters, itemsize=itemsize, metric_count=metric_count)
    if wire_itemsize is not None:
        return sync_steps * (bucket_count(parameters * wire_itemsize, bucket_bytes) + 1)
    return sync_steps * bucket_count(payload, bucket_bytes, early=early)


def sharded_buckets(parameters: int, itemsize: int, bucket_bytes: int | None, ranks: int) -> int:
    """Buckets of a sharded gradient: none of them without a number for each rank."""
    numbers = padded(parameters, ranks)
    return min(bucket_count(numbers * itemsize, bucket_bytes), numbers // ranks)


def bytes_on_wire_per_update(
    parameters: int | None,
    *,
    itemsize: int,
    metric_count: int,
    ranks: int,
    sync_steps: int = 1,
    wire_itemsize: int | None = None,
    sharded: bool = False,
) -> int | None:
    """Bytes that each rank must send in one update, at the least: 2(R-1)/R of what it reduces.

    That floor is reached by ring and recursive-halving all-reduces (Patarasuk and Yuan, 2009).
    Rounded up, once per synchronisation; None when `parameters` is unknown, 0 on a single rank.
    With `sharded`, (R-1)/R of the padded gradient and of the weights, and to every other rank
    the numbers of the trailer and a norm, in float64.

    >>> bytes_on_wire_per_update(1_000, itemsize=4, metric_count=0, ranks=4)
    6324
    >>> bytes_on_wire_per_update(1_000, itemsize=4, metric_count=0, ranks=4, wire_itemsize=2)
    3324

    Raises:
        PlanError: see `collectives_per_update`.
    """
    _check(ranks=ranks, sync_steps=sync_steps)
    if ranks == 1:
        return 0
    if parameters is None:
        return None
    if sharded:
        row = 8 * (trailer_numbers(metric_count) + 1)
        return (ranks - 1) * (2 * padded(parameters, ranks) // ranks * itemsize + row)
    payload = payload_bytes(parameters, itemsize=itemsize, metric_count=metric_count)
    if wire_itemsize is not None:
        payload -= parameters * (itemsize - wire_itemsize)
    return sync_steps * -(-2 * (ranks - 1) * payload // ranks)


def bucket_seconds(bucket_bytes: float, *, alpha_s: float, beta_s_per_byte: float) -> float:
    """Predicted seconds for one bucket: t(b) = alpha + beta * b (latency and inverse bandwidth)."""
    return alpha_s + beta_s_per_byte * bucket_bytes


def update_end_s(
    ready_s: Sequence[float],
    bucket_bytes: Sequence[float],
    *,
    compute_s: float,
    alpha_s: float,
    beta_s_per_byte: float,
) -> float:
    """Predicted seconds from an update's start to its end, with buckets sent while computing.

    Bucket i is ready at `ready_s[i]` and the link takes buckets in order, so it starts at
    s_i = max(ready_i, e_{i-1}) and ends at e_i = s_i + alpha + beta * b_i. The update ends when
    both the compute and the last bucket have.

    >>> update_end_s([1.0, 2.0], [10, 10], compute_s=2.0, alpha_s=0.5, beta_s_per_byte=0.1)
    4.0

    Raises:
        PlanError: not as many ready times as buckets.
    """
    if len(ready_s) != len(bucket_bytes):
        raise PlanError(
            f"there are {len(ready_s)} ready times for {len(bucket_bytes)} buckets; "
            "there must be one for each"
        )
    free_s = 0.0
    for ready, size in zip(ready_s, bucket_bytes, strict=True):
        free_s = max(ready, free_s) + bucket_seconds(
            size, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte
        )
    return max(compute_s, free_s)


def _check(*, ranks: int, sync_steps: int) -> None:
    if ranks < 1:
        raise PlanError(f"the number of ranks is {ranks}; it must be 1 or more")
    if sync_steps < 1:
        raise PlanError(f"an update synchronises {sync_steps} times; it must do so at least once")
