"""Which rank steps which whole parameter, for optimizers that cannot step pieces of them.

Muon orthogonalizes a matrix, Shampoo and SOAP keep statistics of its rows and columns, Adafactor
their means, LAMB its norm: a rank with a piece of a parameter could not step it. So each whole
parameter has one rank that owns it. Its gradient is reduced to the owner, the owner steps it, and
the others get its weights: as many bytes as with pieces, and no communication in the step.

    [Liu et al. 2025, Muon is Scalable for LLM Training, arXiv 2502.16982, section 2.3, whose owners
    gather a matrix that is in pieces; here the matrix is never cut]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from orchestrator.config.rules import SHARDABLE, WHOLE
from orchestrator.engine.torch.buffers import HALVES, Named, real_numbers
from orchestrator.errors import ConfigError, did_you_mean
from orchestrator.plan.wire import bucket_count

SHARD_BY = ("auto", "parameters")


@dataclass(frozen=True, slots=True)
class OwnedBucket:
    """A bucket of whole parameters, which travel together.

    Attributes:
        members: numbers of parameters, of one device and dtype, those of rank 0 first.
        owners: the rank that owns each.
    """

    members: tuple[int, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owners of an optimizer's whole parameters; none where it steps pieces.

    Attributes:
        owner_of: the owning rank, by the parameter's number.
        buckets: all of these parameters, in the order in which a backward comes near to them.
    """

    owner_of: dict[int, int] = field(default_factory=dict[int, int])
    buckets: tuple[OwnedBucket, ...] = ()


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Return whether it is known to step a parameter by all of that parameter."""
    kind = type(optimizer)
    return kind.__module__.split(".")[:2] == ["torch", "optim"] and kind.__name__ in WHOLE


def whole_parameters(optimizer: Optimizer, trained: Named, shard_by: str) -> list[int]:
    """Return the numbers of the trained parameters that are stepped whole.

    Which these are follows from the optimizer's class, or is stated: by `shard_by`, or by an entry
    "shard_by" of a parameter group ("parameters", or "elements" for one that is stepped number by
    number), as for an optimizer that treats matrices by one rule and the rest by AdamW's.

    Raises:
        ConfigError: an optimizer or a statement that is not known.
    """
    if shard_by not in SHARD_BY:
        raise ConfigError(
            f"there is no engine.shard_by={shard_by}{did_you_mean(shard_by, SHARD_BY)}"
        )
    kind = type(optimizer)
    from_torch = kind.__module__.split(".")[:2] == ["torch", "optim"]
    by_class = {**dict.fromkeys(SHARDABLE, "elements"), **dict.fromkeys(WHOLE, "parameters")}
    usual = by_class.get(kind.__name__) if from_torch else None
    if shard_by == "parameters":
        usual = "parameters"  # right for all that step parameters one by one
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(trained)}
    whole: list[int] = []
    for group in optimizer.param_groups:
        choice = group.get("shard_by", usual)
        if choice is None:
            raise ConfigError(
                f"engine.shard_optimizer=true does not know {kind.__module__}.{kind.__qualname__}; "
                f"it knows torch.optim's {', '.join((*SHARDABLE, *WHOLE))}. If it steps each "
                "parameter by that parameter alone, state engine.shard_by=parameters (in a script "
                "shard_by='parameters'): each rank then owns whole parameters"
            )
        if choice not in ("elements", "parameters"):
            raise ConfigError(
                f"the entry 'shard_by' of a parameter group must be 'elements' or 'parameters', "
                f"but is {choice!r}"
            )
        if choice == "elements" and needs_whole_parameters(optimizer):
            raise ConfigError(
                f"{kind.__name__} needs whole parameters, but a parameter group of it has the "
                "entry shard_by='elements'; leave it out"
            )
        if choice == "parameters":
            whole += [numbers[id(p)] for p in group["params"] if id(p) in numbers]
    return sorted(whole)


def step_cost(optimizer: Optimizer) -> Callable[[Tensor], float]:
    """Return a function that gives what a step of a parameter costs, in any unit."""
    if type(optimizer).__name__ != "Muon":
        return lambda parameter: float(real_numbers(parameter))

    def cost(parameter: Tensor) -> float:
        """Of Newton and Schulz's iteration, which multiplies by its smaller Gram matrix."""
        rows = parameter.shape[0] if parameter.ndim else 1
        numbers = real_numbers(parameter)
        return float(numbers * min(rows, numbers // max(rows, 1)))

    return cost


def ownership(
    trained: Named,
    whole: Sequence[int],
    ranks: int,
    bucket_bytes: int | None,
    cost: Callable[[Tensor], float],
) -> Ownership:
    """Give each whole parameter an owner, and put parameters together that travel together.

    The costliest goes first, each to the rank with the least to do so far (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: at most 4/3 of the best). Buckets are as near to equal
    ones as whole parameters allow, above `bucket_bytes` only where one parameter is. The same on
    all ranks.
    """
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost and numbers so far
    owner_of: dict[int, int] = {}
    # Ties by number and rank, so that all ranks decide the same without a collective.
    for number in sorted(whole, key=lambda n: (-cost(trained[n][1]), n)):
        parameter = trained[number][1]
        done, numbers, rank = min(loads)
        owner_of[number] = rank
        loads[rank] = (done + cost(parameter), numbers + real_numbers(parameter), rank)
    buckets: list[OwnedBucket] = []
    for members in _travelling_alike(trained, whole):
        sizes = [
            real_numbers(trained[number][1]) * _bytes(trained[number][1]) for number in members
        ]
        target = sum(sizes) / bucket_count(sum(sizes), bucket_bytes)
        current: list[int] = []
        taken = 0.0
        for number, size in zip(members, sizes, strict=True):
            too_large = bucket_bytes is not None and taken + size > bucket_bytes
            # Half of it: a parameter goes to the bucket that it leaves nearer to the target.
            if current and (too_large or taken + size / 2 > target):
                buckets.append(_bucket(current, owner_of))
                current, taken = [], 0.0
            current.append(number)
            taken += size
        buckets.append(_bucket(current, owner_of))
    return Ownership(owner_of, tuple(buckets))


def _travelling_alike(trained: Named, whole: Sequence[int]) -> list[list[int]]:
    """Return the numbers of parameters that a buffer may hold together, in reverse, an order that a
    backward comes near to.

    Those of odd sizes are apart, so that all others begin at multiples of 16 numbers, as vectorized
    kernels want them, and complex ones at even places.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number in reversed(whole):
        parameter = trained[number][1]
        numbers = real_numbers(parameter)
        alignment = 2 if numbers % 16 == 0 else int(numbers % 2 == 0)
        kinds.setdefault((-alignment, parameter.device, parameter.real.dtype), []).append(number)
    return list(kinds.values())


def _bytes(parameter: Tensor) -> int:
    """Return the bytes of a number of its gradient."""
    # Gradients of halves are added up in float32.
    return 4 if parameter.real.dtype in HALVES else parameter.real.element_size()


def _bucket(members: list[int], owner_of: dict[int, int]) -> OwnedBucket:
    ordered = sorted(members, key=lambda number: owner_of[number])  # stable
    return OwnedBucket(tuple(ordered), tuple(owner_of[number] for number in ordered))
