"""What compilation cost a run and what it gave, from its update records.

The speed-up is stated only where it was measured: a compiled micro-step is the median of all
updates that compiled nothing; one without compilation was timed by the engine after the first
update, with the first micro-batch and all ranks at it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.rundir.metrics import Record
from orchestrator.units import format_seconds, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """Seconds in first calls and the number of updates that had some; seconds of a micro-step,
    compiled and not; None where not measured.
    """

    seconds: float
    updates: int
    step_s: float | None
    plain_step_s: float | None

    @property
    def speed_up(self) -> float | None:
        """How many times as fast a compiled micro-step is."""
        if not self.step_s or not self.plain_step_s:
            return None
        return self.plain_step_s / self.step_s

    def rows(self) -> list[tuple[str, str, str]]:
        """Label, value and style of each row in the closing table."""
        of = plural(self.updates, "update")
        found = [("compilation", f"{format_seconds(self.seconds)}, in {of}", "")]
        if self.step_s:
            text = f"{format_seconds(self.step_s)} compiled"
            if self.speed_up and self.plain_step_s:
                plain = format_seconds(self.plain_step_s)
                times = f"{self.speed_up:.2g}" if self.speed_up < 10 else f"{self.speed_up:.0f}"
                text += f", {plain} without: {times} times as fast"
            found.append(("  a micro-step", text, ""))
        return found


def compilation(updates: Sequence[Record]) -> Compilation | None:
    """The figures of a run; None when nothing was compiled.

    >>> first = {"compile_s": 2.0, "plain_step_s": 0.03, "compute_s": 1.0, "micro_steps": 4}
    >>> later = [{"compute_s": 0.008, "micro_steps": 4}] * 3
    >>> compilation([first, *later]).speed_up
    15.0
    """
    first_calls = [r["compile_s"] for r in updates if r.get("compile_s")]
    if not first_calls:
        return None
    steady = [
        r["compute_s"] / r["micro_steps"]
        for r in updates
        if not r.get("compile_s") and r.get("compute_s") and r.get("micro_steps")
    ]
    plain = [r["plain_step_s"] for r in updates if r.get("plain_step_s")]
    return Compilation(
        seconds=sum(first_calls),
        updates=len(first_calls),
        step_s=statistics.median(steady) if steady else None,
        plain_step_s=plain[-1] if plain else None,
    )
