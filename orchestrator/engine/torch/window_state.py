"""State machine of an accumulator's window: which call is legal when, and what must not change.

A window is open from its begin to its boundary. In between, gradients count only if their backward
is the accumulator's own or declared with `record`. Calls that would drop a gradient, count one
twice, or let ranks diverge are refused, with the remedy. In `run.windows`, `MicroBatchTracker` also
counts the micro-batches of the planned window (`plan/window.py`).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Self

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.api import TALKS_IN_WINDOW, AccumulationOptions, BoundaryReport
from orchestrator.engine.common.job_checks import NORMS_OF_LOOP, norm_advice
from orchestrator.engine.torch.buffers import Named
from orchestrator.engine.torch.group import BaseGroup, version_of
from orchestrator.engine.torch.model import ForwardState, batch_norms_of
from orchestrator.engine.torch.model_watch import warn_of_changed_buffers
from orchestrator.errors import JobError, SilenceError, error_text
from orchestrator.rundir.warnings import warn

_REMEDY = (
    "loss.backward() perhaps: call accumulator.backward(Loss(total, weight)) instead. Where "
    "other code runs it (a pipeline's schedule, say), call begin_window() before it and "
    "record(Loss(total, weight)) after it. Where its gradients are not to count (another model's "
    "loss flows through this one), call begin_window() after it, or freeze these parameters "
    "meanwhile"
)
_TRAINS, _TRAINING = attrgetter("requires_grad"), attrgetter("training")
_COUNTED = ("gloo", "threads")  # transports whose own count of collectives is known to be reliable


def shown_error() -> int:
    """Return the identity of the error that the interpreter has shown last.

    An interactive interpreter keeps it for good, so only another one than at the beginning says
    that something ended by it. No reference: its traceback would keep tensors alive.
    """
    return id(getattr(sys, "last_value", None))


class WindowState:
    """State of one accumulator's window.

    Args:
        named: all parameters of the model, trained or not.
        trained: those that are.
        optimizer, group, options: the accumulator's. With `options.silent` collectives on `group`
            are refused in a window; with `options.warn_about_layers` batch norms in training mode
            are warned of, once.

    Attributes:
        update: the number of the window's update; -1 before the first.
        tracked: its windows are those of `run.windows`.
        undeclared_factor: of the loss of another accumulator's backward that reached this one's
            parameters.
        mark: of the group's traffic at the window's start.
        open: a window has begun and not ended.
        error_breaks: what becomes unusable on this rank if the current call raises: "window",
            "accumulator", or "" where all ranks fail alike.
    """

    def __init__(
        self,
        model: Any,
        named: Named,
        trained: Named,
        optimizer: Optimizer,
        group: BaseGroup,
        options: AccumulationOptions,
    ) -> None:
        known = {id(parameter) for _, parameter in trained}  # tensors compare elementwise
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self._frozen = [(name, p) for name, p in named if id(p) not in known]
        self._layers = list(model.modules()) if isinstance(model, Module) else []
        self._norms = batch_norms_of(model) if options.warn_about_layers else {}
        # To compare buffers with at the first boundary.
        self._watched = model if options.warn_about_layers and self._layers else None
        self._before: ForwardState | None = None
        self._optimizer, self._group, self._silent = optimizer, group, options.silent
        self._stepped = self._stepped_now()
        self.update, self.open, self.micro_steps = -1, False, 0
        self.tracked, self.undeclared_factor = False, 1.0
        self._running_call: str | None = None  # the call that runs now
        self.error_breaks = ""
        self._last_done = False  # this rank's last micro-step was there
        self._broken: str | None = None  # why this window cannot be ended
        self._unusable: str | None = None  # why this accumulator cannot continue
        self._undeclared: int | None = None  # a parameter that an undeclared backward reached
        self.others_factor = 1.0  # of the loss of another accumulator's backward, while it runs
        # At the window's start, or its first micro-step.
        self._versions: list[int] = []
        self._settings: dict[str, Any] = {}
        self._agreed: dict[str, float] = {}
        self.mark, self._transport_mark = group.mark(), 0
        self.overlaps = False  # another accumulator's window was open on this group meanwhile
        self._shown_error = shown_error()  # at the window's start

    def within(self, call: str) -> Self:
        """Begin a call, and return the context that ends it: `with state.within(call):`.

        Within it other calls are refused, from hooks and other threads alike. Entered in every
        micro-step, so no generator.

        Raises:
            JobError: one runs, or none may any more.
        """
        if self._running_call is not None:
            raise JobError(
                f"{call} was called while {self._running_call} of the same accumulator ran, from "
                "another thread or a hook; one call at a time"
            )
        if self._unusable is not None:
            raise JobError(self._unusable)
        self._running_call = call
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            what = f"{type(error).__name__}: {error_text(error)}"
            if self.error_breaks == "window":
                self._broken = f"one failed with {what.partition(chr(10))[0]}"
            # One rank alone has no others to be out of step with.
            elif self.error_breaks == "accumulator" and self._group.size > 1:
                self._unusable = (
                    f"update {self.update} failed on this rank, so it may no longer be in step "
                    f"with the others and has to end. What failed was {what}"
                )
        self._running_call, self.error_breaks = None, ""

    def begin(self, update: int | None, *, implied_by: str | None) -> None:
        """Begin a window, from nothing, and its silence.

        Args:
            update: its number; one more than the last by default.
            implied_by: the call that begins it where none was begun.

        Raises:
            JobError: the window before it has gradients that no boundary took, an undeclared
                backward came before the call, a parameter was unfrozen, or the optimizer has other
                ones.
        """
        if implied_by is not None and self._undeclared is not None:
            raise JobError(
                f"before {implied_by} a backward reached {self._names[self._undeclared]} outside "
                f"of any window, {_REMEDY}"
            )
        if self.open and self._broken is None and self.micro_steps:
            raise JobError(
                f"begin_window() came in mid-window: update {self.update} has gradients already "
                f"({self.micro_steps} micro-steps counted), which would be lost; call boundary() "
                f"first"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise JobError(
                    f"parameter {name} began to require gradients after the accumulator was built: "
                    "let it require them from the start, and compute with it under torch.no_grad() "
                    "until now (what has no gradient is not stepped), or build another accumulator"
                )
        self._check_stepped()
        if update is not None:
            self.update = update
        elif not self.open:  # one that was begun and not used is begun once more
            self.update += 1
        self.open, self._last_done, self.micro_steps = True, False, 0
        self._shown_error = shown_error()
        self._broken, self._undeclared, self.undeclared_factor = None, None, 1.0
        # Until the accumulator has begun, too: its buffers may hold the gradient of the last one.
        self.error_breaks = "window"
        if any(map(_TRAINING, self._norms.values())):
            norms, self._norms = list(self._norms), {}
            advice = norm_advice(norms, apart=self._group.size > 1, remedy=NORMS_OF_LOOP)
            warn(advice, depth=3)  # of who calls backward() or begin_window()
        if self._watched is not None:
            self._before, self._watched = ForwardState(self._watched, extra=False), None
        self._versions, self._settings = list(map(version_of, self._parameters)), {}
        # As numbers, since they travel in the trailer.
        trains = bytes(map(_TRAINS, self._parameters))
        self._agreed = {
            "the number of the update": self.update,
            "the digest of which parameters are frozen": float(zlib.crc32(trains)),
            "the number of layers in training mode": float(sum(map(_TRAINING, self._layers))),
        }
        self.overlaps = False
        # Both count each other's collectives on this group, so neither can check its silence.
        for other in self._group.open_windows:
            if other is not self:
                self.overlaps = other.overlaps = True
        self._group.open_windows.add(self)
        self.mark = self._group.mark()
        self._transport_mark = self._group.transport_collectives() or 0
        self.be_silent()

    def begin_micro_step(self, *, last: bool = False, recorded: bool = False) -> None:
        """Begin a backward of the accumulator, or note one of other code.

        If the call fails from here on, gradients are incomplete and the window has to begin anew.

        Args:
            last: it is this rank's last in this window.
            recorded: it ran already.

        Raises:
            JobError: the last one was there already, or one failed.
        """
        if self._broken is not None:
            raise self._broken_error()
        # At the first micro-step: a scheduler may still step after begin_window().
        if not self._settings:
            self._settings = self._settings_now()
        if self._last_done and not recorded:
            raise JobError(
                f"backward() came after the micro-step of update {self.update} that was marked "
                "last=True, whose gradients may be with the other ranks already: last=True belongs "
                "to a rank's last micro-step of the window, and leaving it out is always right"
            )
        self.micro_steps += 1
        if recorded:
            self._undeclared = None  # declared by this call
        else:
            self._last_done, self.error_breaks = last, "window"

    def note_undeclared(self, parameter: int) -> None:
        """Note a gradient that comes while no backward of the accumulator runs.

        Raises:
            JobError: it came after this rank's last micro-step.
        """
        if self.open and self._last_done:
            raise JobError(
                f"a backward reached {self._names[parameter]} after the micro-step of update "
                f"{self.update} that was marked last=True, {_REMEDY}"
            )
        self._undeclared = parameter
        if self.others_factor != 1.0:
            self.undeclared_factor = self.others_factor

    def note_factor(self, factor: float) -> None:
        """Let other open windows of the group know by what this one's next loss is multiplied."""
        for other in self._group.open_windows:
            other.others_factor = 1.0 if other is self else factor

    def end(self) -> dict[str, float]:
        """End the window and its silence at its boundary.

        If the call fails before `error_breaks` is reset, this rank may fail alone, and has to end.

        Returns:
            Numbers, with their names, that have to be the same on all ranks.

        Raises:
            JobError: a backward was not declared, or one failed: the window stays as it is. Or a
                parameter or a setting of the optimizer was changed in between.
            SilenceError: the transport counted collectives that did not go through our group.
        """
        if self._undeclared is not None and self._broken is None:
            self._broken = (
                f"a backward reached {self._names[self._undeclared]} without the accumulator's "
                f"knowledge, {_REMEDY}"
            )
        if self._broken is not None:
            raise self._broken_error()
        self.open, self._undeclared, self.error_breaks = False, None, "accumulator"
        self._leave_group()
        # torch counts writes in place, so a changed weight shows without reading any number.
        versions = list(map(version_of, self._parameters))
        if versions != self._versions:
            both = zip(self._names, versions, self._versions, strict=True)
            changed = next(name for name, now, before in both if now != before)
            raise JobError(
                f"parameter {changed} was changed in mid-window of update {self.update}; weights "
                "change at boundaries only, by the optimizer"
            )
        if self._silent and not self.overlaps and self._group.transport in _COUNTED:
            sent = self._group.since(self.mark).collectives
            counted = self._group.transport_collectives()
            if counted is not None and (more := counted - self._transport_mark - sent):
                raise SilenceError(
                    f"{more} collectives ran on this process group in mid-window of "
                    f"update {self.update}, besides the {sent} of the gradient's own reduction. "
                    f"Move them behind boundary(), or {TALKS_IN_WINDOW}"
                )
        self._check_stepped()
        before, self._before = self._before, None
        split = self._group.size > 1 or self.micro_steps > 1
        if split and before is not None:
            warn_of_changed_buffers(before, "after boundary()", depth=2)
        now = self._settings_now()
        for setting, before in self._settings.items():
            if now.get(setting) != before:
                raise JobError(
                    f"{setting} was changed in mid-window of update {self.update}: it would count "
                    "for all of its micro-steps, or for none. A scheduler's step() comes after "
                    "boundary(), once an update"
                )
        # Some have none. One that is kept on a device is not looked at, as that would wait.
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        first, *others = [0.0 if isinstance(r, Tensor) or r is None else r for r in rates]
        agreed = {**self._agreed, "the learning rate": first}
        if others:
            name = "the digest of the learning rates of further parameter groups"
            agreed[name] = float(zlib.crc32(repr(others).encode()))
        return agreed

    def _leave_group(self) -> None:
        self._group.open_windows.discard(self)
        self._group.silence = None

    def silence_others(self) -> None:
        """Return to the silence of other open windows, after a boundary."""
        for other in self._group.open_windows:
            other.be_silent()

    def be_silent(self) -> None:
        """Refuse collectives of others on the group from now on."""
        if self._silent:
            self._group.silence = f"in mid-window of update {self.update}"

    def _stepped_now(self) -> list[int]:
        """Return the identities of the parameters that the optimizer steps."""
        return [id(p) for group in self._optimizer.param_groups for p in group["params"]]

    def _check_stepped(self) -> None:
        if self._stepped_now() != self._stepped:
            raise JobError(
                "the optimizer was given other parameters after the accumulator was built, by "
                "add_param_group() say, whose gradients it would not reduce; close() the "
                "accumulator, and build another one"
            )

    def _settings_now(self) -> dict[str, Any]:
        """Return the optimizer's settings; of a tensor its identity and version, which takes no
        wait for its device.
        """
        settings: dict[str, Any] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, Tensor):
                    value = id(value), version_of(value)  # noqa: PLW2901
                if name != "params":
                    settings[f"{name} of the optimizer's parameter group {number}"] = value
        return settings

    def warn_if_unfinished(self) -> None:
        """Warn of micro-steps without a boundary, when the accumulator is collected."""
        usable = self.open and self._broken is None and self._unusable is None
        # An exception that ends the program explains it better.
        ended = sys.exc_info()[1] is not None or shown_error() != self._shown_error
        if usable and self.micro_steps and not ended:
            sys.stderr.write(
                f"warning: micro-steps of update {self.update} ({self.micro_steps}) were "
                "accumulated and trained nothing: boundary() was not called after them\n"
            )

    def close(self) -> None:
        """Refuse all further calls, and end the window's silence."""
        self._unusable = "this accumulator was closed; build another one for the model"
        if self in self._group.open_windows:
            self._leave_group()
            self.silence_others()

    def _broken_error(self) -> JobError:
        again = "begin_window() begins it anew, with all of this rank's micro-steps"
        if self.tracked:
            again = "Let it end this rank: the next start goes on from the newest checkpoint"
        return JobError(
            f"update {self.update} cannot be ended, since its gradients on this rank are not "
            f"those of its micro-steps: {self._broken}. {again}"
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
        computed: micro-steps of it so far.
        samples: of the micro-batch that was taken last.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop_requested = stop
        self.taken = self.computed = self.samples = 0
        self.report: BoundaryReport | None = None
        self._where: str | None = "before the first window"  # None within one
        self._update, self._total = -1, 0
        self._boundary_called = False
        self._leaves: Sequence[int | None] = ()

    def begin(self, update: int, leaves: Sequence[int | None]) -> None:
        """Begin a window with one leaf, or None, for each of this rank's micro-batches."""
        self._where, self._update, self._total = None, update, len(leaves)
        self.taken = self.computed = 0
        self._boundary_called = False
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
        its_leaf = self._leaves[self.computed]
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
        self._boundary_called = True

    def ended(self, report: BoundaryReport) -> None:
        """Note the boundary's report."""
        self.report = report
        self._where = f"after boundary() of update {self._update} and before the next window"

    def require_ended(self) -> None:
        """Raise `JobError` unless the present window has ended."""
        if self._where is None:
            called = "failed" if self._boundary_called else "was not called"
            raise JobError(
                f"the loop left update {self._update} unfinished: {self.computed} of this rank's "
                f"{self._total} micro-batches were computed, and boundary() {called}"
            )

    def leave(self) -> bool:
        """Return whether this is within a window; no further one comes."""
        within = self._where is None
        self._where = f"after the loop was left in update {self._update}"
        return within
