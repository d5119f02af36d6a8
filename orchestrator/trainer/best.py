"""The best evaluation of a run: which checkpoint is kept for it, and when it is time to stop.

Rank 0 alone has all figures, and follows them in metrics.jsonl. So what it finds after an
evaluation is the same after a restart, on any number of ranks, and on a rank that takes its place;
the others are told it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.client.checkpoints import Checkpoints
from orchestrator.errors import JobError, did_you_mean
from orchestrator.rundir.metrics import HELD_OUT, Record
from orchestrator.rundir.warnings import warn


@dataclass(slots=True)
class BestFigure:
    """A figure over the evaluations of a run, and which of them is the best so far.

    Attributes:
        stated: `held_out.NAME`, of which the largest is best; with a minus before it the smallest.
        updates: that the best evaluation came after; 0 before the first.
        value: of that one.
        without: how many evaluations followed it.
        judged: updates that the latest evaluation came after.
    """

    stated: str
    updates: int = 0
    value: float = math.nan
    without: int = 0
    judged: int = 0

    @property
    def name(self) -> str:
        """Return the name that the evaluation gives the figure."""
        return self.stated.removeprefix("-").removeprefix(HELD_OUT)

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
                f"train.keep_best={self.stated}: the evaluation after update {updates} gives no "
                f"'{self.name}'{known}"
            )
        self.judged = updates
        value = float(figures[self.name])
        sign = -1 if self.stated.startswith("-") else 1
        if math.isfinite(value) and not (sign * value <= sign * self.value):
            self.updates, self.value, self.without = updates, value, 0
        else:
            self.without += 1

    def to_json(self) -> dict[str, Any]:
        """Return it as result.json has it."""
        return {"figure": self.stated, "value": self.value, "updates": self.updates}


class BestCheckpoint:
    """What all ranks do about the best evaluation in one group. Its calls are collective.

    Args:
        patience: stop after so many evaluations without a better one; None: never.
        gather: of the engine.
        evaluations: so far, on rank 0; None on the others.
    """

    def __init__(
        self,
        stated: str,
        patience: int | None,
        checkpoints: Checkpoints,
        gather: Callable[[Sequence[float]], list[list[float]]],
        evaluations: Iterable[Record] | None,
    ) -> None:
        self._patience, self._checkpoints, self._gather = patience, checkpoints, gather
        self.figure: BestFigure | None = None
        if evaluations is not None:
            self.figure = BestFigure(stated)
            for record in evaluations:
                self.figure.add(record["update"] + 1, record["evaluation"])
            if self.figure.updates:  # the attempt before may have ended before it kept it
                checkpoints.keep_best(self.figure.updates)

    def judge(self, updates: int, figures: Mapping[str, float]) -> tuple[bool, bool]:
        """Judge the evaluation after so many updates; again, where a group broke meanwhile.

        Args:
            figures: on rank 0.

        Returns:
            Whether it is the best so far, and whether it is time to stop.
        """
        verdict = [0.0, 0.0]
        if (best := self.figure) is not None:
            if updates > best.judged:
                best.add(updates, figures)
                if not math.isfinite(float(figures[best.name])):
                    warn(f"{best.name} is no number after update {updates}: it is no improvement")
            improved = best.updates == updates
            if improved:
                self._checkpoints.keep_best(updates)
            patience = self._patience
            verdict = [improved, patience is not None and best.without >= patience]
        improved, stop = self._gather(verdict)[0]
        return bool(improved), bool(stop)
