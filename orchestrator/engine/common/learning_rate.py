"""Learning rates, which each update sets, for the optimizers of all frameworks."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from numbers import Real
from typing import Any

from orchestrator.errors import JobError


class LearningRate:
    """Learning rate of an optimizer. Every parameter group keeps its ratio to the base rate.

    With the rate of the optimizer's defaults as the base, `AdamW([{"params": a, "lr": 1e-4},
    {"params": b}], lr=1e-3)` trains `a` at a tenth of the schedule's rate.

    Args:
        kind: the optimizer's class, for messages.
        groups: returns the parameter groups as they are now.
        base: the rate that those of the groups are compared with.
        assign: writes a rate into a tensor, in place: compiled steps read it from there.
    """

    def __init__(
        self,
        kind: str,
        groups: Callable[[], Sequence[MutableMapping[str, Any]]],
        base: float,
        assign: Callable[[Any, float], Any],
    ) -> None:
        self._kind, self._groups, self._assign = kind, groups, assign
        self._ratios = [rate / base for rate in self._rates()] if base else []
        self._kept = self._rates()

    def set(self, rate: float) -> None:
        """Use `rate` from the next step on.

        Raises:
            JobError: the optimizer was built with a base rate of 0, or without one.
        """
        if not self._ratios:
            raise JobError(
                f"{self._kind} was built without a learning rate to compare its parameter groups "
                "with; give it lr=1.0"
            )
        for group, ratio in zip(self._groups(), self._ratios, strict=True):
            if isinstance(group["lr"], Real):
                group["lr"] = rate * ratio
            else:
                self._assign(group["lr"], rate * ratio)
        self.keep()

    def check(self, when: str) -> None:
        """Check that the rates and the number of groups are those last set or kept.

        Args:
            when: the moment, as in "in after_update of update 3".

        Raises:
            JobError: other code has changed them; the next `set` would overwrite that silently.
        """
        rates = self._rates()
        if len(rates) != len(self._kept):
            raise JobError(
                f"the optimizer had {len(self._kept)} parameter groups and has {len(rates)} now, "
                f"{when}; build it with all of them"
            )
        for group, (before, after) in enumerate(zip(self._kept, rates, strict=True)):
            if before != after:
                raise JobError(
                    f"lr of the optimizer's parameter group {group} was changed from {before} to "
                    f"{after} {when}, behind the engine's back, where it would have no effect: "
                    "each update sets the rate. Let the job define learning_rate(self, update) in "
                    "the place of a scheduler, or use schedule.*"
                )

    def keep(self) -> None:
        """Accept the rates as they are: a checkpoint, or the optimizer's own step, has set them."""
        self._kept = self._rates()

    def _rates(self) -> list[float]:
        return [float(group.get("lr") or 0.0) for group in self._groups()]
