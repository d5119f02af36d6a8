"""`facts.*` is what a person said of job and data before either was loaded. Here is the truth.

A plan was checked and shown with it. Where the true plan is another one, the run is refused, since
something else was asked for; where it is not, the two numbers are said.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from orchestrator.config.schema import FactsConfig
from orchestrator.errors import ConfigError
from orchestrator.plan.plan import Plan
from orchestrator.rundir.warnings import warn

_FIGURES = {"parameters", "dataset_samples", "bytes_on_wire_per_update", "schedule", "warnings"}
"""Of a plan, what is told but decides nothing; the schedule is there as its rates."""

_SEEN, _APART = 5, 2.0  # updates; how many times as long or as short


def compare_facts(
    facts: FactsConfig, planned: Plan, plan_with: Callable[[int | None, int | None], Plan]
) -> None:
    """Compare `facts` with the plan of what is there. Not collective; the same on all ranks.

    Args:
        planned: the true plan.
        plan_with: gives the plan for a number of parameters and of samples.

    Raises:
        ConfigError: the plan would be another one.
    """
    true_plan = planned.figures()
    wrong = {
        name: (said, true_plan[name])
        for name in ("parameters", "dataset_samples")
        if (said := getattr(facts, name)) is not None and said != true_plan[name]
    }
    if not wrong:
        return
    shown = plan_with(
        facts.parameters or planned.traffic.parameters,
        facts.dataset_samples or planned.length.dataset_samples,
    ).figures()
    told = "; ".join(
        f"facts.{name}={said}, but {'the model' if name == 'parameters' else 'the data set'} has "
        f"{true}"
        for name, (said, true) in wrong.items()
    )
    remedy = " ".join(f"facts.{name}={true}" for name, (_, true) in wrong.items())
    changed = [
        f"{name} {_short(shown[name])}, not {_short(true)}"
        for name, true in true_plan.items()
        if name not in _FIGURES and shown[name] != true
    ]
    if changed:
        raise ConfigError(
            f"{told}. The plan that was checked had {', '.join(changed)}; set {remedy}, or leave "
            "facts out"
        )
    warn(f"{told}; the plan is the same but for the bytes on the wire. Set {remedy}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


class UpdateTime:
    """Compares `facts.update_s` with the first updates of an attempt, once.

    Args:
        said: the fact; None where there is none.
    """

    def __init__(self, said: float | None) -> None:
        self._said, self._seen = said, list[float]()

    def see(self, update_s: float) -> None:
        """An update took so long, in seconds."""
        if self._said is None:
            return
        self._seen.append(update_s)
        if len(self._seen) <= _SEEN:
            return
        said, self._said = self._said, None
        took = median(self._seen[1:])  # the first one warms up
        if not said / _APART <= took <= said * _APART:
            warn(
                f"facts.update_s={said:g}, but an update takes {took:.3g} s here (the median of "
                f"{_SEEN}): what was said of signals and time limits was meant for the other"
            )
