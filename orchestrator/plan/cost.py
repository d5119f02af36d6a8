"""Work by cost: micro-steps formed from the lengths of samples, dealt to ranks by cost and speed.

The samples of an update are sorted by length, the longest first, and cut into micro-steps of at
most so many padded tokens (samples x the longest length). Their numbering, longest first, is the
update's; each rank gets a contiguous run of it, as the reproducible fold needs. Runs are cut so
that the largest cost / speed of a rank is as small as it can be (the linear partition problem, here
by bisection on that bound; Skiena, "The Algorithm Design Manual", 2008, section 8.5).

What makes an update does not change, only who computes which of its samples beside which others. In
reproducible mode micro-steps follow from lengths and positions alone, so they are leaves; in fast
mode they are also formed smaller where ranks could not be balanced otherwise.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import PlanError
from orchestrator.plan.split import Split, even_parts, split_leaves, split_window
from orchestrator.units import plural

if TYPE_CHECKING:  # numpy is loaded on first use: a plan that is only printed does without it
    import numpy as np
    from numpy.typing import NDArray

    from orchestrator.plan.order import DataOrder

MICRO_TOKENS = "accumulation.micro_tokens"

OVERHEAD = 1 / 32
"""What every micro-step takes besides its tokens, as a part of a full one: smaller ones pad less
and balance better, and must gain more than that."""

FEWEST, PER_RANK = 16, 8
"""Micro-steps are not formed smaller than the update in 16 parts, or (in fast mode) 8 for each
rank."""

UNEVEN = 1.2
"""The busiest rank's cost to the mean that is warned of."""

SHRINK = 0.8
"""A try's tokens in a micro-step to those of the try before."""

COMPARED = 64
"""Lengths whose costs are compared between ranks."""

TRIES_IN_VAIN = 5
"""Smaller tries that gain nothing before the search ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """The rule that micro-steps are formed by.

    Attributes:
        micro_tokens: most padded tokens of a micro-step, at least 1. A longer sample is a
            micro-step of its own.
        pad_to: lengths are padded to a multiple of it.
        cost: of a micro-step, from its padded length and its number of samples; None: its padded
            tokens.
    """

    micro_tokens: int
    pad_to: int = 1
    cost: Callable[[int, int], float] | None = None

    def padded(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the padded lengths of samples that are alone in a micro-step, shape (n,)."""
        import numpy as np  # late, so that `plan` stays fast

        # A sample of length 0 is still computed.
        return np.maximum(-(-lengths // self.pad_to), 1) * self.pad_to

    def cost_of(self, length: int, samples: int) -> float:
        """Return the cost of a micro-step of `samples` samples, padded to `length` tokens.

        Raises:
            PlanError: it is not finite, or not above 0.
        """
        if self.cost is None:
            return float(length * samples)
        value: Any = self.cost(length, samples)
        try:
            cost = float(value)
        except (TypeError, ValueError, OverflowError):
            cost = math.nan
        if not (math.isfinite(cost) and cost > 0):
            raise PlanError(
                f"cost({length}, {samples}) must be a number above 0: the cost of "
                f"{plural(samples, 'sample')} padded to {length} tokens; but it is {value!r:.60}"
            )
        # Mathematical libraries differ in the last bit; ranks must not.
        return float(f"{cost:.9g}")


@dataclass(frozen=True, slots=True, eq=False)
class WorkByCost:
    """How the micro-steps of a training are formed and dealt.

    Attributes:
        lengths: of the data set's samples, in tokens, shape (N,).
        budget: the rule.
        reproducible, in_step: see `split_by_cost`.
    """

    lengths: NDArray[np.int64]
    budget: TokenBudget
    reproducible: bool = False
    in_step: bool = False

    def cost(self, micro_batches: Sequence[Sequence[int]]) -> float:
        """Return the cost of micro-steps of these samples of the data set."""
        longest = [
            int(self.budget.padded(self.lengths[list(indices)]).max()) for indices in micro_batches
        ]
        return sum(_costs(self.budget, longest, list(map(len, micro_batches))))

    def split(
        self, indices: NDArray[np.int64], ranks: int, speeds: Sequence[float] | None = None
    ) -> Split:
        """Return the division of an update of these samples, shape (n,), in their order."""
        return split_by_cost(
            self.lengths[indices],
            ranks,
            self.budget,
            reproducible=self.reproducible,
            speeds=speeds,
            in_step=self.in_step,
        )

    @property
    def most_samples(self) -> int:
        """Return how many samples of the greatest length a micro-step holds, at least 1."""
        return max(1, self.budget.micro_tokens // int(self.budget.padded(self.lengths.max())))

    @property
    def digest(self) -> str:
        """Return a digest of the lengths."""
        return hashlib.sha256(self.lengths.tobytes()).hexdigest()[:12]

    @property
    def cost_digest(self) -> str | None:
        """Return a digest of what `cost` gives for some lengths and numbers of samples; None
        without one.

        Raises:
            PlanError: `cost` returns an invalid value.
        """
        import numpy as np  # late, so that `plan` stays fast

        if self.budget.cost is None:
            return None
        padded = np.unique(self.budget.padded(self.lengths))
        some = padded[np.linspace(0, len(padded) - 1, min(len(padded), COMPARED)).astype(int)]
        costs: list[float] = []
        for length in some.tolist():
            full = max(1, min(self.budget.micro_tokens // length, len(self.lengths)))
            costs += [self.budget.cost_of(length, samples) for samples in (1, full)]
        return hashlib.sha256(repr(costs).encode()).hexdigest()[:12]

    def balance(self, order: DataOrder, ranks: int) -> dict[str, float]:
        """Return figures of the first updates' balance, by their names in plan.json.

        `padded_to_real` tokens; `busiest_to_mean`, the busiest rank's cost to the mean; and
        `even_to_busiest`, its cost if samples were dealt by number, as they come, in micro-batches
        that fit into memory as surely.
        """
        real = padded = mean = busiest = even = 0.0
        # Some, since lengths differ between updates.
        updates = range(max(1, min(8, 4096 // order.global_batch)))
        for update in updates:
            lengths = self.lengths[order.indices(update)]
            split = self.split(order.indices(update), ranks)
            tokens, costs = self._of_ranks(lengths, split)
            real += int(lengths.sum())
            padded += tokens
            mean += sum(costs) / ranks
            busiest += max(costs)
            by_number = (
                split_leaves(len(lengths), ranks, self.most_samples)
                if self.reproducible
                else split_window(len(lengths), ranks, cap=self.most_samples)
            )
            even += max(self._of_ranks(lengths, by_number)[1])
        return {
            "padded_to_real": round(padded / max(real, 1), 3),
            "busiest_to_mean": round(busiest / mean, 3),
            "even_to_busiest": round(even / busiest, 3),
        }

    def _of_ranks(self, lengths: NDArray[np.int64], split: Split) -> tuple[int, list[float]]:
        """Return the padded tokens of an update, and each rank's cost."""
        padded = self.budget.padded(lengths)
        if split.order is not None:
            padded = padded[list(split.order)]
        in_order = padded.tolist()
        tokens, costs = 0, [0.0] * split.ranks
        for rank in range(split.ranks):
            for start, count in split.pieces(rank):
                longest = max(in_order[start : start + count])
                tokens += longest * count
                costs[rank] += self.budget.cost_of(longest, count)
        return tokens, costs

    def warnings(self, order: DataOrder, ranks: int) -> Iterator[str]:
        """Yield a warning if samples exceed the budget of a micro-step, and one if ranks wait for
        the busiest, or would wait less for it if samples were dealt by number.
        """
        padded = self.budget.padded(self.lengths)
        longer = int((padded > self.budget.micro_tokens).sum())
        if longer:
            yield (
                f"{plural(longer, 'sample')} of {len(padded)} {'is' if longer == 1 else 'are'} "
                f"longer than {MICRO_TOKENS}={self.budget.micro_tokens} (up to "
                f"{int(padded.max())} tokens): {'it' if longer == 1 else 'each'} is a micro-step "
                "of its own, and takes more memory than that"
            )
        balance = self.balance(order, ranks)
        uneven, even = balance["busiest_to_mean"], balance["even_to_busiest"]
        if uneven < UNEVEN and even >= 1:
            return
        advice = "a larger accumulation.global_batch would give ranks more to share"
        tokens = self.budget.micro_tokens // 2
        while self.reproducible and tokens >= int(padded.max()):
            smaller = replace(self, budget=replace(self.budget, micro_tokens=tokens))
            ratio = smaller.balance(order, ranks)["busiest_to_mean"]
            if ratio < 1 + (uneven - 1) / 2:
                advice = f"{MICRO_TOKENS}={tokens} would make it {ratio:.2f}"
                break
            tokens //= 2
        by_number = ""
        if even < 1:
            by_number = (
                f" (dealt by number, accumulation.micro_batch={self.most_samples} in the place of "
                f"{MICRO_TOKENS}, the busiest would have {even:.2f} times as much)"
            )
        yield (
            f"the busiest of {ranks} ranks has {uneven:.2f} times as much to do as the mean, and "
            f"the others wait for it{by_number}; {advice}"
        )


def lengths_of(values: Any, samples: int) -> NDArray[np.int64]:
    """Return the lengths of a data set's samples in tokens, shape (samples,).

    Raises:
        PlanError: they are not that many whole numbers of 0 or more, or all are 0.
    """
    import numpy as np  # late, so that `plan` stays fast

    try:
        lengths = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise PlanError(f"lengths must be whole numbers, one for each sample: {error}") from None
    if lengths.shape != (samples,):
        actual = f"have shape {lengths.shape}"
        if lengths.ndim == 1:
            actual = f"are {len(lengths)}"
        elif lengths.ndim == 0:
            actual = f"are of type {type(values).__name__}"
        raise PlanError(
            f"lengths must be one whole number for each of the {samples} samples, in a list or "
            f"array, but {actual}"
        )
    whole = lengths.dtype.kind in "iu"
    if not whole and not (lengths.dtype.kind == "f" and (lengths == np.floor(lengths)).all()):
        raise PlanError(
            f"lengths must be whole numbers, but are of {lengths.dtype}: {lengths[:3].tolist()}"
        )
    if not (lengths < 2**53).all():  # infinity, or more than a float holds exactly
        first = int(np.flatnonzero(~(lengths < 2**53))[0])
        raise PlanError(f"lengths must be below 2**53, but sample {first} has {lengths[first]}")
    if lengths.min() < 0:
        first = int(np.flatnonzero(lengths < 0)[0])
        raise PlanError(f"lengths must be 0 or more, but sample {first} has {lengths[first]}")
    if not lengths.any():
        raise PlanError(f"lengths must be the tokens of each sample, but all {samples} are 0")
    return lengths.astype(np.int64)


def lengths_in(file: Path, samples: int) -> NDArray[np.int64]:
    """Return the lengths in a file: .npy, or text with one number in a line.

    Raises:
        PlanError: it cannot be read, or does not hold that many lengths.
    """
    import numpy as np  # late, so that `plan` stays fast

    try:
        if file.suffix == ".npy":
            values = np.load(file, allow_pickle=False)
        else:
            values = np.loadtxt(file, ndmin=1)
    except (OSError, ValueError) as error:
        raise PlanError(f"facts.lengths={file} cannot be read: {error}") from None
    try:
        return lengths_of(values, samples)
    except PlanError as error:
        raise PlanError(f"facts.lengths={file}: {error}") from None


def split_by_cost(
    lengths: NDArray[np.int64],
    ranks: int,
    budget: TokenBudget,
    *,
    reproducible: bool = False,
    speeds: Sequence[float] | None = None,
    in_step: bool = False,
) -> Split:
    """Divide an update whose samples have these lengths.

    >>> import numpy as np
    >>> split = split_by_cost(np.array([3, 9, 4, 8]), 2, TokenBudget(micro_tokens=18))
    >>> split.order, split.micro_batches
    ((1, 3, 0, 2), ((1,), (1, 2)))

    Args:
        lengths: of the samples in the order of their positions, in tokens, shape (n,).
        reproducible: micro-steps do not depend on `ranks` and `speeds`.
        speeds: of ranks, in cost a second or any other unit, above 0; None: all are equal.
        in_step: ranks compute their micro-steps in rounds, a round as long as its most expensive
            micro-step: each gets as many, and those of a round cost alike.
    """
    import numpy as np  # late, so that `plan` stays fast

    padded = budget.padded(lengths)
    by_length = np.argsort(-padded, kind="stable")
    descending = padded[by_length].tolist()
    parts = FEWEST if reproducible else max(FEWEST, PER_RANK * ranks)
    # A budget beyond the whole update says nothing about the size of a full micro-step.
    tokens = min(budget.micro_tokens, descending[0] * len(descending))
    least = min(tokens, max(descending[0], -(-sum(descending) // parts)))
    tries: list[_Try] = []
    while True:
        counts = _filled(descending, tokens)
        firsts = accumulate(counts[:-1], initial=0)
        costs = _costs(budget, [descending[first] for first in firsts], counts)
        if reproducible:  # neither ranks nor speeds may decide, not even by a rounding
            share, busiest = [], sum(costs)  # dealt below, once the micro-steps are chosen
        elif in_step:
            share = list(even_parts(len(costs), ranks))
            # A round lasts as long as its dearest micro-step: dealt by cost, each `ranks`-th.
            busiest = sum(sorted(costs, reverse=True)[::ranks])
        else:
            share = deal(costs, ranks, speeds)
            busiest = _busiest(costs, share, speeds)
        tries.append(_Try(busiest, counts, costs, share))
        best = min(tries, key=lambda attempt: attempt.busiest)
        if tokens <= least or len(tries) - tries.index(best) > TRIES_IN_VAIN:
            break
        tokens = max(int(SHRINK * tokens), least)
    counts = best.counts
    # An empty share: reproducible, and not dealt yet.
    share = best.share or deal(best.costs, ranks, speeds, in_step=in_step)
    number = np.arange(len(counts))  # of each micro-step in the update
    if in_step:
        by_rank = in_rounds(best.costs, ranks)
        number[by_rank] = np.arange(len(counts))
        counts = [best.counts[micro_step] for micro_step in by_rank]
    group = np.repeat(number, best.counts)
    order = by_length[np.lexsort((by_length, group))]  # positions ascend within a micro-step
    micro_batches: list[tuple[int, ...]] = []
    first = 0
    for size in share:
        micro_batches.append(tuple(counts[first : first + size]))
        first += size
    return Split.of(micro_batches, order=tuple(order.tolist()))


@dataclass(frozen=True, slots=True)
class _Try:
    """One way to form micro-steps: the busiest rank's cost / speed (in reproducible mode the cost
    of all), the samples and costs of micro-steps, and how many each rank has.
    """

    busiest: float
    counts: list[int]
    costs: list[float]
    share: list[int]


def _costs(budget: TokenBudget, longest: Sequence[int], counts: Sequence[int]) -> list[float]:
    """Return the cost of each micro-step, with what it takes besides its tokens.

    Args:
        longest: the padded length of each micro-step.
        counts: its number of samples.
    """
    padded = list(map(mul, longest, counts))
    tokens = sum(padded)
    costs: list[float] = [*padded]
    if budget.cost is not None:
        costs = [budget.cost_of(*micro_step) for micro_step in zip(longest, counts, strict=True)]
    # In the unit of `cost`, which may be any.
    constant = OVERHEAD * min(budget.micro_tokens, tokens) * sum(costs) / max(tokens, 1)
    return [cost + constant for cost in costs]


def _filled(descending: Sequence[int], tokens: int) -> list[int]:
    """Return how many of the samples, from the longest on, each micro-step takes.

    >>> _filled([9, 8, 4, 3, 1], 18)
    [2, 3]
    """
    counts: list[int] = []
    first, samples = 0, len(descending)
    while first < samples:
        count = tokens // descending[first] or 1
        counts.append(count)
        first += count
    counts[-1] -= first - samples
    return counts


def deal(
    costs: Sequence[float],
    ranks: int,
    speeds: Sequence[float] | None = None,
    *,
    in_step: bool = False,
) -> list[int]:
    """Return how many of the micro-steps, which have these costs, each rank takes, one rank after
    the other. The largest cost / speed of a rank is as small as it can be, to a thousandth; with
    stated speeds, as small as it can be where every rank has some work.

    Equal costs and speeds give equal numbers, the larger first.

    >>> deal([1, 1, 1, 1, 1], 3), deal([5, 1, 1, 1, 1], 3), deal([1, 1, 1], 2, [0.5, 1])
    ([2, 2, 1], [1, 2, 2], [1, 2])

    Raises:
        PlanError: not one speed above 0 for each rank.
    """
    if speeds is not None and (len(speeds) != ranks or not all(speed > 0 for speed in speeds)):
        raise PlanError(f"{ranks} ranks need as many speeds above 0, but they are {list(speeds)}")
    if in_step or (speeds is None and min(costs, default=1) == max(costs, default=1)):
        return list(even_parts(len(costs), ranks))
    rates = [1.0] * ranks if speeds is None else speeds
    ends = list(accumulate(costs, initial=0.0))
    low = max(ends[-1] / sum(rates), max(costs) / max(rates))
    # This suffices: each rank but the last takes its share of the rest, or more.
    high = low + max(costs) / min(rates)
    while high - low > 1e-3 * low:
        bound = (low + high) / 2
        if _fits(ends, rates, bound):
            high = bound
        else:
            low = bound
    # Bounds that differ by rounding alone must not decide.
    counts = _spread(ends, rates, high * (1 + 1e-9))
    return counts if speeds is None else _some_for_each(counts)


def in_rounds(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the micro-steps of rank 0, then those of rank 1 and so on, so that the costs of a
    round, to which each rank has one, are neighbours: no other rounds are shorter in all.

    >>> in_rounds([9, 1, 8, 2, 3], 2)
    [0, 4, 1, 2, 3]
    """
    descending = sorted(range(len(costs)), key=lambda micro_step: -costs[micro_step])
    return [micro_step for rank in range(ranks) for micro_step in descending[rank::ranks]]


def _some_for_each(counts: list[int]) -> list[int]:
    """Return the counts with 1 in the place of each 0, as long as the largest can spare them: a
    rank without work cannot be seen to recover.

    >>> _some_for_each([5, 0, 2]), _some_for_each([1, 0])
    ([4, 1, 2], [1, 0])
    """
    for rank, count in enumerate(counts):
        largest = max(range(len(counts)), key=counts.__getitem__)
        if count == 0 and counts[largest] > 1:
            counts[largest] -= 1
            counts[rank] = 1
    return counts


def _fits(ends: Sequence[float], speeds: Sequence[float], bound: float) -> bool:
    """Return whether runs exist of which none takes longer than `bound`."""
    reached, last = 0, len(ends) - 1
    for speed in speeds:
        reached = bisect_right(ends, ends[reached] + bound * speed, reached) - 1
        if reached == last:
            return True
    return False


def split_by_speed(samples: int, speeds: Sequence[float], cap: int) -> Split:
    """Divide an update whose samples cost the same by the ranks' speeds, contiguously, in
    micro-batches of at most `cap` samples.

    >>> split_by_speed(12, [2.0, 1.0], 3).micro_batches
    ((3, 3, 2), (2, 2))
    """
    total = sum(speeds)
    ends = [round(samples * end / total) for end in accumulate(speeds)]
    ends[-1] = samples
    sizes = [last - first for first, last in zip([0, *ends], ends, strict=False)]
    sizes = _some_for_each(sizes)
    return Split.of([even_parts(size, -(-size // cap)) if size else () for size in sizes])


def _spread(ends: Sequence[float], speeds: Sequence[float], bound: float) -> list[int]:
    """Return the lengths of runs, as even as it goes, of which none takes longer than `bound`."""
    last = len(ends) - 1
    # How far a rank must get, so that those after it can do the rest.
    needed = [last]
    for speed in reversed(speeds[1:]):
        needed.append(bisect_left(ends, ends[needed[-1]] - bound * speed, 0, needed[-1]))
    needed.reverse()
    counts: list[int] = []
    reached, speed_left = 0, sum(speeds)
    for speed, least in zip(speeds, needed, strict=True):
        share = (ends[last] - ends[reached]) * speed / speed_left
        most = bisect_right(ends, ends[reached] + bound * speed, reached) - 1
        # Rounding must not leave a rank a micro-step less than its share.
        fair = bisect_left(ends, ends[reached] + share * (1 - 1e-12), reached)
        end = max(min(fair, most), least, reached)
        counts.append(end - reached)
        reached = end
        speed_left -= speed
    return counts


def _busiest(costs: Sequence[float], share: Sequence[int], speeds: Sequence[float] | None) -> float:
    """Return the largest cost / speed of a rank."""
    ends = list(accumulate(costs, initial=0.0))
    reached, busiest = 0, 0.0
    for rank, number in enumerate(share):
        cost = ends[reached + number] - ends[reached]
        busiest = max(busiest, cost if speeds is None else cost / speeds[rank])
        reached += number
    return busiest
