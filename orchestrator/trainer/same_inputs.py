"""Checks at the start: whether all ranks have the same data and rates, and facts are true."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.config.rules import (
    OFF,
    interrupt_refusals,
    planned_survival,
    refuse_schedule,
    with_survival,
)
from orchestrator.config.schema import Config, FactsConfig, ScheduleConfig
from orchestrator.data import generator_states, kept_generators
from orchestrator.engine.api import Engine, Group
from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.errors import ConfigError, JobError, PlanError, shortened
from orchestrator.job import has_own_rate
from orchestrator.plan.cost import MICRO_TOKENS, WorkByCost, lengths_of
from orchestrator.plan.plan import Plan
from orchestrator.rundir.warnings import warn
from orchestrator.units import first_few, named_ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# ----------------------------------------------------------------------
# The data set must be the same on every rank, since each derives the same order from it.

_COMPARED = 8  # of samples that are compared
_SEED = 20_240_229
_DEEPEST = 8


def agreed_samples(engine: Engine, dataset: Any, *, augments: bool, what: str = "dataset()") -> int:
    """Return the number of samples, once all ranks agree on it and on some samples. Collective.

    Samples that a rank cannot read twice alike, since the data set draws numbers that no seed
    reaches, are not compared, but warned of; and random numbers of a job that does not say that it
    `augments`.

    Args:
        what: the call that gave the data set, for messages.

    Raises:
        JobError: `dataset` has no length, or is a loader; or on all ranks alike, naming those whose
            data set has another length or other samples than most.
    """
    kind = type(dataset).__name__
    if not hasattr(type(dataset), "__getitem__") and hasattr(dataset, "batch_size"):
        raise JobError(
            f"{what} must give the data set, not a {kind}: batches come from accumulation.*"
        )
    try:
        samples = len(dataset)
    except TypeError:
        raise JobError(
            f"{what} must give something with len() and [index], but gives a {kind} without len()"
        ) from None
    rows = engine.gather([float(samples)])
    if different := minority_ranks(rows):
        odd = [f"{int(rows[rank][0])} on rank {rank}" for rank in different]
        agreeing = set(range(len(rows))).difference(different)
        most = int(rows[min(agreeing)][0])
        raise JobError(
            f"{what} has {most} samples on most ranks, but {first_few(odd, 3)}; every "
            "rank needs the whole data set, of which the plan gives it its part"
        )
    indices = _compared_indices(samples)
    digests, draws = _digests(dataset, indices)
    if draws and not augments:
        warn(
            f"{what}[i] draws random numbers, but the job's class does not set augments = True, "
            "so what it draws depends on how a batch is split over ranks and micro-steps"
        )
    rows = engine.gather(digests)
    if not (different := minority_ranks(rows)):
        return samples
    if engine.gather(_digests(dataset, indices)[0]) != rows:
        warn(
            f"{what} gives another sample whenever it is asked for the same one, by random "
            "numbers that no seed reaches: whether ranks have the same data is unknown, and a "
            "resumed run will not have the bits of an undisturbed one. Draw from random, "
            "numpy.random or torch's default generator, and set augments = True"
        )
        return samples
    column = next(n for n, seen in enumerate(zip(*rows, strict=True)) if len(set(seen)) > 1)
    raise JobError(
        f"{what} is not the same on all ranks: on {named_ranks(different)} sample "
        f"{indices[column]} differs from that on {'rank 0' if len(rows) == 2 else 'most ranks'}; "
        "every rank needs the whole data set, in the same order, of which the plan gives it its "
        "part"
    )


def agreed_lengths(engine: Engine, job: Any, dataset: Any, samples: int) -> NDArray[np.int64]:
    """Return the lengths of the samples, once all ranks agree on them. Collective.

    They come from the job's `lengths()`, or are the data set's `lengths`.

    Raises:
        JobError: there are none, they cannot be lengths, or ranks have different ones.
    """
    source = f"{type(job).__name__}.lengths()"
    values: Any = getattr(job, "lengths", None)
    if values is None:
        source, values = "dataset().lengths", getattr(dataset, "lengths", None)
    if values is None:
        raise JobError(
            f"{MICRO_TOKENS} needs the length of each sample: define lengths() in "
            f"{type(job).__name__}, or an attribute `lengths` of what dataset() gives: {samples} "
            "whole numbers, in tokens"
        )
    return same_lengths(engine, source, values, samples)


def same_lengths(engine: Engine, source: str, values: Any, samples: int) -> NDArray[np.int64]:
    """Return `values`, or what they give when called, as lengths that all ranks agree on.
    Collective.

    Args:
        source: of the values, for messages.

    Raises:
        JobError: they cannot be lengths, or ranks have different ones.
    """
    if callable(values):
        values = values()
    try:
        lengths = lengths_of(values, samples)
    except PlanError as error:
        raise JobError(f"{source}: {error}") from None
    _refuse_different(engine, source, lengths.tobytes())
    return lengths


def refuse_different_costs(engine: Engine, job: Any, work: WorkByCost) -> None:
    """Raise `JobError` if the job's `cost()` differs between ranks. Collective."""
    digest = work.cost_digest
    _refuse_different(engine, f"{type(job).__name__}.cost()", (digest or "").encode())


def _refuse_different(engine: Engine, source: str, data: bytes) -> None:
    """Raise `JobError` if `data`, which `source` gave, differ between ranks. Collective."""
    digest = hashlib.blake2b(data, digest_size=6).digest()
    # A float64 carries 48 bits exactly.
    if odd := minority_ranks(engine.gather([float(int.from_bytes(digest, "little"))])):
        raise JobError(
            f"{source} differs on {named_ranks(odd)}; it must be the same on all ranks, since each "
            "derives from it who computes what"
        )


def _compared_indices(samples: int) -> list[int]:
    """Return the samples to compare: the first two, and others up to the last.

    >>> _compared_indices(100), _compared_indices(3), _compared_indices(0)
    ([0, 1, 16, 33, 49, 66, 82, 99], [0, 1, 2], [])
    """
    if not samples:
        return []
    spread = {number * (samples - 1) // (_COMPARED - 2) for number in range(_COMPARED - 1)}
    return sorted(spread | {min(1, samples - 1)})


def _digests(dataset: Any, indices: Sequence[int]) -> tuple[list[float], bool]:
    """Return the digest of each sample, and whether reading them drew random numbers.

    They are read with all generators seeded by their index, so that samples with random
    augmentation are equal on all ranks. The generators are as before then.
    """
    import numpy as np

    torch: Any = sys.modules.get("torch")
    digests: list[float] = []
    draws = False
    with kept_generators():
        for index in indices:
            random.seed(_SEED + index)
            np.random.seed(_SEED + index)
            if torch:
                torch.default_generator.manual_seed(_SEED + index)
            before = generator_states()
            digests.append(sample_digest(dataset[index]))
            after = generator_states()  # a sample may have loaded one
            draws = draws or any(after[name] != state for name, state in before.items())
    return digests, draws


def sample_digest(value: Any) -> float:
    """Return a digest of types, keys, shapes and contents, as a number of 48 bits.

    Numbers, text, bytes, tensors, arrays, mappings, sequences, and objects by their fields are
    looked into; of anything else the type counts alone.

    >>> sample_digest({"x": [1, 2.0]}) == sample_digest({"x": [1, 2.0]})
    True
    >>> sample_digest([1]) == sample_digest([2])
    False
    """
    digest = hashlib.blake2b(digest_size=6)  # a float64 carries them exactly
    for part in _parts(value, 0):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return float(int.from_bytes(digest.digest(), "little"))


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    """Yield the parts of a value in order."""
    yield type(value).__name__.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        yield bytes(value)
    elif isinstance(value, str | bool | int | float | complex) or value is None:
        yield repr(value).encode()
    elif (array := _as_array(value)) is not None:
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes()
    elif depth < _DEEPEST:
        inner = _inner_values(value)
        yield str(len(inner)).encode()
        for element in inner:
            yield from _parts(element, depth + 1)


def _inner_values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for key, item in value.items() for part in (str(key), item)]
    if isinstance(value, AbstractSet):
        return sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value):
        return [getattr(value, attribute.name) for attribute in fields(value)]
    return [part for pair in sorted(getattr(value, "__dict__", {}).items()) for part in pair]


def _as_array(value: Any) -> Any:
    """Return the numbers of a tensor, array or picture; None for any other value."""
    import numpy as np

    torch: Any = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        dense: Any = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        # NumPy has no bfloat16, nor conjugates that are still to be taken.
        dense = dense.float() if dense.dtype == torch.bfloat16 else dense.resolve_conj()
        value = dense.resolve_neg().cpu().numpy()
    elif hasattr(value, "asnumpy"):  # MindSpore's
        value = value.asnumpy()
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else np.ascontiguousarray(array)


# ----------------------------------------------------------------------
# A job's own learning rates: `learning_rate(update)` in the place of the configuration's schedule.

Rates = Callable[[int], float]


def own_rates(job: Any, schedule: ScheduleConfig, engine: Engine, updates: int) -> Rates | None:
    """Return the job's own rates, if it has any. Collective in that case.

    Raises:
        ConfigError: a schedule is configured as well.
        JobError: it gives no rates, or others when it is asked again, or on other ranks.
    """
    if not has_own_rate(job):
        return None
    refuse_schedule(type(job).__name__, schedule)
    named = f"{type(job).__name__}.learning_rate"

    def rates(update: int) -> float:
        result = job.learning_rate(update)
        try:
            rate = float(result)
        except (TypeError, ValueError, RuntimeError):
            rate = math.nan
        if not (math.isfinite(rate) and rate >= 0):
            raise JobError(
                f"{named}({update}) must give a number, 0 or more, but gives {result!r:.60}"
            )
        return rate

    compared = sorted({0, 1 % updates, updates // 2, updates - 1})
    first, again = ([rates(update) for update in compared] for _ in range(2))
    for update, earlier, later in zip(compared, first, again, strict=True):
        if earlier != later:
            raise JobError(
                f"{named}({update}) gives {earlier:g}, then {later:g}: it must depend on the "
                "update's number alone, so that a resumed run has the rates of an undisturbed one"
            )
    rows = engine.gather(first)
    if odd := minority_ranks(rows):
        raise JobError(
            f"{named}(update) gives other rates on {named_ranks(odd)}; it must be the same on all"
        )
    return rates


# ----------------------------------------------------------------------
# Comparison of `facts.*`, given before job and data were loaded, with what they are.

_FIGURES = {"parameters", "dataset_samples", "bytes_on_wire_per_update", "schedule", "warnings"}
"""Figures of a plan that decide nothing; the schedule is compared by its rates."""


def compare_facts(
    facts: FactsConfig, planned: Plan, plan_with: Callable[[int | None, int | None], Plan]
) -> None:
    """Compare `facts` with the true plan, given the plan for any number of parameters and samples.
    Not collective; the same on all ranks.

    Raises:
        ConfigError: the plan would be another one.
    """
    true_plan = planned.figures()
    wrong = {
        name: (fact, true_plan[name])
        for name in ("parameters", "dataset_samples")
        if (fact := getattr(facts, name)) is not None and fact != true_plan[name]
    }
    if not wrong:
        return
    shown = plan_with(
        facts.parameters or planned.traffic.parameters,
        facts.dataset_samples or planned.length.dataset_samples,
    ).figures()
    differences = "; ".join(
        f"facts.{name}={fact}, but {'the model' if name == 'parameters' else 'the data set'} has "
        f"{true}"
        for name, (fact, true) in wrong.items()
    )
    remedy = " ".join(f"facts.{name}={true}" for name, (_, true) in wrong.items())
    changed = [
        f"{name} {shortened(shown[name], 40)}, not {shortened(true, 40)}"
        for name, true in true_plan.items()
        if name not in _FIGURES and shown[name] != true
    ]
    if changed:
        raise ConfigError(
            f"{differences}. The plan that was checked had {', '.join(changed)}; set {remedy}, "
            "or leave facts out"
        )
    warn(f"{differences}; the plan is the same but for the bytes on the wire. Set {remedy}")


# ----------------------------------------------------------------------
# Survival of losses, decided when group and job exist.


def agreed_survival(config: Config, job: Any, group: Group) -> Config:
    """Return `config` with `run.survive` true or false, the same on all ranks."""
    on = planned_survival(config).on and group.size > 1
    if config.run.survive is None and on:
        talks = bool(getattr(job, "talks_in_window", False))
        refusal = next(interrupt_refusals(group.transport, talks=talks, explicit=False), None)
        if refusal and group.rank == 0:
            warn(f"{OFF}{refusal}")
        on = refusal is None
    return with_survival(config, on=on)
