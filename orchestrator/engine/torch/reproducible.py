"""The reproducible reduction: the same bits for any contiguous assignment of leaves to ranks.

Each rank folds the gradients of its leaves into the nodes of a fixed tree as they come. At the
boundary there are three kinds of collectives: every rank sends which leaves it had, with its
trailer; segment s of each node goes to rank s, which adds its segment up along the tree; and the
segments are gathered. Nodes travel one after the other (one round when ranks own equal powers of
two), so no second copy of them is made for packing.

When the caller does not number the leaves, they are numbered at the boundary, after those of the
ranks before. Rank 0 can fold such leaves at once; other ranks keep them until then.

Memory: at most 1 + 2 log2(leaves of a rank) gradient buffers, plus one for each kept leaf. Requires
equal kernels on all ranks; versions and threads are compared at the start.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from orchestrator.engine.api import Counters
from orchestrator.engine.common.trailer import WIDE, Trailer
from orchestrator.engine.torch.buffers import GradientBuffers
from orchestrator.engine.torch.group import BaseGroup, gather_numbers
from orchestrator.engine.torch.reducer import GradientNorm
from orchestrator.errors import PlanError

Range = tuple[int, int]
"""Leaves first..last-1, as (first, last)."""


def middle(lo: int, hi: int) -> int:
    """Return where the node over leaves lo..hi-1 splits.

    >>> middle(0, 10), middle(8, 10), middle(0, 8)
    (8, 9, 4)
    """
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def are_siblings(left: Range, right: Range, leaves: int) -> bool:
    """Return whether two adjacent nodes are the children of one node of the tree over `leaves`
    leaves.

    >>> are_siblings((0, 8), (8, 10), leaves=10), are_siblings((0, 8), (8, 9), leaves=10)
    (True, False)
    """
    size = left[1] - left[0]
    return (
        left[1] == right[0]
        and size.bit_count() == 1
        and left[0] % (2 * size) == 0
        and right[1] == min(left[0] + 2 * size, leaves)
    )


def nodes_of(owned: Range, leaves: int) -> list[Range]:
    """Return the fewest nodes of the tree that make up the range `owned`, from left to right.

    >>> nodes_of((1, 9), leaves=10)
    [(1, 2), (2, 4), (4, 8), (8, 9)]
    >>> nodes_of((0, 10), leaves=10)
    [(0, 10)]
    """

    def within(lo: int, hi: int) -> list[Range]:
        if owned[0] <= lo and hi <= owned[1]:
            return [(lo, hi)]
        if hi <= owned[0] or owned[1] <= lo:
            return []
        split = middle(lo, hi)
        return within(lo, split) + within(split, hi)

    return within(0, leaves) if owned[0] < owned[1] else []


def gap_in(owned: Sequence[Range], leaves: int) -> str:
    """Return which leaf ranks' ranges do not cover exactly once; "" if they cover all.

    >>> gap_in([(0, 4), (0, 0), (4, 10)], leaves=10)
    ''
    >>> gap_in([(0, 4), (5, 10)], leaves=10)
    'leaf 4 belongs to no rank'
    """
    reached = 0
    for first, last in sorted(piece for piece in owned if piece[0] < piece[1]):
        if first > reached:
            return f"leaf {reached} belongs to no rank"
        if first < reached:
            return f"leaf {first} belongs to two ranks"
        reached = last
    return "" if reached == leaves else f"leaf {min(reached, leaves)} belongs to no rank"


# ------------------------------------------------------------------ Reduction


_NO_LEAVES = (0, 0)
_COUNTED = -1  # in the place of the number of leaves: they are counted
_UNKNOWN = 2**62  # leaves of an update; so many that only whole nodes are folded


@dataclass(slots=True)
class _Node:
    leaves: Range
    buffers: GradientBuffers


class ReproducibleReduction:
    """The reduction of reproducible mode; see the module.

    Args:
        buffers: without a trailer, padded to a multiple of the ranks.

    Attributes:
        buffers: the leaf's gradient during a backward, to which `.grad` is attached; the sum after
            `reduce`.
        buffers_made: sets of gradient buffers that exist.
    """

    replicate_traffic = Counters()

    def __init__(self, buffers: GradientBuffers, group: BaseGroup) -> None:
        self._group = group
        self.buffers, self.buffers_made = buffers, 1
        self._free: list[GradientBuffers] = []
        self._spent = False  # the current ones belong to a node, or to the pool, already
        self._stack: list[_Node] = []
        self._leaves: int | None = None
        self._owned: Range = _NO_LEAVES

    def begin(self, leaves: int | None) -> None:
        """Start without nodes. Without `leaves` they are counted as they come."""
        if leaves is not None and leaves < 1:
            raise ValueError(
                "begin_window(leaves=...) is the number of the update's leaves over all ranks, 1 "
                f"or more; it is {leaves}. Without it they are counted as they come"
            )
        stacked = [node.buffers for node in self._stack if node.buffers is not self.buffers]
        self._free = [buffers for buffers in self._free if buffers is not self.buffers] + stacked
        self._stack.clear()
        self._leaves, self._owned, self._spent = leaves, _NO_LEAVES, False
        self.buffers.begin()

    def before_backward(self, *, last: bool, leaf: int | None) -> None:
        """Prepare buffers for a leaf. Raises `ValueError` for one out of turn."""
        del last
        if self._spent:
            self.buffers.complete()  # nothing wrote to the last leaf since it was folded
        else:
            self.buffers.check()
        if self._leaves is None:
            if leaf is not None:
                raise ValueError(
                    f"backward(leaf={leaf}) goes with begin_window(leaves=...), the number of the "
                    "update's leaves over all ranks; without both they are counted as they come"
                )
            leaf = self._owned[1]  # counted from 0 on each rank, until the boundary
        expected = self._owned[1] if self._owned != _NO_LEAVES else leaf
        if leaf is None or leaf != expected or not 0 <= leaf < (self._leaves or _UNKNOWN):
            raise ValueError(
                f"backward(leaf=...) must be the leaf's number below {self._leaves}, one after the "
                f"other on a rank: {expected} is due, but it is {leaf}"
            )
        self._owned = (leaf if self._owned == _NO_LEAVES else self._owned[0], leaf + 1)
        if self._spent:
            self.buffers, self._spent = self._free_buffers(), False
            self.buffers.begin()

    def after_backward(self) -> None:
        """Fold the leaf into the nodes that it completes."""
        self.buffers.complete()
        self._spent = True
        node = _Node((self._owned[1] - 1, self._owned[1]), self.buffers)
        if self._leaves is None and self._group.rank > 0:
            self._stack.append(node)  # its number is known at the boundary
        else:
            self._fold(node, self._leaves or _UNKNOWN)

    @contextmanager
    def aside(self) -> Generator[GradientBuffers]:
        """Direct gradients to further buffers, as for a leaf; the window is as before afterwards.
        For between micro-steps. Takes one more set of buffers if none is free.
        """
        # The latest leaf's may be free already, but the boundary still checks them.
        spare = next((free for free in self._free if free is not self.buffers), None)
        if spare is None:
            self.buffers_made += 1
            spare = self.buffers.clone_layout()
            self._free.append(spare)
        with self.buffers.preserved():
            spare.begin()
            yield spare

    def _free_buffers(self) -> GradientBuffers:
        if self._free:
            return self._free.pop()
        self.buffers_made += 1
        return self.buffers.clone_layout()

    def _fold(self, node: _Node, leaves: int) -> None:
        """Put `node` on the stack, added to its left siblings as long as there are any."""
        while self._stack and are_siblings(self._stack[-1].leaves, node.leaves, leaves):
            sibling = self._stack.pop()
            # Left plus right: the order is a part of what makes the bits the same.
            for total, addend in zip(sibling.buffers.flats, node.buffers.flats, strict=True):
                total.add_(addend)
            self._free.append(node.buffers)
            node = _Node((sibling.leaves[0], node.leaves[1]), sibling.buffers)
        self._stack.append(node)

    def reduce(self, trailer: Trailer) -> tuple[Trailer, GradientNorm]:
        """Sum over ranks along the tree. Collective.

        Returns:
            The sums of the ranks' trailers, and the norm of the summed gradient.

        Raises:
            PlanError: on all ranks alike, when the ranks' leaves are not each of the update's once.
        """
        leaf_count = _COUNTED if self._leaves is None else self._leaves
        rows = gather_numbers(self._group, [*self._owned, leaf_count, *trailer.numbers(WIDE)])
        leaves, owned = self._numbered(rows)
        if wrong := gap_in(owned, leaves):
            raise PlanError(f"of {leaves} leaves of an update, {wrong}: ranks own {owned}")
        if not self._spent:  # a rank without leaves
            self._free.append(self.buffers)
        if leaves == 0:  # all ranks know from the weights
            empty = self._free_buffers()
            empty.begin()
            empty.complete()
            self._use(empty)
        elif self._group.size > 1:
            self._use(self._sum_along_tree([nodes_of(ranges, leaves) for ranges in owned], leaves))
        else:
            self._use(self._stack.pop().buffers)
        norm = GradientNorm()
        for gradient in self.buffers.flat_grads:
            norm.add(gradient)
        # Limbs are whole numbers small enough for float64 to add up those of all ranks exactly.
        totals = [sum(column) for column in zip(*(row[3:] for row in rows), strict=True)]
        return Trailer.from_numbers(totals, WIDE), norm

    def non_finite(self) -> list[str]:
        """Return the parameters whose summed gradient holds NaN or infinity. Not collective."""
        return self.buffers.non_finite()

    def _numbered(self, rows: list[list[float]]) -> tuple[int, list[Range]]:
        """Return the update's leaves, and those of each rank; this rank's nodes are folded with
        them.
        """
        counts = {row[2] for row in rows}
        if len(counts) > 1:
            raise PlanError(
                "ranks do not agree on the update's leaves: begin_window(leaves=...) has to be the "
                f"same on all of them, or on none; it is {[int(row[2]) for row in rows]}"
            )
        if self._leaves is not None:
            return self._leaves, [(int(row[0]), int(row[1])) for row in rows]
        ends = list(accumulate(int(row[1]) for row in rows))
        owned = list(pairwise([0, *ends]))
        first, nodes = owned[self._group.rank][0], self._stack
        self._stack = []
        # Fold again: siblings can be told only by the numbers that the leaves have over all ranks.
        for node in nodes:
            self._fold(
                _Node((node.leaves[0] + first, node.leaves[1] + first), node.buffers), ends[-1]
            )
        return ends[-1], owned

    def _use(self, buffers: GradientBuffers) -> None:
        self.buffers, self._spent = buffers, False
        buffers.attach()

    def _sum_along_tree(self, nodes: list[list[Range]], leaves: int) -> GradientBuffers:
        """Exchange the ranks' `nodes` and add them up; give the buffers that hold the sum."""
        parts: list[dict[Range, Tensor]] = [{} for _ in self.buffers.flats]
        received: list[GradientBuffers] = []
        # As many turns as the rank with most nodes has, since each is collective.
        for turn in range(max(map(len, nodes))):
            into = self._free_buffers()
            received.append(into)
            senders = [ranges[turn] if turn < len(ranges) else None for ranges in nodes]
            own_buffers = self._stack[turn].buffers if turn < len(self._stack) else None
            for number, flat in enumerate(into.flats):
                if not flat.numel():
                    continue
                # This rank's node leaves in segments; the segments that it adds up arrive.
                segment = flat.numel() // self._group.size
                counts = [0 if node is None else segment for node in senders]
                arriving = flat[: sum(counts)]
                leaving = flat[:0] if own_buffers is None else own_buffers.flats[number]
                self._group.all_to_all(arriving, leaving, counts=counts)
                sent = [node for node in senders if node is not None]
                parts[number] |= zip(sent, arriving.split(segment), strict=True)
            if own_buffers is not None:
                self._free.append(own_buffers)  # has been sent, so the next turn may fill it
        self._stack.clear()
        result = self._free_buffers()
        for flat, pieces in zip(result.flats, parts, strict=True):
            if not flat.numel():
                continue
            own_chunk = flat.chunk(self._group.size)[self._group.rank]
            own_chunk.copy_(_total((0, leaves), pieces))
            self._group.gather_in_place_async(flat).wait()
        self._free += received  # only now: the sum was made in place in their parts
        return result


def _total(node: Range, parts: dict[Range, Tensor]) -> Tensor:
    """Return the sum over `node`, in place in its leftmost part."""
    if node in parts:
        return parts[node]
    split = middle(*node)
    return _total((node[0], split), parts).add_(_total((split, node[1]), parts))
