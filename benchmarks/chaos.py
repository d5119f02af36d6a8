"""Runs on the development cluster, each disturbed at a moment of its own: the end must not differ.

    python -m benchmarks chaos --seed 1 --faults 40

Every run trains the same plan. A run has one fault or two in a row, of a kind and at a moment drawn
from the seed (at its start, in a window, at a checkpoint, near the last update, after its end).
Checked: the weights are those of the undisturbed run; state and cause are right; no process and no
job is left. Measured: seconds until the fault was noticed, until updates were done again, and how
much of that the scheduler took; updates that were done twice.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos_faults import FAULTS
from benchmarks.chaos_run import MOMENTS, Disturbed, Draw, Outcome, spec_of
from benchmarks.measure import Spread, keep, machine
from orchestrator.rehearse.rehearsal import run_undisturbed
from orchestrator.rehearse.rehearsed_run import SimulatedRun
from slurm.dev_cluster import DevCluster
from slurm.testing import dev_cluster


def draws(seed: int, count: int) -> Iterator[Draw]:
    """Return faults of all kinds in turn, in an order and at moments drawn from the seed."""
    chance = random.Random(seed)  # noqa: S311  # it has to repeat
    kinds: list[str] = []
    for _ in range(count):
        kinds = kinds or chance.sample(list(FAULTS), len(FAULTS))
        chosen = [kinds.pop()]
        if chance.random() < 0.15 and FAULTS[chosen[0]].ends is None:
            chosen.append(chance.choice([k for k in FAULTS if FAULTS[k].ends is None]))
        moments = [m for m in MOMENTS if m != "after" or FAULTS[chosen[0]].late]
        faults = [(chosen[0], chance.choice(moments if len(chosen) == 1 else moments[:3]))]
        faults += [(kind, chance.choice(MOMENTS[:4])) for kind in chosen[1:]]
        yield Draw(faults=tuple(faults), seed=chance.randrange(1 << 30))


def play(
    cluster: DevCluster, folder: Path, chosen: Sequence[Draw], say: Callable[[str], None]
) -> list[Outcome]:
    """Disturb one run after another."""
    undisturbed = SimulatedRun(folder / "undisturbed", spec_of())
    run_undisturbed(undisturbed)
    outcomes: list[Outcome] = []
    for number, draw in enumerate(chosen):
        outcome = Disturbed(cluster, folder / f"{number:03d}", draw, undisturbed).play()
        outcomes.append(outcome)
        figures = f"{sum(outcome.resumed_s):.1f} s, {outcome.redone} redone"
        say(f"{number + 1:3d} {draw}: {'; '.join(outcome.wrong) or 'as undisturbed'} ({figures})")
    return outcomes


def summary(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Return the figures, over all faults and by kind."""

    def spread(values: list[float]) -> dict[str, float | int] | None:
        return Spread.of(values).rounded(3) if values else None

    def of(chosen: Sequence[Outcome]) -> dict[str, Any]:
        return {
            "runs": len(chosen),
            "as_undisturbed": sum(not o.wrong for o in chosen),
            "noticed_s": spread([s for o in chosen for s in o.noticed_s]),
            "resumed_s": spread([s for o in chosen for s in o.resumed_s]),
            "scheduler_s": spread([s for o in chosen for s in o.scheduler_s]),
            "redone": spread([float(o.redone) for o in chosen]),
        }

    alone = [o for o in outcomes if len(o.draw.faults) == 1]
    kinds = {kind: [o for o in alone if o.draw.faults[0][0] == kind] for kind in FAULTS}
    return {
        "seed": seed,
        "all": of(outcomes),
        "kinds": {kind: of(found) for kind, found in kinds.items() if found},
        "wrong": [f"{o.draw}: {'; '.join(o.wrong)}" for o in outcomes if o.wrong],
    }


def main(*, quick: bool, seed: int = 0, faults: int = 40) -> None:
    """Run all faults, print and keep the figures. Exit with 1 if one run differs."""
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    with dev_cluster("chaos", base=base, remove=True) as cluster:
        chosen = list(draws(seed, 8 if quick else faults))
        loads: list[float] = []

        def say(line: str) -> None:
            loads.append(round(os.getloadavg()[0], 1))
            print(line, flush=True)

        outcomes = play(cluster, base, chosen, say)
    found = summary(outcomes, seed)
    keep("chaos", {"machine": machine(), "load": loads, **found}, quick=quick)
    if found["wrong"]:
        sys.exit("\n".join(found["wrong"]))
