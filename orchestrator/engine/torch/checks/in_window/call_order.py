"""Where an accumulator is in its window, and what may not be called there.

A window is open from its begin to its boundary. In between, gradients count only if their backward
was told of: the accumulator's own, or one that `record` speaks for. Whatever would leave a gradient
out, count one twice, or let ranks part in silence is refused here, with the way out.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from orchestrator.errors import JobError, words_of

_TOLD = (
    "loss.backward() perhaps: call accumulator.backward(Loss(total, weight)) instead. Where "
    "somebody else runs it (a pipeline's schedule, say), call begin_window() before it and "
    "record(Loss(total, weight)) after it. Where its gradients are not to count (another model's "
    "loss flows through this one), call begin_window() after it, or freeze these parameters "
    "meanwhile"
)


class WindowState:
    """The calls on one accumulator, in their order.

    Args:
        names: of the trained parameters, for messages.
        ranks: how many take part.

    Attributes:
        update: the number of the window's update; -1 before the first.
        open: a window has begun and not ended.
    """

    def __init__(self, names: Sequence[str], ranks: int) -> None:
        self._names, self._ranks = names, ranks
        self.update, self.open = -1, False
        self._inside: str | None = None  # the call that runs now
        self._over = False  # this rank's last micro-step was there
        self._broken: str | None = None  # why this window cannot be ended
        self._parted: str | None = None  # why this accumulator cannot go on
        self._untold: int | None = None  # a parameter that a backward reached untold
        self._recorded = False
        self._process = os.getpid()

    @property
    def unfinished(self) -> bool:
        """Whether a boundary could end the window that is open."""
        return self.open and self._broken is None and self._parted is None

    @contextmanager
    def within(self, call: str) -> Generator[None]:
        """While `call` runs no other may, neither from a hook nor from another thread.

        Raises:
            JobError: one runs, or none may any more.
        """
        if self._inside is not None:
            raise JobError(
                f"{call} was called while {self._inside} of the same accumulator ran, from another "
                "thread or a hook; one call at a time"
            )
        if self._parted is not None:
            raise JobError(self._parted)
        if os.getpid() != self._process:
            raise JobError(
                f"{call} was called in another process than the one that built the accumulator (a "
                "fork of it): ranks know each other by their processes. Start the ranks first, "
                "and build the accumulator in each"
            )
        if torch.is_inference_mode_enabled():
            raise JobError(
                f"{call} was called under torch.inference_mode(), where nothing can be trained: "
                "end that block before"
            )
        self._inside = call
        try:
            yield
        finally:
            self._inside = None

    # ------------------------------------------------------------------ what is called

    def begin(self, update: int | None, micro_steps: int) -> None:
        """A window begins, from nothing.

        Args:
            update: its number; one more than the last by default.
            micro_steps: that were added since the last one began.

        Raises:
            JobError: the window before it has gradients that no boundary took.
        """
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
        self._broken, self._untold = None, None

    def untold_before(self, call: str) -> None:
        """A window begins by itself, with `call`: nothing may have come before it.

        Raises:
            JobError: a backward that nobody told of did.
        """
        if self._untold is not None:
            raise JobError(
                f"before {call} a backward reached {self._names[self._untold]} outside of any "
                f"window, {_TOLD}"
            )

    @contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        """A backward of the accumulator's own runs. `last`: this rank's in this window.

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
        try:
            yield
        except BaseException as error:
            first_line = words_of(error).partition("\n")[0]
            self._broken = f"one failed with {type(error).__name__}: {first_line}"
            raise
        self._over = last

    def record(self) -> None:
        """Somebody else's backward was told of. Raises `JobError` in a window that failed."""
        self._refuse_broken()
        self._recorded = True

    def end(self) -> None:
        """The boundary is reached, and the window over.

        Raises:
            JobError: a backward was not told of, or one failed. The window stays as it is.
        """
        if self._untold is not None and not self._recorded and self._broken is None:
            self._broken = (
                f"a backward reached {self._names[self._untold]} without the accumulator's "
                f"knowledge, {_TOLD}"
            )
        self._refuse_broken()
        self.open, self._untold = False, None

    @contextmanager
    def alone(self) -> Generator[None]:
        """What fails in here fails on this rank alone, so it cannot go on beside the others."""
        try:
            yield
        except BaseException as error:
            if self._ranks > 1:
                self._parted = (
                    f"update {self.update} failed on this rank alone, so it is no longer in step "
                    f"with the others and has to end. What failed was {type(error).__name__}: "
                    f"{words_of(error)}"
                )
            raise

    # ------------------------------------------------------------------ gradients

    def arrived(self, parameter: int) -> bool:
        """Whether a gradient that has just come counts in this window.

        Raises:
            JobError: it came after this rank's last micro-step.
        """
        if not self.open:
            self._untold = parameter
            return False
        if self._inside is None:
            if self._over:
                raise JobError(
                    f"a backward reached {self._names[parameter]} after the micro-step of update "
                    f"{self.update} that was marked last=True, {_TOLD}"
                )
            self._untold = parameter
        return True

    def close(self) -> None:
        """Nothing may be called any more."""
        self._parted = "this accumulator was closed; build another one for the model"

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise JobError(
                f"update {self.update} cannot be ended, since its gradients on this rank are not "
                f"those of its micro-steps: {self._broken}. begin_window() begins it anew, with "
                "all of this rank's micro-steps"
            )
