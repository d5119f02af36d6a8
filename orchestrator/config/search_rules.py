"""What a search of ours must not be asked for, as far as the section `sweep` tells."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import SweepConfig

OF_A_SEARCH = ("trials", "seed", "direction", "prune")
SMALL_IS_GOOD = ("loss", "seconds")


def anywhere(sweep: SweepConfig) -> Iterator[str]:
    """A sentence for each thing that is wrong."""
    if sweep.search == "none":
        yield from _without(sweep)
        return
    if sweep.trials is None and sweep.search != "grid":
        yield f"sweep.search={sweep.search} needs how many trials it is to make: sweep.trials=20"
    if sweep.direction == "auto" and sweep.objective not in SMALL_IS_GOOD:
        yield (
            f"sweep.objective={sweep.objective}: whether it is wanted small or large is not known; "
            f"add sweep.direction=minimize, or maximize"
        )
    if sweep.prune != "none" and sweep.objective == "seconds":
        yield (
            "sweep.prune judges trials by their objective while they run, but seconds are known at "
            "the end alone; leave sweep.prune out"
        )


def _without(sweep: SweepConfig) -> Iterator[str]:
    """Of a search, where there is none."""
    plain = SweepConfig()
    for name in OF_A_SEARCH:
        if getattr(sweep, name) != getattr(plain, name):
            yield (
                f"sweep.{name} means nothing without a search of ours; add sweep.search=tpe, or "
                f"leave it out"
            )
