"""What a stop is for a run, in words: whoever asks for one is told what will come of it."""

from __future__ import annotations

from typing import Any

from orchestrator.inside.variables import HEEDS
from orchestrator.run_folder.rundir import RunDir


def how_it_stops(run: RunDir) -> str:
    """What a run that goes on does when it is asked to stop, as what follows its name.

    A program is sent its signal; only once all its ranks have asked `should_stop` (or have gone
    through `run.windows`) in this attempt do they stop together.
    """
    plan = run.read_plan()
    program: dict[str, Any] | None = plan.get("program")
    if program is None:
        return "stops at its next update boundary, with a checkpoint"
    folder = run.attempt(max(0, run.attempts_made() - 1))
    if all((folder / HEEDS.format(rank)).exists() for rank in range(int(plan["ranks"]))):
        return "stops once all its ranks are done with the same update, and saves as it does then"
    signal = f"SIG{program.get('stop_signal', 'TERM')}"
    return f"gets {signal} on every rank; what it does then, and whether it saves, is its own"
