"""The data set has to be the same on every rank: each of them works out the same order from it.

Its length and a few of its samples are compared before training. Not all of it: that would be to
read it once more.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestrator.engine.api import Engine
from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.errors import JobError
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.rank.agreed.value_digests import digests_of
from orchestrator.rundir.warnings import warn

_PLACES = 8  # of samples that are looked at
_SEED = 20_240_229


def agreed_samples(engine: Engine, dataset: Any) -> int:
    """How many samples there are, once all ranks agree on that and on some of them. Collective.

    Samples that a rank cannot read twice alike, since the data set draws numbers that no seed
    reaches, are not compared, but warned of.

    Raises:
        JobError: `dataset` has no length; or on all ranks alike, naming those whose data set has
            another length or other samples than most.
    """
    try:
        samples = len(dataset)
    except TypeError:
        raise JobError(
            f"dataset() must give something with len() and [index], but gives a "
            f"{type(dataset).__name__} without len()"
        ) from None
    _agree_on_length(engine, samples)
    places = _places_of(samples)
    rows = engine.gather(_looked_at(dataset, places))
    if minority_ranks(rows):
        _refuse_other_samples(engine, dataset, places, rows)
    return samples


def _agree_on_length(engine: Engine, samples: int) -> None:
    counts = [int(row[0]) for row in engine.gather([float(samples)])]
    most = max(counts, key=lambda count: (Counter(counts)[count], count == counts[0]))
    odd = [f"{count} on rank {rank}" for rank, count in enumerate(counts) if count != most]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise JobError(
            f"dataset() has {most} samples on most ranks, but {', '.join(odd[:3])}{more}; every "
            "rank needs the whole data set, of which the plan gives it its part"
        )


def _places_of(samples: int) -> list[int]:
    """Samples to look at: the first two, and others up to the last.

    >>> _places_of(100), _places_of(3), _places_of(0)
    ([0, 1, 16, 33, 49, 66, 82, 99], [0, 1, 2], [])
    """
    if not samples:
        return []
    spread = {number * (samples - 1) // (_PLACES - 2) for number in range(_PLACES - 1)}
    return sorted(spread | {min(1, samples - 1)})


def _looked_at(dataset: Any, places: Sequence[int]) -> list[float]:
    """For each place a digest of what kind of thing the sample is, and one of what is in it."""
    found: list[float] = []
    with _generators_as_before():
        for place in places:
            _seed(place)
            found += map(float, digests_of(dataset[place]))
    return found


@contextmanager
def _generators_as_before() -> Generator[None]:
    import numpy as np

    torch: Any = sys.modules.get("torch")
    python, numpys = random.getstate(), np.random.get_state()
    torchs = torch.default_generator.get_state() if torch else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        if torch:
            torch.default_generator.set_state(torchs)


def _seed(place: int) -> None:
    """Samples that are augmented at random are to be the same ones on all ranks."""
    import numpy as np

    random.seed(_SEED + place)
    np.random.seed(_SEED + place)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(_SEED + place)


def _refuse_other_samples(
    engine: Engine, dataset: Any, places: Sequence[int], rows: Sequence[Sequence[float]]
) -> None:
    """Raise, unless a second look finds that samples are never the same. Collective."""
    again = engine.gather(_looked_at(dataset, places))
    if any(list(one) != list(two) for one, two in zip(rows, again, strict=True)):
        warn(
            "dataset() gives another sample whenever it is asked for the same one, by random "
            "numbers that no seed reaches: whether ranks have the same data cannot be told, and a "
            "resumed run will not have the bits of an undisturbed one. Draw from random, "
            "numpy.random or torch's default generator, and set augments = True"
        )
        return
    odd = minority_ranks(rows)
    column = next(n for n, seen in enumerate(zip(*rows, strict=True)) if len(set(seen)) > 1)
    what = ("another type or shape", "other values")[column % 2]
    whose = "rank 0" if len(rows) == 2 else "most ranks"
    raise JobError(
        f"dataset() is not the same on all ranks: on {named_ranks(odd)} sample "
        f"{places[column // 2]} has {what} than on {whose}; every rank needs the whole data set, "
        "in the same order, of which the plan gives it its part"
    )
