"""The suite that every `Group` passes: ours, the in-process fake, and those of third parties.

    from orchestrator.engine.conformance import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_group(check):
        on_every_rank(lambda group: check(group, MyArrays()))

A check is collective: call it on every rank of a fresh or used group, of any size. It raises
`AssertionError` where the group does not keep its contract. No framework is imported here; `Arrays`
says how to make its tensors and read them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from orchestrator.engine.api import Group

Numbers = Sequence[Any]


class Arrays(Protocol):
    """Access to a framework's float32 tensors."""

    def make(self, values: Numbers, shape: Sequence[int]) -> Any:
        """Return a tensor of `shape` with `values` in row-major order."""
        ...

    def read(self, tensor: Any) -> list[float]:
        """Return the numbers of a tensor in row-major order."""
        ...


def expect(actual: Any, wanted: Any, what: str) -> None:
    """Raise `AssertionError`, with a sentence, unless both are equal."""
    if actual != wanted:
        raise AssertionError(f"{what}: must be {wanted}, but is {actual}")


def knows_itself(group: Group, arrays: Arrays) -> None:
    """Rank, size, generation and transport are what they should be, and ranks are all different."""
    expect(0 <= group.rank < group.size, True, "rank below size")
    expect(group.generation >= 0, True, "generation 0 or more")
    expect(bool(group.transport), True, "transport has a name")
    ranks = arrays.read(group.all_gather(arrays.make([float(group.rank)], [1])))
    expect(ranks, [float(rank) for rank in range(group.size)], "ranks in gathered order")


def sums_in_place(group: Group, arrays: Arrays) -> None:
    """`all_reduce_sum` replaces a tensor of any shape by the sum over ranks."""
    for shape, count in (([3, 2], 6), ([1], 1), ([2, 1, 2], 4)):
        tensor = arrays.make([group.rank + n + 0.5 for n in range(count)], shape)
        group.all_reduce_sum(tensor)
        total = sum(range(group.size))
        wanted = [total + group.size * (n + 0.5) for n in range(count)]
        expect(arrays.read(tensor), wanted, f"all_reduce_sum of shape {shape}")
        expect(list(tensor.shape), list(shape), "shape afterwards")


def gathers_equal_parts(group: Group, arrays: Arrays) -> None:
    """`all_gather` concatenates in rank order and leaves its argument alone."""
    own_part = arrays.make([float(group.rank), -1.0], [1, 2])
    gathered = group.all_gather(own_part)
    wanted = [number for rank in range(group.size) for number in (float(rank), -1.0)]
    expect(arrays.read(gathered), wanted, "all_gather")
    expect(list(gathered.shape), [group.size, 2], "shape of what is gathered")
    expect(arrays.read(own_part), [float(group.rank), -1.0], "what was given")


def gathers_uneven_parts(group: Group, arrays: Arrays) -> None:
    """`all_gather` with `sizes` takes parts of different lengths, none at all included."""
    for sizes in (
        [rank + 1 for rank in range(group.size)],
        [2 * (r % 2) for r in range(group.size)],
    ):
        if not any(sizes):
            continue
        count = sizes[group.rank]
        own_part = arrays.make([float(group.rank)] * (3 * count), [count, 3])
        gathered = group.all_gather(own_part, sizes)
        wanted = [float(rank) for rank, size in enumerate(sizes) for _ in range(3 * size)]
        expect(arrays.read(gathered), wanted, f"all_gather of sizes {sizes}")


def broadcasts_from_any_rank(group: Group, arrays: Arrays) -> None:
    """`broadcast` gives every rank the source's numbers, in place."""
    for source in range(group.size):
        tensor = arrays.make([float(group.rank), 7.0 + group.rank], [2])
        group.broadcast(tensor, source)
        expect(arrays.read(tensor), [float(source), 7.0 + source], f"broadcast from {source}")


def waits_at_barriers(group: Group, arrays: Arrays) -> None:
    """Barriers return on all ranks, time after time."""
    del arrays
    for _ in range(3):
        group.barrier()


def keeps_the_order(group: Group, arrays: Arrays) -> None:
    """Different collectives one after the other do not mix."""
    for turn in range(5):
        tensor = arrays.make([float(turn)], [1])
        group.all_reduce_sum(tensor)
        expect(arrays.read(tensor), [float(turn * group.size)], f"turn {turn}")
        gathered = group.all_gather(arrays.make([float(turn + group.rank)], [1]))
        wanted = [float(turn + rank) for rank in range(group.size)]
        expect(arrays.read(gathered), wanted, f"turn {turn}")


def counts_what_it_sends(group: Group, arrays: Arrays) -> None:
    """Counters grow by the calls and bytes of each collective; a lone rank sends nothing."""

    def expect_sent(call: Callable[[], Any], wanted: tuple[int, int], what: str) -> None:
        mark = group.mark()
        call()
        sent = group.since(mark)
        traffic = (sent.collectives, sent.bytes_on_wire)
        expect(traffic, wanted if group.size > 1 else (0, 0), f"(calls, bytes sent) of {what}")

    ranks = group.size
    numbers = 8 * ranks  # so that every share is a whole number of bytes
    tensor, size = arrays.make([1.0] * numbers, [numbers]), 4 * numbers
    summed = (1, 2 * (ranks - 1) * size // ranks)
    expect_sent(lambda: group.all_reduce_sum(tensor), summed, "all_reduce_sum")
    expect_sent(lambda: group.all_gather(tensor), (1, (ranks - 1) * size), "all_gather")
    expect_sent(group.barrier, (1, 0), "barrier")


CHECKS: tuple[Callable[[Group, Arrays], None], ...] = (
    knows_itself,
    sums_in_place,
    gathers_equal_parts,
    gathers_uneven_parts,
    broadcasts_from_any_rank,
    waits_at_barriers,
    keeps_the_order,
    counts_what_it_sends,
)
