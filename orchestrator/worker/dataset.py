"""The data set has to be the same on every rank: each of them works out the same order from it."""

from __future__ import annotations

from collections import Counter

from orchestrator.engine.api import Engine
from orchestrator.errors import JobError


def agreed_samples(engine: Engine, samples: int) -> int:
    """How many samples there are, once all ranks agree. Collective.

    Raises:
        JobError: on all ranks alike, naming those whose data set has another length than most.
    """
    counts = [int(row[0]) for row in engine.gather([float(samples)])]
    most = max(counts, key=lambda count: (Counter(counts)[count], count == counts[0]))
    odd = [f"{count} on rank {rank}" for rank, count in enumerate(counts) if count != most]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise JobError(
            f"dataset() has {most} samples on most ranks, but {', '.join(odd[:3])}{more}; every "
            "rank needs the whole data set, of which the plan gives it its part"
        )
    return most
