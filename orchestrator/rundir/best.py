"""The best figure over the evaluations of a run: `train.keep_best`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import JobError, did_you_mean
from orchestrator.rundir.metrics import HELD_OUT


@dataclass(slots=True)
class BestFigure:
    """A figure over the evaluations of a run, and which of them is the best so far.

    Attributes:
        objective: `held_out.NAME`, of which the largest is best; the smallest with a minus first.
        updates: that the best evaluation came after; 0 before the first.
        value: of that one.
        without: how many evaluations followed it.
        judged: updates that the latest evaluation came after.
    """

    objective: str
    updates: int = 0
    value: float = math.nan
    without: int = 0
    judged: int = 0

    @property
    def name(self) -> str:
        """Return the name that the evaluation gives the figure."""
        return self.objective.removeprefix("-").removeprefix(HELD_OUT)

    def add(self, updates: int, figures: Mapping[str, Any]) -> None:
        """Add the next evaluation, after so many updates. One that is no number is never best.

        >>> best = BestFigure("-held_out.loss")
        >>> for updates, loss in enumerate((0.5, 0.3, 0.4, math.nan), 1):
        ...     best.add(updates, {"loss": loss})
        >>> best.updates, best.value, best.without
        (2, 0.3, 2)

        Raises:
            JobError: it has no such figure.
        """
        if self.name not in figures:
            known = did_you_mean(self.name, figures)
            raise JobError(
                f"train.keep_best={self.objective}: the evaluation after update {updates} gives no "
                f"'{self.name}'{known}"
            )
        self.judged = updates
        value = float(figures[self.name])
        sign = -1 if self.objective.startswith("-") else 1
        if math.isfinite(value) and not (sign * value <= sign * self.value):
            self.updates, self.value, self.without = updates, value, 0
        else:
            self.without += 1

    def to_json(self) -> dict[str, Any]:
        """Return it as result.json has it."""
        return {"figure": self.objective, "value": self.value, "updates": self.updates}


class BestSoFar:
    """The best figure of evaluations as a reader comes to them, some of them again after a restart.

    Args:
        objective: as `train.keep_best` has it.

    >>> best = BestSoFar("held_out.height")
    >>> for updates, height in ((2, 0.1), (4, 0.5), (6, 0.4), (4, 0.3), (6, 0.2)):
    ...     best.add(updates, {"height": height})
    >>> best.figure.updates, best.figure.value
    (4, 0.3)
    """

    def __init__(self, objective: str) -> None:
        # Each is better than all before it, so the last is the best, also without later ones.
        self._improvements: list[BestFigure] = []
        self._begin = BestFigure(objective)

    @property
    def figure(self) -> BestFigure:
        """Return the best; its `updates` are 0 before the first evaluation."""
        return self._improvements[-1] if self._improvements else self._begin

    def add(self, updates: int, figures: Mapping[str, Any]) -> None:
        """Add an evaluation after so many updates; it takes the place of those from there on."""
        while self.figure.updates >= updates:
            self._improvements.pop()
        figure = replace(self.figure)
        if figure.name in figures:  # the run itself fails where it is not
            figure.add(updates, figures)
        if figure.updates == updates:
            self._improvements.append(figure)
