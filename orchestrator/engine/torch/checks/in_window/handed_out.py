"""Whether an accumulator is given what `run.windows` hands out, each micro-batch once and no more.

Counting is enough: a window's micro-batches are taken in their order, each is followed by one
micro-step, and the boundary comes when all of them were there. Nothing is computed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.engine.api import BoundaryReport
from orchestrator.errors import JobError

_HOW = "each update is one turn of `for window in run.windows(...)`, ended by its boundary()"


class HandedOut:
    """One accumulator's part in the windows of `run.windows`.

    Args:
        stop: whether this rank was asked to stop; told at every boundary.

    Attributes:
        taken: micro-batches of this window that were handed out so far, in this pass over them.
        computed: micro-steps of this window.
        report: of the latest boundary.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop = stop
        self.taken = self.computed = 0
        self.report: BoundaryReport | None = None
        self._where: str | None = "before the first window"  # None within one
        self._update, self._leaves, self._total = -1, (), 0

    def begin(self, update: int, micro_batches: int, leaves: Sequence[int]) -> None:
        """A window begins, of so many micro-batches on this rank, with these leaves if any."""
        self._where, self._update, self._total = None, update, micro_batches
        self.taken = self.computed = 0
        self._leaves = leaves

    def need(self, call: str) -> None:
        """Raise `JobError` where `call` is not within a window."""
        if self._where is not None:
            raise JobError(f"{call} came {self._where} of run.windows(): {_HOW}")

    def told(self, call: str, *, last: bool, leaf: int | None) -> tuple[bool, int | None]:
        """What the micro-step that comes with `call` is: the window's `last`? Which `leaf`?

        Raises:
            JobError: it is not the next one, or was said to be another.
        """
        if self.taken == 0:
            raise JobError(
                f"{call} came before a micro-batch of update {self._update} was taken: `for "
                "micro_batch in window` hands them out"
            )
        if self.computed >= self.taken:
            raise JobError(
                f"{call} came twice for {self._named(self.taken)}, which would count twice: add "
                "the losses of the same samples up, and their weights once"
            )
        if self.computed < self.taken - 1:
            raise JobError(
                f"{call} came for {self._named(self.taken)}, but not for number "
                f"{self.computed + 1}, whose samples would be left out"
            )
        its_leaf = self._leaves[self.computed] if self._leaves else None
        is_last = self.taken == self._total
        if (last and not is_last) or leaf not in (None, its_leaf):
            raise JobError(
                f"{call} was told last={last} and leaf={leaf} for {self._named(self.taken)}; "
                "within run.windows() leave both out: it is known which one it is"
            )
        return is_last, its_leaf

    def count(self) -> None:
        """The micro-step was done."""
        self.computed += 1

    def whole(self) -> None:
        """The boundary comes. Raises `JobError` unless every micro-batch was computed."""
        if self.computed != self._total:
            raise JobError(
                f"boundary() came after {self.computed} of the {self._total} micro-batches that "
                f"this rank has in update {self._update}: the others' samples would be left out. "
                "Go through the window to its end (no break, no continue before backward())"
            )

    def ended(self, report: BoundaryReport) -> None:
        """The boundary is done."""
        self.report = report
        self._where = f"after boundary() of update {self._update} and before the next window"

    def over(self) -> None:
        """The loop asks for the next window. Raises `JobError` unless this one has ended."""
        if self._where is None:
            raise JobError(
                f"the loop left update {self._update} unfinished: {self.computed} of this rank's "
                f"{self._total} micro-batches were computed, and boundary() was not called"
            )

    def leave(self) -> bool:
        """No window comes any more. Gives whether this is in the middle of one."""
        within = self._where is None
        self._where = f"after the loop was left in update {self._update}"
        return within

    def _named(self, number: int) -> str:
        return f"micro-batch {number} of {self._total} of update {self._update}"
