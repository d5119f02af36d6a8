"""State machine of an accumulator's window: which call is legal when.

A window is open from its begin to its boundary. In between, gradients count only if their backward
is the accumulator's own or declared with `record`. Calls that would drop a gradient, count one
twice, or let ranks diverge are refused, with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from orchestrator.engine.api import BoundaryReport
from orchestrator.errors import JobError, words_of

_REMEDY = (
    "loss.backward() perhaps: call accumulator.backward(Loss(total, weight)) instead. Where "
    "other code runs it (a pipeline's schedule, say), call begin_window() before it and "
    "record(Loss(total, weight)) after it. Where its gradients are not to count (another model's "
    "loss flows through this one), call begin_window() after it, or freeze these parameters "
    "meanwhile"
)


class WindowState:
    """State of one accumulator's window.

    Args:
        names: of the trained parameters, for messages.
        ranks: how many take part.

    Attributes:
        update: the number of the window's update; -1 before the first.
        open: a window has begun and not ended.
        at_stake: what cannot go on if the call that runs fails now: "window", "accumulator", or ""
            where all ranks fail alike.
    """

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self._names, self._ranks = names, ranks
        self.update, self.open = -1, False
        self._inside: str | None = None  # the call that runs now
        self.at_stake = ""
        self._over = False  # this rank's last micro-step was there
        self._broken: str | None = None  # why this window cannot be ended
        self._unusable: str | None = None  # why this accumulator cannot go on
        self._stray: int | None = None  # a parameter that an undeclared backward reached
        self._recorded = False

    @property
    def unfinished(self) -> bool:
        """True if a boundary could end the window that is open."""
        return self.open and self._broken is None and self._unusable is None

    @contextmanager
    def within(self, call: str) -> Generator[None]:
        """Refuse other calls while `call` runs, from hooks and other threads alike.

        Raises:
            JobError: one runs, or none may any more.
        """
        if self._inside is not None:
            raise JobError(
                f"{call} was called while {self._inside} of the same accumulator ran, from another "
                "thread or a hook; one call at a time"
            )
        if self._unusable is not None:
            raise JobError(self._unusable)
        self._inside = call
        try:
            yield
        except BaseException as error:
            what = f"{type(error).__name__}: {words_of(error)}"
            if self.at_stake == "window":
                self._broken = f"one failed with {what.partition(chr(10))[0]}"
            elif self.at_stake == "accumulator" and self._ranks > 1:
                self._unusable = (
                    f"update {self.update} failed on this rank alone, so it is no longer in step "
                    f"with the others and has to end. What failed was {what}"
                )
            raise
        finally:
            self._inside, self.at_stake = None, ""

    def begin(self, update: int | None, micro_steps: int, *, implied_by: str | None) -> None:
        """Begin a window, from nothing.

        Args:
            update: its number; one more than the last by default.
            micro_steps: that were added since the last one began.
            implied_by: the call that begins it where none was begun.

        Raises:
            JobError: the window before it has gradients that no boundary took, or an undeclared
                backward came before the call.
        """
        if implied_by is not None and self._stray is not None:
            raise JobError(
                f"before {implied_by} a backward reached {self._names[self._stray]} outside of any "
                f"window, {_REMEDY}"
            )
        if self.open and self._broken is None and (micro_steps or self._recorded):
            raise JobError(
                f"begin_window() came in mid-window: update {self.update} has gradients already "
                f"({micro_steps} micro-steps counted), which would be lost; call boundary() first"
            )
        if update is not None:
            self.update = update
        elif not self.open:  # one that was begun and not used is begun once more
            self.update += 1
        self.open, self._over, self._recorded = True, False, False
        self._broken, self._stray = None, None

    def begin_backward(self, *, last: bool) -> None:
        """Begin a backward of the accumulator, `last` for this rank in this window.

        If the call fails from here on, gradients are incomplete and the window has to begin anew.

        Raises:
            JobError: the last one was there already, or one failed.
        """
        self._refuse_broken()
        if self._over:
            raise JobError(
                f"backward() came after the micro-step of update {self.update} that was marked "
                "last=True, whose gradients may be with the other ranks already: last=True belongs "
                "to a rank's last micro-step of the window, and leaving it out is always right"
            )
        self._over, self.at_stake = last, "window"

    def record(self) -> None:
        """Note a declared backward of other code. Raises `JobError` in a window that failed."""
        self._refuse_broken()
        self._recorded = True

    def end(self) -> None:
        """End the window at its boundary.

        If the call fails before `at_stake` is reset, it fails on this rank alone, which has to end.

        Raises:
            JobError: a backward was not declared, or one failed. The window stays as it is.
        """
        if self._stray is not None and not self._recorded and self._broken is None:
            self._broken = (
                f"a backward reached {self._names[self._stray]} without the accumulator's "
                f"knowledge, {_REMEDY}"
            )
        self._refuse_broken()
        self.open, self._stray, self.at_stake = False, None, "accumulator"

    def accepts(self, parameter: int) -> bool:
        """Return whether a gradient that has just come counts in this window.

        Raises:
            JobError: it came after this rank's last micro-step.
        """
        if not self.open:
            self._stray = parameter
            return False
        if self._inside is None:
            if self._over:
                raise JobError(
                    f"a backward reached {self._names[parameter]} after the micro-step of update "
                    f"{self.update} that was marked last=True, {_REMEDY}"
                )
            self._stray = parameter
        return True

    def close(self) -> None:
        """Refuse all further calls."""
        self._unusable = "this accumulator was closed; build another one for the model"

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise JobError(
                f"update {self.update} cannot be ended, since its gradients on this rank are not "
                f"those of its micro-steps: {self._broken}. begin_window() begins it anew, with "
                "all of this rank's micro-steps"
            )


# ------------------------------------------------------------------ Windows of `run.windows`
# Counting is enough: a window's micro-batches come in order, each is followed by one micro-step,
# and the boundary comes after all of them.


class MicroBatchTracker:
    """Progress of one accumulator through the windows of `run.windows`.

    Args:
        stop: whether this rank was asked to stop; sent at every boundary.

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
        """Begin a window with this rank's number of micro-batches, and its leaves if any."""
        self._where, self._update, self._total = None, update, micro_batches
        self.taken = self.computed = 0
        self._leaves = leaves

    def next_step(self, call: str, *, last: bool, leaf: int | None) -> tuple[bool, int | None]:
        """Return (last, leaf) of the micro-step that comes with `call`.

        Raises:
            JobError: it is not the next one, was said to be another, or is in no window.
        """
        self._require_window(call)
        if self.computed != self.taken - 1:
            raise JobError(
                f"{call} came for micro-step {self.computed + 1} of update {self._update}, but "
                f"{self.taken} of its {self._total} micro-batches were taken: take each from the "
                "window, and compute it once"
            )
        its_leaf = self._leaves[self.computed] if self._leaves else None
        is_last = self.taken == self._total
        if (last and not is_last) or leaf not in (None, its_leaf):
            raise JobError(
                f"{call} has last={last} and leaf={leaf} for micro-batch {self.taken} of "
                f"{self._total}; within run.windows() leave both out: it is known which one it is"
            )
        return is_last, its_leaf

    def _require_window(self, call: str) -> None:
        if self._where is not None:
            raise JobError(
                f"{call} came {self._where} of run.windows(): each update is one turn of `for "
                "window in run.windows(...)`, ended by its boundary()"
            )

    def require_complete(self) -> None:
        """Raise `JobError` unless every micro-batch of the window was computed."""
        self._require_window("boundary()")
        if self.computed != self._total:
            raise JobError(
                f"boundary() came after {self.computed} of the {self._total} micro-batches that "
                f"this rank has in update {self._update}: the others' samples would be left out. "
                "Go through the window to its end (no break, no continue before backward())"
            )

    def ended(self, report: BoundaryReport) -> None:
        """Note the boundary's report."""
        self.report = report
        self._where = f"after boundary() of update {self._update} and before the next window"

    def require_ended(self) -> None:
        """Raise `JobError` unless the present window has ended."""
        if self._where is None:
            raise JobError(
                f"the loop left update {self._update} unfinished: {self.computed} of this rank's "
                f"{self._total} micro-batches were computed, and boundary() was not called"
            )

    def leave(self) -> bool:
        """Return whether this is within a window; no further one comes."""
        within = self._where is None
        self._where = f"after the loop was left in update {self._update}"
        return within
