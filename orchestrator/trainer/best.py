"""The best evaluation of a run: which checkpoint is kept for it, and when it is time to stop.

Rank 0 alone has all figures, and follows them in metrics.jsonl. So what it finds after an
evaluation is the same after a restart, on any number of ranks, and on a rank that takes its place.
The others receive its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.rundir.best import BestFigure
from orchestrator.rundir.metrics import Record
from orchestrator.rundir.warnings import warn


class BestCheckpoint:
    """The best evaluation as all ranks of one group know it. Its calls are collective.

    Args:
        patience: stop after so many evaluations without a better one; None: never.
        gather: of the engine.
        evaluations: so far, on rank 0; None on the others.
    """

    def __init__(
        self,
        objective: str,
        patience: int | None,
        checkpoints: CheckpointManager,
        gather: Callable[[Sequence[float]], list[list[float]]],
        evaluations: Iterable[Record] | None,
    ) -> None:
        self._patience, self._checkpoints, self._gather = patience, checkpoints, gather
        self.figure: BestFigure | None = None
        if evaluations is not None:
            self.figure = BestFigure(objective)
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
